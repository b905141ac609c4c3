"""Which models llama-server is tested on: recipes with a tokenizer and a chat template, or GGUF files as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzz import models
from fuzz.models import BadModel, Form, Model
from subjects.server.dress import VERSION, dressed
from subjects.server.scenario import ServerScenario

# One or two of each memory kind; `redraft fuzz --model all` takes all.
DEFAULT = ("llama", "gemma3", "qwen35", "lfm2", "mamba2")
SERVED = Form(dressed, f"-server{VERSION}")


def resolve(
    wanted: list[str], drivers: list[str], draft: str | None, folder: Path, shim: Callable[[], Path]
) -> list[Model]:
    """Models by recipe name, `all`, or path, each with every kind of driver that is named; without models the pairs
    that `drivers` names, without those the default models. shim: how to get what files are looked at with. Raises
    BadModel.
    """
    if drivers and not wanted:
        return models.resolve_pairs(drivers, folder, SERVED)
    found = models.resolve(wanted or [*DEFAULT], folder, shim, drivers=bool(drivers), form=SERVED)
    if not drivers:
        return found
    return [models.with_driver(m, kind, draft or "", folder, SERVED) for m in found for kind in drivers]


def of_program(program: ServerScenario, folder: Path, shim: Callable[[], Path]) -> Model:
    """The model, and the draft's, that a stored program names. Raises BadModel."""
    return models.of_program(program, folder, shim, SERVED)


__all__ = ["DEFAULT", "SERVED", "BadModel", "of_program", "resolve"]
