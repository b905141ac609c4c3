"""Operations of programs with a speculative driver in words, with what they resolved to."""

from __future__ import annotations

from fuzz.repro.phrases import count, flags_text, listed, span
from subjects.scenario import (
    Accept,
    Begin,
    Checkpoint,
    Decode,
    DriverParams,
    Mangle,
    Mangling,
    Op,
    Piece,
    Propose,
    Rewind,
    SeqRm,
    Verify,
)
from subjects.trace import Blob, Row, Step

DriverOp = Propose | Verify | Accept | Checkpoint | Rewind | Mangle | Begin

_MANGLED: dict[Mangling, str] = {
    "empty": "make the driver's part of slot {slot} empty",
    "short": "take the last byte off the driver's part of slot {slot}",
    "long": "append 4 zero bytes to the driver's part of slot {slot}",
    "magic": "flip the top bit of 32-bit number {word} in the driver's part of slot {slot}",
    "width": "cut the driver's part of slot {slot} in half",
    "negative": "set 32-bit number {word} in the driver's part of slot {slot} to -2",
    "huge": "set 32-bit number {word} in the driver's part of slot {slot} to 2147483647",
    "model": "make the driver's part of slot {slot} that of a model twice as wide",
    "other": "make the driver's part of slot {slot} begin as another driver's: with `RDRF`",
}
_OTHER_MODEL = "flip the lowest bit of 32-bit number {word}, the model's, in the driver's part of slot {slot}"
_SAVED = {"host": "PARTIAL_ONLY", "device": "PARTIAL_ONLY | ON_DEVICE", "whole": "everything"}


def driver_text(d: DriverParams) -> str:
    """One line: the driver."""
    words = [d.kind if d.impl == "native" else f"{d.kind} (redraft's own in Python)"]
    if d.kind.startswith("draft-"):
        if d.draft is not None:
            seeded = f" version {d.draft.version}, seed {d.draft.seed}" if d.draft.recipe is not None else ""
            words.append(f"draft model {d.draft.label()}{seeded}")
        words += [f"n_max {d.n_max}", f"n_min {d.n_min}", f"p_min {d.p_min:g}"]
        words.append(f"backend sampling {'on' if d.backend_sampling else 'off'}")
    else:
        words += [f"n-grams of {d.ngram_n}", f"drafts of {d.ngram_m}", f"min_hits {d.ngram_hits}", f"n_min {d.n_min}"]
    if not d.state:
        words.append("its state left out of checkpoints")
    if d.late:
        words.append("draft context made after the target's first decode")
    return ", ".join(words)


def describe(op: DriverOp, step: Step) -> str:
    """What an operation did, without its answer; `step` was not skipped."""
    match op:
        case Propose():
            return _proposed(op, step)
        case Verify():
            return _verified(op, step)
        case Accept():
            k = step.args[1] if len(step.args) > 1 else op.n
            end = "" if op.seq >= len(step.pos) else f" (it ends at position {step.pos[op.seq][1]})"
            return f"take {count(k, 'draft')} of the open verification of sequence {op.seq}, cut the rest{end}"
        case Checkpoint():
            return _saved(op, step)
        case Rewind():
            return _restored(op, step)
        case Mangle():
            word = step.args[1] if len(step.args) > 1 else op.at
            text = _OTHER_MODEL if op.how == "model" and word >= 0 else _MANGLED[op.how]
            return text.format(slot=op.slot, word=word)
        case Begin():
            return f"begin a new generation in sequence {op.seq} (common_speculative_begin)"


def processed(op: Op, text: str) -> str:
    """A sentence on an operation of plain programs, as it is with a driver."""
    match op:
        case Decode():
            return f"{text}, processed by the driver"
        case SeqRm():
            return f"{text} on target and draft"
        case _:
            return text


def answer(op: DriverOp, step: Step) -> str:
    """What it answered, as ` → …`; the call has returned."""
    match op:
        case Propose():
            drafts = [_tokens(d) for d in step.drafts]
            one = len(drafts) == 1
            told = "; ".join(d if one else f"sequence {s}: {d}" for s, d in zip(op.seqs, drafts, strict=False))
            return f" → {told}" + ("" if step.rc else " (removing them from the draft's memory is refused)")
        case Verify():
            if step.rc:
                return " → the driver does not process it" if step.rc == -100 else f" → {step.rc}"
            return "" if step.value else " → a restore or removal is refused"
        case Accept() if not step.value:
            return " → the removal is refused"
        case Rewind() if not step.rc:
            return " → refused"
        case Rewind() if not step.value:
            return " → the removal is refused"
        case _:
            return ""


