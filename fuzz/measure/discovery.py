"""How soon the faults that started redraft are found: from each seed a campaign of its own, without avoidance.

  ci/discovery
  ci/discovery --driver
  ci/discovery --blobs
  ci/discovery --coverage
  ci/discovery --server
  ci/discovery --server-others
  ci/discovery --seeds 3 --seconds 60 --keep out/discovery

Five are of llama.h's own calls; --driver is about the sixth, the state that draft-mtp keeps and does not offer; --blobs
about four that malformed states show, and --coverage about the same four by the coverage-guided engine. --server is
about the llama-server that dies at its first request with draft-mtp and a small micro-batch, --server-others about the
other known faults of llama-server that show without a driver. A campaign ends when all are found.

A trial counts as found when a finding is known by the fault's name. What was not found in time is shown as "-" and
counts as not found: no trial is left out. Time is from the campaign's start to the finished (confirmed, reduced,
written) finding. Exit 0 when each fault is found in at least 9 of 10 trials and reduced to at most 6 operations (5 with
--driver, one request with --server, 12 with --server-others) and, recurrent-cells, to at most 2 edits of states; 1 when
not, 2 when a campaign could not be run, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fuzz.found import size_of
from fuzz.known import load_all, scenario_of
from fuzz.server.finding import load_any
from subjects.scenario import Corrupt
from subjects.server.scenario import DamageFile, ServerScenario

ROOT = Path(__file__).resolve().parents[2]
REDRAFT = [str(Path(sys.executable).with_name("redraft"))]
SHARE = 0.9


@dataclass(frozen=True)
class Figure:
    """What must be found, in which time, and how small; and what is added to the command. edits: most edits of saved
    states in the smallest program, of the faults where that is asked for."""

    faults: tuple[str, ...]
    seconds: float
    operations: int
    options: tuple[str, ...] = ()
    edits: Mapping[str, int] = field(default_factory=dict)


PLAIN = Figure(("ubatch-rollback", "device-corrupt", "device-foreign", "device-older", "stale-rollback"), 90.0, 6)
BLOBS = Figure(
    ("device-corrupt", "device-foreign", "device-older", "recurrent-cells"), 60.0, 6, edits={"recurrent-cells": 2}
)
# there each of the four steps out of the way once it is found: a target that ends at once finds nothing else
COVERAGE = Figure(BLOBS.faults, 300.0, 6, ("--engine", "coverage", "--avoid", "auto"), BLOBS.edits)
DRIVER = Figure(("driver-unoffered",), 30.0, 5, ("--driver", "draft-mtp"))
# an operation is a request there
SERVER = Figure(("server-ubatch",), 30.0, 1, ("--subject", "server", "--driver", "qwen35-mtp"))


def server_others() -> Figure:
    """The other faults of llama-server in corpora/known that show without a driver. Raises Stop without any."""
    others = [k for k in load_all() if k.subject == "server" and k.name not in SERVER.faults]
    names = tuple(k.name for k in others if scenario_of(k).driver is None)
    if not names:
        raise Stop("corpora/known has no other fault of llama-server without a driver")
    # each is stepped round once it is found: one that every program shows hides the others
    return Figure(names, 300.0, 12, ("--subject", "server", "--avoid", "auto"))


class Stop(Exception):
    """A campaign could not be run; the message says why."""


def main() -> int:
    """Entry."""
    p = argparse.ArgumentParser(
        prog="ci/discovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--seeds", type=_at_least_one, default=10, metavar="N", help="trials, with seeds 1 to N (default 10)"
    )
    p.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="length of each (default 90; --driver and --server 30, --blobs 60, else 300)",
    )
    which = p.add_mutually_exclusive_group()
    which.add_argument("--driver", action="store_true", help="the missing state of draft-mtp instead of the five")
    which.add_argument("--blobs", action="store_true", help="the four of malformed states instead")
    which.add_argument("--coverage", action="store_true", help="the same four by the coverage-guided engine")
    which.add_argument("--server", action="store_true", help="the llama-server that dies at its first request instead")
    which.add_argument("--server-others", action="store_true", help="the other known faults of llama-server instead")
    p.add_argument("--jobs", type=_at_least_one, metavar="J", help="processes of each (default: one for each core)")
    p.add_argument("--build", type=Path, metavar="DIR", help="another llama.cpp, as for `redraft fuzz`")
    p.add_argument("--keep", type=Path, metavar="DIR", help="keep the campaigns there (default: removed at the end)")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output, for machines")
    args = p.parse_args()
    console = Console(stderr=args.json, soft_wrap=True)
    try:
        figure = figure_of(args)
    except Stop as e:
        print(f"ci/discovery: {e}", file=sys.stderr)
        return 2
    args.seconds = args.seconds or figure.seconds
    scratch = Path(tempfile.mkdtemp(prefix="redraft-discovery-")) if args.keep is None else args.keep.resolve()
    trials: list[dict[str, Any]] = []
    try:
        for seed in range(1, args.seeds + 1):
            trials.append(trial(args, figure, seed, scratch / f"seed-{seed}"))
            console.print(line(trials[-1]), highlight=False)
    except Stop as e:
        print(f"ci/discovery: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if args.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    result = summary(trials, figure, args.seconds)
    show(result, console)
    if args.json:
        print(json.dumps(result, indent=2))
    return 0 if result["reached"] else 1


def figure_of(args: argparse.Namespace) -> Figure:
    """The figure that is asked for. Raises Stop."""
    if args.server_others:
        return server_others()
    named = {"driver": DRIVER, "blobs": BLOBS, "coverage": COVERAGE, "server": SERVER}
    return next((figure for name, figure in named.items() if getattr(args, name)), PLAIN)


def _at_least_one(text: str) -> int:
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return n


def trial(args: argparse.Namespace, figure: Figure, seed: int, out: Path) -> dict[str, Any]:
    """One campaign, and what it found."""
    avoid = [] if "--avoid" in figure.options else ["--avoid", "never"]
    command = [*REDRAFT, "fuzz", *avoid, "--minutes", f"{args.seconds / 60:.6f}", "--seed", str(seed)]
    command += ["--out", str(out), "--json", *figure.options]
    command += ["--jobs", str(args.jobs)] if args.jobs else []
    command += ["--build", str(args.build.resolve())] if args.build else []
    with tempfile.TemporaryFile() as output:
        # in a session of its own: Ctrl-C is ours to hand on
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            stopped = _wait(process, out, figure, args.seconds)
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        output.seek(0)
        text = output.read()
    if process.returncode == 130 and not stopped:
        raise KeyboardInterrupt
    if not text:
        raise Stop(f"the campaign with seed {seed} ended with {process.returncode}; try {' '.join(command)}")
    document = json.loads(text)
    others = sorted({f["signature"] for f in document["findings"] if f["known"] is None})
    return {
        "seed": seed,
        "exit": process.returncode,
        "scenarios": document["scenarios"],
        "per_second": document["per_second"],
        "faults": smallest(figure, out, document["findings"]),
        "findings": len(document["findings"]),
        "new": others,
    }


def smallest(figure: Figure, out: Path, findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each fault when it was found in a campaign (None: not in time), and the size of its smallest program, which
    of two with as many operations is the one with fewer edits."""
    faults: dict[str, Any] = dict.fromkeys(figure.faults)
    for f in findings:
        name = f["known"]
        if name not in faults:
            continue
        long, _ = size_of(f)
        at, size = since_start(out, Path(f["path"])), (long, edits_of(Path(f["path"])))
        before = faults[name] or {"seconds": at, "operations": size[0], "edits": size[1], "largest": 0, "findings": 0}
        operations, edits = min(size, (before["operations"], before["edits"]))
        faults[name] = {
            "seconds": min(at, before["seconds"]),
            "operations": operations,
            "edits": edits,
            "largest": max(before["largest"], long),
            "findings": before["findings"] + 1,
        }
    return faults


