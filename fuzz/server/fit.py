"""What a program for llama-server must keep to, so that its requests mean something; and how long its prompts are.

How long an answer is shows only when the program runs: a `Book` counts all answers whole, or all empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from subjects.pairs import states_kept
from subjects.scenario import DriverParams
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
)

PAD = 256
"""llama.cpp makes every slot's context a multiple of this, whatever is asked"""
_QUANTISED = ("q8_0", "q4_0")


def crowded(flags: Flags, driver: DriverParams | None, rollback: bool) -> bool:
    """Whether the server dies of its first batch: llama_batch_allocr::split_equal asserts that a micro-batch holds more
    than the states to keep."""
    kept = states_kept(driver.kind, driver.n_max, rollback) if driver else 0
    return kept > 0 and min(flags.ubatch, flags.batch) <= kept + 1


class Talk(NamedTuple):
    """A conversation: tokens of its last prompt, and with the answer."""

    prompt: int = 0
    end: int = 0


@dataclass
class Book:
    """What a client has after the requests so far. whole: answers have all the tokens that were asked for; otherwise
    they have none. size: of a slot; a prompt that fills it is refused, and its conversation stays what it was.
    """

    whole: bool
    size: int
    talks: dict[int, Talk] = field(default_factory=dict)
    chats: dict[int, int] = field(default_factory=dict)
    """messages of each chat"""
    files: set[int] = field(default_factory=set)

    def kept(self, turn: Turn) -> int:
        """Tokens of the conversation that a turn keeps."""
        return self.at(turn.conv if turn.base is None else turn.base, turn.keep)

    def at(self, conv: int, cut: Cut) -> int:
        """The place of a cut in a conversation."""
        talk = self.talks.get(conv, Talk())
        place = {"start": 0, "prompt": talk.prompt, "end": talk.end}[cut.at] + cut.d
        return max(0, min(place, talk.end))

    def prompt(self, turn: Turn) -> int:
        """Tokens of a turn's prompt."""
        return self.kept(turn) + turn.n

    def apply(self, request: AnyRequest) -> None:
        """The request is answered."""
        match request:
            case Turn():
                n = self.prompt(request)
                if n >= self.size:
                    return
                answer = request.predict if request.cancel is None else min(request.cancel, request.predict)
                self.talks[request.conv] = Talk(n, n + answer if self.whole else n)
            case Chat():
                had = self.chats.get(request.conv, 0)
                self.chats[request.conv] = (had if request.keep < 0 else min(request.keep, had)) + 2
            case Together():
                # every prompt is made before the first one is sent
                before = Book(self.whole, self.size, dict(self.talks), dict(self.chats))
                for ask in request.asks:
                    alone = Book(self.whole, self.size, dict(before.talks), dict(before.chats))
                    alone.apply(ask)
                    if isinstance(ask, Chat):
                        self.chats[ask.conv] = alone.chats[ask.conv]
                    elif ask.conv in alone.talks:
                        self.talks[ask.conv] = alone.talks[ask.conv]
            case SaveSlot():
                self.files.add(request.file)
            case _:
                pass


def valid(program: ServerScenario) -> list[str]:
    """What is wrong with a program, each with where it is and what to do; empty where nothing is."""
    found = [*_flags(program.flags), *(_driver(program.driver) if program.driver else ())]
    if not program.requests:
        found.append("requests: there are none; a program has at least one")
    book = Book(whole=False, size=program.flags.slot_ctx if program.flags.parallel > 0 else 0)
    for i, request in enumerate(program.requests):
        name = str(request.__struct_config__.tag)
        found += [f"request {i} ({name}): {text}" for text in broken(book, request, program.flags)]
        book.apply(request)
    return found


MOST = 1 << 20
"""tokens, words and most else: more would only keep the client busy"""


def _flags(f: Flags) -> Iterator[str]:
    for name, n, least in (
        ("parallel", f.parallel, 1), ("ctx", f.ctx, 1), ("ubatch", f.ubatch, 1), ("checkpoints", f.checkpoints, 0),
        ("spacing", f.spacing, 0), ("cache_ram", f.cache_ram, 0), ("similarity", f.similarity, 0),
    ):  # fmt: skip
        if not least <= n <= MOST:
            yield f"flags.{name} is {n}; it is at least {least} and at most {MOST:,}"
    if f.ubatch > f.batch:
        yield f"flags.ubatch is {f.ubatch}, more than flags.batch ({f.batch}); make it at most that"
    if f.similarity > 100:
        yield f"flags.similarity is {f.similarity}; it is in hundredths, at most 100"
    slots = 1 if f.kv_unified else max(f.parallel, 1)
    if f.ctx > 0 and f.ctx % (PAD * slots):
        yield (
            f"flags.ctx is {f.ctx}; llama.cpp rounds up what each slot gets to a multiple of {PAD}: say "
            f"{-(-f.ctx // (PAD * slots)) * PAD * slots}"
        )
    if f.type_v in _QUANTISED and not f.flash_attn:
        yield f"flags.type_v {f.type_v} needs flags.flash_attn, without it the server does not start"
    if f.idle_slots and not f.cache_ram:
        yield "flags.idle_slots needs flags.cache_ram: the server saves idle slots there"


