"""All oracles, in order of rank."""

from __future__ import annotations

from oracles.base import Oracle
from oracles.blob import BlobContract
from oracles.decode import DecodeCodes
from oracles.draft import DraftTokens
from oracles.first_token import FirstToken
from oracles.hidden import HiddenState
from oracles.isolation import Isolation
from oracles.liveness import Liveness
from oracles.logits import Logits
from oracles.positions import Positions
from oracles.purity import Purity
from oracles.refusal import Refusal
from oracles.removal import Removal

ORACLES: tuple[Oracle, ...] = tuple(
    sorted(
        (
            Liveness(),
            DecodeCodes(),
            Refusal(),
            Removal(),
            Isolation(),
            BlobContract(),
            Purity(),
            HiddenState(),
            DraftTokens(),
            FirstToken(),
            Positions(),
            Logits(),
        ),
        key=lambda o: o.rank,
    )
)
OBSERVATIONS = frozenset(o for oracle in ORACLES for o in oracle.observations)


def by_name(name: str) -> Oracle:
    """The oracle of a name; KeyError lists the names."""
    for oracle in ORACLES:
        if oracle.name == name:
            return oracle
    raise KeyError(f"no oracle {name!r}; there are {', '.join(o.name for o in ORACLES)}")
