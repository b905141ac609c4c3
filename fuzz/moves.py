"""Moves: what a generated program is made of. Each appends one operation, or a short idiom in which faults of state restore live.

A move never filters: it looks at the logical state (`fuzz.state`), draws a few small numbers and appends operations that keep the
contract. `Gen.push` has the last word: an operation that would break a precondition, or that an avoidance rules out, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuzz.avoid import Avoider
from fuzz.params import draw_other
from fuzz.state import Slot, State, broken
from subjects.scenario import (
    ON_DEVICE,
    OPEN,
    PARTIAL,
    AnyOp,
    Ask,
    Clear,
    Corrupt,
    Decode,
    Draft,
    Edge,
    Medium,
    Mutation,
    Outputs,
    Part,
    Query,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
)

MAX_LEN = 110  # of one sequence; n_ctx_seq is 256
MAX_TOTAL = 230  # of all sequences of a unified cache, which share 256 cells
N_SLOTS = 4
_OUT: tuple[Outputs, ...] = ("last", "last", "all", "last", "none", "all")
_FLAGS = (0, 0, 2, 1, 0, 3, 2, 1)
_AT = (0, 8, 4, 12, 100, 500, 900, 999)
_HOW: tuple[Mutation, ...] = ("truncate", "set_u32", "flip", "zero", "extend", "set_u32")
_ASK: tuple[Query, ...] = ("positions", "size", "size_all", "can_shift")
_END = Edge(at="end")
_ZERO = Edge(at="start")


class Gen:
    """A program under construction. `below(n)` draws an integer in [0, n), the simplest first."""

    def __init__(self, below: Callable[[int], int], state: State, avoid: Avoider | None) -> None:
        self.below = below
        self.state = state
        self.avoid = avoid
        self.ops: list[AnyOp] = []
        self._sizes_of: object = None
        self._sizes: tuple[int, ...] = ()

    def push(self, op: AnyOp) -> bool:
        """Append the operation if contract and avoidances allow it."""
        if broken(self.state, op) or (self.avoid is not None and self.avoid.blocks(self.state, op)):
            return False
        self.state.apply(op)
        self.ops.append(op)
        return True

    # --- draws

    def one_of(self, choices: list[int]) -> int:
        """One of a non-empty list."""
        return choices[self.below(len(choices))]

    def live(self) -> int:
        """A sequence that holds something (0 when there is none)."""
        return self.one_of(self.state.live() or [0])

    def any_seq(self) -> int:
        """Any sequence."""
        return self.below(len(self.state.seqs))

    def slot(self) -> int:
        """A free slot number; when all are taken, one of them."""
        for i in range(N_SLOTS):
            if i not in self.state.slots:
                return i
        return self.below(N_SLOTS)

    def slots_of(self, whole: bool) -> list[int]:
        """Slots that hold a sequence's state, or a whole context's; the newest first."""
        return [n for n, s in reversed(self.state.slots.items()) if s.whole == whole]

    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows worth trying: small ones, and the boundaries of the parameters in play."""
        p, w = self.state.params, self.state.traits.window
        if self._sizes_of is not p:
            raw = [4, 1, 2, 6, 8, 12, 16, 3, 5, 7, 10, 20, 24, p.n_ubatch - 1, p.n_ubatch, p.n_ubatch + 1, p.n_batch]
            raw += [p.n_rs_seq, p.n_rs_seq + 1, p.n_rs_seq + 2] if self.state.n_rs else []
            raw += [w - 1, w, w + 1, w + 2] if w else []
            self._sizes = tuple(n for n in raw if 1 <= n <= p.n_batch)
            self._sizes_of = p
        return self._sizes

    def room(self, seq: int, n: int) -> int:
        """At most n rows, as many as the sequence should still take (at least 0)."""
        s = self.state
        room = MAX_LEN - s.seqs[seq].next
        if s.params.kv_unified:
            room = min(room, MAX_TOTAL - s.total())
        return max(0, min(n, room))

    def edge(self, pos: int) -> Edge:
        """A position counted from the start."""
        return Edge(at="start", d=pos)

    def back(self, d: int) -> Edge:
        """A position counted from the end."""
        return Edge(at="end", d=-d)

    # --- pieces that several moves share

    def feed(self, seq: int, n: int, stream: int = 0, out: Outputs = "last") -> bool:
        """Decode n rows of one sequence, fewer when there is no room."""
        n = self.room(seq, min(n, self.state.params.n_batch))
        return n > 0 and self.push(Decode(parts=(Part(seq=seq, n=n, stream=stream, out=out),)))

    def feed_any(self, seq: int) -> bool:
        """Decode some rows of one sequence."""
        sizes = self.sizes()
        return self.feed(seq, sizes[self.below(len(sizes))], self.below(3), _OUT[self.below(len(_OUT))])

    def draft(self, seq: int) -> bool:
        """Greedy redraft of a few tokens."""
        n = self.room(seq, 2 + self.below(3))
        return n > 0 and self.push(Draft(seq=seq, n=n, stream=self.below(2)))

    def save(self, seq: int, flags: int, medium: Medium = "buffer", again: bool = False) -> int:
        """Save a sequence; the slot's number, -1 when it was not allowed."""
        slot = self.slot()
        return slot if self.push(Save(seq=seq, slot=slot, flags=flags, medium=medium, again=again)) else -1

    def restore(self, seq: int, number: int, style: int = 0) -> bool:
        """Restore a slot, with the cut that a partial state owes. style: 1 twice, 2 and save again, 3 both."""
        if not self.push(Restore(seq=seq, slot=number, times=1 + (style & 1), resave=style > 1)):
            return False
        if self.state.seqs[seq].owes_cut >= 0:
            self.push(SeqRm(seq=seq, lo=self.edge(self.state.seqs[seq].owes_cut)))
        return True

    def cut(self, seq: int) -> bool:
        """Take a tail off a sequence: around n_rs_seq, the whole last batch, or around the window."""
        s, st = self.state.seqs[seq], self.state
        w = st.traits.window
        depths = [1, 2, 3, s.last_batch, s.last_batch - 1, s.last_batch + 1, s.next // 2]
        if st.n_rs:
            depths += [st.n_rs, st.n_rs - 1, st.n_rs + 1, st.n_rs + 2, 1, 2]
        if w:
            depths += [w, w + 1]
        start = s.spans[-1][0] if s.spans else 0
        allowed = [d for d in depths if 0 < d < s.next - start]  # so that the next decode goes on right behind what is left
        if self.avoid is not None:
            allowed = [d for d in allowed if not self.avoid.blocks(st, SeqRm(seq=seq, lo=self.back(d)))]
        if not allowed:
            return False
        hi = _END if self.below(4) == 3 else OPEN
        return self.push(SeqRm(seq=seq, lo=self.back(self.one_of(allowed)), hi=hi))

    def wipe(self, seq: int) -> bool:
        """Remove a whole sequence, in one of the forms that mean it."""
        form = self.below(3)
        return self.push(SeqRm(seq=seq, lo=OPEN if form == 0 else _ZERO, hi=_END if form == 2 else OPEN))

    def copy(self, src: int) -> int:
        """Copy a whole sequence into an empty one (emptied first if need be); the destination, -1 if there is none."""
        dsts = self.state.empty()
        if not dsts:
            others = [i for i in range(len(self.state.seqs)) if i != src]
            if not others or not self.push(SeqRm(seq=others[-1])):
                return -1
            dsts = [others[-1]]
        dst = self.one_of(dsts)
        form = _ZERO if self.below(4) == 3 else OPEN
        return dst if self.push(SeqCp(src=src, dst=dst, lo=form)) else -1

    def after(self, seq: int) -> bool:
        """Something on a sequence at once, while a copy, shift or rollback may still wait for the next decode."""
        match self.below(9):
            case 0:
                number = self.save(seq, _FLAGS[self.below(len(_FLAGS))])
                return number >= 0 and self.restore(seq, number, self.below(4))
            case 1:
                return self.draft(seq)
            case 2:
                return self.wipe(seq) and self.feed_any(seq)
            case 3:
                return self.cut(seq)
            case 4:
                return self.copy(seq) >= 0
            case 5:
                return self.push(SeqKeep(seq=self.any_seq()))
            case 6:
                return self.push(SaveAll(slot=self.slot()))
            case 7:
                slots = self.slots_of(False)
                return bool(slots) and self.restore(seq, self.one_of(slots))
            case _:
                return self.push(Clear(data=self.below(2) == 0))

    # --- the end

    def settle(self) -> None:
        """Pay what is still owed at the end: the cut after a partial restore."""
        for i, s in enumerate(self.state.seqs):
            if s.owes_cut >= 0:
                self.push(SeqRm(seq=i, lo=self.edge(s.owes_cut)))

    def misuse(self) -> None:
        """Break exactly one precondition, by the last operation."""
        made = [op for op in _misuses(self) if len(broken(self.state, op)) == 1]
        op = made[self.below(len(made))]
        self.state.apply(op)
        self.ops.append(op)


def _misuses(g: Gen) -> list[AnyOp]:
    """One operation for each precondition that can be broken here; `Gen.misuse` takes those that break exactly one."""
    n, p, live = len(g.state.seqs), g.state.params, (g.state.live() or [0])[0]
    free = (g.state.empty() or [0])[0]
    end = g.state.end(live)
    ops: list[AnyOp] = [
        Decode(parts=(Part(seq=live, n=p.n_batch + 1),)),
        Decode(parts=(Part(seq=n, n=1),)),
        Decode(parts=(Part(seq=live, n=2), Part(seq=live, n=2)), interleave=True),
        Decode(parts=()),
        Draft(seq=n, n=1),
        Save(seq=n, slot=0),
        Save(seq=live, slot=0, flags=4),
        Restore(seq=n, slot=(g.slots_of(False) or [0])[0]),
        SeqRm(seq=n),
        SeqKeep(seq=n),
        SeqCp(src=live, dst=n),
        SeqCp(src=live, dst=free, lo=g.edge(1), hi=g.edge(max(end - 1, 2))),
        SeqAdd(seq=live, delta=-(end + 1)),
        SeqAdd(seq=live, delta=1, lo=g.edge(0), hi=g.edge(max(end - 1, 1))),
        SeqAdd(seq=live, delta=1),
        SeqDiv(seq=live, d=0),
        SeqDiv(seq=live, d=2),
        Ask(what="size", seq=n),
    ]
    ops += [SeqCp(src=live, dst=i) for i in g.state.live() if i != live]
    ops += [Restore(seq=i, slot=s) for s in g.slots_of(False) for i in range(n)]
    return ops


# --- moves ------------------------------------------------------------------------------------------------------------


def _has_live(g: Gen) -> bool:
    return bool(g.state.live())


def _always(_: Gen) -> bool:
    return True


def _can_shift(g: Gen) -> bool:
    return g.state.traits.can_shift and bool(g.state.live())


def _has_slot(g: Gen) -> bool:
    return bool(g.state.slots)


def m_decode(g: Gen) -> None:
    g.feed_any(g.any_seq())


def m_draft(g: Gen) -> None:
    g.draft(g.live())


def m_batch(g: Gen) -> None:
    """Several sequences in one batch."""
    n = len(g.state.seqs)
    count = 2 + g.below(n - 1)
    first = g.below(n)
    left = g.state.params.n_batch
    parts = []
    sizes = g.sizes()
    size = sizes[g.below(len(sizes))]
    for i in range(count):
        seq = (first + i) % n
        if i and g.below(3) == 2:
            size = sizes[g.below(len(sizes))]
        k = g.room(seq, min(size, left - (count - 1 - i)))
        if k > 0:
            parts.append(Part(seq=seq, n=k, stream=g.below(3), out=_OUT[g.below(len(_OUT))]))
            left -= k
    if parts:
        g.push(Decode(parts=tuple(parts), interleave=g.below(2) == 1))


def m_abort(g: Gen) -> None:
    """A decode whose abort callback fires: early, or after some micro-batches."""
    seq = g.any_seq()
    n = g.room(seq, min(g.state.params.n_batch, (8, 1, g.state.params.n_ubatch + 1, g.state.params.n_batch)[g.below(4)]))
    if n > 0:
        when = (1, 2, 40, 120)[g.below(4)]
        g.push(Decode(parts=(Part(seq=seq, n=n, stream=g.below(2)),), abort_after=when))


def m_fill(g: Gen) -> None:
    """A cache that runs full: llama_decode answers 1 and changes nothing."""
    n = g.state.params.n_batch
    seqs = [0] * 5 if not g.state.params.kv_unified else [i % len(g.state.seqs) for i in range(5)]
    for seq in seqs:
        g.push(Decode(parts=(Part(seq=seq, n=n),)))
    g.push(Decode(parts=(Part(seq=seqs[-1], n=1 + g.below(3)),)))


def _fillable(g: Gen) -> bool:
    return g.state.params.n_batch >= 64 and not g.ops


def m_save(g: Gen) -> None:
    if g.below(8) == 7:
        g.save(g.any_seq(), 0, "buffer")
        return
    seq, medium = g.live(), g.below(6)
    if medium == 5:
        g.save(seq, 0, "file", g.below(2) == 1)
    else:
        g.save(seq, _FLAGS[g.below(len(_FLAGS))], again=medium == 4)


def m_restore(g: Gen) -> None:
    slots = g.slots_of(False)
    if not slots:
        m_restore_all(g)
        return
    number = g.one_of(slots)
    slot: Slot = g.state.slots[number]
    seq = g.any_seq() if g.below(3) == 2 else min(slot.seq, len(g.state.seqs) - 1)
    g.restore(seq, number, g.below(4))


def m_round_trip(g: Gen) -> None:
    """Save, pollute, restore, redraft."""
    seq = g.live()
    kind = g.below(8)
    number = g.save(seq, (0, 0, 0, 2, 2, 0, 0, 1)[kind], "file" if kind == 5 else "buffer")
    if number < 0:
        return
    for _ in range((0, 1, 1, 2, 1, 2)[g.below(6)]):
        g.feed_any(seq if g.below(3) < 2 else g.any_seq())
    if g.below(4) == 3:
        g.wipe(seq)
    target = seq if g.below(4) < 3 else g.any_seq()
    if g.restore(target, number, g.below(4)) and g.below(4):
        g.draft(target)


def m_partial(g: Gen) -> None:
    """A partial state, work on top, the partial parts put back, the tail cut."""
    seq = g.live()
    number = g.save(seq, PARTIAL | (ON_DEVICE if g.below(3) == 2 else 0))
    if number < 0:
        return
    for _ in range((0, 1, 1, 2)[g.below(4)]):
        g.feed_any(seq if g.below(4) < 3 else g.any_seq())
    if g.restore(seq, number, g.below(2)) and g.below(4):
        g.feed_any(seq)


def m_two_device(g: Gen) -> None:
    """Two on-device saves of one sequence: the header says that the second makes the first invalid."""
    seq = g.live()
    flags = ON_DEVICE | (PARTIAL if g.below(4) == 3 else 0)
    first = g.save(seq, flags)
    g.feed_any(seq)
    g.save(seq, flags)
    if first >= 0:
        g.restore(seq, first)


def m_device_reopen(g: Gen) -> None:
    """An on-device handle outlives its context."""
    seq = g.live()
    number = g.save(seq, ON_DEVICE)
    if g.push(Reopen()) and number >= 0:
        if g.below(2) == 1:
            g.feed_any(seq)
        g.restore(min(seq, len(g.state.seqs) - 1), number)


def m_save_all(g: Gen) -> None:
    medium: Medium = "file" if g.below(4) == 3 else "buffer"
    g.push(SaveAll(slot=g.slot(), medium=medium, again=g.below(4) == 3))


def m_restore_all(g: Gen) -> None:
    slots = g.slots_of(True)
    if slots:
        style = g.below(4)
        g.push(RestoreAll(slot=g.one_of(slots), times=1 + (style & 1), resave=style > 1))


def m_whole_trip(g: Gen) -> None:
    """The whole context saved, polluted, restored."""
    slot = g.slot()
    if not g.push(SaveAll(slot=slot, medium="file" if g.below(4) == 3 else "buffer")):
        return
    match g.below(4):
        case 0 | 1:
            g.feed_any(g.any_seq())
        case 2:
            g.push(Clear(data=g.below(2) == 0))
        case _:
            g.push(Reopen())
    g.push(RestoreAll(slot=slot, resave=g.below(2) == 1))


def m_cut(g: Gen) -> None:
    g.cut(g.live())


def m_cut_after(g: Gen) -> None:
    """Decode, cut, and decode again: the heart of speculative decoding."""
    seq = g.live()
    how = g.below(4)
    if how == 3:
        for _ in range(1 + g.below(2)):
            g.feed(seq, 1, g.below(2))
    elif how == 2:
        g.draft(seq)
    else:
        g.feed_any(seq)
    if g.cut(seq) and g.below(4):
        g.feed_any(seq)


def m_cut_then(g: Gen) -> None:
    """A rollback that still waits when the next call comes."""
    seq = g.live()
    g.feed_any(seq)
    if g.cut(seq):
        g.after(seq)


def m_rm(g: Gen) -> None:
    """Removals of every form."""
    seq = g.live()
    end = g.state.end(seq)
    match g.below(8):
        case 0 | 1:
            g.wipe(seq)
        case 2:
            g.push(SeqRm(seq=seq, lo=OPEN if g.below(2) else _ZERO, hi=g.edge(1 + g.below(4))))
        case 3:
            a = 1 + g.below(max(1, min(end - 3, 12)))
            g.push(SeqRm(seq=seq, lo=g.edge(a), hi=g.edge(a + 1 + g.below(3))))
        case 4:
            a = g.below(max(1, end))
            g.push(SeqRm(seq=seq, lo=g.edge(a), hi=g.edge(a)))
        case 5:
            g.push(SeqRm(seq=seq, lo=Edge(at="end", d=g.below(3))))
        case 6:
            g.push(SeqRm(seq=g.any_seq()))
        case _:
            g.push(SeqRm(seq=-1, lo=_ZERO if g.below(2) else OPEN))


def m_cp(g: Gen) -> None:
    """Copies: whole, onto itself, and of a prefix where the memory can."""
    src = g.live()
    form = g.below(8)
    if form == 7:
        g.push(SeqCp(src=src, dst=src))
    elif form >= 5 and g.state.params.kv_unified and g.state.traits.memory == "dense" and g.state.empty():
        hi = g.edge(1 + g.below(max(1, g.state.end(src))))
        g.push(SeqCp(src=src, dst=g.one_of(g.state.empty()), lo=OPEN if g.below(2) else _ZERO, hi=hi))
    else:
        dst = g.copy(src)
        if dst >= 0 and g.below(3) < 2:
            g.feed_any(src if g.below(2) else dst)
            if g.below(2):
                g.draft(dst)


def m_cp_then(g: Gen) -> None:
    """A copy that still waits for the next decode when the next call comes."""
    src = g.live()
    dst = g.copy(src)
    if dst >= 0:
        g.after(dst if g.below(2) else src)


def m_keep(g: Gen) -> None:
    g.push(SeqKeep(seq=g.live() if g.below(4) < 3 else g.any_seq()))


def m_add(g: Gen) -> None:
    """Shifts: the context shift (a gap closed), and whole sequences or tails moved."""
    seq = g.live()
    s = g.state.seqs[seq]
    match g.below(6):
        case 0 | 1 | 2 if s.plain and s.next > 4 and not g.state.traits.recurrent:
            keep, k = g.below(min(4, s.next - 3)), 1 + g.below(min(4, s.next - 4))
            if g.push(SeqRm(seq=seq, lo=g.edge(keep), hi=g.edge(keep + k))):
                hi = g.edge(s.next) if g.below(3) == 2 else OPEN
                g.push(SeqAdd(seq=seq, delta=-k, lo=g.edge(keep + k), hi=hi))
        case 3:
            g.push(SeqAdd(seq=seq, delta=1 + g.below(8), lo=g.edge(g.below(max(1, s.next))), hi=OPEN))
        case 4:
            first = s.spans[0][0] if s.spans else 0
            if first:
                g.push(SeqAdd(seq=seq, delta=-(1 + g.below(first))))
            elif g.push(SeqAdd(seq=seq, delta=2)):
                g.push(SeqAdd(seq=seq, delta=-1))
        case _:
            g.push(SeqAdd(seq=seq, delta=1 + g.below(8), lo=_ZERO if g.below(3) == 2 else OPEN))


def m_add_then(g: Gen) -> None:
    """A shift that still waits for the next decode when the next call comes."""
    seq = g.live()
    m_add(g)
    g.after(seq)


def m_div(g: Gen) -> None:
    seq = g.live()
    if g.push(SeqDiv(seq=seq, d=2 + g.below(2))):
        g.feed_any(seq)


def m_clear(g: Gen) -> None:
    g.push(Clear(data=g.below(2) == 0))


def m_reopen(g: Gen) -> None:
    """A new context, and a state of the old one put into it."""
    other = draw_other(g.below, g.state.params, g.state.traits, g.avoid) if g.below(3) == 2 else None
    slots = g.slots_of(False)
    if not slots and g.state.live():
        g.save(g.live(), 0)
    g.push(Reopen(params=other))
    slots = [n for n in g.slots_of(False) if not g.state.slots[n].flags & ON_DEVICE]
    if slots:
        g.restore(g.any_seq(), g.one_of(slots), g.below(4))


def m_corrupt(g: Gen) -> None:
    """A saved state is damaged and restored: it must be refused or right, and never be fatal."""
    if not g.state.slots or g.below(2) == 1:
        g.save(g.live(), ON_DEVICE if g.below(2) else 0)
    numbers = list(reversed(g.state.slots))
    if not numbers:
        return
    number = g.one_of(numbers)
    how = _HOW[g.below(len(_HOW))]
    value = (0, 1, 2, 0x7FFFFFFF, 0xFFFFFFFF)[g.below(5)] if how == "set_u32" else 1 + g.below(8)
    # host blobs: only the header, where refusal is certain; what lies behind needs the grammar of blobs
    device = bool(g.state.slots[number].flags & ON_DEVICE)
    at = 0 if how == "set_u32" and not device else _AT[g.below(len(_AT))]
    if not device and how in ("flip", "zero"):
        how, value = "truncate", 1
    if device and g.avoid is not None and "device-corrupt" in g.avoid.names:
        return
    if g.push(Corrupt(slot=number, how=how, at=at, n=value)):
        if g.state.slots[number].whole:
            g.push(RestoreAll(slot=number))
        else:
            seq = min(g.state.slots[number].seq, len(g.state.seqs) - 1)
            g.restore(seq, number)


def m_ask(g: Gen) -> None:
    what = _ASK[g.below(len(_ASK))]
    g.push(Ask(what=what, seq=g.any_seq(), flags=g.below(4) if what == "size" else 0))


@dataclass(frozen=True)
class Move:
    """One kind of move: its weight before the swarm changes it, whether the swarm may leave it out, and when it makes sense."""

    name: str
    weight: int
    emit: Callable[[Gen], None]
    ready: Callable[[Gen], bool] = _has_live
    swarm: bool = True


def _several(g: Gen) -> bool:
    return len(g.state.seqs) > 1


def _two_live(g: Gen) -> bool:
    return len(g.state.seqs) > 1 and bool(g.state.live())


MOVES: tuple[Move, ...] = (
    Move("decode", 12, m_decode, _always, swarm=False),
    Move("draft", 4, m_draft, swarm=False),
    Move("round_trip", 14, m_round_trip),
    Move("batch", 12, m_batch, _several),
    Move("save", 7, m_save),
    Move("restore", 10, m_restore, _has_slot),
    Move("cut", 5, m_cut),
    Move("cut_after", 10, m_cut_after),
    Move("cut_then", 6, m_cut_then),
    Move("rm", 6, m_rm),
    Move("partial", 6, m_partial),
    Move("cp", 7, m_cp, _two_live),
    Move("cp_then", 7, m_cp_then, _two_live),
    Move("keep", 3, m_keep, _two_live),
    Move("add", 4, m_add, _can_shift),
    Move("add_then", 4, m_add_then, _can_shift),
    Move("div", 1, m_div, _can_shift),
    Move("clear", 2, m_clear),
    Move("save_all", 3, m_save_all),
    Move("whole_trip", 5, m_whole_trip),
    Move("two_device", 4, m_two_device),
    Move("device_reopen", 2, m_device_reopen),
    Move("reopen", 3, m_reopen),
    Move("corrupt", 3, m_corrupt),
    Move("abort", 3, m_abort, _always),
    Move("ask", 3, m_ask, _always),
    Move("fill", 1, m_fill, _fillable),
)
