"""Runs a scenario with a speculative driver: target, draft and driver are one subject, and every call goes to all three
as the server makes them (tools/server/server-context.cpp).

Like the plain runner it knows how to call and nothing about right and wrong. What a caller of the driver keeps itself
(the tokens of every sequence, its last draft) is kept here, and goes with a checkpoint.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from subjects.drivers import DraftAsk, Driver
from subjects.runner import Refused, Runner, blob_of
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    PIECES,
    Accept,
    Ask,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    Mangle,
    Mangling,
    Op,
    Propose,
    Reopen,
    Rewind,
    Scenario,
    SeqRm,
    Verify,
    token,
)
from subjects.trace import Blob, Row, Step

ROUTE_FLAGS = {"host": PARTIAL, "device": PARTIAL | ON_DEVICE, "whole": 0}
"""How a route of Verify saves what it may have to go back to."""
_INT = 2**31 - 1


@dataclass(frozen=True)
class Proposal:
    """A draft of one sequence: the token it began with, and what was drafted behind it. `at`: where it began, once it
    was verified and the answer is still open."""

    last: int
    drafts: tuple[int, ...]
    at: int = -1


@dataclass(frozen=True)
class Seat:
    """What the caller keeps of one sequence: its tokens, the greedy token behind them (-1 unknown), its proposal."""

    tokens: tuple[int, ...] = ()
    greedy: int = -1
    proposal: Proposal | None = None


@dataclass
class Kept:
    """A checkpoint in host hands."""

    target: bytes
    draft: bytes
    driver: bytes | None
    flags: int
    seat: Seat
    home: tuple[int, int]
    """sequence and context that it was made in"""
    mangled: bool = False


@dataclass
class DriverRunner(Runner):
    """One scenario on a target, a draft and a driver. `draft_context(params, target)` makes the draft's context (0 for
    kinds without one), `make(target, draft, n_seq)` the driver between them."""

    draft_context: Callable[[ContextParams, int], int | None] = lambda _, __: None
    make: Callable[[int, int, int], Driver] | None = None
    shares: Callable[[int, int], bool] = lambda _, __: False
    draft: int = 0
    driver: Driver | None = None
    seats: list[Seat] = field(default_factory=list)
    kept: dict[int, Kept] = field(default_factory=dict)
    epoch: int = -1

    # --- life ---------------------------------------------------------------------------------------------------------

    def run_driver(self, scenario: Scenario) -> None:
        """Execute every operation; raises Refused when a context or the driver cannot be made. Frees all it made."""
        assert scenario.driver is not None
        self.p = scenario.driver
        self.model_facts = self.shim.model_facts(self.model)
        self.any_hidden = False
        try:
            self._open(scenario.params)
            for i, op in enumerate(scenario.ops):
                step = Step(op=i)
                self._step = step
                self._possible(op, i)
                _DO[type(op)](self, op, step)
                if not step.skipped:
                    step.pos = self.shim.positions(self.ctx, self.n_seq)
                    step.draft_pos = self.shim.positions(self.draft, self.n_seq) if self.draft else []
                assert self.driver is not None
                step.log = [*self.shim.take_log(), *self.driver.log()]
                step.done = True
                step.batches = []
                self.sink.end(step)
        finally:
            self._close()

    def _possible(self, op: Op, at: int) -> None:
        """Raises Refused for what cannot even be asked of the library: broken duties of which nothing is told here."""
        seqs = op.seqs if isinstance(op, Propose | Verify) else ()
        if isinstance(op, Accept | Checkpoint | Rewind | Begin | SeqRm):
            seqs = (op.seq,)
        elif isinstance(op, Decode):
            seqs = tuple(p.seq for p in op.parts)
        out = next((s for s in seqs if not 0 <= s < self.n_seq), None)
        why = f"there is no sequence {out}" if out is not None else ""
        if isinstance(op, Propose):
            if op.last is not None and len(op.last) != len(seqs):
                why = f"last has {len(op.last)} tokens for {len(seqs)} sequences"
            if any(abs(n) > _INT for n in (op.n_max, *(op.last or ()))):
                why = "a number does not fit into 32 bits"
        if isinstance(op, Verify) and op.accept and len(op.accept) != len(seqs):
            why = f"accept has {len(op.accept)} numbers for {len(seqs)} sequences"
        if isinstance(op, Decode) and any(abs(t) > _INT for p in op.parts for t in p.tokens or ()):
            why = "a number does not fit into 32 bits"
        if why:
            raise Refused(f"the harness cannot run this: operation {at} ({op.__struct_config__.tag}): {why}")

    def _close(self) -> None:
        if self.driver is not None:
            self.driver.close()
        if self.draft:
            self.shim.free_context(self.draft)
        if self.ctx:
            self.shim.free_context(self.ctx)
        self.driver, self.draft, self.ctx = None, 0, 0

    def _open(self, params: ContextParams) -> None:
        ctx = self.take(params)
        if ctx is None:
            raise Refused("llama_init_from_model: " + "; ".join(self.shim.take_log()[-3:]))
        self.ctx, self.params = ctx, params
        self.epoch += 1
        self.n_seq = params.n_seq_max
        if self.p.late:
            self.shim.decode(ctx, [0, 0], [0, 1], [0, 0], [0, 1])
            self.shim.clear(ctx, True)
        draft = self.draft_context(params, ctx)
        if draft is None:
            raise Refused("the draft context: " + "; ".join(self.shim.take_log()[-3:]))
        self.draft = draft
        assert self.make is not None
        try:
            self.driver = self.make(ctx, draft, self.n_seq)
        except ValueError as e:
            raise Refused(str(e)) from None
        self.shim.take_log()
        self.driver.log()
        self.facts = msgspec.structs.replace(
            self._told(ctx),
            n_draft_max=self.driver.n_max,
            offers_state=self.driver.state(0) is not None,
            draft_shares=self.p.kind == "draft-mtp" and self.shares(draft, ctx),
        )
        self.seats = [Seat()] * self.n_seq
        self.next_pos = [0] * self.n_seq
        self.sink.facts(self.facts, params)

    # --- what the caller keeps ----------------------------------------------------------------------------------------

    def _sit(self, seq: int, seat: Seat) -> None:
        self.seats[seq] = seat
        self.next_pos[seq] = len(seat.tokens)

    def _cut_both(self, seq: int, at: int) -> bool:
        ok = bool(self.shim.seq_rm(self.ctx, seq, at, -1))
        return (not self.draft or bool(self.shim.seq_rm(self.draft, seq, at, -1))) and ok

    def _process(self, step: Step, rows: list[Row]) -> dict[int, list[int]] | None:
        """Decode rows on the target and let the driver process them; the greedy token of every output row by sequence,
        None where the decode or the driver failed (step.rc tells; -100 the driver)."""
        assert self.driver is not None
        batch = self._decode(step, rows, None)
        if batch.rc != 0:
            return None
        ok = self.driver.process(rows)
        step.taps += self.driver.take()
        if not ok:
            step.rc = -100
            return None
        greedy: dict[int, list[int]] = {}
        tokens = iter(self._greedy)
        for r in rows:
            if r.out:
                greedy.setdefault(r.seq, []).append(next(tokens, -1))
        return greedy

    def _read_rows(self, rows: list[Row]) -> int:
        self._greedy: list[int] = []
        return super()._read_rows(rows)

    def _was_read(self, logits: bytes) -> None:
        row = array("f", logits)
        self._greedy.append(row.index(max(row)))

    # --- operations ---------------------------------------------------------------------------------------------------

    def _do_decode(self, op: Decode, step: Step) -> None:
        rows = self._rows(op.parts, interleave=False)
        self._begin(step)
        greedy = self._process(step, rows)
        for seq in {r.seq for r in rows}:
            seat = self.seats[seq]
            if greedy is None:
                self._sit(seq, replace(seat, proposal=None))
                continue
            tokens = (*seat.tokens, *(r.token for r in rows if r.seq == seq))
            last = [r for r in rows if r.seq == seq][-1]
            self._sit(seq, Seat(tokens, greedy[seq][-1] if last.out else -1))

    def _do_propose(self, op: Propose, step: Step) -> None:
        assert self.driver is not None
        asks = []
        for i, seq in enumerate(op.seqs):
            seat = self.seats[seq]
            at = len(seat.tokens)
            last = token(max(op.stream, 0), at, self.facts.n_vocab)
            if op.last is not None:
                last = op.last[i]
            elif op.stream < 0 and seat.greedy >= 0:
                last = seat.greedy
            asks.append(DraftAsk(seq, at, last, op.n_max, seat.tokens))
        self._begin(step, *(a.last for a in asks))
        step.drafts = self.driver.draft(asks)
        step.taps += self.driver.take()
        step.rc = 1
        for ask, drafts in zip(asks, step.drafts, strict=True):
            if self.draft and not self.shim.seq_rm(self.draft, ask.seq, ask.pos0, -1):
                step.rc = 0
            self._sit(ask.seq, replace(self.seats[ask.seq], proposal=Proposal(ask.last, tuple(drafts))))

    def _do_verify(self, op: Verify, step: Step) -> None:
        assert self.driver is not None
        mine = [(i, s, p) for i, s in enumerate(op.seqs) if (p := self.seats[s].proposal) is not None and p.at < 0]
        if not mine:
            step.skipped = "no sequence has a draft"
            return
        back: dict[int, Kept] = {}
        if op.route != "cut" and op.accept:
            back = {s: self._keep(s, ROUTE_FLAGS[op.route]) for _, s, _ in mine}
        rows = [
            Row(s, len(self.seats[s].tokens) + j, t, True)
            for _, s, p in mine
            for j, t in enumerate((p.last, *p.drafts))
        ]
        self._begin(step)
        greedy = self._process(step, rows)
        if greedy is None:
            return
        again: list[Row] = []
        args: list[int] = []
        step.value = 1
        for i, s, p in mine:
            seat = self.seats[s]
            if not op.accept:
                self._sit(s, replace(seat, proposal=replace(p, at=len(seat.tokens))))
                self.next_pos[s] += 1 + len(p.drafts)
                continue
            k = min(op.accept[i], len(p.drafts))
            if k < 0:
                k = next((j for j, t in enumerate(p.drafts) if t != greedy[s][j]), len(p.drafts))
            args.append(k)
            if k == len(p.drafts) or op.route == "cut":
                step.value &= self._settle(s, seat, p, k, greedy[s][k])
                continue
            kept = back[s]
            step.value &= self._put(s, kept, PIECES, step) & self._cut_both(s, len(seat.tokens))
            again += [Row(s, len(seat.tokens) + j, t, True) for j, t in enumerate((p.last, *p.drafts[:k]))]
        step.args = args
        if again:
            greedy = self._process(step, again)
            if greedy is None:
                return
            for s in {r.seq for r in again}:
                seat, n = self.seats[s], sum(r.seq == s for r in again)
                self.driver.accept(s, n - 1)
                tokens = (*seat.tokens, *(r.token for r in again if r.seq == s))
                self._sit(s, Seat(tokens, greedy[s][-1]))

    def _settle(self, seq: int, seat: Seat, p: Proposal, k: int, greedy: int) -> int:
        """Take the first k drafts and cut the rest from both memories."""
        assert self.driver is not None
        self.driver.accept(seq, k)
        tokens = (*seat.tokens, p.last, *p.drafts[:k])
        self._sit(seq, Seat(tokens, greedy))
        return int(k == len(p.drafts) or self._cut_both(seq, len(tokens)))

    def _do_accept(self, op: Accept, step: Step) -> None:
        seat = self.seats[op.seq]
        if seat.proposal is None or seat.proposal.at < 0:
            step.skipped = f"sequence {op.seq} has no open verification"
            return
        k = min(op.n, len(seat.proposal.drafts))
        self._begin(step, op.seq, k)
        step.value = self._settle(op.seq, replace(seat, proposal=None), seat.proposal, k, -1)

    def _keep(self, seq: int, flags: int) -> Kept:
        assert self.driver is not None
        target = self.shim.seq_get(self.ctx, seq, flags, self.shim.seq_size(self.ctx, seq, flags))[1]
        draft = b""
        if self.draft:
            draft = self.shim.seq_get(self.draft, seq, flags, self.shim.seq_size(self.draft, seq, flags))[1]
        state = self.driver.state(seq) if self.p.state else None
        return Kept(target, draft, state, flags, self.seats[seq], (seq, self.epoch))

    def _do_checkpoint(self, op: Checkpoint, step: Step) -> None:
        self._begin(step, op.slot, op.seq, op.flags)
        k = self.kept[op.slot] = self._keep(op.seq, op.flags)
        blobs = [k.target, *([k.draft] if self.draft else [])]
        step.blobs = [blob_of(len(b), len(b), b) for b in blobs]
        step.blobs.append(_offered(k.driver))

    def _put(self, seq: int, k: Kept, parts: tuple[str, ...], step: Step) -> int:
        """Put parts of a checkpoint back: 1 when every call that answers said yes."""
        assert self.driver is not None
        ok = 1
        for name, ctx, blob in (("target", self.ctx, k.target), ("draft", self.draft, k.draft)):
            if name in parts and ctx:
                moved = self.shim.seq_set(ctx, seq, k.flags, blob)
                step.blobs.append(blob_of(len(blob), moved, blob))
                ok &= int(moved > 0)
        if "driver" in parts:
            if k.driver is not None:
                self.driver.restore(seq, k.driver)
            step.blobs.append(_offered(k.driver))
        return ok

    def _do_rewind(self, op: Rewind, step: Step) -> None:
        kept = self.kept.get(op.slot)
        if kept is None:
            step.skipped = f"slot {op.slot} holds nothing"
            return
        self._begin(step, op.slot, op.seq, kept.flags)
        step.rc = self._put(op.seq, kept, op.parts, step)
        if "target" in op.parts:
            # accept() belongs to the driver and the sequence that drafted
            here = kept.home == (op.seq, self.epoch)
            self._sit(op.seq, kept.seat if here else replace(kept.seat, proposal=None))
        seat = self.seats[op.seq]
        verified = seat.proposal is not None and seat.proposal.at >= 0
        at = len(seat.tokens) + (1 + len(seat.proposal.drafts) if seat.proposal and verified else 0)
        self.next_pos[op.seq] = at
        step.value = int("target" not in op.parts or bool(self.shim.seq_rm(self.ctx, op.seq, at, -1)))
        if self.draft and {"target", "draft"} & set(op.parts):
            step.value &= self.shim.seq_rm(self.draft, op.seq, at, -1)

    def _do_mangle(self, op: Mangle, step: Step) -> None:
        kept = self.kept.get(op.slot)
        if kept is None or kept.driver is None:
            step.skipped = f"slot {op.slot} holds no state of the driver"
            return
        if kept.mangled:  # a second change could undo the first
            step.skipped = f"the driver's part of slot {op.slot} is malformed already"
            return
        self._begin(step, op.slot, aim(kept.driver, op.how, op.at))
        kept.driver, kept.mangled = mangled(kept.driver, op.how, op.at), True
        step.blobs.append(blob_of(len(kept.driver), len(kept.driver), kept.driver))

    def _do_begin(self, op: Begin, step: Step) -> None:
        assert self.driver is not None
        self._begin(step, op.seq)
        self.driver.begin(op.seq, self.seats[op.seq].tokens)

    def _do_seq_rm(self, op: SeqRm, step: Step) -> None:
        at = max(self._edge(op.lo, op.seq), 0)
        self._begin(step, op.seq, at, -1)
        step.rc = int(self._cut_both(op.seq, at))
        if step.rc:
            self._sit(op.seq, Seat(self.seats[op.seq].tokens[:at]))

    def _do_reopen(self, op: Reopen, step: Step) -> None:
        self._begin(step)
        params = op.params or self.params
        self._close()
        self._open(params)

    def _follow(self, op: Op, step: Step) -> None:
        """The seats follow by themselves."""


def _offered(state: bytes | None) -> Blob:
    """A driver's state as the trace has it; size -1 where it offers none."""
    return blob_of(-1, 0, b"") if state is None else blob_of(len(state), len(state), state)


