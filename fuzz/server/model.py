"""Prints the writer of a program's generated models: model.py, which repro.sh calls."""

from __future__ import annotations

from fuzz.repro import writer
from subjects import recipes
from subjects.scenario import ModelRef
from subjects.server.dress import dressed
from subjects.server.scenario import ServerScenario

_HEAD = '''\
#!/usr/bin/env python3
"""Writes what repro.sh starts llama-server on: python3 model.py {usage}. Needs numpy.

{about}
"""
import json
import sys

'''

_MAIN = """

for path, (metadata, tensors, seed) in zip(sys.argv[1:], MODELS):
    write_model(path, metadata, tensors, seed)
"""


def made(program: ServerScenario) -> list[ModelRef]:
    """The models of a program that recipes make: the target, and the draft where it has one."""
    d = program.driver
    return [m for m in (program.model, d.draft if d else None) if m is not None and m.recipe is not None]


def files(program: ServerScenario) -> dict[str, str]:
    """model.py, or nothing where all models are the user's own files.

    Raises:
        ValueError: a recipe is no longer of the version that the program names.
    """
    refs = made(program)
    if not refs:
        return {}
    usage = " ".join(_file(program, r) for r in refs)
    about = "\n".join(
        f"{_file(program, r)}: {r.recipe}, version {r.version}, random weights of seed {r.seed}, with llama.cpp's "
        'tokenizer\nfor tests ("test").'
        for r in refs
    )
    models = ",\n".join(f"(\n{_data(r)}\n)" for r in refs)
    text = _HEAD.format(usage=usage, about=about) + writer.source() + f"\n\n\nMODELS = [\n{models}\n]\n" + _MAIN
    return {"model.py": text}


def _file(program: ServerScenario, ref: ModelRef) -> str:
    return "model.gguf" if ref == program.model else "draft.gguf"


def _data(ref: ModelRef) -> str:
    assert ref.recipe is not None
    recipe = dressed(recipes.get(ref.recipe))
    if recipe.version != ref.version:
        raise ValueError(f"recipe {ref.recipe} is of version {recipe.version} now, not {ref.version}")
    metadata, tensors = recipe.build()
    return f"{writer.literal(metadata)},\n{writer.literal(tensors)},\n{ref.seed},"
