"""Which models a run is about: recipes by name or GGUF files by path, written or found, with hash and traits."""

from __future__ import annotations

import difflib
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from fuzz.drivers import fit
from fuzz.programs import AnyProgram
from fuzz.state import Traits, traits_from_facts, traits_of
from subjects.pairs import Pair, all_pairs, states_kept
from subjects.recipes import Recipe, all_recipes, get, names
from subjects.sandbox import Sandbox
from subjects.scenario import ContextParams, Decode, DriverKind, DriverParams, ModelRef, Part, Scenario

# One or two of each memory kind; `ci/nightly` takes all.
DEFAULT = ("llama", "gemma3", "mamba2", "qwen35", "lfm2")


class BadModel(ValueError):
    """A model that is no recipe and no file, or that the library does not load; the message says which and what
    there is.
    """


class Model(msgspec.Struct, frozen=True):
    """A model ready to run: reference for scenarios, file, and what the generator must know of it.

    With a driver: its parameters, the draft's file (empty where the model's own drafts, or none does), the earlier
    recurrent states that the server would ask for, and the pair's name.
    """

    ref: ModelRef
    path: str
    traits: Traits
    driver: DriverParams | None = None
    draft: str = ""
    n_rs: int = 0
    pair: str = ""

    @property
    def label(self) -> str:
        """Short name for people."""
        return self.pair or self.ref.label()

    def drafts(self) -> dict[ModelRef, Path]:
        """Where the draft's model is, for a sandbox."""
        if self.driver is None or self.driver.draft is None:
            return {}
        return {self.driver.draft: Path(self.draft)}


@dataclass(frozen=True)
class Form:
    """In which form recipes are written. dress: makes another one of a recipe, with the same name; mark: what the names
    of its files end with, so that no two forms share one."""

    dress: Callable[[Recipe], Recipe] = lambda recipe: recipe
    mark: str = ""


BARE = Form()


def sha256(path: Path) -> str:
    """Hash of a file, read in pieces."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def from_recipe(recipe: Recipe, folder: Path, seed: int = 0, n_gpu_layers: int = 0, form: Form = BARE) -> Model:
    """Write a recipe's model into `folder` unless it is there, and describe it."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = form.dress(recipe)
    path = folder / f"{recipe.name}-v{recipe.version}-s{seed}{form.mark}.gguf"
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


def resolve(
    wanted: list[str],
    folder: Path,
    shim: Path | Callable[[], Path],
    n_gpu_layers: int = 0,
    *,
    drivers: bool = False,
    form: Form = BARE,
) -> list[Model]:
    """Models by recipe name, `all`, or path; the default ones for an empty list. drivers: the targets of pairs may be
    named too. shim: what files are looked at with, or how to get it. Raises BadModel.
    """
    known = [*names(), *({p.target for p in all_pairs()} - {*names()} if drivers else ())]
    found: list[Model] = []
    for name in wanted or list(DEFAULT):
        if name == "all":
            found.extend(from_recipe(r, folder, n_gpu_layers=n_gpu_layers, form=form) for r in all_recipes())
        elif name in known:
            found.append(from_recipe(get(name), folder, n_gpu_layers=n_gpu_layers, form=form))
        elif Path(name).is_file():
            found.append(from_file(Path(name), _shim(shim), n_gpu_layers))
        elif name in names(drivers=True):
            pairs = ", ".join(p.name for p in all_pairs() if name in (p.target, p.draft))
            raise BadModel(f"{name} is a model of programs with a driver: --driver {pairs}")
        else:
            raise BadModel(f"{name!r} is neither a file nor a recipe; {_meant(name, known, 'recipes')}")
    return found


def _shim(shim: Path | Callable[[], Path]) -> Path:
    return shim if isinstance(shim, Path) else shim()


def from_pair(pair: Pair, folder: Path, seed: int = 0, form: Form = BARE) -> Model:
    """Write both models of a pair into `folder` unless they are there, and describe them."""
    target = from_recipe(get(pair.target), folder, seed, form=form)
    draft = from_recipe(get(pair.draft), folder, seed, form=form) if pair.draft else None
    driver = DriverParams(kind=pair.kind, draft=draft.ref if draft else None, n_max=pair.n_max)
    return msgspec.structs.replace(
        target, driver=driver, draft=draft.path if draft else "", n_rs=pair.n_rs_seq, pair=pair.name
    )


def resolve_pairs(wanted: list[str], folder: Path, form: Form = BARE) -> list[Model]:
    """Targets with drivers by the name of a pair, `all`, or the kind of driver. Raises BadModel."""
    found: list[Model] = []
    for name in wanted:
        mine = [p for p in all_pairs() if name in ("all", p.name, p.kind)]
        if not mine:
            pairs = [p.name for p in all_pairs()]
            raise BadModel(
                f"{name!r} is neither a pair nor a kind of driver; {_meant(name, pairs, 'pairs', get_args(DriverKind))}"
            )
        found.extend(from_pair(p, folder, form=form) for p in mine)
    return list({m.pair: m for m in found}.values())


