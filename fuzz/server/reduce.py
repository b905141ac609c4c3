"""Reduction of programs for llama-server: the fewest requests and the shortest prompts that still show the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from fuzz import reduce as loop
from fuzz.reduce import Smaller, Ways, numbers, simpler_edits
from fuzz.server.fit import PAD, Book, valid
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    Cut,
    DamageFile,
    EraseSlot,
    Flags,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
    asked,
    asks_of,
)

replace = msgspec.structs.replace
Holds = Callable[[ServerScenario], bool]
Ask = Turn | Chat
Change = Callable[[AnyRequest], AnyRequest]
_PLAIN = Flags()


def reduce(
    program: ServerScenario, holds: Holds, *, seconds: float = 60.0, stop: Callable[[], bool] = lambda: False
) -> Smaller[ServerScenario]:
    """Reduce while `holds` is true of the candidate; only valid ones are tried. `program` itself must hold."""
    return loop.minimise(program, holds, _WAYS, seconds=seconds, stop=stop)


def _with(p: ServerScenario, i: int, *requests: AnyRequest) -> ServerScenario:
    return replace(p, requests=p.requests[:i] + requests + p.requests[i + 1 :])


def _each(p: ServerScenario, change: Change) -> ServerScenario:
    """Every request changed, also those at the same time as others."""

    def changed(r: AnyRequest) -> AnyRequest:
        if isinstance(r, Together):
            return replace(r, asks=tuple(change(a) for a in r.asks))
        return change(r)

    return replace(p, requests=tuple(changed(r) for r in p.requests))


def _singles(p: ServerScenario) -> list[AnyRequest]:
    """Every request, those at the same time one by one."""
    return [a for r in p.requests for a in (asks_of(r) or (r,))]


# --- what happens


def _together(p: ServerScenario) -> Iterator[ServerScenario]:
    """Requests at the same time: fewer of them, or one after the other."""
    for i, r in enumerate(p.requests):
        if not isinstance(r, Together):
            continue
        yield from (_with(p, i, ask) for ask in r.asks)
        if len(r.asks) > 1:
            yield _with(p, i, *r.asks)
            for j in range(len(r.asks)):
                yield _with(p, i, replace(r, asks=r.asks[:j] + r.asks[j + 1 :]))


def _folded(p: ServerScenario) -> Iterator[ServerScenario]:
    """A turn left out, and its tokens in the next turn that goes on from it, whose prompt stays as long."""
    book = Book(whole=True, size=p.flags.slot_ctx)
    for i, r in enumerate(p.requests):
        before = book.kept(r) if isinstance(r, Turn) else 0
        book.apply(r)
        j = _next(p, i) if isinstance(r, Turn) else None
        if not isinstance(r, Turn) or j is None:
            continue
        later = p.requests[j]
        if not isinstance(later, Turn) or _source(later) != r.conv:
            continue
        kept = book.kept(later)
        shared = min(before, kept)
        longer = replace(
            later,
            base=_source(r) if shared and _source(r) != later.conv else None,
            keep=Cut("start", shared) if shared < before else r.keep,
            n=later.n + kept - shared,
            stream=r.stream,
        )
        yield replace(p, requests=(*p.requests[:i], *p.requests[i + 1 : j], longer, *p.requests[j + 1 :]))


def _source(t: Turn) -> int:
    """The conversation that a turn goes on from."""
    return t.conv if t.base is None else t.base


def _next(p: ServerScenario, i: int) -> int | None:
    """The next request that reads, or replaces, the conversation of turn `i`."""
    mine = p.requests[i]
    assert isinstance(mine, Turn)
    for j in range(i + 1, len(p.requests)):
        if any(isinstance(a, Turn) and mine.conv in (a.conv, _source(a)) for a in asks_of(p.requests[j])):
            return j
    return None


# --- flags and driver


def _flags(p: ServerScenario) -> Iterator[ServerScenario]:
    """Default flags, then one by one; what belongs together goes together."""
    f = p.flags
    if f == _PLAIN:
        return
    yield _fewer_slots(replace(p, flags=_PLAIN))
    for group in (
        ("parallel", "ctx", "kv_unified"), ("kv_unified", "ctx"), ("cache_ram", "idle_slots"), ("batch", "ubatch"),
        ("checkpoints", "spacing"), ("flash_attn", "type_k", "type_v"), ("type_k", "type_v"),
        *((name,) for name in Flags.__struct_fields__),
    ):  # fmt: skip
        plain = replace(f, **{name: getattr(_PLAIN, name) for name in group})
        if plain != f:
            yield _fewer_slots(replace(p, flags=plain))
    for k in numbers(f.parallel):
        fewer = replace(f, parallel=k)
        yield _fewer_slots(replace(p, flags=fewer))
        yield _fewer_slots(replace(p, flags=replace(fewer, ctx=PAD * max(k, 2))))
    for name in ("checkpoints", "spacing", "cache_ram"):
        yield from (replace(p, flags=replace(f, **{name: k})) for k in numbers(getattr(f, name)))


def _fewer_slots(p: ServerScenario) -> ServerScenario:
    """With requests of slots that are not there any more moved to others."""
    n = p.flags.parallel

    def change(r: AnyRequest) -> AnyRequest:
        match r:
            case Turn() | Chat() if r.slot >= n:
                return replace(r, slot=-1)
            case SaveSlot() | RestoreSlot() | EraseSlot() if r.slot >= n:
                return replace(r, slot=n - 1)
            case _:
                return r

    return _each(p, change)


def _driver(p: ServerScenario) -> Iterator[ServerScenario]:
    """No driver, or a simpler one."""
    if p.driver is None:
        return
    yield replace(p, driver=None)
    yield from (replace(p, driver=d) for d in loop.drivers(p.driver))


# --- names


def _names(p: ServerScenario) -> Iterator[ServerScenario]:
    """Conversations, chats, streams, files and slots with lower numbers, everywhere at once."""
    singles = _singles(p)
    turns = [r for r in singles if isinstance(r, Turn)]
    used: dict[str, set[int]] = {
        "conv": {c for t in turns for c in (t.conv, _source(t))},
        "chat": {r.conv for r in singles if isinstance(r, Chat)},
        "stream": {r.stream for r in singles if isinstance(r, Turn | Chat)},
        "file": {r.file for r in singles if isinstance(r, SaveSlot | RestoreSlot | DamageFile)},
        "slot": {r.slot for r in singles if isinstance(r, Turn | Chat | SaveSlot | RestoreSlot | EraseSlot)} - {-1},
    }
    for what, numbers_ in used.items():
        for low, number in enumerate(sorted(numbers_)):
            if number > low:
                yield _each(p, _renaming(what, {number: low, low: number}))
    if any(isinstance(r, Turn | Chat) and r.slot >= 0 for r in singles):
        yield _each(p, lambda r: replace(r, slot=-1) if isinstance(r, Turn | Chat) else r)
    if any(isinstance(r, Turn) and r.stream for r in singles):
        yield _each(p, lambda r: replace(r, stream=0) if isinstance(r, Turn) else r)


def _renaming(what: str, to: dict[int, int]) -> Change:
    """What gives one kind of number other values."""

    def new(n: int) -> int:
        return to.get(n, n)

    def change(r: AnyRequest) -> AnyRequest:
        match what, r:
            case "conv", Turn():
                return replace(r, conv=new(r.conv), base=None if r.base is None else new(r.base))
            case "chat", Chat():
                return replace(r, conv=new(r.conv))
            case "stream", Turn() | Chat():
                return replace(r, stream=new(r.stream))
            case "file", SaveSlot() | RestoreSlot():
                return replace(r, file=new(r.file))
            case "file", DamageFile():
                edits = tuple(replace(e, value=new(e.value)) if e.how == "take" else e for e in r.edits)
                return replace(r, file=new(r.file), edits=edits)
            case "slot", Turn() | Chat() | SaveSlot() | RestoreSlot() | EraseSlot():
                return replace(r, slot=new(r.slot))
            case _:
                return r

    return change


# --- lengths


def _shorter(p: ServerScenario) -> Iterator[ServerScenario]:
    """A turn shorter by some tokens, and with it the places in later turns that count from the start: what they have
    in common stays as it was. And all answers shorter."""
    for i, r in enumerate(p.requests):
        if not isinstance(r, Turn):
            continue
        for k in (r.n // 2, r.n // 4, 8, 1):
            later = replace(p, requests=p.requests[i + 1 :])
            moved = _each(later, _nearer(k))
            if 0 < k < r.n and moved != later:
                yield replace(p, requests=(*p.requests[:i], replace(r, n=r.n - k), *moved.requests))
    answers = [ask.predict for _, ask in asked(p)]
    for k in numbers(max(answers, default=0)):
        yield _each(p, _at_most(k))


def _nearer(k: int) -> Change:
    def change(r: AnyRequest) -> AnyRequest:
        if isinstance(r, Turn) and r.keep.at == "start" and r.keep.d > k:
            return replace(r, keep=Cut("start", r.keep.d - k))
        return r

    return change


def _at_most(k: int) -> Change:
    def change(r: AnyRequest) -> AnyRequest:
        return replace(r, predict=min(r.predict, k)) if isinstance(r, Turn | Chat) else r

    return change


def _requests(p: ServerScenario) -> Iterator[ServerScenario]:
    """Each request made simpler."""
    for i, r in enumerate(p.requests):
        match r:
            case Together():
                for j, ask in enumerate(r.asks):
                    yield from (_with(p, i, replace(r, asks=(*r.asks[:j], a, *r.asks[j + 1 :]))) for a in _simpler(ask))
            case Turn() | Chat():
                yield from (_with(p, i, a) for a in _simpler(r))
            case SaveSlot() | RestoreSlot() | EraseSlot() if r.slot:
                yield _with(p, i, replace(r, slot=0))
            case DamageFile():
                yield from (_with(p, i, replace(r, edits=edits)) for edits in simpler_edits(r.edits))
            case _:
                pass


def _simpler(ask: Ask) -> Iterator[Ask]:
    if ask.cancel is not None:
        yield replace(ask, cancel=None)
        yield from (replace(ask, cancel=k) for k in numbers(ask.cancel, 0))
    if ask.slot > 0:
        yield replace(ask, slot=0)
    if ask.slot >= 0:
        yield replace(ask, slot=-1)
    if ask.stream:
        yield replace(ask, stream=0)
    yield from (replace(ask, predict=k) for k in numbers(ask.predict))
    if isinstance(ask, Chat):
        if ask.keep >= 0:
            yield replace(ask, keep=-1)
            yield from (replace(ask, keep=k) for k in numbers(ask.keep, 0))
        yield from (replace(ask, words=k) for k in numbers(ask.words))
        return
    if not ask.cache:
        yield replace(ask, cache=True)
    if ask.base is not None:
        yield replace(ask, base=None)
    yield from (replace(ask, keep=keep) for keep in _simpler_cut(ask.keep))
    yield from (replace(ask, n=k) for k in numbers(ask.n, 0))


def _simpler_cut(cut: Cut) -> Iterator[Cut]:
    """Nothing kept, or all, or the last prompt, in this order; then nearer to where it counts from."""
    for plain in (Cut("start"), Cut(), Cut("prompt")):
        if plain == cut:
            return
        yield plain
    yield replace(cut, d=0)
    yield from (replace(cut, d=k if cut.d > 0 else -k) for k in numbers(abs(cut.d)))


_WAYS: Ways[ServerScenario] = Ways(
    fits=lambda p: not valid(p),
    count=lambda p: len(p.requests),
    without=lambda p, i, j: replace(p, requests=p.requests[:i] + p.requests[j:]),
    candidates=(_together, _folded, _flags, _driver, _names, _shorter, _requests),
)
