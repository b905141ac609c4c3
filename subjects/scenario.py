"""Scenarios: the programs that redraft runs on llama.cpp, as plain data.

A scenario is a model, the parameters of a context and a list of operations. It is a tagged union of msgspec structs
with strict JSON (unknown keys, duplicate keys and NaN are refused) and a version, so that a file of today is either
read as it was meant or refused.

Positions and tokens are symbolic where a reducer must be able to drop an operation and keep the rest meaningful:
"append 5 tokens of stream 3 to sequence 0", "cut the last 2". `subjects.runner` resolves them while it runs, and the
trace records what they became.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, TypeVar, get_args

import msgspec

VERSION = 2

# llama.h: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY and LLAMA_STATE_SEQ_FLAGS_ON_DEVICE
PARTIAL = 1
ON_DEVICE = 2

Anchor = Literal["start", "end", "open"]
Outputs = Literal["none", "last", "all"]
Medium = Literal["buffer", "file"]
How = Literal["set", "add", "flip", "zero", "cut", "insert", "drop", "double", "swap", "take"]
Query = Literal["positions", "size", "size_all", "can_shift"]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of everything that is stored: immutable, strict, compared by value."""


class Edge(Record, frozen=True):
    """One end of a position range, relative to the sequence it is applied to.

    `start` is position 0 plus `d`; `end` is the sequence's next free position plus `d` (so `end`-2 begins the last two
    tokens); `open` is llama.h's negative position, "from the beginning" or "to infinity".
    """

    at: Anchor = "open"
    d: int = 0


OPEN = Edge()


class Part(Record, frozen=True):
    """The rows of one sequence in one batch: `n` tokens of `stream` at the next positions, or the given `tokens`.

    `tokens` is what references and reproducers use; generated programs use streams, so that history stays meaningful
    when
    the reducer drops an operation.
    """

    seq: int
    n: int
    stream: int = 0
    out: Outputs = "last"
    tokens: tuple[int, ...] | None = None


class Op(Record, frozen=True, tag_field="op"):
    """One operation of a program; the subclasses are the whole vocabulary."""


class Decode(Op, frozen=True, tag="decode"):
    """One llama_decode of one or several sequences.

    `interleave` orders the rows round robin over the parts instead of part after part. `abort_after` makes the abort
    callback return true at its n-th call (None: no callback fires).
    """

    parts: tuple[Part, ...]
    interleave: bool = False
    abort_after: int | None = None


class Draft(Op, frozen=True, tag="draft"):
    """Greedy redraft: `n` single-token decodes of one sequence, each feeding the arg max of the row before.

    The first token is `stream`'s token at the next position, so a draft needs no earlier output.
    """

    seq: int
    n: int
    stream: int = 0


class Save(Op, frozen=True, tag="save"):
    """llama_state_seq_get_data_ext (or _save_file) of one sequence into a host slot. `again` saves twice in a row."""

    seq: int
    slot: int
    flags: int = 0
    medium: Medium = "buffer"
    again: bool = False


class Restore(Op, frozen=True, tag="restore"):
    """llama_state_seq_set_data_ext (or _load_file) of a slot into sequence `seq`, with the flags of the slot.

    `times` restores several times in a row; `resave` saves the sequence again afterwards (same flags) for comparison.
    """

    seq: int
    slot: int
    times: int = 1
    resave: bool = False


class SaveAll(Op, frozen=True, tag="save_all"):
    """llama_state_get_data (or llama_state_save_file): the whole context into a slot."""

    slot: int
    medium: Medium = "buffer"
    again: bool = False


class RestoreAll(Op, frozen=True, tag="restore_all"):
    """llama_state_set_data (or llama_state_load_file) of a whole-context slot."""

    slot: int
    times: int = 1
    resave: bool = False


class SeqRm(Op, frozen=True, tag="seq_rm"):
    """llama_memory_seq_rm; `seq` -1 means every sequence."""

    seq: int
    lo: Edge = OPEN
    hi: Edge = OPEN


class SeqCp(Op, frozen=True, tag="seq_cp"):
    """llama_memory_seq_cp."""

    src: int
    dst: int
    lo: Edge = OPEN
    hi: Edge = OPEN


class SeqKeep(Op, frozen=True, tag="seq_keep"):
    """llama_memory_seq_keep."""

    seq: int


class SeqAdd(Op, frozen=True, tag="seq_add"):
    """llama_memory_seq_add."""

    seq: int
    delta: int
    lo: Edge = OPEN
    hi: Edge = OPEN


class SeqDiv(Op, frozen=True, tag="seq_div"):
    """llama_memory_seq_div."""

    seq: int
    d: int
    lo: Edge = OPEN
    hi: Edge = OPEN


class Clear(Op, frozen=True, tag="clear"):
    """llama_memory_clear."""

    data: bool = True


