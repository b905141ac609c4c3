"""The shim and llama_cpp answer alike on random lists of calls: return codes, positions, blobs and logits, bit for bit.

Reproducers that are handed to others use llama_cpp's own calls, so what redraft saw through its shim must be what they
see. Both sides run in child processes, each list in a context of its own.
"""

import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from subjects import builds, recipes, shimcache

ROOT = Path(__file__).resolve().parents[2]
N_LISTS = 30
N_CALLS = 15
N_SEQ = 3

# Resolves symbolic calls and hashes answers; the same text runs on both sides, over `Side`, which makes the calls.
COMMON = r"""
import hashlib, json, pathlib, sys
sys.path.insert(0, sys.argv[1])
from subjects.scenario import GGML_TYPE, ContextParams, token
_, root, shim, model_path, lists_path, scratch = sys.argv
scratch = pathlib.Path(scratch)
n_seq = 3

def sha(data):
    return None if data is None else hashlib.sha256(data).hexdigest()[:16]

def execute(side, ctx, params, call, slots, n_vocab, n_embd):
    name, *a = call
    pos = side.positions(ctx, n_seq)
    end = [hi + 1 for _, hi in pos]
    if name == "decode":
        rows = [(s, end[s] + i, stream, last or i == n - 1) for s, n, stream, last in a[0] for i in range(n)]
        toks = [token(stream, p, n_vocab) for _, p, stream, _ in rows]
        out = [int(o) for *_, o in rows]
        rc = side.decode(ctx, toks, [r[1] for r in rows], [r[0] for r in rows], out)
        read = [i for i, o in enumerate(out) if o] if rc == 0 else []
        hidden = [sha(side.hidden(ctx, i, n_embd)) for i in read] if params.embeddings else []
        return [rc, [sha(side.logits(ctx, i, n_vocab)) for i in read], hidden]
    if name == "seq_rm":
        s, back, length = a
        p0 = max(end[s] - back, 0) if back >= 0 else -1
        return side.seq_rm(ctx, s, p0, p0 + length if length >= 0 else -1)
    if name == "seq_rm_all":
        return side.seq_rm(ctx, -1, *a)
    if name in ("seq_cp", "seq_keep", "seq_add", "seq_div", "clear"):
        return getattr(side, name)(ctx, *a)
    if name == "save":
        slot, s, flags, short = a
        n, blob = side.seq_get(ctx, s, flags, max(side.seq_size(ctx, s, flags) - short, 0))
        if not short:
            slots[slot] = (flags, blob)
        return [n, sha(blob)]
    if name == "restore":
        slot, s = a
        if slot not in slots:
            return "empty"
        flags, blob = slots[slot]
        return [side.seq_set(ctx, s, flags, blob), len(blob)]
    if name == "save_all":
        n, blob = side.all_get(ctx, side.all_size(ctx))
        slots["all"] = blob
        return [n, sha(blob)]
    if name == "restore_all":
        return side.all_set(ctx, slots["all"]) if "all" in slots else "empty"
    if name == "file":
        s, d = a
        n = side.seq_save_file(ctx, scratch / "seq", s, [3, 1, 2])
        return [n, sha((scratch / "seq").read_bytes()), side.seq_load_file(ctx, scratch / "seq", d, 8)]
    if name == "file_all":
        rc = side.all_save_file(ctx, scratch / "all", [5, 4])
        return [rc, sha((scratch / "all").read_bytes()), side.all_load_file(ctx, scratch / "all", 8)]
    if name == "sizes":
        return [side.all_size(ctx), *(side.seq_size(ctx, s, f) for s in range(n_seq) for f in (0, 1))]
    raise ValueError(name)

def main(side):
    model = side.load_model(pathlib.Path(model_path))
    n_vocab, n_embd = side.sizes(model)
    with open(scratch / "answers", "w") as out:
        for one in json.loads(pathlib.Path(lists_path).read_text()):
            params = ContextParams(**one["params"])
            ctx = side.new_context(model, params)
            slots, answers = {}, [side.facts(ctx)]
            for call in one["calls"]:
                value = execute(side, ctx, params, call, slots, n_vocab, n_embd)
                answers.append([call[0], value, side.positions(ctx, n_seq)])
            side.free_context(ctx)
            print(json.dumps(answers), file=out, flush=True)
"""

SHIM = r"""
from subjects.shim import Shim

class Side(Shim):
    def sizes(self, model):
        facts = self.model_facts(model)
        return facts["n_vocab"], facts["n_embd"]
    def facts(self, ctx):
        return list(self.context_facts(ctx).values())

main(Side(pathlib.Path(shim)))
"""

