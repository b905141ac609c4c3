"""Coverage of a real library, where a build for the report is in the cache.

Nothing is built here: `redraft build --coverage report` takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.cli.common import bench
from fuzz.cli.coverage import _judge
from fuzz.coverage import measure, page, table
from fuzz.coverage.measure import CannotMeasure, Source, Tools
from subjects.scenario import loads

SCENARIOS = Path(__file__).resolve().parents[2] / "corpora" / "scenarios"


@pytest.fixture
def build(built: Callable[..., Path]) -> Path:
    return built("report")


@pytest.fixture
def tools() -> Tools:
    try:
        return measure.tools()
    except CannotMeasure as e:
        pytest.skip(str(e))


@pytest.mark.slow
def test_what_aborts_is_measured_and_every_function_of_the_list_is_there(
    build: Path, tools: Tools, tmp_path: Path
) -> None:
    b = bench(build)
    source = Source("corpora", True, tmp_path / "raw")
    # the first ends its process with an assertion, at once
    programs = [loads((SCENARIOS / f"known-{n}.json").read_bytes()) for n in ("ubatch-rollback", "pending-copy")]
    measure.run_programs(programs, lambda p: _judge(b, p), source, print)
    assert source.about == "2 programs", source.notes
    assert len(list(source.folder.glob("*.profraw"))) == 1, "one profile of all processes"
    report = measure.report(b.build.fingerprint, b.build.libllama, [source], tools, tmp_path)
    assert report is not None
    assert report.missing == [], "the list names what this build does not have"
    column = report.columns[report.union]
    found = {f.name: f for f in report.chosen(column)}
    # ended by an assertion in split_equal: its counts are there all the same
    assert found["llama_batch_allocr::split_equal"].lines[found["llama_batch_allocr::split_equal"].first]
    assert any(found["llama_kv_cache::seq_cp"].lines.values())
    assert all(row.shares[0][1].percent is not None for row in table.by_group(report))
    index = page.write(report, tools, tmp_path / "union.profdata", tmp_path / "html")
    assert "llama-kv-cache.cpp.html#L" in index.read_text()
