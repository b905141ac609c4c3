"""Refusal: a good blob is taken; a refused one leaves its target as it was or empty, and nothing else changes."""

from __future__ import annotations

from oracles.account import Account, Compared
from oracles.base import Oracle, OracleFailure
from oracles.ledger import History, Moment, Undefined
from oracles.rows import NAME_OF, clear_of_doubt, row_violation, where
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import ON_DEVICE, PARTIAL, Restore, RestoreAll

TAKEN = {"restore": "restore.refused", "restore_all": "restore_all.taken"}


def _half(name: str) -> str:
    return rule(f"{name}.refused-clean")


class RefusalFailure(OracleFailure):
    """A restore was refused wrongly, or left something half done."""


class Refusal(Oracle):
    """Answers of restores and what refused ones leave."""

    name = "refusal"
    title = "refusal"
    failure = RefusalFailure
    rank = 2
    observations = frozenset({"continue"})

    def judge(self, account: Account) -> Verdict:
        """Judge every restore's answer, and the rows of sequences whose last operation was a refused restore."""
        bad: list[Violation] = []
        compared = 0
        for m in account.ledger.moments:
            if isinstance(m.op, Restore | RestoreAll) and m.step.done and not m.step.skipped:
                compared += m.must_accept or not m.step.rc  # whether others are right to be taken, the rows tell
                found = self._answer(m)
                if found:
                    bad.append(found)
        judged: list[Compared] = []
        for r in account.compared:
            shaper = account.shaper(r.claim)
            if shaper is None or not isinstance(shaper[0], Restore | RestoreAll) or shaper[1].step.rc:
                continue
            judged.append(r)
            if r.wrong:
                because = (
                    f"Operation {shaper[1].step.op} was refused and its positions are as before, so "
                    f"{where(account, r)} must be as if it had not been called; but its logits are off by up to "
                    f"{r.error:.3g}."
                )
                bad.append(
                    row_violation(
                        self.name,
                        account,
                        r,
                        key="refusal:state",
                        rule=_half(NAME_OF[type(shaper[0])]),
                        because=because,
                    )
                )
        n, unknown = clear_of_doubt(judged)
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared + n, unknown=unknown)

    def _answer(self, m: Moment) -> Violation | None:
        name, slot = NAME_OF[type(m.op)], m.slot
        assert slot is not None
        if not m.step.rc and m.must_accept:
            route = ("device" if slot.flags & ON_DEVICE else slot.medium) + ("-partial" if slot.flags & PARTIAL else "")
            because = (
                f"Operation {m.step.op} restores a state that was saved under the same parameters, unchanged, and "
                f"there is room for it, so it must be "
                f"taken; but it was refused."
            )
            taken = f"{rule(TAKEN[name])}; a state saved under the same parameters was not taken back"
            check = Check(kind="answer", step=m.step.op, expected=(m.step.blobs[0].size,))
            return Violation(
                oracle=self.name, key=f"refusal:good:{name}:{route}", rule=taken, because=because, check=check
            )
        if m.step.rc:
            return None
        changed = [
            s for s in m.touched if isinstance(m.before.get(s), History) and isinstance(m.after.get(s), Undefined)
        ]
        emptied = [s for s in m.touched if m.step.pos[s] == (-1, -1) and m.pos_before[s] != (-1, -1)]
        kept = [s for s in m.touched if m.step.pos[s] != (-1, -1)]
        if changed or (emptied and kept and isinstance(m.op, RestoreAll)):
            s = (changed or emptied)[0]  # not `kept`: that one is as it was, so a check of it shows nothing
            because = (
                f"Operation {m.step.op} was refused, so sequence {s} must be as it was, positions {m.pos_before[s]}, "
                f"or empty{' (and all sequences alike)' if isinstance(m.op, RestoreAll) else ''}; "
                f"but it has positions {m.step.pos[s]}."
            )
            check = Check(kind="positions", step=m.step.op, seq=s, expected=m.pos_before[s])
            return Violation(
                oracle=self.name, key=f"refusal:half:{name}", rule=_half(name), because=because, check=check
            )
        return None
