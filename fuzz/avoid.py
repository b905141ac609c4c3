"""Stepping round faults that are known to be open upstream, by name.

An avoidance knows the trigger of one fault, statically: does this program contain what sets it off? The campaign uses
it to tell a known finding from a new one with the same signature, and the generator to spend no programs on it. Adding
one is one entry in `AVOIDANCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from fuzz import harm
from fuzz.drivers.avoid import DRIVER_AVOIDANCES
from fuzz.drivers.avoid import repair as driver_repair
from fuzz.drivers.avoid import triggered as driver_triggered
from fuzz.state import State, Traits, broken
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    AnyOp,
    ContextParams,
    Decode,
    Draft,
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


def _never(_: State, __: Op) -> bool:
    return False


def _any_params(_: ContextParams, __: Traits) -> bool:
    return False


def _keep(params: ContextParams, _: Traits) -> ContextParams:
    return params


@dataclass(frozen=True)
class Avoidance:
    """One known fault: `hit` says that an operation sets it off in a state, `params_hit` that a context's parameters
    do.

    `params_fix` gives parameters near those that do not.
    """

    name: str
    about: str
    hit: Callable[[State, Op], bool] = _never
    params_hit: Callable[[ContextParams, Traits], bool] = _any_params
    params_fix: Callable[[ContextParams, Traits], ContextParams] = _keep


def _small_ubatch(params: ContextParams, traits: Traits) -> bool:
    n_rs = params.n_rs_seq if traits.rollback else 0
    # with embeddings the batch is split by sequence, where nothing asserts (src/llama-memory-hybrid.cpp init_batch():
    # split_seq); deepseek4 does not make that difference
    return n_rs > 0 and params.n_ubatch <= n_rs + 1 and (traits.any_rollback or not params.embeddings)


def _ubatch_hit(state: State, op: Op) -> bool:
    return isinstance(op, Decode | Draft) and _small_ubatch(state.params, state.traits)


def _ubatch_fix(params: ContextParams, _: Traits) -> ContextParams:
    n = params.n_rs_seq + 2
    return msgspec.structs.replace(params, n_ubatch=n, n_batch=max(n, params.n_batch))


def _stale_rollback(state: State, op: Op) -> bool:
    """Exact only if d <= min(n_rs_seq, k - 1); llama.cpp accepts every d <= n_rs_seq."""
    if not isinstance(op, SeqRm) or not state.n_rs:
        return False
    d = state.tail_cut(op)
    if state.traits.any_rollback:
        # deepseek4 keeps its planes across decodes, but not the compressor rows of a block that was completed since
        return d > state.seqs[op.seq].last_batch
    return 0 < d <= state.n_rs and not state.seqs[op.seq].pending and d > state.seqs[op.seq].k - 1


def _device(state: State, op: Op) -> bool:
    if not isinstance(op, Restore):
        return False
    slot = state.slots.get(op.slot)
    return slot is not None and not slot.whole and bool(slot.flags & ON_DEVICE)


def _device_corrupt(state: State, op: Op) -> bool:
    return _device(state, op) and isinstance(op, Restore) and state.slots[op.slot].corrupted


def _device_foreign(state: State, op: Op) -> bool:
    return _device(state, op) and isinstance(op, Restore) and state.slots[op.slot].epoch != state.epoch


def _device_older(state: State, op: Op) -> bool:
    if not isinstance(op, Restore) or not _device(state, op):
        return False
    slot = state.slots[op.slot]
    return slot.epoch == state.epoch and not state.is_newest(slot)


def _split_keep(state: State, op: Op) -> bool:
    """llama_kv_cache::seq_keep() looks at the kept sequence's own stream only."""
    if (
        not isinstance(op, SeqKeep)
        or state.params.kv_unified
        or state.traits.memory == "recurrent"
        or state.traits.any_rollback
    ):
        return False
    return any(state.maybe_live(i) and i != op.seq for i in range(len(state.seqs)))