# --- parts ------------------------------------------------------------------------------------------------------------


def _tokens(tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) if tokens else "no draft"


def _proposed(op: Propose, step: Step) -> str:
    asked = []
    for i, seq in enumerate(op.seqs):
        # a proposal leaves the target alone, so it ends where it did
        told = [f"at position {step.pos[seq][1] + 1}"] if seq < len(step.pos) else []
        told += [f"token {step.args[i]}"] if i < len(step.args) else []
        asked.append(f"sequence {seq}" + (f" ({', '.join(told)})" if told else ""))
    most = f", at most {count(op.n_max, 'token')}" if op.n_max >= 0 else ""
    return f"draft for {listed(asked)}{' in one call' if len(asked) > 1 else ''}{most}"


def _verified(op: Verify, step: Step) -> str:
    if not step.batches:
        return f"verify the drafts of {listed(f'sequence {s}' for s in op.seqs)}"
    mine: dict[int, list[Row]] = {}
    for r in step.batches[0].rows:
        mine.setdefault(r.seq, []).append(r)
    parts, short = [], []
    for i, (seq, rows) in enumerate(mine.items()):
        n = len(rows) - 1
        took = ""
        if op.accept and i < len(step.args):
            took = f", taking {step.args[i]} of {count(n, 'draft')}"
            short += [seq] if step.args[i] < n else []
        where = span(rows[0].pos, rows[-1].pos)
        parts.append(f"{count(len(rows), 'token')} of sequence {seq} ({where}{took})")
    text = f"verify {listed(parts)}{' in one batch' if len(parts) > 1 else ''}"
    if not op.accept:
        return f"{text}, and leave the answer open"
    if not short:
        return text
    if op.route == "cut":
        return f"{text}, and cut the rest from both memories"
    again = len(step.batches[1].rows) if len(step.batches) > 1 else 0
    offers = "" if not step.blobs or step.blobs[-1].size >= 0 else ", nothing of the driver"
    return (
        f"{text}; go back to what was saved before it by the route `{op.route}` ({_SAVED[op.route]}{offers}), and "
        f"process {count(again, 'token')} again"
    )


def _parts(blobs: list[Blob], names: list[Piece]) -> str:
    """`target 12144 bytes, draft 3092 bytes and driver 132 bytes`; the driver comes last, and may offer nothing."""
    told = [
        f"{name} {count(b.size, 'byte')}" if b.size >= 0 else "nothing of the driver"
        for name, b in zip(names, blobs, strict=False)
    ]
    return listed(told) if told else "nothing"


def _saved(op: Checkpoint, step: Step) -> str:
    flags = f" with {flags_text(op.flags)}" if op.flags else ""
    names: list[Piece] = ["target", "draft", "driver"] if len(step.blobs) == 3 else ["target", "driver"]
    got = f": {_parts(step.blobs, names)}" if step.blobs else ""
    return f"save sequence {op.seq}{flags} into slot {op.slot}{got}"


def _restored(op: Rewind, step: Step) -> str:
    flags = f" with {flags_text(step.args[2])}" if len(step.args) > 2 and step.args[2] else ""
    names = [p for p in ("target", "draft", "driver") if p in op.parts]
    if step.blobs and len(step.blobs) < len(names):  # kinds without a draft context have no part of a draft
        names = [p for p in names if p != "draft"]
    nothing = ""
    if "driver" in names and step.blobs and step.blobs[-1].size < 0:
        names.remove("driver")
        nothing = ", nothing of the driver is there"
    text = f"put {listed(names) if names else 'nothing'} of slot {op.slot} back into sequence {op.seq}{flags}{nothing}"
    if not {"target", "draft"} & set(names):
        return text
    end = f"position {step.pos[op.seq][1]}" if op.seq < len(step.pos) else "it"
    return f"{text}; cut what is behind {end}"