PLAIN = r"""
import ctypes as ct
import llama_cpp.llama_cpp as L

class Side:
    def load_model(self, path):
        L.llama_backend_init()
        params = L.llama_model_default_params()
        params.n_gpu_layers = 0
        return L.llama_model_load_from_file(str(path).encode(), params)
    def sizes(self, model):
        return L.llama_vocab_n_tokens(L.llama_model_get_vocab(model)), L.llama_model_n_embd(model)
    def new_context(self, model, p):
        c = L.llama_context_default_params()
        c.n_ctx, c.n_batch, c.n_ubatch = p.n_ctx, p.n_batch, p.n_ubatch
        c.n_seq_max, c.n_rs_seq = p.n_seq_max, p.n_rs_seq
        c.kv_unified, c.swa_full, c.embeddings, c.no_perf = p.kv_unified, p.swa_full, p.embeddings, True
        c.type_k, c.type_v = GGML_TYPE[p.type_k], GGML_TYPE[p.type_v]
        c.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_ENABLED if p.flash_attn else L.LLAMA_FLASH_ATTN_TYPE_DISABLED
        c.offload_kqv = c.op_offload = p.offload_kqv
        c.n_threads = c.n_threads_batch = p.n_threads
        return L.llama_init_from_model(model, c)
    def free_context(self, ctx):
        L.llama_free(ctx)
    def facts(self, ctx):
        names = ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")
        return [*(getattr(L, "llama_" + n)(ctx) for n in names), int(L.llama_memory_can_shift(L.llama_get_memory(ctx)))]
    def decode(self, ctx, token, pos, seq, out):
        batch = L.llama_batch_init(len(token), 0, 1)
        batch.n_tokens = len(token)
        for i, row in enumerate(zip(token, pos, seq, out)):
            batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i] = row
            batch.n_seq_id[i] = 1
        rc = L.llama_decode(ctx, batch)
        L.llama_batch_free(batch)
        return rc
    def logits(self, ctx, i, n):
        p = L.llama_get_logits_ith(ctx, i)
        return ct.string_at(p, 4 * n) if p else None
    def hidden(self, ctx, i, n):
        p = L.llama_get_embeddings_ith(ctx, i)
        return ct.string_at(p, 4 * n) if p else None
    def positions(self, ctx, n):
        m = L.llama_get_memory(ctx)
        return [(L.llama_memory_seq_pos_min(m, s), L.llama_memory_seq_pos_max(m, s)) for s in range(n)]
    def seq_rm(self, ctx, *a):
        return int(L.llama_memory_seq_rm(L.llama_get_memory(ctx), *a))
    def seq_cp(self, ctx, *a):
        L.llama_memory_seq_cp(L.llama_get_memory(ctx), *a)
    def seq_keep(self, ctx, s):
        L.llama_memory_seq_keep(L.llama_get_memory(ctx), s)
    def seq_add(self, ctx, *a):
        L.llama_memory_seq_add(L.llama_get_memory(ctx), *a)
    def seq_div(self, ctx, *a):
        L.llama_memory_seq_div(L.llama_get_memory(ctx), *a)
    def clear(self, ctx, data):
        L.llama_memory_clear(L.llama_get_memory(ctx), data)
    def seq_size(self, ctx, s, flags):
        return L.llama_state_seq_get_size_ext(ctx, s, flags)
    def seq_get(self, ctx, s, flags, room):
        buf = (ct.c_uint8 * max(room, 1))()
        n = L.llama_state_seq_get_data_ext(ctx, buf, room, s, flags)
        return n, bytes(buf)[: min(n, room)]
    def seq_set(self, ctx, s, flags, blob):
        return L.llama_state_seq_set_data_ext(ctx, (ct.c_uint8 * len(blob)).from_buffer_copy(blob), len(blob), s, flags)
    def all_size(self, ctx):
        return L.llama_state_get_size(ctx)
    def all_get(self, ctx, room):
        buf = (ct.c_uint8 * max(room, 1))()
        n = L.llama_state_get_data(ctx, buf, room)
        return n, bytes(buf)[: min(n, room)]
    def all_set(self, ctx, blob):
        return L.llama_state_set_data(ctx, (ct.c_uint8 * len(blob)).from_buffer_copy(blob), len(blob))
    def seq_save_file(self, ctx, path, s, tokens):
        buf = (L.llama_token * len(tokens))(*tokens)
        return L.llama_state_seq_save_file(ctx, str(path).encode(), s, buf, len(tokens))
    def seq_load_file(self, ctx, path, s, room):
        buf, n = (L.llama_token * room)(), ct.c_size_t()
        rc = L.llama_state_seq_load_file(ctx, str(path).encode(), s, buf, room, ct.byref(n))
        return rc, buf[: min(n.value, room)]
    def all_save_file(self, ctx, path, tokens):
        buf = (L.llama_token * len(tokens))(*tokens)
        return int(L.llama_state_save_file(ctx, str(path).encode(), buf, len(tokens)))
    def all_load_file(self, ctx, path, room):
        buf, n = (L.llama_token * room)(), ct.c_size_t()
        rc = int(L.llama_state_load_file(ctx, str(path).encode(), buf, room, ct.byref(n)))
        return rc, buf[: min(n.value, room)]

main(Side())
"""

