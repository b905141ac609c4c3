"""How fast scenarios run: redraft, executing and judging, against a plain C++ program that makes the same calls.

What is compared, on one core:

  redraft  executes and judges a fixed list of generated programs, as a campaign does: subjects in pooled contexts,
           references from the cache that all programs share (empty at the start), everything in a warm child
  native   a C++ program over llama.h (bench_native.cpp, compiled now, -O2 like the shim) makes the calls of the
           same list with nothing around them: every subject and every reference that its judgement needs, each in a
           fresh context, nothing shared between programs, nothing hashed, compared or judged
  apart    the same, but with a reference for each comparison: `native` already lets a longer history answer for the
           shorter ones that it begins with, which is one of the two things that redraft is to be faster by

The figure to reach is redraft / native <= 1.0. Beside it stands `shared`, the same C++ program making just the calls
that redraft makes (pooled contexts, shared references): what is left to gain from faster Python.

Both sides are pinned to the same core and alternate, so a noisy machine disturbs both alike: look at the ratios, and
at the processor time next to the wall clock. Making up programs is measured beside it and not counted. Programs step
round all known faults (fuzz/avoid.py), since a native program would not survive them; any that still ends its process
is left out and counted.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import platform
import resource
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

from fuzz.avoid import AVOIDANCES, Avoider
from fuzz.job import SLICE
from fuzz.loop import slice_seed
from fuzz.measure.bench_calls import CallList, compile_native
from fuzz.measure.bench_child import profile_text
from fuzz.measure.stopping import like_ctrl_c
from fuzz.models import BadModel, Model, resolve
from fuzz.strategies import generate, palette, scenarios
from oracles.judge import Judge
from oracles.reference import References, key_of, replay
from subjects.builds import BadBuild, Build, cache_dir, compile_shim, cpu_model, find_build
from subjects.child import Job, Replay
from subjects.processes import peak_kb
from subjects.sandbox import Sandbox, SandboxError
from subjects.scenario import Scenario
from subjects.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
WARM_BLOCKS = 100
"""Blocks that the C++ program runs before its clock starts; redraft is warm from recording."""
LIMIT = 1.0
BUSY = 1.05
_ENCODE = msgspec.msgpack.Encoder().encode


class Usage(Exception):
    """Something to tell the user, exit 2."""


class Subject(Sandbox):
    """A sandbox that counts, and hands what was run to a recorder while there is one."""

    requests = 0
    subjects = 0
    references = 0
    recorder: Recorder | None = None

    def run_many(
        self, scenarios: Sequence[Scenario], model: Path, *, fresh: bool = True, fault: str = ""
    ) -> list[Trace]:
        """See Sandbox."""
        self.requests += 1
        self.subjects += len(scenarios)
        traces = super().run_many(scenarios, model, fresh=fresh, fault=fault)
        if self.recorder is not None:
            jobs = [Job(s, str(model), fresh, fault, self._draft_of(s)) for s in scenarios]
            self.recorder.requests.append(_ENCODE((0, jobs)))
            self.recorder.runs.extend((s, t, fresh) for s, t in zip(scenarios, traces, strict=True))
        return traces

    def replay_many(self, histories: Sequence[Replay]) -> list[Trace]:
        """See Sandbox."""
        self.requests += 1
        self.references += len(histories)
        traces = super().replay_many(histories)
        if self.recorder is not None:
            self.recorder.requests.append(_ENCODE((0, list(histories))))
            self.recorder.runs.extend((h, t, True) for h, t in zip(histories, traces, strict=True))
        return traces

    def zero(self) -> None:
        """Start counting anew."""
        self.requests = self.subjects = self.references = 0


@dataclass
class Recorder:
    """What was run, in order: programs with traces, and the requests as the child got them."""

    runs: list[tuple[Scenario | Replay, Trace, bool]] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)


@dataclass
class Redraft:
    """One timed pass. cpu_own: this process, cpu_child: zygote and worker."""

    wall: float
    cpu_own: float
    cpu_child: float
    requests: int
    subjects: int
    references: int
    judged: int
    violating: int

    @property
    def cpu(self) -> float:
        """Processor time of all processes."""
        return self.cpu_own + self.cpu_child


class Native(msgspec.Struct, frozen=True):
    """What bench_native printed."""

    wall: float
    cpu: float
    programs: int
    contexts: int
    decodes: int
    rows: int
    outputs: int
    saves: int
    restores: int
    differs: int
    rss_kb: int
    sum: str


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def pin(cpu: int | None) -> int | None:
    """Pin this process, and with it all that it starts, to one core; None where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    may = sorted(os.sched_getaffinity(0))
    if cpu is not None and cpu not in may:
        raise Usage(f"--cpu {cpu}: this process may use {', '.join(map(str, may))}; name one of these")
    chosen = may[-1] if cpu is None else cpu
    for thread in os.listdir("/proc/self/task"):  # numpy may have started threads already
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {chosen})
    return chosen


