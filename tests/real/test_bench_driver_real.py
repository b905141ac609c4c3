"""ci/bench --driver: the C++ program makes the calls that redraft makes, and gets the same answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.cli.common import Bench

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["qwen35-mtp", "qwen35-eagle3", "llama-simple", "llama-ngram-map-k"])
def test_native_gets_the_answers_that_redraft_got(build: Bench, driver_path: Path, pair: str) -> None:
    # a process of its own, because it pins itself to a core
    command = [sys.executable, "-m", "fuzz.measure.bench", "--driver", "--pair", pair]
    done = subprocess.run(
        [*command, "--scenarios", "12", "--repeat", "1", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    r = json.loads(done.stdout)
    assert r["programs"] == 12 and r["left_out"] == 0
    assert r["differs"] == r["apart_differs"] == r["cold_native"]["differs"] == 0
    same, apart = r["native"][0], r["apart"][0]
    assert 12 < same["blocks"] <= apart["blocks"] and same["blocks"] < r["cold_native"]["blocks"]
    assert same["drafts"] > 12 and same["processed"] > 12 and same["outputs"] > 0
    assert (same["draft_decodes"] > 0) == ("ngram" not in pair)
    assert r["ratio_cpu"]["median"] > 1


def test_a_wrong_core_is_a_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.measure.bench", "--driver", "--cpu", "4095"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2 and "--cpu 4095" in done.stderr
