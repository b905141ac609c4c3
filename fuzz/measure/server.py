"""How many requests to llama-server are checked in a second, against a plain HTTP client that checks none.

This is ci/bench --server. For plain decoding on the hybrid recipe, and for draft-mtp on its pair, two jobs at a time:

  redraft  runs and judges programs as a campaign does: each on a server of its own, with its start and end, every
           answer held against that of a cold server, one program in eight run again with other histories; bands are
           measured anew. Programs step round known faults; what is wrong all the same is counted, and not reduced
  plain    two servers, started once for each set of flags, one with them and one cold, and a client that sends each
           prompt of these programs to both, and compares nothing

Both are processes, not pinned, and take turns (server_child.py). The figures to reach are 60 requests a second with
plain decoding and 35 with draft-mtp, on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from fuzz.measure.bench import BUSY, ROOT, Usage, say, spread
from fuzz.measure.server_child import Asked, Told
from fuzz.models import Model, from_pair, from_recipe
from fuzz.server.models import SERVED
from subjects import pairs, recipes
from subjects.builds import cache_dir, cpu_model
from subjects.server.build import ServerBuild, find_server
from subjects.shimcache import BadBuild

JOBS = 2
PATIENCE = 120.0
"""seconds that a job may take longer than it is asked to"""
GRACE = 10.0
"""seconds that a job may take to end its servers"""


@dataclass(frozen=True)
class Setting:
    """One of the two figures. limit: requests a second to reach."""

    name: str
    model: Callable[[Path], Model]
    limit: float


SETTINGS = (
    Setting("plain decoding, qwen35", lambda to: from_recipe(recipes.get("qwen35"), to, form=SERVED), 60.0),
    Setting("draft-mtp, qwen35-mtp", lambda to: from_pair(pairs.get("qwen35-mtp"), to, form=SERVED), 35.0),
)


def jobs(how: Literal["checked", "plain"], server: ServerBuild, model: Model, seed: int, seconds: float) -> list[Told]:
    """What the jobs say, which run side by side. Raises Usage."""
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as cache:
        try:
            for job in range(JOBS):
                asked = Asked(how, str(server.path), server.fingerprint, model, cache, seed, job, JOBS, seconds)
                command = [sys.executable, "-m", "fuzz.measure.server_child"]
                # in a session of its own: Ctrl-C is ours to hand on
                child = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
                running.append(child)
                assert child.stdin is not None
                child.stdin.write(msgspec.json.encode(asked))
                child.stdin.close()
                child.stdin = None
            # what a job says is shorter than a pipe
            return [told(child, seconds) for child in running]
        finally:
            end(running)


def end(running: list[subprocess.Popen[bytes]]) -> None:
    """End jobs that still run, with their servers."""
    for child in running:
        if child.poll() is None:
            child.terminate()
    for child in running:
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def told(child: subprocess.Popen[bytes], seconds: float) -> Told:
    """What a job says at its end. Raises Usage."""
    try:
        text, _ = child.communicate(timeout=4 * seconds + PATIENCE)
    except subprocess.TimeoutExpired:
        raise Usage(f"a job of {seconds:g} s did not end") from None
    if child.returncode:
        raise Usage(f"a job ended with {child.returncode}")
    return msgspec.json.decode(text, type=Told)


def rate(all_: list[Told]) -> float:
    """Requests a second, of all jobs together."""
    return sum(t.requests / t.seconds for t in all_ if t.seconds)


def measure(setting: Setting, server: ServerBuild, args: argparse.Namespace) -> dict[str, Any]:
    """One setting, both sides in turn."""
    model = setting.model(cache_dir() / "models")
    checked: list[float] = []
    sent: list[float] = []
    requests = programs = 0
    violated: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for i in range(args.repeat):
        mine = jobs("checked", server, model, args.seed + i, args.seconds)
        theirs = jobs("plain", server, model, args.seed + i, args.seconds)
        checked.append(rate(mine))
        sent.append(rate(theirs))
        for t in mine:
            requests, programs = requests + t.requests, programs + t.programs
            violated.update(t.violated)
            unknown.update(t.unknown)
        say(f"{setting.name}, {i + 1} of {args.repeat}: {checked[-1]:.1f} checked, {sent[-1]:.1f} plain requests/s")
    return {
        "name": setting.name,
        "limit": setting.limit,
        "per_second": spread(checked),
        "plain": spread(sent),
        "ratio": spread([a / b for a, b in zip(checked, sent, strict=True)]),
        "requests": requests,
        "programs": programs,
        "violated": dict(violated),
        "unknown": dict(unknown),
        "reached": spread(checked)["median"] >= setting.limit,
    }


def show(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{result['server']}; {JOBS} jobs, {result['cores']} cores ({result['cpu']})", ""]
    lines.append(f"{'requests a second':<24} {'checked':>10} {'plain':>10} {'ratio':>8} {'to reach':>10}")
    for s in result["settings"]:
        lines.append(
            f"{s['name']:<24} {s['per_second']['median']:>10.1f} {s['plain']['median']:>10.1f} "
            f"{s['ratio']['median']:>8.2f} {s['limit']:>10.0f}  {'reached' if s['reached'] else 'missed'}"
        )
    for s in result["settings"]:
        lines.append(f"{s['name']}: {s['requests']} requests of {s['programs']} programs checked")
        lines += [f"  wrong in {n} programs: {what}" for what, n in sorted(s["violated"].items())]
        lines += [f"  not judged, {n}: {why}" for why, n in sorted(s["unknown"].items())]
    if result["load"] > result["cores"] * BUSY:
        lines.append(f"load {result['load']} on {result['cores']} cores: the machine may do other work, too")
    return "\n".join(lines)


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Both settings. Raises Usage."""
    try:
        server = find_server()
    except BadBuild as e:
        raise Usage(str(e)) from None
    settings = [measure(s, server, args) for s in SETTINGS]
    return {
        "server": server.name,
        "fingerprint": server.fingerprint,
        "jobs": JOBS,
        "seconds": args.seconds,
        "cores": os.cpu_count(),
        "cpu": cpu_model(),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "settings": settings,
    }


def run(args: argparse.Namespace) -> int:
    """Entry of ci/bench --server: 0 done, 1 slower than --check allows, 2 usage or configuration."""
    try:
        result = bench(args)
    except Usage as e:
        print(f"ci/bench: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=2) if args.json else show(result))
    return 1 if args.check and not all(s["reached"] for s in result["settings"]) else 0
