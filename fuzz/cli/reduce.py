"""Finds the smallest program that still shows the violation of a scenario (or of the original program of a finding).

redraft reduce my-scenario.json --out reduced.json
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fuzz.cli.common import Usage, add_build, add_drivers, bench, check_duties, judge_of, read, stopped
from fuzz.cli.common import console as open_console
from fuzz.finding import Finding
from fuzz.triage import Triaged, triage
from subjects.scenario import dumps

HELP = "the smallest program that shows the same violation"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("path", metavar="PATH", type=Path, help="a scenario, or a finding's folder")
    p.add_argument(
        "--seconds",
        metavar="T",
        type=float,
        default=30.0,
        help="how long it may take (default 30); the best so far counts",
    )
    p.add_argument(
        "--out", metavar="FILE", type=Path, help="where the reduced scenario goes (default: standard output)"
    )
    add_build(p)
    add_drivers(p)


def run(args: argparse.Namespace) -> int:
    """Reduce."""
    thing = read(args.path)
    if args.out:
        _writable(args.out)
    scenario = thing.original if isinstance(thing, Finding) else thing
    console = open_console(stderr=True)
    with judge_of(bench(args.build, args.llama_src, args.driver_patch), scenario) as (judge, model):
        if not isinstance(thing, Finding):
            check_duties(scenario, model)
        judgement = judge.judge(scenario, fresh=True, observed=not isinstance(thing, Finding), variants=True)
        if not judgement.violations:
            if why := stopped(judgement):
                raise Usage(why)
            raise Usage("it shows no violation, so there is nothing to reduce (`redraft replay -v` shows what it does)")
        result = triage(judge, judgement, model.traits, seconds=args.seconds)
    if not isinstance(result, Triaged):
        raise Usage(f"its violation shows in {result[0]} of {result[1]} runs only")
    done = "" if result.complete else ", stopped by the time limit"
    console.print(
        f"{len(result.original.ops)} operations reduced to {len(result.scenario.ops)} in {result.tried} runs{done}: "
        f"{result.signature}"
    )
    if args.out:
        args.out.write_text(dumps(result.scenario))
    else:
        sys.stdout.write(dumps(result.scenario))
    return 0


def _writable(out: Path) -> None:
    """Raises Usage, before anything is run, where the result could not be kept."""
    if out.is_dir():
        raise Usage(f"cannot write {out}: Is a directory")
    there = out if out.exists() else out.parent
    if not os.access(there, os.W_OK):
        raise Usage(f"cannot write {out}: {'Permission denied' if there.exists() else 'No such file or directory'}")
