"""How fast the blob targets run: redraft's, in Python over Atheris, against a libFuzzer harness in C++.

This is ci/bench --targets.

What is compared, on one core, for each of seq_state, context_state and session_file:

  redraft  the target as a campaign runs it: structured edits through the grammar of saved states, all its checks
  harness  a C++ program (harness.cpp, compiled now with the compiler and flags of the instrumented build) that
           restores into the same models and settings after the same lead-up and makes the same checks, with plain
           edits of bytes

Both load the same instrumented libllama, begin with the same inputs (one for each model and setting, in which contexts
are made), step round the same known faults, and run in turn with fixed seeds, each until it has had so many seconds of
processor time, which begin after WARM executions. The options are a campaign's, but -entropic=0: counting which inputs
reach what is libFuzzer's own work, and the libFuzzer in Atheris is several times as slow at it as clang's: on two
cores it took half of the first thousands of executions.

The figure to reach is redraft / harness >= 0.5 executions a processor second, of each target: of all executions, and
also where both would spend their executions alike (the harness' mean times, for redraft's numbers of refused and of
taken states on each model), since the two fuzzers find different inputs worth mutating.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fuzz.engine import libfuzzer
from fuzz.measure.bench import ROOT, Usage, pin, say, spread
from fuzz.measure.targets_child import VARIABLE as COUNTED
from fuzz.measure.targets_child import Told
from fuzz.measure.targets_counts import OUTCOMES, TRIED, Counts, alike
from fuzz.models import DEFAULT, Model, from_recipe
from fuzz.targets import config, load
from fuzz.targets.blobs import BlobTarget
from fuzz.targets.draw import FILE_KINDS, SEQ_KINDS, variants
from fuzz.targets.stage import STEPPED_ROUND
from subjects import instrument, recipes
from subjects.builds import BadBuild, Build, cache_dir, compile_shim, cpu_model, find_build
from subjects.shim import params_array
from subjects.shimcache import PARAMS, run_quietly

LIMIT = 0.5
TARGETS = ("seq_state", "context_state", "session_file")
SOURCE = Path(__file__).with_name("harness.cpp")
SETTINGS = "REDRAFT_HARNESS"
"""Where harness.cpp looks for its settings."""
WARM = 500
"""Executions of each side that are not counted: contexts are made in them."""
MOST_RESTARTS = 8
"""Of a slice, after inputs that end the process: the harness cannot tell all known faults before it meets them."""
_LEAST_SECONDS = 1.0
_COMPILE_SECONDS = 300
_MOST_SECONDS = 900
"""Of a run by the clock, whatever it got done."""


@dataclass(frozen=True)
class Sides:
    """What is run. environment: of both."""

    build: Build
    shim: Path
    harness: Path
    models: list[Model]
    environment: dict[str, str]


# ---------------------------------------------------------------------------------------------------------------------
# Building


def compile_harness(build: Build) -> Path:
    """The compiled harness for an instrumented build, from the cache or made now.

    Raises:
        BadBuild: no clang, or it does not compile; the message says what to do.
    """
    compiler = instrument.clang()
    if compiler is None:
        raise BadBuild("the harness needs the clang that the instrumented build was made with: ci/setup --fuzz")
    flags = [x for x in instrument.flags("fuzzer", instrument.SANITIZERS).llama if x != "-fsanitize=fuzzer-no-link"]
    dirs = [*build.include, PARAMS.parent]
    command = [str(compiler.cxx), "-std=c++17", *flags, "-fsanitize=fuzzer", *(f"-I{d}" for d in dirs), str(SOURCE)]
    libraries = build.linked()
    command += [*map(str, libraries), *(f"-Wl,-rpath,{d}" for d in dict.fromkeys(p.parent for p in libraries))]
    said = "\0".join([compiler.version, build.fingerprint, *command])
    key = hashlib.sha256(said.encode() + SOURCE.read_bytes() + PARAMS.read_bytes()).hexdigest()[:16]
    done = cache_dir() / "harnesses" / key
    if done.is_file():
        return done
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=done.parent, prefix=".tmp-") as tmp:
        made = Path(tmp) / "harness"
        env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        compiled = run_quietly([*command, "-o", str(made)], env, _COMPILE_SECONDS)
        if compiled.returncode:
            raise BadBuild(
                f"{SOURCE.name} does not compile against {build.name}: adapt it to that llama.h as subjects/shim.cpp "
                f"was, or take the default build\n{compiled.stderr.strip()[:2000]}"
            )
        os.replace(made, done)
    return done


def sides(build_path: Path | None) -> Sides:
    """Both sides, built where they are not. Raises BadBuild."""
    place = build_path or instrument.made("fuzzer", instrument.SANITIZERS, say=say)
    build = find_build(place)
    models = [from_recipe(recipes.get(name), cache_dir() / "models") for name in DEFAULT]
    env = instrument.environment(place)
    # The library has undefined behaviour of its own; a report's symbols cost a second and are not read here.
    if "UBSAN_OPTIONS" in env:
        env["UBSAN_OPTIONS"] += ":halt_on_error=0:print_stacktrace=0"
    with instrument.loadable(place):
        shim = compile_shim(build)
    return Sides(build, shim, compile_harness(build), models, env)


# ---------------------------------------------------------------------------------------------------------------------
# Running


def first_inputs(name: str, models: Sequence[Model]) -> Iterator[bytes]:
    """An input for each model and setting of a target; both sides read it alike."""
    target = load(name)
    assert isinstance(target, BlobTarget)
    of_files = target.medium == "file"
    kinds = FILE_KINDS if of_files or target.whole else SEQ_KINDS
    for which in ((0,), (1,)) if of_files else ((),):
        for m, model in enumerate(models):
            for v in range(len(variants(model.traits))):
                yield from (bytes([*which, m, v, k]) for k in range(len(kinds)))


def settings(name: str, models: Sequence[Model], seconds: float, counts: Path) -> str:
    """What harness.cpp is told."""
    lines = [f"target {name}", f"warm {WARM}", f"seconds {seconds}", f"counts {counts}"]
    for model in models:
        lines.append(f"model {int(model.traits.recurrent)} {model.path}")
        lines += [f"params {' '.join(map(str, params_array(p)))}" for p in variants(model.traits)]
    return "\n".join([*lines, ""])


def options(seed: int, folder: Path) -> list[str]:
    """libFuzzer's options, of both sides: those of a campaign, and what is said in the module."""
    return [
        *libfuzzer.fuzzing(folder / "corpus", folder, seconds=_MOST_SECONDS, seed=seed),
        str(folder / "first"),
        "-entropic=0",
        # symbols of new functions are looked up by another process
        "-print_funcs=0",
    ]


