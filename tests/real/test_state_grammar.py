"""Saved states of every recipe: what is read is written again byte for byte, and has what was put into it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from fuzz.cli.common import Bench
from fuzz.models import from_recipe
from subjects import recipes
from subjects.scenario import ContextParams

ROOT = Path(__file__).resolve().parents[2]
PARAMS = (
    ContextParams(n_seq_max=3),
    ContextParams(n_seq_max=3, kv_unified=True),
    ContextParams(n_seq_max=3, flash_attn=True),
    ContextParams(n_seq_max=3, n_rs_seq=3),
    ContextParams(n_seq_max=3, type_k="f16", type_v="bf16", flash_attn=True),
    ContextParams(n_seq_max=3, swa_full=True),
)
# native code runs in a process of its own, which prints a line for each blob that was read wrongly, then their number
CHILD = """
import sys
from pathlib import Path
import msgspec
from subjects.scenario import ContextParams, token
from subjects.shim import Shim
from subjects.state.canon import Reader
from subjects.state.parse import BadBlob, parse
from subjects.state.tree import write

shim_path, scratch, models, params = msgspec.json.decode(sys.stdin.buffer.read(),
                                                         type=tuple[str, str, list[str], list[ContextParams]])
shim, file, n = Shim(Path(shim_path)), Path(scratch) / "state.bin", 0
for path in models:
    model = shim.load_model(Path(path))
    if model is None:
        continue  # drafts need their target
    n_vocab = shim.model_facts(model)["n_vocab"]
    reader = Reader()
    for p in params:
        ctx = shim.new_context(model, p)
        if ctx is None:
            continue
        for seq, k in ((0, 20), (1, 7)):
            shim.decode(ctx, [token(1, i, n_vocab) for i in range(k)], range(k), [seq] * k, [0] * (k - 1) + [1])
        shim.seq_cp(ctx, 0, 2, -1, -1)
        shim.decode(ctx, [3], [20], [0], [1])
        blobs = {}
        for seq, flags in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0), (2, 1)):
            blobs[seq, flags] = shim.seq_get(ctx, seq, flags, shim.seq_size(ctx, seq, flags))[1]
        blobs["whole"] = shim.all_get(ctx, shim.all_size(ctx))[1]
        shim.seq_save_file(ctx, file, 0, [1, 2, 3])
        blobs["file"] = file.read_bytes()
        shim.all_save_file(ctx, file, [1, 2, 3])
        blobs["session"] = file.read_bytes()
        for name, blob in blobs.items():
            n += 1
            try:
                tree, _ = parse(blob)
                if write(tree) != blob:
                    print(path, p, name, "is written otherwise")
            except BadBlob as e:
                print(path, p, name, e)
        whole = reader.canonical(blobs["whole"])
        for seq, ends in ((0, 20), (1, 6)):
            alone = reader.canonical(blobs[seq, 0])[0]
            for part, positions in alone.positions.items():
                if positions[-1] != ends or not set(positions) <= set(whole[seq].positions[part]):
                    print(path, p, seq, part, positions)
        shim.free_context(ctx)
print(n, "blobs")
"""


def test_every_form_on_every_recipe_is_read_and_written_again(build: Bench, tmp_path: Path) -> None:
    models = [from_recipe(recipe, build.models).path for recipe in recipes.all_recipes()]
    told = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=msgspec.json.encode((str(build.shim), str(tmp_path), models, PARAMS)),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert told.returncode == 0, told.stderr.decode()[-2000:]
    *wrong, last = told.stdout.decode().splitlines()
    assert wrong == []
    assert int(last.split()[0]) > 500