class Reopen(Op, frozen=True, tag="reopen"):
    """Free the context and make a new one, with `params` if given. Host slots survive, device snapshots do not."""

    params: ContextParams | None = None


class BlobEdit(Record, frozen=True):
    """One change of a saved blob, through its grammar (`subjects.state`).

    where: name of a field or group, such as "recurrent.cell.pos", and nth: which of those of that name, counted round.
    "" is a place among the bytes, nth thousandths of their length. What a blob does not have is not changed.

    how: `set` a number to value; `add` value to it; `flip` the lowest bits of its first byte that value has; `zero` all
    its bytes (at a place: value of them); `cut` the blob there, value bytes further on; `insert` value bytes 0x5a
    behind it; `drop` it, `double` it, or `swap` it with the next of its name, a cell with its rows and the count
    of cells, but where value is 1 its own bytes alone; `take` that of slot `value` in its place.
    """

    how: How
    where: str = ""
    nth: int = 0
    value: int = 0


class Corrupt(Op, frozen=True, tag="corrupt"):
    """Change the saved bytes of a slot: all edits speak of the blob as it is before; of two that overlap the first
    counts.
    """

    slot: int
    edits: tuple[BlobEdit, ...]


class Ask(Op, frozen=True, tag="ask"):
    """Read-only queries; they must change nothing."""

    what: Query
    seq: int = 0
    flags: int = 0


Route = Literal["cut", "host", "device", "whole"]
Piece = Literal["target", "draft", "driver"]
Mangling = Literal["empty", "short", "long", "magic", "width", "negative", "huge", "other", "model"]
PIECES: tuple[Piece, ...] = ("target", "draft", "driver")


class Propose(Op, frozen=True, tag="propose"):
    """One common_speculative_draft for several sequences, and the removal of what it leaves in the draft's memory.

    The token that each sequence goes on with is `stream`'s at the next position, the greedy one of its last output row
    for stream -1, or given by `last`, which is what references use. n_max: at most so many drafts, -1 for the driver's
    own limit.
    """

    seqs: tuple[int, ...]
    stream: int = 0
    n_max: int = -1
    last: tuple[int, ...] | None = None


class Verify(Op, frozen=True, tag="verify"):
    """One target decode of what the sequences proposed, processed by the driver, and what follows from it.

    accept: how many drafts each sequence takes, -1 as many as greedy decoding of the target confirms; empty: that is
    left to Accept. route: how a sequence that takes fewer gets rid of the rest: `cut` removes it from both memories;
    `host`, `device` and `whole` restore what was saved before the batch (PARTIAL_ONLY, the same on the device, or
    whole), the driver's state with it where it offers one, and process the accepted tokens again.
    """

    seqs: tuple[int, ...]
    accept: tuple[int, ...] = ()
    route: Route = "cut"


class Accept(Op, frozen=True, tag="accept"):
    """The `n` first drafts of a verification that was left open are taken, the rest is cut from both memories."""

    seq: int
    n: int


class Checkpoint(Op, frozen=True, tag="checkpoint"):
    """Save a sequence everywhere: target and draft memory with `flags`, and what the driver offers."""

    seq: int
    slot: int
    flags: int = 0


class Rewind(Op, frozen=True, tag="rewind"):
    """Put `parts` of a checkpoint back into sequence `seq`, and cut the tails of both memories behind it."""

    seq: int
    slot: int
    parts: tuple[Piece, ...] = PIECES


class Mangle(Op, frozen=True, tag="mangle"):
    """Change the driver's part of a checkpoint into one that no driver may take, once.

    `at`: which 32-bit number of its header `magic`, `negative` and `huge` change, counted round where it has fewer.
    """

    slot: int
    how: Mangling
    at: int = 0


class Begin(Op, frozen=True, tag="begin"):
    """common_speculative_begin with all that the sequence holds."""

    seq: int


AnyOp = (
    Decode
    | Draft
    | Save
    | Restore
    | SaveAll
    | RestoreAll
    | SeqRm
    | SeqCp
    | SeqKeep
    | SeqAdd
    | SeqDiv
    | Clear
    | Reopen
    | Corrupt
    | Ask
    | Propose
    | Verify
    | Accept
    | Checkpoint
    | Rewind
    | Mangle
    | Begin
)
OP_TYPES: tuple[type[Op], ...] = get_args(AnyOp)
OP_NAMES: tuple[str, ...] = tuple(str(t.__struct_config__.tag) for t in OP_TYPES)

