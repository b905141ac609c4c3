"""Hidden-state error: after a restore with the driver's state, the next token is paired with the row that was saved."""

from __future__ import annotations

import math

from oracles.account import Account
from oracles.base import OracleFailure
from oracles.drive import Held
from oracles.driving import DraftOracle, put_back, seen, violation, where
from oracles.verdict import Violation


class PendingRowFailure(OracleFailure):
    """The first token after a restore was paired with another hidden row."""


class PendingRow(DraftOracle):
    """The row that the first replayed token gets, against the row of a clean run at the checkpoint."""

    name = "pending_row"
    title = "hidden row"
    failure = PendingRowFailure
    rank = 22

    def mine(self, account: Account, held: Held) -> bool:
        """Every claim in which the row can be seen."""
        return not math.isnan(held.row_error)

    def violated(self, account: Account, held: Held) -> Violation:
        """The driver was given its state and goes on with another."""
        return violation(
            self.name,
            account,
            held,
            key="pending_row",
            clause="rewind.state",
            because=f"Put back: {put_back(account, held)}; the rest stood there already. So when "
            f"{where(account, held)}, its hidden row must be that of the checkpoint; but {seen(held)}.",
        )
