"""The sandbox's wire: frames, and what the parent makes of an answers file, whole or cut off anywhere. Nothing runs."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

import msgspec
import pytest
from fakes import facts_of

from subjects import child
from subjects.child import Job, Replay, _Pipe, _Recorder
from subjects.sandbox import FIRST_LIMIT, HANG_FACTOR, HANG_FLOOR, WARM_RUNS, Limits, Sandbox, Stats
from subjects.scenario import ContextParams, ModelRef, Scenario
from subjects.trace import Batch, End, Row, Step, Trace

P = ContextParams(embeddings=True)
FACTS = facts_of("dense", P)


class Parent(Sandbox):
    """The parent's half, over an answers file and a stderr of our own."""

    _number = 0

    def __init__(self) -> None:
        self.limits, self.stats = Limits(), Stats()
        self._answers = os.memfd_create("answers")
        os.ftruncate(self._answers, child.ANSWERS_BYTES)
        self._map = mmap.mmap(self._answers, child.ANSWERS_BYTES, prot=mmap.PROT_READ)
        self._stderr = os.memfd_create("stderr")

    def close(self) -> None:
        self._map.close()
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


ROW = Row(0, 3, 7, True)


def program(out: _Recorder, n: int, *, end: bool = True) -> None:
    """n steps with a batch of one output row each."""
    out.frame(child.RUN, b"")
    out.facts(FACTS, P)
    for i in range(n):
        out.begin(i, [i])
        out.batch([ROW])
        out.row(bytes([i]) * 4 * FACTS.n_vocab, bytes([i]) * 4 * FACTS.n_embd)
        out.code(0, i)
        out.end(Step(op=i, args=[i], rc=0, done=True))
    if end:
        out.frame(child.END, b"")


def expected(n: int, end: End | None = None) -> Trace:
    return Trace(
        [Step(op=i, args=[i], rc=0, batches=[Batch([ROW], 0, i)], done=True) for i in range(n)],
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
    out.begin(3, [3])
    out.batch([ROW])
    say(parent, b"file.cpp:1: GGML_ASSERT(x) failed\n")
    first, second = parent._collect(End("signal", 6))
    assert first == expected(2)
    assert second.end == End("signal", 6)
    assert [s.done for s in second.steps] == [True, True, True, False]
    assert second.steps[3] == Step(op=3, args=[3], batches=[Batch([ROW])])
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


def test_a_kill_after_any_frame_leaves_what_was_answered(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is written last: however far the writer came, every prefix of whole frames can be read."""
    sizes: list[int] = []
    real = _Recorder.frame

    def noted(self: _Recorder, kind: int, payload: bytes) -> None:
        real(self, kind, payload)
        sizes.append(self.at)

    monkeypatch.setattr(_Recorder, "frame", noted)
    out = record(parent)
    program(out, 2)
    program(out, 2)
    assert len(sizes) == 2 * (2 + 2 * 6 + 1)
    counts = set()
    for size in sizes:
        child.HEADER.pack_into(out.map, 0, size)
        traces = parent._collect(End("signal", 9))
        assert 1 <= len(traces) <= 2
        assert traces[-1].end == End("signal", 9)
        assert all(t == expected(2) for t in traces[:-1])
        assert len(traces[-1].logits) % (4 * FACTS.n_vocab) == 0
        steps = [s.op for s in traces[-1].steps]
        assert steps == sorted(set(steps))
        counts.add((len(traces), *((s.done, len(s.batches)) for s in traces[-1].steps)))
    assert len(counts) >= 14


def test_a_frame_is_not_there_before_its_header(parent: Parent) -> None:
    out = record(parent)
    program(out, 1)
    good = out.at
    out.frame(child.LOGITS, b"x" * 999)
    child.HEADER.pack_into(out.map, 0, good)
    assert parent._collect(None) == [expected(1)]


def test_answers_that_do_not_fit_are_an_error_of_ours(parent: Parent) -> None:
    out = record(parent)
    out.at = child.ANSWERS_BYTES - 3
    with pytest.raises(ValueError, match="output rows"):
        out.frame(child.RUN, b"")


def test_much_memory_is_given_back(parent: Parent) -> None:
    out = record(parent)
    out.frame(child.LOGITS, bytes(1 << 25))
    assert os.fstat(parent._answers).st_blocks * 512 > 1 << 24
    out.clear()
    assert os.fstat(parent._answers).st_blocks * 512 < 1 << 20
    program(out, 2)
    assert parent._collect(None) == [expected(2)]


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


@pytest.mark.parametrize("kind", [child.STEP, child.BEGIN, child.BATCH, child.FACTS])
@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode({"op": "0"}), msgspec.msgpack.encode([1]), b""])
def test_what_a_child_says_is_parsed_strictly(parent: Parent, kind: int, payload: bytes) -> None:
    out = record(parent)
    out.frame(child.RUN, b"")
    out.begin(0, [])
    out.frame(kind, payload)
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


def test_requests_are_strict() -> None:
    requests = [
        Job(Scenario(model=ModelRef(recipe="llama"), ops=()), "path", True),
        Replay(P, b"words", 3, "path", 0),
    ]
    decoder = msgspec.msgpack.Decoder(list[Job | Replay], strict=True)
    data = msgspec.msgpack.encode(requests)
    assert decoder.decode(data) == requests
    raw = msgspec.msgpack.decode(data)
    raw[0][1]["more"] = 1
    for bad in (raw, [["other", 1]], [[*raw[1][:3], "4", *raw[1][4:]]]):
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(msgspec.msgpack.encode(bad))
        with pytest.raises(msgspec.DecodeError):
            child.REQUESTS.decode(msgspec.msgpack.encode(bad))