def _wait(process: subprocess.Popen[bytes], out: Path, figure: Figure, seconds: float) -> bool:
    """Wait for a campaign's end; whether it was ended because all faults were found. Raises Stop if it does not end."""
    # a finding that is being reduced at the end of the time is still finished
    until = time.monotonic() + seconds + 300
    stopped = False
    while process.poll() is None:
        if time.monotonic() > until:
            process.kill()
            process.wait()
            raise Stop(f"the campaign in {out.name} did not end")
        if not stopped and {*figure.faults} <= _known(out):
            stopped = True
            process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    return stopped


def _known(out: Path) -> set[str]:
    """Names of the known faults that a campaign has found so far."""
    found = set()
    for path in (out / "findings").glob("*/finding.json"):
        with contextlib.suppress(OSError, ValueError):
            found.add(json.loads(path.read_bytes()).get("known") or "")
    return found


def edits_of(folder: Path) -> int:
    """How many edits of saved states a finding's program makes."""
    program = load_any(folder).scenario
    ops = program.requests if isinstance(program, ServerScenario) else program.ops
    return sum(len(op.edits) for op in ops if isinstance(op, Corrupt | DamageFile))


def since_start(out: Path, folder: Path) -> float:
    """Seconds from a campaign's start to a finding: from the times of their files, which are written once."""
    start = (out / "campaign.json").stat().st_mtime
    return round((folder / "finding.json").stat().st_mtime - start, 1)


