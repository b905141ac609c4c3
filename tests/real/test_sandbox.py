"""The sandbox on a real libllama: however a child ends, it costs one scenario and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from fuzz.cli.common import Bench
from fuzz.models import Model, from_recipe
from subjects.recipes import get
from subjects.sandbox import ROOT, Limits, Sandbox, SandboxError
from subjects.scenario import (
    ON_DEVICE,
    AnyOp,
    Ask,
    BlobEdit,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Edge,
    ModelRef,
    Part,
    Restore,
    Save,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
    dumps,
)
from subjects.trace import Trace


@pytest.fixture(scope="module")
def llama(build: Bench) -> Model:
    return from_recipe(get("llama"), build.models)


@pytest.fixture(scope="module")
def qwen(build: Bench) -> Model:
    return from_recipe(get("qwen35"), build.models)


@pytest.fixture(scope="module")
def sandbox(build: Bench, llama: Model, qwen: Model) -> Iterator[Sandbox]:
    with Sandbox(build.shim, [(Path(llama.path), 0), (Path(qwen.path), 0)]) as made:
        yield made


MODEL = ModelRef(recipe="llama")


def feed(n: int = 5, seq: int = 0) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n),))


def program(*ops: AnyOp, params: ContextParams | None = None) -> Scenario:
    return Scenario(model=MODEL, ops=ops, params=params or ContextParams())


GOOD = program(feed(), Save(seq=0, slot=0), Draft(seq=0, n=2), Restore(seq=0, slot=0), feed(2))
TWO_SAVES = program(feed(), Save(seq=0, slot=0), Save(seq=0, slot=1), feed())
# n_ubatch <= n_rs_seq + 1 (known): an assertion in the first decode
ABORT = program(feed(2), feed(3), params=ContextParams(n_rs_seq=4, n_ubatch=4))
# a handle that is too short (known): an exception leaves the C interface
THROW = program(
    feed(),
    Save(seq=0, slot=0, flags=ON_DEVICE),
    Corrupt(slot=0, edits=(BlobEdit(how="cut"),)),
    Restore(seq=0, slot=0),
    feed(),
)


def honest(trace: Trace, like: Trace) -> bool:
    return trace.end.how == "ok" and trace.logits == like.logits and trace.steps == like.steps


def assert_gone(family: list[psutil.Process]) -> None:
    """Every process has ended (whoever has to collect it may be slow)."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family):
            return
        time.sleep(0.01)
    raise AssertionError("processes live on")


def test_an_assertion(sandbox: Sandbox, qwen: Model) -> None:
    trace = sandbox.run(ABORT, Path(qwen.path))
    assert (trace.end.how, trace.end.code) == ("signal", signal.SIGABRT)
    assert "GGML_ASSERT(n_ubatch > n_keep_tail)" in trace.stderr
    assert [(s.op, s.done) for s in trace.steps] == [(0, False)]
    (batch,) = trace.steps[0].batches
    assert batch.rc is None
    assert [r.pos for r in batch.rows] == [0, 1]
    assert len(trace.facts) == 1


def test_an_exception_through_the_c_interface(sandbox: Sandbox, llama: Model) -> None:
    trace = sandbox.run(THROW, Path(llama.path))
    assert (trace.end.how, trace.end.code) == ("signal", signal.SIGABRT)
    assert "terminate called after throwing an instance of 'std::runtime_error'" in trace.stderr
    assert "what():" in trace.stderr
    assert [(s.op, s.done) for s in trace.steps] == [(0, True), (1, True), (2, True), (3, False)]
    assert trace.steps[3].args == [0, 0, ON_DEVICE], "the call that never returned is named with its arguments"
    assert len(trace.logit_rows()) == 1


def test_what_was_answered_before_a_crash_is_intact(sandbox: Sandbox, llama: Model) -> None:
    model = Path(llama.path)
    alone = sandbox.run(GOOD, model)
    assert alone.end.how == "ok"
    traces = sandbox.run_many([GOOD, GOOD, THROW, GOOD, THROW, THROW, GOOD], model)
    assert [t.end.how for t in traces] == ["ok", "ok", "signal", "ok", "signal", "signal", "ok"]
    for t in (traces[0], traces[1], traces[3], traces[6]):
        assert honest(t, alone)
        assert t.stderr == ""