def _meant(name: str, there_are: list[str], what: str, more: tuple[str, ...] = ()) -> str:
    near = difflib.get_close_matches(name, [*there_are, *more])
    return f"did you mean {', '.join(near)}?" if near else f"{what} are {', '.join(there_are)}"


def draft_of(name: str, folder: Path, form: Form = BARE) -> tuple[ModelRef, Path]:
    """A draft's model by recipe name or path. Raises BadModel."""
    if name in names(drivers=True):
        made = from_recipe(get(name), folder, form=form)
        return made.ref, Path(made.path)
    path = Path(name).resolve()  # children have a working directory of their own
    if not path.is_file():
        raise BadModel(f"{name}: no such file, and no recipe (`redraft models`)")
    return ModelRef(path=str(path), sha256=sha256(path)), path


def with_driver(model: Model, kind: str, draft: str, folder: Path, form: Form = BARE) -> Model:
    """A model with a driver of a kind; the draft, empty where it has none of its own, by name or path. Raises
    BadModel.
    """
    kinds = get_args(DriverKind)
    pairs = [p.name for p in all_pairs()]
    if kind in ("all", *pairs):
        raise BadModel(
            f"{kind!r} stands for pairs, which have models of their own; leave out --model, or name a kind: "
            f"{', '.join(kinds)}"
        )
    if kind not in kinds:
        raise BadModel(f"{kind!r} is no kind of driver; {_meant(kind, list(kinds), 'kinds')}")
    ref, path = draft_of(draft, folder, form) if draft else (None, None)
    driver = fit.sized(DriverParams(kind=cast(DriverKind, kind), draft=ref))
    try:
        fit.check(
            driver.kind, fit.look(Path(model.path), model.label), fit.look(path, ref.label()) if ref and path else None
        )
    except fit.Misfit as e:
        raise BadModel(str(e)) from None
    n_rs = states_kept(driver.kind, driver.n_max, model.traits.rollback)
    return msgspec.structs.replace(model, driver=driver, draft=str(path or ""), n_rs=n_rs, pair=f"{model.label} {kind}")


def with_impl(model: Model, impl: Literal["native", "reference"]) -> Model:
    """A model with another implementation of its driver. Raises BadModel."""
    if model.driver is None or model.driver.impl == impl:
        return model
    if model.driver.kind != "draft-mtp":
        raise BadModel(f"the driver in Python is draft-mtp, not {model.driver.kind}")
    return msgspec.structs.replace(model, driver=msgspec.structs.replace(model.driver, impl=impl))


def of_program(scenario: AnyProgram, folder: Path, shim: Path | Callable[[], Path], form: Form = BARE) -> Model:
    """The model, and the draft's, that a stored scenario names. Raises BadModel."""
    model = of_scenario(scenario.model, folder, shim, form)
    if scenario.driver is None:
        return model
    ref = scenario.driver.draft
    draft = ""
    if ref is not None:
        if ref.recipe is None and ref.path is None:
            raise BadModel("the scenario's driver.draft names neither a recipe nor a file")
        # a draft is no model by itself: a file is not opened, only looked at
        draft = of_scenario(ref, folder, shim, form).path if ref.recipe else str(ref.path)
        if ref.sha256 is not None and (not Path(draft).is_file() or sha256(Path(draft)) != ref.sha256):
            raise BadModel(f"{draft} is another file than the scenario was made with, or gone")
    return msgspec.structs.replace(model, driver=scenario.driver, draft=draft)


def of_scenario(ref: ModelRef, folder: Path, shim: Path | Callable[[], Path], form: Form = BARE) -> Model:
    """The model that a stored scenario names, checked against its hash. Raises BadModel."""
    if ref.recipe is not None:
        try:
            recipe = get(ref.recipe)
        except KeyError as e:
            raise BadModel(str(e.args[0])) from None
        if recipe.version != ref.version:
            raise BadModel(
                f"the scenario wants version {ref.version} of recipe {ref.recipe}, this redraft has {recipe.version}"
            )
        model = from_recipe(recipe, folder, ref.seed, ref.n_gpu_layers, form)
    elif ref.path is not None and Path(ref.path).is_file():
        model = from_file(Path(ref.path), _shim(shim), ref.n_gpu_layers)
    else:
        raise BadModel(f"the scenario's model {ref.label()} is not here; put the file at {ref.path} or name a recipe")
    if ref.sha256 is not None and model.ref.sha256 != ref.sha256:
        raise BadModel(f"{ref.label()} is another file than the scenario was made with (SHA-256 differs)")
    return model
