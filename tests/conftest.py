"""What tests on a real libllama share: the compiled shim, generated models, and a judge for a recipe.

Native code runs in the sandbox's children only, never in the process of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fuzz.cli.common import Bench, bench
from fuzz.models import Model, from_recipe
from oracles.judge import Judge
from subjects.recipes import get
from subjects.sandbox import Limits, Sandbox

JudgeOf = Callable[..., tuple[Judge, Model]]


@pytest.fixture(scope="session")
def build() -> Bench:
    """The default build with its compiled shim and the cache."""
    return bench(None)


@pytest.fixture(scope="session")
def shim_path(build: Bench) -> Path:
    """The compiled shim."""
    return build.shim


@pytest.fixture(scope="session")
def models_dir(build: Bench) -> Path:
    """Where generated models are kept."""
    return build.models


@pytest.fixture(scope="session")
def judge_of(build: Bench) -> Iterator[JudgeOf]:
    """judge_of(recipe) is a judge with a sandbox of its own, and its model; one for the session.

    `hang`: another one, whose runs may take so many seconds.
    """
    made: dict[tuple[str, float | None], tuple[Judge, Model]] = {}
    with ExitStack() as stack:

        def judge_of(recipe: str, *, hang: float | None = None) -> tuple[Judge, Model]:
            if (recipe, hang) not in made:
                model = from_recipe(get(recipe), build.models)
                path = Path(model.path)
                sandbox = stack.enter_context(Sandbox(build.shim, [(path, 0)], limits=Limits(hang=hang)))
                judge = Judge(sandbox, model.ref, path, build.build.fingerprint, build.cache)
                made[recipe, hang] = judge, model
            return made[recipe, hang]

        yield judge_of
