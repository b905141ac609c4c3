"""What tests on a real libllama share: the compiled shim, generated models, and a judge for a recipe.

Native code runs in the sandbox's children only, never in the process of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from fuzz.cli.common import Bench, bench
from fuzz.models import Model, from_pair, from_recipe
from oracles.judge import Judge
from subjects import instrument
from subjects.pairs import all_pairs
from subjects.recipes import get
from subjects.sandbox import Limits, Sandbox
from subjects.scenario import ModelRef
from subjects.server.build import ServerBuild, find_server
from subjects.shimcache import BadBuild

JudgeOf = Callable[..., tuple[Judge, Model]]
Built = Callable[..., Path]


@pytest.fixture(scope="session")
def build() -> Bench:
    """The default build with its compiled shim and the cache."""
    return bench(None)


@pytest.fixture(scope="session")
def shim_path(build: Bench) -> Path:
    """The compiled shim."""
    return build.shim


@pytest.fixture(scope="session")
def driver_path(build: Bench) -> Path:
    """The compiled driver library of the build."""
    return build.driver


@pytest.fixture(scope="session")
def models_dir(build: Bench) -> Path:
    """Where generated models are kept."""
    return build.models


@pytest.fixture(scope="session")
def server_build() -> ServerBuild:
    """The llama-server in the cache; skips where it is not built."""
    try:
        return find_server()
    except BadBuild as e:
        pytest.skip(str(e))


@pytest.fixture(scope="session")
def built() -> Built:
    """built(coverage, sanitize) is a build from the cache; skips where it, or what loading it takes, is not there."""

    def built(coverage: instrument.Coverage | None, sanitize: tuple[str, ...] = ()) -> Path:
        try:
            found = instrument.ready(coverage, sanitize)
            if found is None:
                option = " --coverage report" if coverage == "report" else ""
                pytest.skip(f"no such build in the cache: redraft build{option} makes one")
            instrument.variables(found)
        except BadBuild as e:
            pytest.skip(str(e))
        return found

    return built


@pytest.fixture(scope="session")
def judge_of(build: Bench) -> Iterator[JudgeOf]:
    """judge_of(recipe) is a judge with a sandbox of its own, and its model; one for the session.

    `hang`: another one, whose runs may take so many seconds. `driver`: another one, with this driver library.
    """
    made: dict[tuple[str, float | None, Path | None], tuple[Judge, Model]] = {}
    with ExitStack() as stack:

        def judge_of(recipe: str, *, hang: float | None = None, driver: Path | None = None) -> tuple[Judge, Model]:
            key = (recipe, hang, driver)
            if key not in made:
                model = from_recipe(get(recipe), build.models)
                path = Path(model.path)
                drafts: dict[ModelRef, Path] = {}
                for pair in all_pairs() if driver else ():
                    mine = from_pair(pair, build.models)
                    for ref, file in mine.drafts().items():
                        drafts |= {ref: file, msgspec.structs.replace(ref, sha256=None): file}
                sandbox = stack.enter_context(
                    Sandbox(build.shim, [(path, 0)], limits=Limits(hang=hang), driver=driver, drafts=drafts)
                )
                judge = Judge(sandbox, model.ref, path, build.build.fingerprint, build.cache)
                made[key] = judge, model
            return made[key]

        yield judge_of
