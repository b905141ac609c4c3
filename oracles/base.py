"""What every oracle is: a name, a failure class, declared observations, a judgement, an explanation and a re-check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from oracles.account import Account
from oracles.verdict import Verdict, Violation
from subjects.scenario import Scenario
from subjects.trace import Trace

# What an oracle may ask to be added to a program before it runs (see oracles.observe).
Observation = Literal["continue", "save-again", "resave", "neighbour-blobs"]


class OracleFailure(AssertionError):
    """Base of the failure classes. One class an oracle, because Hypothesis tells bugs apart by class and place."""

    def __init__(self, violation: Violation):
        super().__init__(f"{violation.rule}\n{violation.because}")
        self.violation = violation


class Oracle(ABC):
    """One way of knowing that a restore is wrong."""

    name: ClassVar[str]
    title: ClassVar[str]
    failure: ClassVar[type[OracleFailure]]
    # When several oracles see the same step broken, the one with the lowest rank reports and the others are attached.
    rank: ClassVar[int]
    observations: ClassVar[frozenset[Observation]] = frozenset()
    # it judges programs with a driver, instead of those without one
    driver: ClassVar[bool] = False

    @abstractmethod
    def judge(self, account: Account) -> Verdict:
        """Look at one run; pure."""

    def variant(self, scenario: Scenario) -> Scenario | None:
        """Another program whose run this oracle compares with the first, None when it needs none."""
        return None

    def base(self, scenario: Scenario) -> Scenario | None:
        """The program that the variant is compared with, where it is not the program itself."""
        return scenario

    def variant_fault(self, trace: Trace) -> str:
        """Name of the fault that the variant needs, to be like the subject that gave `trace`; empty for none."""
        return ""

    def compare(self, account: Account, variant: Account) -> Verdict:
        """Judge a run together with the run of its variant."""
        return Verdict(oracle=self.name)

    def explain(self, violation: Violation) -> str:
        """The violation as an argument that a person can check."""
        return explained(violation)

    def recheck(self, violation: Violation, account: Account) -> bool:
        """Whether a new run shows the same violation again."""
        return any(v.key == violation.key for v in self.judge(account).violations)


def explained(violation: Violation) -> str:
    """Rule, argument and sizes of a violation."""
    lines = [violation.rule, "", violation.because]
    if violation.band:
        ratio = violation.error / violation.band
        lines += [
            "",
            f"Largest difference {violation.error:.3g}, honest differences here stay below {violation.band:.3g} "
            f"({ratio:.0f} x outside).",
        ]
    return "\n".join(lines)
