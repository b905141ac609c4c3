"""`redraft doctor`: says what would be tested, and proves on a small model that save and restore work there at all."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from subjects import builds, instrument, shimcache
from subjects.builds import BadBuild, Build
from subjects.scenario import ContextParams, token

TOLERANCE = 1e-3
"""Logits of a right restore may differ by float reordering (measured: up to 9e-5), of a wrong one by 3 and more."""

_PROOF_SECONDS = 120
_N_TOKENS = 8

State = Literal["ok", "warning", "FAILED"]


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the doctor's answer; `advice` says what to do about it."""

    name: str
    state: State
    detail: str = ""
    advice: str = ""


@dataclass
class Report:
    """Everything that was found out. `facts` hold paths of this machine, `environment` does not."""

    facts: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether this build can be tested."""
        return bool(self.checks) and all(c.state != "FAILED" for c in self.checks)


def run(build_path: Path | None, as_json: bool, llama_src: Path | None = None) -> int:
    """Examine a build (None: the installed llama-cpp-python) and print the answer; 0 when it can be tested, else 2."""
    try:
        with instrument.loadable(build_path):
            report = examine(build_path, llama_src)
    except BadBuild as e:  # its runtime is not there
        report = Report(checks=[Check("build can be loaded", "FAILED", str(e))])
    if as_json:
        document = {
            "ok": report.ok,
            "facts": report.facts,
            "environment": report.environment,
            "checks": [msgspec.to_builtins(c) for c in report.checks],
        }
        print(json.dumps(document, indent=2))
    else:
        _print(report)
    return 0 if report.ok else 2


def examine(build_path: Path | None, llama_src: Path | None = None) -> Report:
    """Find the build, compile the shim, ask the library, and prove a restore; stops at the first thing that fails.

    The drivers are no such thing, unless they were asked for: everything that needs none runs without them.
    """
    report = Report(facts={"cores": cores(), "memory_mib": memory_mib(), "cache": str(builds.cache_dir())})
    step = "build found"
    try:
        build = builds.find_build(build_path)
        report.facts |= {
            "build": build.name,
            "kind": build.kind,
            "version": build.version,
            "fingerprint": build.fingerprint,
            "library": str(build.libllama),
            "beside it": [p.name for p in build.libraries()[1:]],
            "headers": [str(p) for p in build.include],
            "libraries": [str(p) for p in _link_dirs(build)],
            "sources": str(build.include[0].parent),
            "compiler": builds.compiler_line(),
        }
        report.checks += [Check(step, "ok", build.name), _age(build)]

        step = "shim compiles against its headers"
        cached = builds.shim_path(build).is_file()
        started = time.perf_counter()
        shim = builds.compile_shim(build)
        seconds = time.perf_counter() - started
        report.facts |= {"shim": str(shim), "shim_from_cache": cached, "shim_seconds": round(seconds, 3)}
        report.checks.append(Check(step, "ok", "did, is in the cache" if cached else f"{seconds:.2f} s"))

        # Again, although a shim that is compiled now has just been loaded: one from the cache has not.
        step = "library loads, and no other in its place"
        builds.check_loads(shim, build.linked())
        report.checks.append(Check(step, "ok"))

        step = "library answers"
        report.environment |= builds.environment(build)
        report.checks.append(Check(step, "ok", build.version or ""))
    except BadBuild as e:
        what, _, rest = str(e).partition("\n")
        report.checks.append(Check(step, "FAILED", what, rest))
        return report
    report.checks += [_drivers(build, llama_src, report.facts), *prove(shim)]
    counting = build_path or instrument.ready("fuzzer", instrument.SANITIZERS)
    stamp = instrument.stamp_of(counting) if counting else None
    lacks = ", ".join(instrument.missing_tools())
    # a build that is in the cache, and nothing that could load it: no fault of what was asked about
    loadable = build_path is not None or not lacks
    if counting and stamp and stamp.coverage == "fuzzer" and loadable:
        report.checks.append(prove_counters(counting))
    elif build_path is None:
        advice = f"needs {lacks}: ci/setup --fuzz" if lacks else "redraft build makes it"
        report.facts["coverage build"] = f"none ({advice})"
    return report


def _drivers(build: Build, llama_src: Path | None, facts: dict[str, Any]) -> Check:
    name = "speculative drivers compile and load"
    started = time.perf_counter()
    try:
        library = builds.driver_library(build, llama_src)
        builds.check_loads(library, what="driver")
    except BadBuild as e:
        what, _, rest = str(e).partition("\n")
        if llama_src:  # they were asked for
            return Check(name, "FAILED", what, rest)
        return Check(name, "warning", what, f"no driver can be tested, everything else can\n{rest}".strip())
    root = builds.driver_sources(build, llama_src)
    facts |= {"drivers": str(library), "driver_headers": str(root / "common"), "sources": str(root)}
    own = ", speculative.cpp of the checkout" if llama_src else ""
    return Check(name, "ok", f"{time.perf_counter() - started:.2f} s{own}")


def _link_dirs(build: Build) -> list[Path]:
    """Where a program that is linked with the build finds its libraries."""
    common = builds.common_library(build)
    return list(dict.fromkeys([*build.libdirs, *([common.parent] if common else [])]))


def _age(build: Build) -> Check:
    # After `git pull` without a build, headers and library disagree, silently wherever only a struct has changed.
    name = "library is not older than its headers"
    header = next(p for d in build.include if (p := d / "llama.h").is_file())
    if build.kind == "tree" and header.stat().st_mtime > build.libllama.stat().st_mtime:
        return Check(name, "warning", "llama.h was changed after libllama was built", "build again (cmake --build)")
    return Check(name, "ok")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def memory_mib() -> int | None:
    """Memory of the machine or of the container's limit in MiB, None where the system does not tell."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    except (OSError, ValueError):
        pass  # no cgroup, or "max"
    return size >> 20


