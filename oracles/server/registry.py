"""All oracles of llama-server, in order of rank."""

from __future__ import annotations

from oracles.server.alive import Alive
from oracles.server.answer import Answer
from oracles.server.base import ServerOracle
from oracles.server.drafting import Acceptance, Drafting
from oracles.server.history import History
from oracles.server.slot import SlotFiles

ORACLES: tuple[ServerOracle, ...] = (Alive(), SlotFiles(), History(), Drafting(), Answer(), Acceptance())


def by_name(name: str) -> ServerOracle:
    """The oracle of a name; KeyError lists the names."""
    for oracle in ORACLES:
        if oracle.name == name:
            return oracle
    raise KeyError(f"no oracle {name!r}; there are {', '.join(o.name for o in ORACLES)}")
