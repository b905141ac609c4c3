"""A blob target that counts what it does: `python -m fuzz.measure.targets_child NAME OPTION...`.

It is the target itself under libFuzzer, whose options these are; the environment has its TargetConfig, and in VARIABLE
a Told. See fuzz.measure.targets.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

import msgspec

from fuzz.measure.targets_counts import OUTCOMES, WORDS, at
from fuzz.targets import load
from fuzz.targets.blobs import BlobTarget
from fuzz.targets.config import read

VARIABLE = "REDRAFT_COUNTS"


class Told(msgspec.Struct, frozen=True):
    """warm: executions that are not counted. seconds: of processor time after that, then it ends. counts: a file for a
    targets_counts.Counts."""

    warm: int
    seconds: float
    counts: str


def main(argv: list[str]) -> None:
    """Hand the process to libFuzzer."""
    import atheris

    told = msgspec.json.decode(os.environ[VARIABLE], type=Told)
    target = load(argv[1])
    assert isinstance(target, BlobTarget)
    run = target.open(read())
    with Path(told.counts).open("r+b") as f:
        words = memoryview(mmap.mmap(f.fileno(), 8 * WORDS)).cast("q")
    first, n_models = int(target.medium == "file"), len(run.models)
    last = 0

    def one_input(data: bytes) -> None:
        nonlocal last
        run(data)
        cpu = time.process_time_ns()
        words[2] = time.monotonic_ns()
        words[0] += 1
        if words[0] > told.warm:
            model = data[first] % n_models if len(data) > first else 0
            outcome = run.outcome
            if outcome == "complained":
                words[3] += 1
                outcome = "refused"
            place = at(model, OUTCOMES.index(outcome))
            words[place.number] += 1
            words[place.cpu] += cpu - last  # with what libFuzzer did since the execution before
            if cpu - words[4] >= 1e9 * told.seconds:
                os._exit(0)
        else:
            words[1], words[4] = words[2], cpu
        last = cpu

    atheris.Setup([argv[0], *argv[2:]], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
