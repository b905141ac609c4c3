"""What every target's script does when it is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fuzz.targets.config import TargetConfig, Tried, read


class Run(Protocol):
    """A target that is run."""

    @property
    def outcome(self) -> str:
        """What became of the newest input; "skipped" where nothing was done with it."""

    def __call__(self, data: bytes) -> None:
        """One input."""


class Runnable(Protocol):
    """A target that can be run."""

    def open(self, config: TargetConfig) -> Run:
        """What is called with every input."""


def main(target: Runnable) -> None:
    """Hand the process to libFuzzer; its options are the command line's."""
    config = read()
    import atheris

    atheris.Setup(sys.argv, counting(target, config))
    atheris.Fuzz()


def counting(target: Runnable, config: TargetConfig) -> Callable[[bytes], None]:
    """A target that counts what it tries, where that is asked for."""
    one = target.open(config)
    tried = Tried(Path(config.tried)) if config.tried else None

    def one_input(data: bytes) -> None:
        one(data)
        if tried is not None and one.outcome != "skipped":
            tried.add()

    return one_input
