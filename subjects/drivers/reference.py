"""draft-mtp in Python, over llama_cpp and its llama_cpp_ext: small enough to read, and its state can be saved whole.

It makes the calls of llama.cpp's own driver (common_speculative_impl_draft_mtp) in the same order and drafts the same
tokens, with one exception: a token at position 0 has nothing before it and is paired with zeros, where llama.cpp's
driver takes the row that the sequence's last use has left behind. The switch `stale-first-row` gives that too.

It reaches the libllama under test, which is in the process already, through the installed llama-cpp-python (see
`binding`), which must be the one made for that llama.cpp. Only children use it; one that forks should call `binding`
before it does (some 30 ms).
"""

from __future__ import annotations

import ctypes as ct
import functools
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from subjects.drivers import DraftAsk, Tap, TapRow
from subjects.scenario import DriverParams
from subjects.trace import Row

MAGIC = b"RDMT"
VERSION = 1
# magic, version, width of rows, model, has drafted, position of the pending row and of the first verification row,
# number of verification rows; then the rows, the pending one first
HEADER = struct.Struct("<4sIIIIiii")

LEAVE_OUT: tuple[str, ...] = (
    "pending-row",  # restore does not put the pending row back
    "verify-rows",  # restore does not put the verification rows back
    "other-sequence",  # restore overwrites the next sequence's pending row too
    "unchecked",  # restore takes what it can of a malformed blob
    "silent-refusal",  # restore refuses without a line in the log
    "refusal-clears",  # a refused restore empties the sequence's state
    "limit-n-batch",  # restore refuses more verification rows than n_batch
    "save-consumes",  # state() forgets the verification rows
    "stale-first-row",  # a token at position 0 is paired with the old pending row, as in llama.cpp
    "neighbour-row",  # process pairs a sequence with the row before it in the batch, another sequence's
    "first-head-only",  # process catches up the first of several chained heads only
    "draft-moves-pending",  # draft leaves the last drafted token's row pending
    "accept-off-by-one",  # accept(k) takes row k + 1; the last, row k - 1
    "ignore-limit",  # draft does not cut to the asked length
)
"""Parts that can be left out on purpose: the faults that the oracles for drivers must find."""

_TOP_K = 10  # what the sampler of llama.cpp's driver looks at
_PLACE = "LLAMA_CPP_LIB_PATH"  # directory that llama_cpp loads libllama.so from
_WANTED = "install the llama-cpp-python of the llama.cpp under test (its binding alone will do)"


class WrongBinding(RuntimeError):
    """llama_cpp is not the binding of the libllama under test."""


class BadState(ValueError):
    """Bytes that are no state of this driver on this model."""


class State(NamedTuple):
    """What the driver keeps of a sequence.

    row: the target's hidden row of the last token, which the next one is paired with, and its position `pos`. rows:
    those of the last batch, from position `first`; accept chooses among them. drafted: it has drafted before (accept
    does nothing otherwise).
    """

    row: bytes
    pos: int = -1
    rows: bytes = b""
    first: int = -1
    drafted: bool = False


def pack(state: State, model: int) -> bytes:
    """A state as bytes; `model` is any 32-bit number that tells models apart."""
    width = len(state.row) // 4
    n = len(state.rows) // len(state.row)
    head = HEADER.pack(MAGIC, VERSION, width, model, state.drafted, state.pos, state.first, n)
    return head + state.row + state.rows


def unpack(blob: bytes, model: int, width: int, n_ctx: int) -> State:
    """The state that `pack` made bytes of, on a model with rows of `width` floats and positions below `n_ctx`.

    Raises:
        BadState: anything else; the message says what is wrong.
    """
    if len(blob) < HEADER.size:
        raise BadState(f"{len(blob)} bytes, shorter than a header")
    magic, version, got, made_on, drafted, pos, first, n = HEADER.unpack_from(blob)
    if magic != MAGIC:
        raise BadState(f"magic {magic.hex()} instead of {MAGIC.hex()}")
    if version != VERSION:
        raise BadState(f"version {version} instead of {VERSION}")
    if got != width:
        raise BadState(f"rows of {got} floats instead of {width}")
    if made_on != model:
        raise BadState("made on another model")
    if drafted > 1:
        raise BadState(f"flag {drafted} is neither 0 nor 1")
    if n < 0 or pos < -1 or first < -1:
        raise BadState(f"{n} rows from position {first}, pending position {pos}")
    row = 4 * width
    if len(blob) != HEADER.size + (n + 1) * row:
        raise BadState(f"{len(blob)} bytes instead of {HEADER.size + (n + 1) * row} for {n} verification rows")
    if (last := max(pos, first + n - 1, first)) >= n_ctx:
        raise BadState(f"position {last} in a context of {n_ctx}")
    at = HEADER.size
    return State(blob[at : at + row], pos, blob[at + row :], first, drafted == 1)


