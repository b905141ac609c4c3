"""What every target's script does when it is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from fuzz.targets.config import TargetConfig, read


class Runnable(Protocol):
    """A target that can be run."""

    def open(self, config: TargetConfig) -> Callable[[bytes], None]:
        """What is called with every input."""


def main(target: Runnable) -> None:
    """Hand the process to libFuzzer; its options are the command line's."""
    import atheris

    one = target.open(read())

    def one_input(data: bytes) -> None:
        one(data)

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
