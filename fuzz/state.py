"""The logical state of a program while it is being written: what each sequence and slot would hold if llama.cpp kept its promises.

No library is asked. The generator uses it to build programs that keep the contract table (`subjects.contracts`), the avoidances to see
the trigger of a known fault, and the reducer (`valid`) to throw away candidates that break a precondition.

Where a call's refusal is certain from the sources (a recurrent memory cannot forget its middle) it is foreseen; every other call
is taken to succeed. Tests on a real library tell how often that is wrong; being wrong costs a pointless program, never a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from subjects.recipes import Recipe
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    Ask,
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
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
)
from subjects.trace import Facts

INF = 1 << 30
Memory = Literal["dense", "window", "recurrent", "hybrid"]
Spans = tuple[tuple[int, int], ...]
History = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Traits:
    """What the generator must know of a model.

    rollback: llama.cpp keeps n_rs_seq earlier recurrent states. any_rollback: it keeps them across decodes too (deepseek4), so that
    the rule d <= k - 1 does not apply. q8: head size fits quantised K/V.
    """

    memory: Memory = "dense"
    rollback: bool = False
    any_rollback: bool = False
    can_shift: bool = True
    window: int = 0
    q8: bool = False
    n_vocab: int = 64

    @property
    def recurrent(self) -> bool:
        """The memory has a recurrent (or compressed) part, which cannot forget its middle."""
        return self.memory in ("recurrent", "hybrid")

    @property
    def parts(self) -> bool:
        """A partial state leaves something out, so that the caller must hold the rest (llama.h: SWA KV cache or recurrent cache)."""
        return self.memory in ("window", "hybrid")


@cache
def _q8(recipe: Recipe) -> bool:
    """Head size a multiple of 64: ggml's q8_0 blocks are 32 wide, and llama.cpp rotates K in 64s (shared/llama-facts.md)."""
    if recipe.memory not in ("dense", "window"):
        return False
    values = {str(key): value for key, _, value in recipe.build()[0]}

    def get(name: str) -> Any:
        return values.get(f"{recipe.arch}.{name}")

    head = get("attention.key_length") or recipe.n_embd // int(get("attention.head_count") or 1)
    return int(head) % 64 == 0


def traits_of(recipe: Recipe) -> Traits:
    """Traits of a generated model."""
    return Traits(
        memory=recipe.memory, rollback=recipe.rollback, any_rollback=recipe.arch == "deepseek4", can_shift=recipe.can_shift,
        window=recipe.window, q8=_q8(recipe), n_vocab=recipe.n_vocab,
    )  # fmt: skip


def traits_from_facts(facts: Facts) -> Traits:
    """Traits of a foreign GGUF, from a context that was opened with n_rs_seq > 0 (llama.cpp clamps it to 0 without rollback)."""
    return Traits(
        memory=facts.memory, rollback=facts.n_rs_seq > 0, can_shift=facts.can_shift, window=facts.n_swa, n_vocab=facts.n_vocab
    )


# --- spans of positions -----------------------------------------------------------------------------------------------


def spans_cut(spans: Spans, a: int, b: int) -> Spans:
    """Without the positions in [a, b)."""
    out = []
    for lo, hi in spans:
        if lo < min(hi, a):
            out.append((lo, min(hi, a)))
        if max(lo, b) < hi:
            out.append((max(lo, b), hi))
    return tuple(out)


def spans_in(spans: Spans, a: int, b: int) -> Spans:
    """Only the positions in [a, b)."""
    return tuple((max(lo, a), min(hi, b)) for lo, hi in spans if max(lo, a) < min(hi, b))


def spans_join(spans: Sequence[tuple[int, int]]) -> Spans:
    """Sorted, with touching spans merged."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        else:
            out.append((lo, hi))
    return tuple(out)


def spans_size(spans: Spans) -> int:
    """How many positions."""
    return sum(hi - lo for lo, hi in spans)


# --- how a batch is split ---------------------------------------------------------------------------------------------


def last_ubatch(rows: Sequence[int], n_ubatch: int, *, sequential: bool, keep_tail: int, by_seq: bool) -> dict[int, int]:
    """Tokens of every sequence in its last micro-batch; `rows` are the sequence ids of a batch in order.

    src/llama-batch.cpp, split_equal() and (`by_seq`, when all rows are outputs because of embeddings) split_seq().
    """
    index: dict[int, list[int]] = {}
    for i, s in enumerate(rows):
        index.setdefault(s, []).append(i)
    done = dict.fromkeys(index, 0)
    last: dict[int, int] = {}
    if by_seq:
        return {s: (len(ix) - 1) % n_ubatch + 1 for s, ix in index.items()}
    while any(done[s] < len(ix) for s, ix in index.items()):
        cur: list[int] = []
        for i, s in enumerate(rows):
            if s in cur or i < index[s][min(done[s], len(index[s]) - 1)] or done[s] >= len(index[s]):
                continue
            if sequential and cur and s != cur[-1] + 1:
                continue
            cur.append(s)
            if len(cur) > n_ubatch:
                break
        n = min(len(index[s]) - done[s] for s in cur)
        n = max(1, min(n, n_ubatch // len(cur)))
        took = dict.fromkeys(cur, n)
        if keep_tail > 0:
            kept = 0
            for s in cur:
                if 0 < len(index[s]) - done[s] - n < keep_tail:
                    break
                kept += 1
            if kept == 0:
                left = len(index[cur[0]]) - done[cur[0]]
                took[cur[0]] = left if left <= n_ubatch else max(1, min(n, left - keep_tail))
                kept = 1
            took = {s: took[s] for s in cur[:kept]}
        for s, k in took.items():
            done[s] += k
            last[s] = k
    return last


# --- state ------------------------------------------------------------------------------------------------------------


@dataclass
class Seq:
    """One sequence: its positions, the next one that the runner would use, and where its content comes from.

    k: its tokens in its last micro-batch (0: none of its rollback planes is valid). pending: a rollback waits for the next decode.
    owes_cut: a partial restore left rows behind this position in the other part; the caller must cut them. unsure: an aborted decode
    left an unknown number of rows.
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
        return Seq(self.spans, self.next, self.history, self.k, self.last_batch, self.pending, self.owes_cut, self.edited, self.unsure)


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
    corrupted: bool = False

    @property
    def next(self) -> int:
        """Where the saved sequence ended."""
        return self.seqs[0].next if self.seqs else 0