def _recurrent_all(state: State, op: Op) -> bool:
    """llama_memory_recurrent::seq_rm() takes -1 for an id beyond n_seq_max and refuses."""
    return isinstance(op, SeqRm) and op.seq < 0 and state.traits.recurrent and not state.traits.any_rollback


def _recurrent_edit(state: State, op: Op) -> bool:
    """llama_memory_recurrent::seq_rm() says true to a head or middle, whose traces the state keeps."""
    if not isinstance(op, SeqRm) or op.seq < 0 or not state.traits.recurrent or state.traits.any_rollback:
        return False
    p0, p1 = state.range(op)
    return p0 < p1 < state.end(op.seq) and p0 < state.end(op.seq) and state.length(op.seq) > 0


def _shared_rollback(state: State, op: Op) -> bool:
    """llama_memory_recurrent::seq_cp() shares the cell: a rollback of one sequence moves the position of the other."""
    if not isinstance(op, SeqRm) or not state.n_rs or not 0 <= op.seq < len(state.seqs):
        return False
    cell = state.seqs[op.seq].cell
    if state.shared(op.seq) and not state.traits.any_rollback and any(s.edited for s in state.seqs if s.cell == cell):
        return True  # one of them was shifted, and the cell with it: the other's length says nothing any more
    if state.tail_cut(op) == 0 or not state.accepts(op):
        return False
    if state.traits.any_rollback:  # deepseek4: the copy's own snapshots are not there
        return state.seqs[op.seq].copied
    return state.shared(op.seq)


def _pending_copy(state: State, op: Op) -> bool:
    """llama_memory_recurrent::seq_cp() leaves both rs_idx as they are: the copy of a rolled back sequence is not rolled
    back.
    """
    if not isinstance(op, SeqCp) or op.src == op.dst:
        return False
    if state.traits.any_rollback:  # deepseek4 resets the copy's own, and does not take the source's
        return state.pending(op.src)
    return state.pending(op.src) or (0 <= op.dst < len(state.seqs) and state.seqs[op.dst].haunted)


def _pending_wipe(state: State, op: Op) -> bool:
    """llama_memory_recurrent::seq_rm() forgets a rollback for (0, -1) only, not when p1 is the end of the sequence, and
    seq_keep() not at all.
    """
    if isinstance(op, SeqKeep):
        return any((s.pending or s.haunted) and i != op.seq for i, s in enumerate(state.seqs))
    if not isinstance(op, SeqRm) or op.hi.at == "open" or op.seq < 0 or state.traits.any_rollback:
        return False
    p0, p1 = state.range(op)
    return state.pending(op.seq) and p0 == 0 and p1 >= state.end(op.seq)


def _abort_recurrent(state: State, op: Op) -> bool:
    """An aborted micro-batch has moved the recurrent cell already; taking it back is refused, or a rollback to planes
    never written.
    """
    return isinstance(op, Decode) and op.abort_after is not None and state.traits.recurrent


def _moved_rollback(state: State, op: Op) -> bool:
    """llama_memory_recurrent::find_slot() swaps cells and moves plane 0 only: after a decode of other sequences the
    planes of a sequence may be another's.
    """
    if not isinstance(op, SeqRm) or not state.n_rs or state.traits.any_rollback or state.tail_cut(op) == 0:
        return False
    return state.accepts(op) and state.seqs[op.seq].passed


def _queued_copy(state: State, op: Op) -> bool:
    """llama_kv_cache::seq_cp() between streams only queues the copy, and states are read and written without it."""
    match op:
        case Save():
            return op.seq in state.queued
        case Restore():
            return op.seq in state.queued and op.slot in state.slots
        case SaveAll() | RestoreAll():
            return bool(state.queued)
        case _:
            return False


def _queued_source(state: State, op: Op) -> bool:
    """llama_dsv4_comp_state::seq_cp() only queues the copy of its rows: what is done to the source before the next
    decode is done to the copy's rows too.
    """
    if not state.sources:
        return False
    match op:
        case SeqRm() | SeqAdd() | SeqDiv() | Restore():
            return op.seq < 0 or op.seq in state.sources
        case SeqCp():
            return op.dst in state.sources and op.src != op.dst
        case SeqKeep():
            return state.sources != {op.seq}
        case RestoreAll():
            return True
        case _:
            return False


