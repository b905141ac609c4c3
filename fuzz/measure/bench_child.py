"""The child's half of ci/bench: recorded requests, run in a process of its own, under cProfile or noting the calls of
drivers.

It does what a worker of `subjects.child` does between two pipes, with the same classes, without the pipes. On its own
it is of no use; ci/bench starts it.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import time
from pathlib import Path
from typing import cast

from fuzz.measure.bench_driver_calls import Calls, NotingDriver, NotingLib, NotingShim
from subjects import child
from subjects.child import ANSWERS_BYTES, REQUESTS, Job, Recorder, Replay, Worker
from subjects.drivers import Driver, reference
from subjects.drivers.native import DriverLib, Native
from subjects.drivers.reference import Reference
from subjects.scenario import DriverParams
from subjects.shim import Shim


def profile_text(profile: cProfile.Profile, lines: int, order: str) -> str:
    """The top of a profile as pstats prints it, without folders."""
    out = io.StringIO()
    stats = pstats.Stats(profile, stream=out)
    stats.strip_dirs().sort_stats(order).print_stats(lines)
    return out.getvalue().strip()


def frames(path: Path) -> list[list[Job | Replay]]:
    """The requests in a file, each as the parent sent it."""
    data = path.read_bytes()
    found = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        found.append(REQUESTS.decode(data[at + 4 : at + 4 + size])[1])
        at += 4 + size
    return found


def answers() -> Recorder:
    """A place for answers that nobody reads."""
    fd = os.memfd_create("bench-answers")
    os.ftruncate(fd, ANSWERS_BYTES)
    return Recorder(fd)


def profiled(shim: Shim, driver: DriverLib | None, model: str, requests: list[list[Job | Replay]]) -> dict[str, object]:
    """Run all requests twice, the second time under the profiler."""
    handle = shim.load_model(Path(model))
    if handle is None:
        raise SystemExit(f"the library does not load {model}")
    took: list[float] = []
    profile = cProfile.Profile()
    for on in (False, True):
        worker = Worker(shim, {(model, 0): handle}, driver, answers())
        began = time.process_time()
        if on:
            profile.enable()
        for items in requests:
            worker.answers.clear()
            for item in items:
                if isinstance(item, Job):
                    worker.run(item)
                else:
                    worker.replay(item)
        if on:
            profile.disable()
        took.append(time.process_time() - began)
    return {
        "cpu": took[0],
        "cpu_profiled": took[1],
        "own": profile_text(profile, 30, "tottime"),
        "cumulative": profile_text(profile, 25, "cumulative"),
    }


def note(shim: NotingShim, lib: NotingLib, requests: list[list[Job | Replay]], to: Path) -> dict[str, object]:
    """Run all requests and write down the calls."""
    calls = shim.calls

    def native(lib: DriverLib, p: DriverParams, target: int, draft: int, n_seq: int) -> Driver:
        return NotingDriver(calls, Native(lib, p, target, draft, n_seq), p, target, draft, n_seq)

    def ours(p: DriverParams, target: int, draft: int, n_seq: int, leave_out: str = "") -> Driver:
        made = cast(Driver, Reference(p, target, draft, n_seq, leave_out))
        return NotingDriver(calls, made, p, target, draft, n_seq, ours=True)

    child.Native = native  # type: ignore[assignment, attr-defined]
    reference.Reference = ours  # type: ignore[assignment, misc]
    worker = Worker(shim, {}, lib, answers())
    for items in requests:
        worker.answers.clear()
        for item in items:
            calls.begin()
            if isinstance(item, Job):
                worker.run(item)
            else:
                worker.replay(item)
    calls.write(to)
    return {"models": calls.models, "blocks": calls.blocks}


def main() -> None:
    """Print what was asked for as JSON."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("shim", type=Path)
    p.add_argument("model")
    p.add_argument("requests", type=Path)
    p.add_argument("--driver", type=Path)
    p.add_argument("--note", type=Path)
    args = p.parse_args()
    requests = frames(args.requests)
    if args.note:
        calls = Calls()
        shim = NotingShim(args.shim, calls)
        print(json.dumps(note(shim, NotingLib(args.driver, calls), requests, args.note)))
    else:
        plain = Shim(args.shim)
        print(json.dumps(profiled(plain, DriverLib(args.driver) if args.driver else None, args.model, requests)))


if __name__ == "__main__":
    main()
