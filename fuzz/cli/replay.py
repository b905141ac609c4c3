"""Runs findings and scenarios again and says FIXED, FAILED, FLAKY (n of m) or ERROR for each.

  redraft replay out/fuzz-.../findings
  redraft replay corpora/scenarios --build ~/llama.cpp
  redraft replay out/.../findings/removal-seq_rm-hybrid-tail-0f93b3
  redraft replay out/.../crashes -v                   inputs of the coverage-guided engine that showed nothing elsewhere

A finding is FIXED when its violation does not show in any of the runs, a plain scenario when nothing is violated. Exit
0 when all are FIXED, 1 when one is FAILED or FLAKY, 2 when one could not be run.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape

from fuzz.cli.common import (
    Bench,
    Usage,
    add_build,
    add_drivers,
    add_json,
    bench,
    check_duties,
    expand,
    judge_of,
    read,
    stopped,
)
from fuzz.cli.common import console as open_console
from fuzz.finding import Finding
from fuzz.repro import commands
from fuzz.repro.words import program
from fuzz.triage import VARIANTS, Symptom, find
from oracles.judge import Judgement
from oracles.registry import by_name
from oracles.verdict import Violation

HELP = "run findings or scenarios again: FIXED, FAILED, FLAKY or ERROR"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    p.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=Path,
        help="a scenario, a folder of a finding or of a crash, or a folder of them",
    )
    p.add_argument("--runs", metavar="M", type=int, default=3, help="runs of each, in fresh contexts (default 3)")
    p.add_argument(
        "--verbose",
        "-v",
        action="store_true",
        help="show every operation with what it became and answered, and every oracle's verdict",
    )
    add_build(p)
    add_drivers(p)
    add_json(p)


def run(args: argparse.Namespace) -> int:
    """Replay."""
    b = bench(args.build, args.llama_src, args.driver_patch)
    console = open_console(stderr=args.json)
    results = [_one(path, b, args.runs) for path in expand(args.paths)]
    for text in dict.fromkeys(r["warning"] for r in results if r["warning"]):
        open_console(stderr=True).print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)
    for r in results:
        style = {"FIXED": "green", "FAILED": "red", "FLAKY": "yellow", "ERROR": "magenta"}[r["verdict"]]
        console.print(
            f"[bold {style}]{r['verdict']:6}[/] {r['shown']} of {r['runs']}  {escape(r['path'])}"
            + (f"  {escape(r['text'])}" if r["text"] else ""),
            highlight=False,
        )
        if args.verbose or r["verdict"] in ("FAILED", "FLAKY"):
            for line in r["operations"]:
                console.print("       " + line, highlight=False, markup=False)
        if args.verbose:
            for v in r["oracles"]:
                console.print("       " + _verdict(v), highlight=False, markup=False)
    if args.json:
        sys.stdout.write(
            msgspec.json.format(
                msgspec.json.encode({"build": b.build.fingerprint, "results": results}), indent=2
            ).decode()
            + "\n"
        )
    verdicts = {r["verdict"] for r in results}
    return 2 if "ERROR" in verdicts else 1 if verdicts & {"FAILED", "FLAKY"} else 0


def _one(path: Path, b: Bench, runs: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "path": os.fsencode(path).decode("utf-8", "backslashreplace"),  # any bytes may be in a name
        "verdict": "ERROR",
        "shown": 0,
        "runs": runs,
        "text": "",
        "warning": "",
        "operations": [],
        "oracles": [],
    }
    try:
        thing = read(path)
        scenario = thing.scenario if isinstance(thing, Finding) else thing
        symptom = Symptom.of(thing.violation) if isinstance(thing, Finding) and thing.violation else None
        with judge_of(b, scenario) as (judge, model):
            if isinstance(thing, Finding):
                result["warning"] = _other_drivers(thing, b)
            if symptom is None:
                check_duties(scenario, model)
            judgements = [
                judge.judge(
                    scenario,
                    fresh=True,
                    observed=symptom is None,
                    variants=symptom is None or symptom.oracle in VARIANTS,
                )
                for _ in range(runs)
            ]
    except Usage as e:
        return {**result, "text": str(e)}
    except Exception as e:  # one bad file must not cost the results of the others
        return {**result, "text": f"{type(e).__name__}: {e}"}
    wanted = thing.violation if isinstance(thing, Finding) else None
    shown = [j for j in judgements if (_again(j, wanted) if wanted else j.violations)]
    last = (shown or judgements)[-1]
    why = next((why for j in judgements if (why := stopped(j))), "")
    if why and not shown:
        return {**result, "text": why}
    verdict = "FAILED" if len(shown) == runs else "FIXED" if not shown else "FLAKY"
    return {
        **result,
        "verdict": verdict,
        "shown": len(shown),
        "text": _text(last, symptom, bool(shown)),
        "operations": _operations(last),
        "oracles": _verdicts(last),
    }


def _other_drivers(finding: Finding, b: Bench) -> str:
    """What to tell where a finding is replayed with other drivers than it was found with."""
    found = finding.environment
    driver = finding.scenario.driver
    if driver is None or driver.impl != "native" or "driver_fingerprint" not in found:
        return ""
    now = b.driver_origin()
    if found["driver_fingerprint"] == now["driver_fingerprint"]:
        return ""
    options = commands.options(finding)
    advice = f"; those that it was found with take{options}" if options else ""
    return f"found with drivers {found['drivers']}, replayed with drivers {now['drivers']}{advice}"


def _verdicts(j: Judgement) -> list[dict[str, Any]]:
    return [
        {"oracle": v.oracle, "value": v.value, "compared": v.compared, "unknown": list(v.unknown)} for v in j.verdicts
    ]


def _again(j: Judgement, violation: Violation) -> bool:
    """Whether a run shows a finding's violation again: as the first it shows, or behind another one."""
    return find(j, Symptom.of(violation)) is not None or by_name(violation.oracle).recheck(violation, j.account)


def _verdict(v: dict[str, Any]) -> str:
    """What one oracle says of the run, in a line."""
    reasons = "; ".join(sorted(set(v["unknown"])))
    return f"{v['oracle']}: {v['value']} ({v['compared']} compared, {len(v['unknown'])} unknown)" + (
        f": {reasons}" if reasons else ""
    )


def _text(j: Judgement, symptom: Symptom | None, failed: bool) -> str:
    if failed:
        same = [v for v in j.violations if Symptom.of(v) == symptom]
        return (same or j.violations)[0].because
    others = [v for v in j.violations if symptom is None or Symptom.of(v) != symptom]
    return f"but now {others[0].oracle}: {others[0].because}" if others else ""


def _operations(j: Judgement) -> list[str]:
    """Per operation: what it became, what it answered, and how far its rows are from the reference."""
    worst: dict[int, tuple[float, float]] = {}
    for c in j.account.compared:
        if c.error >= worst.get(c.claim.step, (-1.0, 0.0))[0]:
            worst[c.claim.step] = (c.error, c.band)
    lines = program(j.executed, j.account.ledger.trace)
    return [
        line + (f"   largest difference {worst[i][0]:.3g} (band {worst[i][1]:.2g})" if i in worst else "")
        for i, line in enumerate(lines)
    ]