def _queued_shift(state: State, op: Op) -> bool:
    """llama_kv_cache::seq_add() moves positions at once and rotates keys at the next decode: a state in between has the
    new positions and the old keys. A decode that is aborted in that rotation leaves it to be done again.
    """
    if state.traits.memory == "recurrent":
        return False
    match op:
        case Save():
            return op.seq in state.shifted
        case SaveAll():
            return bool(state.shifted)
        case Decode():
            return op.abort_after is not None and bool(state.shifted)
        case _:
            return False


def _recurrent_cells(state: State, op: Op) -> bool:
    """llama_memory_recurrent::state_read_meta() asserts that find_slot() has made the cells that a blob claims."""
    if not isinstance(op, Restore) or op.slot not in state.slots or not state.traits.recurrent:
        return False
    if state.traits.any_rollback:
        return False
    return harm.claims_several_recurrent_cells(state.slots[op.slot].edits, state.params.n_seq_max)


def _stuck_cell(state: State, op: Op) -> bool:
    """llama_kv_cache::state_read_meta() takes any position; seq_rm(-1, -1) is from 0 up to the largest, without it."""
    if not isinstance(op, Restore | RestoreAll) or op.slot not in state.slots:
        return False
    return harm.leaves_stuck_cells(state.slots[op.slot].edits)


def _index_pos(state: State, op: Op) -> bool:
    """llama_memory_hybrid_idx takes any positions in the indexer's part, and asserts at the next decode that they lie
    in the window of its cells.
    """
    if not isinstance(op, Restore | RestoreAll) or op.slot not in state.slots or not state.traits.undoes:
        return False
    return harm.moves_indexer_apart(state.slots[op.slot].edits)


def _half_restore(state: State, op: Op) -> bool:
    """A restore that is refused in its second memory part leaves the first one restored or emptied (iswa, hybrid-iswa,
    hybrid's attention half, dsv4), so does one that fails in a later stream; a whole-context restore leaves what it had
    read by then.
    """
    if not isinstance(op, Restore | RestoreAll) or op.slot not in state.slots:
        return False
    slot = state.slots[op.slot]
    p, own = slot.params, state.params
    attention = state.traits.memory != "recurrent"
    streams = attention and harm.streams_of(own) > 1
    partial = bool(slot.flags & PARTIAL)
    target = harm.Target(state.traits, slot.whole, partial, slot.medium, streams)
    if slot.edits and harm.leaves_half(slot.edits, target):
        return True
    if attention and harm.streams_of(p) != harm.streams_of(own) and not (partial and state.traits.memory == "hybrid"):
        return False  # refused at the first number that is read
    room = isinstance(op, RestoreAll) or not own.kv_unified or slot.seqs[0].length <= own.n_ctx - (
        state.total() - state.length(op.seq)
    )  # fmt: skip
    fits = state.fits(slot, edited=True) and p.swa_full == own.swa_full and p.n_ctx <= own.n_ctx and room
    return not fits and harm.refused_in_attention(target)


def _empty_restore(state: State, op: Op) -> bool:
    """llama_kv_cache::state_read_sinfo() skips a stream without cells before anything was removed from the target."""
    if not isinstance(op, Restore) or op.slot not in state.slots or state.traits.memory == "recurrent":
        return False
    return state.saved_empty(op.slot) and state.maybe_live(op.seq)


def _device_regrow(state: State, op: Op) -> bool:
    """The device store is allocated anew when its total size changes, not when it is cut into more ranges."""
    if not isinstance(op, Save) or not op.flags & ON_DEVICE or not state.device_saved(op.seq):
        return False
    return state.traits.window > 0 or state.params.kv_unified or state.holes