# ggml_type numbers that K/V caches are tested with (ggml.h)
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
GGML_TYPE: dict[str, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


class ContextParams(Record, frozen=True):
    """The context parameters that are part of a scenario (llama_context_params); defaults are the strict setting.

    Strict means: one thread, flash attention off, F32 K and V, where honest differences are smallest.
    """

    n_ctx: int = 256
    n_batch: int = 64
    n_ubatch: int = 32
    n_seq_max: int = 2
    n_rs_seq: int = 0
    kv_unified: bool = False
    type_k: KvType = "f32"
    type_v: KvType = "f32"
    flash_attn: bool = False
    swa_full: bool = False
    offload_kqv: bool = False
    n_threads: int = 1
    embeddings: bool = False


DriverKind = Literal[
    "draft-mtp",
    "draft-eagle3",
    "draft-simple",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
]


class DriverParams(Record, frozen=True):
    """A speculative driver (common_params_speculative) and how it is set up.

    draft: the draft's model, None where the target's own file drafts (or nothing does: the ngram kinds). impl:
    `native` is llama.cpp's own, `reference` is ours (subjects.drivers.reference). backend_sampling hides the draft's
    logits. late: the draft context is made after the target has decoded something. state: the caller saves and restores
    what the driver offers of its state. ngram_*: sizes of the ngram kinds, which draft ngram_m tokens whatever n_max
    is (ngram-cache: 8).
    """

    kind: DriverKind
    draft: ModelRef | None = None
    impl: Literal["native", "reference"] = "native"
    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0
    backend_sampling: bool = False
    late: bool = False
    state: bool = True
    ngram_n: int = 4
    ngram_m: int = 4
    ngram_hits: int = 1


class ModelRef(Record, frozen=True):
    """What is loaded: a recipe by name, version and seed, or a GGUF by path; the file's hash tells if it is still
    the same.
    """

    recipe: str | None = None
    version: int = 1
    seed: int = 0
    path: str | None = None
    sha256: str | None = None
    n_gpu_layers: int = 0

    def label(self) -> str:
        """Short name for people."""
        return self.recipe if self.recipe is not None else (self.path or "?").rsplit("/", 1)[-1]


class Scenario(Record, frozen=True):
    """A program. With a driver, a Decode is processed by it, and SeqRm cuts target and draft. `note` is for people and
    takes no part in `key`.
    """

    model: ModelRef
    ops: tuple[AnyOp, ...]
    params: ContextParams = ContextParams()
    driver: DriverParams | None = None
    misuse: bool = False
    note: str = ""
    version: int = VERSION

    def key(self) -> str:
        """SHA-256 (16 hex digits) of everything that is executed; equal programs have equal keys."""
        bare = msgspec.structs.replace(self, note="")
        return hashlib.sha256(ENCODER.encode(bare)).hexdigest()[:16]


ENCODER = msgspec.json.Encoder(order="deterministic")
_DECODER = msgspec.json.Decoder(Scenario, strict=True)


class BadScenario(ValueError):
    """A file that is no scenario of this version; the message says where and why."""


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads' object_pairs_hook. Raises BadScenario for a key that comes twice."""
    keys = [k for k, _ in pairs]
    if len(set(keys)) != len(keys):
        raise BadScenario(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r}")
    return dict(pairs)


def _no_constant(text: str) -> Any:
    raise BadScenario(f"{text} is not allowed")


def dumps(scenario: Scenario, *, indent: int = 2) -> str:
    """JSON text of a scenario, stable, defaults included, with a final newline."""
    return msgspec.json.format(ENCODER.encode(scenario), indent=indent).decode() + "\n"


def loads(text: str | bytes) -> Scenario:
    """Parse a scenario strictly.

    Raises:
        BadScenario: not JSON, another version, unknown or duplicate keys, wrong types, NaN or Infinity.
    """
    return parsed(text, _DECODER, VERSION)


P = TypeVar("P")


def parsed(text: str | bytes, decoder: msgspec.json.Decoder[P], version: int) -> P:
    """Parse a program of any subject strictly. Raises BadScenario."""
    raw = raw_object(text)
    if raw.get("version", version) != version:
        raise BadScenario(f"scenario version {raw.get('version')!r}, this redraft reads version {version}")
    try:
        program = decoder.decode(text)
        msgspec.msgpack.encode(program)  # numbers that no call could take
    except (msgspec.DecodeError, OverflowError) as e:
        raise BadScenario(str(e)) from None
    return program


def raw_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object without duplicate keys and constants that are no JSON. Raises BadScenario."""
    try:
        # msgspec keeps the last of two equal keys silently, so the standard library looks first.
        raw = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except BadScenario:
        raise
    except (ValueError, RecursionError) as e:  # not JSON, not UTF-8, a number of thousands of digits, nested too deep
        raise BadScenario(f"not JSON: {e}") from None
    if not isinstance(raw, dict):
        raise BadScenario(f"a {type(raw).__name__} is no scenario")
    return raw


def token(stream: int, pos: int, n_vocab: int) -> int:
    """The token that `stream` holds at `pos`: a fixed hash, so that equal positions of one stream always agree."""
    x = (stream * 0x9E3779B97F4A7C15 + (pos + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x ^= x >> 29
    x = (x * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return int((x >> 32) % n_vocab)
