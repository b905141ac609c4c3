"""Isolation: a sequence that no operation touched keeps its positions, its saved bytes and its continuation."""

from __future__ import annotations

from oracles.account import Account, Compared
from oracles.base import Oracle, OracleFailure
from oracles.expect import position_error
from oracles.ledger import History
from oracles.observe import NEIGHBOUR_SLOT
from oracles.rows import NAME_OF, clear_of_doubt, row_violation, where
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import Save

# What the contract table says of sequences that an operation does not name.
CLAUSE = {
    "save": "save.pure",
    "save_all": "save_all.pure",
    "ask": "ask.pure",
    "corrupt": "corrupt.harmless",
    "seq_keep": "seq_keep.others",
    # these work on every sequence that there is, which in an earlier context may have been fewer
    "clear": "clear.empty",
    "reopen": "reopen.empty",
    "restore_all": "restore_all.state",
}


def _rule(name: str) -> str:
    return f"{rule(CLAUSE.get(name, f'{name}.isolation'))}; a sequence that was not named has changed"


class IsolationFailure(OracleFailure):
    """A neighbour changed."""


class Isolation(Oracle):
    """Neighbours of every operation. Their saved bytes are compared by the saves that `oracles.observe` puts around
    operations.
    """

    name = "isolation"
    title = "isolation of sequences"
    failure = IsolationFailure
    rank = 3
    observations = frozenset({"continue", "neighbour-blobs"})

    def judge(self, account: Account) -> Verdict:
        """Judge positions after each operation, paired blobs, and continuations of sequences that only ever were
        decoded.
        """
        bad: list[Violation] = []
        compared = 0
        for m in account.ledger.moments:
            if not m.step.done or m.step.skipped:
                continue
            for s, state in m.before.items():
                if s in m.touched or s >= len(m.step.pos) or s >= len(m.pos_before):
                    continue
                compared += isinstance(state, History)  # of others nothing is known
                before, after = m.pos_before[s], m.step.pos[s]
                # cells behind a sliding window may go at any time, so what counts is whether the positions are still
                # right
                if (
                    before != after
                    and position_error(state, m.facts, before) is None
                    and position_error(state, m.facts, after) is not None
                ):
                    name = NAME_OF[type(m.op)]
                    because = (
                        f"Operation {m.step.op} ({name}) works on {_names(m.touched)}, so sequence {s} must keep "
                        f"positions {before}; "
                        f"but it has {after} afterwards."
                    )
                    check = Check(kind="positions", step=m.step.op, seq=s, expected=before)
                    bad.append(
                        Violation(
                            oracle=self.name,
                            key=f"isolation:positions:{name}",
                            rule=_rule(name),
                            because=because,
                            check=check,
                        )
                    )
        found, n = self._blobs(account)
        bad.extend(found)
        compared += n
        worked = account.worked()
        judged: list[Compared] = []
        for r in account.compared if worked else ():
            c = r.claim
            right = account.right_since(c) if c.shaped else -1
            if right is None:
                continue
            others = [NAME_OF[type(op)] for i, touched, op in worked if right < i < c.step and c.seq not in touched]
            if not others:
                continue
            judged.append(r)
            if r.wrong:
                past = (
                    f"gave a right row in operation {right} and was only decoded into since"
                    if c.shaped
                    else "was only ever decoded into"
                )
                because = (
                    f"Sequence {c.seq} {past}, so {where(account, r)} must be what a clean "
                    f"context gives; but its "
                    f"logits are off by up to {r.error:.3g} after {', '.join(others)} on other sequences."
                )
                key = f"isolation:continuation:{others[-1]}"
                bad.append(row_violation(self.name, account, r, key=key, rule=_rule(others[-1]), because=because))
        n, unknown = clear_of_doubt(judged)
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared + n, unknown=unknown)

    def _blobs(self, account: Account) -> tuple[list[Violation], int]:
        bad, compared = [], 0
        moments = account.ledger.moments
        for i in range(len(moments) - 2):
            a, m, b = moments[i : i + 3]
            if not (
                isinstance(a.op, Save)
                and isinstance(b.op, Save)
                and a.op.slot == NEIGHBOUR_SLOT
                and b.op.slot == NEIGHBOUR_SLOT + 1
            ):
                continue
            s = a.op.seq
            if s in m.touched or not isinstance(m.before.get(s), History) or not (a.step.blobs and b.step.blobs):
                continue
            if m.facts.n_swa and m.params.kv_unified and a.step.blobs[-1].size != b.step.blobs[-1].size:
                # cells that the next token cannot see may be taken by others, one token before a save leaves them out
                continue
            compared += 1
            if a.step.blobs[-1].sha != b.step.blobs[-1].sha:
                name = NAME_OF[type(m.op)]
                because = (
                    f"Operation {m.step.op} ({name}) works on {_names(m.touched)}, so saving sequence {s} before and "
                    f"after it must give the "
                    f"same bytes; but they differ ({a.step.blobs[-1].size} and {b.step.blobs[-1].size} bytes)."
                )
                check = Check(kind="blob", step=b.step.op, seq=s, expected=(a.step.op, b.step.op), what="neighbour")
                bad.append(
                    Violation(
                        oracle=self.name,
                        key=f"isolation:blob:{name}",
                        rule=_rule(name),
                        because=because,
                        check=check,
                        suspects=(m.step.op,),
                    )
                )
        return bad, compared


def _names(seqs: frozenset[int]) -> str:
    return "no sequence" if not seqs else "sequence " + ", ".join(map(str, sorted(seqs)))
