"""Which models a run is about: recipes by name or GGUF files by path, written or found, with hash and traits."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from fuzz.state import Traits, traits_from_facts, traits_of
from subjects.recipes import Recipe, all_recipes, get, names
from subjects.sandbox import Sandbox
from subjects.scenario import ContextParams, Decode, ModelRef, Part, Scenario

# One or two of each memory kind; `ci/nightly` takes all.
DEFAULT = ("llama", "gemma3", "mamba2", "qwen35", "lfm2")


class BadModel(ValueError):
    """A model that is no recipe and no file, or that the library does not load; the message says which and what
    there is.
    """


class Model(msgspec.Struct, frozen=True):
    """A model ready to run: reference for scenarios, file, and what the generator must know of it."""

    ref: ModelRef
    path: str
    traits: Traits

    @property
    def label(self) -> str:
        """Short name for people."""
        return self.ref.label()


def sha256(path: Path) -> str:
    """Hash of a file, read in pieces."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def from_recipe(recipe: Recipe, folder: Path, seed: int = 0, n_gpu_layers: int = 0) -> Model:
    """Write a recipe's model into `folder` unless it is there, and describe it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recipe.name}-v{recipe.version}-s{seed}.gguf"
    if not path.exists():
        fd, tmp = tempfile.mkstemp(dir=folder, suffix=".gguf")
        os.close(fd)
        recipe.write(Path(tmp), seed=seed)
        Path(tmp).replace(path)
    ref = ModelRef(
        recipe=recipe.name, version=recipe.version, seed=seed, sha256=sha256(path), n_gpu_layers=n_gpu_layers
    )
    return Model(ref, str(path), traits_of(recipe))


def from_file(path: Path, shim: Path, n_gpu_layers: int = 0) -> Model:
    """Describe any GGUF: opened once in a child, the library itself says what it is. Raises BadModel."""
    path = path.resolve()  # children have a working directory of their own
    ref = ModelRef(path=str(path), sha256=sha256(path), n_gpu_layers=n_gpu_layers)
    # n_rs_seq is clamped to 0 by architectures without rollback, so the answer tells
    probe = Scenario(model=ref, params=ContextParams(n_rs_seq=4), ops=(Decode(parts=(Part(seq=0, n=2),)),))
    with Sandbox(shim, [(path, n_gpu_layers)]) as sandbox:
        trace = sandbox.run(probe, path)
    if not trace.facts:
        raise BadModel(f"{path}: {trace.end.text or trace.stderr[-500:] or 'the library gives no context for it'}")
    return Model(ref, str(path), traits_from_facts(trace.facts[0]))


def resolve(wanted: list[str], folder: Path, shim: Path, n_gpu_layers: int = 0) -> list[Model]:
    """Models by recipe name, `all`, or path; the default ones for an empty list. Raises BadModel."""
    found: list[Model] = []
    for name in wanted or list(DEFAULT):
        if name == "all":
            found.extend(from_recipe(r, folder, n_gpu_layers=n_gpu_layers) for r in all_recipes())
        elif name in names():
            found.append(from_recipe(get(name), folder, n_gpu_layers=n_gpu_layers))
        elif Path(name).is_file():
            found.append(from_file(Path(name), shim, n_gpu_layers))
        else:
            raise BadModel(f"{name!r} is neither a file nor a recipe; recipes are {', '.join(names())}")
    return found


def of_scenario(ref: ModelRef, folder: Path, shim: Path) -> Model:
    """The model that a stored scenario names, checked against its hash. Raises BadModel."""
    if ref.recipe is not None:
        try:
            recipe = get(ref.recipe)
        except KeyError as e:
            raise BadModel(str(e)) from None
        if recipe.version != ref.version:
            raise BadModel(
                f"the scenario wants version {ref.version} of recipe {ref.recipe}, this redraft has {recipe.version}"
            )
        model = from_recipe(recipe, folder, ref.seed, ref.n_gpu_layers)
    elif ref.path is not None and Path(ref.path).is_file():
        model = from_file(Path(ref.path), shim, ref.n_gpu_layers)
    else:
        raise BadModel(f"the scenario's model {ref.label()} is not here; put the file at {ref.path} or name a recipe")
    if ref.sha256 is not None and model.ref.sha256 != ref.sha256:
        raise BadModel(f"{ref.label()} is another file than the scenario was made with (SHA-256 differs)")
    return model
