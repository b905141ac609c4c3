"""Inputs of the coverage-guided engine as programs that run on any build: its seeds, and what its campaigns left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fuzz import campaign, targets
from fuzz.coverage.measure import CannotMeasure
from fuzz.engine import corpus
from fuzz.models import Model
from fuzz.targets import seeds
from subjects.scenario import Scenario


def of_seeds(cache: Path) -> list[Scenario]:
    """The programs that the seeds in corpora/blobs stand for, each once. `cache`: where generated models are kept."""
    found: dict[bytes, Scenario] = {}
    for name in targets.NAMES:
        folder = corpus.SEEDS / targets.script(name).stem
        if folder.is_dir():
            for program in _decoded(name, folder, seeds.models_of(name, cache)):
                found.setdefault(msgspec.msgpack.encode(program), program)
    return list(found.values())


def of_campaigns(outs: Sequence[Path]) -> list[Scenario]:
    """The programs that the inputs in the corpora of some campaigns stand for, each once.

    Raises CannotMeasure for a folder that is no such campaign's.
    """
    found: dict[bytes, Scenario] = {}
    for out in outs:
        if not (out / "campaign.json").is_file():
            raise CannotMeasure(f"there is no campaign in {out}")
        try:
            models = msgspec.convert(campaign.stored(out)["models"], list[Model])
        except (campaign.CampaignError, msgspec.ValidationError, KeyError) as e:
            raise CannotMeasure(f"{out}: {e}") from None
        before = len(found)
        for name in targets.NAMES:
            mine = [m for m in models if (m.driver is not None) == (name in targets.DRIVEN)]
            folder = corpus.folder_of(out, name)
            if folder.is_dir() and mine:
                for program in _decoded(name, folder, mine):
                    found.setdefault(msgspec.msgpack.encode(program), program)
        if len(found) == before:
            raise CannotMeasure(f"{out}: no inputs of the coverage-guided engine in it")
    return list(found.values())


def _decoded(name: str, folder: Path, models: list[Model]) -> Iterator[Scenario]:
    target = targets.load(name)
    for path in sorted(folder.iterdir()):
        decoded = target.scenario(path.read_bytes(), models)
        if decoded is not None:
            yield decoded[0]
