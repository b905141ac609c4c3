"""What the oracles that compare rows share: turning a wrong row into a violation."""

from __future__ import annotations

from oracles.account import Account, Compared
from oracles.ledger import Moment
from oracles.reference import key_of, solo
from oracles.verdict import Check, Violation
from subjects.contracts import rule
from subjects.scenario import OP_NAMES, OP_TYPES, Op

DOUBT = "between noise and error"
NAME_OF: dict[type[Op], str] = dict(zip(OP_TYPES, OP_NAMES, strict=True))


def shaper_name(account: Account, row: Compared) -> str:
    """Name of the last operation other than a decode in the row's history, or "decode"."""
    shaper = account.shaper(row.claim)
    return NAME_OF[type(shaper[0])] if shaper else "decode"


# What an operation promises of the history that it leaves, and what it promises when it was refused.
_STATE = {
    "decode": "decode.success",
    "draft": "decode.success",
    "save": "save.state",
    "save_all": "save_all.state",
    "restore": "restore.state",
    "restore_all": "restore_all.state",
    "seq_rm": "seq_rm.removed",
    "seq_cp": "seq_cp.copied",
    "seq_keep": "seq_keep.others",
    "seq_add": "seq_add.moved",
    "seq_div": "seq_div.divided",
    "clear": "clear.empty",
    "reopen": "reopen.empty",
}
_REFUSED = {name: f"{name}.refused-clean" for name in ("restore", "restore_all", "seq_rm")}


def state_rule(account: Account, row: Compared) -> str:
    """What the contract table says of the operation that shaped the row's history last."""
    shaper = account.shaper(row.claim)
    return promised(shaper[1] if shaper else None)


def promised(m: Moment | None, without: Moment | None = None) -> str:
    """What the contract table says of a moment that shaped a history; where there is none, of `without`, or of decodes
    that succeed.
    """
    if m is None:
        return rule(_STATE[NAME_OF[type(without.op)]] if without else "decode.success")
    name = NAME_OF[type(m.op)]
    if m.step.batches:  # a decode shapes a history where it did not end well
        return rule("decode.fatal" if (m.step.rc or 0) < -1 else "decode.aborted")
    return rule(_REFUSED[name] if name in _REFUSED and not m.step.rc else _STATE[name])


def clear_of_doubt(rows: list[Compared], *, hidden: bool = False) -> tuple[int, tuple[str, ...]]:
    """How many rows are right or wrong, and the reasons why the others are neither."""
    if hidden:
        reasons = [r.hidden_unjudged or DOUBT for r in rows if r.hidden_unjudged or r.hidden_ambiguous]
    else:
        reasons = [DOUBT for r in rows if r.ambiguous]
    return len(rows) - len(reasons), tuple(reasons)


def suspects(account: Account, row: Compared) -> tuple[int, ...]:
    """Operations that may have broken a row: those of its own history, else all that were no decodes, latest first."""
    own = tuple(reversed(row.claim.shaped)) if account.shaper(row.claim) else ()
    if own:
        return own
    return tuple(
        m.step.op
        for m in reversed(account.ledger.moments)
        if not m.step.batches and m.step.op < row.claim.step and m.touched
    )


def row_violation(
    oracle: str, account: Account, row: Compared, *, key: str, rule: str, because: str, hidden: bool = False
) -> Violation:
    """A violation that a reproducer shows by comparing one row with its solo reference."""
    c = row.claim
    reference = solo(account.ledger.scenario.model, *key_of(c))
    band = row.hidden_band if hidden else row.band
    check = Check(
        kind="rows", step=c.step, seq=c.seq, row=c.row, ref_row=c.ref_row, band=band, hidden=hidden, reference=reference
    )
    return Violation(
        oracle=oracle,
        key=key,
        rule=rule,
        because=because,
        check=check,
        error=row.hidden_error if hidden else row.error,
        band=band,
        nmse=row.nmse,
        suspects=suspects(account, row),
        rungs=() if hidden else (*state_rung(account, row), band_rung(row), tie_rung(row)),
    )


def state_rung(account: Account, row: Compared) -> tuple[str, ...]:
    """What the last judged state of the row's sequence says; nothing where none was saved."""
    told = account.state_rung(row.claim.seq, row.claim.step)
    return (told,) if told else ()


def band_rung(row: Compared) -> str:
    """The error against honest differences."""
    ratio = row.error / row.band if row.band else float("inf")
    return f"band: off by {row.error:.3g}, honest differences here stay below {row.band:.2g} ({ratio:,.0f} times)"


def tie_rung(row: Compared) -> str:
    """Whether a different greedy token is more than a near tie."""
    if row.token == row.expected:
        return "near tie: the greedy token is the same"
    near = "a near tie, no divergence" if not row.other_token else "no near tie"
    return f"near tie: the reference prefers token {row.expected} to {row.token} by {row.gap:.3g}, {near}"


def twin_rung(difference: float | None, band: float) -> str:
    """The row against the same program without what did not survive."""
    if difference is None:
        return "twin: none, because other sequences went through more than decodes or the history was edited"
    if difference <= band:
        return (
            f"twin: off by {difference:.3g}, the same batches alone give the same row: the decodes are at fault, not "
            f"what was left out"
        )
    return f"twin: off by {difference:.3g} from the same batches without what did not survive, a state error"


def where(account: Account, row: Compared) -> str:
    """The row in words."""
    c = row.claim
    return f"the row of sequence {c.seq} at position {c.pos} (operation {c.step}, after {shaper_name(account, row)})"
