"""Operations in words, with the positions and identifiers that they resolved to."""

from __future__ import annotations

from fuzz.repro import driver_words
from fuzz.repro.phrases import count, flags_text, ordinal, rows_text, span
from subjects.scenario import (
    Accept,
    Ask,
    Begin,
    BlobEdit,
    Checkpoint,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Mangle,
    Op,
    Propose,
    Reopen,
    Restore,
    RestoreAll,
    Rewind,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
    Verify,
)
from subjects.state.edits import MOST_INSERTED
from subjects.trace import Batch, Row, Step, Trace


def params_text(p: ContextParams) -> str:
    """One line: the context."""
    words = [f"{name} {getattr(p, name)}" for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")]
    words += [f"K {p.type_k}", f"V {p.type_v}", f"flash attention {'on' if p.flash_attn else 'off'}"]
    words += [name for name in ("kv_unified", "swa_full", "offload_kqv", "embeddings") if getattr(p, name)]
    return ", ".join([*words, count(p.n_threads, "thread")])


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


def changed(op: Corrupt) -> str:
    """What is changed of a saved state."""
    return f"change slot {op.slot}: " + "; ".join(edit_words(e) for e in op.edits)


def edit_words(e: BlobEdit) -> str:
    """An edit for people."""
    place = f"{e.where}{f' (number {e.nth})' if e.nth else ''}" if e.where else f"{e.nth / 10:g} % of its bytes"
    alone = ", its own bytes alone" if e.value == 1 else ""
    match e.how:
        case "set":
            return f"set {place if e.where else f'the 32-bit number at {place}'} to {e.value}"
        case "add":
            return f"add {e.value} to {place if e.where else f'the 32-bit number at {place}'}"
        case "flip":
            return f"xor the first byte of {place} with {(e.value & 0xFF) or 1:#x}"
        case "zero":
            return f"zero {place}" if e.where else f"zero {count(max(e.value, 0), 'byte')} at {place}"
        case "cut":
            more = f" and {count(abs(e.value), 'byte')} {'further' if e.value > 0 else 'before'}" if e.value else ""
            return f"cut it at {place}{more}"
        case "insert":
            return f"put {count(min(max(e.value, 0), MOST_INSERTED), 'byte')} 0x5a " + (
                f"behind {place}" if e.where else f"at {place}"
            )
        case "drop" | "double":
            return f"{e.how} {place}{alone}"
        case "swap":
            return f"swap {place} with the next{alone}"
        case "take":
            return f"take {place if e.where else 'all'} from slot {e.value}"


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
            nothing = step.done and step.value == 0
            return changed(op) + (" (nothing changed: the blob has none of these, or they were so before)" * nothing)
        case SeqRm() | SeqCp() | SeqKeep() | SeqAdd() | SeqDiv():
            return f"{_memory(op, step.args)}: llama_memory_{op.__struct_config__.tag}({a})"
        case Clear():
            return f"forget everything: llama_memory_clear({str(op.data).lower()})"
        case Reopen():
            return "free the context and make a new one" + (f": {params_text(op.params)}" if op.params else "")
        case Ask():
            return f"ask for {op.what}" + (f" of sequence {op.seq}" if op.what != "can_shift" else "")
        case Propose() | Verify() | Accept() | Checkpoint() | Rewind() | Mangle() | Begin():
            return driver_words.describe(op, step)
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
        case Propose() | Verify() | Accept() | Checkpoint() | Rewind() | Mangle() | Begin():
            return driver_words.answer(op, step)
        case _:
            return ""


def positions(step: Step) -> str:
    """`0: 0..15, 1: empty`, every sequence after the operation; with a driver, in the draft's memory too."""
    target = _positions(step.pos)
    return f"{target}; in the draft's memory {_positions(step.draft_pos)}" if step.draft_pos else target


def _positions(pos: list[tuple[int, int]]) -> str:
    return ", ".join(f"{s}: {lo}..{hi}" if hi >= 0 else f"{s}: empty" for s, (lo, hi) in enumerate(pos))


def sentence(scenario: Scenario, step: Step) -> str:
    """What a step of a program did, without its answer."""
    op = scenario.ops[step.op]
    text = describe(op, step)
    return text if scenario.driver is None or step.skipped else driver_words.processed(op, text)


def program(scenario: Scenario, trace: Trace) -> list[str]:
    """One sentence for each operation that was reached."""
    return [sentence(scenario, s) + answer(scenario.ops[s.op], s) for s in trace.steps]