def _driver(d: DriverParams) -> Iterator[str]:
    if d.impl != "native":
        yield f"driver.impl {d.impl}: llama-server has its own, say native"
    if d.late or not d.state:
        yield "driver.late and driver.state are the server's to choose; leave them out"
    if d.n_max < 1 or not 0 <= d.n_min <= d.n_max:
        yield f"driver.n_max is {d.n_max} and n_min {d.n_min}; n_max is at least 1, and n_min between 0 and n_max"
    if d.kind in ("draft-simple", "draft-eagle3") and d.draft is None:
        yield f"driver.kind {d.kind} needs driver.draft, the draft's model"


def broken(book: Book, request: AnyRequest, flags: Flags) -> list[str]:
    """What is wrong with a request behind those that are in the book (which counts answers as empty)."""
    match request:
        case Turn():
            return [*_turn(book, request), *_slot(request.slot, flags, -1)]
        case Chat():
            return [*_chat(book, request), *_slot(request.slot, flags, -1)]
        case Together():
            return list(_together(book, request, flags))
        case SaveSlot():
            return [*_file(request.file), *_slot(request.slot, flags, 0)]
        case RestoreSlot():
            return [*_file(request.file), *_slot(request.slot, flags, 0)]
        case EraseSlot():
            return list(_slot(request.slot, flags, 0))
        case DamageFile():
            return list(_damage(book, request))
        case _:
            return []


def _asked(predict: int, stream: int, cancel: int | None) -> Iterator[str]:
    if not 1 <= predict <= MOST:
        yield f"predict is {predict}; ask for at least one token, or nothing can be judged, and at most {MOST:,}"
    if stream < 0:
        yield f"stream is {stream}; streams are numbered from 0"
    if cancel is not None and not 0 <= cancel < max(predict, 1):
        yield f"cancel is {cancel}; it is less than predict ({predict}), or leave it out"


def _turn(book: Book, t: Turn) -> Iterator[str]:
    if t.conv < 0 or (t.base is not None and t.base < 0):
        yield "conversations are numbered from 0"
    if t.n > MOST:
        yield f"n is {t.n}; it is at most {MOST:,}"
    if t.n < 0:
        yield f"n is {t.n}; to shorten, say keep with a negative d and n 0"
    if (t.keep.at == "start" and t.keep.d < 0) or (t.keep.at == "end" and t.keep.d > 0):
        yield f"keep {t.keep.at} {t.keep.d:+d} is outside of the conversation"
    yield from _asked(t.predict, t.stream, t.cancel)
    if t.n == 0 and book.kept(t) < 1:
        of = t.conv if t.base is None else t.base
        yield f"the prompt is empty: nothing is sure to be kept of conversation {of}, and n is 0; make n at least 1"


def _chat(book: Book, c: Chat) -> Iterator[str]:
    had = book.chats.get(c.conv, 0)
    if c.conv < 0:
        yield "chats are numbered from 0"
    if not 1 <= c.words <= MOST:
        yield f"words is {c.words}; a message has at least one, and at most {MOST:,}"
    if not -1 <= c.keep <= had:
        yield f"keep is {c.keep}; chat {c.conv} has {had} messages, and -1 keeps all"
    yield from _asked(c.predict, c.stream, c.cancel)


def _together(book: Book, t: Together, flags: Flags) -> Iterator[str]:
    if not t.asks:
        yield "asks is empty; name at least one"
    for kind in (Turn, Chat):
        convs = [a.conv for a in t.asks if isinstance(a, kind)]
        twice = sorted({c for c in convs if convs.count(c) > 1})
        if twice:
            yield f"{kind.__name__.lower()} {twice[0]} is asked twice at the same time; give each its own conv"
    for j, ask in enumerate(t.asks):
        yield from (f"asks[{j}]: {text}" for text in broken(book, ask, flags))


def _slot(slot: int, flags: Flags, least: int) -> Iterator[str]:
    if not least <= slot < flags.parallel:
        any_ = ", or -1 for any" if least < 0 else ""
        yield f"slot is {slot}; the server has slots 0 to {flags.parallel - 1} (flags.parallel){any_}"


def _file(file: int) -> Iterator[str]:
    if file < 0:
        yield f"file is {file}; files are numbered from 0"


def _damage(book: Book, d: DamageFile) -> Iterator[str]:
    if d.file not in book.files:
        yield f"file {d.file} was not saved before; put a save_slot in front"
    if not d.edits:
        yield "edits is empty; name at least one"
    for e in d.edits:
        if e.how == "take" and e.value not in book.files:
            yield f"an edit takes from file {e.value}, which was not saved before"
