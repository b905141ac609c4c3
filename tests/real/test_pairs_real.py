"""Every pair of target and draft does with the real driver what is said of it, and can show a wrong restore."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from fuzz.measure.pairs import ROUNDS, SEQUENCES, measure
from subjects import pairs
from subjects.sources import NoDrivers

CASES = [(pair.name, m.seed) for pair in pairs.all_pairs() for m in pair.measured]


@cache
def _results() -> dict[tuple[str, int], dict[str, Any]]:
    """All of it in one child, which takes about 3 s."""
    seeds = sorted({seed for _, seed in CASES})
    try:
        return {(r["pair"], r["seed"]): r for r in measure(pairs.names(), seeds)}
    except NoDrivers as e:
        pytest.skip(f"no native driver here: {e}")


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_pair_is_what_is_said_of_it(name: str, seed: int) -> None:
    pair, result = pairs.get(name), _results()[name, seed]
    said = next(m for m in pair.measured if m.seed == seed)
    assert result["greedy"], "drafts must not change the text"
    assert (result["lag"], result["offers_state"]) == (pair.lag, pair.offers_state)
    assert len(result["accepted"]) == pair.n_max + 1
    assert sum(result["accepted"]) == ROUNDS * SEQUENCES
    # Another processor rounds otherwise, and after one other token a text is another text.
    moved = sum(abs(a - b) for a, b in zip(result["accepted"], said.accepted, strict=True)) / 2
    assert moved <= 0.2 * ROUNDS * SEQUENCES
    for now, then in ((result["hidden"], said.hidden), (result["memory"], said.memory)):
        assert (now is None) == (then is None)
        assert now is None or abs(now - then) <= pairs.SAMPLES // 8


@pytest.mark.parametrize(("name", "seed"), [(n, s) for n, s in CASES if pairs.get(n).has_draft_context])
def test_pair_can_show_a_wrong_restore(name: str, seed: int) -> None:
    result = _results()[name, seed]
    assert all(result["accepted"]), "every number of accepted tokens occurs"
    for changed in (result["hidden"], result["memory"]):
        assert changed is None or changed >= pairs.SAMPLES // 4
