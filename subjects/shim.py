"""Python face of the shim: one method a call, integers and bytes in and out, nothing of llama.h's structs.

Native code runs in whichever process uses this class, so only children (`subjects.child`) and reproducers use it.
"""

from __future__ import annotations

import ctypes as ct
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from subjects.scenario import GGML_TYPE, ContextParams
from subjects.trace import KEPT_BYTES

INTERFACE = 3

_I32P = ct.POINTER(ct.c_int32)
_U64P = ct.POINTER(ct.c_uint64)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "rd_version": (ct.c_int32, []),
    "rd_init": (None, []),
    "rd_system_info": (ct.c_char_p, []),
    "rd_take_log": (ct.c_int32, [ct.c_char_p, ct.c_int32]),
    "rd_model_load": (ct.c_void_p, [ct.c_char_p, ct.c_int32]),
    "rd_model_free": (None, [ct.c_void_p]),
    "rd_model_facts": (None, [ct.c_void_p, _I32P]),
    "rd_ctx_new": (ct.c_void_p, [ct.c_void_p, _I32P]),
    "rd_ctx_free": (None, [ct.c_void_p]),
    "rd_ctx_facts": (None, [ct.c_void_p, _I32P]),
    "rd_decode": (
        ct.c_int32,
        [ct.c_void_p, ct.c_int32, ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_char_p, ct.c_int64],
    ),
    "rd_logits": (ct.c_int32, [ct.c_void_p, ct.c_int32, ct.c_void_p, ct.c_int32]),
    "rd_hidden": (ct.c_int32, [ct.c_void_p, ct.c_int32, ct.c_void_p, ct.c_int32]),
    "rd_seq_rm": (ct.c_int32, [ct.c_void_p, ct.c_int32, ct.c_int32, ct.c_int32]),
    "rd_seq_cp": (None, [ct.c_void_p, ct.c_int32, ct.c_int32, ct.c_int32, ct.c_int32]),
    "rd_seq_keep": (None, [ct.c_void_p, ct.c_int32]),
    "rd_seq_add": (None, [ct.c_void_p, ct.c_int32, ct.c_int32, ct.c_int32, ct.c_int32]),
    "rd_seq_div": (None, [ct.c_void_p, ct.c_int32, ct.c_int32, ct.c_int32, ct.c_int32]),
    "rd_clear": (None, [ct.c_void_p, ct.c_int32]),
    "rd_positions": (None, [ct.c_void_p, ct.c_int32, _I32P]),
    "rd_seq_size": (ct.c_uint64, [ct.c_void_p, ct.c_int32, ct.c_uint32]),
    "rd_seq_get": (ct.c_uint64, [ct.c_void_p, ct.c_char_p, ct.c_uint64, ct.c_int32, ct.c_uint32]),
    "rd_seq_set": (ct.c_uint64, [ct.c_void_p, ct.c_char_p, ct.c_uint64, ct.c_int32, ct.c_uint32]),
    "rd_all_size": (ct.c_uint64, [ct.c_void_p]),
    "rd_all_get": (ct.c_uint64, [ct.c_void_p, ct.c_char_p, ct.c_uint64]),
    "rd_all_set": (ct.c_uint64, [ct.c_void_p, ct.c_char_p, ct.c_uint64]),
    "rd_seq_save_file": (ct.c_uint64, [ct.c_void_p, ct.c_char_p, ct.c_int32, _I32P, ct.c_uint64]),
    "rd_seq_load_file": (
        ct.c_uint64,
        [ct.c_void_p, ct.c_char_p, ct.c_int32, _I32P, ct.c_uint64, ct.POINTER(ct.c_uint64)],
    ),
    "rd_all_save_file": (ct.c_int32, [ct.c_void_p, ct.c_char_p, _I32P, ct.c_uint64]),
    "rd_replay": (
        ct.c_int32,
        [ct.c_void_p, _I32P, ct.c_char_p, ct.c_int32, ct.c_void_p, ct.c_void_p, ct.c_int32, ct.c_void_p, _U64P],
    ),
    "rd_all_load_file": (ct.c_int32, [ct.c_void_p, ct.c_char_p, _I32P, ct.c_uint64, ct.POINTER(ct.c_uint64)]),
}

MODEL_FACTS = ("n_vocab", "n_embd", "recurrent", "hybrid", "n_swa", "n_layer")
CONTEXT_FACTS = ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "can_shift")


class WrongShim(RuntimeError):
    """The compiled shim speaks another version of the interface than this file."""


def bound(path: Path, signatures: Mapping[str, tuple[object, list[object]]], version: str, interface: int) -> ct.CDLL:
    """A library of ours, loaded into this process, its functions with their types.

    Raises WrongShim when the function `version` says another interface than `interface`.
    """
    lib = ct.CDLL(str(path))
    for name, (restype, argtypes) in signatures.items():
        f = getattr(lib, name)
        f.restype, f.argtypes = restype, argtypes
    said = getattr(lib, version)()
    if said != interface:
        raise WrongShim(f"{path} has interface {said}, this redraft needs {interface}")
    return lib