class Slice:
    """Runs of one target: either side, for so many processor seconds that count."""

    def __init__(self, s: Sides, name: str, seconds: float, folder: Path):
        self.sides, self.name, self.seconds, self.folder = s, name, seconds, folder
        (folder / "first").mkdir()
        for i, data in enumerate(first_inputs(name, s.models)):
            (folder / "first" / f"{i:04}").write_bytes(data)
        self.counts = folder / "counts"

    def redraft(self, seed: int) -> tuple[Counts, int]:
        """The target of ours: what it counted, and how often it was started again."""
        told = config.TargetConfig(
            models=self.sides.models,
            build=self.sides.build.fingerprint,
            shim=str(self.sides.shim),
            avoid=list(STEPPED_ROUND),
            report=str(self.folder / "complaints"),
            cache=str(cache_dir()),
        )
        env = self.sides.environment | {
            "PYTHONPATH": str(ROOT),
            config.VARIABLE: msgspec.json.encode(told).decode(),
        }

        def tell(seconds: float) -> None:
            env[COUNTED] = msgspec.json.encode(Told(WARM, seconds, str(self.counts))).decode()

        return self._run([sys.executable, "-m", "fuzz.measure.targets_child", self.name], env, seed, tell)

    def harness(self, seed: int) -> tuple[Counts, int]:
        """The harness, in the same way."""
        where = self.folder / "settings"
        env = {k: v for k, v in self.sides.environment.items() if k != "LD_PRELOAD"} | {SETTINGS: str(where)}

        def tell(seconds: float) -> None:
            where.write_text(settings(self.name, self.sides.models, seconds, self.counts), "utf-8")

        return self._run([str(self.sides.harness)], env, seed, tell)

    def _run(
        self, command: Sequence[str], env: Mapping[str, str], seed: int, tell: Callable[[float], None]
    ) -> tuple[Counts, int]:
        total = Counts()
        for restart in range(MOST_RESTARTS + 1):
            left = self.seconds - total.of()[1]
            tell(left)
            part, ended = self._once(command, env, seed + 1000 * restart)
            total.add(part)
            if ended == 0 or left - part.of()[1] < _LEAST_SECONDS:
                return total, restart
        return total, MOST_RESTARTS

    def _once(self, command: Sequence[str], env: Mapping[str, str], seed: int) -> tuple[Counts, int]:
        """One process; its exit status is 0 where no input ended it."""
        corpus, log = self.folder / "corpus", self.folder / "log"
        corpus.mkdir(exist_ok=True)
        for path in corpus.iterdir():
            path.unlink()
        Counts.blank(self.counts)
        began = time.monotonic()
        with log.open("wb") as f:
            done = subprocess.run(
                [*command, *options(seed, self.folder)], stdin=subprocess.DEVNULL, stdout=f, stderr=f, env=dict(env),
                check=False,
            )  # fmt: skip
        counts = Counts.read(self.counts)
        if counts.executions == 0 or (done.returncode and time.monotonic() - began < 1):
            tail = log.read_bytes()[-1500:].decode("utf-8", "replace")
            raise Usage(
                f"{Path(command[0]).name} for {self.name} ended with {done.returncode} before it began:\n{tail}"
            )
        return counts, done.returncode


