"""What a replay says of runs that did not get to what they were to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_fakes import driver_judge, run
from fakes import MODEL

from fuzz.cli import replay
from oracles.judge import Judge
from subjects.scenario import (
    Accept,
    Begin,
    Decode,
    DriverParams,
    Op,
    Part,
    Propose,
    Scenario,
    Verify,
    dumps,
)
from subjects.trace import End, Trace

DRIVER = DriverParams(kind="draft-simple")
START = Decode(parts=(Part(seq=0, n=4),))
PROGRAM = Scenario(model=MODEL, ops=(START, Propose(seqs=(0,))), driver=DRIVER)


def said(monkeypatch: pytest.MonkeyPatch, folder: Path, trace: Trace, program: Scenario = PROGRAM) -> dict[str, Any]:
    """What is said of a program with a trace."""
    judge = driver_judge()
    monkeypatch.setattr(judge.sandbox, "run", lambda *_, **__: trace)

    @contextmanager
    def judge_of(*_: object) -> Iterator[tuple[Judge, None]]:
        yield judge, None

    monkeypatch.setattr(replay, "judge_of", judge_of)
    monkeypatch.setattr(replay, "check_duties", lambda *_: None)
    (folder / "a.json").write_text(dumps(program))
    return replay._one(folder / "a.json", SimpleNamespace(library=lambda: None), 1)  # type: ignore[arg-type]


def test_what_ran_and_is_sound_is_fixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert said(monkeypatch, tmp_path, run(PROGRAM))["verdict"] == "FIXED"


@pytest.mark.parametrize(
    ("end", "stderr", "text"),
    [
        (End("error", 0, "common_speculative_init gives none"), "", "common_speculative_init gives none"),
        (End("exit", 1), "Traceback\nIndexError: x\n", "redraft's own child failed: IndexError: x"),
        (End("ok"), "", "no operation ran"),
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_what_did_not_run_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: End, stderr: str, text: str, started: bool
) -> None:
    trace = run(PROGRAM)
    trace.end, trace.stderr = end, stderr
    if not started:
        trace.steps, trace.facts, trace.logits = [], [], b""
    elif end.how == "ok":
        trace.steps, trace.logits = [], b""
    result = said(monkeypatch, tmp_path, trace)
    assert (result["verdict"], result["text"], result["operations"]) == ("ERROR", text, [])


def test_a_process_that_llama_cpp_ended_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = run(PROGRAM)
    trace.end = End("signal", 6)
    assert said(monkeypatch, tmp_path, trace)["verdict"] == "FAILED"


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (Propose(seqs=(-1,)), "operation 1 (propose): there is no sequence -1"),
        (Propose(seqs=(0,), last=()), "operation 1 (propose): last has 0 tokens for 1 sequences"),
        (Propose(seqs=(0,), n_max=1 << 31), "operation 1 (propose): a number does not fit into 32 bits"),
        (Verify(seqs=(7,)), "operation 1 (verify): there is no sequence 7"),
        (Verify(seqs=(0, 1), accept=(1,)), "operation 1 (verify): accept has 1 numbers for 2 sequences"),
        (Accept(seq=9, n=0), "operation 1 (accept): there is no sequence 9"),
        (Begin(seq=-2), "operation 1 (begin): there is no sequence -2"),
        (Decode(parts=(Part(seq=0, n=1, tokens=(1 << 40,)),)), "operation 1 (decode): a number does not fit"),
    ],
)
def test_misuse_that_cannot_be_asked_of_the_library_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: Op, why: str
) -> None:
    program = Scenario(model=MODEL, ops=(START, op), driver=DRIVER, misuse=True)  # type: ignore[arg-type]
    trace = run(program)
    assert trace.end.how == "error"
    assert trace.end.text.startswith(f"the harness cannot run this: {why}")
    result = said(monkeypatch, tmp_path, trace, program)
    assert (result["verdict"], result["text"]) == ("ERROR", trace.end.text)