Call = list[Any]


@cache
def _shim() -> Path:
    return builds.compile_shim(builds.find_build(None))


def make_list(rng: random.Random, recipe: recipes.Recipe) -> dict[str, Any]:
    """Context parameters and a list of calls that keep llama.h's preconditions; the children resolve positions."""
    dense = recipe.memory == "dense"
    unified = dense and rng.random() < 0.5
    params = {
        "n_seq_max": N_SEQ,
        "n_rs_seq": rng.choice([0, 4]),
        "kv_unified": unified,
        "flash_attn": rng.random() < 0.3,
        "embeddings": rng.random() < 0.2,
        "type_k": rng.choice(["f32", "f16"]),
    }
    params["type_v"] = params["type_k"]

    def seq() -> int:
        return rng.randrange(N_SEQ)

    def decode() -> Call:
        seqs = rng.sample(range(N_SEQ), rng.choice([1, 1, 2]))
        return ["decode", [[s, rng.randint(1, 6), rng.randrange(3), rng.random() < 0.3] for s in seqs]]

    saved_by: dict[int, tuple[int, int]] = {}

    def save() -> Call:
        slot, s, flags, short = rng.randrange(3), seq(), rng.choice([0, 0, 1]), rng.choice([0, 0, 0, 4])
        if not short:
            saved_by[slot] = (s, flags)
        return ["save", slot, s, flags, short]

    def restore() -> Call:
        slot = rng.randrange(3)
        s, flags = saved_by.get(slot, (0, 0))
        # A partial state belongs to the sequence whose other part is still there.
        return ["restore", slot, s if flags else seq()]

    def copy() -> Call:
        src, dst = rng.sample(range(N_SEQ), 2)
        # Ranges only where all sequences share one cache.
        return ["seq_cp", src, dst, *((0, rng.randint(1, 5)) if unified and rng.random() < 0.5 else (-1, -1))]

    makers = [decode] * 6 + [save] * 3 + [restore] * 3 + [copy]
    makers += [lambda: ["seq_rm", seq(), rng.randint(0, 5), -1]] * 2
    makers += [
        lambda: ["seq_rm", seq(), rng.randint(1, 8), rng.randint(1, 3)],
        lambda: ["seq_rm", seq(), -1, -1],
        lambda: ["seq_rm_all", -1, -1],
        lambda: ["seq_keep", seq()],
        lambda: ["clear", rng.random() < 0.5],
        lambda: ["save_all"],
        lambda: ["restore_all"],
        lambda: ["file", seq(), seq()],
        lambda: ["file_all"],
        lambda: ["sizes"],
    ]
    if dense and not params["embeddings"]:
        makers += [lambda: ["seq_add", seq(), 0, -1, rng.randint(1, 4)], lambda: ["seq_div", seq(), 0, -1, 2]]
    return {"params": params, "calls": [decode(), *(rng.choice(makers)() for _ in range(N_CALLS - 2)), decode()]}


