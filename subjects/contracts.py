"""The contract table: what the caller of each operation owes, what it gets, and who says so.

Data only. "The header says", "the header is silent" and "caller's fault" are decided here, in one place: the generator keeps what is
owed (`fuzz.state.broken` checks it, by these ids), misuse mode breaks it on purpose, and the oracles quote what is promised.
`FORMS` lists the argument forms of every operation; `forms_of` tells which ones a concrete operation is.

Sources: llama.h and src/ of the llama.cpp that llama-cpp-python 0.3.36 brings (ggml-org/llama.cpp 0c1e57098).
"""

# ruff: noqa: E501 (quotes are kept in one piece)
from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Protocol, get_args

from subjects.clauses import VERDICT, Clause, Contract
from subjects.driver_contracts import DRIVER_CONTRACTS
from subjects.driver_contracts import FORMS as DRIVER_FORMS
from subjects.scenario import (
    ON_DEVICE,
    Ask,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    How,
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


def _h(id: str, text: str, quote: str) -> Clause:
    return Clause(id, text, f'llama.h: "{quote}"', "header")


def _s(id: str, text: str, where: str) -> Clause:
    return Clause(id, text, where, "source")


def _n(id: str, text: str, why: str = "llama.h says nothing about it") -> Clause:
    return Clause(id, text, why, "silent")


def _ids(op: str, text: str = "sequence ids lie in [0, n_seq_max)") -> Clause:
    return _s(
        f"{op}.ids", text, "src/llama-kv-cache.cpp: GGML_ASSERT(seq_id >= 0 && (size_t) seq_id < seq_to_stream.size())"
    )


_RANGE = "p0 < 0 : [0,  p1]; p1 < 0 : [p0, inf)"
_PARTIAL = "work only with partial states, such as SWA KV cache or recurrent cache (e.g. Mamba)"
_INVALIDATES = (
    "Getting the state for a seq_id with this flag invalidates all prior states gotten for that seq_id with this flag."
)

CONTRACTS: dict[str, Contract] = {
    c.op: c
    for c in (
        Contract(
            "decode",
            "llama_decode",
            owes=(
                _s("decode.ids", "sequence ids lie in [0, n_seq_max)", "src/llama-batch.cpp init(): invalid seq_id"),
                _s(
                    "decode.rows",
                    "at most n_batch rows",
                    "src/llama-context.cpp decode(): GGML_ASSERT(n_tokens_all <= cparams.n_batch)",
                ),
                _s("decode.not-empty", "at least one row", "src/llama-batch.cpp init(): GGML_ASSERT(n_tok > 0)"),
                _s(
                    "decode.order",
                    "positions of a sequence do not decrease within a batch",
                    "src/llama-batch.cpp init(): positions are decreasing",
                ),
                _s(
                    "decode.consecutive",
                    "positions go on right behind the sequence's last one",
                    "src/llama-batch.cpp init(): Y = X + 1",
                ),
            ),
            gets=(
                _h("decode.success", "0: every sequence has grown by its rows", "0 - success"),
                _h(
                    "decode.full",
                    "1: no room; nothing has changed",
                    "could not find a KV slot for the batch ... Upon other return values, the memory state is restored to the state before this call",
                ),
                _h(
                    "decode.aborted",
                    "2: positions tell which micro-batches stay",
                    "aborted (processed ubatches will remain in the context's memory)",
                ),
                _h("decode.invalid", "-1: nothing has changed", "-1 - invalid input batch"),
                _h(
                    "decode.fatal",
                    "< -1: positions tell which micro-batches stay",
                    "fatal error (processed ubatches will remain in the context's memory)",
                ),
                _n("decode.isolation", "sequences that are not in the batch are untouched"),
                _n("decode.ubatch", "any n_ubatch that a context was made with works"),
                _h(
                    "decode.outputs",
                    "0: every row with logits set can be read",
                    "if zero, the logits (and/or the embeddings) for the respective token will not be output",
                ),
            ),
            forms=(
                "one sequence",
                "2 sequences",
                "3 sequences",
                "4 sequences",
                "outputs none",
                "outputs last",
                "outputs all",
                "outputs mixed",
                "interleaved",
                "abort callback",
                "below n_ubatch",
                "n_ubatch - 1",
                "n_ubatch",
                "n_ubatch + 1",
                "above n_ubatch",
                "n_batch",
                "one row",
                "cache full",
            ),
        ),
        Contract(
            "draft",
            "llama_decode of single tokens, greedily",
            owes=(
                _ids("draft"),
                _s("draft.rows", "at least one token", "src/llama-batch.cpp init(): GGML_ASSERT(n_tok > 0)"),
            ),
            gets=(
                _n("draft.same", "the same history gives the same greedy tokens, near ties aside"),
                _n("draft.isolation", "other sequences are untouched"),
            ),
            forms=("one token", "several tokens", "empty sequence", "after other work"),
        ),
        Contract(
            "save",
            "llama_state_seq_get_size_ext, llama_state_seq_get_data_ext, llama_state_seq_save_file",
            owes=(
                _ids("save"),
                _h(
                    "save.flags",
                    "only the documented flag bits",
                    "#define LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY 1; #define LLAMA_STATE_SEQ_FLAGS_ON_DEVICE 2",
                ),
                _h(
                    "save.file-flags",
                    "files take no flags",
                    "LLAMA_API size_t llama_state_seq_save_file( struct llama_context * ctx, const char * filepath, llama_seq_id seq_id, const llama_token * tokens, size_t n_token_count)",
                ),
            ),
            gets=(
                _h(
                    "save.size",
                    "the size asked for is the size written",
                    "Get the exact size needed to copy the state of a single sequence",
                ),
                _h(
                    "save.state",
                    "what is saved is the state of the sequence",
                    "Copy the state of a single sequence into the specified buffer",
                ),
                _n("save.pure", "saving changes nothing, and twice gives the same"),
            ),
            forms=(
                "flags 0",
                "flags 1",
                "flags 2",
                "flags 3",
                "buffer",
                "file",
                "twice",
                "empty sequence",
                "pending rollback",
                "older device handle made invalid",
            ),
        ),
        Contract(
            "restore",
            "llama_state_seq_set_data_ext, llama_state_seq_load_file",
            owes=(
                _ids("restore"),
                _n("restore.slot", "the slot holds a state of one sequence", "of redraft's own making"),
                _h(
                    "restore.partial-prefix",
                    "a partial state goes onto a sequence that still holds the same prefix in its other parts",
                    _PARTIAL,
                ),
                _s(
                    "restore.partial-cut",
                    "after a partial restore the caller cuts what lies behind it in the other parts, before it goes on",
                    "tools/server/server-context.cpp: common_context_seq_rm after restoring a checkpoint",
                ),
            ),
            gets=(
                _h(
                    "restore.state",
                    "accepted: the target has the history of the moment of saving",
                    "Copy the sequence data (originally copied with `llama_state_seq_get_data`) into the specified sequence",
                ),
                _h("restore.refused", "0 says that it failed to load", "Positive: Ok; Zero: Failed to load"),
                _n(
                    "restore.refused-clean",
                    "refused: the target is unchanged or empty, the same in every part; all else unchanged",
                ),
                _h(
                    "restore.device-older",
                    "an on-device handle is good until the next on-device save of its sequence; after that it is refused or right",
                    _INVALIDATES,
                ),
                _n("restore.device-foreign", "an on-device handle of another context is refused"),
                _n("restore.malformed", "a damaged state is refused, or harmless; it is never fatal"),
                _n("restore.isolation", "other sequences are untouched"),
                _n("restore.read", "an accepted restore has read all bytes that it was given"),
                _n("restore.tokens", "a session file gives back the tokens that were saved with it"),
            ),
            forms=(
                "flags 0",
                "flags 1",
                "flags 2",
                "flags 3",
                "buffer",
                "file",
                "same sequence",
                "other sequence",
                "onto an empty sequence",
                "after reopen",
                "after reopen with other parameters",
                "older device handle",
                "foreign device handle",
                "damaged",
                "twice",
                "saved again",
                "of an empty sequence",
            ),
        ),
        Contract(
            "save_all",
            "llama_state_get_size, llama_state_get_data, llama_state_save_file",
            owes=(),
            gets=(
                _h(
                    "save_all.size",
                    "the size asked for is the size written",
                    "Returns the *actual* size in bytes of the state (logits, embedding and memory)",
                ),
                _h(
                    "save_all.state",
                    "what is saved is the state of all sequences",
                    "Copies the state to the specified destination address.",
                ),
                _n("save_all.pure", "saving changes nothing, and twice gives the same"),
            ),
            forms=("buffer", "file", "twice", "several sequences", "pending rollback"),
        ),
        Contract(
            "restore_all",
            "llama_state_set_data, llama_state_load_file",
            owes=(_n("restore_all.slot", "the slot holds a state of a whole context", "of redraft's own making"),),
            gets=(
                _h(
                    "restore_all.state",
                    "accepted: every sequence as saved",
                    "Set the state reading from the specified address",
                ),
                _n("restore_all.refused-clean", "refused: all sequences unchanged, or all empty"),
                _n("restore_all.other", "into a context with other parameters: refused, or right"),
                _h(
                    "restore_all.taken",
                    "a state saved under the same parameters is read",
                    "Returns the number of bytes read",
                ),
                _n("restore_all.tokens", "a session file gives back the tokens that were saved with it"),
                _n("restore_all.malformed", "a damaged state is refused, or harmless; it is never fatal"),
            ),
            forms=(
                "buffer",
                "file",
                "twice",
                "saved again",
                "after reopen",
                "after reopen with other parameters",
                "damaged",
            ),
        ),
        Contract(
            "seq_rm",
            "llama_memory_seq_rm",
            owes=(_ids("seq_rm", "the sequence id is -1 or lies in [0, n_seq_max)"),),
            gets=(
                _h(
                    "seq_rm.removed",
                    "true: the positions are gone, in every part of the memory",
                    "Removes all tokens that belong to the specified sequence and have positions in [p0, p1)",
                ),
                _h("seq_rm.whole", "a whole sequence is always removed", "Removing a whole sequence never fails"),
                _h(
                    "seq_rm.refused",
                    "false: it cannot be removed",
                    "Returns false if a partial sequence cannot be removed",
                ),
                _n("seq_rm.refused-clean", "false: nothing has changed in any part"),
                _n("seq_rm.recurrent-part", "a head or middle cannot leave a recurrent state, so the answer is false"),
                _h("seq_rm.any", "sequence -1 means every one", "seq_id < 0 : match any sequence"),
                _n("seq_rm.isolation", "other sequences are untouched, also where they share cells"),
            ),
            forms=(
                "tail, p1 open",
                "tail, p1 = end",
                "whole (-1, -1)",
                "whole (0, -1)",
                "whole (0, end)",
                "head, p0 open",
                "head, p0 = 0",
                "middle",
                "empty range",
                "p0 at or beyond the end",
                "every sequence (-1, -1)",
                "every sequence (0, -1)",
                "empty sequence",
                "last batch undone",
                "within n_rs_seq",
                "beyond n_rs_seq",
                "second rollback",
            ),
        ),
        Contract(
            "seq_cp",
            "llama_memory_seq_cp",
            owes=(
                _ids("seq_cp"),
                _n(
                    "seq_cp.empty-dst",
                    "the destination is empty, or the source itself",
                    "llama.h is silent about a destination that holds tokens; caches differ in what they do",
                ),
                _s(
                    "seq_cp.whole-on-split",
                    "a part of a sequence is copied in unified caches only",
                    'src/llama-kv-cache.cpp seq_cp(): GGML_ASSERT(is_full && "seq_cp() is only supported for full KV buffers")',
                ),
                _s(
                    "seq_cp.range-dense",
                    "a part of a sequence is copied in attention without a window only",
                    "src/llama-memory-recurrent.cpp seq_cp() ignores the range; src/llama-kv-cache-dsv4.cpp: GGML_ASSERT(p0 <= 0 && p1 < 0)",
                ),
            ),
            gets=(
                _h(
                    "seq_cp.copied",
                    "the copy has the history of the source",
                    "Copy all tokens that belong to the specified sequence to another sequence",
                ),
                _n("seq_cp.pending", "whatever was pending on the source is pending on the copy"),
                _n("seq_cp.source", "the source is untouched, and stays so whatever becomes of the copy"),
                _n("seq_cp.isolation", "other sequences are untouched"),
            ),
            forms=(
                "whole (-1, -1)",
                "whole (0, -1)",
                "prefix [-1, p)",
                "prefix [0, p)",
                "onto itself",
                "pending rollback",
                "split cache",
                "unified cache",
            ),
        ),
        Contract(
            "seq_keep",
            "llama_memory_seq_keep",
            owes=(_ids("seq_keep"),),
            gets=(
                _h(
                    "seq_keep.others",
                    "all other sequences are empty, the kept one is untouched",
                    "Removes all tokens that do not belong to the specified sequence",
                ),
            ),
            forms=("the only one", "others live", "an empty one", "split cache", "unified cache"),
        ),
        Contract(
            "seq_add",
            "llama_memory_seq_add",
            owes=(
                _ids("seq_add"),
                _h(
                    "seq_add.can-shift",
                    "only where llama_memory_can_shift says so",
                    "Check if the memory supports shifting",
                ),
                _n(
                    "seq_add.not-negative",
                    "no position becomes negative",
                    "llama.h is silent; src/llama-kv-cells.h pos_add() drops such cells",
                ),
                _n("seq_add.no-collision", "no two tokens of a sequence get one position"),
            ),
            gets=(
                _h(
                    "seq_add.moved",
                    "exactly the positions in the range have moved",
                    'Adds relative position "delta" to all tokens that belong to the specified sequence and have positions in [p0, p1)',
                ),
                _n("seq_add.isolation", "sequences that share no cells with it are untouched"),
            ),
            forms=("whole, +", "whole, -", "tail, +", "tail, - (context shift)", "middle, -", "whole (0, -1)"),
        ),
        Contract(
            "seq_div",
            "llama_memory_seq_div",
            owes=(
                _ids("seq_div"),
                _h(
                    "seq_div.can-shift",
                    "only where llama_memory_can_shift says so",
                    "Check if the memory supports shifting",
                ),
                _h("seq_div.d", "the divisor is at least 2", "Integer division of the positions by factor of `d > 1`"),
                _n(
                    "seq_div.whole",
                    "whole sequences only: a part divided would leave positions that collide with the rest",
                ),
            ),
            gets=(
                _h(
                    "seq_div.divided",
                    "exactly the positions in the range are divided",
                    "Integer division of the positions by factor of `d > 1`",
                ),
                _n("seq_div.isolation", "sequences that share no cells with it are untouched"),
            ),
            forms=("by 2", "by 3"),
        ),
        Contract(
            "clear",
            "llama_memory_clear",
            owes=(),
            gets=(
                _h("clear.empty", "all sequences are empty", "Clear the memory contents"),
                _h(
                    "clear.data",
                    "with data, the buffers are cleared too",
                    "If data == true, the data buffers will also be cleared together with the metadata",
                ),
            ),
            forms=("with data", "metadata only"),
        ),
        Contract(
            "reopen",
            "llama_free, llama_init_from_model",
            owes=(
                _n(
                    "reopen.ubatch",
                    "0 < n_ubatch <= n_batch",
                    'llama.h: "physical maximum batch size" against "logical maximum batch size"; src/llama-context.cpp takes the smaller',
                ),
                _s("reopen.n_seq_max", "n_seq_max >= 1", "src/llama-context.cpp: std::max(1u, params.n_seq_max)"),
                _s(
                    "reopen.v-needs-fa",
                    "a quantised V cache needs flash attention",
                    "src/llama-context.cpp: quantized V cache was requested, but this requires Flash Attention",
                ),
                _s(
                    "reopen.head-size",
                    "quantised K/V needs a head size that is a multiple of the block",
                    "src/llama-context.cpp: K cache type ... with block size ... does not divide n_embd_head_k",
                ),
                _s(
                    "reopen.mixed-kv",
                    "K and V have one type where the model wants it (deepseek4)",
                    "src/llama-context.cpp: model does not support different K",
                ),
            ),
            gets=(
                _n("reopen.empty", "all sequences are empty"),
                _n("reopen.host", "host slots survive, on-device slots do not"),
            ),
            forms=("same parameters", "other parameters"),
        ),
        Contract(
            "corrupt",
            "(changes a saved state in host hands)",
            owes=(
                _n("corrupt.slot", "the slot holds something", "of redraft's own making"),
                _n("corrupt.where", "an edit names a field that some blob has", "of redraft's own making"),
            ),
            gets=(_n("corrupt.harmless", "nothing happens before the state is restored"),),
            forms=(*get_args(How), "several edits", "host blob", "device blob", "whole context"),
        ),
        Contract(
            "ask",
            "llama_memory_seq_pos_max, llama_state_seq_get_size_ext, llama_state_get_size, llama_memory_can_shift",
            owes=(_ids("ask"),),
            gets=(
                _n("ask.pure", "a query changes nothing"),
                _h(
                    "ask.positions",
                    "the positions told are the positions held",
                    "all positions in the range [pos_min, pos_max] are guaranteed to be present",
                ),
            ),
            forms=("positions", "size", "size_all", "can_shift"),
        ),
        *DRIVER_CONTRACTS,
    )
}

FORMS: dict[str, tuple[str, ...]] = {op: c.forms for op, c in CONTRACTS.items()}
CLAUSES: dict[str, Clause] = {clause.id: clause for c in CONTRACTS.values() for clause in (*c.owes, *c.gets)}


def rule(clause_id: str) -> str:
    """A promise as the first line of a report: who says it, of what, and in which words. KeyError for an unknown id."""
    clause = CLAUSES[clause_id]
    op = clause_id.partition(".")[0]
    if clause.says in ("header", "spec"):
        return f"{VERDICT[clause.says]} of {op}: {clause.source.partition(': ')[2]}"
    when, colon, then = clause.text.partition(": ")
    case = f" ({when})" if colon else ""
    return f"{VERDICT[clause.says]}; what can be expected of {op}{case}: {then if colon else clause.text}"


class SlotView(Protocol):
    """What `forms_of` looks at in a saved state."""

    whole: bool
    flags: int
    medium: Medium
    seq: int
    epoch: int
    corrupted: bool
    params: ContextParams


class View(Protocol):
    """The logical state in which an operation is about to be executed, as `forms_of` sees it (`fuzz.state.State` is one)."""

    params: ContextParams
    epoch: int
    n_rs: int

    def length(self, seq: int) -> int:
        """Positions held by a sequence."""

    def end(self, seq: int) -> int:
        """Next position of a sequence."""

    def pending(self, seq: int) -> bool:
        """A rollback waits for the next decode."""

    def last_batch(self, seq: int) -> int:
        """Rows of the sequence in its last batch."""

    def device_saved(self, seq: int) -> bool:
        """The sequence was saved on the device in this context."""

    def saved(self, slot: int) -> SlotView | None:
        """What a slot holds."""

    def newest(self, slot: int) -> bool:
        """An on-device slot is its sequence's newest on-device save in this context."""

    def saved_empty(self, slot: int) -> bool:
        """The slot was saved from an empty sequence."""


def forms_of(op: Op, view: View) -> set[str]:
    """The forms (`FORMS[operation]`) that a concrete operation has in its context; see `subjects.driver_contracts` for
    programs with a driver.
    """
    return {form for form in _FORMS[type(op)](op, view) if form}


def _decode(op: Decode, v: View) -> list[str]:
    seqs, n, nu = (
        {p.seq for p in op.parts},
        sum(len(p.tokens) if p.tokens else p.n for p in op.parts),
        v.params.n_ubatch,
    )
    outs = {p.out for p in op.parts}
    return [
        "one sequence" if len(seqs) == 1 else f"{len(seqs)} sequences",
        f"outputs {next(iter(outs))}" if len(outs) == 1 else "outputs mixed",
        "interleaved" if op.interleave and len(op.parts) > 1 else "",
        "abort callback" if op.abort_after is not None else "",
        "below n_ubatch" if n < nu else "above n_ubatch" if n > nu else "n_ubatch",
        "n_ubatch - 1" if n == nu - 1 else "n_ubatch + 1" if n == nu + 1 else "",
        "n_batch" if n == v.params.n_batch else "",
        "one row" if n == 1 else "",
        "cache full" if any(v.end(s) + sum(p.n for p in op.parts if p.seq == s) > v.params.n_ctx for s in seqs) else "",
    ]


def _draft(op: Draft, v: View) -> list[str]:
    return [
        "one token" if op.n == 1 else "several tokens",
        "after other work" if v.length(op.seq) else "empty sequence",
    ]


def _save(op: Save, v: View) -> list[str]:
    return [
        f"flags {op.flags}",
        op.medium,
        "twice" if op.again else "",
        "empty sequence" if not v.length(op.seq) else "",
        "pending rollback" if v.pending(op.seq) else "",
        "older device handle made invalid" if op.flags & ON_DEVICE and v.device_saved(op.seq) else "",
    ]


def _restore(op: Restore, v: View) -> list[str]:
    slot = v.saved(op.slot)
    if slot is None:
        return []
    device = bool(slot.flags & ON_DEVICE)
    return [
        f"flags {slot.flags}",
        slot.medium,
        "same sequence" if slot.seq == op.seq else "other sequence",
        "onto an empty sequence" if not v.length(op.seq) else "",
        "after reopen" if slot.epoch != v.epoch else "",
        "after reopen with other parameters" if slot.epoch != v.epoch and slot.params != v.params else "",
        "older device handle" if device and slot.epoch == v.epoch and not v.newest(op.slot) else "",
        "foreign device handle" if device and slot.epoch != v.epoch else "",
        "damaged" if slot.corrupted else "",
        "twice" if op.times > 1 else "",
        "saved again" if op.resave else "",
        "of an empty sequence" if v.saved_empty(op.slot) else "",
    ]


def _save_all(op: SaveAll, v: View) -> list[str]:
    live = [i for i in range(v.params.n_seq_max) if v.length(i)]
    pending = any(v.pending(i) for i in range(v.params.n_seq_max))
    return [
        op.medium,
        "twice" if op.again else "",
        "several sequences" if len(live) > 1 else "",
        "pending rollback" if pending else "",
    ]


def _restore_all(op: RestoreAll, v: View) -> list[str]:
    slot = v.saved(op.slot)
    if slot is None:
        return []
    return [
        slot.medium,
        "twice" if op.times > 1 else "",
        "saved again" if op.resave else "",
        "after reopen" if slot.epoch != v.epoch else "",
        "after reopen with other parameters" if slot.epoch != v.epoch and slot.params != v.params else "",
        "damaged" if slot.corrupted else "",
    ]


def _seq_rm(op: SeqRm, v: View) -> list[str]:
    zero = op.lo.at == "start" and op.lo.d == 0
    if op.seq < 0:
        return [f"every sequence ({0 if zero else -1}, -1)"]
    end = v.end(op.seq)
    lo = {"open": 0, "start": op.lo.d, "end": max(end + op.lo.d, 0)}[op.lo.at]
    hi = {"open": 1 << 30, "start": op.hi.d, "end": max(end + op.hi.d, 0)}[op.hi.at]
    if not v.length(op.seq):
        return ["empty sequence"]
    if lo >= hi:
        return ["empty range"]
    if lo >= end:
        return ["p0 at or beyond the end"]
    if lo == 0:
        if op.hi.at == "open":
            return ["whole (-1, -1)" if op.lo.at == "open" else "whole (0, -1)"]
        if hi >= end:
            return ["whole (0, end)"]
        return ["head, p0 open" if op.lo.at == "open" else "head, p0 = 0"]
    if hi < end:
        return ["middle"]
    d = end - lo
    return [
        "tail, p1 open" if op.hi.at == "open" else "tail, p1 = end",
        "last batch undone" if d == v.last_batch(op.seq) else "",
        ("within n_rs_seq" if d <= v.n_rs else "beyond n_rs_seq") if v.n_rs else "",
        "second rollback" if v.pending(op.seq) else "",
    ]


def _seq_cp(op: SeqCp, v: View) -> list[str]:
    if op.src == op.dst:
        return ["onto itself"]
    zero = 0 if op.lo.at == "start" else -1
    return [
        f"whole ({zero}, -1)" if op.hi.at == "open" else f"prefix [{zero}, p)",
        "pending rollback" if v.pending(op.src) else "",
        "unified cache" if v.params.kv_unified else "split cache",
    ]


def _seq_keep(op: SeqKeep, v: View) -> list[str]:
    others = any(v.length(i) for i in range(v.params.n_seq_max) if i != op.seq)
    return [
        "others live" if others else "the only one",
        "an empty one" if not v.length(op.seq) else "",
        "unified cache" if v.params.kv_unified else "split cache",
    ]


def _seq_add(op: SeqAdd, v: View) -> list[str]:
    sign = "+" if op.delta > 0 else "-"
    zero = op.lo.at == "start" and op.lo.d == 0
    if op.hi.at != "open":
        return [f"middle, {sign}"]
    if op.lo.at == "open" or zero:
        return [f"whole, {sign}", "whole (0, -1)" if zero else ""]
    return ["tail, +" if op.delta > 0 else "tail, - (context shift)"]


_FORMS: dict[type[Op], Callable[..., list[str]]] = {
    Decode: _decode,
    Draft: _draft,
    Save: _save,
    Restore: _restore,
    SaveAll: _save_all,
    RestoreAll: _restore_all,
    SeqRm: _seq_rm,
    SeqCp: _seq_cp,
    SeqKeep: _seq_keep,
    SeqAdd: _seq_add,
    SeqDiv: lambda op, _: [f"by {op.d}"],
    Clear: lambda op, _: ["with data" if op.data else "metadata only"],
    Reopen: lambda op, v: ["same parameters" if op.params in (None, v.params) else "other parameters"],
    Corrupt: lambda op, v: [
        *(e.how for e in op.edits),
        "several edits" if len(op.edits) > 1 else "",
        _blob_kind(v.saved(op.slot)),
    ],
    Ask: lambda op, _: [op.what],
}


def _blob_kind(slot: SlotView | None) -> str:
    if slot is None:
        return ""
    return "whole context" if slot.whole else "device blob" if slot.flags & ON_DEVICE else "host blob"


def render() -> str:
    """The table as text, for `redraft contracts`."""
    lines = []
    for c in CONTRACTS.values():
        lines.append(f"{c.op}: {c.calls}")
        for title, clauses in (("the caller owes", c.owes), ("the caller gets", c.gets)):
            if clauses:
                lines.append(f"  {title}")
            for clause in clauses:
                lines.append(f"    {clause.id}: {clause.text}")
                lines += textwrap.wrap(
                    f"{VERDICT[clause.says]}: {clause.source.removeprefix('llama.h: ')}",
                    118,
                    initial_indent="      ",
                    subsequent_indent="      ",
                )
        if c.forms:
            lines += textwrap.wrap("forms: " + "; ".join(c.forms), 118, initial_indent="  ", subsequent_indent="    ")
        with_driver = DRIVER_FORMS.get(c.op, ())
        if with_driver not in ((), c.forms):
            text = "forms with a driver: " + "; ".join(with_driver)
            lines += textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)
