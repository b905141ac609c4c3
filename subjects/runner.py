"""Runs one scenario on the library: resolves its symbols, makes the calls, and emits what was answered.

The runner knows how to call llama.cpp and nothing about right and wrong. It keeps a cursor, the next free position of
every sequence, only to turn "append 5 tokens" into positions; what a sequence must hold is the ledger's business
(`oracles.ledger`).

Everything is emitted twice: before a call (so that a call that never returns is known, with its resolved arguments)
and after it.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from subjects.scenario import (
    ON_DEVICE,
    Ask,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Edge,
    Medium,
    Op,
    Part,
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
    token,
)
from subjects.shim import Shim
from subjects.state.edits import OWN, Source, assemble, pieces_of
from subjects.trace import KEPT_BYTES, KEPT_TOTAL, Batch, Blob, Facts, Row, Step

# a session file carries tokens beside the state; these are saved and must come back
FILE_TOKENS = (7, 11, 13)
# a query for positions names every sequence up to the one that is asked for
FAR_SEQ = 4096
_NAN = array("f", [float("nan")]).tobytes()


class Refused(RuntimeError):
    """The library would not make a model or a context."""


class Sink(Protocol):
    """Where a run goes while it happens. What a call is about to do is told before it, so that a crash names it."""

    def facts(self, facts: Facts, params: ContextParams) -> None:
        """A context was made."""

    def begin(self, op: int, args: list[int]) -> None:
        """An operation begins, with its resolved arguments."""

    def batch(self, rows: list[Row]) -> None:
        """llama_decode is about to be called, within the operation that began last."""

    def code(self, rc: int, first: int) -> None:
        """llama_decode returned; `first` as in trace.Batch."""

    def row(self, logits: bytes, hidden: bytes) -> None:
        """One output row was read back."""

    def state(self, data: bytes) -> None:
        """The bytes of a blob, to be kept behind those before (see trace.Trace.states)."""

    def end(self, step: Step) -> None:
        """The operation has ended; its batches were told already and are not in `step`."""


@dataclass
class Slot:
    """A saved state in host hands: the bytes (or the file that holds them) and what is needed to put them back."""

    blob: bytes
    flags: int
    medium: Medium
    whole: bool
    next_pos: list[int]
    fd: int = -1
    corrupt: bool = False


@dataclass
class Outcome:
    """What the pool must know of a finished run: the context, and whether another program may have it."""

    ctx: int
    params: ContextParams
    reusable: bool


@dataclass
class Runner:
    """One scenario on one context. `take` hands out a context for parameters (fresh or pooled), `give` takes one
    back.
    """

    shim: Shim
    model: int
    sink: Sink
    take: Callable[[ContextParams], int | None]
    slots: dict[int, Slot] = field(default_factory=dict)
    ctx: int = 0
    n_rows: int = 0
    clean: bool = True
    # where the bytes of blobs were kept, by their hash, and how many in all
    state_at: dict[str, int] = field(default_factory=dict)
    n_state_bytes: int = 0

    def run(self, scenario: Scenario) -> Outcome:
        """Execute every operation; raises Refused when a context cannot be made."""
        self.model_facts = self.shim.model_facts(self.model)
        reopened = [op.params for op in scenario.ops if isinstance(op, Reopen) and op.params is not None]
        self.any_hidden = any(p.embeddings for p in (scenario.params, *reopened))
        try:
            self._open(scenario.params)
            for i, op in enumerate(scenario.ops):
                step = Step(op=i)
                self._step = step
                _DO[type(op)](self, op, step)
                if not step.skipped:
                    step.pos = self.shim.positions(self.ctx, self.n_seq)
                    self._follow(op, step)
                step.log = self.shim.take_log()
                step.done = True
                step.batches = []
                self.sink.end(step)
        finally:
            for slot in self.slots.values():
                if slot.fd >= 0:
                    os.close(slot.fd)
        last = next((op for op in reversed(scenario.ops) if not isinstance(op, Ask)), None)
        # Copies between streams and position shifts wait for the next decode; a context that still owes one is not
        # reused.
        settled = isinstance(last, Decode | Draft) and self._step.rc == 0
        return Outcome(self.ctx, self.params, self.clean and settled and not scenario.misuse)

    # --- contexts -----------------------------------------------------------------------------------------------------

    def _open(self, params: ContextParams) -> None:
        ctx = self.take(params)
        if ctx is None:
            raise Refused("llama_init_from_model: " + "; ".join(self.shim.take_log()[-3:]))
        self.ctx, self.params = ctx, params
        self.shim.take_log()  # what loading and opening say is the same every time
        self.facts = self._told(ctx)
        self.n_seq = params.n_seq_max
        self.next_pos = [0] * self.n_seq
        self.sink.facts(self.facts, params)

    def _told(self, ctx: int) -> Facts:
        """What the library says about the model and a context."""
        f = self.shim.context_facts(ctx)
        m = self.model_facts
        return Facts(
            n_vocab=m["n_vocab"],
            n_embd=m["n_embd"],
            recurrent=bool(m["recurrent"]),
            hybrid=bool(m["hybrid"]),
            n_swa=m["n_swa"],
            n_layer=m["n_layer"],
            n_ctx=f["n_ctx"],
            n_ctx_seq=f["n_ctx_seq"],
            n_batch=f["n_batch"],
            n_ubatch=f["n_ubatch"],
            n_seq_max=f["n_seq_max"],
            n_rs_seq=f["n_rs_seq"],
            can_shift=bool(f["can_shift"]),
        )

    def _begin(self, step: Step, *args: int) -> None:
        step.args = list(args)
        self.sink.begin(step.op, step.args)

    # --- resolution ---------------------------------------------------------------------------------------------------

    def _next(self, seq: int) -> int:
        """The next free position of a sequence; 0 for an id out of range, which a misuse program hands to the library
        all the same."""
        return self.next_pos[seq] if 0 <= seq < self.n_seq else 0

    def _move(self, seq: int, to: int) -> None:
        if 0 <= seq < self.n_seq:
            self.next_pos[seq] = to

    def _edge(self, e: Edge, seq: int) -> int:
        if e.at == "open":
            return -1
        base = 0 if e.at == "start" else self._next(seq)
        return max(base + e.d, 0)

    def _rows(self, parts: tuple[Part, ...], interleave: bool) -> list[Row]:
        lists: list[list[Row]] = []
        for part in parts:
            start = self._next(part.seq)
            n_vocab = self.facts.n_vocab
            tokens = part.tokens or [token(part.stream, start + j, n_vocab) for j in range(part.n)]
            last = len(tokens) - 1
            lists.append(
                [
                    Row(part.seq, start + j, t, part.out == "all" or (part.out == "last" and j == last))
                    for j, t in enumerate(tokens)
                ]
            )
            # a second part of the same sequence goes on; _follow has the last word
            self._move(part.seq, start + len(tokens))
        if not interleave:
            return [r for rows in lists for r in rows]
        depth = max((len(rows) for rows in lists), default=0)
        return [rows[j] for j in range(depth) for rows in lists if j < len(rows)]

    # --- decoding -----------------------------------------------------------------------------------------------------

    def _decode(self, step: Step, rows: list[Row], abort_after: int | None) -> Batch:
        batch = Batch(rows)
        self.sink.batch(rows)
        batch.rc = self.shim.decode(
            self.ctx,
            [r.token for r in rows],
            [r.pos for r in rows],
            [r.seq for r in rows],
            [r.out for r in rows],
            abort_after,
        )
        if batch.rc == 0:
            batch.first = self._read_rows(rows)
        self.sink.code(batch.rc, batch.first)
        step.rc = batch.rc
        return batch

    def _read_rows(self, rows: list[Row]) -> int:
        """Read the output rows back and return the number of the first, -1 where there are none or the library
        gives none.
        """
        first = -1
        for i, r in enumerate(rows):
            if not r.out:
                continue
            logits = self.shim.logits(self.ctx, i, self.facts.n_vocab)
            if logits is None:
                return -1
            hidden = b""
            if self.params.embeddings:
                # a row that the library does not give keeps its place, or all later ones would be taken for others
                hidden = self.shim.hidden(self.ctx, i, self.facts.n_embd) or _NAN * self.facts.n_embd
            elif self.any_hidden:  # another context of this program has them: keep both lists in step
                hidden = bytes(4 * self.facts.n_embd)
            self.sink.row(logits, hidden)
            self._was_read(logits)
            first = self.n_rows if first < 0 else first
            self.n_rows += 1
        return first

    def _was_read(self, logits: bytes) -> None:
        """An output row was read back."""
        self._last_logits = logits

    def _do_decode(self, op: Decode, step: Step) -> None:
        before = list(self.next_pos)
        rows = self._rows(op.parts, op.interleave)
        self._begin(step)
        if self._decode(step, rows, op.abort_after).rc != 0:
            self.next_pos = before

    def _do_draft(self, op: Draft, step: Step) -> None:
        tok = token(op.stream, self._next(op.seq), self.facts.n_vocab)
        self._begin(step)
        for _ in range(op.n):
            batch = self._decode(step, [Row(op.seq, self._next(op.seq), tok, True)], None)
            if batch.rc != 0 or batch.first < 0:
                return
            self._move(op.seq, self._next(op.seq) + 1)
            row = array("f", self._last_logits)
            tok = row.index(max(row))

    # --- saving and restoring -----------------------------------------------------------------------------------------

    def _file(self, slot: Slot) -> Path:
        # /proc/self/fd names a file that lives in memory only: nothing is left behind however the child ends
        if slot.fd < 0:
            slot.fd = os.memfd_create("redraft-state")
            os.write(slot.fd, slot.blob)
        return Path(f"/proc/self/fd/{slot.fd}")

    def _get(self, seq: int | None, flags: int) -> tuple[int, int, bytes]:
        """(promised, written, bytes) of one save into memory; `seq` None is the whole context."""
        if seq is None:
            size = self.shim.all_size(self.ctx)
            return size, *self.shim.all_get(self.ctx, size)
        size = self.shim.seq_size(self.ctx, seq, flags)
        return size, *self.shim.seq_get(self.ctx, seq, flags, size)

    def _get_file(self, seq: int | None, slot: Slot) -> tuple[int, int, bytes]:
        """The same through a session file, which has no size query: promised is what the file holds."""
        path = self._file(slot)
        if seq is None:
            ok = self.shim.all_save_file(self.ctx, path, FILE_TOKENS)
            data = path.read_bytes()
            return len(data), len(data) if ok else 0, data
        moved = self.shim.seq_save_file(self.ctx, path, seq, FILE_TOKENS)
        data = path.read_bytes()
        return len(data), moved, data

    def _save(self, step: Step, number: int, seq: int | None, flags: int, medium: Medium, again: bool) -> None:
        self._begin(step, number, -1 if seq is None else seq, flags)
        if flags & ON_DEVICE:
            self.clean = False
        slot = Slot(b"", flags, medium, seq is None, list(self.next_pos) if seq is None else [self._next(seq)])
        for _ in range(1 + again):
            size, moved, slot.blob = self._get_file(seq, slot) if medium == "file" else self._get(seq, flags)
            step.blobs.append(self._with_bytes(blob_of(size, moved, slot.blob), slot.blob, flags))
            step.rc = moved
        self._forget(number)
        self.slots[number] = slot

    def _with_bytes(self, blob: Blob, data: bytes, flags: int) -> Blob:
        """The blob with a place for its bytes, where they are of a size to be judged. A device's holds no data."""
        if flags & ON_DEVICE or not data or len(data) > KEPT_BYTES:
            return blob
        if blob.sha not in self.state_at:
            if self.n_state_bytes + len(data) > KEPT_TOTAL:
                return blob
            self.state_at[blob.sha] = self.n_state_bytes
            self.n_state_bytes += len(data)
            self.sink.state(data)
        blob.at, blob.length = self.state_at[blob.sha], len(data)
        return blob

    def _forget(self, number: int) -> None:
        old = self.slots.pop(number, None)
        if old is not None and old.fd >= 0:
            os.close(old.fd)

    def _do_save(self, op: Save, step: Step) -> None:
        self._save(step, op.slot, op.seq, op.flags, op.medium, op.again)

    def _do_save_all(self, op: SaveAll, step: Step) -> None:
        self._save(step, op.slot, None, 0, op.medium, op.again)

    def _restore(self, step: Step, number: int, seq: int | None, times: int, resave: bool) -> None:
        slot = self.slots.get(number)
        if slot is None or slot.whole != (seq is None):
            step.skipped = f"slot {number} holds nothing of that kind"
            return
        self._begin(step, number, -1 if seq is None else seq, slot.flags)
        if slot.corrupt or slot.flags & ON_DEVICE:
            self.clean = False  # also in a context that was opened after the slot was made
        for _ in range(times):
            if slot.medium == "file":
                path = self._file(slot)
                if seq is None:
                    step.rc, tokens = self.shim.all_load_file(self.ctx, path, 64)
                else:
                    step.rc, tokens = self.shim.seq_load_file(self.ctx, path, seq, 64)
                step.value = int(tuple(tokens) == FILE_TOKENS)
                moved = len(slot.blob) if seq is None and step.rc else step.rc
            else:
                moved = (
                    self.shim.all_set(self.ctx, slot.blob)
                    if seq is None
                    else self.shim.seq_set(self.ctx, seq, slot.flags, slot.blob)
                )
                step.rc = moved
            blob = blob_of(len(slot.blob), moved, slot.blob)
            step.blobs.append(blob if slot.corrupt else self._with_bytes(blob, slot.blob, slot.flags))
        if not step.rc:
            self.clean = False
        elif resave and slot.medium == "buffer" and not slot.flags & ON_DEVICE:
            size, moved, data = self._get(seq, slot.flags)
            step.blobs.append(self._with_bytes(blob_of(size, moved, data), data, slot.flags))

    def _do_restore(self, op: Restore, step: Step) -> None:
        self._restore(step, op.slot, op.seq, op.times, op.resave)

    def _do_restore_all(self, op: RestoreAll, step: Step) -> None:
        self._restore(step, op.slot, None, op.times, op.resave)

    def _do_corrupt(self, op: Corrupt, step: Step) -> None:
        slot = self.slots.get(op.slot)
        if slot is None:
            step.skipped = f"slot {op.slot} holds nothing"
            return
        slot.corrupt = True
        self._begin(step, op.slot)

        def other(number: int) -> Source | None:
            donor = self.slots.get(number)
            return Source(donor.blob) if donor is not None else None

        pieces = pieces_of(Source(slot.blob), op.edits, other)
        step.pieces = [p._replace(slot=op.slot) if p.slot == OWN else p for p in pieces]
        data = assemble(step.pieces, lambda number: self.slots[number].blob)
        step.value = int(data != slot.blob)
        slot.blob = data
        step.blobs.append(blob_of(len(data), len(data), slot.blob))
        if slot.fd >= 0:
            os.ftruncate(slot.fd, 0)
            os.pwrite(slot.fd, slot.blob, 0)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _do_seq_rm(self, op: SeqRm, step: Step) -> None:
        p0, p1 = self._edge(op.lo, op.seq), self._edge(op.hi, op.seq)
        self._begin(step, op.seq, p0, p1)
        step.rc = self.shim.seq_rm(self.ctx, op.seq, p0, p1)

    def _do_seq_cp(self, op: SeqCp, step: Step) -> None:
        p0, p1 = self._edge(op.lo, op.src), self._edge(op.hi, op.src)
        self._begin(step, op.src, op.dst, p0, p1)
        self.shim.seq_cp(self.ctx, op.src, op.dst, p0, p1)

    def _do_seq_keep(self, op: SeqKeep, step: Step) -> None:
        self._begin(step, op.seq)
        self.shim.seq_keep(self.ctx, op.seq)

    def _do_seq_add(self, op: SeqAdd, step: Step) -> None:
        p0, p1 = self._edge(op.lo, op.seq), self._edge(op.hi, op.seq)
        self._begin(step, op.seq, p0, p1, op.delta)
        self.shim.seq_add(self.ctx, op.seq, p0, p1, op.delta)

    def _do_seq_div(self, op: SeqDiv, step: Step) -> None:
        p0, p1 = self._edge(op.lo, op.seq), self._edge(op.hi, op.seq)
        self._begin(step, op.seq, p0, p1, op.d)
        self.shim.seq_div(self.ctx, op.seq, p0, p1, op.d)

    def _do_clear(self, op: Clear, step: Step) -> None:
        self._begin(step, int(op.data))
        self.shim.clear(self.ctx, op.data)

    def _do_reopen(self, op: Reopen, step: Step) -> None:
        self._begin(step)
        self.shim.free_context(self.ctx)
        self.ctx = 0
        self.clean = True  # what was done to the old context is gone with it
        self._open(op.params or self.params)

    def _do_ask(self, op: Ask, step: Step) -> None:
        if op.what == "positions" and not 0 <= op.seq < FAR_SEQ:
            step.skipped = f"the shim asks for positions of sequences 0 to {FAR_SEQ - 1}"
            return
        self._begin(step, op.seq, op.flags)
        if op.what == "size":
            step.value = self.shim.seq_size(self.ctx, op.seq, op.flags)
        elif op.what == "size_all":
            step.value = self.shim.all_size(self.ctx)
        elif op.what == "can_shift":
            step.value = self.shim.context_facts(self.ctx)["can_shift"]
        else:
            step.value = self.shim.positions(self.ctx, max(self.n_seq, op.seq + 1))[op.seq][1]

    # --- the cursor ---------------------------------------------------------------------------------------------------

    def _follow(self, op: Op, step: Step) -> None:
        """Move the cursor as the operation says it did; where only the library knows (edits, refusals), ask its
        positions.
        """
        told = [hi + 1 for _, hi in step.pos]
        match op:
            case Decode() if step.rc == 2 or (step.rc or 0) < -1:
                for part in op.parts:
                    if 0 <= part.seq < self.n_seq:
                        self.next_pos[part.seq] = told[part.seq]
            case SeqRm() if step.rc and op.seq < self.n_seq:
                for s in range(self.n_seq) if op.seq < 0 else (op.seq,):
                    p0, p1 = max(step.args[1], 0), step.args[2]
                    if p1 < 0 or p1 >= self.next_pos[s]:
                        # a hole before p0 makes the end lie further in front
                        self.next_pos[s] = min(self.next_pos[s], p0, told[s])
            case SeqCp():
                p1 = step.args[3]
                end = self._next(op.src)
                if op.src != op.dst:
                    self._move(op.dst, end if p1 < 0 else min(end, p1))
            case SeqKeep():
                self.next_pos = [n if s == op.seq else 0 for s, n in enumerate(self.next_pos)]
            case SeqAdd() | SeqDiv():
                self.next_pos = told
            case Restore() if 0 <= op.seq < self.n_seq:
                self.next_pos[op.seq] = self.slots[op.slot].next_pos[0] if step.rc else told[op.seq]
            case RestoreAll():
                slot = self.slots[op.slot].next_pos
                self.next_pos = [*slot, *[0] * self.n_seq][: self.n_seq] if step.rc else told
            case Clear():
                self.next_pos = [0] * self.n_seq
            case _:
                pass


def blob_of(size: int, moved: int, data: bytes) -> Blob:
    """One save or restore call as the trace has it."""
    return Blob(size, moved, hashlib.sha256(data).hexdigest()[:16])


_DO: dict[type[Op], Callable[..., None]] = {
    Decode: Runner._do_decode,
    Draft: Runner._do_draft,
    Save: Runner._do_save,
    Restore: Runner._do_restore,
    SaveAll: Runner._do_save_all,
    RestoreAll: Runner._do_restore_all,
    SeqRm: Runner._do_seq_rm,
    SeqCp: Runner._do_seq_cp,
    SeqKeep: Runner._do_seq_keep,
    SeqAdd: Runner._do_seq_add,
    SeqDiv: Runner._do_seq_div,
    Clear: Runner._do_clear,
    Reopen: Runner._do_reopen,
    Corrupt: Runner._do_corrupt,
    Ask: Runner._do_ask,
}