def test_stderr_of_one_crash_is_not_in_the_next_trace(sandbox: Sandbox, llama: Model, qwen: Model) -> None:
    first = sandbox.run(THROW, Path(llama.path))
    second = sandbox.run(ABORT, Path(qwen.path))
    assert "terminate" in first.stderr
    assert "terminate" not in second.stderr
    assert "GGML_ASSERT" in second.stderr
    assert first.stderr.count("terminate called") == 1
    assert sandbox.run(GOOD, Path(llama.path)).stderr == ""


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGKILL])
def test_a_worker_that_dies_between_two_programs(build: Bench, llama: Model, number: signal.Signals) -> None:
    """As of the kernel's memory killer: it costs at most the next program, and no answers are mixed up afterwards."""
    model = Path(llama.path)
    with Sandbox(build.shim, [(model, 0)]) as sandbox:
        alone = sandbox.run(GOOD, model)
        victim = psutil.Process(sandbox._worker)
        victim.send_signal(number)
        assert_gone([victim])
        trace = sandbox.run(program(feed(9), feed(9, 1)), model)
        if trace.end.how != "ok":
            assert (trace.end.how, trace.end.code) == ("signal", number)
            assert trace.steps == []
            assert trace.facts == [], "answers of an earlier program"
        for n in (3, 4, 5):
            after = sandbox.run(program(feed(n)), model)
            assert after.end.how == "ok"
            assert after.steps[0].pos[0] == (0, n - 1), "answers of another program"
        assert honest(sandbox.run(GOOD, model), alone)


def test_a_segmentation_fault(build: Bench, llama: Model) -> None:
    """In the middle of a program: it hangs on purpose and is sent the signal that a wild pointer gets."""
    model = Path(llama.path)
    with Sandbox(build.shim, [(model, 0)], limits=Limits(hang=60)) as sandbox:
        alone = sandbox.run(GOOD, model)
        worker = sandbox._worker
        shooter = threading.Timer(0.2, os.kill, (worker, signal.SIGSEGV))
        shooter.start()
        trace = sandbox.run(TWO_SAVES, model, fault="hang-on-save")
        shooter.join()
        assert (trace.end.how, trace.end.code) == ("signal", signal.SIGSEGV)
        assert honest(sandbox.run(GOOD, model), alone)


def test_a_hang(build: Bench, llama: Model) -> None:
    with Sandbox(build.shim, [(Path(llama.path), 0)], limits=Limits(hang=1.0)) as sandbox:
        model = Path(llama.path)
        alone = sandbox.run(GOOD, model)
        hung = sandbox.run(TWO_SAVES, model, fault="hang-on-save")
        assert hung.end.how == "hang"
        assert [(s.op, s.done) for s in hung.steps] == [(0, True), (1, True), (2, False)]
        assert sandbox.stats.hangs == 1
        assert honest(sandbox.run(GOOD, model), alone)
        # a worker that does nothing at all is one, too
        os.kill(sandbox._worker, signal.SIGSTOP)
        assert sandbox.run(GOOD, model).end.how == "hang"
        assert honest(sandbox.run(GOOD, model), alone)


