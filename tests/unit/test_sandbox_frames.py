"""The sandbox's wire: frames, and what the parent makes of an answers file, whole or cut off anywhere. Nothing runs."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest
from fakes import Ideal, _Sink, facts_of
from fakes import run as run_fake

from subjects import child
from subjects.child import Job, Recorder, Replay, _Pipe
from subjects.runner import Runner
from subjects.sandbox import (
    CONFIRM,
    FIRST_LIMIT,
    GARBLED,
    HANG_FACTOR,
    HANG_FLOOR,
    WARM_RUNS,
    Limits,
    Pace,
    Sandbox,
    Stats,
)
from subjects.scenario import (
    ON_DEVICE,
    AnyOp,
    BlobEdit,
    ContextParams,
    Corrupt,
    Decode,
    ModelRef,
    Part,
    Reopen,
    Restore,
    Save,
    Scenario,
    SeqRm,
)
from subjects.trace import Batch, End, Row, Step, Trace

P = ContextParams(embeddings=True)
FACTS = facts_of("dense", P)


class Parent(Sandbox):
    """The parent's half, over an answers file and a stderr of our own."""

    _number = 0

    def __init__(self) -> None:
        self.limits, self.stats = Limits(), Stats()
        self._paces = {}
        self.asked: list[tuple[int, float]] = []
        self.answers: list[Callable[[Parent], End | None]] = []
        self.killed = 0
        self._answers = os.memfd_create("answers")
        os.ftruncate(self._answers, child.ANSWERS_BYTES)
        self._map = mmap.mmap(self._answers, child.ANSWERS_BYTES, prot=mmap.PROT_READ)
        self._stderr = os.memfd_create("stderr")

    def _ask(self, requests: Sequence[Job | Replay], patience: float = 1.0) -> End | None:
        self.asked.append((len(requests), patience))
        return self.answers.pop(0)(self)

    def _kill(self) -> None:
        self.killed += 1

    def _ended(self, hung: bool) -> End:
        return End("signal", 9)

    def close(self) -> None:
        self._map.close()
        os.close(self._answers)
        os.close(self._stderr)


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    yield made
    made.close()


def record(parent: Parent) -> Recorder:
    recorder = Recorder(parent._answers)
    recorder.clear()
    return recorder


def say(parent: Parent, text: bytes) -> None:
    os.lseek(parent._stderr, 0, os.SEEK_END)
    os.write(parent._stderr, text)


ROW = Row(0, 3, 7, True)


def program(out: Recorder, n: int, *, end: bool = True) -> None:
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
        out.frame(child.END, child.SECONDS.pack(n))


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
    real = Recorder.frame

    def noted(self: Recorder, kind: int, payload: bytes) -> None:
        real(self, kind, payload)
        sizes.append(self.at)

    monkeypatch.setattr(Recorder, "frame", noted)
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
    parent.answers = [lambda _: None]
    (trace,) = parent._run([JOB])
    assert (trace.end.how, trace.end.code, trace.end.text[: len(GARBLED)]) == ("error", 0, GARBLED)
    assert parent.killed == 1, "the worker goes on with memory that was written to"


JOB = Job(Scenario(model=ModelRef(recipe="llama"), ops=()), "path", True)


def answer(*programs: int, end: End | None = None, spoil: Callable[[Recorder], None] | None = None) -> Callable:  # type: ignore[type-arg]
    """A worker that runs programs of so many steps, and ends like this in another one."""

    def go(parent: Parent) -> End | None:
        out = record(parent)
        for n in programs:
            program(out, n)
        if end is not None:
            program(out, 0, end=False)
        if spoil is not None:
            spoil(out)
        return end

    return go


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: child.HEADER.pack_into(out.map, 0, out.at - 3),  # a frame that does not end
        lambda out: child.HEADER.pack_into(out.map, 0, 0),
        lambda out: child.HEADER.pack_into(out.map, 0, 1 << 60),
        lambda out: child.NUMBER.pack_into(out.map, child.HEADER.size, 99),  # another request's
        lambda out: out.frame(77, b""),
        lambda out: out.frame(child.RUN, b""),  # a trace too many
        lambda out: child.FRAME.pack_into(out.map, child.START, 0, child.CODE),  # of a batch that never began
        lambda out: out.frame(child.END, b""),
        lambda out: child.FRAME.pack_into(out.map, child.START, 1 << 31, child.BEGIN),
        lambda out: child.FRAME.pack_into(out.map, child.START, 0, child.STEP),
    ],
)
def test_garbled_answers_are_an_error_of_that_run(parent: Parent, spoil: Callable[[Recorder], None]) -> None:
    parent.answers = [answer(1, spoil=spoil), answer(2)]
    assert [t.end.text.startswith(GARBLED) for t in parent._run([JOB])] == [True]
    assert parent._run([JOB]) == [expected(2)]


def test_half_a_row_is_garbled(parent: Parent) -> None:
    def half(out: Recorder) -> None:
        out.facts(FACTS, P)
        out.frame(child.LOGITS, b"123")

    parent.answers = [answer(end=End("signal", 11), spoil=half)]
    (trace,) = parent._run([JOB])
    assert trace.end.text.startswith(GARBLED)
    assert "signal 11" in trace.end.text
    assert parent.killed == 0, "it is dead already"


def test_a_garbled_batch_is_run_one_by_one(parent: Parent) -> None:
    bad = answer(2, 0, spoil=lambda out: out.frame(77, b""))
    parent.answers = [bad, answer(2), answer(1, spoil=lambda out: out.frame(77, b"")), answer(3)]
    one, two, three = parent._run([JOB, JOB, JOB])
    assert (one, three) == (expected(2), expected(3))
    assert two.end.text.startswith(GARBLED)
    assert [n for n, _ in parent.asked] == [3, 1, 1, 1]