def history_cut(history: History, n: int) -> History:
    """The part of a history below position n."""
    out: list[tuple[int, int]] = []
    for stream, end in history:
        out.append((stream, min(end, n)))
        if end >= n:
            break
    return tuple(out) if n > 0 else ()


@dataclass
class State:
    """Everything a program has built up so far."""

    traits: Traits
    params: ContextParams
    seqs: list[Seq] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    epoch: int = 0
    serial: int = 0
    device: dict[int, int] = field(default_factory=dict)  # sequence -> serial of its newest on-device save in this context
    unique: int = 0

    def __post_init__(self) -> None:
        self._open(self.params)

    def _open(self, params: ContextParams) -> None:
        self.params = params
        self.seqs = [Seq() for _ in range(params.n_seq_max)]
        self.device = {}
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

    def is_newest(self, slot: Slot) -> bool:
        """An on-device handle is the newest one of its sequence in this context."""
        return slot.epoch == self.epoch and self.device.get(slot.seq) == slot.serial

    def tail_cut(self, op: SeqRm) -> int:
        """How many positions a removal takes off the end of one sequence, leaving some; 0 when it is no such removal."""
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
        match op:
            case Decode():
                self._decode(op)
            case Draft():
                self._grow(op.seq, op.n, self._fresh(), 1)
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
                self.seqs = [s if i == op.seq else Seq() for i, s in enumerate(self.seqs)]
            case SeqAdd() | SeqDiv() if 0 <= op.seq < len(self.seqs):
                self._shift(op)
            case Clear():
                self.seqs = [Seq() for _ in self.seqs]
            case Reopen():
                self.epoch += 1
                self._open(op.params or self.params)
            case Corrupt() if op.slot in self.slots:
                self.slots[op.slot].corrupted = True
            case _:
                pass

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
        s.k, s.last_batch, s.pending = k, n, False

    def _decode(self, op: Decode) -> None:
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

    def fits(self, slot: Slot) -> bool:
        """The context can take this state: same K/V types (the blob names them), and not spoilt."""
        same = (slot.params.type_k, slot.params.type_v, slot.params.flash_attn) == (
            self.params.type_k, self.params.type_v, self.params.flash_attn,
        )  # fmt: skip
        return same and not slot.corrupted

    def _restore(self, op: Restore) -> None:
        slot = self.slots.get(op.slot)
        if slot is None or slot.whole or not 0 <= op.seq < len(self.seqs):
            return
        before = self.seqs[op.seq]
        if not self.fits(slot):
            self.seqs[op.seq] = Seq(unsure=bool(before.spans))
            return
        new = slot.seqs[0].copy()
        new.k, new.pending, new.last_batch = 0, False, 0
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
            s.k, s.pending, s.last_batch = 0, False, 0

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
            if not left:
                self.seqs[i] = Seq()
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
        new.pending = False
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
        s.spans = spans_join([*outside, *moved])
        s.next = s.spans[-1][1]
        s.history, s.edited = ((self._fresh(), s.next),), True


# --- the contract, checked --------------------------------------------------------------------------------------------


def params_broken(p: ContextParams, traits: Traits) -> list[str]:
    """Ids of the preconditions (`subjects.contracts`) that context parameters break."""
    out = []
    if not 0 < p.n_ubatch <= p.n_batch:
        out.append("reopen.ubatch")
    if p.n_seq_max < 1:
        out.append("reopen.n_seq_max")
    quantised = ("q8_0", "q4_0")
    if p.type_v in quantised and not p.flash_attn:
        out.append("reopen.v-needs-fa")
    if not traits.q8 and (p.type_k in quantised or p.type_v in quantised):
        out.append("reopen.head-size")
    return out


