"""Programs for llama-server: conversations that come back, at the lengths that the server's arithmetic makes special.

Like the library's programs (`fuzz.strategies`) they are walks of weighted moves over what a client knows (`Book`); a
move never filters, and `push` has the last word.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzz.damage import Below, draw_edits
from fuzz.models import Model
from fuzz.server.fit import Book, broken
from fuzz.server.flags import draw_driver, draw_flags
from fuzz.traits import Traits
from fuzz.walk import drawn
from subjects.scenario import DriverParams
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
    asks_of,
)

Setting = tuple[Flags, DriverParams | None]
replace = msgspec.structs.replace
_RANDOM = st.randoms(use_true_random=False)

LONG = 120
"""tokens that a conversation mostly stays below, so that the cold server is quick"""
BACK = 4
"""server-context.cpp checkpoint_offsets: a checkpoint so many tokens before a prompt ends, and a micro-batch more"""
MAX_REQUESTS = 24
PREDICT = (6, 8, 4, 1, 2, 12, 3, 16)
_CONVS = 4
_FILES = 3
# weight of a kind of move in a program, by two bits of the swarm draw; for 0, the simplest, all kinds are there
_SWARM = (2, 0, 1, 5)
# how likely a program ends before its next move, in 1/64, by the number of requests it has
_STOP = (0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20)
_ALL, _AGAIN, _NONE = Cut(), Cut("prompt"), Cut("start")


def offsets(flags: Flags) -> tuple[int, ...]:
    """Where the server ends a batch before the end of a prompt, and makes a checkpoint, in tokens from the end."""
    return tuple(min(flags.batch, k) for k in (BACK, BACK + flags.ubatch))


def lengths(flags: Flags, traits: Traits) -> tuple[int, ...]:
    """Lengths of a prompt that are special by themselves: what one batch or micro-batch takes, where the first
    checkpoint can be, and the sliding window; each with its neighbours."""
    at = [*offsets(flags), flags.ubatch, flags.batch, 2 * flags.ubatch, flags.batch + BACK, flags.batch + flags.ubatch]
    if traits.window:
        at += [traits.window, traits.window + BACK, traits.window + flags.ubatch]
    near = [k + d for k in dict.fromkeys(at) for d in (0, 1, -1)]
    return tuple(dict.fromkeys(k for k in near if 0 < k <= LONG))


class Cuts(NamedTuple):
    """Places in a conversation that are special whatever its length."""

    checkpoints: tuple[Cut, ...]
    """where the server can put back a checkpoint of the last prompt, and beside it: one whose last position is the
    place itself still counts"""
    ends: tuple[Cut, ...]
    """the end of the prompt, and of the answer"""
    behind: tuple[Cut, ...]
    """a window, or the spacing of checkpoints, behind"""


def cuts(flags: Flags, traits: Traits) -> Cuts:
    """The special places, exact ones more often than those beside."""
    at = [Cut("prompt", -k + d) for k in offsets(flags) for d in (0, 0, 0, -1, -2, 1)]
    ends = [Cut("prompt", d) for d in (0, -1, 1, -2, 2)] + [Cut("end", -1), Cut("end", -2)]
    behind = [Cut("prompt", -flags.spacing - BACK + d) for d in (0, -1, 1) if flags.spacing]
    windows: tuple[Literal["end", "prompt"], ...] = ("end", "prompt")
    behind += [Cut(end, -traits.window + d) for end in windows for d in (0, -1, 1) if traits.window]
    return Cuts(tuple(at), tuple(ends), tuple(behind or at))


class Gen:
    """A program under construction. `below(n)` draws an integer in [0, n), the simplest first."""

    def __init__(self, below: Below, flags: Flags, traits: Traits, pins: bool = False) -> None:
        self.below, self.flags, self.traits = below, flags, traits
        self.pins = pins
        self.requests: list[AnyRequest] = []
        self.book, self.least = Book(True, flags.slot_ctx), Book(False, flags.slot_ctx)
        self.marks: dict[int, list[int]] = {}
        """lengths that a conversation had, each a prompt that may come back"""
        self.lengths, self.cuts = lengths(flags, traits), cuts(flags, traits)
        self._streams = 0

    def push(self, request: AnyRequest) -> bool:
        """Append the request if it means something, and there is room for it."""
        if len(self.requests) >= MAX_REQUESTS or broken(self.least, request, self.flags):
            return False
        for book in (self.book, self.least):
            book.apply(request)
        for t in asks_of(request):
            if isinstance(t, Turn) and t.conv in self.book.talks:
                self.marks[t.conv] = [*self.marks.get(t.conv, [])[-3:], self.book.talks[t.conv].prompt]
        self.requests.append(request)
        return True

    # --- draws

    def one_of(self, choices: Sequence[int]) -> int:
        """One of a non-empty list."""
        return choices[self.below(len(choices))]

    def live(self) -> int:
        """A conversation that says something, the newest first; one is begun where there is none."""
        if not self.book.talks:
            self.m_begin()
        last = next((r.conv for r in reversed(self.requests) if isinstance(r, Turn)), 0)
        others = [c for c in self.book.talks if c != last]
        # nearly always there is a last one; it is what the server has at hand
        return self.one_of([last, last, last, *others]) if last in self.book.talks else self.one_of(others)

    def fresh(self) -> int:
        """A conversation of its own as long as there are some, then any."""
        return next((c for c in range(_CONVS) if c not in self.book.talks), self.below(_CONVS))

    def stream(self) -> int:
        """A stream that was not used yet: tokens that no prompt has shared."""
        self._streams += 1
        return self._streams

    def slot(self) -> int:
        """A slot by number."""
        return self.below(self.flags.parallel)

    def pinned(self, conv: int) -> int:
        """The slot to ask for: mostly the server chooses."""
        if not self.pins or self.below(4) == 3:
            return -1
        return conv % self.flags.parallel if self.below(4) else self.slot()

    def length(self) -> int:
        """Tokens of a whole prompt."""
        match self.below(8):
            case 0:
                return 1 + self.below(12)
            case 1:
                return 20 + self.below(40)
            case _:
                return self.one_of(self.lengths)

    def more(self) -> int:
        """Tokens that go on behind a conversation."""
        own = [1, 2, BACK, BACK + 1, BACK - 1, *offsets(self.flags), self.flags.ubatch, self.flags.ubatch + 1]
        return self.one_of(own) if self.below(4) else 1 + self.below(24)

    def cut(self, conv: int) -> Cut:
        """A place in a conversation at which an edit, or a shorter prompt, parts from it."""
        talk, marks = self.book.talks[conv], self.marks.get(conv, [])
        match self.below(12):
            case 0:
                return Cut("start", 1 + self.below(max(talk.prompt, 1)))
            case 1:  # half of it lost, or more: the prompt cache comes in; a quarter: it does not
                part = talk.end // (2 if self.below(2) else 4)
                return Cut("start", max(1, part + (0, 1, -1)[self.below(3)]))
            case 2 if marks:  # where an earlier prompt ended, or had its checkpoints
                at = self.one_of(marks) - (0, *offsets(self.flags))[self.below(3)] + (0, 0, 1, -1)[self.below(4)]
                return Cut("start", max(1, at))
            case 3 | 4:
                return self.cuts.ends[self.below(len(self.cuts.ends))]
            case 5 | 6:
                return self.cuts.behind[self.below(len(self.cuts.behind))]
            case _:
                return self.cuts.checkpoints[self.below(len(self.cuts.checkpoints))]

    def turn(
        self, conv: int, keep: Cut, n: int, *, base: int | None = None, stream: int | None = None, tight: bool = True
    ) -> Turn:
        """A turn that fits into a slot, with a small answer; a conversation that became long begins anew."""
        predict = PREDICT[self.below(len(PREDICT))]
        t = Turn(conv=conv, base=base, keep=keep, n=n, predict=predict, slot=self.pinned(conv))
        t = replace(t, stream=self.stream() if stream is None else stream, cache=self.below(24) != 23)
        most = min(LONG, self.flags.slot_ctx - 1 - predict)
        if tight and self.book.prompt(t) > most:
            room = most - self.book.kept(t)
            t = replace(t, n=room) if room > 0 else replace(t, base=None, keep=_NONE, n=min(max(n, 1), most))
        # nothing is sure to be left of what answers alone made
        return replace(t, n=max(t.n, 1)) if self.least.kept(t) < 1 else t

    def say(self, conv: int, keep: Cut, n: int, *, base: int | None = None, stream: int | None = None) -> bool:
        """One turn; seldom the client goes away in the middle."""
        t = self.turn(conv, keep, n, base=base, stream=stream)
        if self.below(32) == 31:
            t = replace(t, cancel=self.below(t.predict))
        return self.push(t)

    # --- moves of conversations

    def m_begin(self) -> None:
        """A new conversation, sometimes with the beginning of another one."""
        self.say(self.fresh(), _NONE, self.length(), stream=self.below(2) if self.below(3) == 2 else None)

    def m_append(self) -> None:
        """The conversation goes on, behind the answer."""
        conv = self.live()
        for _ in range(1 + self.below(2)):
            self.say(conv, _ALL, self.more())

    def m_edit(self) -> None:
        """An earlier turn is edited: the prompt parts from what the slot holds."""
        conv = self.live()
        self.say(conv, self.cut(conv), self.more())

    def m_shorten(self) -> None:
        """A beginning of what the slot holds, and nothing behind it."""
        conv = self.live()
        self.say(conv, self.cut(conv), 0)

    def m_repeat(self) -> None:
        """The same prompt exactly, once or twice, or a token less or more, or with its whole answer."""
        conv = self.live()
        for _ in range(1 + (self.below(4) == 3)):
            self.say(conv, (_AGAIN, _AGAIN, _AGAIN, _ALL, Cut("prompt", -1), Cut("prompt", 1))[self.below(6)], 0)

    def m_branch(self) -> None:
        """Another conversation that begins as this one."""
        base = self.live()
        conv = self.fresh()
        if self.say(conv, self.cut(base), self.more() if self.below(3) else 0, base=base) and self.below(2):
            self.say(base, _ALL, self.more())

    def m_return(self) -> None:
        """The conversation, an unrelated one in its slot, and the conversation again."""
        conv = self.live()
        for _ in range(1 + self.below(2)):
            other = self.fresh()
            if other == conv:
                other = (conv + 1) % _CONVS
            self.say(other, _NONE, self.length())
        if conv not in self.book.talks:
            return
        match self.below(4):
            case 0:
                self.say(conv, _AGAIN, 0)
            case 1:
                self.say(conv, self.cut(conv), self.more())
            case _:
                self.say(conv, _ALL, self.more())

    def m_grow(self) -> None:
        """Turns one after another, and then an early prompt again."""
        conv = self.live()
        first = self.book.talks[conv].prompt
        for _ in range(2 + self.below(2)):
            self.say(conv, _ALL, self.more())
        back = first + (0, 0, 1, -1, -BACK)[self.below(5)]
        self.say(conv, Cut("start", max(1, back)), self.more() if self.below(2) else 0)

    def m_alike(self) -> None:
        """A prompt as like another as the server's thresholds ask for, a token more or less: a tenth of the new prompt
        for the slot to be taken, a half of the old one for it not to be saved, a quarter for it to be found again."""
        base = self.live()
        end, off = self.book.talks[base].end, (0, 1, -1)[self.below(3)]
        match self.below(3):
            case 0:
                sim = max(self.flags.similarity, 1)
                shared = 1 + self.below(max(min(LONG * sim // 100, end), 1))
                whole = min(shared * 100 // sim + off, LONG)
            case 1:
                shared = max(1, end // 2 + off)
                whole = shared + self.more()
            case _:
                shared = max(1, end // 4 + off)
                whole = shared + self.more()
        conv = base if self.below(2) else self.fresh()
        self.say(conv, Cut("start", shared), max(1, whole - shared), base=None if conv == base else base)

    def m_brim(self) -> None:
        """A prompt as long as the slot, or nearly; one that is longer is answered as an error."""
        conv = self.live()
        size = self.flags.slot_ctx
        predict = PREDICT[self.below(len(PREDICT))]
        # what fits with its answer, what only just does not, and the limit itself
        whole = size - (predict + 1, predict + 2, predict, 2, 1, 0, -1)[self.below(7)]
        keep = _ALL if self.below(2) and self.book.talks[conv].end < whole else _NONE
        t = self.turn(conv, keep, 1, tight=False)
        self.push(replace(t, n=max(1, whole - self.book.kept(t)), predict=predict))
        # and on with less: what a refused prompt leaves behind
        self.say(conv, Cut("start", 8 + self.below(40)), self.more())

    def m_cancel(self) -> None:
        """The client goes away in mid-stream and comes back."""
        conv = self.live()
        t = self.turn(conv, (_ALL, _AGAIN, self.cut(conv))[self.below(3)], self.more())
        predict = max(t.predict, 4)
        if self.push(replace(t, predict=predict, cancel=self.below(predict))):
            _ = self.say(conv, _AGAIN, 0) if self.below(2) else self.say(conv, _ALL, self.more())

    def m_together(self) -> None:
        """Several at once, on as many slots or on fewer."""
        count = 2 + self.below(min(self.flags.parallel + 1, _CONVS - 1))
        first = self.live()
        convs = [first, *(c for c in range(_CONVS) if c != first)][:count]
        asks: list[Turn | Chat] = []
        share = self.flags.ctx // (2 * count) if self.flags.kv_unified else self.flags.slot_ctx
        for c in convs:
            if c not in self.book.talks:
                n = self.length() if self.below(2) else 1 + self.below(16)
                t = self.turn(c, _NONE, n, stream=0 if self.below(3) == 2 else None)
            else:
                at, n = ((_ALL, self.more()), (_AGAIN, 0), (self.cut(c), self.more()))[self.below(3)]
                t = self.turn(c, at, n)
            if self.book.prompt(t) + t.predict >= share:  # slots of one cache share its cells
                t = replace(t, base=None, keep=_NONE, n=1 + self.below(16))
            if self.below(12) == 11:
                t = replace(t, cancel=self.below(t.predict))
            asks.append(t)
        if self.below(6) == 5:
            asks[-1] = self.message(self.below(2))
        self.push(Together(tuple(asks)))

    # --- moves of slots and files

    def m_save(self) -> None:
        """A slot saved, other work, the slot restored, and the conversation goes on with another tail."""
        conv = self.live()
        slot, file = self.slot(), self.below(_FILES)
        if not self.push(SaveSlot(slot, file)):
            return
        self.pollute(conv)
        to = slot if self.below(3) else self.slot()
        if self.below(3) == 2:
            self.push(EraseSlot(to))
        if self.push(RestoreSlot(to, file)):
            self.resume(conv, to)

    def m_restore(self) -> None:
        """Any file into any slot, or one that is not there."""
        conv = self.live()
        files = sorted(self.book.files)
        file = self.one_of(files) if files and self.below(3) else self.below(_FILES + 1)
        slot = self.slot()
        if self.push(RestoreSlot(slot, file)):
            self.resume(conv, slot)

    def m_missing(self) -> None:
        """A file that is not there: the slot holds a conversation, which goes on."""
        conv, slot = self.live(), self.slot()
        if self.push(RestoreSlot(slot, _FILES + 6)):
            self.resume(conv, slot)

    def m_erase(self) -> None:
        """A slot is emptied, and its conversation goes on."""
        conv, slot = self.live(), self.slot()
        if self.push(EraseSlot(slot)):
            self.resume(conv, slot)

    def m_damage(self) -> None:
        """A saved file is damaged and restored; the slot must still be good for something."""
        conv = self.live()
        slot, file = self.slot(), self.below(_FILES)
        if not self.push(SaveSlot(slot, file)):
            return
        if self.below(3) == 2:
            self.pollute(conv)
        others = sorted(self.book.files - {file})
        edits = draw_edits(self.below, self.traits, whole=False, medium="file", others=others)
        self.push(DamageFile(file, edits))
        to = slot if self.below(3) else self.slot()
        if self.push(RestoreSlot(to, file)):
            self.resume(conv, to)

    def m_restart(self) -> None:
        """The server ends, starts again, and a slot comes back from its file."""
        conv = self.live()
        slot, file = self.slot(), self.below(_FILES)
        saved = self.below(4) and self.push(SaveSlot(slot, file))
        if self.push(Restart()):
            if saved:
                self.push(RestoreSlot(slot if self.below(4) else self.slot(), file))
            self.resume(conv, slot)

    def pollute(self, conv: int) -> None:
        """Other work, in this conversation or an unrelated one."""
        for _ in range(self.below(3)):
            if self.below(2):
                self.say(conv, self.cut(conv), self.more())
            else:
                other = next(c for c in (self.fresh(), (conv + 1) % _CONVS) if c != conv)
                self.say(other, _NONE, self.length())

    def resume(self, conv: int, slot: int) -> None:
        """The conversation after something happened to a slot: sometimes in that slot."""
        cut, n = ((_ALL, self.more()), (_AGAIN, 0), (_AGAIN, self.more()), (self.cut(conv), self.more()))[self.below(4)]
        t = self.turn(conv, cut, n)
        self.push(replace(t, slot=slot) if self.below(3) == 2 else t)

    # --- chats

    def message(self, conv: int) -> Chat:
        """A message of a chat: it goes on, is edited, or begins anew."""
        had = self.book.chats.get(conv, 0)
        keep = -1
        if had and (self.below(3) == 2 or had > 6):
            keep = self.below(min(had, 5))
        words = (4, 1, 2, 8, 12, 3)[self.below(6)]
        return Chat(conv=conv, keep=keep, words=words, stream=self.below(4), predict=PREDICT[self.below(4)])

    def m_chat(self) -> None:
        """Messages of a chat, which the server cuts into checkpoints itself; another one comes between."""
        conv = self.below(2)
        for _ in range(1 + self.below(3)):
            c = self.message(conv)
            if self.below(16) == 15:
                c = replace(c, cancel=self.below(c.predict))
            self.push(c)
            if self.below(4) == 3:
                self.push(self.message(1 - conv))


MOVES: tuple[tuple[str, int], ...] = (
    ("append", 8), ("edit", 12), ("shorten", 6), ("repeat", 6), ("branch", 5), ("return", 7), ("grow", 6), ("alike", 5),
    ("begin", 3), ("together", 7), ("chat", 5), ("save", 4), ("cancel", 4), ("restore", 2), ("damage", 3), ("erase", 2),
    ("missing", 1), ("restart", 2), ("brim", 1),
)  # fmt: skip


@st.composite
def _programs(
    draw: Callable[..., random.Random], model: Model, settings: tuple[Setting, ...], max_requests: int
) -> ServerScenario:
    rnd = draw(_RANDOM)

    def below(n: int) -> int:
        return int(rnd.randrange(n)) if n > 1 else 0

    if settings:
        flags, driver = settings[below(len(settings))]
    else:
        driver = draw_driver(below, model.driver) if model.driver else None
        flags = draw_flags(below, model.traits, driver)
    gen = Gen(below, flags, model.traits, pins=below(4) == 3)
    gen.m_begin()
    weights = [(getattr(gen, f"m_{name}"), w * _SWARM[below(len(_SWARM))]) for name, w in MOVES]
    if not any(w for _, w in weights):
        weights = [(gen.m_edit, 1)]
    while len(gen.requests) < max_requests and (move := drawn(below, weights, _STOP, len(gen.requests))):
        move()
    return ServerScenario(model=model.ref, requests=tuple(gen.requests), flags=flags, driver=driver)


def programs(
    model: Model, settings: Sequence[Setting] = (), *, max_requests: int = 20
) -> SearchStrategy[ServerScenario]:
    """Programs for one model; all are valid (`fuzz.server.fit`).

    settings: flags and driver of a program are one of these (see `fuzz.server.flags.palette`); drawn for each program
    where there are none. A move may append a few requests, so that a program can be up to four longer than
    `max_requests`.
    """
    return _programs(model, tuple(settings), max_requests)
