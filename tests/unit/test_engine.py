"""The supervisor of the coverage-guided engine, over targets in plain Python that say what libFuzzer says.

Nothing here waits by the clock for what should happen, only for what must not take for ever.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
from fakes import MODEL, IdealSandbox
from rich.console import Console

from fuzz import campaign, journal, loop, show
from fuzz import job as jobs
from fuzz.campaign import Result, Status, together
from fuzz.cli import fuzz as command
from fuzz.cli import main
from fuzz.cli.common import Usage, expand, read
from fuzz.engine import corpus, libfuzzer, picture, process
from fuzz.engine import job as engine
from fuzz.engine.process import Ended, Listener
from fuzz.journal import CURVE, Progress, TargetProgress, sweep
from fuzz.known import load_all, scenario_of
from fuzz.models import Model
from fuzz.state import traits_of
from fuzz.targets import NAMES, load
from fuzz.targets.config import VARIABLE, Complaint, Complaints, TargetConfig, Tried, complaints
from fuzz.targets.config import read as read_config
from fuzz.targets.run import counting
from oracles.crash import Crash
from subjects import instrument, making
from subjects.builds import Build
from subjects.recipes import get
from subjects.scenario import Decode, Part, Scenario
from subjects.sources import NoDrivers

MODELS = [Model(MODEL, "none", traits_of(get("llama")))]
PATIENCE = 60.0

# What a target says and leaves, by $FAKE. Its arguments are libFuzzer's.
FAKE = """\
import hashlib, json, os, subprocess, sys
from pathlib import Path

given = dict(a[1:].partition("=")[::2] for a in sys.argv[1:] if a.startswith("-"))
folders = [Path(a) for a in sys.argv[1:] if not a.startswith("-")]
mode, told = os.environ["FAKE"], json.loads(os.environ["REDRAFT_TARGET"])


def say(text):
    print(text, flush=True)


def artifact(data, kind="crash"):
    path = Path(given["artifact_prefix"] + f"{kind}-{hashlib.sha1(data).hexdigest()}")
    path.write_bytes(data)


if "merge" in given:
    if mode == "no merge":
        sys.exit(1)
    into, source = folders
    for path in sorted(source.iterdir())[:2]:
        (into / path.name).write_bytes(path.read_bytes()[: -1 if mode == "cut merge" else None])
    (source / "written-meanwhile").write_bytes(b"new")
    say(f"MERGE-OUTER: {9 if mode == 'full disk' else 2} new files with 7 new features added; 3 new coverage edges")
    sys.exit(0)
if mode == "silent":
    say("ImportError: no module named atheris")
    sys.exit(1)
say("#2\\tINITED cov: 100 ft: 120 corp: 1/1b exec/s: 0 rss: 50Mb")
say("#40\\tNEW    cov: 110 ft: 150 corp: 2/9b lim: 4 exec/s: 20 rss: 60Mb L: 8/8 MS: 1 CopyPart-")
if mode == "crash":
    say("/x/llama.cpp/src/llama-kv-cache.cpp:12: GGML_ASSERT(fits) failed")
    say("==7== ERROR: libFuzzer: deadly signal")
    say("    #9 0x12 in ggml_abort /x/llama.cpp/ggml/src/ggml.c:272:5")
    say("    #10 0x12 in llama_kv_cache::state_read(int) /x/llama.cpp/src/llama-kv-cache.cpp:12:3")
    say("SUMMARY: libFuzzer: deadly signal")
    artifact(b"one")
    sys.exit(77)
if mode == "python":
    say(" === Uncaught Python exception: ===\\nKeyError: 7")
    artifact(b"one")
    sys.exit(77)
if mode == "complain":
    import base64
    line = json.dumps({"symptom": "refused, but changed", "text": "why", "input": base64.b64encode(b"two").decode()})
    Path(told["report"]).write_text(line + "\\n" + line[:20])
if mode == "undefined":
    say("/x/llama.cpp/src/llama-kv-cells.h:4:8: runtime error: signed integer overflow: 1 + 7 cannot be represented")
    say("    #0 0x7f in llama_kv_cells::pos_add(unsigned int, int) /x/llama.cpp/src/llama-kv-cells.h:4:8")
if mode in ("for ever", "deaf"):
    import signal, time
    if mode == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=sys.stdout)
    say("#64\\tpulse  cov: 111 ft: 151 corp: 2/9b lim: 4 exec/s: 20 rss: 60Mb")
    time.sleep(1000)
(folders[0] / "kept").write_bytes(b"kept")
if "tried" in told:
    Path(told["tried"]).write_bytes((7).to_bytes(8, sys.byteorder))
say("#100\\tDONE   cov: 120 ft: 160 corp: 3/9b lim: 4 exec/s: 25 rss: 61Mb")
say("stat::number_of_executed_units: 100\\nstat::peak_rss_mb: 61")
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "fuzz_fake.py"
    path.write_text(FAKE)
    return path


def run_fake(
    target: Path, mode: str, *args: object, stop: Callable[[], bool] = lambda: False, seconds: float = PATIENCE
) -> Ended:
    return process.run(
        [sys.executable, str(target), f"-artifact_prefix={target.parent}/", *map(str, args), str(target.parent)],
        {**os.environ, "FAKE": mode, "REDRAFT_TARGET": json.dumps({"report": str(target.parent / "report")})},
        seconds=seconds,
        stop=stop,
    )


# --- what libFuzzer says ----------------------------------------------------------------------------------------------


