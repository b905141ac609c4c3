"""All oracles, in order of rank."""

from __future__ import annotations

from oracles.agreement import Agreement
from oracles.base import Oracle
from oracles.blob import BlobContract
from oracles.decode import DecodeCodes
from oracles.draft import DraftTokens
from oracles.drafting import Drafting
from oracles.driver_contract import DriverContract
from oracles.driver_isolation import DriverIsolation
from oracles.driver_state import DriverState
from oracles.first_token import FirstToken
from oracles.greedy import Greedy
from oracles.hidden import HiddenState
from oracles.isolation import Isolation
from oracles.liveness import Liveness
from oracles.logits import Logits
from oracles.pending_row import PendingRow
from oracles.positions import Positions
from oracles.purity import Purity
from oracles.redraft import Redraft
from oracles.refusal import Refusal
from oracles.removal import Removal
from oracles.round_drafts import RoundDrafts
from oracles.state import State
from oracles.two_drivers import TwoDrivers
from oracles.verify_rows import VerifyRows
from subjects.scenario import Scenario

ORACLES: tuple[Oracle, ...] = tuple(
    sorted(
        (
            Liveness(),
            DecodeCodes(),
            Refusal(),
            State(),
            Removal(),
            Isolation(),
            BlobContract(),
            Purity(),
            HiddenState(),
            DraftTokens(),
            FirstToken(),
            Positions(),
            Logits(),
            Agreement(),
            DriverContract(),
            DriverIsolation(),
            DriverState(),
            Drafting(),
            Greedy(),
            PendingRow(),
            Redraft(),
            RoundDrafts(),
            TwoDrivers(),
            VerifyRows(),
        ),
        key=lambda o: o.rank,
    )
)
OBSERVATIONS = frozenset(o for oracle in ORACLES for o in oracle.observations)


def for_program(scenario: Scenario) -> tuple[Oracle, ...]:
    """The oracles that judge a program: those of drivers where it has one, and liveness always."""
    with_driver = scenario.driver is not None
    return tuple(o for o in ORACLES if o.driver == with_driver or o.name == "liveness")


def by_name(name: str) -> Oracle:
    """The oracle of a name; KeyError lists the names."""
    for oracle in ORACLES:
        if oracle.name == name:
            return oracle
    raise KeyError(f"no oracle {name!r}; there are {', '.join(o.name for o in ORACLES)}")
