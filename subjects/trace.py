"""Traces: what the subject answered, operation by operation, as data that can be stored and judged again.

A trace holds the resolved calls (what symbols became), return codes, positions of every sequence after every operation,
sizes and hashes of blobs, output rows (float32, apart from the records), warnings, and how the child ended. It comes
out of an untrusted child, so it is parsed strictly by msgspec and never unpickled.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from subjects.scenario import ContextParams

Floats = npt.NDArray[np.float32]

# Bytes of a saved state are kept up to this length, and so many of one program.
KEPT_BYTES = 1 << 20
KEPT_TOTAL = 8 << 20


class Row(msgspec.Struct, array_like=True, frozen=True):
    """One row of a batch, as it was handed to llama_decode."""

    seq: int
    pos: int
    token: int
    out: bool


class Batch(msgspec.Struct, array_like=True):
    """One llama_decode call: its rows, its return code (None: it never returned), and where its output rows are.

    Output row k (the k-th row with `out`) is row `first + k` of the trace's `logits` (and `hidden`, when the context
    gives embeddings); `first` is -1 when nothing was read back.
    """

    rows: list[Row]
    rc: int | None = None
    first: int = -1


class Blob(msgspec.Struct, array_like=True):
    """One save or restore call.

    size: what the size query promised (save) or the length handed in (restore).
    moved: bytes written or read, as returned.
    sha: first 16 hex digits of the blob's SHA-256. counts: in traces of earlier versions a digest; empty now.
    at, length: where its bytes are in the trace's `states`; -1 where they were not kept.
    """

    size: int
    moved: int
    sha: str = ""
    counts: str = ""
    at: int = -1
    length: int = 0


class Piece(NamedTuple):
    """A stretch of a changed blob: bytes start to end of what a slot holds, or for slot -1 the bytes in `data`."""

    slot: int
    start: int = 0
    end: int = 0
    data: bytes = b""


class TapRow(NamedTuple):
    """One row that went into the draft context. `hidden`: the float32 row it was paired with; only the first row of
    each sequence in a decode has it, because only that one comes out of the driver's own state.
    """

    token: int
    pos: int
    seq: int
    out: bool
    hidden: bytes


class Tap(NamedTuple):
    """One decode of a draft context: return code, rows, and the logits of its output rows (empty where the backend
    samples).
    """

    rc: int
    rows: list[TapRow]
    logits: bytes


class Step(msgspec.Struct):
    """What one operation became and what was answered.

    op: index in the scenario. args: resolved arguments of the call (ranges, ids, mutation offsets). rc: its return
    value (bool as
    0/1), None for void. pos: (pos_min, pos_max) of every sequence afterwards. done: False when the call never returned.
    value: the answer of a query. pieces: what a changed blob was put together from.
    With a driver also: draft_pos: positions in the draft's memory. drafts: tokens drafted, for each sequence asked.
    taps: the decodes of the draft context. Blobs of a checkpoint are target, draft and driver, size -1 where the
    driver offers nothing.
    """

    op: int
    args: list[int] = []
    rc: int | None = None
    batches: list[Batch] = []
    blobs: list[Blob] = []
    pos: list[tuple[int, int]] = []
    log: list[str] = []
    value: int | None = None
    skipped: str = ""
    done: bool = False
    pieces: list[Piece] = []
    draft_pos: list[tuple[int, int]] = []
    drafts: list[list[int]] = []
    taps: list[Tap] = []


class Facts(msgspec.Struct, frozen=True):
    """What the library itself says about model and context; everything after the first six may change on a reopen."""

    n_vocab: int
    n_embd: int
    recurrent: bool
    hybrid: bool
    n_swa: int
    n_layer: int
    n_ctx: int
    n_ctx_seq: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_rs_seq: int
    can_shift: bool
    n_draft_max: int = 0
    """the longest draft after the driver's own limits, 0 without a driver"""
    offers_state: bool = False
    """the driver gives a state of a sequence that holds nothing yet"""
    draft_shares: bool = False
    """the draft context looks into the target's memory and has none of its own"""

    @property
    def memory(self) -> Literal["dense", "window", "recurrent", "hybrid"]:
        """Memory kind: what the state of a sequence is made of."""
        if self.hybrid:
            return "hybrid"
        if self.recurrent:
            return "recurrent"
        return "window" if self.n_swa > 0 else "dense"


class End(msgspec.Struct, frozen=True):
    """How the child ended: `ok`, `signal` (code = number), `exit` (code), `hang` (killed by us), `error` (ours: see
    text).
    """

    how: Literal["ok", "signal", "exit", "hang", "error"]
    code: int = 0
    text: str = ""


class Trace(msgspec.Struct):
    """Everything that one run of one scenario showed. `facts[i]` belongs to the i-th context (reopens make more).

    states: the bytes of blobs that can be judged, one behind the other (see Blob); empty in traces of earlier versions.
    """

    steps: list[Step]
    facts: list[Facts]
    end: End
    logits: bytes = b""
    hidden: bytes = b""
    stderr: str = ""
    params: list[ContextParams] = []
    states: bytes = b""

    def state(self, blob: Blob) -> bytes | None:
        """The bytes of a blob, None where they were not kept."""
        return self.states[blob.at : blob.at + blob.length] if blob.at >= 0 else None

    def logit_rows(self) -> Floats:
        """All output rows, shape (rows, n_vocab)."""
        return np.frombuffer(self.logits, np.float32).reshape(-1, self.facts[0].n_vocab)

    def hidden_rows(self) -> Floats:
        """All embedding rows, shape (rows, n_embd); empty unless the context gives embeddings."""
        return np.frombuffer(self.hidden, np.float32).reshape(-1, self.facts[0].n_embd)


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Trace, strict=True)


def to_bytes(trace: Trace) -> bytes:
    """Compact form for storage."""
    return ENCODER.encode(trace)


def from_bytes(data: bytes) -> Trace:
    """Parse a stored trace strictly; raises msgspec.DecodeError on anything else."""
    return DECODER.decode(data)
