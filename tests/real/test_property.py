"""The campaign's programs as ordinary Hypothesis tests: a violation is raised as its oracle's own failure class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fuzz.avoid import AVOIDANCES, Avoider
from fuzz.models import Model
from fuzz.strategies import scenarios
from oracles.base import OracleFailure
from oracles.draft import DraftTokenFailure
from oracles.judge import Judge
from oracles.registry import ORACLES, by_name
from subjects.planted import CANARY
from subjects.scenario import Scenario

JudgeOf = Callable[..., tuple[Judge, Model]]
# every setting is given: with CI in the environment Hypothesis' own `ci` profile is active
QUIET = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def check(judge: Judge, scenario: Scenario, fault: str = "") -> None:
    """Raise what the first violation of a program is."""
    found = judge.judge(scenario, fresh=True, fault=fault, variants=False).violations
    if found:
        raise by_name(found[0].oracle).failure(found[0])


@pytest.mark.parametrize("recipe", ["llama", "gemma3", "mamba2", "qwen35", "lfm2"])
def test_valid_programs_break_nothing_but_known_faults(judge_of: JudgeOf, recipe: str) -> None:
    judge, model = judge_of(recipe)

    @QUIET
    @given(scenarios(model.ref, model.traits, avoid=Avoider(AVOIDANCES)))
    def prop(scenario: Scenario) -> None:
        check(judge, scenario)

    prop()


def test_hypothesis_finds_and_shrinks_a_planted_fault(judge_of: JudgeOf) -> None:
    judge, model = judge_of("llama")
    smallest: list[Scenario] = []

    @QUIET
    @given(scenarios(model.ref, model.traits, avoid=Avoider(AVOIDANCES)))
    def prop(scenario: Scenario) -> None:
        try:
            check(judge, scenario, CANARY)
        except DraftTokenFailure:
            smallest.append(scenario)  # the last one that Hypothesis runs is its smallest
            raise

    with pytest.raises(DraftTokenFailure) as caught:
        prop()
    assert caught.value.violation.oracle == "draft"
    assert len(smallest[-1].ops) <= 4


def test_each_oracle_has_a_failure_class_of_its_own() -> None:
    classes = [o.failure for o in ORACLES]
    assert len(set(classes)) == len(ORACLES)
    assert all(issubclass(c, OracleFailure) and c is not OracleFailure for c in classes)
