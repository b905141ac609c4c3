"""Verification rows: accepting k tokens of a restored verification gives the row that it gave before."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import OracleFailure
from oracles.drive import Held
from oracles.driving import DraftOracle, seen, shaper, violation, where
from oracles.verdict import Violation
from subjects.scenario import Accept


class VerifyRowsFailure(OracleFailure):
    """Accepting tokens after a restore gave another row."""


class VerifyRows(DraftOracle):
    """The hidden row after accept(k) of a verification that was saved, polluted and restored before it was answered."""

    name = "verify_rows"
    title = "verification rows"
    failure = VerifyRowsFailure
    rank = 21

    def mine(self, account: Account, held: Held) -> bool:
        """Claims of a sequence whose verification was answered last."""
        found = shaper(account, held)
        return found is not None and isinstance(found[1], Accept)

    def violated(self, account: Account, held: Held) -> Violation:
        """The driver was given its state and takes a row of another verification."""
        return violation(
            self.name,
            account,
            held,
            key="verify_rows",
            clause="accept.row",
            kind="contract",
            because=f"The restored state was saved while the verification was open, so accepting takes its rows; but "
            f"when {where(account, held)}, {seen(held)}.",
        )
