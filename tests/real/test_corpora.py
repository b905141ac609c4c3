"""Every stored scenario is replayed: known faults show what their entries say, false alarms are judged and silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import programs
from fuzz.avoid import triggers
from fuzz.cli.common import Bench
from fuzz.known import FOLDER, KnownFault, load_all, match
from fuzz.models import Model
from fuzz.triage import blame, route_of, sign
from oracles.judge import Judge
from subjects.scenario import Scenario, loads

JudgeOf = Callable[..., tuple[Judge, Model]]
STORED = sorted((FOLDER.parent / "scenarios").glob("*.json"))
# those of llama-server are replayed in test_server_campaign.py
SCENARIOS = [p for p in STORED if programs.subject_of(programs.loads(p.read_bytes())) == "library"]
KNOWN: dict[str, KnownFault] = {f.scenario: f for f in load_all() if f.subject == "library"}
ALARMS = [p for p in SCENARIOS if p.name not in KNOWN]


def opened(path: Path, judge_of: JudgeOf, build: Bench) -> tuple[Scenario, Judge, Model]:
    scenario = loads(path.read_bytes())
    assert scenario.model.recipe is not None, "a stored scenario is of a generated model"
    judge, model = judge_of(scenario.model.recipe, driver=build.driver if scenario.driver else None)
    assert (scenario.model.version, scenario.model.seed) == (model.ref.version, model.ref.seed)
    assert scenario.model.sha256 in (None, model.ref.sha256)
    return scenario, judge, model


def test_there_are_some_of_both() -> None:
    assert {p.name for p in SCENARIOS} >= set(KNOWN)
    assert len(KNOWN) >= 5
    assert ALARMS


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.stem)
def test_files_are_written_as_we_write_them_and_say_what_they_are_for(path: Path) -> None:
    scenario = programs.loads(path.read_bytes())
    assert path.read_text("utf-8") == programs.dumps(scenario)
    assert len(scenario.note) > 15


@pytest.mark.parametrize("path", [p for p in SCENARIOS if p.name in KNOWN], ids=lambda p: p.stem)
def test_a_known_fault_shows_as_its_entry_says(path: Path, judge_of: JudgeOf, build: Bench) -> None:
    """Where it does not any more, the build has the fix: the entry goes ("fixed?")."""
    fault = KNOWN[path.name]
    scenario, judge, model = opened(path, judge_of, build)
    assert triggers(fault.avoidance, scenario, model.traits)
    judgement = judge.judge(scenario, fresh=True)
    assert judgement.violations, "fixed?"
    first = judgement.violations[0]
    culprit, _ = blame(judge, judgement.executed, first)
    route = route_of(judgement.executed, culprit)
    signature = sign(first, judgement.executed, culprit, judgement.account.memory, route)
    assert match(signature, judgement.executed, model.traits, [fault], culprit) == fault, signature
    assert match(signature, judgement.executed, model.traits, list(KNOWN.values()), culprit) is not None


@pytest.mark.parametrize("path", ALARMS, ids=lambda p: p.stem)
def test_a_false_alarm_is_judged_and_silent(path: Path, judge_of: JudgeOf, build: Bench) -> None:
    scenario, judge, _ = opened(path, judge_of, build)
    for fresh in (True, False):
        judgement = judge.judge(scenario, fresh=fresh, variants=True)
        assert judgement.violations == [], judgement.violations[0].because
        assert judgement.judged
        assert judgement.account.ledger.trace.end.how == "ok"
        assert all(s.done and not s.skipped for s in judgement.account.ledger.trace.steps)
    # as it is stored, too: nothing but its own operations
    assert judge.judge(scenario, fresh=True, observed=False).violations == []
