"""Reduction of programs for llama-server with predicates in plain Python: minimal forms, and what is promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fuzz import strategies
from fuzz.models import Model
from fuzz.server.fit import Book, valid
from fuzz.server.gen import programs
from fuzz.server.reduce import reduce
from fuzz.traits import traits_of
from subjects import recipes
from subjects.scenario import BlobEdit, DriverParams, ModelRef
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    Cut,
    DamageFile,
    EraseSlot,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
)

generate: Any = strategies.generate
REF = ModelRef(recipe="qwen35")
QWEN = Model(REF, "", traits_of(recipes.get("qwen35")))
RICH = Flags(
    parallel=3, ctx=768, batch=16, ubatch=4, checkpoints=8, spacing=4, cache_ram=8, idle_slots=True, similarity=50,
    flash_attn=True, type_k="q8_0", type_v="q8_0", swa_full=True,
)  # fmt: skip
MTP = DriverParams(kind="draft-mtp", n_min=1, p_min=0.5, backend_sampling=True)
FIRST = Turn(conv=0, keep=Cut("start"), n=1, predict=1)
"""the simplest request"""


def program(*requests: AnyRequest, flags: Flags = RICH, driver: DriverParams | None = MTP) -> ServerScenario:
    return ServerScenario(REF, requests, flags, driver)


BIG = program(
    Turn(conv=2, n=30, stream=3, slot=2),
    Chat(conv=1, words=7, stream=2),
    Turn(conv=2, n=9, stream=4, predict=12),
    SaveSlot(slot=2, file=2),
    Turn(conv=3, base=2, keep=Cut("prompt", -4), n=5, stream=5, predict=16, cache=False),
    Together((Turn(conv=2, n=3, cancel=2), Turn(conv=1, base=3, n=2, slot=1), Chat(conv=1, keep=1))),
    DamageFile(2, (BlobEdit(how="flip", nth=900, value=4), BlobEdit(how="insert", nth=1000, value=9))),
    Turn(conv=2, keep=Cut("prompt"), n=0, stream=6, predict=3),
    Restart(),
    RestoreSlot(slot=1, file=2),
    EraseSlot(slot=2),
    Turn(conv=2, keep=Cut("start", 21), n=11, stream=7),
)


def pair(p: ServerScenario) -> bool:
    """A save and, after it, a restore of the same file."""
    saved = set()
    for r in p.requests:
        if isinstance(r, SaveSlot):
            saved.add(r.file)
        if isinstance(r, RestoreSlot) and r.file in saved:
            return True
    return False


def repeated(p: ServerScenario) -> bool:
    """A prompt exactly again."""
    book = Book(True, p.flags.slot_ctx)
    for r in p.requests:
        if isinstance(r, Turn) and book.talks.get(r.conv) and book.prompt(r) == book.talks[r.conv].prompt:
            return True
        book.apply(r)
    return False


def longest(p: ServerScenario) -> int:
    book, most = Book(True, p.flags.slot_ctx), 0
    for r in p.requests:
        most = max(most, book.prompt(r) if isinstance(r, Turn) else 0)
        book.apply(r)
    return most


def parted(at: int, least: int) -> Callable[[ServerScenario], bool]:
    """A prompt that parts from the last one of its conversation so many tokens before its end, a long one, and goes on
    otherwise."""

    def holds(p: ServerScenario) -> bool:
        book = Book(True, p.flags.slot_ctx)
        for r in p.requests:
            if isinstance(r, Turn) and r.n > 1 and (talk := book.talks.get(r.conv)):
                kept = book.kept(r)
                if kept == talk.prompt - at and talk.prompt >= least:
                    return True
            book.apply(r)
        return False

    return holds


def has(kind: type, **fields: object) -> Callable[[ServerScenario], bool]:
    def holds(p: ServerScenario) -> bool:
        return any(isinstance(r, kind) and all(getattr(r, k) == v for k, v in fields.items()) for r in p.requests)

    return holds


@pytest.mark.parametrize(
    ("holds", "requests"),
    [
        (pair, (SaveSlot(0, 0), RestoreSlot(0, 0))),
        (has(Turn), (FIRST,)),
        (has(Turn, predict=3), (Turn(conv=0, keep=Cut("start"), n=1, predict=3),)),
        (has(Turn, cache=False), (Turn(conv=0, keep=Cut("start"), n=1, predict=1, cache=False),)),
        (has(Chat), (Chat(conv=0, words=1, predict=1),)),
        (
            lambda p: any(isinstance(r, Chat) and r.words >= 3 for r in p.requests),
            (Chat(conv=0, words=3, predict=1),),
        ),
        (has(Restart), (Restart(),)),
        (has(DamageFile), (SaveSlot(0, 0), DamageFile(0, (BlobEdit(how="insert"),)))),
        (has(EraseSlot), (EraseSlot(0),)),
        (repeated, (FIRST, Turn(conv=0, keep=Cut("prompt"), n=0, predict=1))),
        (lambda p: longest(p) >= 37, (Turn(conv=0, keep=Cut("start"), n=37, predict=1),)),
        (
            lambda p: any(isinstance(r, Together) and len(r.asks) > 1 for r in p.requests),
            (Together((FIRST, Chat(conv=0, words=1, predict=1))),),
        ),
        (
            parted(4, 20),
            (
                Turn(conv=0, keep=Cut("start"), n=20, predict=1),
                Turn(conv=0, keep=Cut("prompt", -4), n=2, predict=1),
            ),
        ),
    ],
)
def test_minimal(holds: Callable[[ServerScenario], bool], requests: tuple[AnyRequest, ...]) -> None:
    start = BIG
    if not holds(start):
        start = program(*BIG.requests, Turn(conv=2, keep=Cut("prompt", -4), n=9, stream=8))
    if not holds(start):
        start = program(*BIG.requests[:1], Chat(conv=4, words=12), Turn(conv=2, predict=3, cache=False))
    assert valid(start) == []
    assert holds(start)
    result = reduce(start, holds)
    assert result.complete
    assert result.scenario.requests == requests
    assert result.scenario.flags == Flags()
    assert result.scenario.driver is None


@pytest.mark.parametrize(
    ("holds", "flags"),
    [
        (lambda f: f.ubatch == 4, Flags(ubatch=4)),
        (lambda f: f.batch <= 16, Flags(batch=16, ubatch=4)),
        (lambda f: f.checkpoints > 1, Flags(checkpoints=2)),
        (lambda f: f.spacing > 2, Flags(spacing=3)),
        (lambda f: f.idle_slots, Flags(idle_slots=True, cache_ram=1)),
        (lambda f: f.cache_ram >= 4, Flags(cache_ram=4)),
        (lambda f: f.type_v != "f32", Flags(type_v="q8_0", flash_attn=True)),
        (lambda f: f.type_k != "f32", Flags(type_k="q8_0")),
        (lambda f: f.parallel > 1, Flags(parallel=2)),
        (lambda f: f.parallel > 2, Flags(parallel=3, ctx=768)),
        (lambda f: f.swa_full, Flags(swa_full=True)),
        (lambda f: f.similarity != 10, Flags(similarity=50)),
    ],
)
def test_flags(holds: Callable[[Flags], bool], flags: Flags) -> None:
    result = reduce(BIG, lambda p: holds(p.flags))
    assert result.scenario.flags == flags
    assert len(result.scenario.requests) == 1


def test_unified() -> None:
    flags = Flags(parallel=3, ctx=512, kv_unified=True, cache_ram=1, idle_slots=True)
    result = reduce(program(Turn(conv=0, slot=2), flags=flags), lambda p: p.flags.kv_unified)
    assert result.scenario == program(FIRST, flags=Flags(kv_unified=True), driver=None)


def test_driver() -> None:
    result = reduce(BIG, lambda p: p.driver is not None and p.driver.n_max > 1)
    assert result.scenario.driver == DriverParams(kind="draft-mtp", n_max=2)


def test_slots_that_matter() -> None:
    """Two slots by number, in requests of both kinds."""

    def holds(p: ServerScenario) -> bool:
        turns = {r.slot for r in p.requests if isinstance(r, Turn) and r.slot >= 0}
        return any(isinstance(r, RestoreSlot) and turns - {r.slot} for r in p.requests)

    result = reduce(BIG, holds)
    assert len(result.scenario.requests) == 2
    assert {r.slot for r in result.scenario.requests if isinstance(r, Turn | RestoreSlot)} == {0, 1}
    assert result.scenario.flags == Flags(parallel=2)


def test_a_conversation_in_few_turns() -> None:
    """Turns are put together where only the length counts, also behind a branch."""
    start = program(
        Turn(conv=0, n=20, predict=4), Turn(conv=0, n=6, predict=4), Turn(conv=1, base=0, keep=Cut("prompt"), n=5),
        Turn(conv=1, n=3), Turn(conv=1, keep=Cut("prompt"), n=0),
    )  # fmt: skip

    def holds(p: ServerScenario) -> bool:
        return repeated(p) and longest(p) >= 40

    result = reduce(start, holds)
    assert result.scenario.requests == (
        Turn(conv=0, keep=Cut("start"), n=40, predict=1),
        Turn(conv=0, keep=Cut("prompt"), n=0, predict=1),
    )


def test_lengths_that_belong_together() -> None:
    """A prompt and the place where a later one parts from it are made shorter in one step."""
    start = program(Turn(conv=0, n=60), Turn(conv=0, keep=Cut("start", 50), n=7))

    def holds(p: ServerScenario) -> bool:
        match p.requests:
            case (Turn(n=a, conv=0), Turn(keep=Cut(at="start", d=b), conv=0)):
                return a - b == 10 and b > 3
            case _:
                return False

    first, second = reduce(start, holds).scenario.requests
    assert isinstance(first, Turn)
    assert isinstance(second, Turn)
    assert (first.n, second.keep, second.n) == (14, Cut("start", 4), 0)


@pytest.mark.parametrize("seed", range(3))
def test_generated(seed: int) -> None:
    """Whatever the program: as few requests as the violation needs, and all candidates are valid."""
    found = [p for p in generate(programs(QWEN), seed, 40) if parted(4, 24)(p)]
    assert found
    for p in found[:4]:
        tried: list[ServerScenario] = []

        def holds(candidate: ServerScenario, tried: list[ServerScenario] = tried) -> bool:
            tried.append(candidate)
            return parted(4, 24)(candidate)

        result = reduce(p, holds)
        assert len(result.scenario.requests) == 2
        assert longest(result.scenario) == 24
        assert result.tried == len(tried) < 400
        assert [v for c in tried for v in valid(c)] == []
        assert reduce(p, parted(4, 24)) == result  # the same again


def test_files_are_named_together() -> None:
    edits = (BlobEdit(how="take", where="attn", value=2),)
    start = program(SaveSlot(0, 2), SaveSlot(0, 5), DamageFile(5, edits), RestoreSlot(0, 5))
    result = reduce(start, lambda p: has(RestoreSlot)(p) and any(isinstance(r, DamageFile) for r in p.requests))
    kinds = [type(r) for r in result.scenario.requests]
    assert kinds[-2:] == [DamageFile, RestoreSlot]
    assert valid(result.scenario) == []
    assert {r.file for r in result.scenario.requests if isinstance(r, SaveSlot | DamageFile)} <= {0, 1}


def test_the_best_so_far_is_kept() -> None:
    ran = 0

    def holds(p: ServerScenario) -> bool:
        nonlocal ran
        ran += 1
        return has(Turn)(p)

    result = reduce(BIG, holds, stop=lambda: ran >= 3)
    assert not result.complete
    assert result.tried == 3
    assert has(Turn)(result.scenario)
    assert len(result.scenario.requests) < len(BIG.requests)
    late = reduce(BIG, holds, seconds=-1)
    assert (late.scenario, late.complete, late.tried) == (BIG, False, 0)
