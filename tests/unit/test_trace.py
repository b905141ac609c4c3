"""Traces as bytes: they come back as they were, and what is none is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from fakes import Ideal, Tape, facts_of, run

from fuzz.state import traits_of
from fuzz.strategies import generate, scenarios
from subjects import recipes
from subjects.scenario import ContextParams, ModelRef, Save
from subjects.trace import End, Trace, from_bytes, to_bytes


def trace() -> Trace:
    tape = Tape().decode((0, (1, 2, 3)), out="all").step(Save(seq=0, slot=0), 0, 0, 0, rc=9, blobs=[(9, 9)])
    made = tape.trace(End("signal", 6, "text"))
    made.stderr = "what() \ufffd\n"
    made.hidden = np.ones((3, 8), np.float32).tobytes()
    made.steps[0].log = ["a warning"]
    return made


def test_it_comes_back_as_it_was() -> None:
    assert from_bytes(to_bytes(trace())) == trace()
    program = generate(scenarios(ModelRef(recipe="llama"), traits_of(recipes.get("llama"))), 4, 30)
    for s in program:
        t = run(s, Ideal())
        assert from_bytes(to_bytes(t)) == t
        assert t.steps


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        to_bytes(trace())[:-1],
        to_bytes(trace()) + b"\x00",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"steps": [], "facts": []}),
        msgspec.msgpack.encode({"steps": [], "facts": [], "end": {"how": "odd"}}),
        msgspec.msgpack.encode({"steps": [], "facts": [], "end": {"how": "ok", "code": "0"}}),
        msgspec.msgpack.encode({"steps": [{"op": 1.5}], "facts": [], "end": {"how": "ok"}}),
        msgspec.msgpack.encode({"steps": [{"op": 0, "pos": [[1]]}], "facts": [], "end": {"how": "ok"}}),
        msgspec.msgpack.encode({"steps": [], "facts": [], "end": {"how": "ok"}, "logits": "text"}),
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07ruined.\x94.",  # a pickle
    ],
)
def test_what_is_no_trace_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        from_bytes(data)


def test_rows_have_the_width_of_the_model() -> None:
    t = trace()
    assert t.logit_rows().shape == (3, 64)
    assert t.hidden_rows().shape == (3, 8)
    assert t.logit_rows().dtype == np.float32
    t.logits = t.logits[:-4]
    with pytest.raises(ValueError, match="reshape"):
        t.logit_rows()


@pytest.mark.parametrize("memory", ["dense", "window", "recurrent", "hybrid"])
def test_memory_kinds(memory: str) -> None:
    assert facts_of(memory, ContextParams()).memory == memory
