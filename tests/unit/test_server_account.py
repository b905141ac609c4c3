"""Two answers to one prompt, token by token: what is a difference, what is noise, what is a near tie."""

from __future__ import annotations

import math

import pytest

from oracles.band import FAR
from oracles.server.account import Clean, Held, hold
from subjects.server.runner import _tops
from subjects.server.trace import Reply

Top = tuple[tuple[int, float], ...]
BAND = 1e-3
TOPS: tuple[Top, ...] = (((5, -0.5), (6, -1.0)), ((7, -0.25), (8, -2.0)), ((9, -0.1), (5, -3.0)))
COLD = Reply(request=0, status=200, tokens=(5, 7, 9), tops=TOPS)


def answer(tokens: tuple[int, ...], tops: tuple[Top, ...] = (), **more: bool) -> Held:
    return hold(Reply(request=0, status=200, tokens=tokens, tops=tops, **more), COLD, BAND)  # type: ignore[arg-type]


def moved(row: int, by: float) -> tuple[Top, ...]:
    """The cold server's probabilities, those of one row moved."""
    return tuple(tuple((t, p + by if i == row else p) for t, p in top) for i, top in enumerate(TOPS))


def verdict(h: Held) -> str:
    names = [n for n in ("wrong", "ambiguous", "near_tie", "parted") if getattr(h, n)]
    return "+".join(names) or "equal"


def test_an_equal_answer_is_compared_to_its_end() -> None:
    h = answer((5, 7, 9), TOPS)
    assert verdict(h) == "equal"
    assert (h.compared, h.probable, h.error) == (3, 3, 0.0)


@pytest.mark.parametrize(
    ("by", "expected"),
    [(BAND / 2, "equal"), (BAND * 2, "ambiguous"), (BAND * FAR * 0.99, "ambiguous"), (BAND * FAR * 1.01, "wrong"),
     (-BAND * FAR * 1.01, "wrong"), (math.inf, "wrong"), (math.nan, "wrong")],
)  # fmt: skip
def test_equal_tokens_are_judged_by_their_probabilities(by: float, expected: str) -> None:
    h = answer((5, 7, 9), moved(1, by))
    assert verdict(h) == expected
    assert h.row == 1
    assert (h.token, h.expected) == (7, 7)
    assert not h.parted


def test_another_token_is_judged_by_how_sure_the_cold_server_is() -> None:
    h = answer((5, 8, 1), TOPS)
    assert verdict(h) == "wrong+parted"
    assert (h.row, h.token, h.expected, h.compared) == (1, 8, 7, 2)
    assert h.gap == pytest.approx(1.75)
    # what comes behind was asked of another text, and is not compared
    assert h.error == 0.0


def test_a_token_that_is_not_among_the_most_probable_counts_as_the_least_of_them() -> None:
    assert answer((5, 99, 9), TOPS).gap == pytest.approx(1.75)


@pytest.mark.parametrize(("apart", "expected"), [(1.9, "near_tie"), (2.1, "wrong+parted")])
def test_a_near_tie_is_within_what_both_may_be_off(apart: float, expected: str) -> None:
    cold = Reply(request=0, status=200, tokens=(5,), tops=(((5, -0.7), (6, -0.7 - apart * BAND)),))
    h = hold(Reply(request=0, status=200, tokens=(6,), tops=cold.tops), cold, BAND)
    assert verdict(h) == expected


def test_a_near_tie_with_other_probabilities_is_wrong() -> None:
    cold = Reply(request=0, status=200, tokens=(5,), tops=(((5, -0.7), (6, -0.7)),))
    h = hold(Reply(request=0, status=200, tokens=(6,), tops=(((6, -0.2), (5, -0.7)),)), cold, BAND)
    assert verdict(h) == "wrong+near_tie"


def test_what_was_drafted_has_tokens_only() -> None:
    h = answer((5, 7, 9), (TOPS[0], (), ()))
    assert verdict(h) == "equal"
    assert (h.compared, h.probable) == (3, 1)
    assert verdict(answer((5, 8, 9), (TOPS[0], (), ()))) == "wrong+parted"
    assert verdict(answer((5, 7, 9))) == "equal"


def test_lists_without_a_common_token_are_as_far_off_as_can_be() -> None:
    h = answer((5, 7, 9), (TOPS[0], ((1, -0.25), (2, -2.0)), TOPS[2]))
    assert verdict(h) == "wrong"
    assert (h.row, h.error) == (1, math.inf)


def test_a_probability_that_is_no_number_is_as_far_off_as_can_be() -> None:
    null = _tops({"top_logprobs": [{"id": 7, "logprob": None}, {"id": 8, "logprob": None}]})
    assert verdict(answer((5, 7, 9), (TOPS[0], null, TOPS[2]))) == "wrong"
    # both servers say so: the model does, and nothing was restored wrongly
    cold = Reply(request=0, status=200, tokens=(7,), tops=(null,))
    assert verdict(hold(cold, cold, BAND)) == "equal"
    minus = Reply(request=0, status=200, tokens=(7,), tops=(((7, -math.inf),),))
    assert verdict(hold(minus, minus, BAND)) == "equal"


def test_an_answer_that_ends_elsewhere_is_told() -> None:
    assert not answer((5, 7, 9), TOPS).ends_elsewhere
    assert answer((5, 7), TOPS[:2]).ends_elsewhere
    assert answer((5, 7, 9, 1), TOPS).ends_elsewhere
    # where they part the rest is of another text
    assert not answer((5, 8), TOPS[:2]).ends_elsewhere


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_cancelled_answer_is_compared_as_far_as_it_came(n: int) -> None:
    h = answer((5, 7, 9)[:n], TOPS[:n], cancelled=True)
    assert verdict(h) == "equal"
    assert h.compared == n


@pytest.mark.parametrize(
    ("accepted", "probes", "wrong"),
    [
        (3, (), False),
        (3, ((3, 6), (2, 5)), True),
        (3, ((3, 6), (5, 5)), False),
        (3, ((3, 6), (2, 3), (9, 5)), False),
        (6, ((3, 6), (2, 5)), False),
    ],
)
def test_lost_drafts_show_with_other_continuations_too(
    accepted: int, probes: tuple[tuple[int, int], ...], wrong: bool
) -> None:
    clean = Clean(Reply(request=0, accepted=accepted), Reply(request=0, accepted=6), probes)
    assert clean.drop == 6 - accepted
    assert clean.wrong is wrong