def test_what_was_only_slow_is_no_hang(build: Bench, llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subjects.sandbox.FIRST_LIMIT", 0.3)
    model = Path(llama.path)
    with Sandbox(build.shim, [(model, 0)]) as sandbox:
        alone = sandbox.run(GOOD, model)
        os.kill(sandbox._worker, signal.SIGSTOP)
        assert [honest(t, alone) for t in sandbox.run_many([GOOD, GOOD], model)] == [True, True]
        assert sandbox.stats.hangs == 0
        began = time.monotonic()
        assert sandbox.run(TWO_SAVES, model, fault="hang-on-save").end.how == "hang"
        assert time.monotonic() - began > 3.0, "it was not tried again with more patience"
        assert sandbox.stats.hangs == 1
        assert honest(sandbox.run(GOOD, model), alone)


def test_a_memory_limit(build: Bench, llama: Model) -> None:
    """Address space for small contexts, not for one of a million cells."""
    huge = program(feed(), params=ContextParams(n_ctx=1 << 22))
    with Sandbox(build.shim, [(Path(llama.path), 0)], limits=Limits(memory_mb=1024)) as sandbox:
        model = Path(llama.path)
        assert sandbox.run(GOOD, model).end.how == "ok"
        trace = sandbox.run(huge, model)
        assert trace.end.how in ("error", "signal")
        assert trace.steps == []
        assert sandbox.run(GOOD, model).end.how == "ok"


def test_an_error_of_ours_in_the_child(sandbox: Sandbox, llama: Model) -> None:
    trace = sandbox.run(GOOD, Path(llama.path), fault="no-such-fault")
    assert (trace.end.how, trace.end.code) == ("exit", 1)
    assert "Traceback" in trace.stderr
    assert "KeyError" in trace.stderr
    assert sandbox.run(GOOD, Path(llama.path)).end.how == "ok"


def test_a_context_that_is_refused(sandbox: Sandbox, llama: Model) -> None:
    refused = program(feed(), params=ContextParams(type_v="q8_0"))
    trace = sandbox.run(refused, Path(llama.path))
    assert trace.end.how == "error"
    assert "llama_init_from_model" in trace.end.text
    assert len(trace.end.text) > len("llama_init_from_model: "), "the library's own words are in it"
    assert trace.steps == []
    assert trace.facts == []
    # it costs the worker nothing
    worker = sandbox._worker
    assert [t.end.how for t in sandbox.run_many([refused, GOOD], Path(llama.path))] == ["error", "ok"]
    assert sandbox._worker == worker


def test_a_model_that_is_none(build: Bench, sandbox: Sandbox, tmp_path: Path, llama: Model) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF that is none")
    with pytest.raises(SandboxError, match=r"bad\.gguf"):
        Sandbox(build.shim, [(bad, 0)])
    with pytest.raises(SandboxError):
        Sandbox(tmp_path / "no-shim.so", [])
    trace = sandbox.run(GOOD, bad)
    assert trace.end.how == "error"
    assert sandbox.run(GOOD, Path(llama.path)).end.how == "ok"


def test_fifty_crashes_leave_nothing_behind(build: Bench, llama: Model) -> None:
    me = psutil.Process()
    before = me.num_fds()
    with Sandbox(build.shim, [(Path(llama.path), 0)]) as sandbox:
        model = Path(llama.path)
        alone = sandbox.run(GOOD, model)
        open_now, family = me.num_fds(), len(me.children(recursive=True))
        zygote = psutil.Process(sandbox._process.pid)
        fds_of_zygote = zygote.num_fds()
        for _ in range(25):
            crashed, good, again = sandbox.run_many([THROW, GOOD, THROW], model)
            assert (crashed.end.how, again.end.how) == ("signal", "signal")
            assert honest(good, alone)
        assert sandbox.stats.deaths == 50
        assert len(sandbox.stats.restart) == 50
        assert me.num_fds() == open_now
        assert zygote.num_fds() == fds_of_zygote
        assert len(me.children(recursive=True)) == family
    assert me.num_fds() == before
    sandbox.close()  # twice is once


def test_children_are_gone_when_it_is_closed(build: Bench, llama: Model) -> None:
    sandbox = Sandbox(build.shim, [(Path(llama.path), 0)])
    zygote = psutil.Process(sandbox._process.pid)
    family = [zygote, *zygote.children(recursive=True)]
    assert len(family) == 2
    sandbox.close()
    assert_gone(family)


def test_a_parent_that_is_killed_takes_its_children_along(build: Bench, llama: Model, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(dumps(GOOD))
    code = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from subjects.sandbox import Sandbox\n"
        "from subjects.scenario import loads\n"
        f"model = Path({llama.path!r})\n"
        f"s = Sandbox(Path({str(build.shim)!r}), [(model, 0)])\n"
        f"assert s.run(loads(open({str(tmp_path / 'good.json')!r}).read()), model).end.how == 'ok'\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "ready\n"
        family = psutil.Process(parent.pid).children(recursive=True)
        assert len(family) == 2
        parent.kill()
        parent.wait()
        assert_gone(family)


def test_a_memory_limit_is_beside_what_the_models_take(build: Bench, llama: Model) -> None:
    """The mapped file of a large model must not use it up: this limit is below what a worker begins with."""
    with Sandbox(build.shim, [(Path(llama.path), 0)], limits=Limits(memory_mb=64)) as sandbox:
        taken = psutil.Process(sandbox._worker).memory_info().vms
        assert taken > 64 << 20
        assert sandbox.run(GOOD, Path(llama.path)).end.how == "ok"
        soft, _ = psutil.Process(sandbox._worker).rlimit(psutil.RLIMIT_AS)
        assert 0 < soft < taken + (80 << 20)


def test_with_a_gpu_each_worker_loads_for_itself_and_has_no_limit(build: Bench, llama: Model, tmp_path: Path) -> None:
    """A GPU's driver does not survive a fork. (Here there is none, and the layers stay where they are.)"""
    model = Path(llama.path)
    on_gpu = msgspec.structs.replace(GOOD, model=msgspec.structs.replace(MODEL, n_gpu_layers=99))
    crash = msgspec.structs.replace(THROW, model=on_gpu.model)
    with Sandbox(build.shim, [(model, 99)]) as sandbox:
        libraries = {Path(m.path).name for m in psutil.Process(sandbox._process.pid).memory_maps()}
        assert not any(name.startswith("libllama") for name in libraries)
        first = sandbox.run(on_gpu, model)
        assert first.end.how == "ok"
        soft, _ = psutil.Process(sandbox._worker).rlimit(psutil.RLIMIT_AS)
        assert soft in (-1, 2**64 - 1)
        assert sandbox.run(crash, model).end.how == "signal"
        assert honest(sandbox.run(on_gpu, model), first)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF that is none")
    with pytest.raises(SandboxError, match=r"bad\.gguf"):
        Sandbox(build.shim, [(bad, 1)])


def test_ids_out_of_range_reach_the_library(sandbox: Sandbox, llama: Model) -> None:
    """A misuse program ends as the library says, never by an exception of ours."""
    for seq in (2, 3, 255, 300, 5000, -2):
        for op in (
            feed(1, seq),
            Draft(seq=seq, n=2),
            Save(seq=seq, slot=1),
            Restore(seq=seq, slot=0),
            SeqRm(seq=seq),
            SeqRm(seq=seq, lo=Edge(at="end", d=-1)),
            SeqCp(src=seq, dst=0),
            SeqCp(src=0, dst=seq),
            SeqKeep(seq=seq),
            SeqAdd(seq=seq, delta=1),
            SeqDiv(seq=seq, d=2),
            Ask(what="positions", seq=seq),
            Ask(what="size", seq=seq),
        ):
            misuse = program(feed(3), Save(seq=0, slot=0), op, feed(1, 1))
            trace = sandbox.run(msgspec.structs.replace(misuse, misuse=True), Path(llama.path))
            assert "Traceback" not in trace.stderr, (op, trace.stderr)
            assert trace.end.how in ("ok", "signal"), op
            assert trace.steps[2].args or trace.steps[2].batches or trace.steps[2].skipped or not trace.steps[2].done


def test_pooled_contexts_are_used_again_and_soiled_ones_are_not(sandbox: Sandbox, llama: Model) -> None:
    """What a pooled run answers is what a fresh one does, also after a program that must not leave its context."""
    model = Path(llama.path)
    alone = sandbox.run(GOOD, model)
    device = program(feed(7), Save(seq=0, slot=0, flags=ON_DEVICE), feed(1))
    for before in (GOOD, device, program(feed(30), Save(seq=0, slot=0)), program(feed(9, 1))):
        sandbox.run(before, model, fresh=False)
        assert honest(sandbox.run(GOOD, model, fresh=False), alone)
