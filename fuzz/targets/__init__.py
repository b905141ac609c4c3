"""Targets of the coverage-guided engine: scripts over Atheris, each run as a process of its own."""

from __future__ import annotations

import importlib
from pathlib import Path

from fuzz.targets.config import Target

NAMES: tuple[str, ...] = ("seq_state", "context_state", "session_file", "driver_state", "scenario")
DRIVEN = frozenset({"driver_state"})
"""Targets whose models have a driver."""


def load(name: str) -> Target:
    """A target as the supervisor sees it: what an input stands for. Its module runs nothing when it is imported.

    Raises KeyError for a name that is none.
    """
    if name not in NAMES:
        raise KeyError(f"no target {name!r}; there are {', '.join(NAMES)}")
    target: Target = importlib.import_module(f"fuzz.targets.fuzz_{name}").TARGET
    return target


def script(name: str) -> Path:
    """The file that is run."""
    return Path(__file__).resolve().parent / f"fuzz_{name}.py"
