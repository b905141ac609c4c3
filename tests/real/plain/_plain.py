"""What the reproducers of this folder share: the plain llama_cpp calls that every one of them needs, and how it ends.

Nothing of redraft is used but its generated models. A script is called as `NAME.py MODEL [--control]`, MODEL being a
recipe's name or a GGUF. It prints one line and exits with 0 (right), 1 (wrong) or 2 (it says neither); a fault that
kills the process dies by its signal. With `--control` it makes the same calls without the trigger.
"""

import ctypes
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as L
import numpy as np

ON_DEVICE = 2
RIGHT, WRONG = 1e-3, 1e-2
"""Honest differences between runs of one history stay below 1e-4 on these models; stale state makes 0.05 and more."""

_keep: list[Any] = []


def text(n: int, stream: int = 0) -> list[int]:
    """Return the first n tokens of a text; texts of different streams differ nearly everywhere."""
    return [(11 * i * i + 7 * i + 5 + stream * (17 + 3 * i)) % 64 for i in range(n)]


def context(model: Any, **params: Any) -> Any:
    """Make a context: F32 K/V, no flash attention, one thread, two sequences in streams of their own."""
    p = L.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.n_rs_seq = 256, 64, 32, 2, 4
    p.n_threads = p.n_threads_batch = 1
    p.kv_unified, p.type_k, p.type_v, p.flash_attn_type = False, 0, 0, 0
    for name, value in params.items():
        setattr(p, name, value)
    ctx = L.llama_init_from_model(model, p)
    assert ctx, "context refused"
    return ctx


def decode(ctx: Any, seq: int, pos: int, tokens: list[int]) -> int:
    """Decode the tokens of one sequence from `pos` on, as one batch; return llama_decode's answer."""
    return decode_rows(ctx, [(seq, pos + i, token) for i, token in enumerate(tokens)])


def decode_rows(ctx: Any, rows: list[tuple[int, int, int]]) -> int:
    """Decode one batch of (sequence, position, token), with the last row's output; return llama_decode's answer."""
    batch = L.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (seq, pos, token) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, pos, 1, seq
        batch.logits[i] = i == len(rows) - 1
    rc = L.llama_decode(ctx, batch)
    L.llama_batch_free(batch)
    return rc


def follow(ctx: Any, seq: int, pos: int, tokens: list[int]) -> np.ndarray:
    """Decode the tokens one by one and return the logits of each."""
    rows = []
    for i, token in enumerate(tokens):
        rc = decode(ctx, seq, pos + i, [token])
        assert rc == 0, f"decode at {pos + i} returned {rc}"
        rows.append(np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, -1), (64,)).copy())
    return np.stack(rows)


def clean(model: Any, history: list[int], tokens: list[int], **params: Any) -> np.ndarray:
    """Return the logits of `tokens` after `history` in a context that has done nothing else."""
    ctx = context(model, **params)
    assert decode(ctx, 0, 0, history) == 0
    rows = follow(ctx, 0, len(history), tokens)
    L.llama_free(ctx)
    return rows


def save(ctx: Any, seq: int, flags: int = 0) -> bytes:
    """Return the state of one sequence."""
    size = L.llama_state_seq_get_size_ext(ctx, seq, flags)
    buffer = (ctypes.c_uint8 * size)()
    assert L.llama_state_seq_get_data_ext(ctx, buffer, size, seq, flags) == size
    return bytes(buffer)


def restore(ctx: Any, seq: int, blob: bytes, flags: int = 0) -> int:
    """Put a state into one sequence; return llama_state_seq_set_data_ext's answer, 0 for a refusal."""
    buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
    return L.llama_state_seq_set_data_ext(ctx, buffer, len(blob), seq, flags)


def span(ctx: Any, seq: int) -> tuple[int, int]:
    """Return the first and last position that the memory says the sequence has."""
    memory = L.llama_get_memory(ctx)
    return L.llama_memory_seq_pos_min(memory, seq), L.llama_memory_seq_pos_max(memory, seq)


def compare(got: np.ndarray, want: np.ndarray, note: str = "") -> tuple[int, str]:
    """Judge two sets of logits that must be the same but for rounding."""
    error = float(np.abs(got - want).max())
    code = 0 if error < RIGHT else 1 if error > WRONG else 2
    return code, f"max abs error of the logits {error:.2g}{', ' + note if note else ''}"


def run(main: Callable[[Any, bool], tuple[int, str]]) -> None:
    """Load the model named on the command line, call `main(model, control)`, print its line, exit with its code."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        L.llama_log_set(_keep_callback(), None)
        name = sys.argv[1]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(name)
            if not path.exists():
                sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
                from subjects import recipes

                path = Path(folder) / f"{name}.gguf"
                recipes.get(name).write(path, seed=0)
            L.llama_backend_init()
            p = L.llama_model_default_params()
            p.n_gpu_layers, p.load_mtp = 0, False
            model = L.llama_model_load_from_file(str(path).encode(), p)
        assert model, "model refused"
        code, line = main(model, "--control" in sys.argv)
    except Exception:
        traceback.print_exc()
        code, line = 2, "the script failed"
    print(("right", "WRONG", "unclear")[code], line, sep=": ", flush=True)
    os._exit(code)


def _keep_callback() -> Any:
    loud = bool(os.environ.get("PLAIN_LOG"))

    @L.llama_log_callback
    def log(level: int, line: bytes, _: Any) -> None:
        if loud:
            sys.stderr.write(line.decode(errors="replace"))

    _keep.append(log)
    return log
