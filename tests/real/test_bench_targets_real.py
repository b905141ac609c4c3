"""ci/bench --targets: both sides run, and come to comparable work."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.measure import targets
from subjects import instrument
from subjects.shimcache import BadBuild


@pytest.fixture(scope="module")
def sides(built: Callable[..., Path]) -> targets.Sides:
    """What is in the cache; skips where the instrumented build, or what it takes to use it, is not there."""
    try:
        return targets.sides(built("fuzzer", instrument.SANITIZERS))
    except BadBuild as e:
        pytest.skip(str(e))


@pytest.mark.slow
def test_both_sides_try_states_of_every_model(
    sides: targets.Sides, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "WARM", 120)
    run = targets.Slice(sides, "session_file", 1.0, tmp_path)
    for counts, _ in (run.redraft(3), run.harness(3)):
        assert 0 < counts.of()[1] < 3 and counts.wall > 0
        assert counts.of(outcomes=("refused",))[0] > 20 and counts.of(outcomes=("taken",))[0] > 5
        assert sum(counts.of(model=i)[0] > 0 for i in range(len(sides.models))) >= 4
        assert counts.executions >= 120 + counts.of()[0]
