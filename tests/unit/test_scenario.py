"""Scenarios as text: strict in what is read, stable in what is written, and the tokens of streams for ever the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.state import traits_of
from fuzz.strategies import scenarios
from subjects import recipes
from subjects.scenario import (
    OP_NAMES,
    OP_TYPES,
    OPEN,
    VERSION,
    BadScenario,
    ContextParams,
    Decode,
    Edge,
    ModelRef,
    Part,
    Reopen,
    Restore,
    Save,
    Scenario,
    SeqRm,
    dumps,
    loads,
    token,
)

GOOD = Scenario(
    model=ModelRef(recipe="llama", sha256="00"),
    params=ContextParams(n_seq_max=3, type_k="f16"),
    ops=(
        Decode(parts=(Part(seq=0, n=4), Part(seq=1, n=2, tokens=(1, 2))), abort_after=3),
        Save(seq=0, slot=0, flags=3),
        Restore(seq=1, slot=0, times=2, resave=True),
        SeqRm(seq=-1, lo=Edge(at="end", d=-2)),
        Reopen(params=ContextParams(kv_unified=True)),
    ),
    note="a note",
)


def changed(**change: Any) -> str:
    return json.dumps(json.loads(dumps(GOOD)) | change)


def with_op(index: int, **change: Any) -> str:
    raw = json.loads(dumps(GOOD))
    raw["ops"][index] |= change
    return json.dumps(raw)


def test_it_is_read_as_it_was_written() -> None:
    text = dumps(GOOD)
    assert loads(text) == loads(text.encode()) == GOOD
    assert text.endswith("}\n")
    assert dumps(loads(text)) == text


def test_defaults_are_written_and_may_be_left_out() -> None:
    raw = json.loads(dumps(GOOD))
    assert raw["version"] == VERSION
    assert raw["misuse"] is False
    assert raw["ops"][1] == {"op": "save", "seq": 0, "slot": 0, "flags": 3, "medium": "buffer", "again": False}
    assert loads('{"model": {"recipe": "llama"}, "ops": []}') == Scenario(model=ModelRef(recipe="llama"), ops=())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (dumps(GOOD) + "x", "not JSON"),
        ("[]", "a list is no scenario"),
        ("null", "a NoneType is no scenario"),
        (changed(version=VERSION + 1), f"scenario version {VERSION + 1}, this redraft reads version {VERSION}"),
        (changed(version="1"), "scenario version '1'"),
        (changed(more=1), "unknown field `more`"),
        (changed(model={"recipe": "llama", "colour": 1}), "unknown field `colour` - at `$.model`"),
        (changed(params={"n_ctx": 256, "n_rs": 1}), "unknown field `n_rs` - at `$.params`"),
        (with_op(1, again_=True), "unknown field `again_` - at `$.ops[1]`"),
        (with_op(0, parts=[{"seq": 0, "n": 1, "m": 1}]), "unknown field `m` - at `$.ops[0].parts[0]`"),
        (with_op(3, lo={"at": "end", "e": 1}), "unknown field `e` - at `$.ops[3].lo`"),
        (with_op(2, op="restore_some"), "Invalid value 'restore_some' - at `$.ops[2].op`"),
        (with_op(1, seq="0"), "Expected `int`, got `str` - at `$.ops[1].seq`"),
        (with_op(1, seq=0.5), "Expected `int`, got `float` - at `$.ops[1].seq`"),
        (with_op(1, seq=True), "Expected `int`, got `bool` - at `$.ops[1].seq`"),
        (with_op(1, again=1), "Expected `bool`, got `int` - at `$.ops[1].again`"),
        (with_op(1, medium="tape"), "Invalid enum value 'tape' - at `$.ops[1].medium`"),
        (with_op(3, lo={"at": "middle"}), "Invalid enum value 'middle' - at `$.ops[3].lo.at`"),
        (changed(params={"type_k": "q4_1"}), "Invalid enum value 'q4_1' - at `$.params.type_k`"),
        (changed(ops={}), "Expected `array`, got `object` - at `$.ops`"),
        (changed(note=None), "Expected `str`, got `null` - at `$.note`"),
        ('{"ops": []}', "missing required field `model`"),
        ('{"model": {"recipe": "llama"}, "ops": [{"op": "save", "seq": 0}]}', "missing required field `slot`"),
        ('{"model": {"recipe": "llama"}, "ops": [{"seq": 0, "slot": 0}]}', "missing required field `op`"),
        ('{"ops": [], "model": {"recipe": "a"}, "ops": []}', "duplicate key 'ops'"),
        ('{"ops": [], "model": {"recipe": "a", "recipe": "b"}}', "duplicate key 'recipe'"),
        (dumps(GOOD).replace('"slot": 0,', '"slot": 0, "slot": 1,', 1), "duplicate key 'slot'"),
        (dumps(GOOD).replace('"flags": 3', '"flags": NaN'), "NaN is not allowed"),
        (dumps(GOOD).replace('"flags": 3', '"flags": Infinity'), "Infinity is not allowed"),
        (dumps(GOOD).replace('"flags": 3', '"flags": -Infinity'), "-Infinity is not allowed"),
        (dumps(GOOD).replace('"flags": 3', '"flags": 3.5'), "Expected `int`, got `float` - at `$.ops[1].flags`"),
    ],
)
def test_what_is_no_scenario_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(BadScenario) as e:
        loads(text)
    assert says in str(e.value)


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b'{"note": "\xff"}', b"\x00" * 20])
def test_bytes_that_are_no_text_are_refused(data: bytes) -> None:
    with pytest.raises(BadScenario):
        loads(data)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])
def test_generated_programs_come_back(name: str) -> None:
    model, traits = ModelRef(recipe=name), traits_of(recipes.get(name))

    @settings(max_examples=60, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(scenarios(model, traits), st.text())
    def back(scenario: Scenario, note: str) -> None:
        noted = msgspec.structs.replace(scenario, note=note)
        assert loads(dumps(noted)) == noted
        assert loads(dumps(noted)).key() == scenario.key()

    back()


def test_the_key_is_what_is_executed() -> None:
    key = GOOD.key()
    assert len(key) == 16
    assert int(key, 16) >= 0
    replace = msgspec.structs.replace
    assert replace(GOOD, note="another note").key() == key
    others = [
        replace(GOOD, ops=GOOD.ops[1:]),
        replace(GOOD, ops=(*GOOD.ops[:1], Save(seq=0, slot=0, flags=2), *GOOD.ops[2:])),
        replace(GOOD, params=ContextParams()),
        replace(GOOD, misuse=True),
        replace(GOOD, model=ModelRef(recipe="llama", sha256="01")),
        replace(GOOD, model=ModelRef(recipe="llama", sha256="00", seed=1)),
    ]
    assert len({key, *(s.key() for s in others)}) == len(others) + 1


@pytest.mark.parametrize(
    ("stream", "pos", "n_vocab", "expected"),
    [
        (0, 0, 64, 57),
        (0, 1, 64, 5),
        (1, 0, 64, 38),
        (77, 300, 64, 26),
        (90, 5, 262144, 204216),
        (1000, 0, 32000, 18119),
    ],
)
def test_tokens_of_streams_never_change(stream: int, pos: int, n_vocab: int, expected: int) -> None:
    assert token(stream, pos, n_vocab) == expected


def test_tokens_are_spread_and_in_range() -> None:
    made = [token(s, p, 64) for s in range(8) for p in range(256)]
    assert set(made) == set(range(64))
    assert all(0 <= token(s, p, 262144) < 262144 for s in range(-2, 200) for p in range(20))
    # no two streams run alike, nor one like another a few positions on
    runs = {tuple(token(s, p + d, 64) for p in range(6)) for s in range(100) for d in range(4)}
    assert len(runs) == 400


def test_every_operation_has_a_name_of_its_own() -> None:
    assert len(OP_NAMES) == len(set(OP_NAMES)) == len(OP_TYPES) == 22
    assert all(issubclass(t, msgspec.Struct) for t in OP_TYPES)
    assert Edge(at="open", d=0) == OPEN
