"""Every generated model does in the real llama.cpp what its recipe says.

Each model is loaded in a child process: a wrong tensor makes llama.cpp abort or segfault rather than return an error.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from subjects import pairs, recipes

CHILD = r"""
import ctypes, json, sys
import numpy as np
import llama_cpp.llama_cpp as L

path, kv_type, flash_attention = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
N_TOKENS = 24
L.llama_backend_init()
model_params = L.llama_model_default_params()
model_params.n_gpu_layers = 0
model_params.load_mtp = False
model = L.llama_model_load_from_file(path.encode(), model_params)
assert model, "load failed"
n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))

def new_context():
    params = L.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.n_rs_seq = 256, 64, 32, 2, 4
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = flash_attention
    params.type_k = params.type_v = kv_type
    ctx = L.llama_init_from_model(model, params)
    assert ctx, "context refused"
    return ctx

def decode(ctx, tokens):
    batch = L.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    rc = L.llama_decode(ctx, batch)
    assert rc == 0, f"decode returned {rc}"
    rows = [np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, i), (n_vocab,)).copy() for i in range(len(tokens))]
    L.llama_batch_free(batch)
    return np.stack(rows)

tokens = [(11 * i * i + 7 * i + 5) % n_vocab for i in range(N_TOKENS)]
ctx = new_context()
logits = decode(ctx, tokens)
facts = {
    "n_vocab": n_vocab,
    "n_embd": L.llama_model_n_embd(model),
    "window": L.llama_model_n_swa(model),
    "n_rs_seq": L.llama_n_rs_seq(ctx),
    "can_shift": L.llama_memory_can_shift(L.llama_get_memory(ctx)),
    "recurrent": L.llama_model_is_recurrent(model),
    "hybrid": L.llama_model_is_hybrid(model),
    "finite": bool(np.isfinite(logits).all()),
    "std": float(logits.std()),
}
L.llama_free(ctx)
ctx = new_context()
other = decode(ctx, [(tokens[0] + 1) % n_vocab, *tokens[1:]])
facts["moved_by_token_0"] = float(np.abs(other[-1] - logits[-1]).max())
L.llama_free(ctx)
L.llama_model_free(model)
print("FACTS", json.dumps(facts))
"""

F32 = 0
Q8_0 = 8


def facts_of(name: str, tmp_path: Path, kv_type: int, flash_attention: int) -> dict[str, Any]:
    path = tmp_path / "model.gguf"
    recipes.get(name).write(path)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(kv_type), str(flash_attention)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("FACTS ")]
    assert child.returncode == 0 and lines, f"exit {child.returncode}\n{child.stderr[-3000:]}"
    facts: dict[str, Any] = json.loads(lines[0].removeprefix("FACTS "))
    return facts


# Drafts say nothing without their target; tests/real/test_pairs.py loads them.
TARGETS = sorted({*recipes.names(), *(pair.target for pair in pairs.all_pairs())})


@pytest.mark.parametrize("name", TARGETS)
def test_model_is_what_its_recipe_says(name: str, tmp_path: Path) -> None:
    recipe = recipes.get(name)
    facts = facts_of(name, tmp_path, F32, flash_attention=0)
    assert facts["finite"]
    assert facts["std"] > 0.5
    assert facts["moved_by_token_0"] > 1e-3
    assert facts["n_vocab"] == recipe.n_vocab
    assert facts["n_embd"] == recipe.n_embd
    # deepseek4 keeps its window in a memory of its own and reports none.
    assert facts["window"] == (0 if recipe.arch == "deepseek4" else recipe.window)
    assert facts["n_rs_seq"] == (4 if recipe.rollback else 0)
    assert facts["can_shift"] == recipe.can_shift
    assert facts["recurrent"] == (recipe.memory == "recurrent")
    assert facts["hybrid"] == (recipe.memory == "hybrid")


def test_head_size_64_takes_quantised_kv(tmp_path: Path) -> None:
    facts = facts_of("llama-h64", tmp_path, Q8_0, flash_attention=1)
    assert facts["finite"]
    assert facts["moved_by_token_0"] > 1e-3
