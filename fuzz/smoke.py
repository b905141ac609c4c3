"""Every recipe and every pair end to end, in half a minute: programs with all avoidances, run on the library, judged.

  python -m fuzz.smoke
  python -m fuzz.smoke --scale 5 --seed 7

All known faults are stepped round, so any violation that shows again in fresh contexts is new: it is kept as a scenario
in out/smoke (`redraft replay` runs it again, `redraft reduce` makes it small) and makes the exit code 1. What is
generated is fixed by the seed and counted in programs, not in time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.console import Console

from fuzz.avoid import AVOIDANCES, Avoider
from fuzz.cli.common import Bench, Usage, add_build, add_json, bench
from fuzz.drivers.avoid import DRIVER_AVOIDANCES
from fuzz.drivers.gen import strategy as driver_programs
from fuzz.models import from_pair, from_recipe
from fuzz.strategies import generate, scenarios
from fuzz.triage import RERUNS, VARIANTS, Symptom, find
from oracles.judge import Judge
from subjects import pairs
from subjects.recipes import get, names
from subjects.sandbox import Sandbox, SandboxError
from subjects.scenario import dumps

PROGRAMS = 32
# Recipes whose graphs cost far more than those of the others.
FEWER = {"deepseek4": 10}
KEPT = Path("out") / "smoke"


class Line(msgspec.Struct):
    """What one recipe or pair came to. `crashes` are those of the `violations` that ended the child."""

    recipe: str
    memory: str = "?"
    programs: int = 0
    judged: int = 0
    unknown: int = 0
    violations: int = 0
    crashes: int = 0
    unreproduced: int = 0
    seconds: float = 0.0
    new: list[str] = []
    trouble: str = ""

    @property
    def good(self) -> bool:
        """Nothing new, and something was judged."""
        return not self.violations and not self.trouble and self.judged > 0


def one(name: str, b: Bench, count: int, seed: int) -> Line:
    """One recipe. Never raises for anything that library or subject do."""
    began = time.monotonic()
    result = Line(name)
    try:
        _run(result, b, count, seed)
    except SandboxError as e:
        result.trouble = str(e)
    result.seconds = round(time.monotonic() - began, 2)
    return result


def _run(result: Line, b: Bench, count: int, seed: int) -> None:
    if result.recipe in pairs.names():
        model = from_pair(pairs.get(result.recipe), b.models)
        assert model.driver is not None
        avoid = tuple(DRIVER_AVOIDANCES)
        strategy = driver_programs(model.ref, model.driver, model.traits, model.n_rs, avoid)
    else:
        model = from_recipe(get(result.recipe), b.models)
        strategy = scenarios(model.ref, model.traits, avoid=Avoider(AVOIDANCES))
    result.memory = model.traits.memory
    programs = generate(strategy, seed, count)
    path = Path(model.path)
    driver = b.driver if model.driver else None
    with Sandbox(b.shim, [(path, 0)], driver=driver, drafts=model.drafts()) as sandbox:
        judge = Judge(sandbox, model.ref, path, b.build.fingerprint, b.cache)
        for program in programs:
            judgement = judge.judge(program)
            result.programs += 1
            result.judged += judgement.judged
            result.unknown += not judgement.judged
            if not judgement.violations:
                continue
            first = judgement.violations[0]
            symptom = Symptom.of(first)
            variants = symptom.oracle in VARIANTS
            again = (
                judge.judge(judgement.executed, fresh=True, observed=False, variants=variants) for _ in range(RERUNS)
            )
            if not any(find(j, symptom) for j in again):
                result.unreproduced += 1
                continue
            result.violations += 1
            result.crashes += first.kind == "crash"
            KEPT.mkdir(parents=True, exist_ok=True)
            kept = KEPT / f"{result.recipe}-{program.key()}.json"
            kept.write_text(dumps(msgspec.structs.replace(judgement.executed, note=first.because)), encoding="utf-8")
            result.new.append(f"{first.oracle}: {first.because} ({kept})")


def text(line: Line) -> str:
    """A recipe in one line."""
    verdict = "ok  " if line.good else "FAIL"
    return (
        f"{verdict} {line.recipe:14} {line.memory:10} {line.programs:4} programs {line.judged:4} judged "
        f"{line.unknown:3} unknown {line.violations:3} violations {line.crashes:3} crashes {line.seconds:6.1f} s"
        + (f"  {line.trouble}" if line.trouble else "")
    )


def run(args: argparse.Namespace) -> int:
    """Run all recipes, side by side."""
    console = Console(stderr=args.json, highlight=False, soft_wrap=True)
    b = bench(args.build)
    began = time.monotonic()
    lines: list[Line] = []
    # deepseek4 first: the longest should not be what all others have waited for
    order = sorted((*names(), *pairs.names()), key=lambda n: (n not in FEWER, n))
    jobs = min(args.jobs or os.cpu_count() or 1, len(order))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(one, n, b, max(1, round(FEWER.get(n, PROGRAMS) * args.scale)), args.seed) for n in order]
        for future in as_completed(waiting):
            line = future.result()
            lines.append(line)
            console.print(text(line), style=None if line.good else "bold red", markup=False)
            for new in line.new:
                console.print("     " + new, markup=False)
    lines.sort(key=lambda x: x.recipe)
    seconds = round(time.monotonic() - began, 1)
    bad = [x.recipe for x in lines if not x.good]
    total = sum(x.programs for x in lines)
    console.print(
        f"{len(lines)} recipes and pairs, {total} programs, {sum(x.judged for x in lines)} judged in {seconds} s: "
        + (f"not good: {', '.join(bad)}" if bad else "all good"),
        style="bold red" if bad else "bold green",
    )
    if args.json:
        document = {"build": b.build.fingerprint, "seed": args.seed, "seconds": seconds, "good": not bad}
        data = msgspec.json.encode({**document, "recipes": lines})
        sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")
    return 1 if bad else 0


def main(argv: list[str] | None = None) -> int:
    """Entry."""
    p = argparse.ArgumentParser(
        prog="python -m fuzz.smoke", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seed", type=int, default=0, metavar="S", help="another seed generates other programs (default 0)")
    p.add_argument("--scale", type=float, default=1.0, metavar="X", help="so many times the programs (default 1)")
    p.add_argument("--jobs", type=int, metavar="J", help="recipes side by side (default: one for each core)")
    add_build(p)
    add_json(p)
    try:
        return run(p.parse_args(argv))
    except Usage as e:
        print(f"python -m fuzz.smoke: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
