"""What the oracles of drivers share: which of them a wrong claim belongs to, and how it becomes a violation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Literal

from oracles.account import Account
from oracles.base import Oracle
from oracles.drive import Driven, Held, key_of, program
from oracles.lines import LEARNS
from oracles.rows import NAME_OF
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import Accept, ContextParams, Decode, Op, Propose, Rewind, SeqRm, Verify

Owner = Literal[
    "pending_row", "verify_rows", "redraft", "driver_isolation", "driver_contract", "round_drafts", "drafting"
]
DOUBT = "between noise and error"


def shaper(account: Account, held: Held) -> tuple[int, Op] | None:
    """The last operation other than decodes and drafts that the sequence went through."""
    shaped = held.claim.line.shaped
    return (shaped[-1], account.ledger.scenario.ops[shaped[-1]]) if shaped else None


def fresh_start(account: Account, held: Held) -> bool:
    """The conversation has just begun, or began in a place where a driver that learns has learnt from another one."""
    found = shaper(account, held)
    learns = account.driven is not None and account.driven.driver.kind in LEARNS
    again = learns and found is not None and isinstance(found[1], SeqRm) and found[1].lo.at == "open"
    return again or not held.claim.line.history.length


def alone_since(account: Account, held: Held) -> int | None:
    """The step since which only other sequences were worked on, None where the sequence was too, or nobody was.

    That is where it was seen to be right as it stands, or its last decode, when what came since put another sequence
    back: a decode leaves the driver with a row of its own.
    """
    assert account.driven is not None
    c = held.claim
    seen_right = [
        h.claim.step
        for h in account.driven.held
        if h.claim.seq == c.seq
        and h.claim.step < c.step
        and h.claim.line.shaped == c.line.shaped
        and h.claim.line.history.length == c.line.history.length
        and h.claim.line.tokens == c.line.tokens
        and not h.wrong
        and not h.ambiguous
    ]
    own = [m.step.op for m in account.ledger.moments if m.step.op < c.step and c.seq in m.touched]
    work = [m for m in account.ledger.moments if m.step.op < c.step and not isinstance(m.op, Propose)]
    last = account.ledger.moments[own[-1]].op if own else None
    if seen_right:
        since = seen_right[-1]
        others = [m for m in work if m.step.op > since]
        return since if any(m.touched for m in others) and not any(c.seq in m.touched for m in others) else None
    if not isinstance(last, Decode) or not held.row_wrong or c.line.unoffered:
        return None
    mine = [m.step.op for m in work if c.seq in m.touched]
    put_back = [m for m in work if mine and m.step.op > mine[-1] and isinstance(m.op, Rewind) and m.op.seq != c.seq]
    return mine[-1] if put_back else None


def owner(account: Account, held: Held) -> Owner:
    """The oracle that a wrong claim belongs to: the most specific thing that can be said of how it came to be."""
    line = held.claim.line
    if alone_since(account, held) is not None or fresh_start(account, held):
        return "driver_isolation"
    found = shaper(account, held)
    if line.unoffered or line.was_cut:
        return "driver_contract"
    if found is None:
        return "drafting"
    _, op = found
    if isinstance(op, SeqRm):
        return "driver_contract" if op.lo.at != "open" else "drafting"
    if isinstance(op, Accept):
        return "verify_rows" if line.rewound_open(account.ledger.scenario.ops) else "round_drafts"
    if isinstance(op, Rewind):
        if not held.row_wrong:
            return "redraft"
        # a row that was processed since is none of the checkpoint's
        return "pending_row" if as_put_back(account, held) else "drafting"
    return "round_drafts" if isinstance(op, Verify) else "drafting"


def as_put_back(account: Account, held: Held) -> bool:
    """Nothing was processed since the last restore."""
    c, found = held.claim, shaper(account, held)
    after = next((m.after.get(c.seq) for m in account.ledger.moments if found and m.step.op == found[0]), None)
    return getattr(after, "length", -1) == c.line.history.length


def params_at(account: Account, step: int) -> ContextParams:
    """Parameters of the context in which a step ran."""
    return account.ledger.moments[step].params


def words(tokens: Iterable[int]) -> str:
    """Tokens in a sentence."""
    return ", ".join(map(str, tokens)) or "nothing"


def seen(held: Held) -> str:
    """What is wrong, in words."""
    c = held.claim
    if held.misplaced:
        what = "none" if c.pos < 0 else f"position {c.pos}"
        return f"the draft's memory must get a row at position {c.want_pos} first, but it gets {what}"
    if held.row_wrong:
        return (
            f"the token at position {c.want_pos} is paired with a hidden row that is off by {held.row_error:.3g} "
            f"(honest differences here stay below {held.row_band:.2g})"
        )
    if held.tokens_wrong:
        return f"it drafts {words(c.drafts)}, a clean context drafts {words(held.expected)}" + (
            f" and prefers its own token by {held.gap:.3g}" if math.isfinite(held.gap) else ""
        )
    return (
        f"{held.changed} of {len(c.given.logits)} draft logit rows differ, by {held.error:.3g} at most (honest "
        f"differences here stay below {held.band:.2g})"
    )


def put_back(account: Account, held: Held) -> str:
    """What the last restore put back, in words."""
    found = shaper(account, held)
    parts = found[1].parts if found and isinstance(found[1], Rewind) else ()
    return f"{', '.join(parts) or 'nothing'} of the checkpoint"


def what(held: Held) -> Literal["row", "tokens", "logits"]:
    """Which observable is wrong."""
    return "row" if held.row_wrong else "tokens" if held.tokens_wrong else "logits"


def where(account: Account, held: Held) -> str:
    """The claim in words."""
    c, found = held.claim, shaper(account, held)
    after = f" after operation {found[0]} ({NAME_OF[type(found[1])]})" if found else ""
    doing = "drafts" if c.last >= 0 else "goes on"
    return f"sequence {c.seq} {doing} behind {c.line.history.length} tokens in operation {c.step}{after}"


def violation(
    oracle: str,
    account: Account,
    held: Held,
    *,
    key: str,
    clause: str,
    because: str,
    kind: Literal["fault", "contract"] = "fault",
    suspects: tuple[int, ...] | None = None,
) -> Violation:
    """A violation that a reproducer shows by comparing one draft with that of a clean target, draft and driver."""
    c = held.claim
    scenario = account.ledger.scenario
    reference = None
    if c.line.history.length:
        reference = program(scenario.model, key_of(c, scenario, params_at(account, c.step)))
    row = held.row_wrong
    check = Check(
        kind="draft",
        step=c.step,
        seq=c.seq,
        what=what(held),
        expected=held.expected,
        band=held.row_band if row else held.band,
        reference=reference,
    )
    error = held.row_error if row else held.error
    band = held.row_band if row else held.band
    return Violation(
        oracle=oracle,
        key=key,
        rule=rule(clause),
        because=because,
        check=check,
        kind=kind,
        error=0.0 if math.isnan(error) else error,
        band=band,
        nmse=held.nmse,
        suspects=tuple(reversed(c.line.shaped)) if suspects is None else suspects,
        rungs=rungs(held),
    )


def rungs(held: Held) -> tuple[str, ...]:
    """What the verdict stands on."""
    lines = []
    if not math.isnan(held.row_error):
        ratio = held.row_error / held.row_band if held.row_band else float("inf") if held.row_error else 0.0
        lines.append(
            f"paired row: off by {held.row_error:.3g}, honest differences stay below {held.row_band:.2g} "
            f"({ratio:,.0f} times)"
        )
    if held.claim.last >= 0 and len(held.claim.given.logits):
        ratio = held.error / held.band if held.band else float("inf") if held.error else 0.0
        lines.append(
            f"draft logits: {held.changed} of {len(held.claim.given.logits)} rows changed, by {held.error:.3g} at "
            f"most, honest differences stay below {held.band:.2g} ({ratio:,.0f} times)"
        )
    if held.at >= 0:
        tie = "no near tie" if held.tokens_wrong else "a near tie, no divergence"
        lines.append(f"draft tokens: number {held.at} differs, {tie}")
    return tuple(lines)


class DraftOracle(Oracle):
    """Base of the oracles that judge claims on drafts; each says which claims are its own."""

    driver = True

    @abstractmethod
    def mine(self, account: Account, held: Held) -> bool:
        """Whether a claim, right or wrong, is one that this oracle speaks of."""

    @abstractmethod
    def violated(self, account: Account, held: Held) -> Violation:
        """The violation of a wrong claim."""

    def judge(self, account: Account) -> Verdict:
        """Judge every claim of its own."""
        driven: Driven | None = account.driven
        if driven is None:
            return Verdict(oracle=self.name, unknown=("there is no driver",))
        mine = [h for h in driven.held if self.mine(account, h)]
        unknown = [DOUBT for h in mine if h.ambiguous]
        wrong = [h for h in mine if h.wrong and owner(account, h) == self.name]
        return Verdict(
            oracle=self.name,
            violations=tuple(self.violated(account, h) for h in wrong),
            # what another one speaks of was not found right by this one
            compared=sum(not h.ambiguous and (not h.wrong or h in wrong) for h in mine),
            unknown=(*unknown, *driven.drive.unknown, *driven.unjudged) if self.name == "drafting" else tuple(unknown),
        )
