"""Isolation of drafts: work on one sequence changes no other sequence's drafts, nor those of a later conversation."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import OracleFailure
from oracles.drive import Held
from oracles.driving import DraftOracle, alone_since, fresh_start, seen, violation, what, where
from oracles.verdict import Violation


class DriverIsolationFailure(OracleFailure):
    """A sequence drafts from what another one, or an earlier conversation, left."""


class DriverIsolation(DraftOracle):
    """Drafts of sequences that nobody touched since they were right, and the first row of a new conversation."""

    name = "driver_isolation"
    title = "isolation of drafts"
    failure = DriverIsolationFailure
    rank = 20

    def mine(self, account: Account, held: Held) -> bool:
        """Claims behind work on other sequences, and first rows."""
        return fresh_start(account, held) or alone_since(account, held) is not None

    def violated(self, account: Account, held: Held) -> Violation:
        """Either nothing was there that may matter, or only other sequences were worked on."""
        if fresh_start(account, held):
            return violation(
                self.name,
                account,
                held,
                key="driver_isolation:fresh",
                clause="begin.fresh",
                because=f"Sequence {held.claim.seq} began anew, so it must go on as with a new driver, which pairs the "
                f"first token with a row of zeros and has learnt nothing, whatever was there before, with begin() or "
                f"without (speculative.h calls it optional); but {seen(held)}.",
                kind="contract",
            )
        since = alone_since(account, held)
        others = tuple(
            m.step.op
            for m in reversed(account.ledger.moments)
            if since is not None and since < m.step.op < held.claim.step and m.touched
        )
        return violation(
            self.name,
            account,
            held,
            key=f"driver_isolation:{what(held)}",
            clause="propose.own",
            because=f"Since operation {since}, when sequence {held.claim.seq} was as it must be, only other sequences "
            f"were worked on; but when {where(account, held)}, {seen(held)}.",
            suspects=others,
        )
