"""The logical state of a program while it is being written: what each sequence and slot would hold if llama.cpp kept
its promises.

No library is asked. The generator uses it to build programs that keep the contract table (`subjects.contracts`), the
avoidances to see the trigger of a known fault, and the reducer (`fuzz.state.valid`) to throw away candidates that break
a precondition.

Where a call's refusal is certain from the sources (a recurrent memory cannot forget its middle) it is foreseen; every
other call is taken to succeed. Tests on a real library tell how often that is wrong; being wrong costs a pointless
program, never a verdict.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

from fuzz.spans import History, Spans, history_cut, last_ubatch, spans_cut, spans_in, spans_join, spans_size
from fuzz.traits import Traits
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    BlobEdit,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Edge,
    Medium,
    Op,
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

INF = 1 << 30


@dataclass
class Seq:
    """One sequence: its positions, the next one that the runner would use, and where its content comes from.

    k: its tokens in its last micro-batch (0: none of its rollback planes is valid). pending: a rollback waits for the
    next decode. owes_cut: a partial restore left rows behind this position in the other part; the caller must cut them.
    unsure: an aborted decode left an unknown number of rows.
    """

    spans: Spans = ()
    next: int = 0
    history: History = ()
    k: int = 0
    last_batch: int = 0
    pending: bool = False
    owes_cut: int = -1
    edited: bool = False
    unsure: bool = False
    copied: bool = False  # not decoded since it was copied
    haunted: bool = False  # wiped with (0, end) while a rollback waited, and not decoded since
    passed: bool = False  # another sequence was decoded since its own last decode
    # equal and not 0: shares its recurrent cell with another sequence (after a copy, until either decodes)
    cell: int = 0

    @property
    def length(self) -> int:
        """Number of positions held."""
        return spans_size(self.spans)

    @property
    def plain(self) -> bool:
        """Positions 0 .. next-1, all there."""
        return self.spans == ((0, self.next),)

    def copy(self) -> Seq:
        """An independent copy."""
        return copy(self)


@dataclass
class Slot:
    """A saved state. `serial` numbers the on-device saves; `epoch` is the context it was made in."""

    whole: bool
    flags: int
    medium: Medium
    seq: int
    seqs: list[Seq]
    epoch: int
    serial: int
    params: ContextParams
    edits: tuple[BlobEdit, ...] = ()

    @property
    def corrupted(self) -> bool:
        """It was changed since it was saved."""
        return bool(self.edits)

    @property
    def next(self) -> int:
        """Where the saved sequence ended."""
        return self.seqs[0].next if self.seqs else 0


@dataclass
class State:
    """Everything a program has built up so far."""

    traits: Traits
    params: ContextParams
    seqs: list[Seq] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    epoch: int = 0
    serial: int = 0
    # sequence -> serial of its newest on-device save in this context
    device: dict[int, int] = field(default_factory=dict)
    # sequences with a copy between streams, or a shift of their keys, that waits for the next decode
    queued: set[int] = field(default_factory=set)
    # sequences whose compressor state (deepseek4) waits to be copied
    sources: set[int] = field(default_factory=set)
    # cells were freed in this context, so that new rows may go before older ones
    holes: bool = False
    shifted: set[int] = field(default_factory=set)
    unique: int = 0

    def __post_init__(self) -> None:
        self._open(self.params)

    def _open(self, params: ContextParams) -> None:
        self.params = params
        self.seqs = [Seq() for _ in range(params.n_seq_max)]
        self.device = {}
        self.queued, self.shifted, self.sources = set(), set(), set()
        self.holes = False
        self.n_rs = params.n_rs_seq if self.traits.rollback else 0

    # --- queries

    def length(self, seq: int) -> int:
        """Positions held by a sequence, 0 for an id out of range."""
        return self.seqs[seq].length if 0 <= seq < len(self.seqs) else 0

    def end(self, seq: int) -> int:
        """The next position of a sequence as the runner's cursor has it."""
        return self.seqs[seq].next if 0 <= seq < len(self.seqs) else 0

    def resolve(self, e: Edge, seq: int, default: int) -> int:
        """What an edge becomes (`subjects.runner.Runner._edge`); `default` for llama.h's open end."""
        if e.at == "open":
            return default
        return max((self.end(seq) if e.at == "end" else 0) + e.d, 0)

    def range(self, op: SeqRm | SeqCp | SeqAdd | SeqDiv) -> tuple[int, int]:
        """[p0, p1) of an operation, open ends filled in."""
        seq = op.src if isinstance(op, SeqCp) else op.seq
        return self.resolve(op.lo, seq, 0), self.resolve(op.hi, seq, INF)

    def live(self) -> list[int]:
        """Sequences that hold something."""
        return [i for i, s in enumerate(self.seqs) if s.spans]

    def empty(self) -> list[int]:
        """Sequences that hold nothing."""
        return [i for i, s in enumerate(self.seqs) if not s.spans]

    def total(self) -> int:
        """Positions held by all sequences."""
        return sum(s.length for s in self.seqs)

    def pending(self, seq: int) -> bool:
        """A rollback of the sequence waits for the next decode."""
        return 0 <= seq < len(self.seqs) and self.seqs[seq].pending

    def last_batch(self, seq: int) -> int:
        """Rows of the sequence in its last batch, 0 when that was before a restore."""
        return self.seqs[seq].last_batch if 0 <= seq < len(self.seqs) else 0

    def saved(self, slot: int) -> Slot | None:
        """What a slot holds."""
        return self.slots.get(slot)

    def saved_empty(self, slot: int) -> bool:
        """The slot was saved from an empty sequence."""
        return slot in self.slots and not self.slots[slot].seqs[0].spans

    def device_saved(self, seq: int) -> bool:
        """The sequence was saved on the device in this context."""
        return seq in self.device

    def newest(self, slot: int) -> bool:
        """An on-device slot is its sequence's newest on-device save in this context."""
        return slot in self.slots and self.is_newest(self.slots[slot])

    def is_newest(self, slot: Slot) -> bool:
        """An on-device handle is the newest one of its sequence in this context."""
        return slot.epoch == self.epoch and self.device.get(slot.seq) == slot.serial

    def tail_cut(self, op: SeqRm) -> int:
        """How many positions a removal takes off the end of one sequence, leaving some; 0: it is no such removal."""
        if not 0 <= op.seq < len(self.seqs):
            return 0
        seq = self.seqs[op.seq]
        p0, p1 = self.range(op)
        if not seq.spans or p1 < seq.next or not seq.spans[0][0] < p0 < seq.next:
            return 0
        return seq.next - p0

    def accepts(self, op: SeqRm) -> bool:
        """Whether a removal is foreseen to be accepted.

        src/llama-memory-recurrent.cpp seq_rm(): a tail only down to n_rs_seq, once before the next decode.
        src/llama-kv-cache-dsv4.cpp seq_rm(): no upper bound but the open one.
        """
        if not self.traits.recurrent:
            return True
        if self.traits.any_rollback and op.hi.at != "open":
            return False
        d = self.tail_cut(op)
        return d == 0 or (d <= self.n_rs and not self.seqs[op.seq].pending)

    def maybe_live(self, seq: int) -> bool:
        """The sequence holds something, or may: an aborted decode, or a restore that was refused or of a changed state,
        left it open."""
        return 0 <= seq < len(self.seqs) and (bool(self.seqs[seq].spans) or self.seqs[seq].unsure)

    def shared(self, seq: int) -> bool:
        """Another sequence has the same recurrent cell (src/llama-memory-recurrent.cpp seq_cp() copies no state)."""
        cell = self.seqs[seq].cell
        return cell != 0 and sum(s.cell == cell for s in self.seqs) > 1

    def rows(self, op: Decode) -> list[int]:
        """Sequence ids of a batch's rows, in order."""
        sizes = [(p.seq, len(p.tokens) if p.tokens else p.n) for p in op.parts]
        if not op.interleave:
            return [s for s, n in sizes for _ in range(n)]
        return [s for j in range(max((n for _, n in sizes), default=0)) for s, n in sizes if j < n]

    def holds_prefix(self, seq: int, slot: Slot) -> bool:
        """The sequence still begins with the history that a partial state was saved from."""
        mine, saved = self.seqs[seq], slot.seqs[0]
        if not saved.spans:
            return True
        return (
            mine.plain and saved.plain and not mine.unsure and not saved.unsure and mine.owes_cut < 0
            and mine.next >= saved.next and history_cut(mine.history, saved.next) == saved.history
        )  # fmt: skip

    # --- operations

    def apply(self, op: Op) -> None:
        """Move on as if `op` had been executed; ids out of range change nothing."""
        self.holes = self.holes or isinstance(op, SeqRm | SeqKeep | Clear | Restore | RestoreAll | SeqAdd)
        match op:
            case Decode():
                self._decode(op)
            case Draft():
                self._grow(op.seq, op.n, self._fresh(), 1)
                if 0 <= op.seq < len(self.seqs) and op.n > 0:
                    self.seqs[op.seq].last_batch = 1
                self._pass({op.seq})
            case Save() if 0 <= op.seq < len(self.seqs):
                self._put(op.slot, False, op.flags, op.medium, op.seq, [self.seqs[op.seq].copy()])
            case SaveAll():
                self._put(op.slot, True, 0, op.medium, -1, [s.copy() for s in self.seqs])
            case Restore():
                self._restore(op)
            case RestoreAll():
                self._restore_all(op)
            case SeqRm():
                self._remove(op)
            case SeqCp() if op.src != op.dst and 0 <= op.src < len(self.seqs) and 0 <= op.dst < len(self.seqs):
                self._copy(op)
            case SeqKeep():
                self.seqs = [s if i == op.seq else Seq(haunted=s.pending or s.haunted) for i, s in enumerate(self.seqs)]
            case SeqAdd() | SeqDiv() if 0 <= op.seq < len(self.seqs):
                self._shift(op)
            case Clear():
                self.seqs = [Seq() for _ in self.seqs]
            case Reopen():
                self.epoch += 1
                self._open(op.params or self.params)
            case Corrupt() if op.slot in self.slots:
                self.slots[op.slot].edits += op.edits
            case _:
                pass

    def _pass(self, decoded: set[int]) -> None:
        """A decode happened: what was queued is done, and the sequences that it left out were passed by."""
        self.queued, self.shifted, self.sources = set(), set(), set()
        for i, s in enumerate(self.seqs):
            s.passed = i not in decoded

    def _fresh(self) -> int:
        self.unique -= 1
        return self.unique

    def _grow(self, seq: int, n: int, stream: int, k: int) -> None:
        if not 0 <= seq < len(self.seqs) or n <= 0:
            return
        s = self.seqs[seq]
        s.spans = spans_join([*s.spans, (s.next, s.next + n)])
        s.next += n
        if s.history and s.history[-1][0] == stream:
            s.history = (*s.history[:-1], (stream, s.next))
        else:
            s.history = (*s.history, (stream, s.next))
        s.k, s.last_batch, s.pending, s.cell = k, n, False, 0
        s.copied = s.haunted = False

    def _decode(self, op: Decode) -> None:
        self._pass({part.seq for part in op.parts})
        if len({part.n for part in op.parts}) > 1:  # several micro-batches: the later ones pass by the others' cells
            for part in op.parts:
                if 0 <= part.seq < len(self.seqs):
                    self.seqs[part.seq].passed = True
        if op.abort_after is not None:
            for part in op.parts:
                if 0 <= part.seq < len(self.seqs):
                    self.seqs[part.seq].unsure, self.seqs[part.seq].k = True, 0
            return
        last: dict[int, int] = {}
        if self.n_rs and self.params.n_ubatch > 0:
            sequential = self.traits.memory == "recurrent" or not self.params.kv_unified
            by_seq = self.params.embeddings
            last = last_ubatch(
                self.rows(op), self.params.n_ubatch, sequential=sequential, keep_tail=self.n_rs + 1, by_seq=by_seq
            )
        for part in op.parts:
            stream = part.stream if part.tokens is None else self._fresh()
            n = part.n if part.tokens is None else len(part.tokens)
            self._grow(part.seq, n, stream, last.get(part.seq, min(n, self.params.n_ubatch)))

    def _put(self, number: int, whole: bool, flags: int, medium: Medium, seq: int, seqs: list[Seq]) -> None:
        self.serial += 1
        self.slots[number] = Slot(whole, flags, medium, seq, seqs, self.epoch, self.serial, self.params)
        if flags & ON_DEVICE:
            self.device[seq] = self.serial

    def fits(self, slot: Slot, *, edited: bool = False) -> bool:
        """The context can take this state: same K/V types (the blob names them), and not spoilt; with `edited` it may
        be."""
        same = (slot.params.type_k, slot.params.type_v, slot.params.flash_attn) == (
            self.params.type_k, self.params.type_v, self.params.flash_attn,
        )  # fmt: skip
        # a blob has one section a stream (src/llama-kv-cache.cpp state_read_sinfo(): "n_stream mismatch")
        streams = [1 if p.kv_unified else p.n_seq_max for p in (slot.params, self.params)]
        if self.traits.memory != "recurrent" and streams[0] != streams[1]:
            return False
        return same and (edited or not slot.corrupted)

    def _restore(self, op: Restore) -> None:
        slot = self.slots.get(op.slot)
        if slot is None or slot.whole or not 0 <= op.seq < len(self.seqs):
            return
        before = self.seqs[op.seq]
        if not self.fits(slot):
            # what was changed may be taken all the same
            self.seqs[op.seq] = Seq(unsure=bool(before.spans) or slot.corrupted)
            return
        new = slot.seqs[0].copy()
        new.k, new.pending, new.last_batch, new.cell = 0, False, 0, 0
        new.copied = new.haunted = False
        if slot.flags & PARTIAL and self.traits.parts and before.next > new.next:
            new.owes_cut = new.next
        self.seqs[op.seq] = new

    def _restore_all(self, op: RestoreAll) -> None:
        slot = self.slots.get(op.slot)
        if slot is None or not slot.whole:
            return
        same = self.fits(slot) and slot.params.kv_unified == self.params.kv_unified and len(slot.seqs) == len(self.seqs)
        self.seqs = [s.copy() for s in slot.seqs] if same else [Seq(unsure=True) for _ in self.seqs]
        for s in self.seqs:
            s.k, s.pending, s.last_batch, s.cell = 0, False, 0, 0
            s.copied = s.haunted = False

    def _remove(self, op: SeqRm) -> None:
        if not self.accepts(op) or op.seq >= len(self.seqs):
            return
        cut = self.tail_cut(op)
        for i in range(len(self.seqs)) if op.seq < 0 else (op.seq,):
            s = self.seqs[i]
            p0, p1 = self.range(op)
            left = spans_cut(s.spans, p0, p1)
            if p1 >= s.next:
                s.next = min(s.next, p0)
                if s.owes_cut >= p0:
                    s.owes_cut = -1
                if self.n_rs and cut:
                    s.pending = True
            if left == s.spans:
                continue
            if left and p1 >= s.next:
                s.next = left[-1][1]  # a hole before p0 makes the end lie further in front
            if not left:
                self.seqs[i] = Seq(haunted=(s.pending or s.haunted) and op.hi.at != "open")
                continue
            if p1 >= s.next:
                s.history = history_cut(s.history, s.next)
            else:
                s.history, s.edited = ((self._fresh(), s.next),), True
            s.spans = left

    def _copy(self, op: SeqCp) -> None:
        src = self.seqs[op.src]
        p0, p1 = self.range(op)
        new = src.copy()
        new.spans = spans_in(src.spans, p0, p1)
        new.next = min(src.next, p1)
        if new.spans != src.spans:
            new.history = history_cut(src.history, new.next) if p0 <= 0 else ((self._fresh(), new.next),)
            new.edited = new.edited or p0 > 0
        new.pending, new.copied, new.haunted = False, True, self.seqs[op.dst].haunted
        src.cell = new.cell = src.cell or -self._fresh()
        if (not self.params.kv_unified and self.traits.memory != "recurrent") or self.traits.any_rollback:
            self.queued |= {op.src, op.dst}
        if self.traits.any_rollback:
            self.sources.add(op.src)
        if op.src in self.shifted:
            self.shifted.add(op.dst)
        self.seqs[op.dst] = new if new.spans else Seq()

    def _shift(self, op: SeqAdd | SeqDiv) -> None:
        s = self.seqs[op.seq]
        p0, p1 = self.range(op)
        inside, outside = spans_in(s.spans, p0, p1), spans_cut(s.spans, p0, p1)
        if isinstance(op, SeqAdd):
            moved = [(lo + op.delta, hi + op.delta) for lo, hi in inside]
        elif op.d > 1:
            moved = [(lo // op.d, (hi - 1) // op.d + 1) for lo, hi in inside]
        else:
            return
        if not inside or (isinstance(op, SeqAdd) and op.delta == 0):
            return
        self.shifted.add(op.seq)
        s.spans = spans_join([*outside, *moved])
        s.next = s.spans[-1][1]
        s.history, s.edited = ((self._fresh(), s.next),), True
