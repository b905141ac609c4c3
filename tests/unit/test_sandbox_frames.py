"""The sandbox's wire: frames, and what the parent makes of an answers file, whole or cut off anywhere. Nothing runs."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import msgspec
import pytest
from fakes import facts_of

from subjects import child
from subjects.child import Job, _Pipe, _Recorder
from subjects.sandbox import FIRST_LIMIT, HANG_FACTOR, HANG_FLOOR, WARM_RUNS, Limits, Sandbox, Stats
from subjects.scenario import ContextParams, ModelRef, Scenario
from subjects.trace import End, Step, Trace

P = ContextParams(embeddings=True)
FACTS = facts_of("dense", P)


class Parent(Sandbox):
    """The parent's half, over an answers file and a stderr of our own."""

    def __init__(self) -> None:
        self.limits, self.stats = Limits(), Stats()
        self._answers = os.memfd_create("answers")
        self._stderr = os.memfd_create("stderr")

    def close(self) -> None:
        os.close(self._answers)
        os.close(self._stderr)


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    yield made
    made.close()


def record(parent: Parent) -> _Recorder:
    recorder = _Recorder(parent._answers)
    recorder.clear()
    return recorder


def say(parent: Parent, text: bytes) -> None:
    os.lseek(parent._stderr, 0, os.SEEK_END)
    os.write(parent._stderr, text)


def program(out: _Recorder, n: int, *, end: bool = True) -> None:
    """n steps with a row each, every step told before and after its call."""
    out.frame(child.RUN, b"")
    out.facts(FACTS, P)
    for i in range(n):
        out.step(Step(op=i, args=[i]))
        out.row(bytes([i]) * 4 * FACTS.n_vocab, bytes([i]) * 4 * FACTS.n_embd)
        out.step(Step(op=i, args=[i], rc=0, done=True))
    if end:
        out.frame(child.END, b"")


def expected(n: int, end: End | None = None) -> Trace:
    return Trace(
        [Step(op=i, args=[i], rc=0, done=True) for i in range(n)],
        [FACTS],
        end or End("ok"),
        b"".join(bytes([i]) * 4 * FACTS.n_vocab for i in range(n)),
        b"".join(bytes([i]) * 4 * FACTS.n_embd for i in range(n)),
        "",
        [P],
    )


def test_whole_answers(parent: Parent) -> None:
    out = record(parent)
    for n in (2, 0, 3):
        program(out, n)
    assert parent._collect(None) == [expected(2), expected(0), expected(3)]


def test_answers_of_the_last_request_are_gone(parent: Parent) -> None:
    program(record(parent), 5)
    program(record(parent), 1)
    assert parent._collect(None) == [expected(1)]


def test_a_crash_keeps_what_was_answered_before_it(parent: Parent) -> None:
    out = record(parent)
    program(out, 2)
    program(out, 3, end=False)
    out.step(Step(op=3, args=[3]))
    say(parent, b"file.cpp:1: GGML_ASSERT(x) failed\n")
    first, second = parent._collect(End("signal", 6))
    assert first == expected(2)
    assert second.end == End("signal", 6)
    assert [s.done for s in second.steps] == [True, True, True, False]
    assert second.logits == expected(3).logits
    assert second.hidden == expected(3).hidden
    assert second.stderr == "file.cpp:1: GGML_ASSERT(x) failed\n"


def test_stderr_is_that_of_one_crash(parent: Parent) -> None:
    for text in (b"first \xff\n", b"second\n"):
        out = record(parent)
        program(out, 1, end=False)
        say(parent, text)
        (trace,) = parent._collect(End("signal", 6))
        assert trace.stderr == text.decode("utf-8", "replace")
    program(record(parent), 1)
    assert parent._collect(None)[0].stderr == ""


def test_of_much_stderr_the_end_is_kept(parent: Parent) -> None:
    program(record(parent), 1, end=False)
    say(parent, b"x" * (1 << 17) + b"the end")
    text = parent._collect(End("signal", 6))[0].stderr
    assert text.endswith("the end")
    assert len(text) == 1 << 16


def test_every_cut_of_the_answers_can_be_read(parent: Parent) -> None:
    out = record(parent)
    program(out, 2)
    program(out, 2)
    data = os.pread(parent._answers, out.at, 0)
    counts = set()
    for size in range(len(data)):
        os.ftruncate(parent._answers, 0)
        os.pwrite(parent._answers, data[:size], 0)
        traces = parent._collect(End("signal", 9))
        assert 1 <= len(traces) <= 2
        assert traces[-1].end == End("signal", 9)
        assert all(t == expected(2) for t in traces[:-1])
        assert len(traces[-1].logits) % (4 * FACTS.n_vocab) == 0, "a row is there whole or not at all"
        steps = [s.op for s in traces[-1].steps]
        assert steps == sorted(set(steps))
        counts.add((len(traces), len(steps), len(traces[-1].logits)))
    assert len(counts) >= 10


def test_a_worker_that_died_before_it_said_anything(parent: Parent) -> None:
    record(parent)
    assert parent._collect(End("exit", 1)) == [Trace([], [], End("exit", 1))]


def test_a_refused_context_is_an_error_with_its_text_and_the_next_run_goes_on(parent: Parent) -> None:
    out = record(parent)
    out.frame(child.RUN, b"")
    out.frame(child.REFUSED, b"llama_init_from_model: V cache \xff")
    program(out, 1)
    refused, good = parent._collect(None)
    assert refused.end == End("error", 0, "llama_init_from_model: V cache \ufffd")
    assert refused.facts == []
    assert good == expected(1)


def test_what_a_child_says_is_parsed_strictly(parent: Parent) -> None:
    for payload in (b"\xc1", msgspec.msgpack.encode({"op": "0"}), msgspec.msgpack.encode([1]), b""):
        out = record(parent)
        out.frame(child.RUN, b"")
        out.frame(child.STEP, payload)
        with pytest.raises(msgspec.DecodeError):
            parent._collect(None)


def test_time_limits(parent: Parent) -> None:
    assert parent._limit(1) == FIRST_LIMIT
    assert parent._limit(7) == FIRST_LIMIT * 7
    parent.stats.runs, parent.stats.slowest = WARM_RUNS - 1, 0.001
    assert parent._limit(1) == FIRST_LIMIT
    parent.stats.runs = WARM_RUNS
    assert parent._limit(1) == HANG_FLOOR
    parent.stats.slowest = 1.0
    assert parent._limit(2) == HANG_FACTOR * 2
    parent.limits.hang = 0.25
    assert parent._limit(4) == 1.0


def test_frames_of_a_pipe() -> None:
    r, w = os.pipe()
    try:
        a, b = _Pipe(r), _Pipe(w)
        for payload in (b"", b"x", bytes(range(256)) * 10):
            b.write(payload)
            assert a.read() == payload
        os.write(w, struct.pack("<I", 10) + b"short")
        os.close(w)
        w = -1
        assert a.read() is None
    finally:
        os.close(r)
        if w >= 0:
            os.close(w)


def test_jobs_are_strict() -> None:
    job = Job(Scenario(model=ModelRef(recipe="llama"), ops=()), "path", True)
    data = msgspec.msgpack.encode([job])
    assert child.JOBS.decode(data) == [job]
    raw = msgspec.msgpack.decode(data)
    raw[0][0]["more"] = 1
    with pytest.raises(msgspec.DecodeError):
        child.JOBS.decode(msgspec.msgpack.encode(raw))
