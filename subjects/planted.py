"""Faults planted on purpose in the shim's answers or calls, to prove that each oracle sees what it is for.

Each is one named switch with a stated trigger; the switch off is the control. They are build independent: whatever
llama.cpp is under test,
the planted fault must be found (`ci/nightly` uses one as its canary).
"""

from __future__ import annotations

from collections.abc import Callable

from subjects.shim import Shim


def plant(shim: Shim, name: str) -> Shim:
    """The shim with the named fault in it; the shim itself for the empty name."""
    return shim if not name else FAULTS[name](shim)


FAULTS: dict[str, Callable[[Shim], Shim]] = {}
