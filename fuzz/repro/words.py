"""Operations in words, with the positions and identifiers that they resolved to."""

from __future__ import annotations

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
from subjects.trace import Batch, Row, Step, Trace


def flags_text(flags: int) -> str:
    """Names of state flags, as llama.h writes them without their long prefix."""
    names = [name for bit, name in ((PARTIAL, "PARTIAL_ONLY"), (ON_DEVICE, "ON_DEVICE")) if flags & bit]
    rest = flags & ~(PARTIAL | ON_DEVICE)
    return " | ".join(names + ([hex(rest)] if rest else [])) or "0"


def params_text(p: ContextParams) -> str:
    """One line: the context."""
    words = [f"{name} {getattr(p, name)}" for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")]
    words += [f"K {p.type_k}", f"V {p.type_v}", f"flash attention {'on' if p.flash_attn else 'off'}"]
    words += [name for name in ("kv_unified", "swa_full", "offload_kqv", "embeddings") if getattr(p, name)]
    return ", ".join([*words, count(p.n_threads, "thread")])


def count(n: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def ordinal(n: int) -> str:
    """`1st`, `2nd`, `11th`."""
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def span(first: int, last: int) -> str:
    """`position 3` or `positions 3..5`."""
    return f"position {first}" if first == last else f"positions {first}..{last}"


def rows_text(rows: list[Row]) -> str:
    """`16 tokens into sequence 0 (positions 0..15)`, for each sequence of a batch."""
    by_seq: dict[int, list[int]] = {}
    for r in rows:
        by_seq.setdefault(r.seq, []).append(r.pos)
    parts = [f"{count(len(p), 'token')} into sequence {s} ({span(min(p), max(p))})" for s, p in by_seq.items()]
    return " and ".join(parts) if parts else "an empty batch"


def _decode(op: Decode, rows: list[Row]) -> str:
    text = "decode " + rows_text(rows) + (" in one batch" if len(op.parts) > 1 else "")
    if op.interleave and len(op.parts) > 1:
        text += ", rows interleaved"
    if op.abort_after is not None:
        text += f", with an abort callback that returns true at its {ordinal(op.abort_after + 1)} call"
    return text


def _draft(op: Draft, batches: list[Batch]) -> str:
    where = ""
    if batches:
        where = f" ({span(batches[0].rows[0].pos, batches[-1].rows[0].pos)})"
    return f"redraft {count(op.n, 'token')} greedily in sequence {op.seq}{where}, one decode each"


def _saved(op: Save | SaveAll) -> str:
    name = "state" if isinstance(op, SaveAll) else "state_seq"
    call = (
        f"llama_{name}_save_file"
        if op.medium == "file"
        else f"llama_{name}_get_data{'' if isinstance(op, SaveAll) else '_ext'}"
    )
    what = "the whole context" if isinstance(op, SaveAll) else f"sequence {op.seq}"
    flags = f" with {flags_text(op.flags)}" if isinstance(op, Save) and op.flags else ""
    return f"save {what}{flags} into slot {op.slot}{', twice' if op.again else ''} ({call})"


def _restored(op: Restore | RestoreAll, step: Step) -> str:
    flags = f" with {flags_text(step.args[2])}" if len(step.args) > 2 and step.args[2] else ""
    what = f"slot {op.slot} into " + ("the whole context" if isinstance(op, RestoreAll) else f"sequence {op.seq}")
    times = f", {op.times} times" if op.times > 1 else ""
    return f"restore {what}{flags}{times}{', and save it again' if op.resave else ''}"


def _corrupt(op: Corrupt, step: Step) -> str:
    slot, at, n = step.args
    what = {
        "truncate": f"cut slot {slot} after byte {at}",
        "extend": f"append {count(n, 'byte')} 0x5a to slot {slot}",
        "flip": f"xor byte {at} of slot {slot} with {(n & 0xFF) or 1:#x}",
        "zero": f"set {count(n, 'byte')} of slot {slot} to zero from byte {at}",
        "set_u32": f"set the 32-bit number at byte {at} of slot {slot} to {n & 0xFFFFFFFF}",
    }
    return what[op.how]


def _range(seq: int, lo: int, hi: int) -> str:
    """`positions 3 and up of sequence 0`, for the half-open range that llama.h takes."""
    who = f"sequence {seq}" if seq >= 0 else "every sequence"
    if hi < 0:
        return f"all of {who}" if lo <= 0 else f"positions {lo} and up of {who}"
    lo = max(lo, 0)
    return f"an empty range of {who}" if hi <= lo else f"{span(lo, hi - 1)} of {who}"


def _memory(op: SeqRm | SeqCp | SeqKeep | SeqAdd | SeqDiv, args: list[int]) -> str:
    match op:
        case SeqRm():
            return f"remove {_range(*args[:3])}"
        case SeqCp():
            return f"copy {_range(args[0], args[2], args[3])} to sequence {args[1]}"
        case SeqKeep():
            return f"keep sequence {args[0]} only"
        case SeqAdd():
            return f"shift {_range(*args[:3])} by {args[3]}"
        case SeqDiv():
            return f"divide {_range(*args[:3])} by {args[3]}"


def describe(op: Op, step: Step) -> str:
    """What an operation did, in words, with resolved arguments; without its answer."""
    a = ", ".join(map(str, step.args))
    if step.skipped:
        return f"(skipped: {step.skipped})"
    match op:
        case Decode():
            return _decode(op, step.batches[0].rows if step.batches else [])
        case Draft():
            return _draft(op, step.batches)
        case Save() | SaveAll():
            return _saved(op)
        case Restore() | RestoreAll():
            return _restored(op, step)
        case Corrupt():
            return _corrupt(op, step)
        case SeqRm() | SeqCp() | SeqKeep() | SeqAdd() | SeqDiv():
            return f"{_memory(op, step.args)}: llama_memory_{op.__struct_config__.tag}({a})"
        case Clear():
            return f"forget everything: llama_memory_clear({str(op.data).lower()})"
        case Reopen():
            return "free the context and make a new one" + (f": {params_text(op.params)}" if op.params else "")
        case Ask():
            return f"ask for {op.what}" + (f" of sequence {op.seq}" if op.what != "can_shift" else "")
        case _:
            raise TypeError(op)


def answer(op: Op, step: Step) -> str:
    """What it answered, as ` → …`; empty where a call returns nothing or simply 0."""
    if step.skipped:
        return ""
    if not step.done:
        return " → **never returns**"
    match op:
        case SeqRm():
            return f" → {'true' if step.rc else 'false'}"
        case Decode() | Draft():
            return f" → {step.rc}" if step.rc else ""
        case Save() | SaveAll() | Restore() | RestoreAll():
            return f" → {count(step.blobs[-1].moved if step.blobs else 0, 'byte')}" + ("" if step.rc else " (refused)")
        case Ask():
            return f" → {step.value}"
        case _:
            return ""


def positions(step: Step) -> str:
    """`0: 0..15, 1: empty`, every sequence after the operation."""
    return ", ".join(f"{s}: {lo}..{hi}" if hi >= 0 else f"{s}: empty" for s, (lo, hi) in enumerate(step.pos))


def program(scenario: Scenario, trace: Trace) -> list[str]:
    """One sentence for each operation that was reached."""
    pairs = ((scenario.ops[s.op], s) for s in trace.steps)
    return [describe(op, s) + answer(op, s) for op, s in pairs]
