"""Finds the smallest program that still shows the violation of a scenario (or of the original program of a finding).

redraft reduce my-scenario.json --out reduced.json
redraft reduce my-requests.json --server-bin ~/llama.cpp/build/bin/llama-server
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fuzz.cli import served
from fuzz.cli.common import Usage, add_build, add_drivers, bench, check_duties, judge_of, read, stopped
from fuzz.cli.common import console as open_console
from fuzz.finding import Finding
from fuzz.programs import AnyProgram, dumps, size
from fuzz.server.finding import ServerFinding
from fuzz.server.triage import ServerTriaged
from fuzz.server.triage import triage as server_triage
from fuzz.triage import Triaged, triage
from subjects.scenario import Scenario
from subjects.server.scenario import ServerScenario

_NOTHING = "it shows no violation, so there is nothing to reduce (`redraft replay -v` shows what it does)"
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
    served.add_server(p)


def run(args: argparse.Namespace) -> int:
    """Reduce."""
    thing = read(args.path)
    server = isinstance(thing, ServerFinding | ServerScenario)
    served.check_fits(args, server=server)
    if args.out:
        _writable(args.out)
    result = _on_server(args, thing) if isinstance(thing, ServerFinding | ServerScenario) else _on_library(args, thing)
    if not isinstance(result, Triaged | ServerTriaged):
        raise Usage(f"its violation shows in {result[0]} of {result[1]} runs only")
    done = "" if result.complete else ", stopped by the time limit"
    reduced: AnyProgram = result.program if isinstance(result, ServerTriaged) else result.scenario
    open_console(stderr=True).print(
        f"{size(result.original)} {'requests' if server else 'operations'} reduced to {size(reduced)} in "
        f"{result.tried} runs{done}: {result.signature}"
    )
    if args.out:
        args.out.write_text(dumps(reduced))
    else:
        sys.stdout.write(dumps(reduced))
    return 0


def _on_library(args: argparse.Namespace, thing: Finding | Scenario) -> Triaged | tuple[int, int]:
    scenario = thing.original if isinstance(thing, Finding) else thing
    with judge_of(bench(args.build, args.llama_src, args.driver_patch), scenario) as (judge, model):
        if not isinstance(thing, Finding):
            check_duties(scenario, model)
        judgement = judge.judge(scenario, fresh=True, observed=not isinstance(thing, Finding), variants=True)
        if not judgement.violations:
            raise Usage(stopped(judgement) or _NOTHING)
        return triage(judge, judgement, model.traits, seconds=args.seconds)


def _on_server(args: argparse.Namespace, thing: ServerFinding | ServerScenario) -> ServerTriaged | tuple[int, int]:
    program = thing.original if isinstance(thing, ServerFinding) else thing
    served.check_duties(program)
    with served.judge_of(served.build(args), program) as (judge, model):
        judgement = judge.judge(program, fresh=True, variants=True)
        if not judgement.violations:
            raise Usage(served.stopped(judgement) or _NOTHING)
        return server_triage(judge, judgement, model.traits.memory, seconds=args.seconds)


def _writable(out: Path) -> None:
    """Raises Usage, before anything is run, where the result could not be kept."""
    if out.is_dir():
        raise Usage(f"cannot write {out}: Is a directory")
    there = out if out.exists() else out.parent
    if not os.access(there, os.W_OK):
        raise Usage(f"cannot write {out}: {'Permission denied' if there.exists() else 'No such file or directory'}")
