#!/usr/bin/env python3
"""Malformed states of speculative drivers: checkpoints whose driver's part was changed, and what is drafted after them.

Takes libFuzzer's options; see `redraft fuzz --engine coverage`.
"""

from __future__ import annotations

from fuzz.drivers.gen import Gen, draw_params
from fuzz.drivers.state import Rounds
from fuzz.models import Model
from fuzz.targets.draw import Bytes
from fuzz.targets.judged import JudgedTarget
from fuzz.targets.run import main
from subjects.scenario import Scenario

_WORK = ("round", "trip", "feed", "rewind", "propose", "reopen")


def make(data: bytes, model: Model) -> Scenario | None:
    """The program that bytes stand for: work, states that no driver may take, work in between, drafts."""
    if model.driver is None:
        return None
    b = Bytes(data)
    params, driver = draw_params(b.below, model.driver, model.traits, model.n_rs)
    gen = Gen(b.below, Rounds(model.traits, params, driver))
    gen.feed(0)
    for _ in range(1 + b.below(2)):
        for _ in range(b.below(3)):
            getattr(gen, f"m_{_WORK[b.below(len(_WORK))]}")()
        gen.m_mangle()
    gen.settle()
    return Scenario(model=model.ref, params=params, driver=driver, ops=tuple(gen.ops))


TARGET = JudgedTarget("driver_state", make)

if __name__ == "__main__":
    main(TARGET)
