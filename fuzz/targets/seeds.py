"""Writes the seeds of the coverage-guided targets into corpora/blobs: `python -m fuzz.targets.seeds`.

A seed is an input, so it means something for one list of models only: the default recipes, or all pairs. Of inputs
drawn at random, those are kept that stand for a combination of memory, kind of state and edit that none before them
stood for.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from fuzz.harm import claims_several_recurrent_cells
from fuzz.known import ROOT
from fuzz.models import DEFAULT, Model, from_recipe, resolve_pairs
from fuzz.targets import NAMES, load, script
from fuzz.targets.blobs import BlobTarget
from subjects import pairs, recipes
from subjects.scenario import ON_DEVICE, Scenario

FOLDER = ROOT / "corpora" / "blobs"
MOST = 48
_TRIES = 4000
_BYTES = {"scenario": 400, "driver_state": 80}


def models_of(name: str, cache: Path) -> list[Model]:
    """The models that the seeds of a target are for; `cache`: a folder to write them into."""
    if name == "driver_state":
        return resolve_pairs(["all"], cache)
    return [from_recipe(recipes.get(r), cache) for r in DEFAULT]


def seeds(name: str, models: list[Model]) -> Iterator[bytes]:
    """The seeds of a target."""
    rnd = random.Random(name)
    target = load(name)
    seen: set[str] = set()
    for _ in range(_TRIES):
        data = rnd.randbytes(rnd.randrange(4, _BYTES.get(name, 24)))
        if isinstance(target, BlobTarget):
            drawn = target.draw(data, models)
            # nothing that is known to end the process: libFuzzer would stop at it before it began
            several = claims_several_recurrent_cells(drawn.edits, drawn.setting.params.n_seq_max)
            if drawn.setting.flags & ON_DEVICE or several:
                continue
            features = {
                f"{drawn.model.traits.memory} {drawn.setting.kind} {drawn.setting.whole}",
                *(f"{e.how} {e.where.rpartition('.')[2]}" for e in drawn.edits),
            }
        else:
            made = target.scenario(data, models)
            if made is None or not _harmless(made[0]):
                continue
            if made[1].pair and not pairs.get(made[1].pair).offers_state:
                continue
            where = made[1].pair or made[1].traits.memory
            features = {f"{where} {type(op).__name__} {getattr(op, 'how', '')}" for op in made[0].ops}
        if not features <= seen:
            seen |= features
            yield data


def _harmless(program: Scenario) -> bool:
    """No operation that a known fault could make end the process."""
    return not any(getattr(op, "flags", 0) & ON_DEVICE or type(op).__name__ == "Corrupt" for op in program.ops)


def write(folder: Path, cache: Path) -> None:
    """Write the seeds of all targets anew."""
    for name in NAMES:
        into = folder / script(name).stem
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        for _, data in zip(range(MOST), seeds(name, models_of(name, cache)), strict=False):
            (into / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def main() -> int:
    """See the module."""
    from fuzz.cli.common import bench

    write(FOLDER, bench(None).models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