def test_lines_of_progress() -> None:
    line = "#94\tNEW    cov: 12921 ft: 12912 corp: 2/2b lim: 4 exec/s: 29 rss: 172Mb L: 1/1 MS: 1 ChangeByte-"
    assert libfuzzer.status(line) == libfuzzer.Stat(94, "NEW", 12921, 12912, 2, 29, 172)
    first = libfuzzer.status("#1\tpulse  exec/s: 0 rss: 140Mb")
    assert first is not None
    assert (first.edges, first.rss_mb) == (0, 140)
    for other in ("INFO: seed corpus: files: 2", "    #0 0x7f in f(int) a.cpp:3", "#", "#x NEW", ""):
        assert libfuzzer.status(other) is None
    assert libfuzzer.final("stat::number_of_executed_units: 2245") == ("number_of_executed_units", 2245)
    assert libfuzzer.final("stat::nothing") is None


def test_what_is_said_is_taken_apart_however_it_is_cut(tmp_path: Path) -> None:
    text = "#2\tINITED cov: 5 ft: 6 corp: 1/1b exec/s: 0 rss: 50Mb\r\na\n\nb\u00e9\nstat::peak_rss_mb: 61\nno end"
    for size in (1, 3, 1000):
        seen: list[libfuzzer.Stat] = []
        heard = Listener(seen.append)
        data = text.encode()
        for at in range(0, len(data), size):
            heard.take(data[at : at + size])
        heard.close()
        assert [s.edges for s in seen] == [5]
        assert heard.figures == {"peak_rss_mb": 61}
        assert heard.log == "a\n\nb\u00e9\nno end\n"


def test_a_flood_is_kept_within_bounds_and_the_newest_of_it() -> None:
    heard = Listener(lambda _: None)
    for i in range(5000):
        heard.take(f"warning {i} {'x' * 40}\n".encode())
    heard.take(b"y" * (1 << 20))
    heard.take(b"\xff\n last words\n")
    assert len(heard.log.encode()) < 4 * process.TAIL_BYTES
    assert heard.log.endswith(" last words\n")


def test_reports_of_undefined_behaviour_have_their_stack() -> None:
    heard = Listener(lambda _: None)
    report = "/a/b.cpp:1:2: runtime error: shift of N\n    #0 0x1 in f() /a/b.cpp:1:2\n"
    heard.take((report + "\nother\n    #3 0x1 in g()\n").encode() * 60)
    assert ["\n".join(lines) + "\n" for lines in heard.undefined] == [report] * process.REPORTS


# --- one process ------------------------------------------------------------------------------------------------------


def test_a_run_that_ends_by_itself(target: Path) -> None:
    ended = run_fake(target, "well")
    assert (ended.code, ended.executions, ended.late, ended.stopped) == (0, 100, False, False)
    assert ended.last is not None
    assert ended.last.edges == 120
    assert (target.parent / "kept").exists()


def test_a_crash_leaves_its_input_and_its_log(target: Path) -> None:
    ended = run_fake(target, "crash")
    assert (ended.code, ended.executions) == (77, 40)
    assert "GGML_ASSERT(fits) failed" in ended.log
    (path,) = libfuzzer.artifacts_in(target.parent)
    assert path.read_bytes() == b"one"


