"""Blob contract: promised = written = read; saved twice = same; restored and saved again = same, also when restored "
"twice."""

from __future__ import annotations

import math

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.ledger import History, Moment
from oracles.rows import NAME_OF
from oracles.states import Again
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import Ask, Restore, RestoreAll, Save, SaveAll

# Clauses of the contract table by what was found, after the name of the operation.
CLAUSE = {"promised": "size", "asked": "size", "twice": "pure", "again": "state", "restored-twice": "state"}
MORE = {
    "asked": "; the size changed while nothing happened",
    "again": "; saving it again must give the same state",
    "restored-twice": "; saving it again must give the same state",
}


def _rule(name: str, what: str) -> str:
    clause = CLAUSE.get(what, what)
    if (name, what) == ("restore_all", "read"):
        clause = "taken"
    return rule(f"{name}.{clause}") + MORE.get(what, "")


class BlobFailure(OracleFailure):
    """Sizes or bytes of a blob do not agree."""


class BlobContract(Oracle):
    """Sizes and bytes. Cells may move when they are restored, so what was saved again is compared in canonical form,
    bit for bit.
    """

    name = "blob"
    title = "blob contract"
    failure = BlobFailure
    rank = 4
    observations = frozenset({"save-again", "resave"})

    def judge(self, account: Account) -> Verdict:
        """Judge every save and restore."""
        bad: list[Violation] = []
        compared = 0
        promised: dict[tuple[int, int], tuple[int, int]] = {}
        for m in account.ledger.moments:
            if m.touched:
                promised.clear()
            if isinstance(m.op, Ask) and m.op.what == "size" and m.step.value is not None:
                promised[m.op.seq, m.op.flags] = (m.step.value, m.step.op)
            if isinstance(m.op, Save) and m.op.medium == "buffer" and m.step.blobs:
                asked = promised.get((m.op.seq, m.op.flags))
                compared += asked is not None
                if asked is not None and asked[0] != m.step.blobs[0].size:
                    because = (
                        f"Operation {asked[1]} was told a size of {asked[0]} bytes and nothing changed since, so "
                        f"operation "
                        f"{m.step.op} must be told the same; but it was told {m.step.blobs[0].size}."
                    )
                    check = Check(kind="answer", step=m.step.op, seq=m.op.seq, expected=(asked[0],))
                    bad.append(
                        Violation(
                            oracle=self.name,
                            key="blob:asked:save",
                            rule=_rule("save", "asked"),
                            because=because,
                            check=check,
                        )
                    )
            if m.step.done and not m.step.skipped and m.step.blobs:
                again = account.states.again.get(m.step.op)
                n, found = self._save(m) if isinstance(m.op, Save | SaveAll) else self._restore(m, again)
                compared += n
                bad.extend(found)
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared)

    def _violation(
        self, m: Moment, what: str, because: str, pair: tuple[int, int], places: tuple[int, ...] = ()
    ) -> Violation:
        name = NAME_OF[type(m.op)]
        # what was saved again and differs neither in a row nor in cells has more or fewer rows
        shown = "places" if places else "bytes" if what in ("twice", "tokens") else "size"
        check = Check(kind="blob", step=m.step.op, seq=getattr(m.op, "seq", -1), expected=(*pair, *places), what=shown)
        return Violation(
            oracle=self.name,
            key=f"blob:{what}:{name}",
            rule=_rule(name, what),
            because=because,
            check=check,
            suspects=(m.step.op,),
        )

    def _save(self, m: Moment) -> tuple[int, list[Violation]]:
        bad = []
        for i, b in enumerate(m.step.blobs):
            if b.size != b.moved:
                because = (
                    f"Operation {m.step.op} promised {b.size} bytes, so it must write as many; but it wrote {b.moved}."
                )
                bad.append(self._violation(m, "promised", because, (i, i)))
        if len(m.step.blobs) == 2 and m.step.blobs[0].sha != m.step.blobs[1].sha:
            because = f"Operation {m.step.op} saved the same state twice in a row; but the bytes differ."
            bad.append(self._violation(m, "twice", because, (0, 1)))
        return len(m.step.blobs), bad

    def _restore(self, m: Moment, again: Again | None) -> tuple[int, list[Violation]]:
        op, slot = m.op, m.slot
        if not isinstance(op, Restore | RestoreAll) or slot is None or slot.corrupt or not m.step.rc:
            return 0, []
        bad = []
        for i, b in enumerate(m.step.blobs[: op.times]):
            if b.size != b.moved:
                because = (
                    f"Operation {m.step.op} was handed {b.size} bytes and accepted them, so it must have read all; "
                    f"but it "
                    f"read {b.moved}."
                )
                bad.append(self._violation(m, "read", because, (i, i)))
        if m.step.value == 0:
            because = (
                f"Operation {m.step.op} loaded a session file; but the tokens that were saved with it did not come "
                f"back."
            )
            bad.append(self._violation(m, "tokens", because, (0, 0)))
        n = op.times
        settled = isinstance(op, RestoreAll) or isinstance(m.after.get(op.seq), History)
        if again is not None and settled:
            n += 1
            was, now = m.step.blobs[op.times - 1], m.step.blobs[op.times]
            if again.differences:
                seq, first = again.differences[0]
                whose = f" of sequence {seq}" if isinstance(op, RestoreAll) else ""
                error = f" by up to {first.error:.3g}" if math.isfinite(first.error) else ""
                because = (
                    f"Operation {m.step.op} restored a blob of {was.size} bytes {op.times} time(s) and saved the "
                    f"result again, so the same cells must be in it, bit for bit, in any order; but {now.size} bytes "
                    f"came out, in which the state{whose} differs{error}: {again.told}."
                )
                name, pair = "again" if op.times == 1 else "restored-twice", (op.times - 1, op.times)
                bad.append(self._violation(m, name, because, pair, again.places))
        return n, bad
