"""The ledger: what every sequence must hold, folded from what was called and what was answered. It never calls
llama.cpp.

The rules are the table "What the ledger expects" of the design; each branch of `_Fold` is one of its rows. For every
sequence the ledger knows a History (tokens in the batches that decoded them, and edits), or Undefined with a reason.
From that come the claims that the oracles judge: every output row has a history that it must be the continuation of,
and after every step every sequence has positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    Ask,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Op,
    Outputs,
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
from subjects.trace import Batch, Facts, Step, Trace


class Seg(NamedTuple):
    """Rows of one sequence that one llama_decode computed: first position, tokens, and which rows were output."""

    start: int
    tokens: tuple[int, ...]
    out: Outputs


class Edit(NamedTuple):
    """An edit that changed positions or removed a head or middle: the call's name and resolved arguments after the
    sequence id.
    """

    call: str
    args: tuple[int, ...]


Item = Seg | Edit


@dataclass(frozen=True, slots=True)
class History:
    """What a sequence must hold.

    items: how it came to be, for a reference to repeat. length: next free position. shaped: scenario operations other
    than decodes that it went through, latest last. kinds: composition changes that honest float noise may follow from
    (see oracles.band). positions: the positions held, kept only once an edit made them other than 0 .. length-1.
    fresh_shape: no output row was seen since the latest of `shaped`. emptied_by: of one that is empty, the operation
    that made it so or was the last that could have put something there, -1 where it never held anything.
    """

    items: tuple[Item, ...] = ()
    length: int = 0
    shaped: tuple[int, ...] = ()
    kinds: frozenset[str] = frozenset()
    positions: tuple[int, ...] | None = None
    fresh_shape: bool = False
    # output rows of `items`, and how many of the oldest positions a sliding window may have dropped by now, in the
    # subject or in a reference that repeats the items
    outputs: int = 0
    gone: int = 0
    emptied_by: int = -1

    @property
    def empty(self) -> bool:
        """Whether it holds nothing (however it came to that)."""
        return not self.items

    @property
    def edited(self) -> bool:
        """Whether positions are no longer simply 0 .. length-1."""
        return self.positions is not None

    def held(self) -> tuple[int, ...]:
        """All positions that it must have."""
        return self.positions if self.positions is not None else tuple(range(self.length))

    def tokens(self) -> tuple[int, ...] | None:
        """The tokens in order, None for an edited history."""
        if self.edited:
            return None
        return tuple(t for item in self.items if isinstance(item, Seg) for t in item.tokens)


@dataclass(frozen=True, slots=True)
class Undefined:
    """Nothing can be said of a sequence, and why. `suspects`: operations that are involved."""

    reason: str


@dataclass(frozen=True, slots=True)
class HalfRestored:
    """After a partial restore: the partial parts are `saved`'s, the rest is longer and waits for the caller to cut
    its tail.
    """

    saved: History
    full: int


State = History | Undefined | HalfRestored
EMPTY = History()
# Slots from here on are those of observations (oracles.observe); other oracles compare what is in them.
OBSERVED_SLOTS = 1000
WINDOW_GONE = "now needs cells that the sliding window no longer holds"


@dataclass(frozen=True, slots=True)
class RowClaim:
    """Output row `row` of the trace must be what `chain` gives as its output row `ref_row` in a clean context."""

    step: int
    row: int
    seq: int
    chain: tuple[Item, ...]
    ref_row: int
    kinds: frozenset[str]
    shaped: tuple[int, ...]
    first: bool
    draft: bool
    pos: int
    params: ContextParams


@dataclass(frozen=True, slots=True)
class StateClaim:
    """Blob `blob` of a step holds sequence `seq` (of a whole context where `whole`), whose state must be the one that
    `chain` gives in a clean context. positions: what it must hold. partial: only windows and recurrent parts are in it.
    emptied_by: of an empty chain, see History.
    """

    step: int
    blob: int
    seq: int
    chain: tuple[Item, ...]
    positions: tuple[int, ...]
    kinds: frozenset[str]
    shaped: tuple[int, ...]
    params: ContextParams
    facts: Facts
    whole: bool
    partial: bool
    emptied_by: int = -1


@dataclass(slots=True)
class SavedSlot:
    """What a slot must give back."""

    states: dict[int, State]
    flags: int
    params: ContextParams
    epoch: int
    whole: bool
    medium: str
    seq: int = -1
    device_id: int = -1
    corrupt: bool = False


@dataclass(slots=True)
class Moment:
    """One step of the program as the ledger sees it.

    before / after: states of every sequence. touched: sequences that the operation says it changes. slot: the slot that
    a restore used. must_accept: the ledger knows no reason for a refusal. room: a decode that fails although the ledger
    sees room for it is wrong.
    """

    step: Step
    op: Op
    facts: Facts
    params: ContextParams
    before: dict[int, State]
    after: dict[int, State] = field(default_factory=dict)
    touched: frozenset[int] = frozenset()
    slot: SavedSlot | None = None
    must_accept: bool = False
    room: bool = True
    pos_before: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Ledger:
    """The whole account of one trace."""

    scenario: Scenario
    trace: Trace
    moments: list[Moment] = field(default_factory=list)
    rows: list[RowClaim] = field(default_factory=list)
    undefined_rows: list[tuple[int, str]] = field(default_factory=list)
    states: list[StateClaim] = field(default_factory=list)


def output_choice(outs: Sequence[bool]) -> Outputs:
    """Which rows of a part are output, as a scenario says it; "all" for an irregular choice."""
    if all(outs) or any(outs[:-1]):
        return "all"
    return "last" if outs[-1] else "none"


def count_outputs(items: tuple[Item, ...]) -> int:
    """Output rows of a chain."""
    return sum(0 if i.out == "none" else 1 if i.out == "last" else len(i.tokens) for i in items if isinstance(i, Seg))


def read(scenario: Scenario, trace: Trace) -> Ledger:
    """Fold a trace into its account. Steps that never returned are the last moment, with `after` equal to `before`."""
    fold = _Fold(scenario, trace)
    for step in trace.steps:
        fold.step(step)
    return fold.ledger


def _is_empty(state: State) -> bool:
    return isinstance(state, History) and state.empty


def _waits(h: History) -> bool:
    """Whether its positions were moved and nothing was decoded since."""
    for item in reversed(h.items):
        if isinstance(item, Seg):
            return False
        if item.call != "seq_rm":
            return True
    return False


def window_need(held: Sequence[int], n_swa: int) -> int:
    """The smallest position that a sliding window must still hold so that the next token, after the last, sees all.

    A window of one token lets the next token see itself only; the last position is held all the same.
    """
    first = min(held[-1], held[-1] + 2 - n_swa)
    return next(p for p in held if p >= first)


def cut(h: History, at: int) -> History:
    """The history without positions `at` and later, for histories that were never edited."""
    items: list[Item] = []
    kinds = h.kinds
    for item in h.items:
        assert isinstance(item, Seg)
        if item.start + len(item.tokens) <= at:
            items.append(item)
        elif item.start < at:
            out: Outputs = "all" if item.out == "all" else "none"
            items.append(Seg(item.start, item.tokens[: at - item.start], out))
            kinds |= {"split"}
    kept = tuple(items)
    return replace(h, items=kept, length=min(h.length, at), kinds=kinds, outputs=count_outputs(kept), gone=0)


class _Fold:
    def __init__(self, scenario: Scenario, trace: Trace):
        self.ledger = Ledger(scenario, trace)
        self.slots: dict[int, SavedSlot] = {}
        self.epoch = -1
        self.devices = 0
        self.last_device: dict[int, int] = {}
        self.states: dict[int, State] = {}
        self.pos: list[tuple[int, int]] = []
        self.shared: set[frozenset[int]] = set()
        self._open()

    def _open(self) -> None:
        self.epoch += 1
        trace = self.ledger.trace
        i = min(self.epoch, len(trace.facts) - 1)
        self.facts, self.params = trace.facts[i], trace.params[i]
        self.n_seq = self.params.n_seq_max
        self.states = dict.fromkeys(range(self.n_seq), EMPTY)
        self.pos = [(-1, -1)] * self.n_seq
        self.shared.clear()
        self.last_device.clear()

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        op = self.ledger.scenario.ops[step.op]
        m = Moment(step, op, self.facts, self.params, dict(self.states), pos_before=list(self.pos))
        self.ledger.moments.append(m)
        # the last operation of a misuse program breaks a duty: nothing is expected of it
        broken = self.ledger.scenario.misuse and step.op == len(self.ledger.scenario.ops) - 1
        if step.done and not step.skipped and not broken:
            _RULES[type(op)](self, op, m)
            if step.pos:
                self.pos = list(step.pos)
            if isinstance(op, Reopen):
                m.facts, m.params = self.facts, self.params
        elif not step.done and isinstance(op, Restore | RestoreAll):
            m.slot = self.slots.get(op.slot)
        m.after = dict(self.states) if m.touched else m.before

    def _set(self, m: Moment, seq: int, state: State) -> None:
        if 0 <= seq < self.n_seq:
            self.states[seq] = state
            if isinstance(state, History) and state.empty:
                # what emptied it stays in `shaped`: it is the first suspect if something is left over
                by = m.step.op
                was = m.before.get(seq)
                if isinstance(m.op, SeqRm | SeqKeep | Clear) and isinstance(was, History) and was.empty:
                    by = was.emptied_by  # it put nothing there and had nothing to remove
                self.states[seq] = History(shaped=(*state.shaped, m.step.op), fresh_shape=True, emptied_by=by)
                self._unshare(seq)

    def _unshare(self, seq: int) -> None:
        self.shared = {pair for pair in self.shared if seq not in pair}

    def _shape(self, h: History, op: int, *kinds: str) -> History:
        return replace(h, shaped=(*h.shaped, op), kinds=h.kinds | set(kinds), fresh_shape=True)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def _decode(self, op: Decode | Draft, m: Moment) -> None:
        m.touched = frozenset(r.seq for b in m.step.batches for r in b.rows)
        for batch in m.step.batches:
            self._batch(batch, m, draft=isinstance(op, Draft))

    def _batch(self, batch: Batch, m: Moment, *, draft: bool) -> None:
        rows: dict[int, list[tuple[int, int, int]]] = {}
        k = 0
        for r in batch.rows:
            number = -1
            if r.out:
                number = batch.first + k if batch.first >= 0 else -1
                k += 1
            rows.setdefault(r.seq, []).append((r.pos, r.token, number))
        if batch.rc in (1, -1):
            m.room = self._has_room(rows)
            return
        whole = batch.rc == 0
        for seq, mine in rows.items():
            state = self.states.get(seq)
            if not isinstance(state, History):
                self._decode_on_unknown(state, seq, mine, m)
                continue
            if mine[0][0] != state.length:
                # the runner's cursor differs from the ledger only where the subject's own answer was wrong
                reason = "decoded at a position that the ledger does not expect"
                self.states[seq] = Undefined(reason)
                self.ledger.undefined_rows.extend((number, reason) for _, _, number in mine if number >= 0)
                continue
            n = len(mine)
            if not whole:
                told = m.step.pos[seq][1] + 1 if seq < len(m.step.pos) else 0
                n = told - state.length
                if n < 0 or n > len(mine):
                    self.states[seq] = Undefined("after a failed decode, positions name no prefix of what was decoded")
                    continue
            if n:
                self.states[seq] = self._extend(state, seq, mine[:n], len(mine), m, mixed=len(rows) > 1, draft=draft)
            if not whole:
                now = self.states[seq]
                assert isinstance(now, History)
                now = self._shape(now, m.step.op, "split")
                self.states[seq] = replace(now, emptied_by=m.step.op) if now.empty else now

    def _decode_on_unknown(self, state: State | None, seq: int, mine: list[tuple[int, int, int]], m: Moment) -> None:
        if isinstance(state, HalfRestored):
            self.states[seq] = Undefined("decoded after a partial restore whose tail was not cut")
        reason = (
            state.reason
            if isinstance(state, Undefined)
            else "half restored"
            if state is not None
            else "no such sequence"
        )
        self.ledger.undefined_rows.extend((number, reason) for _, _, number in mine if number >= 0)

    def _extend(
        self, h: History, seq: int, mine: list[tuple[int, int, int]], sent: int, m: Moment, *, mixed: bool, draft: bool
    ) -> History:
        # for an irregular choice of outputs the reference outputs all, which is another composition
        out = output_choice([number >= 0 for _, _, number in mine])
        seg = Seg(h.length, tuple(t for _, t, _ in mine), out)
        kinds = set(h.kinds)
        if mixed:
            kinds.add("mixed")
        if self.params.kv_unified and any(self.pos[s][1] >= 0 for s in range(self.n_seq) if s != seq):
            kinds.add("cells")
        if len(mine) != sent:
            kinds.add("split")
        items = (*h.items, seg)
        before = h.outputs
        fresh = h.fresh_shape
        for j, (pos, _, number) in enumerate(mine):
            if number >= 0:
                ref = before + (j if out == "all" else 0)
                self.ledger.rows.append(
                    RowClaim(
                        m.step.op, number, seq, items, ref, frozenset(kinds), h.shaped, fresh, draft, pos, self.params
                    )
                )
                fresh = False
        positions = None if h.positions is None else (*h.positions, *(p for p, _, _ in mine))
        outputs = before + (0 if out == "none" else 1 if out == "last" else len(mine))
        new = History(items, h.length + len(mine), h.shaped, frozenset(kinds), positions, fresh, outputs, h.gone)
        return replace(new, gone=self._may_be_gone(new)) if positions is not None and self.facts.n_swa else new

    def _has_room(self, rows: dict[int, list[tuple[int, int, int]]]) -> bool:
        """Whether the attention cache has a free cell for every row, counting no sharing (recurrent memory never
        fills).
        """
        if self.facts.recurrent:
            return True
        used = {s: self._cells(s) for s in range(self.n_seq)}
        if any(u < 0 for u in used.values()):
            return False  # an undefined sequence may hold anything: nothing can be said
        if self.params.kv_unified:
            return sum(used.values()) + sum(map(len, rows.values())) <= self.facts.n_ctx
        return all(used.get(s, 0) + len(mine) <= self.facts.n_ctx_seq for s, mine in rows.items())

    def _cells(self, seq: int) -> int:
        state = self.states[seq]
        if isinstance(state, History):
            return state.length if state.positions is None else len(state.positions)
        return state.full if isinstance(state, HalfRestored) else -1

    # --- removal and edits --------------------------------------------------------------------------------------------

    def _seq_rm(self, op: SeqRm, m: Moment) -> None:
        targets = range(self.n_seq) if op.seq < 0 else [op.seq]
        m.touched = frozenset(targets)
        if m.step.rc:
            for s in targets:
                if 0 <= s < self.n_seq:
                    self._set(m, s, self._removed(self.states[s], s, m.step.args[1], m.step.args[2], m))
            return
        for s in targets:  # a refused one must change nothing, which the rows to come can tell
            if isinstance(state := self.states.get(s), History) and not state.empty:
                self._set(m, s, self._shape(state, m.step.op))

    def _removed(self, state: State, seq: int, p0: int, p1: int, m: Moment) -> State:
        p0 = max(p0, 0)
        if p0 == 0 and p1 < 0:
            return EMPTY
        end = 1 << 31 if p1 < 0 else p1
        if isinstance(state, HalfRestored):
            if p0 == state.saved.length and end >= state.full:
                return self._shape(state.saved, m.step.op)
            return Undefined("cut elsewhere than where a partial restore ended")
        if isinstance(state, Undefined):
            return state
        held = state.held()
        gone = [p for p in held if p0 <= p < end]
        if not gone:
            return state
        if len(gone) == len(held):
            return EMPTY
        tail = gone[-1] == held[-1] and gone == list(held[len(held) - len(gone) :])
        has_recurrent = self.facts.recurrent or self.facts.hybrid
        if tail and not state.edited:
            if self._window_gone(m, seq, tuple(range(p0))):
                return Undefined(WINDOW_GONE)
            return self._shape(cut(state, p0), m.step.op)
        if has_recurrent:
            return Undefined("a head or middle was removed from a sequence with a recurrent part")
        left = tuple(p for p in held if not p0 <= p < end)
        items = (*state.items, Edit("seq_rm", (p0, p1)))
        new = replace(state, items=items, positions=left, length=left[-1] + 1)
        old = self._may_be_gone(state)
        new = replace(new, gone=sum(not p0 <= p < end for p in held[:old]))
        if self._window_gone(m, seq, left) or self._needs_gone(new):
            return Undefined(WINDOW_GONE)
        return self._shape(new, m.step.op, "edited")

    def _may_be_gone(self, h: History) -> int:
        """How many of its oldest positions the next token cannot see, so that their window cells may be taken."""
        if not self.facts.n_swa:
            return 0
        held = h.held()
        return max(h.gone, sum(p <= held[-1] + 1 - self.facts.n_swa for p in held))

    def _needs_gone(self, h: History) -> bool:
        """Whether the next token would see a position that may be gone."""
        held = h.held()
        return any(p > held[-1] + 1 - self.facts.n_swa for p in held[: h.gone])

    def _window_gone(self, m: Moment, seq: int, held: tuple[int, ...]) -> bool:
        """Whether a sequence that holds `held` after an edit needs cells that the sliding window no longer has.

        Cells behind the window go at any time, and pos_min tells (llama.h: "typically non-zero only for SWA caches").
        The caller must look at it; what such a sequence holds is undefined by design.
        """
        if not self.facts.n_swa or seq >= len(m.step.pos):
            return False
        lo = m.step.pos[seq][0]
        return lo < 0 or lo > window_need(held, self.facts.n_swa)

    def _seq_cp(self, op: SeqCp, m: Moment) -> None:
        m.touched = frozenset({op.dst})
        if op.src == op.dst:
            m.touched = frozenset()
            return
        src, dst = self.states.get(op.src), self.states.get(op.dst)
        if src is None or dst is None:
            return
        p0, p1 = max(m.step.args[2], 0), m.step.args[3]
        if not (isinstance(dst, History) and dst.empty):
            self._set(m, op.dst, Undefined("copied onto a sequence that was not empty"))
            return
        if not isinstance(src, History):
            self._set(m, op.dst, src if isinstance(src, Undefined) else Undefined("copy of a half restored sequence"))
            self._share(op.src, op.dst)  # whatever is in the cells
            return
        if src.empty:
            return
        copy: State = self._shape(src, m.step.op, "cells")
        end = src.held()[-1] + 1
        if p0 > src.held()[0] or 0 <= p1 < end:
            if self.facts.recurrent or self.facts.hybrid or self.facts.n_swa:
                copy = Undefined("a range was copied from memory that is not plain attention")
            elif src.edited:
                copy = Undefined("a range was copied from an edited sequence")
            else:
                part = cut(src, p1) if 0 <= p1 < end else src
                copy = self._shape(part, m.step.op, "cells")
                if p0 > 0:
                    left = tuple(range(p0, part.length))
                    copy = (
                        replace(copy, items=(*part.items, Edit("seq_rm", (0, p0))), positions=left) if left else EMPTY
                    )
        self._set(m, op.dst, copy)
        if not _is_empty(copy):
            self._share(op.src, op.dst)

    def _share(self, src: int, dst: int) -> None:
        if not (self.params.kv_unified or self.facts.recurrent or self.facts.hybrid):
            return  # the cells of a split cache were copied
        for other in [s for pair in self.shared if src in pair for s in pair - {src}]:
            self.shared.add(frozenset({other, dst}))
        self.shared.add(frozenset({src, dst}))

    def _seq_keep(self, op: SeqKeep, m: Moment) -> None:
        m.touched = frozenset(s for s in range(self.n_seq) if s != op.seq)
        for s in m.touched:
            self._set(m, s, EMPTY)

    def _moved(self, op: SeqAdd | SeqDiv, m: Moment, call: str) -> None:
        others = {s for pair in self.shared if op.seq in pair for s in pair}
        m.touched = frozenset({op.seq} | others)
        _, p0, p1, x = m.step.args
        p0, end = max(p0, 0), 1 << 31 if p1 < 0 else p1
        state = self.states.get(op.seq)
        if isinstance(state, HalfRestored):
            state = Undefined("moved while half restored")
        if isinstance(state, History):
            held = state.held()
            hit = [p for p in held if p0 <= p < end]
            if not hit or (call == "seq_add" and x == 0) or (call == "seq_div" and x == 1):
                m.touched = frozenset()
                return
            new = tuple((p + x if call == "seq_add" else p // x) if p0 <= p < end else p for p in held)
            items = (*state.items, Edit(call, (p0, p1, x)))
            moved = replace(state, items=items, positions=new, length=new[-1] + 1, gone=self._may_be_gone(state))
            if list(new) != sorted(new) or new[0] < 0:
                state = Undefined("positions ran into each other or below zero")
            elif self._window_gone(m, op.seq, new) or self._needs_gone(moved):
                state = Undefined(WINDOW_GONE)
            else:
                state = self._shape(moved, m.step.op, "edited")
        if state is not None:
            self._set(m, op.seq, state)
        for s in others - {op.seq}:
            self._set(m, s, Undefined("shares cells with a sequence whose positions were moved"))

    def _seq_add(self, op: SeqAdd, m: Moment) -> None:
        self._moved(op, m, "seq_add")

    def _seq_div(self, op: SeqDiv, m: Moment) -> None:
        self._moved(op, m, "seq_div")

    # --- saving and restoring -----------------------------------------------------------------------------------------

    def _save(self, op: Save, m: Moment) -> None:
        slot = SavedSlot({0: self.states[op.seq]}, op.flags, self.params, self.epoch, False, op.medium, op.seq)
        if op.flags & ON_DEVICE:
            self.devices += 1
            slot.device_id = self.last_device[op.seq] = self.devices
        self.slots[op.slot] = slot
        if op.slot < OBSERVED_SLOTS:
            self._claim(m, len(m.step.blobs) - 1, op.flags, {op.seq: self.states[op.seq]}, whole=False)

    def _claim(self, m: Moment, blob: int, flags: int, states: dict[int, State], *, whole: bool) -> None:
        """Claim the state of every sequence in a blob whose bytes were kept.

        What waits for the next decode is not in a blob yet, and whether that decode came may differ between subject and
        reference: a history that was moved and not decoded since is left out.
        """
        if not 0 <= blob < len(m.step.blobs) or m.step.blobs[blob].at < 0:
            return
        for seq, state in states.items():
            if not isinstance(state, History) or _waits(state):
                continue
            partial = bool(flags & PARTIAL) and (self.facts.hybrid or self.facts.recurrent or self.facts.n_swa > 0)
            chain, positions, kinds = state.items, state.held() if state.items else (), state.kinds
            claim = StateClaim(
                m.step.op,
                blob,
                seq,
                chain,
                positions,
                kinds,
                state.shaped,
                self.params,
                self.facts,
                whole,
                partial,
                state.emptied_by,
            )
            self.ledger.states.append(claim)

    def _save_all(self, op: SaveAll, m: Moment) -> None:
        self.slots[op.slot] = SavedSlot(dict(self.states), 0, self.params, self.epoch, True, op.medium)
        self._claim(m, len(m.step.blobs) - 1, 0, self.states, whole=True)

    def _corrupt(self, op: Corrupt, m: Moment) -> None:
        slot = self.slots.get(op.slot)
        if slot is not None and m.step.value:
            slot.corrupt = True

    def _restore(self, op: Restore, m: Moment) -> None:
        m.touched = frozenset({op.seq})
        slot = m.slot = self.slots[op.slot]
        saved = slot.states[0]
        m.must_accept = self._must_accept(slot, {op.seq: saved})
        if not m.step.rc:
            self._refused([op.seq], m)
        elif slot.corrupt:
            self._set(m, op.seq, Undefined("restored from a corrupted blob that was accepted"))
        elif slot.flags & PARTIAL and (self.facts.hybrid or self.facts.n_swa):
            self._set(m, op.seq, self._half(self.states[op.seq], saved, op.seq, m))
        else:
            self._set(
                m,
                op.seq,
                self._shape(saved, m.step.op, "cells") if isinstance(saved, History) and not saved.empty else saved,
            )
            self._unshare(op.seq)
        if m.step.rc and len(m.step.blobs) > op.times and op.seq in self.states:
            self._claim(m, op.times, slot.flags, {op.seq: self.states[op.seq]}, whole=False)

    def _half(self, base: State, saved: State, seq: int, m: Moment) -> State:
        if not isinstance(saved, History):
            return saved if isinstance(saved, Undefined) else Undefined("saved while half restored")
        full: int | None = None
        if isinstance(base, History):
            have, want = base.tokens(), saved.tokens()
            if have is not None and want is not None and have[: len(want)] == want:
                full = base.length
        elif isinstance(base, HalfRestored):
            have, want = base.saved.tokens(), saved.tokens()
            if have is not None and have == want:
                full = base.full
        if full is None:
            return Undefined("partial restore onto something that does not hold the saved prefix")
        if saved.empty:
            return EMPTY if full == 0 else Undefined("partial restore of an empty state onto a longer sequence")
        shaped = self._shape(saved, m.step.op, "cells", "split")
        return shaped if full == saved.length else HalfRestored(shaped, full)

    def _restore_all(self, op: RestoreAll, m: Moment) -> None:
        m.touched = frozenset(range(self.n_seq))
        slot = m.slot = self.slots[op.slot]
        m.must_accept = self._must_accept(slot, slot.states)
        if not m.step.rc:
            self._refused(range(self.n_seq), m)
            return
        self.shared.clear()
        for s in range(self.n_seq):
            saved = slot.states.get(s, EMPTY)
            if slot.corrupt:
                saved = Undefined("restored from a corrupted blob that was accepted")
            self._set(
                m,
                s,
                self._shape(saved, m.step.op, "cells") if isinstance(saved, History) and not saved.empty else saved,
            )
        if len(m.step.blobs) > op.times:
            self._claim(m, op.times, 0, self.states, whole=True)
        # sequences that shared cells when they were saved share them again; which ones is not kept, so all may
        live = [s for s in range(self.n_seq) if not _is_empty(self.states[s])]
        if self.params.kv_unified or self.facts.recurrent or self.facts.hybrid:
            self.shared = {frozenset({a, b}) for a in live for b in live if a < b}

    def _refused(self, seqs: range | list[int], m: Moment) -> None:
        """A refused restore leaves its target as it was or empty; positions say which, and the refusal oracle
        checks the rest.
        """
        for s in seqs:
            now = m.step.pos[s]
            if now == (-1, -1):
                self._set(m, s, EMPTY)
            elif now != m.pos_before[s]:
                self._set(m, s, Undefined("a refused restore left it neither as it was nor empty"))
            elif isinstance(state := self.states[s], History) and not state.empty:
                self._set(m, s, self._shape(state, m.step.op))

    def _must_accept(self, slot: SavedSlot, states: dict[int, State]) -> bool:
        """Whether the ledger knows of no reason to refuse this blob here."""
        same = ("kv_unified", "n_seq_max", "type_k", "type_v", "flash_attn", "swa_full", "n_ctx")
        if slot.corrupt or any(getattr(slot.params, k) != getattr(self.params, k) for k in same):
            return False
        if slot.flags & ON_DEVICE and (slot.epoch != self.epoch or slot.device_id not in self.last_device.values()):
            return False
        if any(not isinstance(s, History) for s in states.values()):
            return False
        if not self.params.kv_unified or self.facts.recurrent:
            return True
        others = [self._cells(s) for s in range(self.n_seq) if s not in states]
        if any(n < 0 for n in others):
            return False  # an undefined sequence may hold anything: nothing can be said
        need = sum(len(s.held()) for s in states.values() if isinstance(s, History))
        return sum(others) + need <= self.facts.n_ctx

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _clear(self, op: Clear, m: Moment) -> None:
        m.touched = frozenset(range(self.n_seq))
        for s in range(self.n_seq):
            self._set(m, s, EMPTY)

    def _reopen(self, op: Reopen, m: Moment) -> None:
        self._open()
        m.touched = frozenset(range(self.n_seq))

    def _ask(self, op: Ask, m: Moment) -> None:
        pass


_RULES: dict[type[Op], Callable[..., None]] = {
    Decode: _Fold._decode,
    Draft: _Fold._decode,
    Save: _Fold._save,
    SaveAll: _Fold._save_all,
    Restore: _Fold._restore,
    RestoreAll: _Fold._restore_all,
    Corrupt: _Fold._corrupt,
    SeqRm: _Fold._seq_rm,
    SeqCp: _Fold._seq_cp,
    SeqKeep: _Fold._seq_keep,
    SeqAdd: _Fold._seq_add,
    SeqDiv: _Fold._seq_div,
    Clear: _Fold._clear,
    Reopen: _Fold._reopen,
    Ask: _Fold._ask,
}
