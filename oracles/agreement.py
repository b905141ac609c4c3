"""Target and draft agree on positions after each operation, and each round makes progress."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.lines import Line
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import Propose, Verify


class AgreementFailure(OracleFailure):
    """The memories of target and draft name other positions."""


class Agreement(Oracle):
    """The last position of every sequence in both memories, the answers of their removals, and progress of rounds."""

    name = "agreement"
    title = "positions of both memories"
    failure = AgreementFailure
    rank = 17
    driver = True

    def judge(self, account: Account) -> Verdict:
        """Judge what is left after every operation."""
        driven = account.driven
        if driven is None:
            return Verdict(oracle=self.name, unknown=("there is no driver",))
        lag = int(driven.driver.kind == "draft-eagle3")
        found: list[Violation] = []
        compared = 0
        refused = {r.step: r for r in driven.drive.refused}
        before: list[tuple[int, int]] = []
        for m, lines in zip(account.ledger.moments, driven.drive.lines, strict=True):
            step = m.step
            if not step.done or step.skipped:
                continue
            if (r := refused.get(step.op)) is not None:
                found.append(self._violation(step.op, r.seq, r.key, f"it {r.because}."))
            if isinstance(m.op, Propose) and step.rc == 0 and not any(lines[s].undefined for s in m.op.seqs):
                because = "a removal of what a draft left in its own memory must not fail; but it was refused."
                found.append(self._violation(step.op, -1, "refused", because))
            for seq, line in lines.items():
                if line.undefined or not line.history.length:
                    continue
                compared += 1
                if isinstance(m.op, Verify) and m.op.accept and any(r.seq == seq for b in step.batches for r in b.rows):
                    stuck = bool(before) and step.pos[seq][1] <= before[seq][1]
                    if stuck:
                        because = "each round must emit a token; but the target holds no more than before."
                        found.append(self._violation(step.op, seq, "progress", because))
                if (wrong := self._wrong(step.pos, step.draft_pos, seq, line, lag, m.facts.draft_shares)) is not None:
                    found.append(self._violation(step.op, seq, wrong[0], wrong[1]))
            before = list(step.pos)
        return Verdict(oracle=self.name, violations=tuple(found[:1]), compared=compared)

    @staticmethod
    def _wrong(
        pos: list[tuple[int, int]], draft: list[tuple[int, int]], seq: int, line: Line, lag: int, shares: bool
    ) -> tuple[str, str] | None:
        last = line.history.length - 1
        if pos[seq][1] != last:
            return "target", f"the target must hold positions up to {last}; but pos_max is {pos[seq][1]}."
        if not draft or line.draft is None or len(line.draft) != line.history.length:
            return None
        wanted = (last,) if shares or not lag else (last - lag, last)
        if draft[seq][1] not in wanted:
            words = " or ".join(map(str, wanted))
            return "draft", f"the draft must hold positions up to {words}; but pos_max is {draft[seq][1]}."
        return None

    def _violation(self, step: int, seq: int, key: str, because: str) -> Violation:
        return Violation(
            oracle=self.name,
            key=f"agreement:{key}",
            rule=rule("verify.agree"),
            because=f"After operation {step}, for sequence {seq}, {because}",
            check=Check(kind="draft", step=step, seq=seq, what="positions"),
            suspects=(step,),
        )
