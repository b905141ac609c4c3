"""Malformed driver state is refused: nothing changes, and the refusal can be seen."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule

HOW = {
    "empty": "made empty",
    "short": "that lacks its last byte",
    "long": "with 4 zero bytes appended",
    "magic": "with the top bit of a 32-bit number flipped",
    "width": "cut in half",
    "negative": "with a 32-bit number set to -2",
    "huge": "with a 32-bit number set to 2147483647",
    "model": "of another model",
    "other": "that begins as another driver's",
}
"""What was done to it, in the words of the program (fuzz/repro/driver_words.py)."""


class DriverStateFailure(OracleFailure):
    """A malformed driver state was taken, or refused without a word."""


class DriverState(Oracle):
    """Blobs that are empty, short, long, of another driver or model, or with impossible numbers in them."""

    name = "driver_state"
    title = "malformed driver state"
    failure = DriverStateFailure
    rank = 19
    driver = True

    def judge(self, account: Account) -> Verdict:
        """set_state has no return value, so a refusal is a line of the log; that nothing changed shows in later drafts
        (a taken blob makes them wrong)."""
        driven = account.driven
        if driven is None:
            return Verdict(oracle=self.name, unknown=("there is no driver",))
        kind = driven.driver.kind
        found = []
        for step, how, told in driven.drive.refusals:
            after = [h for h in driven.held if h.claim.step > step and h.wrong and h.claim.line.shaped[-1:] == (step,)]
            text = f"In operation {step} a driver state {HOW[how]} must be refused"
            if after:
                text += " and change nothing; but it was taken: the next draft is wrong."
                found.append(self._violation(step, f"{kind}:taken", "mangle.refused", text, how))
            elif not told:
                text += " so that the caller can see it; but there is no return value and no line in the log."
                found.append(self._violation(step, f"{kind}:mute", "mangle.told", text, how))
        return Verdict(oracle=self.name, violations=tuple(found), compared=len(driven.drive.refusals))

    def _violation(self, step: int, key: str, clause: str, because: str, how: str) -> Violation:
        return Violation(
            oracle=self.name,
            key=f"driver_state:{key}",
            rule=rule(clause),
            because=because,
            check=Check(kind="draft", step=step, what=how),
            kind="contract",
            suspects=(step,),
        )
