"""Programs for llama-server: all valid, the same for a seed, every pattern there, and at the lengths that matter."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from fuzz import strategies
from fuzz.models import Model
from fuzz.server.fit import PAD, Book, Talk, crowded, valid
from fuzz.server.flags import FLAG_SETS, PALETTE, flag_set, palette
from fuzz.server.gen import BACK, LONG, MAX_REQUESTS, PREDICT, cuts, lengths, offsets, programs
from fuzz.traits import traits_of
from subjects import pairs, recipes
from subjects.scenario import BlobEdit, DriverParams, ModelRef
from subjects.server.scenario import (
    REQUEST_NAMES,
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
    asked,
    dumps,
    loads,
)

SLICE = 300
MODELS = ("llama", "gemma3", "mamba2", "qwen35", "lfm2")
generate: Any = strategies.generate
replace = msgspec.structs.replace


def model(name: str) -> Model:
    return Model(ModelRef(recipe=name), "", traits_of(recipes.get(name)))


def drafting(name: str) -> Model:
    pair = pairs.get(name)
    draft = ModelRef(recipe=pair.draft) if pair.draft else None
    return replace(model(pair.target), driver=DriverParams(kind=pair.kind, draft=draft, n_max=pair.n_max))


@functools.cache
def made(name: str) -> list[ServerScenario]:
    found: list[ServerScenario] = generate(programs(model(name)), 0, SLICE)
    return found


class Seen(NamedTuple):
    """A turn, with what its client had before: the conversation that it goes on from, and what it keeps of that."""

    program: ServerScenario
    request: int
    turn: Turn
    talk: Talk
    kept: int

    @property
    def prompt(self) -> int:
        return self.kept + self.turn.n


def turns(programs_: list[ServerScenario]) -> Iterator[Seen]:
    for p in programs_:
        book = Book(True, p.flags.slot_ctx)
        for i, r in enumerate(p.requests):
            for t in r.asks if isinstance(r, Together) else (r,):
                if isinstance(t, Turn):
                    talk = book.talks.get(t.conv if t.base is None else t.base, Talk())
                    yield Seen(p, i, t, talk, book.kept(t))
            book.apply(r)


# --- programs


def test_same_for_a_seed() -> None:
    first = generate(programs(model("qwen35")), 7, 20)
    assert first == generate(programs(model("qwen35")), 7, 20)
    assert first != generate(programs(model("qwen35")), 8, 20)


@pytest.mark.parametrize("name", MODELS)
def test_valid_and_bounded(name: str) -> None:
    found = made(name)
    assert [v for p in found for v in valid(p)] == []
    assert max(len(p.requests) for p in found) <= MAX_REQUESTS
    asks = [a for p in found for _, a in asked(p)]
    assert max(a.predict for a in asks) <= 16
    assert len(asks) > 8 * SLICE
    seen = list(turns(found))
    assert sum(s.prompt for s in seen) / len(seen) < 60  # what the cold server must read
    over = [s for s in seen if s.prompt + s.turn.predict >= s.program.flags.slot_ctx]
    assert 0 < len(over) < len(seen) / 50


def test_as_text() -> None:
    assert all(loads(dumps(p)) == p for p in made("gemma3")[:40])


def test_different() -> None:
    assert len({p.key() for p in made("llama")}) > 0.95 * SLICE


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_request(name: str) -> None:
    kinds = Counter(str(r.__struct_config__.tag) for p in made(name) for r in p.requests)
    assert set(kinds) == set(REQUEST_NAMES)
    assert min(kinds.values()) >= 30, kinds


def _patterns(p: ServerScenario) -> Iterator[str]:
    for s in turns([p]):
        yield from _turn_patterns(s)
    saved: set[int] = set()
    damaged: set[int] = set()
    for i, r in enumerate(p.requests):
        after = p.requests[i + 1] if i + 1 < len(p.requests) else None
        match r:
            case SaveSlot():
                saved.add(r.file)
            case DamageFile():
                damaged.add(r.file)
            case RestoreSlot() if r.file not in saved:
                yield "restore of a file that is missing"
            case RestoreSlot() if r.file in damaged and isinstance(after, Turn):
                yield "turn after a damaged file"
            case RestoreSlot() if isinstance(after, Turn):
                yield "turn after a restore"
            case EraseSlot() if isinstance(after, Turn):
                yield "turn after erasing"
            case Restart() if isinstance(after, RestoreSlot):
                yield "restore after a restart"
            case Restart() if isinstance(after, Turn):
                yield "turn after a restart"
            case Chat() if r.cancel is not None:
                yield "chat: cancelled"
            case Chat():
                yield "chat: " + ("goes on" if r.keep < 0 else "anew" if r.keep == 0 else "edited")
            case Together():
                yield "more at once than slots" if len(r.asks) > p.flags.parallel else "at once"
                if any(a.cancel is not None for a in r.asks):
                    yield "at once: cancelled"
                if any(isinstance(a, Chat) for a in r.asks):
                    yield "at once: chat"
            case _:
                pass
    convs = [r.conv for r in p.requests if isinstance(r, Turn)]
    if any(a == c != b for a, b, c in zip(convs, convs[1:], convs[2:], strict=False)):
        yield "back after another conversation"


def _turn_patterns(s: Seen) -> Iterator[str]:
    t = s.turn
    if t.base is not None:
        yield "branch"
    elif not s.kept:
        yield "anew"
    elif t.keep == Cut():
        yield "append" if t.n else "repeat with the answer"
    elif t.keep == Cut("prompt"):
        yield "append in place of the answer" if t.n else "repeat"
    elif s.kept < s.talk.prompt:
        yield "edit" if t.n else "shorten"
    if s.talk.prompt and s.kept == s.talk.prompt - 1 and not t.n:
        yield "shorten by one"
    if t.cancel is not None:
        yield "cancel"
    if not t.cache:
        yield "cache off"
    if t.slot >= 0:
        yield "pinned"
    size = s.program.flags.slot_ctx
    if s.prompt >= size:
        yield "too long"
    elif s.prompt + t.predict >= size:
        yield "no room for the answer"
    elif s.prompt + t.predict >= size - 2:
        yield "just fits"


RARE = {
    "too long": 1,
    "no room for the answer": 1,
    "just fits": 1,
    "at once: chat": 3,
    "at once: cancelled": 3,
    "turn after a restart": 2,
}
OFTEN = {"append", "edit", "shorten", "repeat", "branch", "back after another conversation", "pinned"}


@pytest.mark.parametrize("name", MODELS)
def test_every_pattern(name: str) -> None:
    """In so many of the programs, 5 by default: half of what is usual, since what is drawn depends on what else
    Hypothesis has seen in this process."""
    count = Counter(x for p in made(name) for x in set(_patterns(p)))
    wanted = {
        "append", "append in place of the answer", "edit", "shorten", "shorten by one", "repeat",
        "repeat with the answer", "branch", "anew", "back after another conversation", "cancel", "cache off", "pinned",
        "too long", "no room for the answer", "just fits", "turn after a restore", "turn after a damaged file",
        "restore of a file that is missing", "turn after erasing", "restore after a restart", "turn after a restart",
        "chat: goes on", "chat: edited", "chat: anew", "chat: cancelled", "at once", "more at once than slots",
        "at once: cancelled", "at once: chat",
    }  # fmt: skip
    assert set(count) == wanted
    few = {x: n for x, n in count.items() if n < (30 if x in OFTEN else RARE.get(x, 5))}
    assert not few
    pinned = sum(t.turn.slot >= 0 for t in turns(made(name)))
    assert pinned < sum(1 for _ in turns(made(name))) / 3


# --- lengths


def _checkpoints(s: Seen) -> set[int]:
    return {s.talk.prompt - k for k in offsets(s.program.flags)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("what", "times"), [("checkpoint", 3), ("prompt", 10), ("window", 2)])
def test_places_that_matter(name: str, what: str, times: float) -> None:
    """Prompts part from conversations there so many times as often as if all places were equal; of conversations that
    are not so short that every place is special."""
    window = traits_of(recipes.get(name)).window
    if what == "window" and not window:
        pytest.skip("no window")

    def places(s: Seen) -> set[int]:
        return {
            "checkpoint": {s.talk.prompt - k for k in offsets(s.program.flags)},
            "prompt": {s.talk.prompt},
            "window": {s.talk.end - window, s.talk.prompt - window},
        }[what]

    parting = [s for s in turns(made(name)) if 0 < s.kept < s.talk.end and s.talk.end >= 40]
    hits = sum(s.kept in places(s) for s in parting)
    chance = sum(len({k for k in places(s) if 0 < k < s.talk.end}) / (s.talk.end - 1) for s in parting)
    assert len(parting) > 2 * SLICE
    assert hits > times * chance, (hits, chance)


@pytest.mark.parametrize("name", MODELS)
def test_whole_lengths_that_matter(name: str) -> None:
    traits = traits_of(recipes.get(name))
    new = [s for s in turns(made(name)) if not s.kept and s.prompt <= LONG]
    hits = sum(s.prompt in lengths(s.program.flags, traits) for s in new)
    chance = sum(len(lengths(s.program.flags, traits)) / LONG for s in new)
    assert hits > 2.5 * chance, (hits, chance)
    for special in ("batch", "ubatch"):
        at = {d: sum(s.prompt == getattr(s.program.flags, special) + d for s in new) for d in (-1, 0, 1)}
        assert min(at.values()) > 2 * len(new) / LONG, (special, at)


@pytest.mark.parametrize("name", MODELS)
def test_thresholds(name: str) -> None:
    """A tenth of the new prompt (the slot is taken), a half and a quarter of the old one (the prompt cache), on both
    sides of each."""
    found: Counter[tuple[str, bool]] = Counter()
    for s in turns(made(name)):
        if not 0 < s.kept < s.talk.end:
            continue
        share = 100 * s.kept - s.program.flags.similarity * s.prompt
        if s.program.flags.similarity and abs(share) <= 100:
            found["similarity", share > 0] += 1
        for part in (2, 4):
            if abs(part * s.kept - s.talk.end) <= part:
                found[f"1/{part}", part * s.kept < s.talk.end] += 1
    assert len(found) == 6
    assert min(found.values()) >= 15, found


def test_special_lengths() -> None:
    flags, traits = Flags(batch=32, ubatch=8, spacing=16), traits_of(recipes.get("gemma3"))
    assert offsets(flags) == (BACK, BACK + 8)
    assert offsets(Flags(batch=8, ubatch=8)) == (BACK, 8)  # no further back than a batch
    assert {3, 4, 5, 7, 8, 9, 11, 12, 13, 31, 32, 33, traits.window, traits.window + 1} <= {*lengths(flags, traits)}
    found = cuts(flags, traits)
    assert {Cut("prompt", -4 - 8), Cut("prompt", -4), Cut("prompt", -5), Cut("prompt", -6)} <= {*found.checkpoints}
    assert {Cut("prompt"), Cut("prompt", -1), Cut("end", -1)} <= {*found.ends}
    assert {Cut("end", -traits.window), Cut("prompt", -16 - BACK)} <= {*found.behind}
    assert cuts(Flags(), traits_of(recipes.get("llama"))).behind  # some, whatever the model


# --- flags


def test_flag_sets() -> None:
    assert len(FLAG_SETS) == 8
    assert len(set(FLAG_SETS.values())) == 8
    for flags in FLAG_SETS.values():
        assert valid(ServerScenario(ModelRef(recipe="llama"), (Turn(conv=0),), flags)) == []
        assert flags.slot_ctx >= PAD
    assert flag_set("flash", traits_of(recipes.get("llama-h64"))).type_v == "q8_0"
    assert all(flag_set(n, traits_of(recipes.get("llama"))) == f for n, f in FLAG_SETS.items())
    with pytest.raises(KeyError):
        flag_set("none", traits_of(recipes.get("llama")))


@pytest.mark.parametrize("flags", FLAG_SETS.values(), ids=FLAG_SETS)
def test_programs_with_given_flags(flags: Flags) -> None:
    found = generate(programs(model("lfm2"), [(flags, None)]), 1, 40)
    assert {p.flags for p in found} == {flags}
    assert [v for p in found for v in valid(p)] == []


def test_flags_drawn() -> None:
    flags = [p.flags for p in made("gemma3")]
    for field, values in {
        "parallel": {1, 2, 3}, "kv_unified": {False, True}, "swa_full": {False, True}, "cache_ram": {0, 1, 8},
        "idle_slots": {False, True}, "flash_attn": {False, True}, "type_k": {"f32", "f16"}, "similarity": {0, 10, 50},
    }.items():  # fmt: skip
        assert {getattr(f, field) for f in flags} == values
    assert {(16, 4), (8, 8), (64, 32)} <= {(f.batch, f.ubatch) for f in flags}
    assert not any(p.flags.swa_full for p in made("llama"))
    assert {p.flags.type_v for p in generate(programs(model("llama-h64")), 0, 60)} >= {"q8_0", "f32"}


@pytest.mark.parametrize("name", pairs.names())
def test_drivers(name: str) -> None:
    base = drafting(name)
    found = generate(programs(base), 0, 60)
    assert [v for p in found for v in valid(p)] == []
    assert {p.driver.kind for p in found} == {pairs.get(name).kind}
    n_max = {p.driver.n_max for p in found}
    learns = pairs.get(name).kind.startswith("ngram")
    assert n_max == ({pairs.get(name).n_max} if learns else set(range(1, pairs.get(name).n_max + 1)))


def test_small_micro_batches_with_a_driver() -> None:
    """They end the server at once where the memory keeps earlier states: seldom, but in every palette."""
    m = drafting("qwen35-mtp")
    found = generate(programs(m), 0, SLICE)
    small = sum(crowded(p.flags, p.driver, m.traits.rollback) for p in found)
    assert 0 < small < SLICE / 20
    for seed in range(20):
        assert any(crowded(f, d, m.traits.rollback) for f, d in palette(m.traits, m.driver, seed))
    dense = drafting("llama-eagle3")
    assert len(palette(dense.traits, dense.driver, 0)) == PALETTE


def test_palette() -> None:
    m = drafting("qwen35-mtp")
    one = palette(m.traits, m.driver, 3)
    assert one == palette(m.traits, m.driver, 3) != palette(m.traits, m.driver, 4)
    assert len(one) == PALETTE + 1
    found = generate(programs(m, one), 0, 60)
    assert {(p.flags, p.driver) for p in found} == {*one}


# --- what a program must keep to


def program(*requests: AnyRequest, flags: Flags | None = None, driver: DriverParams | None = None) -> ServerScenario:
    return ServerScenario(ModelRef(recipe="llama"), requests, flags or Flags(parallel=2), driver)


GOOD = Turn(conv=0)


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ((), "there are none"),
        ((Turn(conv=-1),), "conversations are numbered from 0"),
        ((Turn(conv=0, n=0),), "the prompt is empty"),
        (
            (
                GOOD,
                Turn(conv=1, base=2, n=0),
            ),
            "nothing is sure to be kept of conversation 2",
        ),
        ((GOOD, Turn(conv=0, keep=Cut("end", -8), n=0)), "the prompt is empty"),
        ((GOOD, Turn(conv=0, keep=Cut("end", 1))), "outside of the conversation"),
        ((GOOD, Turn(conv=0, keep=Cut("start", -1))), "outside of the conversation"),
        ((Turn(conv=0, n=-1),), "keep with a negative d"),
        ((Turn(conv=0, predict=0),), "at least one token"),
        ((Turn(conv=0, stream=-1),), "numbered from 0"),
        ((Turn(conv=0, predict=4, cancel=4),), "less than predict"),
        ((Turn(conv=0, slot=2),), "slots 0 to 1 (flags.parallel), or -1"),
        ((SaveSlot(2, 0),), "slots 0 to 1 (flags.parallel)"),
        ((EraseSlot(-1),), "slot is -1"),
        ((RestoreSlot(0, -1),), "files are numbered from 0"),
        ((DamageFile(0, (BlobEdit(how="cut"),)),), "was not saved before"),
        ((SaveSlot(0, 0), DamageFile(0, ())), "edits is empty"),
        ((SaveSlot(0, 0), DamageFile(0, (BlobEdit(how="take", value=1),))), "takes from file 1"),
        ((Chat(conv=0, keep=1),), "has 0 messages"),
        ((Chat(conv=0, words=0),), "at least one"),
        ((Together(()),), "asks is empty"),
        ((Together((GOOD, Turn(conv=1), GOOD)),), "turn 0 is asked twice"),
        ((Together((GOOD, Turn(conv=1, slot=5))),), "asks[1]: slot is 5"),
        ((Together((GOOD, Turn(conv=1, base=0, n=0))),), "asks[1]: the prompt is empty"),
    ],
)
def test_broken(requests: tuple[AnyRequest, ...], says: str) -> None:
    found = valid(program(*requests))
    assert len(found) == 1
    assert says in found[0]
    assert not requests or found[0].startswith(f"request {len(requests) - 1} (")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (Flags(parallel=0), "flags.parallel is 0"),
        (Flags(parallel=4), "say 1024"),
        (Flags(ctx=300, kv_unified=True, parallel=2), "say 512"),
        (Flags(batch=16), "flags.ubatch is 32"),
        (Flags(type_v="q8_0"), "needs flags.flash_attn"),
        (Flags(idle_slots=True), "needs flags.cache_ram"),
        (Flags(similarity=101), "at most 100"),
    ],
)
def test_broken_flags(flags: Flags, says: str) -> None:
    found = valid(program(GOOD, flags=flags))
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (DriverParams(kind="draft-mtp", impl="reference"), "say native"),
        (DriverParams(kind="draft-mtp", late=True), "leave them out"),
        (DriverParams(kind="draft-mtp", n_min=4), "n_min between 0 and n_max"),
        (DriverParams(kind="draft-eagle3"), "needs driver.draft"),
    ],
)
def test_broken_driver(driver: DriverParams, says: str) -> None:
    found = valid(program(GOOD, driver=driver))
    assert len(found) == 1
    assert says in found[0]


def test_a_program_that_keeps_to_all() -> None:
    p = program(
        GOOD, Turn(conv=0, keep=Cut("prompt"), n=0), Turn(conv=1, base=0, keep=Cut("prompt", -1), n=0, cancel=0),
        Together((Turn(conv=0), Chat(conv=0), Turn(conv=1, base=0))), Chat(conv=0, keep=2), SaveSlot(1, 0),
        DamageFile(0, (BlobEdit(how="take", value=0),)), Restart(), RestoreSlot(0, 0), RestoreSlot(1, 9), EraseSlot(0),
        Turn(conv=3, n=5000, slot=1),
    )  # fmt: skip
    assert valid(p) == []


def test_book() -> None:
    book = Book(whole=True, size=256)
    book.apply(Turn(conv=0, n=10, predict=4))
    assert book.talks[0] == (10, 14)
    assert [book.at(0, c) for c in (Cut(), Cut("prompt"), Cut("prompt", 9), Cut("end", -20), Cut("start", 3))] == [
        14, 10, 14, 0, 3,
    ]  # fmt: skip
    book.apply(Together((Turn(conv=0, n=1, predict=2, cancel=1), Turn(conv=1, base=0, n=1, predict=1))))
    assert book.talks == {0: (15, 16), 1: (15, 16)}  # the second goes on from what was before both
    book.apply(Chat(conv=0))
    book.apply(Chat(conv=0, keep=1))
    assert book.chats == {0: 3}
    book.apply(Turn(conv=0, n=300))  # refused
    assert book.talks[0] == (15, 16)
    assert set(PREDICT) <= set(range(1, 17))
