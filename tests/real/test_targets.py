"""The coverage-guided targets on the ordinary library: their checks catch planted faults and are silent without, their
programs are ordinary ones, and the seeds in the corpora are the script's.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import targets
from fuzz.cli.common import Bench
from fuzz.drivers.state import valid as valid_rounds
from fuzz.models import DEFAULT, Model, from_recipe, resolve_pairs
from fuzz.state import valid
from fuzz.targets import seeds
from fuzz.targets.blobs import BlobTarget
from fuzz.targets.stage import STEPPED_ROUND
from subjects import recipes

ROOT = Path(__file__).resolve().parents[2]
BLOBS = ("seq_state", "context_state", "session_file")
# Runs in a child: a target loads native code, and what it is handed may end it.
CHILD = r"""
import json, random, sys
from pathlib import Path
from fuzz import targets
from fuzz.models import Model, from_recipe
from fuzz.targets.config import TargetConfig, complaints
from subjects import recipes
from subjects.planted import Refusing, mauled, plant
from subjects.shim import Shim

class Rude(Refusing):
    '''A refused restore changes values of another sequence, and does no other harm.'''

    name = "rude"

    def spoil(self, ctx, seq, own):
        other = mauled(self.state(ctx, 1))
        return Shim.seq_set(self, ctx, seq, 0, own) > 0 and Shim.seq_set(self, ctx, 1, 0, other) > 0

name, shim, folder, scratch, fault, names, avoid, count = sys.argv[1:]
models = [from_recipe(recipes.get(n), Path(folder)) for n in names.split(",")]
report = Path(scratch) / "report.jsonl"
config = TargetConfig(models=models, build="", shim=shim, avoid=avoid.split(","), report=str(report), cache=scratch)
run = targets.load(name).open(config)
run.shim = Rude(run.shim) if fault == "rude" else plant(run.shim, fault)
rnd = random.Random(5)
for _ in range(int(count)):
    # whole states and the plainest parameters, where a fault is planted
    data = rnd.randbytes(24)
    run(bytes([rnd.randrange(len(models)), 0, 0]) + data if fault else data)
print(json.dumps([c.symptom for c in complaints(report)]))
"""


def complain(
    name: str,
    build: Bench,
    tmp_path: Path,
    *,
    fault: str = "",
    models: str,
    count: int,
    known: tuple[str, ...] = STEPPED_ROUND,
) -> list[str]:
    """Symptoms that a target complains of in some inputs, known faults stepped round."""
    arguments = [name, str(build.shim), str(build.models), str(tmp_path), fault, models, ",".join(known), str(count)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", BLOBS)
def test_targets_are_silent_on_what_is_sound_or_known(name: str, build: Bench, tmp_path: Path) -> None:
    assert complain(name, build, tmp_path, models=",".join(DEFAULT), count=400) == []


@pytest.mark.parametrize(
    ("name", "fault", "symptom"),
    [
        ("seq_state", "half-refusal", "half"),
        ("seq_state", "refusal-scrambles", "half"),
        ("seq_state", "rude", "neighbour-bytes"),
        ("seq_state", "drop-last-cell", "good-differs"),
        ("seq_state", "touched-neighbour", "neighbour-row"),
        ("seq_state", "false-refusal", "good-refused"),
        ("context_state", "whole-loses-sequence", "good-differs"),
        ("session_file", "touched-neighbour", "neighbour-row"),
    ],
)
def test_each_check_catches_its_planted_fault(
    name: str, fault: str, symptom: str, build: Bench, tmp_path: Path
) -> None:
    found = complain(name, build, tmp_path, fault=fault, models="llama", count=40)
    assert any(s.startswith(f"{symptom} ") for s in found), found


def test_a_state_that_stays_for_ever_is_seen(build: Bench, tmp_path: Path) -> None:
    """What no planted fault shows: a good restore after a malformed one gives something else (stuck-cell)."""
    known = tuple(k for k in STEPPED_ROUND if k != "stuck-cell")
    found = complain("seq_state", build, tmp_path, models="llama", count=1000, known=known)
    assert any(s.startswith("good-differs ") for s in found), found


@pytest.fixture(scope="module")
def models(build: Bench) -> list[Model]:
    """Of all kinds of memory, the odd ones too."""
    return [from_recipe(recipes.get(n), build.models) for n in (*DEFAULT, "deepseek4", "qwen4exp", "lfm2-swa")]


@pytest.mark.parametrize("name", targets.NAMES)
def test_inputs_stand_for_ordinary_programs(name: str, models: list[Model], build: Bench) -> None:
    rnd, target = random.Random(1), targets.load(name)
    driven = name in targets.DRIVEN
    mine = resolve_pairs(["all"], build.models) if driven else models
    made = [target.scenario(rnd.randbytes(rnd.randrange(600)), mine) for _ in range(150)]
    programs = [m for m in made if m is not None]
    assert len(programs) > 20
    for program, model in programs:
        assert (valid_rounds if driven else valid)(program, model.traits) == []
    if isinstance(target, BlobTarget):
        assert len(programs) == len(made)
    assert target.scenario(b"", mine) == target.scenario(b"", mine)


@pytest.mark.parametrize("name", targets.NAMES)
def test_scripts_can_be_run_by_themselves(name: str) -> None:
    """libFuzzer's merge runs argv[0]; without these two it keeps nothing and exits with 0."""
    script = targets.script(name)
    assert script.read_text().startswith("#!/usr/bin/env python3\n")
    assert os.access(script, os.X_OK)


def test_the_seeds_are_the_scripts(build: Bench, tmp_path: Path) -> None:
    seeds.write(tmp_path, build.models)

    def contents(folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    assert contents(seeds.FOLDER) == contents(tmp_path), "python -m fuzz.targets.seeds writes them anew"
    assert all(len(list(seeds.FOLDER.glob(f"fuzz_{name}/*"))) >= 10 for name in targets.NAMES)