def line(t: dict[str, Any]) -> str:
    """A trial in one line, as soon as it is over."""
    found = sum(f is not None for f in t["faults"].values())
    return (
        f"seed {t['seed']}: {found} of {len(t['faults'])} faults; {t['scenarios']} scenarios "
        f"({t['per_second']:.0f}/s), {t['findings']} findings, {len(t['new'])} of them new"
    )


def summary(trials: list[dict[str, Any]], figure: Figure, seconds: float) -> dict[str, Any]:
    """All trials against the figure."""
    need = math.ceil(SHARE * len(trials))
    faults = {}
    for name in figure.faults:
        got = [t["faults"][name] for t in trials if t["faults"][name]]
        times = sorted(g["seconds"] for g in got)
        # censored trials count as later than all others, so that the median is one of all trials
        middle = (len(trials) - 1) // 2
        operations, edits = (max((g[what] for g in got), default=None) for what in ("operations", "edits"))
        small = operations is not None and operations <= figure.operations
        most = figure.edits.get(name)
        faults[name] = {
            "found": len(got),
            "of": len(trials),
            "median_seconds": times[middle] if middle < len(times) else None,
            "max_seconds": times[-1] if len(times) == len(trials) else None,
            "max_operations": operations,
            "max_edits": edits,
            "most_edits": most,
            "largest": max((g["largest"] for g in got), default=None),
            "reached": len(got) >= need and small and (most is None or (edits is not None and edits <= most)),
        }
    return {
        "seconds": seconds,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "needed": need,
        "operations": figure.operations,
        "reached": all(f["reached"] for f in faults.values()),
        "faults": faults,
        "trials": trials,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """The table: a row for each trial, a column for each fault."""
    limit = f"{result['seconds']:g} s"
    title = (
        "Seconds to the first finding, and the operations of its smallest program (+ its edits of states); "
        f"- means not found in {limit}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("seed")
    names = list(result["faults"])
    for name in names:
        table.add_column(name.replace("-", "-\n"), justify="right")
    for t in result["trials"]:
        cells = (t["faults"][n] for n in names)
        table.add_row(str(t["seed"]), *(f"{c['seconds']:.0f} s, {_size(c)}" if c else "-" for c in cells))
    table.add_section()
    each = [result["faults"][n] for n in names]
    table.add_row("found", *(f"{f['found']} of {f['of']}" for f in each))
    table.add_row("median", *("-" if f["median_seconds"] is None else f"{f['median_seconds']:.0f} s" for f in each))
    table.add_row("max", *("-" if f["max_seconds"] is None else f"{f['max_seconds']:.0f} s" for f in each))
    table.add_row("max operations", *("-" if f["max_operations"] is None else str(f["max_operations"]) for f in each))
    if any(f["max_edits"] for f in each):
        table.add_row("max edits", *("-" if f["max_edits"] is None else str(f["max_edits"]) for f in each))
    console.print(table)
    missed = [n for n in names if not result["faults"][n]["reached"]]
    figure = (
        f"each in at least {result['needed']} of {len(result['trials'])}, at most {result['operations']} operations"
    )
    for name, f in result["faults"].items():
        figure += f", {name} at most {f['most_edits']} edits" if f["most_edits"] is not None else ""
    console.print(
        f"{'missed' if missed else 'reached'}: {figure}" + (f"; not so {', '.join(missed)}" if missed else ""),
        style="bold red" if missed else "bold green",
        highlight=False,
    )


def _size(smallest: dict[str, Any]) -> str:
    edits = f"+{smallest['edits']}" if smallest["edits"] else ""
    return f"{smallest['operations']}{edits}"


if __name__ == "__main__":
    sys.exit(main())