class Shim:
    """The library under test, loaded into this process.

    `path` is a compiled shim (see `subjects.builds`); it pulls in the libllama it was linked against.
    """

    def __init__(self, path: Path):
        self._lib = lib = bound(path, _SIGNATURES, "rd_version", INTERFACE)
        self._log = ct.create_string_buffer(1 << 15)
        self._room = ct.create_string_buffer(1 << 16)
        self._states = ct.create_string_buffer(0)
        lib.rd_init()

    def system_info(self) -> str:
        """llama_print_system_info: instruction sets and backends."""
        return str(self._lib.rd_system_info().decode("utf-8", "replace"))

    def take_log(self) -> list[str]:
        """Warnings and errors logged since the last call, a line each."""
        n = self._lib.rd_take_log(self._log, len(self._log))
        return self._log.raw[:n].decode("utf-8", "replace").splitlines() if n else []

    def load_model(self, path: Path, n_gpu_layers: int = 0) -> int | None:
        """Handle of a loaded model, None when the library refuses the file."""
        handle = self._lib.rd_model_load(str(path).encode(), n_gpu_layers)
        return None if handle is None else int(handle)

    def free_model(self, model: int) -> None:
        """Free a model; its contexts must be gone."""
        self._lib.rd_model_free(model)

    def model_facts(self, model: int) -> dict[str, int]:
        """What the library says about a model, by the names of MODEL_FACTS."""
        out = (ct.c_int32 * len(MODEL_FACTS))()
        self._lib.rd_model_facts(model, out)
        return dict(zip(MODEL_FACTS, out, strict=True))

    def new_context(self, model: int, p: ContextParams) -> int | None:
        """Handle of a new context, None when the library refuses the parameters."""
        handle = self._lib.rd_ctx_new(model, params_array(p))
        return None if handle is None else int(handle)

    def free_context(self, ctx: int) -> None:
        """Free a context."""
        self._lib.rd_ctx_free(ctx)

    def context_facts(self, ctx: int) -> dict[str, int]:
        """What the library says about a context, by the names of CONTEXT_FACTS."""
        out = (ct.c_int32 * len(CONTEXT_FACTS))()
        self._lib.rd_ctx_facts(ctx, out)
        return dict(zip(CONTEXT_FACTS, out, strict=True))

    def decode(
        self,
        ctx: int,
        token: Sequence[int],
        pos: Sequence[int],
        seq: Sequence[int],
        out: Sequence[int],
        abort_after: int | None = None,
    ) -> int:
        """llama_decode of len(token) rows; `abort_after` n lets the abort callback return true at its n-th call
        (from 0).
        """
        # addresses of arrays, which are built several times faster than ctypes arrays
        t, p, s = array("i", token), array("i", pos), array("i", seq)
        after = -1 if abort_after is None else abort_after
        addresses = (a.buffer_info()[0] for a in (t, p, s))
        return int(self._lib.rd_decode(ctx, len(t), *addresses, bytes(out), after))

    def _buffer(self, size: int) -> ct.Array[ct.c_char]:
        """The one buffer that answers are read into, large enough."""
        if size > len(self._room):
            self._room = ct.create_string_buffer(2 * size)
        return self._room

    def logits(self, ctx: int, i: int, n_vocab: int) -> bytes | None:
        """Logits of batch row `i` as n_vocab float32, None where the library gives none."""
        buf = self._buffer(4 * n_vocab)
        return ct.string_at(buf, 4 * n_vocab) if self._lib.rd_logits(ctx, i, buf, n_vocab) else None

    def hidden(self, ctx: int, i: int, n_embd: int) -> bytes | None:
        """Embedding row of batch row `i` as n_embd float32, None where the library gives none."""
        buf = self._buffer(4 * n_embd)
        return ct.string_at(buf, 4 * n_embd) if self._lib.rd_hidden(ctx, i, buf, n_embd) else None

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        """llama_memory_seq_rm: 1 removed, 0 refused."""
        return int(self._lib.rd_seq_rm(ctx, seq, p0, p1))

    def seq_cp(self, ctx: int, src: int, dst: int, p0: int, p1: int) -> None:
        """llama_memory_seq_cp."""
        self._lib.rd_seq_cp(ctx, src, dst, p0, p1)

    def seq_keep(self, ctx: int, seq: int) -> None:
        """llama_memory_seq_keep."""
        self._lib.rd_seq_keep(ctx, seq)

    def seq_add(self, ctx: int, seq: int, p0: int, p1: int, delta: int) -> None:
        """llama_memory_seq_add."""
        self._lib.rd_seq_add(ctx, seq, p0, p1, delta)

    def seq_div(self, ctx: int, seq: int, p0: int, p1: int, d: int) -> None:
        """llama_memory_seq_div."""
        self._lib.rd_seq_div(ctx, seq, p0, p1, d)

    def clear(self, ctx: int, data: bool) -> None:
        """llama_memory_clear."""
        self._lib.rd_clear(ctx, data)

    def positions(self, ctx: int, n_seq: int) -> list[tuple[int, int]]:
        """(pos_min, pos_max) of sequences 0 .. n_seq - 1; (-1, -1) when empty."""
        out = (ct.c_int32 * (2 * n_seq))()
        self._lib.rd_positions(ctx, n_seq, out)
        return list(zip(out[0::2], out[1::2], strict=True))

    def seq_size(self, ctx: int, seq: int, flags: int) -> int:
        """llama_state_seq_get_size_ext."""
        return int(self._lib.rd_seq_size(ctx, seq, flags))

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        """llama_state_seq_get_data_ext into a buffer of `room` bytes: (bytes written, the buffer)."""
        buf = self._buffer(room)
        n = int(self._lib.rd_seq_get(ctx, buf, room, seq, flags))
        return n, ct.string_at(buf, min(n, room))

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        """llama_state_seq_set_data_ext: bytes read, 0 refused."""
        return int(self._lib.rd_seq_set(ctx, blob, len(blob), seq, flags))

    def all_size(self, ctx: int) -> int:
        """llama_state_get_size."""
        return int(self._lib.rd_all_size(ctx))

    def all_get(self, ctx: int, room: int) -> tuple[int, bytes]:
        """llama_state_get_data into a buffer of `room` bytes: (bytes written, the buffer)."""
        buf = self._buffer(room)
        n = int(self._lib.rd_all_get(ctx, buf, room))
        return n, ct.string_at(buf, min(n, room))

    def all_set(self, ctx: int, blob: bytes) -> int:
        """llama_state_set_data: bytes read, 0 refused."""
        return int(self._lib.rd_all_set(ctx, blob, len(blob)))

    def seq_save_file(self, ctx: int, path: Path, seq: int, tokens: Sequence[int]) -> int:
        """llama_state_seq_save_file: bytes written, 0 failed."""
        return int(
            self._lib.rd_seq_save_file(ctx, str(path).encode(), seq, (ct.c_int32 * len(tokens))(*tokens), len(tokens))
        )

    def seq_load_file(self, ctx: int, path: Path, seq: int, room: int) -> tuple[int, list[int]]:
        """llama_state_seq_load_file: (bytes read or 0, the tokens stored beside the state)."""
        buf, n = (ct.c_int32 * room)(), ct.c_uint64()
        rc = int(self._lib.rd_seq_load_file(ctx, str(path).encode(), seq, buf, room, ct.byref(n)))
        return rc, list(buf[: min(n.value, room)])

    def all_save_file(self, ctx: int, path: Path, tokens: Sequence[int]) -> int:
        """llama_state_save_file: 1 written, 0 failed."""
        return int(
            self._lib.rd_all_save_file(ctx, str(path).encode(), (ct.c_int32 * len(tokens))(*tokens), len(tokens))
        )

    def all_load_file(self, ctx: int, path: Path, room: int) -> tuple[int, list[int]]:
        """llama_state_load_file: (1 read or 0, the tokens stored beside the state)."""
        buf, n = (ct.c_int32 * room)(), ct.c_uint64()
        rc = int(self._lib.rd_all_load_file(ctx, str(path).encode(), buf, room, ct.byref(n)))
        return rc, list(buf[: min(n.value, room)])

    def replay(
        self, model: int, p: ContextParams, words: bytes, rows: int, n_vocab: int, n_embd: int, states: int = 0
    ) -> tuple[int, bytes, bytes, bytes]:
        """A history in a context of its own (see rd_replay): (rows or a negative code, logits, hidden rows, states).

        states: how many states it saves on the way; each begins with its length as an unsigned 64-bit number, 0 where
        it is longer than what is kept of a state (KEPT_BYTES).
        """
        width = 4 * rows * n_vocab
        hidden_width = 4 * rows * n_embd if p.embeddings else 0
        buf = self._buffer(width + hidden_width)
        at = ct.addressof(buf)
        written = ct.c_uint64(KEPT_BYTES)
        room = states * (8 + KEPT_BYTES)
        if room > len(self._states):
            self._states = ct.create_string_buffer(room)
        saved = ct.addressof(self._states)
        n = int(
            self._lib.rd_replay(
                model, params_array(p), words, len(words) // 4, at, at + width, rows, saved, ct.byref(written)
            )
        )
        got = max(n, 0)
        hidden = ct.string_at(at + width, 4 * got * n_embd) if p.embeddings else b""
        return n, ct.string_at(at, 4 * got * n_vocab), hidden, ct.string_at(saved, written.value) if states else b""


@lru_cache(maxsize=4096)
def params_array(p: ContextParams) -> ct.Array[ct.c_int32]:
    """The parameters in the order of rd_ctx_new."""
    values = (
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.n_rs_seq, p.kv_unified, GGML_TYPE[p.type_k], GGML_TYPE[p.type_v],
        p.flash_attn, p.swa_full, p.offload_kqv, p.n_threads, p.embeddings,
    )  # fmt: skip
    return (ct.c_int32 * len(values))(*values)
