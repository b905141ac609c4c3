"""A program under construction: draws from the logical state, and the pieces that several moves share."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.avoid import Avoider
from fuzz.state import State, broken
from subjects.scenario import (
    OPEN,
    AnyOp,
    Ask,
    Clear,
    Decode,
    Draft,
    Edge,
    Medium,
    Outputs,
    Part,
    Restore,
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
WIDE = 16384  # tokens of vocabulary
OUT: tuple[Outputs, ...] = ("last", "last", "all", "last", "none", "all")
FLAGS = (0, 0, 2, 1, 0, 3, 2, 1)
END = Edge(at="end")
ZERO = Edge(at="start")


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

    def out(self) -> Outputs:
        """Which rows of a part are output. Of a large vocabulary only the last: a row of it takes a megabyte."""
        choice = OUT[self.below(len(OUT))]
        return choice if self.state.traits.n_vocab <= WIDE or choice == "none" else "last"

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
        return self.feed(seq, sizes[self.below(len(sizes))], self.below(3), self.out())

    def draft(self, seq: int) -> bool:
        """Greedy redraft of a few tokens."""
        n = self.room(seq, (2, 3, 4, 1)[self.below(4)])
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
        allowed = [
            d for d in depths if 0 < d < s.next - start
        ]  # so that the next decode goes on right behind what is left
        if st.traits.recurrent and self.below(4):  # refusals are worth a few tries, not most of them
            allowed = [d for d in allowed if st.accepts(SeqRm(seq=seq, lo=self.back(d)))]
        if self.avoid is not None:
            allowed = [d for d in allowed if not self.avoid.blocks(st, SeqRm(seq=seq, lo=self.back(d)))]
        if not allowed:
            return False
        hi = END if self.below(4) == 3 else OPEN
        return self.push(SeqRm(seq=seq, lo=self.back(self.one_of(allowed)), hi=hi))

    def wipe(self, seq: int) -> bool:
        """Remove a whole sequence, in one of the forms that mean it."""
        form = self.below(3)
        return self.push(SeqRm(seq=seq, lo=OPEN if form == 0 else ZERO, hi=END if form == 2 else OPEN))

    def copy(self, src: int) -> int:
        """Copy a whole sequence into an empty one (emptied first if need be); the destination, -1 if there is none."""
        dsts = self.state.empty()
        if not dsts:
            others = [i for i in range(len(self.state.seqs)) if i != src]
            if not others or not self.push(SeqRm(seq=others[-1])):
                return -1
            dsts = [others[-1]]
        dst = self.one_of(dsts)
        form = ZERO if self.below(4) == 3 else OPEN
        return dst if self.push(SeqCp(src=src, dst=dst, lo=form)) else -1

    def after(self, seq: int) -> bool:
        """Something on a sequence at once, while a copy, shift or rollback may still wait for the next decode."""
        match self.below(9):
            case 0:
                number = self.save(seq, FLAGS[self.below(len(FLAGS))])
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
