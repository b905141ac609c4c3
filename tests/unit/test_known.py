"""Known faults: every entry is well formed, shows its trigger, and matches nothing that does not have it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fuzz.avoid import AVOIDANCES, Avoider, triggered, triggers
from fuzz.drivers.avoid import DRIVER_AVOIDANCES
from fuzz.finding import slug_of
from fuzz.known import FOLDER, BadKnown, KnownFault, load_all, match, match_server, scenario_of
from fuzz.server import avoid as server_avoid
from fuzz.server import fit
from fuzz.state import Traits, traits_of, valid
from fuzz.strategies import generate, scenarios
from oracles.server.spoilt import SPOILERS
from subjects import recipes
from subjects.scenario import OP_NAMES, ModelRef, Scenario, dumps
from subjects.server.scenario import ServerScenario
from subjects.server.trace import ServerTrace

LAST = 99  # behind every operation
EVERY = load_all()
KNOWN = [f for f in EVERY if f.subject == "library"]
SERVED = [f for f in EVERY if f.subject == "server"]
FIRST = {"ubatch-rollback", "device-corrupt", "device-foreign", "device-older", "stale-rollback"}


def shown_by(fault: KnownFault) -> Scenario:
    """The program of a fault of the library."""
    scenario = scenario_of(fault)
    assert isinstance(scenario, Scenario)
    return scenario


def traits(scenario: Scenario) -> Traits:
    assert scenario.model.recipe is not None
    return traits_of(recipes.get(scenario.model.recipe))


def shown_as(fault: KnownFault) -> list[str]:
    """Signatures that its patterns match."""
    return [p.replace("*", "x") for p in fault.signatures]


def test_the_first_five_are_there() -> None:
    names = [f.name for f in EVERY]
    assert set(names) >= FIRST
    assert len(names) == len(set(names)) == len(list(FOLDER.glob("*.json")))


@pytest.mark.parametrize("fault", EVERY, ids=lambda f: f.name)
def test_every_entry_says_what_a_person_needs(fault: KnownFault) -> None:
    assert fault.name == slug_of(fault.name)
    assert 15 < len(fault.title) < 100
    assert len(fault.about) > 30
    assert fault.builds
    assert all(re.search(r"\d", b) for b in fault.builds)
    assert fault.signatures


@pytest.mark.parametrize("fault", KNOWN, ids=lambda f: f.name)
def test_its_scenario_keeps_the_contract_and_has_the_trigger(fault: KnownFault) -> None:
    scenario = shown_by(fault)
    assert not scenario.misuse
    assert 1 <= len(scenario.ops) <= 10
    assert scenario.note
    assert valid(scenario, traits(scenario)) == []
    assert triggers(fault.avoidance, scenario, traits(scenario))
    for signature in shown_as(fault):
        found = match(signature, scenario, traits(scenario), KNOWN, LAST)
        assert found is not None
    for signature in shown_as(fault):
        assert match(signature, scenario, traits(scenario), [fault], LAST) == fault


def test_a_trigger_behind_the_operation_to_blame_is_no_excuse() -> None:
    fault = next(f for f in KNOWN if f.name == "split-keep")
    scenario = shown_by(fault)
    at = triggered(fault.avoidance, scenario, traits(scenario))
    assert at is not None and at > 0
    assert match("removal/seq_keep/dense/split", scenario, traits(scenario), [fault], at) == fault
    assert match("removal/seq_keep/dense/split", scenario, traits(scenario), [fault], at - 1) is None


@pytest.mark.parametrize("fault", KNOWN, ids=lambda f: f.name)
def test_a_program_without_the_trigger_is_new(fault: KnownFault) -> None:
    scenario = shown_by(fault)
    without = Avoider([fault.avoidance]).repair(scenario, traits(scenario))
    assert without != scenario
    for signature in shown_as(fault):
        assert match(signature, without, traits(scenario), [fault], LAST) is None


@pytest.mark.parametrize("fault", KNOWN, ids=lambda f: f.name)
def test_signatures_are_narrow(fault: KnownFault) -> None:
    """Each names the text of a crash, or the operation that is to blame."""
    for pattern in fault.signatures:
        assert not re.search(r"[\[\]?]", pattern), "a shell pattern of another kind"
        if pattern.startswith("liveness:"):
            assert len(pattern.removeprefix("liveness:").replace("*", "")) >= 15
        else:
            assert pattern.split("/")[1] in OP_NAMES
    scenario = shown_by(fault)
    for other in ("logits/reopen/dense", "liveness:SIGSEGV", "liveness:hang", "isolation/clear/hybrid", ""):
        assert match(other, scenario, traits(scenario), [fault], LAST) is None


@pytest.mark.parametrize("recipe", ["llama", "gemma3", "mamba2", "qwen35", "lfm2"])
def test_programs_that_step_round_everything_match_nothing(recipe: str) -> None:
    model, of_recipe = ModelRef(recipe=recipe), traits_of(recipes.get(recipe))
    made = generate(scenarios(model, of_recipe, avoid=Avoider(f.avoidance for f in KNOWN)), 6, 60)
    signatures = [s for f in KNOWN for s in shown_as(f)]
    assert not [(s, x) for s in made for x in signatures if match(x, s, of_recipe, KNOWN, LAST)]


@pytest.mark.parametrize("fault", SERVED, ids=lambda f: f.name)
def test_an_entry_of_the_server_is_stepped_round_and_matches_only_what_sets_it_off(fault: KnownFault) -> None:
    program = scenario_of(fault)
    assert isinstance(program, ServerScenario)
    assert fit.valid(program) == []
    assert program.note
    idle = ServerTrace()
    if fault.avoidance in SPOILERS:  # only what the server did tells (tests/real/test_server_campaign.py)
        assert all(match_server(s, program, idle, EVERY, LAST) is None for s in shown_as(fault))
        return
    at = server_avoid.triggered(fault.avoidance, program)
    assert at is not None
    repaired = server_avoid.repaired([fault.avoidance], program)
    assert server_avoid.triggered(fault.avoidance, repaired) is None
    assert fit.valid(repaired) == []
    for signature in shown_as(fault):
        assert match_server(signature, program, idle, EVERY, at) == fault
        assert match_server(signature, program, idle, EVERY, at - 1) is None, "the trigger comes later"
        assert match_server(signature, repaired, idle, EVERY, LAST) is None
        assert match_server(signature, program, idle, KNOWN, LAST) is None, "of the library"
    for other in ("server-alive:SIGSEGV", "server-answer/hybrid/checkpoint", ""):
        assert match_server(other, program, idle, EVERY, LAST) is None


def test_every_entry_has_an_avoidance() -> None:
    assert {f.avoidance for f in KNOWN} <= {*AVOIDANCES, *DRIVER_AVOIDANCES}
    assert {f.avoidance for f in KNOWN} >= FIRST


GOOD = {
    "name": "stale-rollback",
    "title": "a title",
    "about": "about it",
    "signatures": ["*/seq_rm/hybrid/tail"],
    "scenario": "s.json",
    "avoidance": "stale-rollback",
    "builds": ["llama.cpp 1"],
}


def entry(folder: Path, text: str, name: str = "stale-rollback.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_a_good_entry(tmp_path: Path) -> None:
    entry(tmp_path / "known", json.dumps(GOOD))
    entry(tmp_path / "known", "not read", "README.txt")
    (fault,) = load_all(tmp_path / "known")
    assert fault.name == "stale-rollback"
    assert fault.references == ()
    program = generate(scenarios(ModelRef(recipe="llama"), traits_of(recipes.get("llama"))), 0, 1)[0]
    entry(tmp_path / "scenarios", dumps(program), "s.json")
    assert scenario_of(fault, tmp_path / "known") == program
    assert load_all(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Input data was truncated"),
        ("[]", "Expected `object`"),
        (json.dumps(GOOD)[:-5], "truncated"),
        (json.dumps({**GOOD, "more": 1}), "unknown field `more`"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "signatures"}), "missing required field `signatures`"),
        (json.dumps({**GOOD, "signatures": "*"}), "Expected `array`"),
        (json.dumps({**GOOD, "builds": [1]}), "Expected `str`"),
        (json.dumps({**GOOD, "name": "other"}), "its name must be the file's"),
        (json.dumps({**GOOD, "avoidance": "no-such"}), "stale-rollback"),
        (json.dumps({**GOOD, "subject": "server"}), "server-ubatch"),
        (json.dumps({**GOOD, "subject": "client"}), "Invalid enum value 'client'"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, text: str, says: str) -> None:
    entry(tmp_path, text)
    with pytest.raises(BadKnown) as e:
        load_all(tmp_path)
    assert str(e.value).startswith("stale-rollback.json: ")
    assert says in str(e.value)