class _Answer(NamedTuple):
    """What the draft context gave for an output row: logits, and the hidden row that the next token is paired with."""

    logits: bytes
    hidden: bytes


class _In(NamedTuple):
    """A row for the draft context: a token and the hidden row of the token before it."""

    token: int
    pos: int
    seq: int
    out: bool
    hidden: bytes


class Reference:
    """draft-mtp (see subjects.drivers.Driver); `leave_out` names one of LEAVE_OUT.

    Three kinds of draft context: one head, several heads that are chained (head i drafts token i), and one that shares
    the target's memory. backend_sampling changes nothing here, except that no logits are shown then either.

    Raises:
        ValueError: another kind of driver, no draft context, models that do not belong together, an unknown switch.
        WrongBinding: see `binding`.
    """

    def __init__(self, p: DriverParams, target: int, draft: int, n_seq: int, leave_out: str = ""):
        if p.kind != "draft-mtp" or not target or not draft:
            raise ValueError(f"the reference driver is draft-mtp between two contexts, not {p.kind}")
        if leave_out and leave_out not in LEAVE_OUT:
            raise ValueError(f"no switch {leave_out!r}; there are {', '.join(LEAVE_OUT)}")
        self._api, self._ext = api, ext = binding()
        self._p, self._target, self._draft, self._without = p, target, draft, leave_out
        model, drafter = api.llama_get_model(target), api.llama_get_model(draft)
        self._width = int(api.llama_model_n_embd_out(drafter))
        if self._width != api.llama_model_n_embd_out(model):
            raise ValueError("hidden rows of target and draft differ in width")
        self._row = 4 * self._width
        self._model = _identity(api, model)
        self._n_ctx = int(api.llama_n_ctx(target))
        vocab = api.llama_model_get_vocab(drafter)
        self._n_vocab = int(api.llama_vocab_n_tokens(vocab))
        n_suppressed = ct.c_int32()
        suppressed = api.llama_vocab_get_suppress_tokens(vocab, ct.byref(n_suppressed))
        self._suppressed = [suppressed[i] for i in range(n_suppressed.value)]

        ext.llama_set_embeddings_nextn(target, True, False)
        ext.llama_set_embeddings_nextn(draft, True, True)
        self._memory = api.llama_get_memory(draft)
        self._shared = ext.llama_get_ctx_other(draft) == target
        self._heads = max(1, int(api.llama_model_n_layer_nextn(drafter)))
        self._chained = self._heads > 1 and not self._shared
        self._limit = min(p.n_max, self._heads) if self._chained else p.n_max
        self.n_max = max(0, self._limit)

        self._states = [State(bytes(self._row)) for _ in range(n_seq)]
        self._taps: list[Tap] = []
        self._lines: list[str] = []

    def process(self, rows: Sequence[Row]) -> bool:
        """See subjects.drivers.Driver."""
        if not rows:
            return True
        given = ct.string_at(self._ext.llama_get_embeddings_nextn(self._target), len(rows) * self._row)
        after = [given[i : i + self._row] for i in range(0, len(given), self._row)]
        begin: dict[int, int] = {}
        end: dict[int, int] = {}
        for k, r in enumerate(rows):
            begin.setdefault(r.seq, k)
            end[r.seq] = k + 1

        # each token goes into the draft's memory with the hidden row of the token before it
        if not self._shared:
            alone = self._without != "neighbour-row"
            batch = [
                _In(
                    r.token,
                    r.pos,
                    r.seq,
                    False,
                    self._before(r.seq, r.pos) if k == (begin[r.seq] if alone else 0) else after[k - 1],
                )
                for k, r in enumerate(rows)
            ]
            heads = 1 if self._without == "first-head-only" else self._heads
            if not all(self._step(batch, i, {s: rows[k].pos for s, k in begin.items()}) == 0 for i in range(heads)):
                return False

        for s, k in begin.items():
            self._states[s] = self._states[s]._replace(
                row=after[end[s] - 1],
                pos=rows[end[s] - 1].pos,
                rows=b"".join(after[k : end[s]]),
                first=rows[k].pos,
            )
        return True

    def draft(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See subjects.drivers.Driver."""
        ask = {a.seq: a for a in sorted(asks, key=lambda a: a.seq)}
        tokens: dict[int, list[int]] = {s: [] for s in ask}
        hidden = {s: [self._before(s, a.pos0)] for s, a in ask.items()}
        batch = [_In(a.last, a.pos0, s, True, hidden[s][0]) for s, a in ask.items()]
        step = 0
        while batch:
            live = {r.seq: k for k, r in enumerate(batch) if r.out}
            if self._step(batch, step, {s: ask[s].pos0 for s in live}) != 0:
                break
            answers = {s: self._answer(k) for s, k in live.items()}
            step += 1
            batch = []
            for s, answer in answers.items():
                token = self._choose(answer.logits)
                if token is None:
                    continue
                tokens[s].append(token)
                if len(tokens[s]) >= self._limit:
                    continue
                hidden[s].append(answer.hidden)
                pos0 = ask[s].pos0
                if self._chained:  # the next head has seen nothing of this draft
                    said = [ask[s].last, *tokens[s]]
                    batch += [_In(t, pos0 + i, s, i == step, hidden[s][i]) for i, t in enumerate(said)]
                else:
                    batch.append(_In(token, pos0 if self._shared else pos0 + step, s, True, answer.hidden))

        for s, a in ask.items():
            if self._without == "draft-moves-pending":
                self._states[s] = self._states[s]._replace(row=hidden[s][-1])
            if len(tokens[s]) < self._p.n_min:
                tokens[s] = []
            if a.n_max > 0 and self._without != "ignore-limit":
                del tokens[s][a.n_max :]
            if tokens[s]:
                self._states[s] = self._states[s]._replace(drafted=True)
        return [tokens[a.seq] for a in asks]

    def accept(self, seq: int, n: int) -> None:
        """See subjects.drivers.Driver. Raises ValueError for tokens of a sequence that has never drafted."""
        state = self._states[seq]
        if not state.drafted and n:
            raise ValueError(f"sequence {seq} has drafted nothing that could be accepted")
        last = len(state.rows) // self._row - 1
        if not state.drafted or last < 0:
            return
        i = min(n, last)
        if self._without == "accept-off-by-one":
            i = i + 1 if i < last else max(i - 1, 0)
        row = state.rows[i * self._row : (i + 1) * self._row]
        self._states[seq] = state._replace(row=row, pos=state.first + i)

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """See subjects.drivers.Driver."""
        end = self._api.llama_memory_seq_pos_max(self._memory, seq)
        if prompt and end < len(prompt) - 1 and not self._shared:
            self._lines.append(f"draft-mtp: the draft ends at position {end}, the prompt at {len(prompt) - 1}")

    def state(self, seq: int) -> bytes:
        """See subjects.drivers.Driver. The bytes do not depend on the sequence's number."""
        blob = pack(self._states[seq], self._model)
        if self._without == "save-consumes":
            self._states[seq] = self._states[seq]._replace(rows=b"", first=-1)
        return blob

    def restore(self, seq: int, blob: bytes) -> None:
        """See subjects.drivers.Driver. A refusal is a line in the log and changes nothing."""
        old = self._states[seq]
        try:
            new = unpack(blob, self._model, self._width, self._n_ctx)
            n = len(new.rows) // self._row
            if self._without == "limit-n-batch" and n > self._api.llama_n_batch(self._draft):
                raise BadState(f"{n} verification rows, more than n_batch")
        except BadState as e:
            if self._without == "unchecked":
                self._states[seq] = self._half(old, blob[HEADER.size :])
                return
            if self._without == "refusal-clears":
                self._states[seq] = State(bytes(self._row))
            if self._without != "silent-refusal":
                self._lines.append(f"draft-mtp: state of sequence {seq} refused: {e}")
            return
        if self._without == "pending-row":
            new = new._replace(row=old.row, pos=old.pos)
        if self._without == "verify-rows":
            new = new._replace(rows=old.rows, first=old.first)
        if self._without == "other-sequence":
            other = (seq + 1) % len(self._states)
            self._states[other] = self._states[other]._replace(row=new.row)
        self._states[seq] = new

    def take(self) -> list[Tap]:
        """See subjects.drivers.Driver."""
        taps, self._taps = self._taps, []
        return taps

    def log(self) -> list[str]:
        """See subjects.drivers.Driver."""
        lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        """See subjects.drivers.Driver."""

    def _before(self, seq: int, pos: int) -> bytes:
        """The hidden row that a sequence's next token, at `pos`, is paired with."""
        return bytes(self._row) if pos == 0 and self._without != "stale-first-row" else self._states[seq].row

    def _half(self, old: State, body: bytes) -> State:
        """What `unchecked` makes of a malformed blob: as many rows as there are."""
        row, rows = body[: self._row], body[self._row :]
        return old._replace(row=row + old.row[len(row) :], rows=rows[: len(rows) - len(rows) % self._row])

    def _step(self, batch: Sequence[_In], head: int, begin: dict[int, int]) -> int:
        """Decode in the draft context under a head. Chained heads have a layer each in the same cells, so what begins
        at the positions `begin` is decoded anew for each of them.
        """
        if not self._chained:
            return self._decode(batch)
        for s, pos in begin.items():
            self._api.llama_memory_seq_rm(self._memory, s, pos, -1)
        self._ext.llama_set_nextn_layer_offset(self._draft, head)
        rc = self._decode(batch)
        self._ext.llama_set_nextn_layer_offset(self._draft, 0)
        return rc

    def _decode(self, batch: Sequence[_In]) -> int:
        n = len(batch)
        ints = ct.c_int32 * n
        seqs = ints(*[r.seq for r in batch])
        base = ct.addressof(seqs)
        seq_ids = (ct.c_void_p * n)(*[base + 4 * i for i in range(n)])
        rc = int(
            self._api.llama_decode(
                self._draft,
                self._api.llama_batch(
                    n_tokens=n,
                    token=ints(*[r.token for r in batch]),
                    embd=(ct.c_float * (n * self._width)).from_buffer_copy(b"".join(r.hidden for r in batch)),
                    pos=ints(*[r.pos for r in batch]),
                    n_seq_id=ints(*[1] * n),
                    seq_id=ct.cast(seq_ids, ct.POINTER(ct.POINTER(ct.c_int32))),
                    logits=(ct.c_int8 * n)(*[r.out for r in batch]),
                ),
            )
        )
        if rc != 0:
            self._lines.append(f"draft-mtp: decoding {n} rows in the draft context gives {rc}")
        # only the first row of each sequence comes out of the driver's own state
        firsts = [k == 0 or batch[k - 1].seq != r.seq for k, r in enumerate(batch)]
        rows = [
            TapRow(r.token, r.pos, r.seq, r.out, r.hidden if f else b"") for r, f in zip(batch, firsts, strict=True)
        ]
        shown = rc == 0 and not self._p.backend_sampling
        logits = b"".join(self._logits(k) for k, r in enumerate(batch) if r.out and shown)
        self._taps.append(Tap(rc, rows, logits))
        return rc

    def _logits(self, k: int) -> bytes:
        return ct.string_at(self._api.llama_get_logits_ith(self._draft, k), 4 * self._n_vocab)

    def _answer(self, k: int) -> _Answer:
        return _Answer(
            self._logits(k), ct.string_at(self._ext.llama_get_embeddings_nextn_ith(self._draft, k), self._row)
        )

    def _choose(self, logits: bytes) -> int | None:
        """The best token, None where its probability among the best _TOP_K is below p_min."""
        x = np.frombuffer(logits, np.float32)
        if self._suppressed:
            x = x.copy()
            x[self._suppressed] = -np.inf
        best = int(x.argmax())
        if self._p.p_min > 0:
            top = np.partition(x, -_TOP_K)[-_TOP_K:] if len(x) > _TOP_K else x
            p = np.float32(1 / np.exp(top - x[best]).sum(dtype=np.float64))
            if p < np.float32(self._p.p_min):
                return None
        return best


def _identity(api: Any, model: int) -> int:
    """A number that differs between models of another kind, size or vocabulary."""
    text = ct.create_string_buffer(256)
    api.llama_model_desc(model, text, len(text))
    facts = (
        api.llama_model_n_params(model),
        api.llama_model_n_layer(model),
        api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)),
    )
    return zlib.crc32(text.value + repr(facts).encode())


