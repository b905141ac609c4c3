"""What the generator makes is really judged: few programs end without a comparison, hardly a step is skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from fuzz.avoid import AVOIDANCES, Avoider
from fuzz.models import DEFAULT, Model
from fuzz.state import State
from fuzz.strategies import generate, scenarios
from oracles.judge import Judge
from subjects.contracts import FORMS, forms_of
from subjects.driver_contracts import DRIVER_CONTRACTS
from subjects.scenario import OP_NAMES

JudgeOf = Callable[..., tuple[Judge, Model]]
PROGRAMS = 300
LATE = 40  # programs of another seed, with every query-purity variant run


@pytest.mark.parametrize("recipe", DEFAULT)
def test_generated_programs_are_judged_and_sound(recipe: str, judge_of: JudgeOf) -> None:
    judge, model = judge_of(recipe)
    programs = generate(scenarios(model.ref, model.traits, avoid=Avoider(AVOIDANCES)), 31, PROGRAMS)
    assert len(programs) == PROGRAMS
    unjudged, skipped, steps, rows, ambiguous = [], 0, 0, 0, 0
    forms: Counter[str] = Counter()
    for program in programs:
        judgement = judge.judge(program)
        assert judgement.violations == [], (judgement.violations[0].because, program.ops)
        trace = judgement.account.ledger.trace
        assert trace.end.how == "ok"
        if not judgement.judged:
            unjudged.append(judgement.unknown)
        steps += len(trace.steps)
        skipped += sum(bool(s.skipped) for s in trace.steps)
        rows += len(judgement.account.compared)
        ambiguous += sum(c.ambiguous for c in judgement.account.compared)
        state = State(model.traits, program.params)
        for op in program.ops:
            tag = str(type(op).__struct_config__.tag)
            forms.update(f"{tag}: {form}" for form in forms_of(op, state))
            state.apply(op)
    assert len(unjudged) < 0.05 * PROGRAMS, unjudged[:3]
    assert skipped <= 0.01 * steps
    assert rows > 5 * PROGRAMS
    assert ambiguous < 0.01 * rows
    # nearly all that is executed at all is judged in these 300; test_strategies has the whole table, form by form
    executed = {name.partition(":")[0] for name in forms}
    assert executed >= set(OP_NAMES) - {c.op for c in DRIVER_CONTRACTS} - (
        {"seq_add", "seq_div"} if not model.traits.can_shift else set()
    )
    assert len(forms) > 0.5 * sum(len(f) for op, f in FORMS.items() if op in executed)


@pytest.mark.parametrize("recipe", DEFAULT)
def test_variants_are_silent_too(recipe: str, judge_of: JudgeOf) -> None:
    judge, model = judge_of(recipe)
    compared = 0
    for program in generate(scenarios(model.ref, model.traits, avoid=Avoider(AVOIDANCES)), 32, LATE):
        judgement = judge.judge(program, variants=True)
        assert judgement.violations == [], (judgement.violations[0].because, program.ops)
        compared += any(v.compared for v in judgement.verdicts if v.oracle == "purity")
    assert compared > 0.9 * LATE
