"""Generated models: one recipe per architecture, found by name.

A recipe is data (GGUF metadata and tensor initialisers) plus what redraft must know about the memory that the model
gets. Each module of this package whose name has no leading underscore defines `RECIPE` or `RECIPES`; putting a file
there is all it takes to add a model. Sizes and names of tensors were verified on the llama.cpp of llama-cpp-python
0.3.36, and `about` holds what was measured there (seed 0, CPU, F32 K/V, flash attention off, six random prompts of 24
tokens, each continued greedily for 100):

- "std": standard deviation of the logits;
- "old token": the least that another token 0 moved any logit of token 23 (largest difference of the row), which is
  what a fault has to compete with; noise is near 1e-5;
- "gap": median distance between the best and the second logit, and how many of the gaps were below 0.05.
"""

import difflib
import functools
import importlib
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from subjects.ggufwriter import write_model

Metadata = list[list[Any]]
"""[key, type, value] entries, see `subjects.ggufwriter.write_model`."""

Tensors = list[list[Any]]
"""[name, numpy shape, init] entries, see `subjects.ggufwriter.tensor_values`."""

Memory = Literal["dense", "window", "recurrent", "hybrid"]

Role = Literal["plain", "driver"]
"""plain: what every campaign may take; driver: a target or a draft that only the set-ups of `subjects.pairs` use"""


@dataclass(frozen=True)
class Recipe:
    """One generated model and the facts about its memory that scenarios depend on."""

    name: str
    version: int
    """Raised whenever the bytes change, so that stored scenarios name the model they were found with."""
    arch: str
    """general.architecture"""
    memory: Memory
    """dense attention, attention with a sliding window, recurrent only, or recurrent and attention mixed"""
    rollback: bool
    """llama.cpp keeps earlier recurrent states for this architecture (honours n_rs_seq)"""
    can_shift: bool
    """llama_memory_can_shift of a context without swa_full"""
    window: int
    """attention.sliding_window in tokens, 0 for none (llama_model_n_swa says 0 for deepseek4 all the same)"""
    n_vocab: int
    n_embd: int
    about: str
    """one line: what is special, and what was measured"""
    build: Callable[[], tuple[Metadata, Tensors]]
    role: Role = "plain"

    def data(self) -> dict[str, Any]:
        """Return the recipe as JSON-ready data: recipe, version, and `write_model`'s metadata and tensors."""
        metadata, tensors = self.build()
        return {"recipe": self.name, "version": self.version, "metadata": metadata, "tensors": tensors}

    def write(self, path: str | os.PathLike[str], seed: int = 0) -> None:
        """Write the model to `path`; the same version and seed give the same bytes. Raises OSError."""
        write_model(path, *self.build(), seed)


@functools.cache
def _registry() -> dict[str, Recipe]:
    # On first use, not on import: the recipe modules import this package.
    found: dict[str, Recipe] = {}
    for module_info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        if module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        recipes: list[Recipe] = module.RECIPES if hasattr(module, "RECIPES") else [module.RECIPE]
        for recipe in recipes:
            if recipe.name in found:
                raise ValueError(f"two recipes are called {recipe.name!r}; the second is in {module.__name__}")
            found[recipe.name] = recipe
    return dict(sorted(found.items()))


def names(*, drivers: bool = False) -> list[str]:
    """Return the names of the plain recipes, with `drivers` those of all, sorted."""
    return [recipe.name for recipe in all_recipes(drivers=drivers)]


def all_recipes(*, drivers: bool = False) -> list[Recipe]:
    """Return the plain recipes, with `drivers` all, sorted by name."""
    return [recipe for recipe in _registry().values() if drivers or recipe.role == "plain"]


def get(name: str) -> Recipe:
    """Return the recipe called `name`, of whatever role; raise KeyError with near matches if there is none."""
    try:
        return _registry()[name]
    except KeyError:
        near = difflib.get_close_matches(name, names(drivers=True)) or names(drivers=True)
        raise KeyError(f"no recipe is called {name!r}; did you mean {', '.join(near)}?") from None