# ---------------------------------------------------------------------------------------------------------------------
# The proof: a child process runs these steps and reports one Check a line

STEPS = (
    "tiny model is written",
    "library loads the model",
    "library makes a context",
    f"{_N_TOKENS} tokens decode to logits",
    "sequence is saved",
    "other tokens pollute the context",
    "sequence is restored",
    "logits after the restore are those before",
    "state saved again is the same",
)

_CHILD = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from fuzz.doctor import proof_child
proof_child(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
"""


def prove(shim: Path) -> list[Check]:
    """Decode, save, pollute and restore with a compiled shim in a child process: a check for each of STEPS reached."""
    with tempfile.TemporaryDirectory(prefix="redraft-doctor-") as tmp:
        command = [sys.executable, "-c", _CHILD, str(Path(__file__).resolve().parents[1]), str(shim), tmp]
        try:
            p = shimcache.run_quietly(command, shimcache.child_env(), _PROOF_SECONDS)
            said, ended = p.stdout, shimcache.death_message(p.returncode, p.stderr)
            died = p.returncode != 0
        except subprocess.TimeoutExpired as e:
            said = e.stdout.decode("utf-8", "replace") if isinstance(e.stdout, bytes) else (e.stdout or "")
            ended, died = f"no answer after {_PROOF_SECONDS} s", True
    checks: list[Check] = []
    for line in said.splitlines():
        try:
            checks.append(msgspec.json.decode(line, type=Check))
        except msgspec.DecodeError:
            return [*checks, Check("child answers", "FAILED", f"not a check: {line[:200]!r}", "report this")]
    if any(c.state == "FAILED" for c in checks):
        return checks
    if died or len(checks) < len(STEPS):
        what, _, rest = ended.partition("\n")
        advice = "this build cannot be tested: run its own tests (ctest), or build it again without special options"
        step = STEPS[min(len(checks), len(STEPS) - 1)]
        checks.append(Check(step, "FAILED", what, f"{advice}\n{rest}".strip()))
    return checks


def proof_child(shim: Path, directory: Path) -> None:
    """Body of the child: run the steps, a Check a line on standard output, until one fails."""
    # What backends print must not get between the lines.
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)
        for check in _proof(shim, directory):
            out.write(msgspec.json.encode(check) + b"\n")
            if check.state == "FAILED":
                return


def _proof(shim: Path, directory: Path) -> Iterator[Check]:
    from subjects.recipes import get
    from subjects.shim import Shim

    names = iter(STEPS)

    def check(good: bool, detail: str = "", advice: str = "") -> Check:
        return Check(next(names), "ok" if good else "FAILED", detail, "" if good else advice)

    path = directory / "tiny.gguf"
    recipe = get("llama")
    recipe.write(path, seed=0)
    yield check(True, f"{recipe.name}, {path.stat().st_size} bytes")

    lib = Shim(shim)

    def logged() -> str:
        return " / ".join(lib.take_log()[-5:])

    model = lib.load_model(path)
    if model is None:
        said = logged()
        # Backends that are modules (GGML_BACKEND_DL) are looked for beside the executable, which is Python here.
        hint = (
            "build with -DGGML_BACKEND_DL=OFF"
            if "backend" in said
            else "is this llama.cpp older than the model's format?"
        )
        yield check(False, said, hint)
        return
    yield check(True, " ".join(f"{k}={v}" for k, v in lib.model_facts(model).items()))

    params = ContextParams()
    ctx = lib.new_context(model, params)
    if ctx is None:
        yield check(
            False, logged(), "the strict context (F32 K and V, flash attention off) is refused; see the log line"
        )
        return
    yield check(True, " ".join(f"{k}={v}" for k, v in lib.context_facts(ctx).items()))
    n_vocab = lib.model_facts(model)["n_vocab"]

    def decode(stream: int, start: int, n: int) -> tuple[int, tuple[float, ...]]:
        pos = range(start, start + n)
        rc = lib.decode(ctx, [token(stream, p, n_vocab) for p in pos], pos, [0] * n, [0] * (n - 1) + [1])
        raw = lib.logits(ctx, n - 1, n_vocab) if rc == 0 else None
        return rc, struct.unpack(f"{n_vocab}f", raw) if raw else ()

    rc, row = decode(1, 0, _N_TOKENS)
    good = rc == 0 and bool(row) and all(map(math.isfinite, row)) and max(row) > min(row)
    spread = f", spread {max(row) - min(row):.3g}" if row else ""
    yield check(good, f"llama_decode returned {rc}{spread}", f"the library computes nothing useful: {logged()}")

    size = lib.seq_size(ctx, 0, 0)
    wrote, blob = lib.seq_get(ctx, 0, 0, size)
    yield check(0 < wrote == size, f"{wrote} of {size} bytes", f"llama_state_seq_get_data_ext fails: {logged()}")

    rc, before = decode(1, _N_TOKENS, 1)
    rc_other, other = decode(2, _N_TOKENS + 1, 5)
    # Otherwise the comparison below would hold for anything.
    differs = bool(before and other) and _distance(before, other) > 100 * TOLERANCE
    detail = (
        f"their logits differ by {_distance(before, other):.3g}" if before and other else f"returned {rc}, {rc_other}"
    )
    yield check(differs, detail, "logits do not depend on what was decoded")

    read = lib.seq_set(ctx, 0, 0, blob)
    yield check(read == len(blob), f"{read} of {len(blob)} bytes", f"llama_state_seq_set_data_ext refuses: {logged()}")
    again = lib.seq_get(ctx, 0, 0, lib.seq_size(ctx, 0, 0))[1]

    rc, after = decode(1, _N_TOKENS, 1)
    distance = _distance(before, after) if before and after else math.inf
    yield check(
        distance <= TOLERANCE,
        f"largest difference {distance:.3g}",
        "this build restores even a plain attention model wrongly: a fault worth a report of its own",
    )
    yield check(
        sorted(again) == sorted(blob), f"{len(again)} bytes", "the restored state is not the one that was saved"
    )
    lib.free_context(ctx)
    lib.free_model(model)


def _distance(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=math.inf)


# ---------------------------------------------------------------------------------------------------------------------
# The counters of a build for libFuzzer

_RUNS = 200
_COUNTERS = "coverage counters move"
_COUNTERS_CHILD = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from fuzz.doctor import counters_child
counters_child(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
"""


def prove_counters(build: Path) -> Check:
    """Let libFuzzer call save and restore of an instrumented build a few times, and see that it counts what they do."""
    with tempfile.TemporaryDirectory(prefix="redraft-doctor-") as tmp:
        command = [sys.executable, "-c", _COUNTERS_CHILD, str(Path(__file__).resolve().parents[1]), str(build), tmp]
        try:
            p = shimcache.run_quietly(command, instrument.environment(build), _PROOF_SECONDS)
        except BadBuild as e:
            return Check(_COUNTERS, "FAILED", str(e))
        except subprocess.TimeoutExpired:
            return Check(_COUNTERS, "FAILED", f"no answer after {_PROOF_SECONDS} s")
    return judge_counters(p.returncode, p.stderr)


def judge_counters(returncode: int, stderr: str) -> Check:
    """What libFuzzer said, as a check."""
    loaded = re.search(r"INFO: Loaded \d+ modules\s+\((\d+) inline 8-bit counters\)", stderr)
    edges = [int(x) for x in re.findall(r"^#\d+\s.*\bcov: (\d+)", stderr, re.M)]
    if returncode:
        what, _, rest = shimcache.death_message(returncode, stderr).partition("\n")
        return Check(_COUNTERS, "FAILED", what, rest)
    if loaded is None or not edges:
        advice = "the library has none, or not this libFuzzer was loaded first: redraft build makes it anew"
        return Check(_COUNTERS, "FAILED", "libFuzzer saw no counters", advice)
    detail = f"{int(loaded[1]):,} counters, {edges[0]:,} → {edges[-1]:,} edges in {_RUNS} executions"
    if edges[-1] <= edges[0]:
        return Check(
            _COUNTERS, "FAILED", detail, "what is executed is not what is counted: redraft build makes it anew"
        )
    return Check(_COUNTERS, "ok", detail)


def counters_child(build: Path, directory: Path) -> None:
    """Body of the child: fuzz save and restore for a few executions; does not return."""
    import atheris

    from subjects.recipes import get
    from subjects.shim import Shim

    path = directory / "tiny.gguf"
    get("llama").write(path, seed=0)
    lib = Shim(builds.compile_shim(builds.find_build(build)))
    model = lib.load_model(path)
    ctx = lib.new_context(model, ContextParams()) if model else None
    if model is None or ctx is None:
        sys.exit(f"no context: {' / '.join(lib.take_log()[-5:])}")
    n_vocab = lib.model_facts(model)["n_vocab"]

    def decode(start: int, n: int) -> None:
        pos = range(start, start + n)
        lib.decode(ctx, [token(1, p, n_vocab) for p in pos], pos, [0] * n, [0] * (n - 1) + [1])

    decode(0, _N_TOKENS)
    blob = lib.seq_get(ctx, 0, 0, lib.seq_size(ctx, 0, 0))[1]

    def once(data: bytes) -> None:
        # The first input that libFuzzer tries is empty.
        lib.clear(ctx, True)
        if data:
            lib.seq_set(ctx, 0, 0, blob[: len(blob) >> data[0] % 3])
            decode(lib.positions(ctx, 1)[0][1] + 1, 1 + data[0] % 5)

    atheris.Setup(["doctor", f"-runs={_RUNS}", "-seed=1"], once)
    atheris.Fuzz()


# ---------------------------------------------------------------------------------------------------------------------
# For people


_FOR_COMPILING = ("headers", "libraries", "sources", "driver_headers")


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in {**report.facts, **_for_people(report.environment)}.items():
        if value is not None and name not in _FOR_COMPILING:
            table.add_row(
                Text(name.replace("_", " ")), Text(", ".join(value) if isinstance(value, list) else str(value))
            )
    console.print(table, soft_wrap=False)
    console.print()
    if "sources" in report.facts:
        # as the reproducers of findings take them, a line each
        console.print(Text(f"headers: S={report.facts['sources']}"))
        console.print(Text(f"libraries: L={':'.join(report.facts['libraries'])}"))
        console.print()
    colours = {"ok": "green", "warning": "yellow", "FAILED": "bold red"}
    for c in report.checks:
        line = Text.assemble((f"{c.state:>7} ", colours[c.state]), c.name, (f"  {c.detail}" if c.detail else "", "dim"))
        console.print(line)
        for advice in c.advice.splitlines():
            console.print(Text(f"        {advice}"))
    console.print()
    good = "This build can be tested." if report.ok else "This cannot be tested; see FAILED above."
    console.print(Text(good, "green" if report.ok else "bold red"))


def _for_people(environment: dict[str, Any]) -> dict[str, Any]:
    keys = ("system_info", "python", "platform", "cpu", "packages")
    return {k: environment[k] for k in keys if k in environment}
