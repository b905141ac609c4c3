"""How soon known faults are found: what counts as small enough."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import MODEL
from rich.console import Console

from fuzz.measure import discovery
from fuzz.measure.discovery import BLOBS, COVERAGE, DRIVER, PLAIN, SERVER, Figure
from subjects.scenario import BlobEdit, Corrupt, ModelRef, Save, Scenario
from subjects.server.scenario import ServerScenario, Turn

EDIT = BlobEdit(how="set", where="recurrent.cell")


def program(*edits: int) -> Scenario:
    """One that saves, and makes so many edits, each time."""
    return Scenario(model=MODEL, ops=(Save(seq=0, slot=0), *(Corrupt(slot=0, edits=(EDIT,) * n) for n in edits)))


def test_the_smallest_program_is_that_with_fewest_operations_then_fewest_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {"a": program(1, 1, 1), "b": program(3), "c": program(2)}
    monkeypatch.setattr(discovery, "load_any", lambda folder: SimpleNamespace(scenario=programs[folder.name]))
    monkeypatch.setattr(discovery, "since_start", lambda out, folder: {"a": 3.0, "b": 2.0, "c": 9.0}[folder.name])
    findings = [{"known": "x", "path": name, "operations": len(p.ops)} for name, p in programs.items()]
    found = discovery.smallest(Figure(("x", "y"), 9.0, 6), tmp_path, [*findings, {"known": None, "path": "d"}])
    assert found == {
        "x": {"seconds": 2.0, "operations": 2, "edits": 2, "largest": 4, "findings": 3},
        "y": None,
    }
    assert discovery.edits_of(Path("a")) == 3


def test_a_finding_of_a_server_is_as_long_as_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = SimpleNamespace(scenario=ServerScenario(model=ModelRef(), requests=(Turn(conv=0),)))
    monkeypatch.setattr(discovery, "load_any", lambda folder: served)
    monkeypatch.setattr(discovery, "since_start", lambda out, folder: 3.0)
    found = discovery.smallest(SERVER, tmp_path, [{"known": SERVER.faults[0], "path": "a", "requests": 1}])
    assert found[SERVER.faults[0]]["operations"] == 1


def trial(seed: int, figure: Figure, **edits: int) -> dict[str, Any]:
    one = {"seconds": 5.0, "operations": 5, "largest": 6, "findings": 1}
    faults = {name: {**one, "edits": edits.get(name.replace("-", "_"), 9)} for name in figure.faults}
    return {"seed": seed, "exit": 0, "scenarios": 9, "per_second": 1.0, "faults": faults, "findings": 9, "new": []}


@pytest.mark.parametrize("figure", [BLOBS, COVERAGE])
def test_malformed_states_are_reduced_to_the_fields_that_matter(figure: Figure) -> None:
    good = discovery.summary([trial(s, figure, recurrent_cells=2) for s in (1, 2)], figure, 60.0)
    assert good["reached"]
    assert good["faults"]["recurrent-cells"]["max_edits"] == 2
    result = discovery.summary([trial(1, figure, recurrent_cells=2), trial(2, figure, recurrent_cells=3)], figure, 60.0)
    assert not result["reached"]
    assert [name for name, f in result["faults"].items() if not f["reached"]] == ["recurrent-cells"]
    out = io.StringIO()
    discovery.show(result, Console(file=out, width=200))
    text = out.getvalue()
    assert "5 s, 5+3" in text
    assert "recurrent-cells at most 2 edits; not so recurrent-cells" in text


@pytest.mark.parametrize("figure", [PLAIN, DRIVER])
def test_other_figures_ask_for_operations_alone(figure: Figure) -> None:
    plain = discovery.summary([trial(1, figure, **{n.replace("-", "_"): 0 for n in figure.faults})], figure, 60.0)
    assert plain["reached"]
    out = io.StringIO()
    discovery.show(plain, Console(file=out, width=200))
    assert "max edits" not in out.getvalue()
    assert "at most" in out.getvalue()
