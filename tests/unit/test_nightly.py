"""The long run, with `redraft` replaced: what its documents and exit codes are made into."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fuzz import nightly
from fuzz.drivers.avoid import DRIVER_AVOIDANCES
from fuzz.known import KnownFault, load_all

KNOWN = [k for k in load_all() if k.subject == "library"]
OF_DRIVERS = [k for k in KNOWN if k.avoidance in DRIVER_AVOIDANCES]
COUNTS = {"scenarios": 9, "per_second": 1.0, "unknown": 0, "unreproduced": 0, "memory_kb": {}}


def finding(known: str | None) -> dict[str, Any]:
    return {"signature": "s", "title": "t", "operations": 1, "reproduced": [3, 3], "path": "p", "known": known}


class Fake(nightly.Run):
    """`found`: what each part's campaign finds, by the part's name."""

    def __init__(self, out: Path, minutes: float, found: dict[str, list[str | None]], known: list[KnownFault] = KNOWN):
        args = argparse.Namespace(minutes=minutes, seed=1, jobs=None, build=None)
        super().__init__(args, out, known, Console(file=io.StringIO()))
        self.built = self.has_server = True
        self.found = found
        self.calls: dict[str, list[str]] = {}

    def call(self, name: str, arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        self.calls[name] = arguments
        new = self.found.get(name, [])
        part = {"name": name, "exit": int(None in new), "seconds": 1.0, "text": ""}
        self.parts.append(part)
        return part, {**COUNTS, "findings": [finding(k) for k in new]} | {"results": []}

    def guided(self) -> bool:
        return self.built

    def no_server(self) -> str:
        return "" if self.has_server else "there is no llama-server"

    def replay(self) -> None:
        self.parts.append({"name": "replay", "exit": 0, "seconds": 0.0, "text": ""})


def run(out: Path, minutes: float = 60, **found: list[str | None]) -> Fake:
    r = Fake(out, minutes, {name.replace("_", "-"): f for name, f in found.items()})
    r.all()
    return r


EVERYTHING: dict[str, list[str | None]] = {
    "canary": [None],
    "canary_driver": [None],
    "canary_server": [None],
    "never": [k.name for k in KNOWN if k not in OF_DRIVERS],
    "drivers_never": [k.name for k in OF_DRIVERS],
}


def test_all_is_well(tmp_path: Path) -> None:
    r = run(tmp_path, **EVERYTHING)
    assert r.exit_code() == 0
    assert [p["name"] for p in r.parts] == [
        "replay", "canary", "canary-driver", "canary-server", "avoid", "never", "drivers", "drivers-never", "coverage",
        "server", "server-drivers",
    ]  # fmt: skip
    assert not [c for c in r.cases if c["state"] != nightly.PASSED]
    planted = r.calls["canary-driver"]
    assert planted[planted.index("--driver") + 1] == "llama-simple"
    assert planted[planted.index("--plant") + 1] == "logits-drift"
    assert planted[planted.index("--avoid") + 1] == "always"


def test_without_a_build_with_counters_the_rest_runs(tmp_path: Path) -> None:
    r = Fake(tmp_path, 60, {name.replace("_", "-"): f for name, f in EVERYTHING.items()})
    r.built = False
    r.all()
    assert r.exit_code() == 0
    assert "coverage" not in r.calls
    assert [(c["name"], c["state"]) for c in r.cases if c["state"] != nightly.PASSED] == [("coverage", nightly.SKIPPED)]


def test_without_a_server_the_rest_runs_and_says_so(tmp_path: Path) -> None:
    r = Fake(tmp_path, 60, {name.replace("_", "-"): f for name, f in EVERYTHING.items()})
    r.has_server = False
    r.all()
    assert r.exit_code() == 0, "a canary that could not be run says nothing of the others"
    parts = ("canary-server", "server", "server-drivers")
    assert not r.calls.keys() & {*parts}
    left_out = [(c["name"], c["state"], c["text"]) for c in r.cases if c["state"] != nightly.PASSED]
    assert left_out == [(p, nightly.SKIPPED, "there is no llama-server") for p in parts]


def test_a_part_is_started_as_people_would(tmp_path: Path) -> None:
    r = run(tmp_path, **EVERYTHING)
    for name in ("canary-server", "server", "server-drivers"):
        at = r.calls[name].index("--subject")
        assert r.calls[name][at + 1] == "server"
    assert r.calls["server-drivers"].count("--driver") == 3
    planted = r.calls["canary-server"]
    assert planted[planted.index("--plant") + 1] == "server-stale"


def test_what_is_stored_of_the_server_is_replayed_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "scenarios"
    folder.mkdir()
    for name in ("known-stale-rollback.json", "known-server-ubatch.json"):
        (folder / name).write_bytes((nightly.SCENARIOS / name).read_bytes())
    monkeypatch.setattr(nightly, "SCENARIOS", folder)
    faults = [k for k in load_all() if k.name in ("stale-rollback", "server-ubatch")]
    for there in (True, False):
        r = Fake(tmp_path, 60, {}, faults)
        r.has_server = there
        nightly.Run.replay(r)
        assert len(r.calls["replay"]) == 2 + there
        skipped = [c["name"] for c in r.cases if c["state"] == nightly.SKIPPED]
        assert skipped == ([] if there else ["known-server-ubatch.json"])


@pytest.mark.parametrize("name", ["canary", "canary_driver", "canary_server"])
@pytest.mark.parametrize("instead", [[], [OF_DRIVERS[0].name]])
def test_a_canary_that_is_not_found_is_exit_2(tmp_path: Path, name: str, instead: list[str | None]) -> None:
    r = run(tmp_path, **{**EVERYTHING, name: instead})
    assert r.exit_code() == 2
    (case,) = [c for c in r.cases if c["state"] == nightly.FAILED]
    assert case["name"] == f"{name.replace('_', '-')}-found"


@pytest.mark.parametrize(
    ("minutes", "part", "state"),
    [
        (29, "never", nightly.SKIPPED),
        (30, "never", nightly.FAILED),
        (119, "drivers_never", nightly.SKIPPED),
        (120, "drivers_never", nightly.FAILED),
    ],
)
def test_a_known_fault_that_is_missed_is_news_of_a_long_run_only(
    tmp_path: Path, minutes: float, part: str, state: str
) -> None:
    gone, *rest = EVERYTHING[part]
    r = run(tmp_path, minutes, **{**EVERYTHING, part: rest})
    assert [(c["name"], c["state"]) for c in r.cases if c["state"] != nightly.PASSED] == [(gone, state)]
    assert r.exit_code() == (1 if state == nightly.FAILED else 0)
