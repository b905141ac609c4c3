"""What every oracle of llama-server is: a name, a judgement of an account, and an explanation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from oracles.base import explained
from oracles.server.account import ServerAccount
from oracles.verdict import Verdict, Violation


class ServerOracle(ABC):
    """One way of knowing that llama-server answered wrongly."""

    name: ClassVar[str]
    title: ClassVar[str]
    # Of several that see one request wrong the one with the lowest rank reports, and the others are attached.
    rank: ClassVar[int]

    @abstractmethod
    def judge(self, account: ServerAccount) -> Verdict:
        """Look at one run; pure."""

    def explain(self, violation: Violation) -> str:
        """The violation as an argument that a person can check."""
        return explained(violation)