# ---------------------------------------------------------------------------------------------------------------------
# Reporting


def side(counts: Counts, restarts: int, models: Sequence[Model]) -> dict[str, Any]:
    """The numbers of one run of one side."""
    n, cpu = counts.of()
    return {
        "executions": n,
        "cpu": cpu,
        "wall": counts.wall,
        "warm_cpu": counts.warm,
        "per_second": n / counts.wall if counts.wall else 0.0,
        "per_cpu_second": counts.rate(),
        "tried_per_cpu_second": counts.rate(outcomes=TRIED),
        "skipped": counts.share("skipped"),
        "taken": counts.share("taken"),
        "complaints": counts.complaints,
        "restarts": restarts,
        "models": {
            m.label: {
                "number": {o: counts.of(model=i, outcomes=(o,))[0] for o in OUTCOMES},
                "tried_per_cpu_second": counts.rate(model=i, outcomes=TRIED),
            }
            for i, m in enumerate(models)
        },
    }


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    """Ours over theirs, pair by pair."""
    return spread([a[key] / b[key] if b[key] else 0.0 for a, b in zip(ours, theirs, strict=True)])


def measure(s: Sides, name: str, *, repeat: int, seconds: float, seed: int) -> dict[str, Any]:
    """One target: pairs of runs, and their ratios."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    same: list[float] = []
    all_ours, all_theirs = Counts(), Counts()
    for i in range(repeat):
        with tempfile.TemporaryDirectory(prefix="redraft-targets-") as tmp:
            runs = Slice(s, name, seconds, Path(tmp))
            a, restarts = runs.redraft(seed + i)
            ours.append(side(a, restarts, s.models))
            b, restarts = runs.harness(seed + i)
            theirs.append(side(b, restarts, s.models))
        same.append(alike(a, b))
        all_ours.add(a)
        all_theirs.add(b)
        say(
            f"{name}, pair {i + 1} of {repeat}: redraft {ours[-1]['per_cpu_second']:.0f}, harness "
            f"{theirs[-1]['per_cpu_second']:.0f} executions a processor second"
        )
    models: dict[str, Any] = {}
    for i, m in enumerate(s.models):
        a_rate, b_rate = (c.rate(model=i, outcomes=TRIED) for c in (all_ours, all_theirs))
        models[m.label] = {"redraft": a_rate, "harness": b_rate, "ratio": a_rate / b_rate if b_rate else 0.0}
    return {
        "ratio": ratios(ours, theirs, "per_second"),
        "ratio_cpu": ratios(ours, theirs, "per_cpu_second"),
        "ratio_tried_cpu": ratios(ours, theirs, "tried_per_cpu_second"),
        "ratio_alike_cpu": spread(same),
        "models": models,
        "redraft": ours,
        "harness": theirs,
    }


def show(r: dict[str, Any]) -> str:
    """The numbers for people."""
    lines = [
        f"Blob targets on {r['build']}, {r['cpu']}, core {r['core']} (seed {r['seed']}, {r['seconds']:.0f} processor "
        "seconds a run)",
    ]
    for name, t in r["targets"].items():
        lines += [
            "",
            f"{name}: redraft / harness = {_spread(t['ratio_cpu'])} executions a processor second",
            f"  {_spread(t['ratio_alike_cpu'])} for states of the same models and outcomes, "
            f"{_spread(t['ratio_tried_cpu'])} for all that were tried, {_spread(t['ratio'])} by the clock",
            "  pair  side     executions  a second  a cpu second  tried  skipped  taken  complaints  restarts  warm-up",
        ]
        for i, pair in enumerate(zip(t["redraft"], t["harness"], strict=True), 1):
            lines += [
                f"  {i:4}  {word:8} {x['executions']:10} {x['per_second']:9.0f} {x['per_cpu_second']:13.0f} "
                f"{x['tried_per_cpu_second']:6.0f} {100 * x['skipped']:6.0f} % {100 * x['taken']:4.0f} % "
                f"{x['complaints']:11} {x['restarts']:9} {x['warm_cpu']:6.1f} s"
                for word, x in zip(("redraft", "harness"), pair, strict=True)
            ]
        by_model = ", ".join(
            f"{m} {x['redraft']:.0f} / {x['harness']:.0f} = {x['ratio']:.2f}" for m, x in t["models"].items()
        )
        lines.append(f"  tried a processor second, by model: {by_model}")
    return "\n".join(lines)


def _spread(x: Mapping[str, float]) -> str:
    return f"{x['median']:.2f} x ({x['min']:.2f} to {x['max']:.2f})"


def reached(r: Mapping[str, Any]) -> bool:
    """Whether every target is as fast as it should be, by both ratios."""
    return all(t[key]["median"] >= LIMIT for t in r["targets"].values() for key in ("ratio_cpu", "ratio_alike_cpu"))


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Do all of it."""
    core = pin(args.cpu)
    try:
        s = sides(args.build)
    except BadBuild as e:
        raise Usage(str(e)) from None
    return {
        "build": s.build.name,
        "cpu": cpu_model(),
        "core": core,
        "seed": args.seed,
        "seconds": args.seconds,
        "limit": LIMIT,
        "targets": {
            name: measure(s, name, repeat=args.repeat, seconds=args.seconds, seed=args.seed) for name in TARGETS
        },
    }


def run(args: argparse.Namespace) -> int:
    """As fuzz.measure.bench.main does."""
    try:
        result = bench(args)
    except Usage as e:
        print(f"ci/bench: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result, indent=2) if args.json else show(result))
    return 1 if args.check and not reached(result) else 0
