"""Faults planted between a real llama-server and its client: each is reported first by the oracle meant for it, and
without them no oracle reports anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fuzz.models import Model, from_pair, from_recipe
from fuzz.server.models import SERVED
from oracles.server.judge import ServerJudge
from oracles.server.registry import ORACLES
from subjects import pairs, recipes
from subjects.builds import cache_dir
from subjects.scenario import BlobEdit
from subjects.server.build import ServerBuild
from subjects.server.planted import CANARY, PLANTED
from subjects.server.scenario import (
    AnyRequest,
    Cut,
    DamageFile,
    EraseSlot,
    Flags,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Turn,
)

PLAIN, MTP = "llama", "qwen35-mtp"
BEGIN, ON = Turn(conv=0, keep=Cut("start"), n=24), Turn(conv=0, n=5)
OTHER = Turn(conv=1, keep=Cut("start"), n=20, stream=5)
SLOTS: tuple[AnyRequest, ...] = (
    BEGIN, SaveSlot(0, 0), OTHER, RestoreSlot(0, 0), ON, DamageFile(0, (BlobEdit(how="cut", nth=500),)),
    RestoreSlot(0, 0), RestoreSlot(0, 3), EraseSlot(0),
)  # fmt: skip
LONG: tuple[AnyRequest, ...] = (BEGIN, Turn(conv=0, n=5, predict=32), Turn(conv=0, n=5, predict=32))
# the oracle that must report first, the model, the requests
MEANT: dict[str, tuple[str, str, tuple[AnyRequest, ...]]] = {
    "server-die": ("server-alive", PLAIN, (BEGIN, ON)),
    "server-accept": ("server-slot", PLAIN, SLOTS),
    "server-leak": ("server-history", PLAIN, (BEGIN, OTHER)),
    "server-unverified": ("server-drafting", MTP, (BEGIN, ON)),
    "server-stale": ("server-answer", PLAIN, (BEGIN, ON)),
    "server-forget": ("server-acceptance", MTP, LONG),
}

Judges = dict[str, tuple[ServerJudge, Model]]


@pytest.fixture(scope="module")
def judges(server_build: ServerBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judges]:
    """A judge of a model without a driver, and one of a pair."""
    folder, cache = cache_dir() / "models", tmp_path_factory.mktemp("cache")
    models = (from_recipe(recipes.get(PLAIN), folder, form=SERVED), from_pair(pairs.get(MTP), folder, form=SERVED))
    made: Judges = {}
    with ExitStack() as stack:
        for name, model in zip((PLAIN, MTP), models, strict=True):
            draft = Path(model.draft) if model.draft else None
            judge = ServerJudge(server_build, model.ref, Path(model.path), draft, cache, model.traits.memory)
            made[name] = stack.enter_context(judge), model
        yield made


def program(fault: str, judges: Judges) -> tuple[ServerJudge, ServerScenario]:
    _, name, requests = MEANT[fault]
    judge, model = judges[name]
    return judge, ServerScenario(model=model.ref, driver=model.driver, flags=Flags(ctx=256), requests=requests)


def test_every_fault_has_an_oracle_and_every_oracle_a_fault() -> None:
    assert set(MEANT) == set(PLANTED)
    assert {oracle for oracle, _, _ in MEANT.values()} == {o.name for o in ORACLES}
    assert CANARY in PLANTED


@pytest.mark.parametrize("fault", MEANT)
def test_a_fault_is_reported_by_the_oracle_meant_for_it(fault: str, judges: Judges) -> None:
    judge, asked = program(fault, judges)
    found = judge.judge(asked, fault=fault)
    assert found.violations, [(v.oracle, v.value, v.unknown) for v in found.verdicts]
    assert found.violations[0].oracle == MEANT[fault][0]
    # and again, by servers of its own
    again = judge.judge(found.program, fault=fault, fresh=True)
    assert (again.violations[0].oracle, again.violations[0].key) == (
        found.violations[0].oracle,
        found.violations[0].key,
    )


@pytest.mark.parametrize("fault", MEANT)
def test_without_it_no_oracle_reports_anything(fault: str, judges: Judges) -> None:
    judge, asked = program(fault, judges)
    found = judge.judge(asked, variants=True)
    assert [v.because for v in found.violations] == []
    assert found.judged
    (mine,) = (v for v in found.verdicts if v.oracle == MEANT[fault][0])
    assert mine.compared, f"{mine.oracle} compared nothing"
