"""Which models llama-server is tested on: recipes with a tokenizer and a chat template, or GGUF files that have a
tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzz import models
from fuzz.drivers import fit
from fuzz.models import BadModel, Form, Model
from subjects.recipes import names
from subjects.server.dress import VERSION, dressed
from subjects.server.scenario import ServerScenario

# One or two of each memory kind; `redraft fuzz --model all` takes all.
DEFAULT = ("llama", "gemma3", "qwen35", "lfm2", "mamba2")
SERVED = Form(dressed, f"-server{VERSION}")
# llama.cpp's names for none (llama-vocab.cpp)
_NO_TOKENIZER = ("no_vocab", "none")


def resolve(
    wanted: list[str], drivers: list[str], draft: str | None, folder: Path, shim: Callable[[], Path]
) -> list[Model]:
    """Models by recipe name, `all`, or path, each with every kind of driver that is named; without models the pairs
    that `drivers` names, without those the default models. shim: how to get what files are looked at with. Raises
    BadModel.
    """
    if drivers and not wanted:
        return models.resolve_pairs(drivers, folder, SERVED)
    known = names(drivers=True)
    for name in wanted:
        if name not in known and Path(name).is_file():
            _speaks(Path(name))
    found = models.resolve(wanted or [*DEFAULT], folder, shim, drivers=bool(drivers), form=SERVED)
    if not drivers:
        return found
    return [models.with_driver(m, kind, draft or "", folder, SERVED) for m in found for kind in drivers]


def of_program(program: ServerScenario, folder: Path, shim: Callable[[], Path]) -> Model:
    """The model, and the draft's, that a stored program names. Raises BadModel."""
    if program.model.recipe is None and program.model.path is not None and Path(program.model.path).is_file():
        _speaks(Path(program.model.path))
    return models.of_program(program, folder, shim, SERVED)


def _speaks(path: Path) -> None:
    """Raises BadModel for a file without a tokenizer: the server would die of it, which is no fault of its own."""
    try:
        vocabulary = fit.look(path).vocabulary
    except fit.Misfit as e:
        raise BadModel(str(e)) from None
    if vocabulary in _NO_TOKENIZER:
        raise BadModel(
            f"{path.name} has no tokenizer (tokenizer.ggml.model: {vocabulary}), and llama-server needs one: name a "
            "file that has one, or a recipe (`redraft models write NAME FILE --server` writes it with a tokenizer)"
        )


__all__ = ["DEFAULT", "SERVED", "BadModel", "of_program", "resolve"]