HEADERS: dict[bytes, int] = {b"RDMT": 8, b"SPCS": 8}
"""How many 32-bit numbers a state begins with, by its first four bytes: those of the driver in Python, and of
tests/planted/mtp_state.patch. What follows are rows, where any number may be a right one; of a format that is not
known the first alone is changed."""
_MODEL = 3  # which of them names the model, in both


def aim(blob: bytes, how: Mangling, at: int) -> int:
    """Which 32-bit number of a driver's state a mangling changes; -1 where it changes the length."""
    n = min(HEADERS.get(blob[:4], 1), max(len(blob) // 4, 1))
    match how:
        case "magic" | "negative" | "huge":
            return at % n
        case "other":
            return 0
        case "model" if n > _MODEL:
            return _MODEL
        case _:
            return -1


def mangled(blob: bytes, how: Mangling, at: int = 0) -> bytes:
    """A driver's state that no driver may take back."""
    i = 4 * max(aim(blob, how, at), 0)
    old = int.from_bytes(blob[i : i + 4], "little")

    def put(value: int) -> bytes:
        return blob[:i] + value.to_bytes(4, "little") + blob[i + 4 :]

    match how:
        case "empty":
            return b""
        case "short":
            return blob[:-1]
        case "long":
            return blob + b"\0\0\0\0"
        case "magic":
            return put(old ^ 0x80000000)
        case "width":
            return blob[: len(blob) // 2 & ~3]
        case "negative":  # -2: a position of -1 means that there is none
            return put(0xFFFFFFFE)
        case "huge":
            return put(0x7FFFFFFF)
        case "other":  # another driver's
            return b"RDRF" + blob[4:]
        case "model":  # one with other weights, or one that is twice as wide
            return put(old ^ 1) if i else blob + blob[4:]


_DO: dict[type[Op], Callable[..., None]] = {
    Decode: DriverRunner._do_decode,
    Propose: DriverRunner._do_propose,
    Verify: DriverRunner._do_verify,
    Accept: DriverRunner._do_accept,
    Checkpoint: DriverRunner._do_checkpoint,
    Rewind: DriverRunner._do_rewind,
    Mangle: DriverRunner._do_mangle,
    Begin: DriverRunner._do_begin,
    SeqRm: DriverRunner._do_seq_rm,
    Reopen: DriverRunner._do_reopen,
    Ask: Runner._do_ask,
}
