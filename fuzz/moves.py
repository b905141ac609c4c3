"""Moves: what a generated program is made of: single operations, and short idioms in which faults of restores live.

A move never filters: it looks at the logical state (`fuzz.state`), draws a few small numbers and appends operations
that keep the contract. `Gen.push` has the last word: an operation that would break a precondition, or that an avoidance
rules out, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuzz.damage import draw_edits
from fuzz.gen import FLAGS, ZERO, Gen
from fuzz.params import draw_other
from fuzz.state import Slot
from subjects.scenario import (
    ON_DEVICE,
    OPEN,
    PARTIAL,
    Ask,
    Clear,
    Corrupt,
    Decode,
    Edge,
    Medium,
    Part,
    Query,
    Reopen,
    Restore,
    RestoreAll,
    SaveAll,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
)

_ASK: tuple[Query, ...] = ("positions", "size", "size_all", "can_shift")


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
    g.draft(g.any_seq() if g.below(8) == 7 else g.live())


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
            parts.append(Part(seq=seq, n=k, stream=g.below(3), out=g.out()))
            left -= k
    if parts:
        g.push(Decode(parts=tuple(parts), interleave=g.below(2) == 1))


def m_abort(g: Gen) -> None:
    """A decode whose abort callback fires: early, or after some micro-batches."""
    seq = g.any_seq()
    n = g.room(
        seq, min(g.state.params.n_batch, (8, 1, g.state.params.n_ubatch + 1, g.state.params.n_batch)[g.below(4)])
    )
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
        # also the state of an empty sequence, which is put back onto one that has gone on, or onto another
        seq = g.any_seq()
        slot = g.save(seq, 0, "buffer")
        if slot >= 0 and not g.state.length(seq) and g.feed_any(seq):
            g.push(Restore(seq=seq if g.below(2) == 0 else g.any_seq(), slot=slot))
        return
    seq, medium = g.live(), g.below(6)
    if medium == 5:
        g.save(seq, 0, "file", g.below(2) == 1)
    else:
        g.save(seq, FLAGS[g.below(len(FLAGS))], again=medium == 4)


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
            other = draw_other(g.below, g.state.params, g.state.traits, g.avoid) if g.below(3) == 2 else None
            g.push(Reopen(params=other))
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
            g.push(SeqRm(seq=seq, lo=OPEN if g.below(2) else ZERO, hi=g.edge(1 + g.below(4))))
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
            g.push(SeqRm(seq=-1, lo=ZERO if g.below(2) else OPEN))


def m_cp(g: Gen) -> None:
    """Copies: whole, onto itself, and of a prefix where the memory can."""
    src = g.live()
    form = g.below(8)
    if form == 7:
        g.push(SeqCp(src=src, dst=src))
    elif form >= 5 and g.state.params.kv_unified and g.state.traits.memory == "dense" and g.state.empty():
        hi = g.edge(1 + g.below(max(1, g.state.end(src))))
        g.push(SeqCp(src=src, dst=g.one_of(g.state.empty()), lo=OPEN if g.below(2) else ZERO, hi=hi))
    else:
        dst = g.copy(src)
        if dst >= 0 and g.below(3):
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
            g.push(SeqAdd(seq=seq, delta=1 + g.below(8), lo=ZERO if g.below(3) == 2 else OPEN))


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
    """A saved state is damaged and restored: it must be refused or right, and never be fatal. A good one afterwards
    must still be taken."""
    device = g.below(3) == 2
    if not g.state.slots or g.below(2) == 1:
        flags = ON_DEVICE if device else (0, 0, PARTIAL)[g.below(3)]
        g.save(g.live(), flags, "file" if flags == 0 and g.below(8) == 7 else "buffer")
    numbers = [n for n in reversed(g.state.slots) if not g.state.slots[n].corrupted]
    if not numbers:
        return
    number = g.one_of(numbers)
    slot = g.state.slots[number]
    good = g.save(slot.seq, slot.flags) if not slot.whole and not slot.flags and g.below(2) else -1
    others = [n for n, s in g.state.slots.items() if n != number and s.whole == slot.whole]
    edits = draw_edits(g.below, g.state.traits, whole=slot.whole, medium=slot.medium, others=others)
    if slot.flags & ON_DEVICE and g.avoid is not None and "device-corrupt" in g.avoid.names:
        return
    if not g.push(Corrupt(slot=number, edits=edits)):
        return
    if slot.whole:
        g.push(RestoreAll(slot=number))
        return
    seq = min(slot.seq, len(g.state.seqs) - 1)
    if g.restore(seq, number) and good >= 0 and good in g.state.slots:
        g.restore(seq, good)


def m_ask(g: Gen) -> None:
    what = _ASK[g.below(len(_ASK))]
    g.push(Ask(what=what, seq=g.any_seq(), flags=g.below(4) if what == "size" else 0))


@dataclass(frozen=True)
class Move:
    """One kind of move: its weight before the swarm changes it, whether the swarm may leave it out, and when it makes
    sense.
    """

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
    Move("corrupt", 7, m_corrupt),
    Move("abort", 3, m_abort, _always),
    Move("ask", 3, m_ask, _always),
    Move("fill", 1, m_fill, _fillable),
)
