"""Hypothesis strategies: valid programs by construction.

A program is a walk over `fuzz.state`: parameters first, then moves (`fuzz.moves`), each of which appends one operation
or a short idiom that keeps the contract table. Swarm testing: every program draws its own weights for the kinds of
move, many of them zero, so that programs differ in kind and not only in detail (Groce et al., "Swarm testing", ISSTA
2012).

Every draw has its simplest value first, and the value 0 of the draw that picks the next move ends the program, so that
programs shrink well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzz.avoid import Avoider
from fuzz.gen import Gen
from fuzz.moves import MOVES
from fuzz.params import draw_params
from fuzz.state import State, Traits
from fuzz.walk import drawn
from subjects.scenario import AnyOp, ContextParams, ModelRef, Scenario

_RANDOM = st.randoms(use_true_random=False)
# weight of a kind of move in a program, by two bits of the swarm draw; for 0, the simplest, all kinds are there
_SWARM = (2, 0, 1, 5)
PALETTE = 5
# how likely a program ends before its next move, in 1/64, by the number of operations it has
_STOP = (0, 1, 1, 3, 4, 6, 9, 12, 16, 20, 26, 32)


@st.composite
def _scenarios(
    draw: Callable[..., Any],
    model: ModelRef,
    traits: Traits,
    max_ops: int,
    avoid: Avoider | None,
    misuse: bool,
    params_from: Sequence[ContextParams],
) -> Scenario:
    # Hypothesis' own random: its draws are choices of the engine like any other and shrink to 0, but without a span
    # each. With spans the engine's mutator copies single numbers over others of their kind: a quarter of the programs
    # were repeats of their neighbour.
    rnd = draw(_RANDOM)

    def below(n: int) -> int:
        return int(rnd.randrange(n)) if n > 1 else 0

    params = params_from[below(len(params_from))] if params_from else draw_params(below, traits, avoid)
    gen = Gen(below, State(traits, params), avoid)
    # nine moves a draw: Hypothesis prefers small values in ranges of more than 24 bits
    swarm = [below(1 << 18) for _ in range(-(-len(MOVES) // 9))]
    table = [
        (m, m.weight * _SWARM[(swarm[i // 9] >> (2 * (i % 9))) & 3] if m.swarm else 2 * m.weight)
        for i, m in enumerate(MOVES)
    ]
    while len(gen.ops) < max_ops:
        ready = [(m, w) for m, w in table if w and m.ready(gen)]
        move = drawn(below, ready, _STOP, len(gen.ops))
        if move is None:
            break
        move.emit(gen)
    gen.settle()
    if misuse:
        gen.misuse()
    ops: tuple[AnyOp, ...] = tuple(gen.ops)
    scenario = Scenario(model=model, params=params, ops=ops, misuse=misuse)
    return avoid.repair(scenario, traits) if avoid is not None else scenario


def scenarios(
    model: ModelRef,
    traits: Traits,
    *,
    max_ops: int = 12,
    avoid: Avoider | None = None,
    misuse: bool = False,
    params_from: Sequence[ContextParams] = (),
) -> SearchStrategy[Scenario]:
    """Programs for one model. They keep every precondition; with `misuse` exactly one is broken, by the last operation.

    params_from: what the first context of each program has (see `palette`); drawn for each program when empty. A move
    may append a few operations, so that a program can be up to four longer than `max_ops`.
    """
    return _scenarios(model, traits, max_ops, avoid, misuse, tuple(params_from))


def palette(traits: Traits, seed_: int, avoid: Avoider | None = None) -> tuple[ContextParams, ...]:
    """The few parameters that a slice of programs shares, so that contexts can be pooled and references met again.

    Which ones changes from slice to slice: over a campaign they are as varied as if each program drew its own.
    """
    rnd = random.Random(seed_)
    return tuple(draw_params(lambda n: rnd.randrange(n) if n > 1 else 0, traits, avoid) for _ in range(PALETTE))


P = TypeVar("P")


def generate(strategy: SearchStrategy[P], seed_: int, count: int) -> list[P]:
    """`count` programs, the same ones for the same seed on any machine.

    Call it in slices of a few hundred: Hypothesis keeps about 20 KB per example of one call. All settings are given,
    since with CI in the environment Hypothesis' own `ci` profile is active and would derandomise.
    """
    found: list[P] = []

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @seed(seed_)
    @given(strategy)
    def collect(program: P) -> None:
        found.append(program)

    collect()
    return found
