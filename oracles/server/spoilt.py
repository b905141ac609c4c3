"""Which answers a known fault of llama-server may have spoilt, read off a run: whether a fault was at work is often
known from what the server did only, not from the program. An answer that is spoilt is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from subjects.server.dress import MARKERS
from subjects.server.scenario import DamageFile, EraseSlot, Restart, RestoreSlot, SaveSlot, ServerScenario, shared
from subjects.server.trace import Event, Reply, ServerTrace

Spoilt = frozenset[int]
"""numbers of requests"""
_Tokens = tuple[int | str, ...]
"""ids where the client knows them; of a chat, pieces of text and then the ids of the answer"""
_PIECE = 5  # llama.cpp's tokenizer for tests (see `subjects.server.dress`)


@dataclass
class _Slot:
    """What a slot, an entry of the prompt cache, or a file holds.

    tokens: as far as the client knows them; too few are safe. checkpoints: their lengths, and whether each holds what
    it says. bad: from which token on the content is not that of its tokens, None where it is. put: behind how many
    tokens a checkpoint of more was restored for the prompt at hand, -1 where none was.
    """

    tokens: _Tokens = ()
    checkpoints: dict[int, bool] = field(default_factory=dict)
    bad: int | None = None
    put: int = -1

    def copy(self) -> _Slot:
        return _Slot(self.tokens, dict(self.checkpoints), self.bad)


@dataclass(frozen=True)
class _Drafting:
    """What the draft's memory of a slot holds: that of `done` of these tokens (no more than the client knows), the
    positions `foreign` of which were made of something else."""

    tokens: _Tokens = ()
    done: int = 0
    foreign: frozenset[int] = frozenset()


_Held = TypeVar("_Held", _Slot, _Drafting)


def stale_checkpoint(program: ServerScenario, trace: ServerTrace) -> Spoilt:
    """The answers that go on from a checkpoint of more tokens than the prompt had in common with the slot, or from one
    that was left when that was so, and those behind them: server-context.cpp drops checkpoints with pos_max > pos_next,
    and one of pos_next + 1 tokens has pos_max pos_next."""
    return _Following(program, stale=True).all(trace)


def worn_checkpoint(program: ServerScenario, trace: ServerTrace) -> Spoilt:
    """The answers that go on from a checkpoint that was made where another one was restored, and those behind them: of
    a sliding window it lacks a position. server-context.cpp holds what a checkpoint has against where the prompt goes
    on, not against where the checkpoint will put it."""
    return _Following(program, stale=False).all(trace)


class _Following:
    """Follows which checkpoints do not hold what they say. stale: those of too many tokens; else the worn ones."""

    def __init__(self, program: ServerScenario, *, stale: bool):
        self.program, self.stale = program, stale
        self.slots: dict[int, _Slot] = {}
        self.cached: list[_Slot] = []
        self.files: dict[int, _Slot] = {}

    def all(self, trace: ServerTrace) -> Spoilt:
        found: set[int] = set()
        # of requests at the same time, as the server took them
        for reply in sorted(trace.replies, key=lambda r: (r.request, r.task)):
            request = self.program.requests[reply.request]
            match request:
                case Restart():
                    self.slots, self.cached = {}, []
                case SaveSlot(file=file) if reply.status == 200:
                    self.files[file] = self._slot(reply.slot).copy()
                case RestoreSlot(file=file) if reply.status == 200:
                    kept = self.files.get(file, _Slot())
                    self.slots[reply.slot] = _Slot(kept.tokens, {}, kept.bad)
                case SaveSlot():
                    pass
                case RestoreSlot() | EraseSlot():
                    self.slots.pop(reply.slot, None)
                case DamageFile():
                    pass
                case _ if reply.task >= 0:
                    if self._follow(reply):
                        found.add(reply.request)
                case _ if reply.status:
                    self._lost()
                case _:
                    pass
        return frozenset(found)

    def _slot(self, number: int) -> _Slot:
        return self.slots.setdefault(number, _Slot())

    def _lost(self) -> None:
        """Nobody knows which slot a request was for, and what was done there."""
        for slot in (*self.slots.values(), *self.cached):
            slot.tokens, slot.bad = (), 0

    def _follow(self, reply: Reply) -> bool:
        """Do to a slot what the events say; whether it is bad afterwards."""
        prompt = _prompt(self.program, reply)
        kept = next((e.n for e in reply.events if e.what == "kept"), 0)
        self._slot(reply.slot).put = -1
        for e in reply.events:
            if e.what == "loaded":
                self._load(self._slot(reply.slot), prompt, kept)
            else:
                self._event(self._slot(reply.slot), e, prompt)
        slot = self._slot(reply.slot)
        if reply.status == 200:
            slot.tokens = (*prompt, *reply.tokens)
        else:  # a prompt that is refused leaves the slot as it was, one that fails clears it
            slot.tokens = slot.tokens[: shared(slot.tokens, prompt)]
        return slot.bad is not None

    def _event(self, slot: _Slot, e: Event, prompt: _Tokens) -> None:
        common = shared(slot.tokens, prompt)
        # of a cache that all slots share, others may have taken the cell that is out of the next token's window
        others = self.program.flags.shared_cache
        match e.what:
            case "cached":
                # whose prompt is told by its length alone
                fit = [s for s in self.slots.values() if len(s.tokens) - e.n in (0, 1)]
                self.cached += [s.copy() for s in fit or self.slots.values()]
            case "cleared":  # any idle slot, too
                self.slots[e.slot] = _Slot()
            case "restored":
                slot.put = e.n if e.n < e.of else -1
                if (self.stale and e.of > common) or not slot.checkpoints.get(e.of, True):
                    slot.bad = min(common, e.n)
                elif slot.bad is not None and e.of <= slot.bad:
                    slot.bad = None
            case "erased":
                slot.checkpoints.pop(e.n, None)
            case "kept":
                if e.n == 0:
                    slot.bad = None
                if self.stale:
                    slot.checkpoints = {n: good and n <= common for n, good in slot.checkpoints.items()}
            case "checkpoint":
                worn = not self.stale and e.n - slot.put in ((0, 1) if others and slot.put >= 0 else (0,))
                slot.checkpoints[e.n] = slot.bad is None and not worn
            case _:
                pass

    def _load(self, slot: _Slot, prompt: _Tokens, kept: int) -> None:
        """One of the cached prompts that begin like this one; which one is not said. kept: tokens of it that are gone
        on from."""
        near = _near(self.cached, prompt, kept)
        slot.tokens = max((c.tokens for c in near), key=lambda t: shared(t, prompt), default=())
        slot.bad = min((c.bad for c in near if c.bad is not None), default=None)
        slot.checkpoints = {}
        for c in near:
            for n, good in c.checkpoints.items():
                slot.checkpoints[n] = good and slot.checkpoints.get(n, True)


def _prompt(program: ServerScenario, reply: Reply) -> _Tokens:
    """A prompt as its tokens, or what stands for each: two are equal only where the tokens are."""
    if not reply.messages or program.model.recipe is None:
        return reply.prompt
    out: list[str] = []
    for role, content in (*reply.messages, ("assistant", "")):
        marker = f"<|{role}|>"
        out.append(marker if marker in MARKERS else "")
        out += [content[i : i + _PIECE] for i in range(0, len(content), _PIECE)]
    return tuple(out)


def _near(cached: list[_Held], prompt: _Tokens, kept: int) -> list[_Held]:
    """Which of the cached prompts may be the one that was loaded for a prompt; `kept` tokens of it are gone on from."""
    # server-task.cpp takes none of which less than a quarter would be kept
    fit = [c for c in cached if (n := shared(c.tokens, prompt)) >= max(kept, 1) and 4 * n + 4 >= len(c.tokens)]
    return fit or [c for c in cached if not c.tokens or shared(c.tokens, prompt)] or cached


def foreign_row(program: ServerScenario, trace: ServerTrace) -> Spoilt:
    """The answers that draft-mtp or draft-eagle3 drafts with a position of its memory that was made of something else:
    the driver is told neither of tokens that are cut nor of a state that is loaded. The answers are right; drafts are
    lost, until the position is cut too."""
    driver = program.driver
    if driver is None or driver.kind not in ("draft-mtp", "draft-eagle3"):
        return frozenset()
    if driver.kind == "draft-mtp" and driver.draft is not None:
        # drafts out of the target's memory, behind a row that each prompt renews
        return frozenset()
    return _Rows(program, shifted=driver.kind == "draft-eagle3").all(trace)


_NOBODY_KNOWS = _Drafting(foreign=frozenset({0}))


class _Rows:
    """Follows which positions of the draft's memory are made of something else.

    draft-mtp makes position p of token p and the hidden row of p - 1: where a prompt goes on behind p tokens, of the
    row that the slot carries, whatever it is of. shifted: draft-eagle3 makes p of the row of p and token p + 1; of a
    prompt that goes on behind p + 1 tokens it is kept with the token that was there, or waits for the row carried.
    """

    def __init__(self, program: ServerScenario, *, shifted: bool):
        self.program, self.shifted = program, shifted
        self.slots: dict[int, _Drafting] = {}
        self.cached: list[_Drafting] = []
        self.rows: dict[int, _Tokens | None] = {}
        """the tokens behind which the row is that a slot carries, None where nobody knows"""

    def all(self, trace: ServerTrace) -> Spoilt:
        found: set[int] = set()
        for reply in sorted(trace.replies, key=lambda r: (r.request, r.task)):
            match self.program.requests[reply.request]:
                case Restart():
                    self.slots, self.cached, self.rows = {}, [], {}
                case SaveSlot() | DamageFile():
                    pass
                case RestoreSlot():
                    # a file has nothing of the draft's memory
                    self.slots[reply.slot] = _NOBODY_KNOWS
                case EraseSlot():
                    self.slots.pop(reply.slot, None)
                case _ if reply.task >= 0:
                    if self._follow(reply):
                        found.add(reply.request)
                case _:
                    found.add(reply.request)
                    self._lost()
        return frozenset(found)

    def _lost(self) -> None:
        """Nobody knows which slot a request was for."""
        slots = range(self.program.flags.parallel)
        self.slots, self.rows = dict.fromkeys(slots, _NOBODY_KNOWS), dict.fromkeys(slots, None)
        self.cached = [*self.cached, _NOBODY_KNOWS]

    def _follow(self, reply: Reply) -> bool:
        """Whether a position is foreign that the answer was drafted with."""
        n, prompt = reply.slot, _prompt(self.program, reply)
        kept = next((e.n for e in reply.events if e.what == "kept"), None)
        for e in reply.events:
            match e.what:
                case "cached":  # whose prompt is told by its length alone
                    fit = [s for s in self.slots.values() if len(s.tokens) - e.n in (0, 1)]
                    self.cached += fit or self.slots.values()
                case "cleared":
                    self.slots[e.slot] = _Drafting()
                case "loaded":
                    self.slots[n] = self._load(prompt, kept or 0)
                    row = self.rows.get(n, ())
                    if row is not None and prompt[: len(row)] != row:
                        self.rows[n] = None
                case _:
                    pass
        if kept is None:
            return False  # refused, or gone away, before anything was done
        slot = self.slots.get(n, _Drafting())
        row = self.rows.get(n, ())
        on = row is not None and len(row) == kept and (prompt[:kept] == row or slot.done == kept)
        foreign = {p for p in slot.foreign if p < kept}
        if not self.shifted and not on:
            foreign.add(kept)
        if self.shifted and not on and kept and kept >= min(slot.done, shared(slot.tokens, prompt)):
            foreign.add(kept - 1)
        self._keep(reply, prompt, frozenset(foreign))
        return bool(foreign)

    def _keep(self, reply: Reply, prompt: _Tokens, foreign: frozenset[int]) -> None:
        """What the slot holds afterwards, and whose row."""
        n = reply.slot
        if reply.status != 200:
            self.slots[n], self.rows[n] = _NOBODY_KNOWS, None
            return
        tokens = (*prompt, *reply.tokens)
        # the last token of an answer is not decoded
        done = len(tokens) - 1 if reply.tokens else 0
        rounds = reply.rounds()
        if self.shifted and rounds and rounds[-1][0] < rounds[-1][1]:
            # one token was left, for which nothing is drafted: the one that was rejected before it stays
            foreign |= {done - 2}
        self.slots[n] = _Drafting(tokens, done, foreign)
        self.rows[n] = tokens[:done] if reply.answered and len(prompt) == reply.length else None

    def _load(self, prompt: _Tokens, kept: int) -> _Drafting:
        """What all the cached prompts have in common that may be the one that is loaded."""
        near = _near(self.cached, prompt, kept) or [_NOBODY_KNOWS]
        least = min(near, key=lambda c: shared(c.tokens, prompt))
        done = min(c.done for c in near)
        return _Drafting(least.tokens, done, frozenset().union(*(c.foreign for c in near)))


def from_file(program: ServerScenario, trace: ServerTrace) -> Spoilt:
    """The answers that draft-mtp drafts behind tokens that came from a slot file, which has nothing of the draft's
    memory. The answers are right; drafts are lost, until nothing of the slot is kept."""
    if not _own_memory(program):
        return frozenset()
    found: set[int] = set()
    held: set[int] = set()
    """slots with tokens of a file"""
    cached = False
    for reply in sorted(trace.replies, key=lambda r: (r.request, r.task)):
        match program.requests[reply.request]:
            case Restart():
                held, cached = set(), False
            case RestoreSlot() if reply.status == 200:
                held.add(reply.slot)
            case RestoreSlot() | EraseSlot():
                held.discard(reply.slot)
            case SaveSlot() | DamageFile():
                pass
            case _:
                for e in reply.events:
                    if e.what == "cached":
                        cached = cached or bool(held)
                    elif e.what == "loaded" and cached:
                        held.add(reply.slot)
                    elif e.what == "cleared" or (e.what == "kept" and e.n == 0):
                        held.discard(e.slot)
                if reply.slot in held or (reply.task < 0 and held):  # of those nobody knows which slot they were for
                    found.add(reply.request)
    return frozenset(found)


def _own_memory(program: ServerScenario) -> bool:
    """Whether draft-mtp drafts out of a memory of its own; a draft's model does out of the target's."""
    driver = program.driver
    return driver is not None and driver.kind == "draft-mtp" and driver.draft is None


_LONGEST = 8  # drafted tokens of ngram-cache, whatever is asked


def at_the_brim(program: ServerScenario, trace: ServerTrace) -> Spoilt:
    """The answers that end, short of what was asked for, where a draft may have reached the end of the slot's context:
    server-context.cpp counts all accepted tokens as answered when it looks at the first one."""
    driver = program.driver
    if driver is None:
        return frozenset()
    near = program.flags.slot_ctx - max(driver.n_max, driver.ngram_m, _LONGEST)
    return frozenset(
        r.request
        for r in trace.replies
        if r.answered and len(r.tokens) < r.predict and r.length + len(r.tokens) >= near
    )


SPOILERS: dict[str, Callable[[ServerScenario, ServerTrace], Spoilt]] = {
    "server-checkpoint": stale_checkpoint,
    "server-worn-checkpoint": worn_checkpoint,
    "server-brim": at_the_brim,
    "server-draft-mtp-file": from_file,
    "server-draft-row": foreign_row,
}
"""by the name of the known fault's avoidance"""
_DRAFTS = frozenset({"server-draft-mtp-file", "server-draft-row"})
"""those that spoil what is drafted only"""


def spoilt(names: Iterable[str], program: ServerScenario, trace: ServerTrace) -> dict[int, str]:
    """The requests whose answers these known faults may have spoilt, with the first one's name."""
    return _spoilt((n for n in names if n not in _DRAFTS), program, trace)


def misdrafted(names: Iterable[str], program: ServerScenario, trace: ServerTrace) -> dict[int, str]:
    """The requests whose drafts alone these known faults may have spoilt, with the first one's name."""
    return _spoilt((n for n in names if n in _DRAFTS), program, trace)


def _spoilt(names: Iterable[str], program: ServerScenario, trace: ServerTrace) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in names:
        if name in SPOILERS:
            for request in SPOILERS[name](program, trace):
                found.setdefault(request, name)
    return found
