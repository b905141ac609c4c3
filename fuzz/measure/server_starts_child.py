"""Runs one program on a llama-server again and again, until it is ended: for `fuzz.measure.server_starts`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from subjects.scenario import ModelRef
from subjects.server.runner import run
from subjects.server.scenario import Flags, RestoreSlot, SaveSlot, ServerScenario, Turn


def program(model: ModelRef) -> ServerScenario:
    """One whose server has a folder with files in it."""
    save, restore = SaveSlot(slot=0, file=0), RestoreSlot(slot=0, file=0)
    requests = (Turn(conv=0, n=40), save, Turn(conv=0), restore, Turn(conv=0))
    return ServerScenario(model=model, requests=requests, flags=Flags())


def main(argv: Sequence[str]) -> int:
    """argv: the server, the model, and its recipe's name."""
    binary, model = Path(argv[0]), Path(argv[1])
    asked = program(ModelRef(recipe=argv[2]))
    print("ready", flush=True)
    try:
        while True:
            run(asked, binary, model)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