def _collides(state: State, op: SeqAdd) -> bool:
    s = state.seqs[op.seq]
    p0, p1 = state.range(op)
    for lo, hi in spans_in(s.spans, p0, p1):
        if spans_in(spans_cut(s.spans, p0, p1), lo + op.delta, hi + op.delta):
            return True
    return False


def broken(state: State, op: Op) -> list[str]:
    """Ids of the preconditions (`subjects.contracts`) that `op` would break in `state`."""
    n = len(state.seqs)

    def ids(name: str, *seqs: int, low: int = 0) -> list[str]:
        return [f"{name}.ids"] if any(not low <= s < n for s in seqs) else []

    match op:
        case Decode():
            return _decode_broken(state, op)
        case Draft():
            return ids("draft", op.seq) or _use_broken("draft", state, op.seq) or (["draft.rows"] if op.n < 1 else [])
        case Save():
            out = ids("save", op.seq) or _use_broken("save", state, op.seq)
            if not 0 <= op.flags <= (PARTIAL | ON_DEVICE):
                out.append("save.flags")
            if op.medium == "file" and op.flags:
                out.append("save.file-flags")
            return out
        case SaveAll():
            return [x for i in range(n) for x in _use_broken("save_all", state, i)][:1]
        case Restore():
            return _restore_broken(state, op)
        case RestoreAll():
            slot = state.slots.get(op.slot)
            return ["restore_all.slot"] if slot is None or not slot.whole else []
        case SeqRm():
            return ids("seq_rm", op.seq, low=-1)
        case SeqCp():
            return ids("seq_cp", op.src, op.dst) or _copy_broken(state, op)
        case SeqKeep():
            return ids("seq_keep", op.seq)
        case SeqAdd():
            out = ids("seq_add", op.seq)
            if out:
                return out
            if not state.traits.can_shift:
                return ["seq_add.can-shift"]
            if any(lo + op.delta < 0 for lo, _ in spans_in(state.seqs[op.seq].spans, *state.range(op))):
                return ["seq_add.not-negative"]
            return ["seq_add.no-collision"] if _collides(state, op) else []
        case SeqDiv():
            out = ids("seq_div", op.seq)
            if out:
                return out
            if not state.traits.can_shift:
                return ["seq_div.can-shift"]
            return ["seq_div.d"] if op.d < 2 else [] if op.lo.at == "open" and op.hi.at == "open" else ["seq_div.whole"]
        case Reopen():
            return params_broken(op.params or state.params, state.traits)
        case Corrupt():
            return ["corrupt.slot"] if op.slot not in state.slots else []
        case Ask():
            return ids("ask", op.seq)
        case _:
            return []


def _use_broken(name: str, state: State, seq: int) -> list[str]:
    """A sequence must not be used while it owes the cut after a partial restore."""
    return ["restore.partial-cut"] if state.seqs[seq].owes_cut >= 0 else []


def _decode_broken(state: State, op: Decode) -> list[str]:
    seqs = [p.seq for p in op.parts]
    sizes = [len(p.tokens) if p.tokens else p.n for p in op.parts]
    if any(not 0 <= s < len(state.seqs) for s in seqs):
        return ["decode.ids"]
    if not sizes or min(sizes) < 1:
        return ["decode.not-empty"]
    if sum(sizes) > state.params.n_batch:
        return ["decode.rows"]
    if op.interleave and len(set(seqs)) < len(seqs):
        return ["decode.order"]
    for s in seqs:
        seq = state.seqs[s]
        if seq.owes_cut >= 0:
            return ["restore.partial-cut"]
        if seq.spans and seq.spans[-1][1] != seq.next:
            return ["decode.consecutive"]
    return []


def _restore_broken(state: State, op: Restore) -> list[str]:
    slot = state.slots.get(op.slot)
    if not 0 <= op.seq < len(state.seqs):
        return ["restore.ids"]
    if slot is None or slot.whole:
        return ["restore.slot"]
    if slot.flags & PARTIAL and state.traits.parts and not state.holds_prefix(op.seq, slot):
        return ["restore.partial-prefix"]
    return []


def _copy_broken(state: State, op: SeqCp) -> list[str]:
    if op.src == op.dst:
        return []
    if state.seqs[op.src].owes_cut >= 0:
        return ["restore.partial-cut"]
    if state.seqs[op.dst].spans or state.seqs[op.dst].unsure:
        return ["seq_cp.empty-dst"]
    p0, p1 = state.range(op)
    partial = p0 > 0 or op.hi.at != "open"
    if partial and not state.params.kv_unified:
        return ["seq_cp.whole-on-split"]
    if partial and state.traits.memory != "dense":
        return ["seq_cp.range-dense"]
    return []


def valid(scenario: Scenario, traits: Traits) -> list[str]:
    """Ids of all preconditions that a program breaks, in order; empty for a program that keeps the contract."""
    out = params_broken(scenario.params, traits)
    state = State(traits, scenario.params)
    for op in scenario.ops:
        out += broken(state, op)
        state.apply(op)
    return out