def _window_purge(state: State, op: Op) -> bool:
    """llama_kv_cache::prepare() tries the slots of all micro-batches and puts back only the cells that it took, not
    those that apply_ubatch() purged behind the window with them: the first micro-batches then miss them.
    """
    if not isinstance(op, Decode) or not state.traits.window or not state.holes:
        return False
    unequal = not state.params.kv_unified and len({p.n for p in op.parts}) > 1  # such a batch is split by sequence
    if len(state.rows(op)) <= state.params.n_ubatch and not unequal:
        return False
    return any(state.length(p.seq) and state.end(p.seq) + p.n > state.traits.window for p in op.parts)


def _file_cut(state: State, op: Op) -> bool:
    """llama_context::state_seq_load_file() asserts that what it read was there."""
    if not isinstance(op, Restore | RestoreAll) or op.slot not in state.slots:
        return False
    slot = state.slots[op.slot]
    return slot.medium == "file" and harm.reads_past_the_end(slot.edits)


def _shift_type(state: State, op: Op) -> bool:
    """ggml-cpu's ROPE knows F16 and F32 only, and quantised K goes through F32; a recurrent memory alone has no K."""
    if not isinstance(op, SeqAdd | SeqDiv) or state.traits.memory == "recurrent":
        return False
    return state.params.type_k == "bf16" and state.length(op.seq) > 0


def _shift_window(state: State, op: Op) -> bool:
    """The K shift of a hybrid with a window asserts on a cache half without layers (lfm2 with a window)."""
    if not isinstance(op, SeqAdd | SeqDiv) or state.traits.memory != "hybrid":
        return False
    return state.traits.window > 0 and state.length(op.seq) > 0


def _hidden_rows(params: ContextParams, traits: Traits) -> bool:
    return params.embeddings and traits.hidden_aborts


def _hidden_hit(state: State, op: Op) -> bool:
    return isinstance(op, Decode | Draft) and _hidden_rows(state.params, state.traits)


def _hidden_fix(params: ContextParams, _: Traits) -> ContextParams:
    return msgspec.structs.replace(params, embeddings=False)


AVOIDANCES: dict[str, Avoidance] = {
    a.name: a
    for a in (
        Avoidance(
            "ubatch-rollback",
            "decode in a context with n_ubatch <= n_rs_seq + 1: assertion abort",
            _ubatch_hit,
            _small_ubatch,
            _ubatch_fix,
        ),
        Avoidance(
            "stale-rollback", "seq_rm of a tail that reaches a recurrent state which was not kept", _stale_rollback
        ),
        Avoidance("device-corrupt", "restore of an on-device blob that was changed", _device_corrupt),
        Avoidance("device-foreign", "restore of an on-device handle of another context", _device_foreign),
        Avoidance(
            "device-older", "restore of an on-device handle after a later on-device save of its sequence", _device_older
        ),
        Avoidance("split-keep", "seq_keep with kv_unified off while other sequences live: they stay", _split_keep),
        Avoidance("recurrent-rm-all", "seq_rm of sequence -1 on a recurrent memory: refused", _recurrent_all),
        Avoidance(
            "recurrent-rm-part", "seq_rm of a head or middle on a recurrent memory: true, and not done", _recurrent_edit
        ),
        Avoidance(
            "shared-rollback", "seq_cp, then a rollback of either before it decodes: both move", _shared_rollback
        ),
        Avoidance(
            "pending-copy", "seq_cp of a sequence whose rollback waits: the copy is not rolled back", _pending_copy
        ),
        Avoidance("pending-wipe", "rollback, seq_rm(0, end), new content: it starts from a stale plane", _pending_wipe),
        Avoidance(
            "abort-recurrent",
            "a decode that aborts on a recurrent memory: the state is neither old nor new",
            _abort_recurrent,
        ),
        Avoidance(
            "moved-rollback", "rollback of a sequence after others were decoded: another's planes", _moved_rollback
        ),
        Avoidance("queued-copy", "save or restore between seq_cp and the next decode, kv_unified off", _queued_copy),
        Avoidance(
            "queued-source", "a change of a sequence between its copy and the next decode, deepseek4", _queued_source
        ),
        Avoidance("queued-shift", "save between seq_add or seq_div and the next decode", _queued_shift),
        Avoidance("half-restore", "a refused restore leaves memory parts in different states", _half_restore),
        Avoidance("empty-restore", "restore of an empty sequence's state leaves the target as it was", _empty_restore),
        Avoidance("window-purge", "a batch of several micro-batches drops window cells that it needs", _window_purge),
        Avoidance("index-pos", "restore of a state whose indexer has other positions: abort later", _index_pos),
        Avoidance(
            "stuck-cell", "restore of a state with a position that no removal reaches: the cell stays", _stuck_cell
        ),
        Avoidance(
            "recurrent-cells",
            "restore of a state that claims several recurrent cells: abort",
            _recurrent_cells,
        ),
        Avoidance("file-cut", "load of a truncated session file: assertion abort", _file_cut),
        Avoidance("device-regrow", "a second on-device save with other cell ranges: abort", _device_regrow),
        Avoidance("shift-bf16", "seq_add or seq_div with a BF16 K cache: abort at the next decode", _shift_type),
        Avoidance(
            "shift-window-hybrid", "seq_add or seq_div on a hybrid with a window: assertion abort", _shift_window
        ),
        Avoidance(
            "hidden-rows",
            "embeddings on deepseek4 and qwen4exp: assertion abort",
            _hidden_hit,
            _hidden_rows,
            _hidden_fix,
        ),
    )
}


