"""What the generator makes: valid programs of every operation and form, the same for a seed, small when shrunk."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import pytest
from hypothesis import find, settings

from fuzz.spans import last_ubatch
from fuzz.state import State, Traits, traits_of, valid
from fuzz.strategies import generate, scenarios
from subjects import recipes
from subjects.contracts import FORMS, forms_of
from subjects.driver_contracts import DRIVER_CONTRACTS
from subjects.scenario import OP_NAMES, Decode, ModelRef, Restore, Scenario, SeqCp, SeqRm, loads
from subjects.scenario import dumps as dump

# what only a program with a driver has is tested in test_driver_gen
DRIVER_OPS = {c.op for c in DRIVER_CONTRACTS}
PLAIN_OPS = set(OP_NAMES) - DRIVER_OPS
SLICE = 300
SLICES = 7
EVERYWHERE = ("llama", "gemma3", "mamba2", "qwen35")
# forms that the memory kind rules out by contract
IMPOSSIBLE = {
    "gemma3": {"seq_cp: prefix [-1, p)", "seq_cp: prefix [0, p)"},
    "mamba2": {
        "seq_cp: prefix [-1, p)",
        "seq_cp: prefix [0, p)",
        "seq_add: tail, - (context shift)",
        "seq_add: middle, -",
    },
    "qwen35": {"seq_cp: prefix [-1, p)", "seq_cp: prefix [0, p)", *(f"seq_add: {f}" for f in FORMS["seq_add"])}
    | {f"seq_div: {f}" for f in FORMS["seq_div"]},
}
ROLLBACK_ONLY = {
    "save: pending rollback",
    "save_all: pending rollback",
    "seq_cp: pending rollback",
    "seq_rm: within n_rs_seq",
    "seq_rm: beyond n_rs_seq",
    "seq_rm: second rollback",
}


def setting(name: str) -> tuple[ModelRef, Traits]:
    return ModelRef(recipe=name), traits_of(recipes.get(name))


@functools.cache
def programs(name: str) -> list[Scenario]:
    """2,100 programs for a recipe."""
    model, traits = setting(name)
    return [s for k in range(SLICES) for s in generate(scenarios(model, traits), k, SLICE)]


@pytest.mark.parametrize("name", recipes.names())
def test_every_program_keeps_the_contract(name: str) -> None:
    model, traits = setting(name)
    made = programs(name) if name in EVERYWHERE else generate(scenarios(model, traits), 0, SLICE)
    broken = [(valid(s, traits), dump(s)) for s in made if valid(s, traits)]
    assert not broken, broken[0]
    assert len(made) >= SLICE


@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_operation_and_form_is_generated(name: str) -> None:
    _, traits = setting(name)
    seen: set[str] = set()
    for s in programs(name):
        state = State(traits, s.params)
        for op in s.ops:
            tag = str(type(op).__struct_config__.tag)
            forms = forms_of(op, state)
            assert forms <= set(FORMS[tag]), (tag, forms - set(FORMS[tag]))
            seen |= {f"{tag}: {form}" for form in forms}
            state.apply(op)
    assert not {s.partition(":")[0] for s in seen} & DRIVER_OPS
    wanted = {f"{op}: {form}" for op in PLAIN_OPS for form in FORMS[op]} - IMPOSSIBLE.get(name, set())
    if not traits.rollback:
        wanted -= ROLLBACK_ONLY
    assert not sorted(wanted - seen)
    assert {s.partition(":")[0] for s in wanted} == PLAIN_OPS - (
        {"seq_add", "seq_div"} if not traits.can_shift else set()
    )


def test_every_operation_has_forms() -> None:
    assert set(FORMS) == set(OP_NAMES)
    assert all(FORMS.values())
    assert len(PLAIN_OPS) == 15
    assert len(DRIVER_OPS) == 7


def test_parameters_reach_their_boundaries() -> None:
    params = [s.params for s in programs("qwen35")]
    assert {p.n_seq_max for p in params} == {1, 2, 3, 4}
    assert {p.n_rs_seq for p in params} == {0, 1, 2, 3, 4}
    assert (
        {p.kv_unified for p in params}
        == {p.embeddings for p in params}
        == {p.flash_attn for p in params}
        == {False, True}
    )
    assert {p.n_threads for p in params} == {1, 2}
    assert {p.type_k for p in params} == {"f32", "f16", "bf16"}
    small = sum(p.n_rs_seq > 0 and p.n_ubatch <= p.n_rs_seq + 1 for p in params) / len(params)
    assert 0.01 < small < 0.1, "enough to find the known abort, not so many that nothing else is found"
    assert any(p.n_rs_seq > 0 and p.n_ubatch == p.n_rs_seq + 2 for p in params)
    assert 0.6 < sum(p.type_k == p.type_v == "f32" for p in params) / len(params) < 0.9


def test_window_and_quantised_cache_are_tried() -> None:
    assert {s.params.swa_full for s in programs("gemma3")} == {False, True}
    model, traits = setting("llama-h64")
    made = [s.params for s in generate(scenarios(model, traits), 0, SLICE)]
    assert {"q8_0"} <= {p.type_k for p in made} & {p.type_v for p in made}
    assert all(p.flash_attn for p in made if p.type_v == "q8_0")


def test_batches_around_the_parameters_in_play() -> None:
    rows = set()
    for s in programs("qwen35"):
        for op in s.ops:
            if isinstance(op, Decode) and len(op.parts) == 1:
                rows |= {("ubatch", op.parts[0].n - s.params.n_ubatch), ("rs", op.parts[0].n - s.params.n_rs_seq)}
    assert {("ubatch", -1), ("ubatch", 0), ("ubatch", 1), ("rs", 0), ("rs", 1), ("rs", 2)} <= rows
    lengths = {p.n for s in programs("gemma3") for op in s.ops if isinstance(op, Decode) for p in op.parts}
    assert {15, 16, 17, 18} <= lengths


def test_size_of_programs() -> None:
    for name in EVERYWHERE:
        sizes = [len(s.ops) for s in programs(name)]
        assert 6 <= statistics.median(sizes) <= 12
        assert max(sizes) <= 18
        assert min(sizes) >= 1


def test_few_programs_repeat() -> None:
    made = generate(scenarios(*setting("qwen35")), 3, SLICE)
    assert len({s.key() for s in made}) > 0.9 * len(made)


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_seed_fixes_the_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = scenarios(*setting(name))
    first = generate(strategy, 11, 100)
    monkeypatch.setenv("CI", "1")
    assert generate(scenarios(*setting(name)), 11, 100) == first
    assert generate(strategy, 12, 100) != first


def test_programs_survive_being_written_down() -> None:
    for s in programs("qwen35")[:200]:
        assert loads(dump(s)) == s


@pytest.mark.parametrize("name", EVERYWHERE)
def test_misuse_breaks_exactly_one_precondition(name: str) -> None:
    model, traits = setting(name)
    made = [valid(s, traits) for k in range(3) for s in generate(scenarios(model, traits, misuse=True), k, SLICE)]
    assert {len(b) for b in made} == {1}
    assert {"decode.rows", "decode.ids", "seq_rm.ids", "seq_cp.whole-on-split", "seq_cp.empty-dst"} <= {
        b[0] for b in made
    }
    assert any(b[0] == ("seq_div.d" if traits.can_shift else "seq_add.can-shift") for b in made)


@pytest.mark.parametrize(
    ("what", "at_most"),
    [
        (lambda s: any(isinstance(op, Restore) for op in s.ops), 4),
        (lambda s: any(isinstance(op, SeqRm) for op in s.ops), 3),
        (lambda s: any(isinstance(op, SeqCp) and op.src != op.dst for op in s.ops), 3),
        (lambda s: any(isinstance(op, Decode) and len(op.parts) > 1 for op in s.ops), 2),
    ],
)
def test_programs_shrink(what: Callable[[Scenario], bool], at_most: int) -> None:
    s = find(
        scenarios(*setting("qwen35")),
        what,
        settings=settings(max_examples=3000, database=None, deadline=None, derandomize=True),
    )
    assert len(s.ops) <= at_most, dump(s)
    assert s.params.n_threads == 1
    assert s.params.type_k == "f32"


@pytest.mark.parametrize(
    ("rows", "n_ubatch", "keep", "sequential", "expected"),
    [
        ([0] * 6, 8, 5, True, {0: 6}),
        ([0] * 10, 8, 5, True, {0: 5}),  # the last n_rs_seq + 1 stay together: 5 + 5
        ([0] * 20, 8, 3, True, {0: 4}),  # 8 + 8 + 4
        ([0] * 17, 8, 3, True, {0: 3}),  # 8 + 6 + 3, not 8 + 8 + 1
        ([0] * 4 + [1] * 4, 8, 0, True, {0: 4, 1: 4}),
        ([0] * 2 + [1] * 6, 16, 0, True, {0: 2, 1: 4}),  # 2 + 2, then the other 4
        ([1] * 3 + [0] * 3, 16, 0, True, {1: 3, 0: 3}),
    ],
)
def test_the_split_of_a_batch(
    rows: list[int], n_ubatch: int, keep: int, sequential: bool, expected: dict[int, int]
) -> None:
    assert last_ubatch(rows, n_ubatch, sequential=sequential, keep_tail=keep, by_seq=False) == expected
