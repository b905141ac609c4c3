"""The contract, checked: which preconditions of `subjects.contracts` an operation breaks in a logical state
(`fuzz.logical`).
"""

from __future__ import annotations

from fuzz.drivers.state import valid as driver_valid
from fuzz.logical import Seq, Slot, State
from fuzz.spans import spans_cut, spans_in
from fuzz.traits import Traits, traits_from_facts, traits_of
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    Ask,
    ContextParams,
    Corrupt,
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
from subjects.state.names import names

__all__ = ["Seq", "Slot", "State", "Traits", "broken", "params_broken", "traits_from_facts", "traits_of", "valid"]


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
    if not traits.mixed_kv and p.type_k != p.type_v:
        out.append("reopen.mixed-kv")
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
            unknown = any(e.where and e.where not in names() for e in op.edits)
            return (["corrupt.slot"] if op.slot not in state.slots else []) + (["corrupt.where"] if unknown else [])
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
    p0, _ = state.range(op)
    partial = p0 > 0 or op.hi.at != "open"
    if partial and not state.params.kv_unified:
        return ["seq_cp.whole-on-split"]
    if partial and state.traits.memory != "dense":
        return ["seq_cp.range-dense"]
    return []


def valid(scenario: Scenario, traits: Traits) -> list[str]:
    """Ids of all preconditions that a program breaks, in order; empty for a program that keeps the contract."""
    if scenario.driver is not None:
        return driver_valid(scenario, traits)
    out = params_broken(scenario.params, traits)
    state = State(traits, scenario.params)
    for op in scenario.ops:
        out += broken(state, op)
        state.apply(op)
    return out