def triggered(name: str, scenario: Scenario, traits: Traits) -> int | None:
    """The first operation that sets off the fault called `name`, None when none does. Raises KeyError for an
    unknown name.
    """
    if scenario.driver is not None or name in DRIVER_AVOIDANCES:
        with_driver = scenario.driver is not None and name in DRIVER_AVOIDANCES
        return driver_triggered(name, scenario, traits) if with_driver else None
    hit = AVOIDANCES[name].hit
    state = State(traits, scenario.params)
    for i, op in enumerate(scenario.ops):
        if hit(state, op):
            return i
        state.apply(op)
    return None


def triggers(name: str, scenario: Scenario, traits: Traits) -> bool:
    """Whether the program contains the trigger of the fault called `name`."""
    return triggered(name, scenario, traits) is not None


class Avoider:
    """A set of avoidances, as the generator uses it. Raises KeyError for an unknown name."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = tuple(sorted(set(names)))
        self._all = [AVOIDANCES[n] for n in self.names if n not in DRIVER_AVOIDANCES]

    def params(self, params: ContextParams, traits: Traits) -> ContextParams:
        """The parameters, or near ones that set off nothing."""
        for a in self._all:
            if a.params_hit(params, traits):
                params = a.params_fix(params, traits)
        return params

    def blocks(self, state: State, op: Op) -> bool:
        """Whether the operation would set off one of the faults."""
        return any(a.hit(state, op) for a in self._all)

    def triggers(self, scenario: Scenario, traits: Traits) -> list[str]:
        """Names of the avoided faults that the program would still set off."""
        return [n for n in self.names if triggers(n, scenario, traits)]

    def repair(self, scenario: Scenario, traits: Traits) -> Scenario:
        """The program without what sets off the faults, and without operations that lost their ground by that."""
        if scenario.driver is not None:
            return driver_repair(scenario, traits, self.names)
        params = self.params(scenario.params, traits)
        state = State(traits, params)
        ops: list[AnyOp] = []
        for op in scenario.ops:
            if isinstance(op, Reopen) and op.params is not None:
                op = Reopen(params=self.params(op.params, traits))
            if self.blocks(state, op) or (not scenario.misuse and broken(state, op)):
                continue
            state.apply(op)
            ops.append(op)
        if (
            params is scenario.params
            and len(ops) == len(scenario.ops)
            and all(a is b for a, b in zip(ops, scenario.ops, strict=True))
        ):
            return scenario
        return msgspec.structs.replace(scenario, params=params, ops=tuple(ops))