def run_side(body: str, model: Path, lists: list[dict[str, Any]], scratch: Path, shim: Path | None = None) -> list[Any]:
    """The answers of one side, one entry a list."""
    scratch.mkdir()
    arguments = [ROOT, shim or _shim(), model, scratch / "lists", scratch]
    (scratch / "lists").write_text(json.dumps(lists))
    command = [sys.executable, "-c", COMMON + body, *map(str, arguments)]
    p = shimcache.run_quietly(command, shimcache.child_env(), 120)
    answers = [json.loads(x) for x in (scratch / "answers").read_text().splitlines()]
    assert p.returncode == 0, f"list {len(answers)} ended the child with {p.returncode}: {p.stderr[-1500:]}"
    return answers


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_shim_and_llama_cpp_answer_alike(name: str, tmp_path: Path) -> None:
    recipe = recipes.get(name)
    recipe.write(tmp_path / "model.gguf", seed=0)
    lists = [make_list(random.Random(f"{name} {i}"), recipe) for i in range(N_LISTS)]
    ours = run_side(SHIM, tmp_path / "model.gguf", lists, tmp_path / "shim")
    theirs = run_side(PLAIN, tmp_path / "model.gguf", lists, tmp_path / "plain")
    assert len(ours) == len(theirs) == N_LISTS
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert len(a) == N_CALLS + 1
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert x == y, f"list {i}, {'context facts' if k == 0 else lists[i]['calls'][k - 1]}"

    # Comparing answers proves something only where there are answers.
    flat = [answer for one in ours for answer in one[1:]]
    decodes = [value for op, value, _ in flat if op == "decode"]
    assert sum(rc == 0 and all(logits) for rc, logits, _ in decodes) > N_LISTS * 2
    assert len({h for _, logits, _ in decodes for h in logits}) > N_LISTS * 2
    assert any(hidden and all(hidden) for *_, hidden in decodes)
    assert sum(value != "empty" and value[0] > 0 for op, value, _ in flat if op == "restore") > N_LISTS // 3
    assert {0, 1} <= {value for op, value, _ in flat if op == "seq_rm"} or recipe.memory == "dense"
    assert {op for op, *_ in flat} >= {
        "save",
        "save_all",
        "restore_all",
        "file",
        "file_all",
        "sizes",
        "seq_cp",
        "seq_keep",
    }


def test_another_token_is_seen(tmp_path: Path) -> None:
    recipe = recipes.get("llama")
    recipe.write(tmp_path / "model.gguf", seed=0)
    lists = []
    for stream in (0, 1):
        calls: list[Call] = [["decode", [[0, 4, stream, False]]], ["save", 0, 0, 0, 0]]
        lists.append({"params": {"n_seq_max": N_SEQ}, "calls": calls})
    first, second = run_side(SHIM, tmp_path / "model.gguf", lists, tmp_path / "shim")
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        # A purely dense memory has no partial state, so flags change nothing there.
        ("qwen35", "get_data_ext(C(ctx), dst, n, s, flags)", "get_data_ext(C(ctx), dst, n, s, 0)"),
        ("llama", "llama_memory_seq_rm(K(ctx), s, p0, p1)", "llama_memory_seq_rm(K(ctx), s, p0, p1 < 0 ? p1 : p1 + 1)"),
        ("llama", "p.kv_unified      = in[5] != 0;", ""),
        ("llama", "b.logits   = const_cast<int8_t *>(out);", ""),
    ],
    ids=["flags", "range", "unified", "outputs"],
)
def test_a_shim_with_a_fault_disagrees(
    name: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {p.name: p.read_text() for p in (shimcache.SOURCE, shimcache.SOURCE.with_name("shim_params.h"))}
    assert sum(right in text for text in texts.values()) == 1
    for file, text in texts.items():  # a header beside the source comes before all others
        (tmp_path / file).write_text(text.replace(right, wrong))
    source = tmp_path / "shim.cpp"
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path / "cache"))
    build = builds.find_build(None)
    faulty = shimcache.compile_into_cache("faulty", build.include, build.linked(), source)
    recipe = recipes.get(name)
    recipe.write(tmp_path / "model.gguf", seed=0)
    lists = [make_list(random.Random(f"{name} {i}"), recipe) for i in range(N_LISTS)]
    theirs = run_side(PLAIN, tmp_path / "model.gguf", lists, tmp_path / "plain")
    try:
        ours = run_side(SHIM, tmp_path / "model.gguf", lists, tmp_path / "shim", faulty)
    except AssertionError as e:
        assert "ended the child" in str(e)  # an abort of the library, which is a disagreement as well
    else:
        assert ours != theirs


def test_pytest_has_not_loaded_llama_cpp() -> None:
    # Native code under test must not run in the process that judges it.
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import subjects.builds, fuzz.doctor; "
         "subjects.builds.compile_shim(subjects.builds.find_build(None)); print('llama_cpp' in sys.modules); "
         "print(any('libllama' in x for x in open('/proc/self/maps')))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out.stdout.split() == ["False", "False"]
