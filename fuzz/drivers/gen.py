"""Programs with a driver: rounds of drafting in which checkpoints are made, other work is done, and they are put back.

Like the plain programs (`fuzz.strategies`) they are walks over a logical state; a move never filters, and `push` has
the last word.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzz.damage import Below
from fuzz.drivers.avoid import repair
from fuzz.drivers.state import LONGEST, Rounds, broken, params_broken
from fuzz.traits import Traits
from fuzz.walk import drawn
from subjects.scenario import (
    OPEN,
    PIECES,
    Accept,
    AnyOp,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    Edge,
    KvType,
    Mangle,
    Mangling,
    ModelRef,
    Outputs,
    Part,
    Piece,
    Propose,
    Reopen,
    Rewind,
    Route,
    Scenario,
    SeqRm,
    Verify,
)

_RANDOM = st.randoms(use_true_random=False)
_SIZES = (4, 8, 1, 2, 6, 12, 3, 5, 16, 20, 24)
_ROUTES: tuple[Route, ...] = ("cut", "cut", "host", "whole", "device")
_FLAGS = (0, 0, 1, 0, 2, 3)
_MANGLE: tuple[Mangling, ...] = ("empty", "short", "long", "magic", "width", "negative", "huge", "other", "model")
_PARTS: tuple[tuple[Piece, ...], ...] = (
    PIECES, PIECES, PIECES, ("target", "draft"), ("driver",), ("target", "driver"), ("draft", "driver"), ("target",),
    ("draft",),
)  # fmt: skip
# what the ngram kinds are fed with
LOOP = (3, 18, 29, 7, 44, 11)
# how likely a program ends before its next move, in 1/64, by the number of operations it has
_STOP = (0, 0, 1, 2, 4, 6, 8, 12, 16, 20, 26, 32)


def draw_params(below: Below, base: DriverParams, traits: Traits, n_rs: int) -> tuple[ContextParams, DriverParams]:
    """A target context and a driver for a program."""
    learns = base.kind.startswith("ngram")
    # how far the ngram kinds draft is set otherwise, or not at all
    n_max = base.n_max if learns or below(3) else 1 + below(base.n_max)
    driver = msgspec.structs.replace(
        base,
        n_max=n_max,
        n_min=0 if learns or below(6) else 1 + below(n_max),
        p_min=0.0 if learns or below(6) else (0.2, 0.5, 0.8)[below(3)],
        backend_sampling=base.kind in ("draft-mtp", "draft-eagle3") and below(6) == 5,
        late=not learns and below(8) == 7,
    )
    n_batch, n_ubatch = ((64, 32), (64, 64), (32, 32), (32, 16), (64, 16), (16, 16))[below(6)]
    flash = below(10) == 9
    kv: KvType = "f16" if below(10) == 9 else "f32"
    params = ContextParams(
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_seq_max=(2, 2, 3, 1)[below(4)],
        n_rs_seq=0 if not n_rs or below(4) == 3 else n_max,
        kv_unified=below(2) == 1,
        type_k=kv,
        type_v=kv,
        flash_attn=flash,
        swa_full=bool(traits.window),
    )
    assert not params_broken(params, driver, traits)
    return params, driver


class Gen:
    """A program under construction. `below(n)` draws an integer in [0, n), the simplest first."""

    def __init__(self, below: Below, state: Rounds) -> None:
        self.below, self.state = below, state
        self.ops: list[AnyOp] = []

    def push(self, op: AnyOp) -> bool:
        """Append the operation if its preconditions hold."""
        if broken(self.state, op):
            return False
        self.state.apply(op)
        self.ops.append(op)
        return True

    # --- draws

    def live(self) -> int:
        """A sequence that holds something; one is filled when there is none."""
        found = self.state.live()
        if not found:
            closed = [i for i, s in enumerate(self.state.seqs) if not s.open]
            if not closed:
                self.push(Accept(seq=0, n=self.state.driver.n_max))
                return 0
            self.feed(closed[0])
            return closed[0]
        return found[self.below(len(found))]

    def other(self, seq: int) -> int:
        """Another sequence, the same one when there is none."""
        rest = [i for i in range(len(self.state.seqs)) if i != seq]
        return rest[self.below(len(rest))] if rest else seq

    def some(self, seq: int) -> tuple[int, ...]:
        """The sequence, sometimes with others that can draft in the same call."""
        rest = [i for i in self.state.live() if i != seq]
        if not rest or self.below(2):
            return (seq,)
        both = (seq, rest[self.below(len(rest))])
        return both if self.below(2) else tuple(sorted(both))

    def slot(self) -> int:
        """A slot number, free as long as there are free ones."""
        return next((i for i in range(3) if i not in self.state.slots), self.below(3))

    # --- pieces

    def feed(self, seq: int) -> bool:
        """Decode some tokens."""
        s = self.state.seqs[seq]
        n = min(_SIZES[self.below(len(_SIZES))], self.state.params.n_batch, LONGEST - s.hi)
        out: Outputs = "last" if self.below(3) else "all"
        if n <= 0:
            return False
        part = Part(seq=seq, n=n, stream=self.below(3), out=out)
        return self.push(Decode(parts=(self._looping(part) if self.learns else part,)))

    @property
    def learns(self) -> bool:
        """The driver drafts what it has seen before: only a text that repeats itself says anything."""
        return self.state.driver.kind.startswith("ngram")

    def _looping(self, part: Part) -> Part:
        at = self.state.seqs[part.seq].lo
        tokens = tuple(LOOP[(at + i + part.stream) % len(LOOP)] for i in range(part.n))
        return msgspec.structs.replace(part, tokens=tokens)

    def feed_two(self, seq: int) -> bool:
        """Decode tokens of two sequences in one batch."""
        other = self.other(seq)
        if other == seq:
            return self.feed(seq)
        half = self.state.params.n_batch // 2
        sizes = [min(_SIZES[self.below(len(_SIZES))], half) for _ in range(2)]
        parts = tuple(Part(seq=s, n=n, stream=self.below(3)) for s, n in zip((seq, other), sizes, strict=True))
        return self.push(Decode(parts=parts)) or self.feed(seq)

    def propose(self, seqs: tuple[int, ...]) -> bool:
        """Draft."""
        stream = -1 if self.below(2) else self.below(3)
        last = None
        if self.learns:
            last = tuple(LOOP[(self.state.seqs[s].lo + max(stream, 0)) % len(LOOP)] for s in seqs)
        n_max = -1 if self.below(5) else 1 + self.below(self.state.driver.n_max)
        return self.push(Propose(seqs=seqs, stream=stream, n_max=n_max, last=last))

    def accept(self, seqs: tuple[int, ...]) -> tuple[int, ...]:
        """How many drafts each sequence takes."""
        n = self.state.driver.n_max
        return tuple(-1 if self.below(3) == 0 else self.below(n + 1) for _ in seqs)

    def verify(self, seqs: tuple[int, ...]) -> bool:
        """Verify what was proposed, by any route that is open."""
        accept = self.accept(seqs)
        first = self.below(len(_ROUTES))
        for k in range(len(_ROUTES)):
            if self.push(Verify(seqs=seqs, accept=accept, route=_ROUTES[(first + k) % len(_ROUTES)])):
                return True
        return False

    def round(self, seqs: tuple[int, ...]) -> bool:
        """One round."""
        return self.propose(seqs) and self.verify(seqs)

    def pollute(self, seq: int) -> None:
        """Other work, on the sequence itself or on others."""
        for _ in range(1 + self.below(2)):
            match self.below(5):
                case 0:
                    self.feed(self.other(seq))
                case 1:
                    self.round(self.some(self.live()))
                case 2:
                    self.feed(seq)
                case 3:
                    self.feed_two(seq)
                case _:
                    self.round((seq,))

    # --- moves

    def m_feed(self) -> None:
        """Decode, one or two sequences."""
        seq = self.below(len(self.state.seqs))
        _ = self.feed_two(seq) if self.below(3) == 2 else self.feed(seq)

    def m_round(self) -> None:
        """A round, or two."""
        for _ in range(1 + self.below(2)):
            self.round(self.some(self.live()))

    def m_propose(self) -> None:
        """A draft that nobody verifies."""
        self.propose(self.some(self.live()))

    def m_trip(self) -> None:
        """Checkpoint, other work, rewind, draft: into the sequence itself or another one."""
        seq = self.live()
        if self.below(4) == 3:
            self.propose((seq,))
        slot = self.slot()
        first = self.below(len(_FLAGS))
        if not any(
            self.push(Checkpoint(seq=seq, slot=slot, flags=_FLAGS[(first + k) % len(_FLAGS)]))
            for k in range(len(_FLAGS))
        ):
            return
        self.pollute(seq)
        to = seq if self.below(4) else self.other(seq)
        parts = PIECES if self.below(3) else _PARTS[self.below(len(_PARTS))]
        if self.push(Rewind(seq=to, slot=slot, parts=parts)) or self.push(Rewind(seq=seq, slot=slot)):
            if self.learns and self.below(4):
                self.push(Begin(seq=to))
            after = self.below(3)
            if after == 2:
                self.feed(to)
            self.propose((to,))

    def m_rewind(self) -> None:
        """Put an old checkpoint back."""
        slots = list(self.state.slots)
        if slots:
            slot = slots[self.below(len(slots))]
            to = self.state.slots[slot].seq if self.below(3) else self.below(len(self.state.seqs))
            if to < len(self.state.seqs):
                self.push(Rewind(seq=to, slot=slot, parts=_PARTS[self.below(len(_PARTS))]))

    def m_open(self) -> None:
        """A verification whose answer comes after a checkpoint and a restore."""
        seq = self.live()
        slot = self.slot()
        if not (self.propose((seq,)) and self.push(Verify(seqs=(seq,)))):
            return
        n = self.state.driver.n_max
        saved = self.below(4) and self.push(Checkpoint(seq=seq, slot=slot))
        k = self.below(n + 1)
        if not self.push(Accept(seq=seq, n=k)):
            self.push(Accept(seq=seq, n=n))
        if saved:
            self.pollute(seq)
            if not self.state.seqs[seq].open and self.push(Rewind(seq=seq, slot=slot)):
                k = self.below(n + 1)
                if not self.push(Accept(seq=seq, n=k)):
                    self.push(Accept(seq=seq, n=n))
        self.propose((seq,))

    def m_apart(self) -> None:
        """Work on another sequence in the middle of a round."""
        seq = self.live()
        other = self.other(seq)
        if other == seq or not self.propose((seq,)):
            return
        slots = [n for n in self.state.slots if self.state.slots[n].seq == other]
        match self.below(4):
            case 0 if slots:
                self.push(Rewind(seq=other, slot=slots[0]))
            case 1:
                self.push(SeqRm(seq=other))
            case 2:
                self.round((other,))
            case _:
                self.feed(other)
        _ = self.verify((seq,)) if self.below(2) else self.propose((seq,))

    def m_wipe(self) -> None:
        """A new conversation in an old place."""
        seq = self.below(len(self.state.seqs))
        if self.push(SeqRm(seq=seq)):
            self.feed(seq)
            if self.learns or self.below(3) == 2:
                self.push(Begin(seq=seq))

    def m_cut(self) -> None:
        """Take a tail off, as an edited prompt does."""
        seq = self.live()
        d = 1 + self.below(min(6, max(self.state.seqs[seq].lo - 1, 1)))
        if self.state.seqs[seq].lo > d and self.push(SeqRm(seq=seq, lo=Edge(at="end", d=-d), hi=OPEN)):
            self.feed(seq)

    def m_begin(self) -> None:
        """Tell the driver that a generation begins."""
        self.push(Begin(seq=self.live()))

    def m_mangle(self) -> None:
        """A state that no driver may take."""
        seq, slot = self.live(), self.slot()
        if self.push(Checkpoint(seq=seq, slot=slot)):
            if self.below(2):
                self.pollute(seq)
            self.push(Mangle(slot=slot, how=_MANGLE[self.below(len(_MANGLE))], at=self.below(8)))
            to = seq if self.below(3) else self.other(seq)
            if self.state.seqs[to].lo and not self.state.seqs[to].open:
                self.push(Rewind(seq=to, slot=slot, parts=("driver",)))
                self.propose((to,))

    def m_reopen(self) -> None:
        """New contexts, perhaps with smaller batches, into which old checkpoints are put back."""
        d, p = self.state.driver, self.state.params
        n = (16, 32, 64, 1 + d.n_max + 1)[self.below(4)]
        rs = p.n_rs_seq
        n = max(n, rs + 2)
        if not self.state.slots or self.below(2):  # behind a large batch, whose rows a driver may keep
            seq = self.live()
            self.feed(seq)
            self.push(Checkpoint(seq=seq, slot=self.slot()))
        if self.push(Reopen(params=msgspec.structs.replace(p, n_batch=n, n_ubatch=n))):
            for slot in list(self.state.slots)[-2:]:
                seq = min(self.state.slots[slot].seq, len(self.state.seqs) - 1)
                if not self.state.seqs[seq].open and self.push(Rewind(seq=seq, slot=slot)):
                    _ = self.push(Accept(seq=seq, n=d.n_max)) if self.state.seqs[seq].open else None
                    self.propose((seq,))

    def settle(self) -> None:
        """At the end every sequence drafts, so that what a program did shows."""
        for i, s in enumerate(self.state.seqs):
            if s.open:
                self.push(Accept(seq=i, n=self.state.driver.n_max))
        for i, s in enumerate(self.state.seqs):
            if s.lo:
                self.push(Propose(seqs=(i,), stream=0))


MOVES: tuple[tuple[str, int], ...] = (
    ("feed", 6), ("round", 10), ("propose", 3), ("trip", 12), ("rewind", 4), ("open", 5), ("apart", 5), ("wipe", 3),
    ("cut", 2), ("begin", 1), ("mangle", 2), ("reopen", 2),
)  # fmt: skip


@st.composite
def programs(
    draw: Callable[..., random.Random],
    model: ModelRef,
    base: DriverParams,
    traits: Traits,
    n_rs: int,
    avoid: tuple[str, ...] = (),
    max_ops: int = 14,
) -> Scenario:
    """Programs for one model and driver."""
    rnd = draw(_RANDOM)

    def below(n: int) -> int:
        return int(rnd.randrange(n)) if n > 1 else 0

    params, driver = draw_params(below, base, traits, n_rs)
    gen = Gen(below, Rounds(traits, params, driver))
    gen.feed(0)
    weights = [(getattr(gen, f"m_{name}"), w * (2, 0, 1, 4)[below(4)]) for name, w in MOVES]
    if not any(w for _, w in weights):
        weights = [(gen.m_trip, 1)]
    while len(gen.ops) < max_ops and (move := drawn(below, weights, _STOP, len(gen.ops))):
        move()
    gen.settle()
    scenario = Scenario(model=model, params=params, driver=driver, ops=tuple(gen.ops))
    return repair(scenario, traits, avoid)


def strategy(
    model: ModelRef, base: DriverParams, traits: Traits, n_rs: int, avoid: tuple[str, ...] = ()
) -> SearchStrategy[Scenario]:
    """See `programs`."""
    return programs(model, base, traits, n_rs, avoid)