@pytest.mark.parametrize("mode", ["for ever", "deaf"])
def test_nothing_is_left_of_a_target_that_is_told_to_stop(
    target: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE", 0.5)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    seen: list[int] = []

    def stop() -> bool:
        seen.append(1)
        return len(seen) > 2

    ended = run_fake(target, mode, stop=stop)
    assert (ended.stopped, ended.late) == (True, False)
    assert ended.code != 0
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def test_a_target_that_does_not_end_in_time_is_killed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE", 0.1)
    assert run_fake(target, "for ever", seconds=0.0).late


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_target_dies_with_a_job_that_is_killed(target: Path) -> None:
    code = (
        f"import os, sys; sys.path[:0] = [{str(Path(__file__).resolve().parents[2])!r}]\n"
        "from fuzz.engine import process\n"
        f"env = {{**os.environ, 'FAKE': 'for ever', 'REDRAFT_TARGET': '{{}}'}}\n"
        f"process.run([sys.executable, {str(target)!r}, '-a=b', {str(target.parent)!r}], env, seconds=1000,\n"
        "            listen=lambda s: print(s.executions, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(3)][-1] == b"64\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
    child.wait(PATIENCE)


# --- corpora ----------------------------------------------------------------------------------------------------------


def filled(folder: Path, n: int) -> Path:
    folder.mkdir(parents=True)
    for i in range(n):
        (folder / f"{i}").write_bytes(b"x%d" % i)
    return folder


def test_a_corpus_begins_with_the_seeds_and_keeps_what_it_has(tmp_path: Path) -> None:
    seeds = filled(tmp_path / "seeds", 3)
    folder = corpus.folder_of(tmp_path, "t")
    corpus.begin(folder, seeds)
    assert {p.name for p in folder.iterdir()} == {corpus.name_of(b"x%d" % i) for i in range(3)}
    corpus.remove(folder, b"x1")
    corpus.remove(folder, b"not there")
    filled(folder.with_name(".new-t"), 1)
    corpus.begin(folder, seeds)
    assert corpus.count(folder) == 2
    assert [p.name for p in folder.parent.iterdir()] == ["t"]
    corpus.begin(corpus.folder_of(tmp_path, "u"), tmp_path / "none")
    assert corpus.count(corpus.folder_of(tmp_path, "u")) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs an exchange of names in one step")
def test_minimising_loses_nothing_that_is_written_meanwhile(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", 5)

    def merge(into: Path, source: Path) -> bool:
        (into / "0").write_bytes((source / "0").read_bytes())
        (source / "late").write_bytes(b"late")
        assert not corpus.minimise(folder, merge), "a second one at the same time"
        return True

    assert corpus.minimise(folder, merge)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"0": b"x0", "late": b"late"}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def _half(into: Path, source: Path) -> bool:
    (into / "0").write_bytes(b"half")
    return False


@pytest.mark.parametrize("merge", [_half, lambda into, source: True], ids=["fails", "keeps nothing"])
def test_a_corpus_that_cannot_be_minimised_stays(tmp_path: Path, merge: Callable[[Path, Path], bool]) -> None:
    folder = filled(tmp_path / "c", 5)
    assert not corpus.minimise(folder, merge)
    assert corpus.count(folder) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert not corpus.minimise(filled(tmp_path / "empty", 0), merge)


# --- a job ------------------------------------------------------------------------------------------------------------


class Box(IdealSandbox):
    """A sandbox of the ideal library."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__("dense")

    def peak_kb(self) -> int:
        return 0

    def close(self) -> None:
        pass


# What a known fault ends, wherever it runs.
ENDING = scenario_of(next(k for k in load_all() if k.name == "device-foreign"))
DEVICE_CORRUPT = next(k for k in load_all() if k.name == "device-corrupt")
KNOWN_END = "llama-context.cpp: GGML_ASSERT(mem_storage.find(seq_id_read) != mem_storage.end()) failed"


class Toy:
    """A target whose inputs are as many tokens as they have bytes."""

    def __init__(self, name: str):
        self.name = name

    def scenario(self, data: bytes, models: list[Model]) -> tuple[Scenario, Model] | None:
        if not data:
            return None
        if data == b"broken":
            raise ValueError("the target's fault")
        ops = (Decode(parts=(Part(seq=0, n=len(data)),)),)
        return Scenario(model=MODEL, ops=ops, note=data.decode()), models[0]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, target: Path) -> list[dict[str, Any]]:
    """What jobs say; their targets are fakes."""
    said: list[dict[str, Any]] = []
    for module in (jobs, engine):
        monkeypatch.setattr(module, "Sandbox", Box)
    for module in (jobs, engine, loop):
        monkeypatch.setattr(module, "emit", lambda event, **fields: said.append({"event": event, **fields}))
    monkeypatch.setattr(loop.signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine, "load", Toy)
    monkeypatch.setattr(engine, "script", lambda _: target)
    return said


def job(out: Path, mode: str = "well", targets: tuple[str, ...] = ("seq_state",), **changed: Any) -> engine.CoverageJob:
    for name in targets:
        corpus.begin(corpus.folder_of(out, name), out / "no-seeds")
    coverage = loop.Coverage(
        alone=changed.pop("alone", False),
        targets=list(targets),
        build="b",
        fingerprint="f",
        shim="s",
        variables={"FAKE": mode},
        environment={"build": "i"},
    )
    asked: dict[str, Any] = {"models": MODELS, "shim": "", "build": "b", "seed": 1, "job": 0, "jobs": 1, **changed}
    config = loop.JobConfig(cache=str(out / "cache"), out=str(out), coverage=coverage, **asked)
    return engine.CoverageJob(config, coverage)


def shows(*whats: str, oracle: str = "liveness") -> SimpleNamespace:
    """A judgement with violations."""
    found = [
        SimpleNamespace(oracle=oracle, key=f"{oracle}:{w}", check=SimpleNamespace(what=w, step=len(ENDING.ops) - 1))
        for w in whats
    ]
    nothing_ran = SimpleNamespace(ledger=SimpleNamespace(trace=SimpleNamespace(steps=[])))
    return SimpleNamespace(violations=found, executed=ENDING, account=nothing_ran)


def examined(made: engine.CoverageJob, monkeypatch: pytest.MonkeyPatch, ordinary: Any, instrumented: Any) -> list[str]:
    """What is examined where; answers are given."""
    asked: list[str] = []

    def examine(program: Scenario, model: Model, *, fresh: bool, bed: jobs.Bed | None = None) -> Any:
        assert fresh
        on_both = bed is not None and bed is not made.bed
        asked.append(f"{program.note} {'instrumented' if on_both else 'ordinary'}")
        return instrumented if on_both else ordinary

    monkeypatch.setattr(made, "_examine", examine)
    return asked


def once(made: engine.CoverageJob, name: str = "seq_state") -> Ended:
    ended = made._fuzz(name, 10.0)
    made._after(name, ended)
    return ended


def test_what_a_target_is_told(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    made = job(tmp_path, avoid="always")
    env = made._environment("seq_state")
    asked = json.loads(env["REDRAFT_TARGET"])
    assert asked["avoid"] == made.progress.avoiding != []
    assert (asked["build"], asked["shim"], len(asked["models"])) == ("f", "s", 1), "by contents: a build is updated"
    assert json.loads(made._environment("driver_state")["REDRAFT_TARGET"])["models"] == []
    assert Path(env["TMPDIR"]).is_dir()
    made.journal.close()


def test_a_run_counts_and_leaves_nothing_but_its_corpus(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    made = job(tmp_path)
    once(made)
    once(made)
    t = made.progress.targets["seq_state"]
    assert (made.progress.executions, t.executions, t.first, t.edges, t.features, t.corpus) == (
        200,
        200,
        100,
        120,
        160,
        3,
    )
    assert [edges for _, edges in t.curve] == [100, 110, 120]
    assert t.tried == 2 * 7
    assert made.progress.max_rss_kb == 61 << 10
    assert [p.name for p in corpus.folder_of(tmp_path, "seq_state").iterdir()] == ["kept"]
    assert not made.scratch.exists()
    made.stopped = True
    made.run()
    assert {p.name for p in (tmp_path / "state").iterdir()} == {"job-0.json", "inflight-0.bin"}


def test_a_crash_that_the_ordinary_library_shows(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, "crash")
    (corpus.folder_of(tmp_path, "seq_state") / corpus.name_of(b"one")).write_bytes(b"one")
    asked = examined(made, monkeypatch, shows("llama-kv-cache.cpp: GGML_ASSERT(fits) failed"), None)
    for _ in range(engine.EXAMINED + 2):
        once(made)
    assert asked == ["one ordinary"] * engine.EXAMINED
    p = made.progress
    assert p.crashes == {"llama-kv-cache.cpp: GGML_ASSERT(fits) failed": engine.EXAMINED + 2}
    assert (p.targets["seq_state"].crashes, p.lost) == (engine.EXAMINED + 2, 0)
    assert not libfuzzer.artifacts_in(made.artifacts / "seq_state")
    assert not (tmp_path / "crashes").exists()
    assert corpus.count(corpus.folder_of(tmp_path, "seq_state")) == 0, "it would crash at every start"
    made.journal.close()


@pytest.mark.parametrize("ordinary", [None, shows(), shows("another assertion"), shows("x", oracle="refusal")])
def test_what_shows_elsewhere_is_tried_on_the_instrumented_build(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, ordinary: Any
) -> None:
    made = job(tmp_path, "crash")
    asked = examined(made, monkeypatch, ordinary, shows("llama-kv-cache.cpp: GGML_ASSERT(fits) failed"))
    once(made)
    assert asked == ["one ordinary", "one instrumented"]
    assert made.progress.lost == 0
    made.journal.close()


def test_what_shows_nowhere_is_kept_with_its_log(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    made = job(tmp_path, "crash")
    once(made)  # the ideal library is right everywhere
    assert made.progress.lost == 1
    assert made.progress.scenarios == 2
    (folder,) = (tmp_path / "crashes").iterdir()
    assert (folder / "seq_state.input").read_bytes() == b"one"
    log = (folder / "log.txt").read_text()
    assert "GGML_ASSERT(fits) failed" in log
    assert f"Model {MODELS[0].label}. Context: n_ctx " in log
    assert "\n0. decode 3 tokens into sequence 0 (positions 0..2)\n" in log
    program = made._decoded("seq_state", b"one")
    assert program is not None
    assert read(folder) == program[0], "redraft replay runs it"
    assert expand([folder]) == expand([tmp_path / "crashes"]) == [folder]
    assert made.progress.inputs == 1
    once(made)
    assert len(list((tmp_path / "crashes").iterdir())) == 1, "one of each kind"
    made.journal.close()


def test_an_end_for_want_of_memory_counts_on_the_ordinary_library_alone(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path)
    asked = examined(made, monkeypatch, shows(), shows("out of memory"))
    made._input("seq_state", Crash("memory", "out of memory"), b"big", "")
    assert (asked, made.progress.lost) == (["big ordinary"], 1)
    made.journal.close()


def test_a_signal_is_shown_by_any_end(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path)
    examined(made, monkeypatch, shows("SIGSEGV"), None)
    made._input("seq_state", Crash("address", "llama-context.cpp: SEGV in f < g"), b"s", "")
    made._input("seq_state", Crash("exception", "uncaught exception: "), b"e", "")
    assert made.progress.lost == 0
    made.journal.close()


@pytest.mark.parametrize(
    ("crash", "where"),
    [
        (Crash("address", "llama-kv-cells.h: heap-buffer-overflow in f < g"), ["s ordinary", "s instrumented"]),
        (Crash("signal", "llama-context.cpp: deadly signal in f"), ["s ordinary", "s instrumented"]),
        (Crash("assertion", KNOWN_END), ["s ordinary"]),
    ],
)
def test_the_end_of_a_known_fault_does_not_show_what_a_sanitizer_saw(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, crash: Crash, where: list[str]
) -> None:
    made = job(tmp_path)
    asked = examined(made, monkeypatch, shows(KNOWN_END), shows(crash.text))
    made._input("seq_state", crash, b"s", "")
    assert (asked, made.progress.lost) == (where, 0)
    examined(made, monkeypatch, shows(KNOWN_END), shows(KNOWN_END))
    made._input("seq_state", crash, b"s", "ASan's report")
    assert made.progress.lost == len(where) - 1
    made.journal.close()


def test_another_assertion_of_the_same_known_fault_shows_it(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (
        f"llama-memory-recurrent.cpp: GGML_ASSERT({x}) failed" for x in ("cells[0].pos == 1", "head + cell_count <= 3")
    )
    program = scenario_of(next(k for k in load_all() if k.name == "recurrent-cells"))
    model = Model(program.model, "none", traits_of(get(str(program.model.recipe))))
    made = job(tmp_path, models=[model])
    monkeypatch.setattr(made, "_decoded", lambda *_: (program, model))
    showing = shows(other)
    showing.executed = program
    showing.violations[0].check.step = len(program.ops) - 1
    asked = examined(made, monkeypatch, showing, shows())
    made._input("seq_state", Crash("assertion", one), b"s", "")
    assert (len(asked), made.progress.lost) == (1, 0)
    made._input("seq_state", Crash("assertion", "llama-memory-recurrent.cpp: GGML_ASSERT(others) failed"), b"s", "")
    assert made.progress.lost == 1, "nothing of a known fault"
    made.journal.close()


def test_what_a_complaint_is_of_is_kept_with_its_edits(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, "complain")
    monkeypatch.setattr(made, "_decoded", lambda *_: (scenario_of(DEVICE_CORRUPT), MODELS[0]))
    examined(made, monkeypatch, None, None)
    once(made)
    (folder,) = (tmp_path / "crashes").iterdir()
    assert {p.name for p in folder.iterdir()} == {"seq_state.input", "scenario.json", "log.txt"}
    log = (folder / "log.txt").read_text()
    assert log.startswith("refused, but changed  (target seq_state)\n")
    assert "0. change slot " in log and "why" in log
    made.journal.close()


def test_a_full_disk_is_one_line_a_file(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, "crash")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    for module in (engine, journal):
        monkeypatch.setattr(module, "write_atomically", full)
    monkeypatch.setattr(engine, "SLICE", (engine.LEAST, engine.LEAST))  # one run, whatever it takes
    once(made)
    made._slice()
    made.stopped = True
    made.run()
    texts = [e["text"] for e in told if e["event"] == "trouble"]
    assert f"cannot write {tmp_path / 'state' / 'job-0.json'}: No space left on device" in texts
    assert len(texts) == len(set(texts))
    assert not [t for t in texts if "\n" in t]
    assert told[-1]["event"] == "done"
    s = Status(tmp_path, 2.0, None, jobs={0: made.progress})
    assert Result(s, interrupted=False, died=[]).exit_code("new") == 2


def test_an_exception_without_a_name_is_shown_by_one_that_is_known(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path)
    asked = examined(made, monkeypatch, shows("uncaught std::runtime_error: wrong sequence state magic"), None)
    made._input("seq_state", Crash("exception", "uncaught exception: "), b"e", "")
    assert (asked, made.progress.lost) == (["e ordinary"], 0)
    made.journal.close()


def test_a_build_of_other_sources_is_judged_on_itself(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, Any]] = []

    class Noted(Box):
        def __init__(self, shim: Path, *_: object, env: Any = None, **__: object) -> None:
            super().__init__()
            opened.append((str(shim), env))

    for module in (jobs, engine):
        monkeypatch.setattr(module, "Sandbox", Noted)
    made = job(tmp_path, alone=True, shim="s", build="f", environment={"build": "i"})
    assert opened == [("s", {"FAKE": "well"})]
    assert (made.bed.build, made.bed.note, made.bed.environment) == ("f", "", {"build": "i"})
    asked = examined(made, monkeypatch, shows("SIGSEGV"), None)
    made._input("seq_state", Crash("address", "SEGV in f"), b"plain", "")
    assert (asked, made.progress.lost) == (["plain ordinary"], 0), "its bed, once"
    made._input("seq_state", Crash("memory", "out of memory"), b"big", "")
    assert (asked, made.progress.lost) == (["plain ordinary"], 1), "a sanitizer's limit is no fault"
    assert len(opened) == 1
    made.journal.close()


def test_reports_without_an_input_leave_room_for_inputs(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "KEPT", 3)
    made = job(tmp_path)
    for i in range(5):
        letter = "abcde"[i]
        made._undefined(f"/x/src/llama-{letter}.cpp:4:8: runtime error: shift")
        made._keep("seq_state", Crash("hang", f"hang {letter}"), b"x", "log", None)
        made._keep("seq_state", Crash("hang", f"hang {letter}"), b"y", "log", None)
    folders = list((tmp_path / "crashes").iterdir())
    inputs = [f for f in folders if list(f.glob("*.input"))]
    assert (len(folders), len(inputs), len(made.progress.undefined)) == (6, 3, 5)
    assert {(f / "seq_state.input").read_bytes() for f in inputs} == {b"x"}
    made.journal.close()


def test_an_input_is_kept_beside_the_report_of_the_same_name(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    made = job(tmp_path)
    text = "/x/src/llama-a.cpp:4:8: runtime error: shift"
    made._undefined(text)
    made._keep("seq_state", Crash("undefined", "llama-a.cpp: runtime error: shift"), b"x", text, None)
    (folder,) = (tmp_path / "crashes").iterdir()
    assert {p.name for p in folder.iterdir()} == {"log.txt", "seq_state.input"}
    made.journal.close()


def test_once_a_known_fault_is_stepped_round_the_same_end_is_something_else(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, "crash")

    def examine(*_: object, **__: object) -> Any:
        made.progress.avoiding = ["device-corrupt"]
        return shows("llama-kv-cache.cpp: GGML_ASSERT(fits) failed")

    monkeypatch.setattr(made, "_examine", examine)
    once(made)
    assert made.progress.examined == {}
    assert json.loads(made._environment("seq_state")["REDRAFT_TARGET"])["avoid"] == ["device-corrupt"]
    once(made)
    assert list(made.progress.examined.values()) == [1]
    made.journal.close()


def test_a_complaint_is_examined_like_a_crash(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, "complain")
    asked = examined(made, monkeypatch, shows("x", oracle="refusal"), None)
    once(made)
    assert asked == ["two ordinary"]
    assert made.progress.crashes == {"refused, but changed": 1}
    assert (made.progress.lost, made.failures["seq_state"]) == (0, 0)
    made.journal.close()


def test_undefined_behaviour_is_told_of_once(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    made = job(tmp_path, "undefined")
    once(made)
    once(made)
    text = "llama-kv-cells.h: runtime error: signed integer overflow: N + N cannot be represented"
    assert made.progress.undefined == {text: 2}
    assert [e["text"] for e in told if e["event"] == "note"] == [
        f"undefined behaviour  {text} < llama_kv_cells::pos_add"
    ]
    assert made.progress.crashes == {}
    made.journal.close()


def test_a_fault_of_the_targets_is_told_of_once_and_is_no_finding(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, "python")
    asked = examined(made, monkeypatch, None, None)
    once(made)
    once(made)
    (text,) = [e["text"] for e in told if e["event"] == "trouble"]
    assert "has a fault of its own: Python: KeyError: N" in text
    assert asked == []
    made._input("seq_state", Crash("exit", "x"), b"broken", "")
    made._input("seq_state", Crash("exit", "x"), b"", "")
    assert made.progress.lost == 2
    assert "cannot say what" in [e["text"] for e in told if e["event"] == "trouble"][-1]
    made.journal.close()


def test_a_target_that_does_not_start_is_left_alone(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    made = job(tmp_path, "silent")
    made.run()
    texts = [e["text"] for e in told if e["event"] == "trouble"]
    assert len(texts) == engine.FAILURES + 2
    assert "no module named atheris" in texts[0]
    assert "no target runs" in texts[-1]
    assert told[-1]["event"] == "done"
    s = Status(tmp_path, 2.0, None, jobs={0: made.progress})
    result = Result(s, interrupted=False, died=[])
    assert (result.exit_code("new"), result.document()["gave_up"]) == (2, [0])
    out = io.StringIO()
    show.final(result, Console(file=out, width=200))
    assert "no target runs any more in job 0" in out.getvalue()
    assert "Nothing was found" not in out.getvalue()
    made = job(tmp_path)
    assert not made.progress.gave_up, "--resume tries again"
    made.journal.close()


def killed(executions: int) -> Ended:
    return Ended(-9, "", 1.0, figures={"number_of_executed_units": executions})


def test_a_target_that_the_system_kills_is_started_again(tmp_path: Path, told: list[dict[str, Any]]) -> None:
    made = job(tmp_path)
    for i in range(10):
        (corpus.folder_of(tmp_path, "seq_state") / f"{i}").write_bytes(b"x")
    for _ in range(3 * engine.KILLS):
        made._after("seq_state", killed(21))
    assert made._runs("seq_state"), "it got on"
    for _ in range(engine.KILLS - 1):
        made._after("seq_state", killed(20))
    made._after("seq_state", Ended(0, "", 1.0, figures={"number_of_executed_units": 5}))
    for _ in range(engine.KILLS - 1):
        made._after("seq_state", killed(1))
        assert made._runs("seq_state")
    made._after("seq_state", killed(1))
    assert not made._runs("seq_state"), "not for ever"
    assert [e["text"] for e in told if e["event"] == "trouble"][-1] == "target seq_state is left alone from now on"
    made._slice()
    assert made.stopped
    made.journal.close()


def test_what_a_killed_job_left_is_examined_first(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state" / "crash-0" / "seq_state"
    folder.mkdir(parents=True)
    (folder / "timeout-1").write_bytes(b"left")
    (folder / "slow-unit-1").write_bytes(b"slow")
    made = job(tmp_path)
    asked = examined(made, monkeypatch, shows("hang"), None)

    def fuzz(name: str, seconds: float) -> Ended:
        made.stopped = True
        return Ended(0, "", 1.0)

    monkeypatch.setattr(made, "_fuzz", fuzz)
    made._slice()
    assert asked == ["left ordinary"]
    made.journal.close()


@pytest.mark.parametrize(("number", "jobs_", "first"), [(0, 1, "a"), (0, 2, "a"), (1, 2, "c"), (3, 4, "d")])
def test_jobs_begin_with_different_targets_and_go_round(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, number: int, jobs_: int, first: str
) -> None:
    made = job(tmp_path, targets=("a", "b", "c", "d"), job=number, jobs=jobs_)
    ran: list[tuple[str, float]] = []

    def fuzz(name: str, seconds: float) -> Ended:
        ran.append((name, seconds))
        return Ended(0, "", seconds if len(ran) % 2 else 1000.0)

    monkeypatch.setattr(made, "_fuzz", fuzz)
    for _ in range(4):
        made._slice()
    names = [name for name, _ in ran]
    assert names[0] == first
    assert sorted(names) == ["a", "b", "c", "d"]
    assert {seconds for _, seconds in ran} == {engine.SLICE[1]}
    made.journal.close()


def test_a_slice_starts_its_target_again_after_a_crash(
    tmp_path: Path, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, seconds=100.0)
    lengths: list[float] = []

    def fuzz(name: str, seconds: float) -> Ended:
        lengths.append(seconds)
        return Ended(77, "", 20.0)

    monkeypatch.setattr(made, "_fuzz", fuzz)
    monkeypatch.setattr(made, "_after", lambda *_: None)
    made._slice()
    assert lengths == [50.0, 30.0, 10.0]
    made.journal.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs an exchange of names in one step")
@pytest.mark.parametrize(("mode", "left"), [("well", 3), ("no merge", 6), ("full disk", 7), ("cut merge", 7)])
def test_corpora_are_minimised_at_the_end(tmp_path: Path, told: list[dict[str, Any]], mode: str, left: int) -> None:
    made = job(tmp_path, mode)
    folder = corpus.folder_of(tmp_path, "seq_state")
    for i in range(6):
        (folder / corpus.name_of(b"x%d" % i)).write_bytes(b"x%d" % i)
    made._finish()
    assert corpus.count(folder) == left
    assert [p.name for p in folder.parent.iterdir()] == ["seq_state"]
    made.journal.close()


# --- the campaign -----------------------------------------------------------------------------------------------------


def progress(**changed: Any) -> TargetProgress:
    return TargetProgress(
        **{"executions": 10, "tried": 4, "seconds": 5.0, "features": 7, "corpus": 3, "crashes": 1, **changed}
    )


def test_jobs_together() -> None:
    both = together(
        [
            progress(first=100, edges=130, curve=[(1.0, 100), (9.0, 130)]),
            progress(first=120, edges=125, corpus=4, curve=[(2.0, 120), (5.0, 125)]),
        ]
    )
    assert (both.executions, both.first, both.edges, both.corpus, both.crashes) == (20, 100, 130, 4, 2)
    assert both.tried == 8
    assert both.curve == [(1.0, 100), (2.0, 120), (5.0, 125), (9.0, 130)]
    assert together([]).first is None


def test_a_curve_stays_small_and_keeps_its_ends() -> None:
    t = TargetProgress()
    for i in range(10 * CURVE):
        t.reached(float(i), i + 1)
        t.reached(float(i), i)
    assert len(t.curve) <= CURVE + 1
    assert t.curve[0] == (0.0, 1)
    assert t.curve[-1] == (10.0 * CURVE - 1, 10 * CURVE)


def status(out: Path) -> Status:
    target_ = progress(first=100, edges=130, curve=[(1.0, 100), (9.0, 130)])
    p = Progress(
        executions=1234,
        rate=40,
        seconds=60.0,
        targets={"seq_state": target_},
        crashes={"hang": 2},
        lost=1,
        inputs=1,
        scenarios=2,
        undefined={"a.cpp: runtime error: x": 3},
    )
    return Status(out, 2.0, None, jobs={0: p}, instrumented="/b")


def test_what_people_see(tmp_path: Path) -> None:
    s = status(tmp_path)
    assert show.headline(s) == (
        "1,234 executions, 40/s, 130 edges, corpus 3, 1 went wrong, findings: 0 new, 0 known, 1:00 left"
    )
    assert picture.draw(s.targets(), 60.0, tmp_path / "coverage.png")
    assert (tmp_path / "coverage.png").read_bytes().startswith(b"\x89PNG")
    assert not picture.draw({"x": TargetProgress()}, 60.0, tmp_path / "none.png")
    out = io.StringIO()
    console = Console(file=out, width=300)
    show.final(Result(s, interrupted=False, died=[]), console)
    console.print(show.live(s))
    text = out.getvalue()
    assert "seq_state          10       2  100 → 130" in text
    assert "4 of them not skipped; 2 inputs ended a target or broke one of its checks (went wrong), in 1 way." in text
    assert "1 of these, the first few of each way, was tried as a program." in text
    kept = tmp_path / "crashes"
    assert (
        f"1 of the inputs tried showed nowhere else and is no finding. Inputs, programs and logs are in {kept}" in text
    )
    assert f"\n  redraft replay {kept} --build /b\n" in text
    assert "undefined behaviour, 3 times: a.cpp: runtime error: x" in text
    assert f"Coverage over time is in {tmp_path / 'coverage.png'}" in text


def test_the_document_and_the_exit_code(tmp_path: Path) -> None:
    result = Result(status(tmp_path), interrupted=False, died=[])
    document = result.document()
    assert document["targets"]["seq_state"]["coverage"] == [(1.0, 100), (9.0, 130)]
    assert document["targets"]["seq_state"]["edges"] == [100, 130]
    assert (document["executions"], document["lost"], document["crashes"]) == (1234, 1, {"hang": 2})
    assert (document["tried"], document["targets"]["seq_state"]["tried"]) == (4, 4)
    assert result.exit_code("new") == 0

    def code(**changed: Any) -> int:
        p = Progress(executions=10, targets={"seq_state": progress(**{"tried": 0, "crashes": 0, **changed})})
        return Result(Status(tmp_path, 2.0, None, jobs={0: p}), interrupted=False, died=[]).exit_code("new")

    assert code() == 3, "all inputs were skipped"
    assert code(tried=1) == 0
    assert code(crashes=1) == 0


def test_what_two_jobs_find_is_told_of_once(tmp_path: Path) -> None:
    s, done = Status(tmp_path, 2.0, None), set[int]()
    found = {"event": "finding", "signature": "x", "known": None}
    assert campaign._take(s, {**found, "job": 0, "path": str(tmp_path / "findings" / "x-1")}, done)
    assert not campaign._take(s, {**found, "job": 1, "path": "out/findings/x-1"}, done)
    assert campaign._take(s, {**found, "job": 1, "path": "out/findings/x-2"}, done)
    assert len(s.findings) == 2


def test_minimising_is_told_of_without_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    with show.Progress(Console(file=out, width=200)) as listen:
        listen(status(tmp_path), {"event": "doing", "job": 1, "text": "minimising the corpus of scenario"})
    assert out.getvalue() == "job 1: minimising the corpus of scenario\n"


def test_a_campaign_makes_its_corpora_and_sweeps_what_a_kill_left(tmp_path: Path) -> None:
    plan = campaign.Plan(
        models=[], build="b", seed=1, jobs=1, avoid="auto", misuse=False, engine="coverage", targets=["scenario"]
    )
    with campaign.prepare(tmp_path, plan, resume=False):
        assert corpus.folder_of(tmp_path, "scenario").is_dir()
    filled(tmp_path / "state" / "tmp-0", 2)
    (tmp_path / "state" / "report-0.jsonl").write_text("")
    Tried.begin(tmp_path / "state" / "tried-0.bin")
    (tmp_path / "state" / "job-0.json").write_text("{}")
    sweep(tmp_path / "state")
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["job-0.json"]


# --- targets ----------------------------------------------------------------------------------------------------------


def test_complaints_are_told_once_each_and_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "report"
    told_ = Complaints(path)
    told_.add("a", "first", b"\x00\xff")
    told_.add("a", "second", b"x")
    told_.add("b", "third", b"")
    with path.open("ab") as f:
        f.write(b'{"symptom": 3}\n[]\n{"symptom": "c", "te')
    assert complaints(path) == [Complaint("a", "first", b"\x00\xff"), Complaint("b", "third", b"")]
    assert json.loads(path.read_bytes().splitlines()[0])["input"] == base64.b64encode(b"\x00\xff").decode()
    assert complaints(tmp_path / "none") == []


def test_inputs_that_are_skipped_do_not_count_as_tried(tmp_path: Path) -> None:
    Tried.begin(tmp_path / "tried")

    class Half:
        outcome = "skipped"

        def open(self, config: TargetConfig) -> Half:
            return self

        def __call__(self, data: bytes) -> None:
            self.outcome = "taken" if data else "skipped"

    for path, n in ((str(tmp_path / "tried"), 2), ("", 2)):
        told_ = TargetConfig(models=[], build="b", shim="s", report="r", cache="c", tried=path)
        one = counting(Half(), told_)
        for data in (b"a", b"", b"b"):
            one(data)
        assert Tried.read(tmp_path / "tried") == n
    assert Tried.read(tmp_path / "none") == 0


@pytest.mark.parametrize(("value", "said"), [(None, "is missing"), ("{}", "cannot be read")])
def test_a_target_that_is_run_by_hand_says_how_it_is_run(
    monkeypatch: pytest.MonkeyPatch, value: str | None, said: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(SystemExit, match=rf"{VARIABLE}.* {said}.*redraft fuzz --engine coverage --target"):
        read_config()


def test_targets_go_by_name() -> None:
    with pytest.raises(KeyError, match="seq_state"):
        load("nope")
    assert len(set(NAMES)) == len(NAMES)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--target", "seq_state"], "--target goes with --engine coverage"),
        (["--engine", "coverage", "--target", "seq_stat"], "did you mean seq_state?"),
        (["--engine", "coverage", "--target", "zzz"], "there are seq_state, "),
        (["--engine", "coverage", "--scenarios", "3"], "--scenarios goes with --engine hypothesis"),
        (["--engine", "coverage", "--misuse"], "--misuse goes with"),
        (["--engine", "coverage", "--plant", "logits-drift"], "--plant goes with"),
        (["--engine", "coverage", "--gpu-layers", "2"], "--gpu-layers goes with"),
        (["--engine", "coverage", "--target", "scenario", "--driver", "all"], "--driver goes with the target"),
        (["--engine", "coverage", "--target", "driver_state", "--model", "llama"], "name them with --driver"),
        (["--engine", "coverage", "--driver", "all", "--model", "llama"], "give one of them here"),
    ],
)  # fmt: skip
def test_what_nothing_would_come_of_is_refused(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "bench", lambda *_: pytest.fail("the build was looked at first"))
    assert main(["fuzz", *args]) == 2
    assert said in capsys.readouterr().err


def asked(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"target": [], "driver": [], "build": None, "llama_src": None, "driver_patch": None, **given}
    )


def test_a_build_with_counters_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command.instrument, "ready", lambda *_: None)
    with pytest.raises(Usage, match="make it with `redraft build`"):
        command._coverage(asked())
    with pytest.raises(Usage, match="is no build with counters"):
        command._coverage(asked(build=tmp_path))


@pytest.mark.parametrize("sources", ["9.9", "9.8", "0123456789abcdef" * 4])
def test_a_build_of_other_sources_than_the_installed_is_what_is_tested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sources: str
) -> None:
    stamp = instrument.Stamp("fuzzer", ("address",), ("llama",), sources, "r", 1.0)
    (tmp_path / instrument.STAMP).write_bytes(msgspec.json.encode(stamp))
    own, installed = (Build(n, "tree", (), (), Path("l"), "v", f"print of {n}") for n in ("llama.cpp-x", "installed"))
    monkeypatch.setattr(making, "release", lambda: "9.9")
    monkeypatch.setattr(instrument, "variables", lambda _: {"LD_PRELOAD_": "asan"})
    monkeypatch.setattr(command, "find_build", lambda path: own)
    monkeypatch.setattr(command, "compile_shim", lambda build: Path(f"shim of {build.name}"))
    monkeypatch.setattr(command, "environment", lambda build: {"build": build.name, "fingerprint": build.fingerprint})
    ordinary = command.Bench(installed, Path("shim"), tmp_path)
    monkeypatch.setattr(command, "bench", lambda *_: ordinary)
    b, coverage = command._coverage(asked(build=tmp_path, target=["seq_state"]))
    alone = sources != "9.9"
    assert coverage.alone is alone
    assert (b.build, b.shim) == ((own, Path(coverage.shim)) if alone else (installed, Path("shim")))
    assert (coverage.fingerprint, coverage.environment["fingerprint"]) == ("print of llama.cpp-x",) * 2
    name = str(coverage.environment["build"])
    made = "`redraft build --src` of a checkout (contents 0123456789abcdef)"
    assert name.startswith(
        "llama.cpp-x, made by " + (made if len(sources) > 9 else f"`redraft build` of llama-cpp-python {sources}")
    )


def test_targets_with_drivers_are_left_out_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(*_: object) -> Path:
        raise NoDrivers("no libllama-common")

    monkeypatch.setattr(command, "driver_library", none)
    assert command._driver_of(None, asked()) is None  # type: ignore[arg-type]
    assert "driver_state is left out" in capsys.readouterr().err
    for given in ({"driver": ["all"]}, {"target": ["driver_state"]}):
        with pytest.raises(Usage, match="redraft build --driver"):
            command._driver_of(None, asked(**given))  # type: ignore[arg-type]
