#!/usr/bin/env python3
"""Whole programs, from bytes through the strategies of the other engine (Hypothesis' fuzz_one_input), all oracles on.

Takes libFuzzer's options; see `redraft fuzz --engine coverage`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from hypothesis import HealthCheck, given, settings

from fuzz.models import Model
from fuzz.strategies import scenarios
from fuzz.targets.judged import JudgedTarget
from fuzz.targets.run import main
from subjects.scenario import Scenario


@cache
def _reader(model: Model) -> tuple[Callable[[bytes], object], list[Scenario]]:
    """What reads the bytes of an input, and where it leaves the program."""
    found: list[Scenario] = []

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(scenarios(model.ref, model.traits))
    def collect(scenario: Scenario) -> None:
        found.append(scenario)

    return collect.hypothesis.fuzz_one_input, found  # type: ignore[attr-defined]


def make(data: bytes, model: Model) -> Scenario | None:
    """The program that bytes stand for; None where they are too few."""
    read, found = _reader(model)
    found.clear()
    read(data)
    return found[-1] if found else None


TARGET = JudgedTarget("scenario", make)

if __name__ == "__main__":
    main(TARGET)
