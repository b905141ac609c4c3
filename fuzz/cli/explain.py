"""Explains a finding (or a scenario, by running it): what must hold, why, what was seen instead, call by call.

redraft explain out/fuzz-.../findings/removal-seq_rm-hybrid-tail-0f93b3
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fuzz.cli.common import Usage, add_build, add_drivers, bench, check_duties, judge_of, read, stopped
from fuzz.finding import BadFinding, Finding, load_traces
from fuzz.repro.readme import explain
from fuzz.repro.words import program
from oracles.registry import by_name

HELP = "a finding as an argument: what must hold, why, and what was seen"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument("path", metavar="PATH", type=Path, help="a finding's folder, or a scenario (which is run)")
    add_build(p)
    add_drivers(p)


def run(args: argparse.Namespace) -> int:
    """Explain."""
    thing = read(args.path)
    if isinstance(thing, Finding):
        try:
            traces = load_traces(args.path)
        except BadFinding as e:
            raise Usage(str(e)) from None
        if "subject" not in traces:
            raise Usage(f"{args.path} has no trace.msgpack; `redraft replay` runs it again")
        sys.stdout.write(explain(thing, traces["subject"], traces.get("reference")))
        return 0
    with judge_of(bench(args.build, args.llama_src, args.driver_patch), thing) as (judge, model):
        check_duties(thing, model)
        judgement = judge.judge(thing, fresh=True, variants=True)
    for line in program(judgement.executed, judgement.account.ledger.trace):
        print(line)
    if not judgement.violations:
        if why := stopped(judgement):
            raise Usage(why)
        print(
            "\nNothing is violated."
            if judgement.judged
            else "\nNothing could be judged: " + "; ".join(sorted(set(judgement.unknown)))
        )
        return 0
    for v in judgement.violations[:5]:
        print(f"\n[{v.oracle}] " + by_name(v.oracle).explain(v))
    return 1
