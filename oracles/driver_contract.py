"""State that a driver keeps and does not offer: after a restore of all that it gives, its drafts are others."""

from __future__ import annotations

from oracles.account import Account
from oracles.base import OracleFailure
from oracles.drive import Held
from oracles.driving import DraftOracle, seen, shaper, violation, where
from oracles.verdict import Violation
from subjects.scenario import SeqRm


class DriverContractFailure(OracleFailure):
    """A driver keeps state that the caller can neither save nor see."""


class DriverContract(DraftOracle):
    """Drafts behind a restore or a cut in which the caller did all that speculative.h lets it do."""

    name = "driver_contract"
    title = "kept state"
    failure = DriverContractFailure
    rank = 23

    def mine(self, account: Account, held: Held) -> bool:
        """Claims where the driver had nothing to offer, or was not told of a cut."""
        found = shaper(account, held)
        cut = found is not None and isinstance(found[1], SeqRm) and found[1].lo.at != "open"
        return held.claim.line.unoffered or held.claim.line.was_cut or cut

    def violated(self, account: Account, held: Held) -> Violation:
        """Which gap of the interface it is."""
        kind = account.driven.driver.kind if account.driven else "?"
        if held.claim.line.unoffered:
            return violation(
                self.name,
                account,
                held,
                key=f"driver_contract:{kind}:unoffered",
                clause="checkpoint.driver",
                because=f"{kind} offers no state (get_state gives nothing), so with target and draft memory everything "
                f"was put back that there is; but when {where(account, held)}, {seen(held)}.",
                kind="contract",
            )
        return violation(
            self.name,
            account,
            held,
            key=f"driver_contract:{kind}:cut",
            clause="propose.after-cut",
            because=f"The tail was removed from both memories, and no call tells the driver; it goes on without a "
            f"word, but when {where(account, held)}, {seen(held)}.",
            kind="contract",
        )
