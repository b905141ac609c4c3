"""The child's half of ci/bench --profile: recorded requests, run in a process of its own under cProfile.

It does what a worker of `subjects.child` does between two pipes, with the same classes, without the pipes. On its own
it is of no use; ci/bench starts it.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import sys
import time
from pathlib import Path

from subjects.child import ANSWERS_BYTES, REQUESTS, Job, _Recorder, _Worker
from subjects.shim import Shim


def profile_text(profile: cProfile.Profile, lines: int, order: str) -> str:
    """The top of a profile as pstats prints it, without folders."""
    out = io.StringIO()
    stats = pstats.Stats(profile, stream=out)
    stats.strip_dirs().sort_stats(order).print_stats(lines)
    return out.getvalue().strip()


def main(shim_path: str, model: str, requests: str) -> None:
    """Run all requests twice, the second time under the profiler, and print what both took as JSON."""
    shim = Shim(Path(shim_path))
    handle = shim.load_model(Path(model))
    if handle is None:
        raise SystemExit(f"the library does not load {model}")
    data = Path(requests).read_bytes()
    frames: list[bytes] = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        frames.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    took: list[float] = []
    profile = cProfile.Profile()
    for profiled in (False, True):
        fd = os.memfd_create("bench-answers")
        os.ftruncate(fd, ANSWERS_BYTES)
        answers = _Recorder(fd)
        worker = _Worker(shim, {(model, 0): handle}, None, answers)
        began = time.process_time()
        if profiled:
            profile.enable()
        for frame in frames:
            answers.clear()
            for item in REQUESTS.decode(frame)[1]:
                if isinstance(item, Job):
                    worker.run(item)
                else:
                    worker.replay(item)
        if profiled:
            profile.disable()
        took.append(time.process_time() - began)
    print(
        json.dumps(
            {
                "cpu": took[0],
                "cpu_profiled": took[1],
                "own": profile_text(profile, 30, "tottime"),
                "cumulative": profile_text(profile, 25, "cumulative"),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