def test_stderr_of_an_honest_run_is_no_part_of_a_later_crash(parent: Parent) -> None:
    def chatty(p: Parent) -> None:
        program(record(p), 1)
        say(p, b"file.cpp:1: a warning\n")

    parent.answers = [chatty, answer(end=End("signal", 6), spoil=lambda _: say(parent, b"the crash\n"))]
    parent._run([JOB])
    assert parent._run([JOB])[0].stderr == "the crash\n"


def test_a_hang_is_confirmed_with_more_patience(parent: Parent) -> None:
    hang = answer(2, end=End("hang"))
    parent.answers = [hang, answer(4), answer(5)]
    assert parent._run([JOB] * 3) == [expected(2), expected(4), expected(5)]
    assert parent.asked == [(3, 1.0), (1, CONFIRM), (1, 1.0)]
    assert parent.stats.hangs == 0
    parent.answers = [hang, answer(end=End("hang")), answer(5)]
    assert [t.end.how for t in parent._run([JOB] * 3)] == ["ok", "hang", "ok"]
    assert parent.stats.hangs == 1
    # with a limit that somebody gave it is one at once
    parent.limits.hang = 2.0
    parent.answers = [answer(end=End("hang"))]
    assert [t.end.how for t in parent._run([JOB])] == ["hang"]


def test_time_limits(parent: Parent) -> None:
    other = msgspec.structs.replace(JOB, model="slow")
    history = Replay(P, b"", 1, "path", 0)
    assert parent._limit([JOB]) == FIRST_LIMIT
    assert parent._limit([JOB] * 7) == FIRST_LIMIT * 7
    parent._paces[JOB.model, Job] = Pace(WARM_RUNS - 1, 0.001)
    assert parent._limit([JOB]) == FIRST_LIMIT
    parent._paces[JOB.model, Job].runs = WARM_RUNS
    assert parent._limit([JOB]) == HANG_FLOOR
    # what was measured on one model, or on references, says nothing of another
    assert parent._limit([other]) == parent._limit([history]) == FIRST_LIMIT
    assert parent._limit([JOB, other]) == HANG_FLOOR + FIRST_LIMIT
    parent._paces[JOB.model, Job].slowest = 1.0
    assert parent._limit([JOB] * 2) == HANG_FACTOR * 2
    parent.limits.hang = 0.25
    assert parent._limit([JOB] * 4) == 1.0


def test_the_slowest_of_a_batch_counts(parent: Parent) -> None:
    parent.answers = [answer(0, 0, 5, 0), answer(1)]
    parent._run([JOB] * 4)
    parent._run([Replay(P, b"", 1, "path", 0)])
    assert parent._paces == {("path", Job): Pace(4, 5.0), ("path", Replay): Pace(1, 1.0)}


def test_a_control_frame_that_is_cut_off_is_the_end(parent: Parent) -> None:
    parent._control, w = os.pipe()
    os.write(w, struct.pack("<I", 10) + b"short")
    os.close(w)
    try:
        assert parent._read_control() is None
    finally:
        os.close(parent._control)


def test_a_worker_that_is_gone_can_be_killed(parent: Parent) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    parent._worker = gone.pid
    Sandbox._kill(parent)


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


def feed(n: int = 5) -> Decode:
    return Decode(parts=(Part(seq=0, n=n, out="all"),))


SAVED = (feed(), Save(seq=0, slot=0))
BAD = (*SAVED, Corrupt(slot=0, edits=(BlobEdit(how="flip", nth=999),)))
DEVICE = (feed(), Save(seq=0, slot=0, flags=ON_DEVICE))
CUT = (SeqRm(seq=0), feed())


@pytest.mark.parametrize(
    ("ops", "reusable"),
    [
        ((*SAVED, Restore(seq=0, slot=0), *CUT), True),
        ((*BAD, feed()), True),  # the bytes are ours
        ((*BAD, Restore(seq=0, slot=0), *CUT), False),
        ((*BAD, Reopen(), Restore(seq=0, slot=0), *CUT), False),
        ((*DEVICE, feed()), False),
        ((*DEVICE, Reopen(), feed()), True),
        ((*DEVICE, Reopen(), Restore(seq=0, slot=0), *CUT), False),
    ],
)
def test_what_makes_a_context_unfit_for_the_next_program(ops: tuple[AnyOp, ...], reusable: bool) -> None:
    """A corrupt or on-device slot outlives the context that it was saved from, and soils where it is restored."""

    class Takes(Ideal):
        def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
            return len(blob)  # whatever it is

    ideal = Takes("dense")
    run = Runner(ideal, 1, _Sink(), ideal.new_context)  # type: ignore[arg-type]
    assert run.run(Scenario(model=ModelRef(recipe="llama"), ops=ops)).reusable is reusable
    run = Runner(ideal, 1, _Sink(), ideal.new_context)  # type: ignore[arg-type]
    assert not run.run(Scenario(model=ModelRef(recipe="llama"), ops=ops, misuse=True)).reusable


def test_a_hidden_row_that_is_missing_keeps_its_place() -> None:
    class Misses(Ideal):
        def hidden(self, ctx: int, i: int, n_embd: int) -> bytes | None:  # type: ignore[override]
            return None if i == 1 else super().hidden(ctx, i, n_embd)

    program = Scenario(model=ModelRef(recipe="llama"), params=P, ops=(feed(3),))
    whole, holed = (run_fake(program, ideal) for ideal in (Ideal("dense"), Misses("dense")))
    assert len(holed.hidden_rows()) == len(holed.logit_rows()) == 3
    assert np.isnan(holed.hidden_rows()[1]).all()
    assert (holed.hidden_rows()[[0, 2]] == whole.hidden_rows()[[0, 2]]).all()
