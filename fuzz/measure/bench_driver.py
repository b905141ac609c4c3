"""How fast programs with a speculative driver run: redraft, executing and judging, against plain C++.

This is ci/bench --driver.

What is compared, on one core:

  redraft  executes and judges a fixed list of generated programs, as a campaign does: every program and every reference
           in contexts of its own, references remembered (none at the start), everything in a warm child
  native   a C++ program over llama.h and common/speculative.h (bench_driver.cpp) makes the same calls with nothing
           around them, nothing compared or judged; they were noted in a child where they are made. One program in eight
           runs a second time with redraft's own driver in Python; there native takes llama.cpp's
  apart    the same with nothing shared between programs: all references that each program's judgement needs

The figure to reach is redraft / native <= 2.0, of processor time, which others on the machine disturb least. Bands are
measured once for each set of parameters, before anything is timed; `cold` is one pass in which redraft measures those
of drivers anew, and the C++ program makes these calls too. Both sides have the same settings of malloc (those of the
sandbox).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fuzz.drivers.avoid import DRIVER_AVOIDANCES
from fuzz.drivers.gen import strategy
from fuzz.job import SLICE
from fuzz.loop import slice_seed
from fuzz.measure.bench import (
    BUSY,
    ROOT,
    Recorder,
    Redraft,
    Subject,
    Usage,
    child_cpu,
    descendants,
    own_cpu,
    pin,
    say,
    spread,
)
from fuzz.measure.bench_child import profile_text
from fuzz.measure.bench_driver_calls import compile_native
from fuzz.models import Model, from_pair
from fuzz.strategies import generate
from oracles.drive import DriverReferences
from oracles.judge import Judge
from oracles.reference import References
from subjects import pairs
from subjects.builds import BadBuild, Build, cache_dir, compile_shim, cpu_model, driver_library, find_build
from subjects.child import Replay
from subjects.sandbox import _MALLOC, SandboxError
from subjects.scenario import Scenario
from subjects.trace import Trace

LIMIT = 2.0
AVOID = tuple(DRIVER_AVOIDANCES)
"""Known faults of drivers, which programs step round, so that they have no findings."""
WARM_BLOCKS = 100


class Native(msgspec.Struct, frozen=True):
    """What bench_driver printed."""

    wall: float
    cpu: float
    blocks: int
    contexts: int
    drivers: int
    decodes: int
    rows: int
    outputs: int
    processed: int
    drafts: int
    draft_decodes: int
    draft_outputs: int
    saves: int
    restores: int
    differs: int
    sum: str


@dataclass(frozen=True)
class CallFile:
    """A list of calls on disk, and the models that it needs."""

    path: Path
    models: tuple[str, ...]


@dataclass
class Setting:
    """What is measured: build, models, the judge and what it runs in."""

    build: Build
    shim: Path
    driver: Path
    model: Model
    judge: Judge
    sandbox: Subject

    def forget(self, *, bands: bool = False) -> None:
        """No references, as at the start of a campaign; and no bands of drivers."""
        if bands:  # nor those that are kept on disk
            self.judge.driver_bands, self.judge._cache = None, None
        self.judge.references = References()
        self.judge.driver_references = DriverReferences(self.model.ref, self.judge._many)


@dataclass
class Recorded:
    """The fixed list, and the requests that it takes: as redraft makes them, with nothing shared, and with bands that
    are measured anew."""

    programs: list[Scenario] = field(default_factory=list)
    left_out: int = 0
    same: list[bytes] = field(default_factory=list)
    apart: list[bytes] = field(default_factory=list)
    cold: list[bytes] = field(default_factory=list)


def make_programs(model: Model, count: int, seed: int) -> list[Scenario]:
    """The fixed list."""
    assert model.driver is not None
    made: list[Scenario] = []
    for number in range(-(-count // SLICE)):
        n = slice_seed(seed, 0, 1, number)
        made += generate(strategy(model.ref, model.driver, model.traits, model.n_rs, AVOID), n, SLICE)
    return made[:count]


def timed(s: Setting, programs: Sequence[Scenario], *, cold: bool = False) -> Redraft:
    """Execute and judge all programs, with no references at the start. `cold`: and no bands of drivers."""
    s.forget(bands=cold)
    s.sandbox.zero()
    judged = violating = 0
    pids = descendants()
    own, child, began = own_cpu(), child_cpu(pids), time.perf_counter()
    for program in programs:
        result = s.judge.judge(program)
        judged += result.judged
        violating += bool(result.violations)
    wall = time.perf_counter() - began
    box = s.sandbox
    used = own_cpu() - own, child_cpu(pids) - child
    return Redraft(wall, *used, box.requests, box.subjects, box.references, judged, violating)


def record(s: Setting, programs: Sequence[Scenario]) -> Recorded:
    """Run and judge everything, untimed, and keep the requests that this takes."""
    found = Recorded()
    for program in programs:
        s.judge.judge(program)  # first, so that no measuring of a band is taken for a part of a program
    for program in programs:
        s.forget()
        runs, requests = recording(s, [program])
        if all(trace.end.how == "ok" for _, trace, _ in runs):
            found.programs.append(program)
            found.apart += requests
    found.left_out = len(programs) - len(found.programs)
    s.forget()
    found.same = recording(s, found.programs)[1]
    s.forget(bands=True)
    found.cold = recording(s, found.programs)[1]
    return found


def recording(
    s: Setting, programs: Sequence[Scenario]
) -> tuple[list[tuple[Scenario | Replay, Trace, bool]], list[bytes]]:
    """Run and judge; what ran, and the requests."""
    recorder = s.sandbox.recorder = Recorder()
    for program in programs:
        s.judge.judge(program)
    s.sandbox.recorder = None
    return recorder.runs, recorder.requests


def child_env() -> dict[str, str]:
    """As the sandbox sets it."""
    return {**_MALLOC, **os.environ, "GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}


def child(s: Setting, requests: Sequence[bytes], folder: Path, *more: str) -> dict[str, Any]:
    """Run requests in a process of its own; see bench_child."""
    path = folder / "requests"
    path.write_bytes(b"".join(len(r).to_bytes(4, "little") + r for r in requests))
    command = [sys.executable, "-m", "fuzz.measure.bench_child", str(s.shim), s.model.path, str(path)]
    done = subprocess.run(
        [*command, "--driver", str(s.driver), *more], capture_output=True, text=True, env=child_env(), check=False
    )
    if done.returncode:
        raise Usage(f"the child that makes the calls ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def noted(s: Setting, requests: Sequence[bytes], folder: Path, name: str) -> CallFile:
    """The calls of requests."""
    to = folder / name
    answer = child(s, requests, folder, "--note", str(to))
    return CallFile(to, tuple(answer["models"]))


def native(program: Path, calls: CallFile) -> Native:
    """Run the C++ program once."""
    command = [str(program), str(calls.path), str(WARM_BLOCKS), *calls.models]
    done = subprocess.run(command, capture_output=True, text=True, env=child_env(), check=False)
    if done.returncode:
        raise Usage(f"the C++ program ended with {done.returncode}: {done.stderr.strip()[-500:] or 'no message'}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Native)


def report(
    s: Setting,
    core: int | None,
    seed: int,
    recorded: Recorded,
    passes: Sequence[Redraft],
    same: Sequence[Native],
    apart: Sequence[Native],
    cold: tuple[Redraft, Native],
) -> dict[str, Any]:
    """All numbers."""
    n, last = len(recorded.programs), passes[-1]
    wall = statistics.median(p.wall for p in passes)
    calls = statistics.median(f.cpu for f in same)
    child = statistics.median(p.cpu_child for p in passes)
    own = statistics.median(p.cpu_own for p in passes)
    return {
        "build": s.build.name,
        "llama_cpp": s.build.version or "unknown",
        "pair": s.model.pair,
        "cpu": cpu_model(),
        "core": core,
        "python": platform.python_version(),
        "seed": seed,
        "programs": n,
        "left_out": recorded.left_out,
        "judged": last.judged,
        "violating": last.violating,
        "ratio_wall": spread([p.wall / f.wall for p, f in zip(passes, same, strict=True)]),
        "ratio_cpu": spread([p.cpu / f.cpu for p, f in zip(passes, same, strict=True)]),
        "ratio_apart_wall": spread([p.wall / f.wall for p, f in zip(passes, apart, strict=True)]),
        "ratio_apart_cpu": spread([p.cpu / f.cpu for p, f in zip(passes, apart, strict=True)]),
        "shared_core": statistics.median(f.wall / f.cpu for f in same) > BUSY,
        "programs_per_second": n / wall,
        "ms_per_program": 1e3 * wall / n,
        "ratio_cold_cpu": cold[0].cpu / cold[1].cpu,
        "cold": {**asdict(cold[0]), "cpu": cold[0].cpu},
        "cold_native": msgspec.to_builtins(cold[1]),
        "orchestrator_seconds": own,
        "child_python_seconds": child - calls,
        "native_call_seconds": calls,
        "requests": last.requests,
        "differs": same[-1].differs,
        "apart_differs": apart[-1].differs,
        "redraft": [{**asdict(p), "cpu": p.cpu} for p in passes],
        "native": [msgspec.to_builtins(f) for f in same],
        "apart": [msgspec.to_builtins(f) for f in apart],
    }


def show(r: dict[str, Any]) -> str:
    """The numbers for people."""
    n, f = r["programs"], r["native"][-1]
    lines = [f"{n} driver programs of {r['pair']} (seed {r['seed']}) on {r['build']}, {r['cpu']}, core {r['core']}"]
    if r["left_out"]:
        lines.append(f"  {r['left_out']} left out: they end the process that runs them")
    lines += [
        f"  calls: {f['blocks']} runs, {f['contexts']} contexts, {f['drivers']} drivers, {f['decodes']} decodes of "
        f"targets ({f['rows']} rows, {f['outputs']} read), {f['processed']} processed, {f['drafts']} drafts, "
        f"{f['draft_decodes']} decodes of drafts; {r['apart'][-1]['blocks']} runs with nothing shared",
        "",
        "  pair   redraft wall    cpu (own + child)      native wall    cpu   redraft / native  wall   cpu",
    ]
    for i, (p, f) in enumerate(zip(r["redraft"], r["native"], strict=True), 1):
        lines.append(
            f"  {i:4}   {p['wall']:10.2f} s {p['cpu']:6.2f} ({p['cpu_own']:.2f} + {p['cpu_child']:.2f}) s"
            f"   {f['wall']:10.2f} s {f['cpu']:6.2f} s {'':16} {p['wall'] / f['wall']:6.2f} {p['cpu'] / f['cpu']:6.2f}"
        )
    w, c, a = r["ratio_wall"], r["ratio_cpu"], r["ratio_apart_cpu"]
    lines += [
        "",
        f"redraft / native = {c['median']:.2f} x (processor time, one core; {c['min']:.2f} to {c['max']:.2f}), "
        f"{w['median']:.2f} x (wall)",
        f"redraft / apart  = {a['median']:.2f} x (processor time): native with nothing shared between programs",
    ]
    if r["shared_core"]:
        lines.append("  others had the core in between: the ratio of the processor times is the one to believe")
    lines += [
        f"redraft / native = {r['ratio_cold_cpu']:.2f} x (processor time) where bands are measured anew on both sides: "
        f"{r['cold']['cpu']:.2f} s, {r['cold_native']['blocks']} runs",
        f"  {r['programs_per_second']:.0f} programs/s ({r['ms_per_program']:.2f} ms each)",
    ]
    parts = (
        ("orchestrator (ledger, comparison, oracles, encoding)", "orchestrator_seconds"),
        ("child besides the library (runner, ctypes, hashes, answers)", "child_python_seconds"),
        ("the library's calls themselves", "native_call_seconds"),
    )
    total = sum(r[key] for _, key in parts)
    lines.append(f"  where redraft's {total:.2f} s of processor time go ({r['requests']} round trips):")
    for words, key in parts:
        lines.append(
            f"    {r[key]:6.2f} s {100 * r[key] / total:3.0f} %  {1e6 * r[key] / n:6.0f} us a program  {words}"
        )
    if r["judged"] < n or r["violating"]:
        lines.append(f"  {r['judged']} of {n} judged, {r['violating']} with violations")
    if r["differs"] or r["apart_differs"]:
        lines.append(
            f"  {r['differs']} (native) and {r['apart_differs']} (apart) answers differ from what was recorded"
        )
    return "\n".join(lines)


def show_profile(s: Setting, recorded: Recorded, folder: Path) -> str:
    """Profiles of both sides, each slower than without."""
    profile = cProfile.Profile()
    profile.enable()
    took = timed(s, recorded.programs)
    profile.disable()
    theirs = child(s, recorded.same, folder)
    return "\n".join(
        [
            f"== orchestrator, by own time ({took.cpu_own:.2f} s of processor under the profiler)",
            profile_text(profile, 40, "tottime"),
            "== orchestrator, cumulative",
            profile_text(profile, 40, "cumulative"),
            f"== child, by own time ({theirs['cpu']:.2f} s without the profiler, {theirs['cpu_profiled']:.2f} s with "
            "it)",
            theirs["own"],
            "== child, cumulative",
            theirs["cumulative"],
        ]
    )


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Do all of it."""
    core = pin(args.cpu)
    try:
        build = find_build(args.build)
        shim, driver = compile_shim(build), driver_library(build, args.llama_src)
        model = from_pair(pairs.get(args.pair), cache_dir() / "models")
    except (BadBuild, KeyError) as e:
        raise Usage(str(e.args[0])) from None
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as tmp:
        try:
            program = compile_native(build, args.llama_src, Path(tmp) / "bench_driver")
        except BadBuild as e:
            raise Usage(str(e)) from None
        programs = make_programs(model, args.scenarios, args.seed)
        say(f"{len(programs)} programs made; measuring bands and recording calls (four passes)")
        with Subject(shim, [(Path(model.path), 0)], driver=driver, drafts=model.drafts()) as sandbox:
            judge = Judge(sandbox, model.ref, Path(model.path), build.fingerprint, cache_dir())
            s = Setting(build, shim, driver, model, judge, sandbox)
            recorded = record(s, programs)
            if not recorded.programs:
                raise Usage("no program of the list ends well: nothing to measure; try another --seed or --pair")
            same_calls = noted(s, recorded.same, Path(tmp), "same")
            apart_calls = noted(s, recorded.apart, Path(tmp), "apart")
            cold_calls = noted(s, recorded.cold, Path(tmp), "cold")
            passes: list[Redraft] = []
            same: list[Native] = []
            apart: list[Native] = []
            for i in range(args.repeat):
                passes.append(timed(s, recorded.programs))
                same.append(native(program, same_calls))
                apart.append(native(program, apart_calls))
                say(
                    f"pair {i + 1} of {args.repeat}: redraft {passes[-1].cpu:.2f} s of processor, native "
                    f"{same[-1].cpu:.2f} s, apart {apart[-1].cpu:.2f} s"
                )
            cold = timed(s, recorded.programs, cold=True), native(program, cold_calls)
            result = report(s, core, args.seed, recorded, passes, same, apart, cold)
            if args.profile:
                say(show_profile(s, recorded, Path(tmp)))
    return result


def run(args: argparse.Namespace) -> int:
    """As fuzz.measure.bench.main does."""
    try:
        result = bench(args)
    except (Usage, SandboxError) as e:
        print(f"ci/bench: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=2) if args.json else show(result))
    return 1 if args.check and result["ratio_cpu"]["median"] > LIMIT else 0