@functools.cache
def binding() -> tuple[Any, Any]:
    """llama_cpp.llama_cpp and llama_cpp_ext over the libllama that is in this process; the shim's log stays as it is.

    Raises:
        WrongBinding: llama_cpp is not there, has another libllama, or was made for other structs.
    """
    files = _mapped()
    if len(files) != 1:
        raise WrongBinding(f"{len(files)} files of libllama in this process instead of one: {', '.join(files)}")
    lib = ct.CDLL(files[0])
    log, user = ct.c_void_p(), ct.c_void_p()
    lib.llama_log_get(ct.byref(log), ct.byref(user))
    before = os.environ.get(_PLACE)
    try:
        # The package's libllama.so and libllama.so.0 are copies of each other, so its own way would load a second one.
        with tempfile.TemporaryDirectory() as place:
            os.symlink(files[0], os.path.join(place, "libllama.so"))
            os.environ[_PLACE] = place
            import llama_cpp.llama_cpp as api
            import llama_cpp.llama_cpp_ext as ext
    except (ImportError, AttributeError, OSError, RuntimeError) as e:
        raise WrongBinding(f"the installed llama-cpp-python does not fit {files[0]}: {e}; {_WANTED}") from None
    finally:
        lib.llama_log_set(log, user)  # the import has taken it over, for good
        os.environ.pop(_PLACE, None)
        if before is not None:
            os.environ[_PLACE] = before
    if _mapped() != files:
        raise WrongBinding(f"llama_cpp came with a libllama of its own: {', '.join(_mapped())}")
    if wrong := _canary(api):
        raise WrongBinding(f"the installed llama-cpp-python was made for another llama.cpp: {wrong}; {_WANTED}")
    return api, ext


