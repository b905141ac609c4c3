"""Explains a finding (or a scenario, by running it): what must hold, why, what was seen instead, call by call
(of llama-server: request by request).

redraft explain out/fuzz-.../findings/removal-seq_rm-hybrid-tail-0f93b3
redraft explain my-requests.json --server-bin ~/llama.cpp/build/bin/llama-server
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fuzz.cli import served
from fuzz.cli.common import Usage, add_build, add_drivers, bench, check_duties, judge_of, read, stopped
from fuzz.finding import BadFinding, Finding, load_traces
from fuzz.repro.readme import explain
from fuzz.repro.words import program
from fuzz.server import finding as server
from fuzz.server import readme as server_readme
from fuzz.server import words as server_words
from fuzz.server.finding import ServerFinding
from oracles.judge import Judgement
from oracles.registry import by_name
from oracles.server import registry as server_oracles
from oracles.server.judge import ServerJudgement
from subjects.server.scenario import ServerScenario

HELP = "a finding as an argument: what must hold, why, and what was seen"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("path", metavar="PATH", type=Path, help="a finding's folder, or a scenario (which is run)")
    add_build(p)
    add_drivers(p)
    served.add_server(p)


def run(args: argparse.Namespace) -> int:
    """Explain."""
    thing = read(args.path)
    served.check_fits(args, server=isinstance(thing, ServerFinding | ServerScenario))
    if isinstance(thing, Finding | ServerFinding):
        try:
            sys.stdout.write(_served(thing, args.path) if isinstance(thing, ServerFinding) else _kept(thing, args.path))
        except BadFinding as e:
            raise Usage(str(e)) from None
        return 0
    judgement: Judgement | ServerJudgement
    if isinstance(thing, ServerScenario):
        served.check_duties(thing)
        with served.judge_of(served.build(args), thing) as (servers, _):
            judgement = servers.judge(thing, fresh=True, variants=True)
        lines, why = server_words.program(thing, judgement.trace), served.stopped(judgement)
    else:
        with judge_of(bench(args.build, args.llama_src, args.driver_patch), thing) as (judge, model):
            check_duties(thing, model)
            judgement = judge.judge(thing, fresh=True, variants=True)
        lines, why = program(judgement.executed, judgement.account.ledger.trace), stopped(judgement)
    for line in lines:
        print(line)
    if not judgement.violations:
        if why:
            raise Usage(why)
        print(
            "\nNothing is violated."
            if judgement.judged
            else "\nNothing could be judged: " + "; ".join(sorted(set(judgement.unknown)))
        )
        return 0
    for v in judgement.violations[:5]:
        oracle = server_oracles.by_name(v.oracle) if isinstance(thing, ServerScenario) else by_name(v.oracle)
        print(f"\n[{v.oracle}] " + oracle.explain(v))
    return 1


def _kept(finding: Finding, path: Path) -> str:
    """Raises BadFinding, or Usage where there is no trace."""
    traces = load_traces(path)
    if "subject" not in traces:
        raise Usage(f"{path} has no trace.msgpack; `redraft replay` runs it again")
    return explain(finding, traces["subject"], traces.get("reference"))


def _served(finding: ServerFinding, path: Path) -> str:
    """Raises BadFinding."""
    trace, cold = server.load_trace(path)
    return server_readme.explain(finding, trace, cold)