def descendants() -> list[int]:
    """Live children of this process and theirs."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text("utf-8", "replace")
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        mine = parents.get(todo.pop(), [])
        found += mine
        todo += mine
    return found


def child_cpu(pids: Sequence[int]) -> float:
    """Processor seconds that live processes have used."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def own_cpu() -> float:
    """Processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def make_programs(model: Model, count: int, seed: int) -> tuple[list[Scenario], float]:
    """The fixed list, and the seconds that making it took."""
    avoider = Avoider(AVOIDANCES)
    programs: list[Scenario] = []
    began = time.perf_counter()
    for number in range(-(-count // SLICE)):
        n = slice_seed(seed, 0, 1, number)
        params = palette(model.traits, n, avoider)
        made = generate(scenarios(model.ref, model.traits, avoid=avoider, params_from=params), n, SLICE)
        programs += [avoider.repair(p, model.traits) for p in made]
    return programs[:count], time.perf_counter() - began


def timed(judge: Judge, sandbox: Subject, programs: Sequence[Scenario]) -> Redraft:
    """Execute and judge all programs with an empty cache of references."""
    judge.references = References()
    sandbox.zero()
    judged = violating = 0
    pids = descendants()
    own, child, began = own_cpu(), child_cpu(pids), time.perf_counter()
    for program in programs:
        result = judge.judge(program)
        judged += result.judged
        violating += bool(result.violations)
    wall = time.perf_counter() - began
    return Redraft(
        wall,
        own_cpu() - own,
        child_cpu(pids) - child,
        sandbox.requests,
        sandbox.subjects,
        sandbox.references,
        judged,
        violating,
    )


def native(program: Path, model: Model, calls: Path, warm: int) -> Native:
    """Run the C++ program once."""
    env = {**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"}  # as the sandbox sets them
    done = subprocess.run(
        [str(program), model.path, str(calls), str(warm)], capture_output=True, text=True, env=env, check=False
    )
    if done.returncode:
        raise Usage(
            f"the C++ program ended with {done.returncode}: {done.stderr.strip()[-500:] or 'no message'}; a program of "
            "the list may set off a fault that fuzz/avoid.py does not know: try another --seed"
        )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Native)


@dataclass
class Recorded:
    """The fixed list and what its calls are."""

    programs: list[Scenario]
    left_out: int
    fresh: CallList
    """all calls, every run in a fresh context, references of each program apart"""
    apart: CallList
    """as `fresh`, with a reference for every comparison instead of one for the longest history"""
    shared: CallList
    """only the calls that redraft makes, contexts pooled as it does"""
    references: int
    """reference runs in `fresh`"""
    requests: list[bytes]


def add(calls: CallList, run: Scenario | Replay, trace: Trace, *, pooled: bool) -> None:
    """Append a run to a list, whichever kind it is."""
    if isinstance(run, Replay):
        calls.add_replay(run)
    else:
        calls.add(run, trace, pooled=pooled)


def record(judge: Judge, sandbox: Subject, programs: Sequence[Scenario]) -> Recorded:
    """Run and judge everything, untimed, and note which calls that takes.

    It measures the bands, too, where the cache of the user lacks them.
    """
    for program in programs:
        judge.judge(program)  # first, so that no measuring of a band is taken for a part of a program
    kept: list[Scenario] = []
    fresh, apart = CallList(), CallList()
    sandbox.zero()
    for program in programs:
        sandbox.recorder = Recorder()
        judge.references = References()
        result = judge.judge(program)
        if all(trace.end.how == "ok" for _, trace, _ in sandbox.recorder.runs):
            kept.append(program)
            for run, trace, _ in sandbox.recorder.runs:
                add(fresh, run, trace, pooled=False)
                if isinstance(run, Scenario):
                    apart.add(run, trace, pooled=False)
            for key in dict.fromkeys(key_of(claim) for claim in result.account.ledger.rows):
                apart.add_replay(replay(judge.model, judge.path, key))
    references = sandbox.references
    shared = CallList()
    requests: list[bytes] = []
    judge.references = References()
    for program in kept:
        sandbox.recorder = Recorder()
        judge.judge(program)
        requests += sandbox.recorder.requests
        for run, trace, clean in sandbox.recorder.runs:
            add(shared, run, trace, pooled=not clean)
    sandbox.recorder = None
    return Recorded(kept, len(programs) - len(kept), fresh, apart, shared, references, requests)


# ---------------------------------------------------------------------------------------------------------------------
# Reporting


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the ends."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(
    build: Build,
    model: Model,
    core: int | None,
    seed: int,
    generation: float,
    recorded: Recorded,
    passes: Sequence[Redraft],
    fresh: Sequence[Native],
    apart: Sequence[Native],
    shared: Sequence[Native],
    rss: tuple[int, int],
) -> dict[str, Any]:
    """All numbers."""
    n = len(recorded.programs)
    last, first = passes[-1], fresh[-1]
    wall = statistics.median(p.wall for p in passes)
    native_shared = statistics.median(s.cpu for s in shared)
    child = statistics.median(p.cpu_child for p in passes)
    own = statistics.median(p.cpu_own for p in passes)
    return {
        "build": build.name,
        "llama_cpp": build.version or "unknown",
        "model": model.label,
        "cpu": cpu_model(),
        "core": core,
        "python": platform.python_version(),
        "seed": seed,
        "programs": n,
        "left_out": recorded.left_out,
        "judged": last.judged,
        "violating": last.violating,
        "ratio_wall": spread([p.wall / f.wall for p, f in zip(passes, fresh, strict=True)]),
        "ratio_cpu": spread([p.cpu / f.cpu for p, f in zip(passes, fresh, strict=True)]),
        "ratio_apart_wall": spread([p.wall / a.wall for p, a in zip(passes, apart, strict=True)]),
        "ratio_apart_cpu": spread([p.cpu / a.cpu for p, a in zip(passes, apart, strict=True)]),
        "apart_contexts": apart[-1].contexts,
        "ratio_shared_wall": spread([s.wall / f.wall for s, f in zip(shared, fresh, strict=True)]),
        "ratio_shared_cpu": spread([s.cpu / f.cpu for s, f in zip(shared, fresh, strict=True)]),
        # native waits for nothing, so where its clock runs ahead of its processor time, others had the core
        "shared_core": statistics.median(f.wall / f.cpu for f in fresh) > BUSY,
        "programs_per_second": n / wall,
        "ms_per_program": 1e3 * wall / n,
        "runs_per_second": (last.subjects + last.references) / wall,
        "native_contexts_per_second": first.contexts / statistics.median(f.wall for f in fresh),
        "generation_ms_per_program": 1e3 * generation / max(1, n + recorded.left_out),
        "share_child": child / max(1e-9, own + child),
        "child_python_seconds": child - native_shared,
        "orchestrator_seconds": own,
        "native_call_seconds": native_shared,
        "references_needed": recorded.references,
        "references_run": last.references,
        "reference_cache_hits": 1 - last.references / max(1, recorded.references),
        "subject_runs": last.subjects,
        "requests": last.requests,
        "own_rss_mb": rss[0] / 1024,
        "child_rss_mb": rss[1] / 1024,
        "native_rss_mb": first.rss_kb / 1024,
        "native_differs": first.differs,
        "shared_differs": shared[-1].differs,
        "redraft": [{**asdict(p), "cpu": p.cpu} for p in passes],
        "native": [msgspec.to_builtins(f) for f in fresh],
        "shared": [msgspec.to_builtins(s) for s in shared],
    }


def show(r: dict[str, Any]) -> str:
    """The numbers for people."""
    n, lines = r["programs"], []
    lines.append(f"{n} programs of {r['model']} (seed {r['seed']}) on {r['build']}, {r['cpu']}, core {r['core']}")
    if r["left_out"]:
        lines.append(f"  {r['left_out']} left out: they end the process that runs them")
    lines.append(
        f"  calls: {r['native'][-1]['programs']} runs, {r['native'][-1]['contexts']} contexts, "
        f"{r['native'][-1]['decodes']} decodes, {r['native'][-1]['rows']} rows for native; "
        f"{r['shared'][-1]['programs']} runs, {r['shared'][-1]['contexts']} contexts, "
        f"{r['shared'][-1]['decodes']} decodes, {r['shared'][-1]['rows']} rows for redraft"
    )
    lines.append(
        f"  references: {r['references_needed']} needed, {r['references_run']} run, "
        f"{100 * r['reference_cache_hits']:.0f} % from the cache; purity's second runs (1 of 8 programs) are in both"
    )
    lines.append("")
    lines.append("  pair   redraft wall    cpu (own + child)      native wall    cpu   redraft / native  wall   cpu")
    for i, (p, f) in enumerate(zip(r["redraft"], r["native"], strict=True), 1):
        lines.append(
            f"  {i:4}   {p['wall']:10.2f} s {p['cpu']:6.2f} ({p['cpu_own']:.2f} + {p['cpu_child']:.2f}) s"
            f"   {f['wall']:10.2f} s {f['cpu']:6.2f} s {'':16} {p['wall'] / f['wall']:6.2f} {p['cpu'] / f['cpu']:6.2f}"
        )
    w, c, s = r["ratio_wall"], r["ratio_cpu"], r["ratio_shared_cpu"]
    lines.append("")
    lines.append(
        f"redraft / native = {w['median']:.2f} x (wall, one core; {w['min']:.2f} to {w['max']:.2f}), "
        f"{c['median']:.2f} x (processor time)"
    )
    a = r["ratio_apart_wall"], r["ratio_apart_cpu"]
    lines.append(
        f"redraft / apart  = {a[0]['median']:.2f} x (wall, one core), {a[1]['median']:.2f} x (processor time): "
        f"native with a reference for each comparison ({r['apart_contexts']} contexts)"
    )
    if r["shared_core"]:
        lines.append("  others had the core in between: the ratio of the processor times is the one to believe")
    lines.append(f"shared / native  = {s['median']:.2f} x: the same calls as redraft's, in C++ alone (processor time)")
    lines.append(
        f"  {r['programs_per_second']:.0f} programs/s ({r['ms_per_program']:.2f} ms each), {r['runs_per_second']:.0f} "
        f"runs/s; native {r['native_contexts_per_second']:.0f} contexts/s"
    )
    lines.append(f"  generation, not counted: {r['generation_ms_per_program']:.2f} ms a program")
    total = r["orchestrator_seconds"] + r["child_python_seconds"] + r["native_call_seconds"]
    parts = (
        ("orchestrator (ledger, comparison, oracles, encoding)", "orchestrator_seconds"),
        ("child besides the library (runner, ctypes, hashes, answers)", "child_python_seconds"),
        ("the library's calls themselves", "native_call_seconds"),
    )
    lines.append(f"  where redraft's {total:.2f} s of processor time go (child: {100 * r['share_child']:.0f} %):")
    for words, key in parts:
        lines.append(
            f"    {r[key]:6.2f} s {100 * r[key] / total:3.0f} %  {1e6 * r[key] / n:6.0f} us a program  {words}"
        )
    lines.append(
        f"  {r['requests']} round trips; memory: this process {r['own_rss_mb']:.0f} MB, child {r['child_rss_mb']:.0f} "
        f"MB, native {r['native_rss_mb']:.0f} MB"
    )
    if r["judged"] < n or r["violating"]:
        lines.append(f"  {r['judged']} of {n} judged, {r['violating']} with violations")
    if r["native_differs"] or r["shared_differs"]:
        lines.append(
            f"  {r['native_differs']} (native) and {r['shared_differs']} (shared) answers differ from what was recorded"
        )
    return "\n".join(lines)


def show_profile(judge: Judge, sandbox: Subject, recorded: Recorded, model: Model, shim: Path, folder: Path) -> str:
    """Profiles of both sides, each slower than without."""
    profile = cProfile.Profile()
    profile.enable()
    took = timed(judge, sandbox, recorded.programs)
    profile.disable()
    requests = folder / "requests"
    requests.write_bytes(b"".join(len(r).to_bytes(4, "little") + r for r in recorded.requests))
    env = {**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.measure.bench_child", str(shim), model.path, str(requests)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    text = [
        f"== orchestrator, by own time ({took.cpu_own:.2f} s of processor under the profiler)",
        profile_text(profile, 35, "tottime"),
        "== orchestrator, cumulative",
        profile_text(profile, 35, "cumulative"),
    ]
    if done.returncode:
        text.append(f"== child: it ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    else:
        child = json.loads(done.stdout.splitlines()[-1])
        text += [
            f"== child, by own time ({child['cpu']:.2f} s without the profiler, {child['cpu_profiled']:.2f} s with it)",
            child["own"],
            "== child, cumulative",
            child["cumulative"],
        ]
    return "\n".join(text)


# ---------------------------------------------------------------------------------------------------------------------
# The command


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="ci/bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--scenarios", type=int, metavar="N", help="programs in the list (default 1000; with --driver 500)")
    p.add_argument("--model", default="qwen35", metavar="NAME|PATH", help="recipe or GGUF (default qwen35)")
    p.add_argument(
        "--driver", action="store_true", help="programs with a speculative driver instead (see bench_driver.py)"
    )
    p.add_argument(
        "--targets", action="store_true", help="the fuzz targets against a libFuzzer harness instead (see targets.py)"
    )
    p.add_argument(
        "--server", action="store_true", help="checked requests to llama-server a second instead (see server.py)"
    )
    p.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="with --targets: processor time of a run (default 15); with --server: its length (default 30)",
    )
    p.add_argument("--pair", default="qwen35-mtp", help="with --driver: target and draft (default qwen35-mtp)")
    p.add_argument("--build", type=Path, metavar="DIR", help="build of llama.cpp (default: llama-cpp-python's)")
    p.add_argument("--llama-src", type=Path, metavar="DIR", help="with --driver: a checkout that matches the build")
    p.add_argument("--repeat", type=int, default=3, metavar="R", help="pairs of timed runs (default 3)")
    p.add_argument("--seed", type=int, default=1, help="which list is made (default 1)")
    p.add_argument("--cpu", type=int, metavar="N", help="core that everything is pinned to (default: the last one)")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output, for machines")
    p.add_argument("--profile", action="store_true", help="then profile both sides of redraft (text on stderr)")
    p.add_argument(
        "--check",
        action="store_true",
        help=f"exit 1 if redraft / native is above {LIMIT} (with --driver 2.0), with --targets below 0.5, or with "
        "--server less than 60 or 35 requests a second",
    )
    return p


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Do all of it."""
    core = pin(args.cpu)
    try:
        build = find_build(args.build)
        shim = compile_shim(build)
        models = resolve([args.model], cache_dir() / "models", shim)
    except (BadBuild, BadModel) as e:
        raise Usage(str(e)) from None
    if len(models) != 1:
        raise Usage(f"--model {args.model}: name one model")
    model = models[0]
    with tempfile.TemporaryDirectory(prefix="redraft-bench-") as tmp:
        folder = Path(tmp)
        try:
            program = compile_native(build, folder / "bench_native")
        except BadBuild as e:
            raise Usage(str(e)) from None
        programs, generation = make_programs(model, args.scenarios, args.seed)
        say(
            f"{len(programs)} programs made in {generation:.1f} s; recording their calls (three passes; the first "
            f"time slower, bands are measured)"
        )
        with Subject(shim, [(Path(model.path), 0)]) as sandbox:
            judge = Judge(sandbox, model.ref, Path(model.path), build.fingerprint, cache_dir())
            recorded = record(judge, sandbox, programs)
            if not recorded.programs:
                raise Usage("no program of the list ends well: nothing to measure; try another --seed or --model")
            fresh_list = recorded.fresh.write(folder / "fresh")
            apart_list = recorded.apart.write(folder / "apart")
            shared_list = recorded.shared.write(folder / "shared")
            passes: list[Redraft] = []
            fresh: list[Native] = []
            apart: list[Native] = []
            shared: list[Native] = []
            for i in range(args.repeat):
                passes.append(timed(judge, sandbox, recorded.programs))
                fresh.append(native(program, model, fresh_list, WARM_BLOCKS))
                apart.append(native(program, model, apart_list, WARM_BLOCKS))
                shared.append(native(program, model, shared_list, WARM_BLOCKS))
                say(
                    f"pair {i + 1} of {args.repeat}: redraft {passes[-1].wall:.2f} s, native {fresh[-1].wall:.2f} s, "
                    f"apart {apart[-1].wall:.2f} s, shared {shared[-1].wall:.2f} s"
                )
            child = max((peak_kb(pid) for pid in descendants()), default=0)
            rss = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, child)
            result = report(build, model, core, args.seed, generation, recorded, passes, fresh, apart, shared, rss)
            if args.profile:
                say(show_profile(judge, sandbox, recorded, model, shim, folder))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Entry: 0 done, 1 slower than --check allows, 2 usage or configuration."""
    p = parser()
    args = p.parse_args(argv)
    like_ctrl_c()
    args.scenarios = (500 if args.driver else 1000) if args.scenarios is None else args.scenarios
    args.seconds = (30.0 if args.server else 15.0) if args.seconds is None else args.seconds
    if args.scenarios < 1 or args.repeat < 1 or args.seconds < 1:
        p.error("--scenarios, --repeat and --seconds take numbers from 1")
    if args.targets + args.driver + args.server > 1:
        p.error("--targets, --driver and --server: name one")
    if args.targets:
        from fuzz.measure import targets

        return targets.run(args)
    if args.driver:
        from fuzz.measure import bench_driver

        return bench_driver.run(args)
    if args.server:
        from fuzz.measure import server

        return server.run(args)
    try:
        result = bench(args)
    except (Usage, SandboxError) as e:
        print(f"ci/bench: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=2) if args.json else show(result))
    ratio = result["ratio_cpu" if result["shared_core"] else "ratio_wall"]["median"]
    return 1 if args.check and ratio > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
