"""Runs findings and scenarios again and says FIXED, FAILED, FLAKY (n of m) or ERROR for each.

  redraft replay out/fuzz-.../findings
  redraft replay corpora/scenarios --build ~/llama.cpp
  redraft replay out/.../findings/removal-seq_rm-hybrid-tail-0f93b3
  redraft replay out/.../crashes -v                   inputs of the coverage-guided engine that showed nothing elsewhere
  redraft replay out/.../findings --server-bin ~/llama.cpp/build/bin/llama-server       findings of llama-server

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

from fuzz.cli import served
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
from fuzz.server import triage as server_triage
from fuzz.server import words as server_words
from fuzz.server.finding import ServerFinding
from fuzz.triage import VARIANTS, Symptom, find
from oracles.judge import Judgement
from oracles.registry import by_name
from oracles.server.judge import ServerJudgement
from oracles.verdict import Verdict, Violation
from subjects.scenario import Scenario
from subjects.server.build import ServerBuild
from subjects.server.scenario import ServerScenario

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
    p.add_argument(
        "--runs",
        metavar="M",
        type=int,
        default=3,
        help="runs of each, in fresh contexts or on fresh servers (default 3)",
    )
    p.add_argument(
        "--verbose",
        "-v",
        action="store_true",
        help="show every operation with what it became and answered, and every oracle's verdict",
    )
    add_build(p)
    add_drivers(p)
    served.add_server(p)
    add_json(p)


class Beds:
    """What replays run on, found when the first one needs it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._library: Bench | None = None
        self._server: ServerBuild | None = None
        self.named_library = any(getattr(args, o) for o in served.LIBRARY_OPTIONS)
        self.named_server = any(getattr(args, o) for o in served.SERVER_OPTIONS)

    def library(self) -> Bench:
        """The library. Raises Usage."""
        if self.named_server and not self.named_library:  # who names both has programs of both
            served.check_fits(self.args, server=False)
        if self._library is None:
            self._library = bench(self.args.build, self.args.llama_src, self.args.driver_patch)
        return self._library

    def server(self) -> ServerBuild:
        """The llama-server. Raises Usage."""
        if self.named_library and not self.named_server:
            served.check_fits(self.args, server=True)
        if self._server is None:
            self._server = served.build(self.args)
        return self._server

    def fingerprints(self) -> dict[str, str | None]:
        """What was used, by subject, for --json."""
        found: dict[str, str | None] = {"build": self._library.build.fingerprint if self._library else None}
        return found | ({"server": self._server.fingerprint} if self._server else {})


def run(args: argparse.Namespace) -> int:
    """Replay."""
    beds = Beds(args)
    paths = expand(args.paths)
    if beds.named_library or beds.named_server:
        for_server = [_for_server(path) for path in paths]
        # what is named must be there, where something runs on it
        if beds.named_library and not all(for_server):
            beds.library()
        if beds.named_server and any(for_server):
            beds.server()
    console = open_console(stderr=args.json)
    results = [_one(path, beds, args.runs) for path in paths]
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
            msgspec.json.format(msgspec.json.encode({**beds.fingerprints(), "results": results}), indent=2).decode()
            + "\n"
        )
    verdicts = {r["verdict"] for r in results}
    return 2 if "ERROR" in verdicts else 1 if verdicts & {"FAILED", "FLAKY"} else 0


def _for_server(path: Path) -> bool:
    """Whether a program is of llama-server; False where it cannot be read, which is told of in its turn."""
    try:
        return isinstance(read(path), ServerFinding | ServerScenario)
    except Usage:
        return False


def _one(path: Path, beds: Beds, runs: int) -> dict[str, Any]:
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
        if isinstance(thing, ServerFinding | ServerScenario):
            seen = _on_servers(thing, beds.server(), runs)
        else:
            seen = _on_library(thing, beds.library(), runs)
    except Usage as e:
        return {**result, "text": str(e)}
    except Exception as e:  # one bad file must not cost the results of the others
        return {**result, "text": f"{type(e).__name__}: {e}"}
    return {**result, **seen}


def _on_library(thing: Finding | Scenario, b: Bench, runs: int) -> dict[str, Any]:
    """What the runs showed. Raises Usage."""
    scenario = thing.scenario if isinstance(thing, Finding) else thing
    wanted = thing.violation if isinstance(thing, Finding) else None
    symptom = Symptom.of(wanted) if wanted else None
    warning = ""
    with judge_of(b, scenario) as (judge, model):
        if isinstance(thing, Finding):
            warning = _other_drivers(thing, b)
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
    shown = [j for j in judgements if (_again(j, wanted) if wanted else j.violations)]
    last = (shown or judgements)[-1]
    why = next((why for j in judgements if (why := stopped(j))), "")
    if why and not shown:
        return {"warning": warning, "text": why}
    return {
        "warning": warning,
        **_verdict_of(len(shown), runs),
        "text": _text(last.violations, symptom, bool(shown)),
        "operations": _operations(last),
        "oracles": _verdicts(last.verdicts),
    }


def _on_servers(thing: ServerFinding | ServerScenario, build: ServerBuild, runs: int) -> dict[str, Any]:
    """The same of a program for llama-server. Raises Usage."""
    scenario = thing.scenario if isinstance(thing, ServerFinding) else thing
    symptom = Symptom.of(thing.violation) if isinstance(thing, ServerFinding) and thing.violation else None
    if symptom is None:
        served.check_duties(scenario)
    variants = symptom is None or symptom.oracle in server_triage.VARIANTS
    with served.judge_of(build, scenario) as (judge, _):
        judgements = [judge.judge(scenario, fresh=True, variants=variants) for _ in range(runs)]

    def shows(j: ServerJudgement) -> bool:
        return any(symptom is None or Symptom.of(v) == symptom for v in j.violations)

    shown = [j for j in judgements if shows(j)]
    if shown and symptom and symptom.oracle == server_triage.ALIVE:  # it may end in different ways (see triage)
        shown = [j for j in judgements if shows(j) or server_triage.died(j)]
    last = (shown or judgements)[-1]
    why = next((why for j in judgements if (why := served.stopped(j))), "")
    if why and not shown:
        return {"text": why}
    return {
        **_verdict_of(len(shown), runs),
        "text": _text(last.violations, symptom, bool(shown)),
        "operations": server_words.program(scenario, last.trace),
        "oracles": _verdicts(last.verdicts),
    }


def _verdict_of(shown: int, runs: int) -> dict[str, Any]:
    return {"verdict": "FAILED" if shown == runs else "FLAKY" if shown else "FIXED", "shown": shown}


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


def _verdicts(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    return [
        {"oracle": v.oracle, "value": v.value, "compared": v.compared, "unknown": list(v.unknown)} for v in verdicts
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


def _text(violations: list[Violation], symptom: Symptom | None, failed: bool) -> str:
    if failed:
        same = [v for v in violations if Symptom.of(v) == symptom]
        return (same or violations)[0].because
    others = [v for v in violations if symptom is None or Symptom.of(v) != symptom]
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
