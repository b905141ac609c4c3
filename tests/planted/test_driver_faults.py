"""Drivers with planted faults: each switch of the one in Python is caught by the oracle meant for it.

Without them it is silent, and so is the one of llama.cpp with the state that tests/planted/mtp_state.patch gives it;
without that it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.cli.common import Bench
from fuzz.drivers.gen import strategy
from fuzz.models import Model, from_pair, with_impl
from fuzz.strategies import generate
from oracles.judge import Judge
from oracles.registry import ORACLES
from subjects import pairs
from subjects.builds import driver_library
from subjects.drivers.reference import LEAVE_OUT
from subjects.sandbox import Sandbox
from subjects.scenario import Scenario

PATCH = Path(__file__).with_name("mtp_state.patch")
SEED, MOST = 7, 100
MTP = ("qwen35-mtp", "step35-mtp", "gemma4-mtp")
# the pair that shows it, and the oracle that must be the one that reports
MEANT = {
    "pending-row": ("qwen35-mtp", "pending_row"),
    "verify-rows": ("step35-mtp", "verify_rows"),
    "other-sequence": ("qwen35-mtp", "driver_isolation"),
    "unchecked": ("step35-mtp", "driver_state"),
    "silent-refusal": ("gemma4-mtp", "driver_state"),
    "refusal-clears": ("step35-mtp", "driver_state"),
    "limit-n-batch": ("step35-mtp", "pending_row"),
    "save-consumes": ("step35-mtp", "round_drafts"),
    "stale-first-row": ("qwen35-mtp", "driver_isolation"),
    "neighbour-row": ("step35-mtp", "drafting"),
    "first-head-only": ("step35-mtp", "drafting"),
    "draft-moves-pending": ("qwen35-mtp", "drafting"),
    "accept-off-by-one": ("qwen35-mtp", "round_drafts"),
    "ignore-limit": ("gemma4-mtp", "drafting"),
}
# planted into the calls of llama.h (subjects.planted)
SHIM = {"rollback-off-by-one": "agreement", "logits-drift": "greedy", "restored-values": "redraft"}


@pytest.fixture(scope="module")
def judges(build: Bench) -> Iterator[dict[tuple[str, bool], tuple[Judge, Model]]]:
    """Judge and model of each MTP pair, with llama.cpp's drivers and with patched ones."""
    made = {}
    opened = []
    for patched in (False, True):
        library = driver_library(build.build, patch=PATCH) if patched else build.driver
        for name in MTP:
            model = from_pair(pairs.get(name), build.models)
            sandbox = Sandbox(build.shim, [(Path(model.path), 0)], driver=library, drafts=model.drafts())
            opened.append(sandbox)
            judge = Judge(sandbox, model.ref, Path(model.path), build.build.fingerprint, build.cache)
            made[name, patched] = judge, model
    yield made
    for sandbox in opened:
        sandbox.close()


def programs(model: Model, count: int, *avoid: str) -> list[Scenario]:
    """The same programs every time."""
    assert model.driver is not None
    return generate(strategy(model.ref, model.driver, model.traits, model.n_rs, avoid), SEED, count)


def test_every_switch_has_an_oracle_and_every_oracle_a_fault() -> None:
    assert set(MEANT) == set(LEAVE_OUT)
    # two_drivers: the last test here; driver_contract: llama.cpp's own
    tried = {oracle for _, oracle in MEANT.values()} | set(SHIM.values()) | {"two_drivers", "driver_contract"}
    assert tried == {o.name for o in ORACLES if o.driver}


@pytest.mark.parametrize("fault", SHIM)
def test_a_fault_of_the_library_itself_is_reported(
    fault: str, judges: dict[tuple[str, bool], tuple[Judge, Model]]
) -> None:
    judge, model = judges["step35-mtp", True]
    for program in programs(model, MOST):
        violations = judge.judge(program, fresh=True, fault=fault, variants=False).violations
        if violations and violations[0].oracle == SHIM[fault]:
            return
    pytest.fail(f"{SHIM[fault]} never reported")


@pytest.mark.parametrize("switch", LEAVE_OUT)
def test_a_part_that_is_left_out_is_reported_by_the_oracle_meant_for_it(
    switch: str, judges: dict[tuple[str, bool], tuple[Judge, Model]]
) -> None:
    name, oracle = MEANT[switch]
    judge, model = judges[name, False]
    seen: dict[str, int] = {}
    # a cut is no part of it: llama.cpp's draft-mtp, which the one in Python is like, is not told of any
    for program in programs(with_impl(model, "reference"), MOST, "driver-cut"):
        violations = judge.judge(program, fresh=True, fault=switch, variants=False).violations
        if violations:
            seen[violations[0].oracle] = seen.get(violations[0].oracle, 0) + 1
            if violations[0].oracle == oracle:
                return
    pytest.fail(f"{oracle} never reported; reported were {seen}")


@pytest.mark.parametrize("name", MTP)
def test_the_sound_driver_is_silent(name: str, judges: dict[tuple[str, bool], tuple[Judge, Model]]) -> None:
    judge, model = judges[name, False]
    for program in programs(with_impl(model, "reference"), MOST, "driver-cut"):
        judgement = judge.judge(program, fresh=True, variants=False)
        assert judgement.violations == [], judgement.violations[0].because
        assert judgement.judged


@pytest.mark.parametrize("name", MTP)
def test_with_its_state_saved_llama_cpp_is_silent(
    name: str, judges: dict[tuple[str, bool], tuple[Judge, Model]]
) -> None:
    judge, model = judges[name, True]
    for program in programs(model, MOST):
        judgement = judge.judge(program, fresh=True, variants=False)
        assert judgement.violations == [], judgement.violations[0].because
        assert judgement.judged


@pytest.mark.parametrize("name", MTP)
def test_without_it_is_not(name: str, judges: dict[tuple[str, bool], tuple[Judge, Model]]) -> None:
    judge, model = judges[name, False]
    keys: set[str] = set()
    for program in programs(model, MOST):
        keys |= {v.key for v in judge.judge(program, fresh=True, variants=False).violations}
        if "driver_contract:draft-mtp:unoffered" in keys:
            return
    pytest.fail(f"the missing state was not found, but {keys}")


@pytest.mark.parametrize("name", MTP)
def test_both_drivers_draft_the_same(name: str, judges: dict[tuple[str, bool], tuple[Judge, Model]]) -> None:
    judge, model = judges[name, False]
    compared = 0
    for program in programs(model, 40, "driver-fresh"):
        judgement = judge.judge(program, fresh=True, variants=True)
        mine = [v for v in judgement.verdicts if v.oracle == "two_drivers"]
        assert not any(v.violations for v in mine), mine
        compared += sum(v.compared for v in mine)
    assert compared > 40


def test_a_driver_that_drafts_otherwise_is_told_apart(judges: dict[tuple[str, bool], tuple[Judge, Model]]) -> None:
    judge, model = judges["qwen35-mtp", False]
    for program in programs(model, 40, "driver-fresh"):
        # the switch is one of the driver in Python, so only that one has it
        judgement = judge.judge(program, fresh=True, variants=True, fault="accept-off-by-one")
        if any(v.oracle == "two_drivers" for v in judgement.violations):
            return
    pytest.fail("both were taken for the same")
