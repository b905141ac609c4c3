"""What disturbed runs leave behind: scenarios that abort on purpose, campaigns that are killed, and servers.

  ci/robustness
  ci/robustness --aborts 500 --kills 5 --starts 0
  ci/robustness --aborts 0 --kills 0 --starts 200

Aborts: every scenario must give a trace that ends with the signal, and be reported by the liveness oracle; a new worker
must be back in service in under 50 ms (the median; the longest is printed too). Kills: a campaign is ended by SIGKILL
at a random moment, the main process alone or all its processes; none may live on, and --resume must still have every
finding that was shown, whole. Starts: a llama-server (`redraft build --server`) is killed, or what started it is, in
six ways (fuzz/measure/server_starts.py). None may leave processes, ports, file descriptors or temporary files. Exit 0
when all of that holds, 1 when not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from fuzz import finding
from fuzz.cli.common import Usage, bench
from fuzz.measure.server_starts import show_starts, starts
from fuzz.models import from_recipe
from oracles.judge import Judge
from subjects.recipes import get
from subjects.sandbox import Sandbox
from subjects.scenario import ON_DEVICE, BlobEdit, Corrupt, Decode, ModelRef, Part, Reopen, Restore, Save, Scenario
from subjects.server.build import find_server
from subjects.shimcache import BadBuild
from subjects.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
REDRAFT = [str(Path(sys.executable).with_name("redraft"))]
FIGURE_MS = 50.0
# The return to service is timed at one abort in so many.
TIMED_EVERY = 20
# How long processes may take to notice that their campaign was killed.
GONE_WITHIN = 5.0
FOUND = re.compile(r"^found\s+(?P<signature>.+)  \((?:new|known: [^;]+); \d+ operations; \d+ of \d+\)\s*$")


def main() -> int:
    """Entry."""
    p = argparse.ArgumentParser(
        prog="ci/robustness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--aborts", type=int, default=10_000, metavar="N", help="scenarios that abort (default 10000)")
    p.add_argument("--kills", type=int, default=50, metavar="N", help="campaigns that are killed (default 50)")
    p.add_argument("--starts", type=int, default=200, metavar="N", help="servers that are killed (default 200)")
    p.add_argument("--server-bin", type=Path, metavar="PATH", help="the llama-server (default: the one in the cache)")
    p.add_argument("--seed", type=int, default=1, metavar="S", help="of programs and moments (default 1)")
    p.add_argument("--json", action="store_true", help="one JSON document on standard output, for machines")
    args = p.parse_args()
    console = Console(stderr=args.json, highlight=False, soft_wrap=True)
    try:
        server = find_server(args.server_bin) if args.starts else None
    except BadBuild as e:
        print(f"ci/robustness: {e}; --starts 0 leaves servers out", file=sys.stderr)
        return 2
    # everything goes into a folder of our own, so that whatever is left in it is ours
    scratch = Path(tempfile.mkdtemp(prefix="redraft-robustness-"))
    for variable, name in (("TMPDIR", "tmp"), ("REDRAFT_CACHE", "cache")):
        (scratch / name).mkdir()
        os.environ[variable] = str(scratch / name)
    tempfile.tempdir = None
    try:
        result: dict[str, Any] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
        if args.aborts:
            result["aborts"] = aborts(args.aborts, args.seed, scratch, console)
            show_aborts(result["aborts"], console)
        if args.kills:
            result["kills"] = kills(args.kills, args.seed, scratch, console)
            show_kills(result["kills"], console)
        if server:
            result["starts"] = starts(args.starts, args.seed, scratch, server, console)
            show_starts(result["starts"], console)
    except Usage as e:
        print(f"ci/robustness: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    problems = [x for part in ("aborts", "kills", "starts") for x in result.get(part, {}).get("problems", [])]
    result["good"] = not problems
    for problem in problems[:20]:
        console.print(f"  {problem}", style="red", markup=False)
    console.print(
        "good" if not problems else f"{len(problems)} problems", style="green" if not problems else "bold red"
    )
    if args.json:
        print(json.dumps(result, indent=2))
    return 0 if not problems else 1


# --- aborts -----------------------------------------------------------------------------------------------------------


def programs(model: ModelRef, count: int, seed: int) -> Iterator[Scenario]:
    """Programs that abort: on-device handles of another context, cut short, or with a magic that is none."""
    rnd = random.Random(seed)
    for i in range(count):
        seq, n, stream = i % 2, 1 + i // 2 % 24, i // 48
        feed = Decode(parts=(Part(seq=seq, n=n, stream=stream),))
        save, restore = Save(seq=seq, slot=0, flags=ON_DEVICE), Restore(seq=seq, slot=0)
        more = Decode(parts=(Part(seq=1 - seq, n=1 + rnd.randrange(24), stream=rnd.randrange(1 << 16)),))
        match rnd.randrange(3):
            case 0:
                yield Scenario(model=model, ops=(feed, save, more, Reopen(), restore))
            case 1:
                short = Corrupt(slot=0, edits=(BlobEdit(how="cut"),))
                yield Scenario(model=model, ops=(feed, save, more, short, restore))
            case _:
                magic = Corrupt(slot=0, edits=(BlobEdit(how="set", where="magic", value=rnd.randrange(1 << 31)),))
                yield Scenario(model=model, ops=(feed, save, more, magic, restore))


def aborts(count: int, seed: int, scratch: Path, console: Console) -> dict[str, Any]:
    """Run them all through one sandbox."""
    b = bench(None)
    model = from_recipe(get("llama"), b.models)
    path = Path(model.path)
    honest = Scenario(model=model.ref, ops=(Decode(parts=(Part(seq=0, n=8),)), Decode(parts=(Part(seq=1, n=4),))))
    problems: list[str] = []
    texts: Counter[str] = Counter()
    keys: set[str] = set()
    services: list[float] = []
    gc.collect()
    fds, files, children = _fds(), _files(scratch), _children()
    began = told = time.monotonic()
    with Sandbox(b.shim, [(path, 0)]) as sandbox:
        judge = Judge(sandbox, model.ref, path, b.build.fingerprint, b.cache)
        judge.judge(honest, variants=False)  # measures the bands, once
        before = _fds(), len(_children())
        for i, program in enumerate(programs(model.ref, count, seed)):
            deaths = sandbox.stats.deaths
            judgement = judge.judge(program, observed=False, variants=False)
            end = judgement.account.ledger.trace.end
            found = [v for v in judgement.violations if v.oracle == "liveness"]
            keys.add(program.key())
            texts[found[0].check.what if found else f"not reported: {end.how} {end.code}"] += 1
            if end.how != "signal" or len(found) != 1 or judgement.violations[0].oracle != "liveness":
                problems.append(
                    f"scenario {i} ({program.key()}): {end.how} {end.code}, {len(found)} liveness violations"
                )
            if sandbox.stats.deaths != deaths + 1:
                problems.append(
                    f"scenario {i} ({program.key()}): {sandbox.stats.deaths - deaths} deaths instead of one"
                )
                continue
            if i % TIMED_EVERY == 0:
                spent, trace = _service(sandbox, program, honest, path)
                services.append(spent)
                if trace.end.how != "ok" or len(trace.steps) != len(honest.ops):
                    problems.append(f"after scenario {i} an honest program ended with {trace.end}")
            if time.monotonic() - told > 10:
                told = time.monotonic()
                console.print(f"{i + 1} of {count} scenarios aborted, {(i + 1) / (told - began):.0f}/s", style="dim")
        seconds = time.monotonic() - began
        after = _fds(), len(_children())
        if after != before:
            problems.append(f"descriptors and children went from {before} to {after} while the sandbox lived")
        hangs, child_kb = sandbox.stats.hangs, sandbox.stats.max_rss_kb
    gc.collect()
    leaked = {
        "descriptors": max(0, _fds() - fds),
        "processes": len(_new_children(children)),
        "files": sorted(_files(scratch) - files - _kept(scratch)),
    }
    problems += [f"leaked {name}: {what}" for name, what in leaked.items() if what]
    if hangs:
        problems.append(f"{hangs} runs were taken for hangs")
    service = {"back_in_service": _ms(services), "figure_ms": FIGURE_MS}
    if not services or statistics.median(services) * 1000 > FIGURE_MS:
        problems.append(f"back in service after {service['back_in_service']} ms, not in under {FIGURE_MS:.0f}")
    return {
        "scenarios": count,
        "different": len(keys),
        "seconds": round(seconds, 1),
        "ends": dict(texts.most_common()),
        **service,
        "child_kb": child_kb,
        "leaked": leaked,
        "problems": problems,
    }


def _service(sandbox: Sandbox, program: Scenario, honest: Scenario, path: Path) -> tuple[float, Trace]:
    """Seconds from the operation that ends a worker to where a warm worker would have been all the time, and the trace
    of the first program in the new one.

    What the aborting program takes longer than without its last operation, and what the first program in the new worker
    takes longer than the same in a warm one.
    """

    def timed(scenario: Scenario) -> tuple[float, Trace]:
        at = time.monotonic()
        trace = sandbox.run(scenario, path, fresh=True)
        return time.monotonic() - at, trace

    before = msgspec.structs.replace(program, ops=program.ops[:-1])
    usual = min(timed(before)[0] for _ in range(2))
    dying, _ = timed(program)
    first, trace = timed(honest)
    warm = min(timed(honest)[0] for _ in range(2))
    return max(0.0, dying - usual) + max(0.0, first - warm), trace


def _ms(times: list[float]) -> dict[str, float]:
    if not times:
        return {}
    cut = sorted(times)
    at = {"median": len(cut) // 2, "p99": len(cut) * 99 // 100, "max": len(cut) - 1}
    return {name: round(1000 * cut[i], 2) for name, i in at.items()}


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _children() -> set[tuple[int, float]]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            found.add((child.pid, child.create_time()))
        except psutil.NoSuchProcess:
            continue
    return found


def _new_children(before: set[tuple[int, float]]) -> set[tuple[int, float]]:
    until = time.monotonic() + GONE_WITHIN
    while (left := _children() - before) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _files(scratch: Path) -> set[str]:
    return {str(p.relative_to(scratch)) for p in scratch.rglob("*") if not p.is_dir()}


def _kept(scratch: Path) -> set[str]:
    """What belongs into the cache: whole shims, models and bands."""
    kinds = (".so", ".gguf", ".json", ".lock", ".log")
    cache = (p for p in (scratch / "cache").rglob("*") if p.suffix in kinds and not p.name.startswith((".", "tmp")))
    return {str(p.relative_to(scratch)) for p in cache}


def show_aborts(a: dict[str, Any], console: Console) -> None:
    """The first table."""
    table = Table(title=f"{a['scenarios']} scenarios that abort", title_justify="left", show_header=False)
    table.add_row("different programs", str(a["different"]))
    table.add_row("time", f"{a['seconds']} s")
    for text, n in a["ends"].items():
        table.add_row(text, str(n))
    table.add_row("back in service, ms", ", ".join(f"{k} {v}" for k, v in a["back_in_service"].items()))
    table.add_row("leaked", ", ".join(f"{len(v) if isinstance(v, list) else v} {k}" for k, v in a["leaked"].items()))
    table.add_row("problems", str(len(a["problems"])))
    console.print(table)


# --- kills ------------------------------------------------------------------------------------------------------------


def kills(count: int, seed: int, scratch: Path, console: Console) -> dict[str, Any]:
    """Kill campaigns at random moments, half of them with all their processes, and go on with each."""
    bench(None)  # compiled once, before the first clock starts
    rnd = random.Random(seed)
    runs = []
    for k in range(count):
        runs.append(killed(k, rnd.uniform(1.0, 8.0), k % 2 == 1, scratch))
        r = runs[-1]
        console.print(
            f"kill {k + 1} of {count}: {r['whom']} after {r['seconds']:.1f} s, {r['shown']} findings shown, "
            f"{r['kept']} there after --resume" + (f"; {len(r['problems'])} problems" if r["problems"] else ""),
            style="red" if r["problems"] else "dim",
        )
    return {
        "kills": count,
        "shown": sum(r["shown"] for r in runs),
        "kept": sum(r["kept"] for r in runs),
        "latest_end": max((r["gone_after"] for r in runs), default=0.0),
        "runs": runs,
        "problems": [f"kill {r['number']}: {p}" for r in runs for p in r["problems"]],
    }


def killed(k: int, seconds: float, everything: bool, scratch: Path) -> dict[str, Any]:
    """One campaign, killed and resumed. `everything`: its processes too, not the main one alone."""
    out = scratch / f"kill-{k}"
    asked = [*REDRAFT, "fuzz", "--seed", str(k), "--jobs", "2", "--avoid", "never", "--out", str(out)]
    # wide, so that no line of a finding is broken
    env = {**os.environ, "COLUMNS": "2000", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*asked, "--scenarios", "100000"],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    time.sleep(seconds)
    problems: list[str] = []
    if process.poll() is not None:
        problems.append(f"ended by itself with {process.returncode}: {''.join(lines)[-300:]}")
    family = _family(process.pid)
    targets = [process.pid, *(p.pid for p in family)] if everything else [process.pid]
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    at = time.monotonic()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=GONE_WITHIN)
    gone_after = time.monotonic() - at
    for left in alive:
        if not left.is_running() or left.status() == psutil.STATUS_ZOMBIE:
            continue  # ended, and whoever inherited it has not asked how
        problems.append(f"process {left.pid} lives on {GONE_WITHIN:.0f} s after the kill")
        left.kill()
    reader.join(timeout=10)
    shown = {m["signature"] for line in lines if (m := FOUND.match(line))}
    if any(line.startswith("found ") for line in lines) and not shown:
        problems.append("findings were shown in another form than this script reads")
    kept: set[str] = set()
    if (out / "campaign.json").exists():
        kept = resumed(asked, out, env, shown, problems)
    elif shown:
        problems.append("findings were shown, but there is no campaign")
    shutil.rmtree(out, ignore_errors=True)
    return {
        "number": k + 1,
        "whom": "all processes" if everything else "main process",
        "seconds": round(seconds, 2),
        "processes": 1 + len(family),
        "gone_after": round(gone_after, 2),
        "shown": len(shown),
        "kept": len(kept),
        "problems": problems,
    }


def resumed(asked: list[str], out: Path, env: dict[str, str], shown: set[str], problems: list[str]) -> set[str]:
    """Go on with a killed campaign, and look at what is there; returns the signatures."""
    done = subprocess.run(
        [*asked, "--scenarios", "100", "--reduce-seconds", "5", "--resume", "--json"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    try:
        document = json.loads(done.stdout)
    except ValueError:
        problems.append(f"--resume ended with {done.returncode} and no JSON: {done.stderr[-300:]}")
        return set()
    if done.returncode not in (0, 1):
        problems.append(f"--resume ended with {done.returncode}: {done.stderr[-300:]}")
    kept = {f["signature"] for f in document["findings"]}
    problems += [f"shown, but lost: {s}" for s in sorted(shown - kept)]
    for f in document["findings"]:
        try:
            finding.load(Path(f["path"]))
            finding.load_traces(Path(f["path"]))
        except finding.BadFinding as e:
            problems.append(f"not whole: {e}")
    listed = {Path(f["path"]).name for f in document["findings"]}
    there = {p.name for p in (out / "findings").glob("*")} if (out / "findings").is_dir() else set()
    problems += [f"left in findings/: {name}" for name in sorted(there - listed)]
    left = [p for p in out.rglob("*") if p.name.startswith((".new-", ".old-", "pending-"))]
    problems += [f"left behind: {p.relative_to(out)}" for p in left]
    return kept


def _family(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def show_kills(k: dict[str, Any], console: Console) -> None:
    """The second table."""
    table = Table(title=f"{k['kills']} campaigns killed", title_justify="left", show_header=False)
    table.add_row("findings shown before", str(k["shown"]))
    table.add_row("findings there after --resume", str(k["kept"]))
    table.add_row("last process gone after", f"{k['latest_end']} s")
    table.add_row("problems", str(len(k["problems"])))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
