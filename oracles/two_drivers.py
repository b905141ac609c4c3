"""The native driver against our own: on the same program both draft the same tokens."""

from __future__ import annotations

import msgspec

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.driving import words
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import Rewind, Scenario, SeqRm, Verify
from subjects.trace import Step, Trace


class TwoDriversFailure(OracleFailure):
    """llama.cpp's driver and ours draft different tokens."""


class TwoDrivers(Oracle):
    """Drafts of llama.cpp's draft-mtp against those of the one in Python, operation by operation.

    Both run without saved driver states, because ours offers more of them: they must agree on what a driver does with
    the wrong row just as well. Not so with one that was mended to offer its state: it may do better.
    """

    name = "two_drivers"
    title = "native against reference"
    failure = TwoDriversFailure
    rank = 25
    driver = True

    def judge(self, account: Account) -> Verdict:
        """Two runs are needed."""
        return Verdict(oracle=self.name, unknown=("the other driver was not run",))

    def base(self, scenario: Scenario) -> Scenario | None:
        """The program that both run, None where ours knows no such driver."""
        d = scenario.driver
        if d is None or d.kind != "draft-mtp" or d.impl != "native":
            return None
        return msgspec.structs.replace(scenario, driver=msgspec.structs.replace(d, state=False))

    def variant(self, scenario: Scenario) -> Scenario | None:
        """The same program with our driver."""
        base = self.base(scenario)
        if base is None or base.driver is None:
            return None
        return msgspec.structs.replace(base, driver=msgspec.structs.replace(base.driver, impl="reference"))

    def variant_fault(self, trace: Trace) -> str:
        """llama.cpp's pairs the first token of a new conversation with the old one's row, unless it was mended."""
        return "" if mended(trace) else "stale-first-row"

    def compare(self, account: Account, variant: Account) -> Verdict:
        """Draft by draft, as far as both ran."""
        one, two = account.ledger.trace, variant.ledger.trace
        if two.end.how != "ok" or len(one.steps) != len(two.steps):
            why = f"the other driver's run ended with {two.end.how} {two.end.text or two.end.code}"
            return Verdict(oracle=self.name, unknown=(why,))
        compared = 0
        for a, b in zip(one.steps, two.steps, strict=True):
            op = account.ledger.scenario.ops[a.op]
            if mended(one) and (isinstance(op, SeqRm | Rewind) or (isinstance(op, Verify) and op.route != "cut")):
                break  # what follows is drafted from a row of elsewhere, which a mended driver may notice
            if not a.drafts and not b.drafts:
                continue
            compared += 1
            if a.drafts != b.drafts:
                found = Violation(
                    oracle=self.name,
                    key="two_drivers",
                    rule=rule("propose.drafts"),
                    because=f"In operation {a.op} llama.cpp's draft-mtp drafts {_drafts(a)}, the same algorithm in "
                    f"Python {_drafts(b)}; both saw the same program.",
                    check=Check(kind="draft", step=a.op, what="two drivers"),
                    suspects=(a.op,),
                )
                return Verdict(oracle=self.name, violations=(found,), compared=compared)
        return Verdict(oracle=self.name, compared=compared)


def mended(trace: Trace) -> bool:
    """The driver offers its state, as llama.cpp's draft-mtp does not."""
    return bool(trace.facts) and trace.facts[0].offers_state


def _drafts(step: Step) -> str:
    """The drafts of a call, those of each sequence in words."""
    return "; ".join(words(d) for d in step.drafts)
