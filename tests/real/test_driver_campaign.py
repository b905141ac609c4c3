"""A campaign with a driver from end to end: it finds the state that draft-mtp does not offer, small, with all files.

A driver with the state saved does not show it any more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from subjects.scenario import Checkpoint, Rewind, Verify, loads

REDRAFT = str(Path(sys.executable).with_name("redraft"))
PATCH = Path(__file__).resolve().parents[1] / "planted" / "mtp_state.patch"


def redraft(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([REDRAFT, *arguments, "--json"], capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A small campaign's folder and document."""
    out = tmp_path_factory.mktemp("campaign") / "out"
    code, document = redraft(
        "fuzz", "--driver", "qwen35-mtp", "--scenarios", "40", "--jobs", "1", "--seed", "5", "--out", str(out)
    )
    assert code == 0, document["findings"]
    return out, document


def test_the_missing_state_is_found_and_small(found: tuple[Path, dict[str, Any]]) -> None:
    _, document = found
    mine = [f for f in document["findings"] if f["known"] == "driver-unoffered"]
    assert mine and document["unknown"] == 0
    assert min(f["operations"] for f in mine) <= 5
    assert all(f["kind"] == "contract" and f["reproduced"] == [3, 3] for f in mine)


def test_its_folder_can_be_read_and_replayed(found: tuple[Path, dict[str, Any]]) -> None:
    _, document = found
    folder = Path(next(f["path"] for f in document["findings"] if f["known"] == "driver-unoffered"))
    scenario = loads((folder / "scenario.json").read_bytes())
    assert scenario.driver is not None and scenario.driver.kind == "draft-mtp"
    assert any(isinstance(op, Rewind | Verify | Checkpoint) for op in scenario.ops)
    assert (folder / "repro.cpp").exists() and not (folder / "repro.py").exists()
    assert (folder / "README.md").read_text().startswith("speculative.h is silent")
    code, document = redraft("replay", str(folder), "--runs", "1")
    assert code == 1 and [r["verdict"] for r in document["results"]] == ["FAILED"]
    code, document = redraft("replay", str(folder), "--runs", "1", "--driver-patch", str(PATCH))
    assert code == 0 and [r["verdict"] for r in document["results"]] == ["FIXED"]


def test_a_campaign_that_steps_round_is_silent(tmp_path: Path) -> None:
    code, document = redraft(
        "fuzz",
        "--driver",
        "all",
        "--avoid",
        "always",
        "--scenarios",
        "110",
        "--seed",
        "6",
        "--out",
        str(tmp_path / "o"),
    )
    assert code == 0 and document["findings"] == []
    assert document["unknown"] == 0 and document["scenarios"] == 110


def test_what_is_no_pair_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [REDRAFT, "fuzz", "--driver", "qwen-mtp", "--out", str(tmp_path / "o")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "qwen35-mtp" in done.stderr


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"params": {"n_seq_max": 300}}, "n_seq_max must be <= 256"),
        ({"misuse": True, "ops": [{"op": "propose", "seqs": [-1]}]}, "the harness cannot run this: operation 0"),
        ({"ops": []}, "no operation ran"),
        ({"driver": {"kind": "draft-mtp", "draft": {"recipe": "llama"}}}, "llama has no NextN layers"),
    ],
)
def test_what_does_not_run_is_no_fixed(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    decode = {"op": "decode", "parts": [{"seq": 0, "n": 4}]}
    program = {"model": {"recipe": "qwen35"}, "driver": {"kind": "draft-mtp"}, "ops": [decode], **changed}
    (tmp_path / "a.json").write_text(json.dumps(program))
    code, document = redraft("replay", "--runs", "1", str(tmp_path / "a.json"))
    (result,) = document["results"]
    assert (code, result["verdict"]) == (2, "ERROR")
    assert says in result["text"]
