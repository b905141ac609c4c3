"""The probe on generated models: what a missing driver state costs is seen, and what is put back costs nothing."""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from fuzz.cli import main
from fuzz.cli import probe as verb
from fuzz.cli.common import Bench
from fuzz.probe.measure import ROUTES, Plan
from fuzz.probe.table import ProbeError
from subjects.builds import NoDrivers, driver_library
from subjects.scenario import ContextParams

PATCH = Path(__file__).resolve().parents[1] / "planted" / "mtp_state.patch"
SAVED = {"host", "host-partial", "device", "device-partial", "file"}
NOTHING_TO_DO: dict[str, Any] = {"prompt": [], "other": [], "rounds": 1, "depth": 1, "repeat": 1}
NOTHING = 1e-3
"""Below any difference that a wrong state makes; honest ones of the generated models stay below 1e-5."""


@pytest.fixture
def drivers(build: Bench) -> None:
    try:
        driver_library(build.build)
    except NoDrivers as e:
        pytest.skip(f"no native driver here: {e}")


def measured(out: Path, *args: str, positions: str = "34") -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """The document of a run, and its cells by route and driver state."""
    assert main(["probe", "--positions", positions, "--repeat", "1", "--out", str(out), *args]) == 0
    document = json.loads((out / "probe.json").read_text("utf-8"))
    return document, {(c["route"], c["state"]): c for c in document["cells"]}


def hidden(cell: dict[str, Any]) -> float:
    assert cell["outcome"] == "ok", cell["why"]
    return float(cell["compared"]["hidden"]["max_abs"])


def target(cell: dict[str, Any]) -> float:
    assert cell["outcome"] == "ok", cell["why"]
    return float(cell["compared"]["target"]["max_abs"])


@pytest.mark.usefixtures("drivers")
def test_the_missing_state_of_draft_mtp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, cells = measured(tmp_path, "--model", "qwen35", positions="34,59")
    assert {r for r, _ in cells} == set(ROUTES) and document["unfit"] == {}
    assert "--threads 1 --repeat 1" in document["about"]["command"]
    for c in document["cells"]:
        assert target(c) < NOTHING
        if c["state"] == "restored":
            assert hidden(c) < NOTHING and c["compared"]["changed"] == 0
            assert c["compared"]["accepted"] == c["compared"]["before"]
        elif c["route"] in SAVED | {"rollback"}:
            assert hidden(c) > 0.5 and c["compared"]["changed"] > 0
    # the row at the position is right, the first one of the prompt is not
    replayed = cells["replay", "left out"]["compared"]
    assert replayed["hidden"]["max_abs"] < NOTHING and replayed["changed"] > 0
    assert cells["host", "restored"]["how"] == "kept" and cells["host", "restored"]["driver_bytes"] == 0
    assert cells["host-partial", "restored"]["target_bytes"] < cells["host", "restored"]["target_bytes"]

    with (tmp_path / "probe.csv").open(encoding="utf-8", newline="") as f:
        assert len(list(csv.DictReader(f))) == len(document["cells"])
    text = (tmp_path / "probe.md").read_text("utf-8")
    assert text.count("\n| host-partial |") == 2 and str(tmp_path) not in text
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ET.parse(tmp_path / "probe.svg").getroot().tag.endswith("svg")
    assert "device-partial" in capsys.readouterr().out


@pytest.mark.usefixtures("drivers")
def test_a_driver_that_offers_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ("--model", "qwen35", "--route", "host,host-partial", "--driver-patch", str(PATCH))
    document, cells = measured(tmp_path, *args)
    made = document["about"]["build"]
    assert re.search(r", drivers of the build \(hash [0-9a-f]{16}\), patched with mtp_state.patch$", made), made
    assert document["about"]["command"].endswith(f" --driver-patch DIR/{PATCH.name}")
    assert str(PATCH.parent) not in (tmp_path / "probe.json").read_text("utf-8")
    for route in ("host", "host-partial"):
        restored = cells[route, "restored"]
        assert restored["how"] == "native" and restored["driver_bytes"] > 0
        assert hidden(restored) < NOTHING < 0.5 < hidden(cells[route, "left out"])


@pytest.mark.usefixtures("drivers")
@pytest.mark.parametrize(
    ("args", "how"),
    [
        (("--model", "step35"), "kept"),
        (("--model", "gemma4", "--draft", "gemma4-assistant"), "kept"),
        (("--model", "qwen35", "--draft", "eagle3-qwen35"), "native"),
        (("--model", "llama", "--draft", "eagle3-llama"), "kept"),
    ],
)
def test_other_drivers_with_hidden_rows(args: tuple[str, ...], how: str, tmp_path: Path) -> None:
    _, cells = measured(tmp_path, *args, "--route", "host,rollback,file")
    assert {c["how"] for (_, state), c in cells.items() if state == "restored"} == {how, "accept(0)"}
    for (_, state), c in cells.items():
        assert hidden(c) > 0.5 if state == "left out" else hidden(c) < NOTHING
        assert target(c) < 10 * NOTHING


@pytest.mark.usefixtures("drivers")
def test_a_driver_without_state(tmp_path: Path) -> None:
    _, cells = measured(tmp_path, "--model", "llama-words", "--draft", "llama-draft", "--route", "host,replay")
    for c in cells.values():
        assert c["compared"]["hidden"] is None and c["compared"]["changed"] == 0 and target(c) < NOTHING
        assert c["compared"]["vectors"] == 12