def _mapped() -> list[str]:
    """Files of libllama in this process."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines}
    return sorted(f for f in files if os.path.basename(f).startswith("libllama.so"))


def _canary(api: Any) -> str:
    """What is unlike the structs that the binding was made for, empty when nothing is: a struct that has grown or
    moved would be misread silently.
    """
    c = api.llama_context_default_params()
    token = (ct.c_int32 * 3)()
    b = api.llama_batch_get_one(token, 3)
    expected: tuple[tuple[str, object, object], ...] = (
        ("llama_context_params.n_ctx", c.n_ctx, 512),
        ("llama_context_params.yarn_ext_factor", c.yarn_ext_factor, -1.0),
        ("llama_context_params.yarn_orig_ctx", c.yarn_orig_ctx, 0),
        ("llama_context_params.type_k", c.type_k, api.GGML_TYPE_F16),
        ("llama_context_params.type_v", c.type_v, api.GGML_TYPE_F16),
        ("llama_context_params.offload_kqv", c.offload_kqv, True),
        ("llama_context_params.kv_unified", c.kv_unified, False),
        ("llama_context_params.ctx_other", c.ctx_other, None),
        ("llama_batch.n_tokens", b.n_tokens, 3),
        ("llama_batch.token", ct.cast(b.token, ct.c_void_p).value, ct.addressof(token)),
        ("llama_batch.embd", any(map(bool, (b.embd, b.pos, b.n_seq_id, b.seq_id, b.logits))), False),
    )
    return ", ".join(f"{name} is {got}, not {want}" for name, got, want in expected if got != want)