@pytest.mark.parametrize(
    ("model", "unfit"),
    [
        ("llama", {"host-partial", "device-partial"}),
        ("gemma3", set()),
        ("mamba2", {"host-partial", "device-partial", "rollback"}),
    ],
)
def test_models_without_a_head(model: str, unfit: set[str], tmp_path: Path) -> None:
    document, cells = measured(tmp_path, "--model", model)
    assert set(document["unfit"]) == unfit
    assert {r for r, _ in cells} == set(ROUTES) - unfit
    for c in cells.values():
        assert c["state"] == "only" and target(c) < NOTHING and c["compared"]["hidden"] is None


def test_a_file_and_a_prompt_of_ones_own(tmp_path: Path, models_dir: Path) -> None:
    prompt = tmp_path / "tokens.json"
    prompt.write_text(json.dumps(list(range(40))), "utf-8")
    file = tmp_path / "mine.gguf"
    assert main(["models", "write", "llama", str(file)]) == 0
    document, _ = measured(tmp_path / "out", "--model", str(file), "--prompt-tokens", str(prompt), "--route", "host")
    assert document["about"]["model"] == "mine.gguf"
    assert str(tmp_path) not in (tmp_path / "out" / "probe.json").read_text("utf-8")


@pytest.mark.usefixtures("drivers")
@pytest.mark.parametrize(("kind", "n_max"), [("ngram-simple", 2), ("ngram-map-k", 2), ("ngram-cache", 8)])
def test_an_ngram_kind_drafts_as_far_as_is_said(kind: str, n_max: int, tmp_path: Path) -> None:
    asked = ("--model", "llama-loop", "--driver", kind, "--route", "host", "--n-max", "2")
    document, cells = measured(tmp_path, *asked)
    assert document["about"]["n_max"] == document["facts"]["n_draft_max"] == n_max
    assert f" --n-max {n_max} " in document["about"]["command"]
    assert f"driver {kind}, n_max {n_max};" in (tmp_path / "probe.md").read_text("utf-8")
    assert {c["outcome"] for c in cells.values()} == {"ok"}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--model", "llama", "--driver", "draft-mtp"), "llama has no NextN layers"),
        (("--model", "llama", "--driver", "draft-simple"), "add --draft"),
        (("--model", "llama", "--draft", "llama", "--driver", "ngram-mod"), "has no use for a --draft"),
        (("--model", "llama", "--draft", "llama"), " none (no_vocab)"),
        (("--model", "nothing"), "neither a file nor a recipe"),
        (("--model", "llama", "--prompt-tokens", "/dev/null"), "has 0 tokens"),
        (("--model", __file__), "cannot be read as a GGUF file"),
        (("--model", "qwen35", "--driver", "none", "--driver-patch", "/nonexist"), "no driver is probed here"),
        (("--model", "llama", "--llama-src", "/nonexist"), "so --llama-src would do nothing"),
        (("--model", "llama", "--positions", "34,100000"), "llama is made for 512 (llama.context_length)"),
        (("--model", "llama", "--out", f"{__file__}/below"), "no folder"),
    ],
)
def test_what_cannot_work_is_said(
    args: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *args]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_routes_that_do_not_apply_are_no_failure_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", "mamba2", "--route", "rollback", "--positions", "34", "--out", str(tmp_path / "out")]
    assert main(["probe", *asked]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("redraft probe: no route applies to mamba2: rollback: the context keeps 0")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("begun", "kept"), [("baseline: position 34, split", False), ("replay: loading", True)])
def test_a_stop_keeps_what_there_is(
    begun: str,
    kept: bool,
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure = verb.probe

    def stopped(*args: Any) -> Any:
        *most, listen, patience = args

        def stopping(what: str, done: int) -> None:
            listen(what, done)
            if what == begun:
                signal.raise_signal(number)

        return measure(*most, stopping, patience)

    monkeypatch.setattr(verb, "probe", stopped)
    out = tmp_path / "out"
    asked = ["--model", "llama", "--route", "host,replay", "--positions", "34", "--out", str(out)]
    assert main(["probe", *asked]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    if not kept:
        assert said == "redraft probe: stopped; nothing is written" and not out.exists()
        return
    assert said == f"redraft probe: stopped; what was measured so far is in {out}"
    document = json.loads((out / "probe.json").read_text("utf-8"))
    assert document["stopped"] and [(c["route"], c["outcome"]) for c in document["cells"]] == [("host", "ok")]


def test_a_failed_probe_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise ProbeError("nothing can be measured")

    monkeypatch.setattr(verb, "probe", failing)
    assert main(["probe", "--model", "llama", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_the_command_names_paths_as_they_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.ArgumentParser()
    verb.add(args)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    given = ["--model", "models/a.gguf", "--llama-src", "../llama.cpp", "--build", str(tmp_path / "src")]
    given += ["--driver-patch", "patches/mine.patch", "--prompt-tokens", "/elsewhere/tokens.txt"]
    plan = Plan(shim="", drivers="/c/0123456789abcdef-abc.so", model="", params=ContextParams(), **NOTHING_TO_DO)
    parsed = args.parse_args(given)
    command = shlex.split(verb._command(parsed, plan, "draft-mtp"))
    again = args.parse_args(command[2:])
    assert (again.model, again.llama_src, again.build) == ("models/a.gguf", Path("../llama.cpp"), Path("src"))
    assert (again.driver_patch, again.prompt_tokens) == (Path("patches/mine.patch"), Path("DIR/tokens.txt"))
    assert verb._drivers_of(parsed, plan) == (
        ", drivers compiled from the given checkout (hash 0123456789abcdef), patched with mine.patch"
    )
