"""What is measured of llama-server: counted right, told right, and the exit codes."""

from __future__ import annotations

import argparse
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from server_fakes import model

from fuzz.measure import bench, discovery, server, soundness
from fuzz.measure.discovery import Stop
from fuzz.measure.server import SETTINGS, measure, rate, show
from fuzz.measure.server_child import Asked, Told, all_programs
from fuzz.measure.stopping import like_ctrl_c
from fuzz.server.flags import FLAG_SETS
from subjects.scenario import BlobEdit, DriverParams, ModelRef
from subjects.server.build import ServerBuild
from subjects.server.scenario import DamageFile, ServerScenario, Turn

BUILD = ServerBuild(Path("llama-server"), "f", "llama-server of a test", "1")
FOUND = {"signature": "server-answer/hybrid", "title": "another answer", "known": None, "path": "p"}


def asked(job: int = 0, **fields: Any) -> Asked:
    return Asked("checked", "llama-server", "f", model("qwen35", **fields), "cache", 1, job, 2, 5.0)


def take(a: Asked, n: int) -> list[str]:
    programs = all_programs(a)
    return [next(programs).key() for _ in range(n)]


def test_a_signal_to_end_is_taken_as_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        like_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_jobs_are_ended_before_their_folder_goes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        server.end([child])
        assert child.returncode == -signal.SIGTERM


def test_jobs_have_programs_of_their_own_and_the_same_every_time() -> None:
    assert take(asked(), 30) == take(asked(), 30)
    assert not {*take(asked(), 30)} & {*take(asked(1), 30)}


def test_programs_step_round_known_faults() -> None:
    programs = all_programs(asked(driver=DriverParams(kind="draft-mtp")))
    for _ in range(30):
        program = next(programs)
        assert program.driver is not None
        assert min(program.flags.ubatch, program.flags.batch) > program.driver.n_max + 1


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    def jobs(how: str, *_: object) -> list[Told]:
        if how == "plain":
            return [Told(requests=100, seconds=1.0), Told(requests=400, seconds=4.0)]
        return [
            Told(requests=70, programs=4, seconds=2.0, violated={"server-answer: tokens": 1}, unknown={"r": 2}),
            Told(requests=70, programs=5, seconds=2.0, unknown={"r": 1}),
        ]

    monkeypatch.setattr(server, "jobs", jobs)
    monkeypatch.setattr(server, "find_server", lambda: BUILD)
    monkeypatch.setattr(server, "SETTINGS", tuple(server.Setting(s.name, lambda _: model(), s.limit) for s in SETTINGS))


def test_rates_of_jobs_that_run_side_by_side_add_up() -> None:
    assert rate([Told(requests=10, seconds=2.0), Told(requests=30, seconds=3.0), Told()]) == 15.0


@pytest.mark.usefixtures("told")
def test_both_sides_and_their_ratio_are_told() -> None:
    args = argparse.Namespace(repeat=2, seed=1, seconds=2.0)
    found = measure(server.SETTINGS[0], BUILD, args)
    assert found["per_second"]["median"] == 70.0
    assert found["plain"]["median"] == 200.0
    assert found["ratio"]["median"] == pytest.approx(0.35)
    assert (found["requests"], found["programs"], found["reached"]) == (280, 18, True)
    assert found["violated"] == {"server-answer: tokens": 2}
    assert found["unknown"] == {"r": 6}
    text = show(server.bench(args))
    assert "wrong in 2 programs: server-answer: tokens" in text
    assert text.count("reached") == 2


@pytest.mark.usefixtures("told")
def test_a_figure_that_is_missed_ends_with_1_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--server", "--repeat", "1", "--json"]
    assert bench.main([*arguments, "--check"]) == 0
    assert [s["reached"] for s in json.loads(capsys.readouterr().out)["settings"]] == [True, True]
    monkeypatch.setattr(server, "jobs", lambda *_: [Told(requests=20, seconds=1.0)])
    assert bench.main([*arguments, "--check"]) == 1
    assert bench.main(arguments) == 0


def test_of_three_things_to_measure_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        bench.main(["--server", "--driver"])
    assert e.value.code == 2
    assert "--targets, --driver and --server: name one" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Soundness


def document(*findings: dict[str, Any]) -> dict[str, Any]:
    return {
        "findings": [{**FOUND, "text": "long"} | f for f in findings], "requests": 150, "scenarios": 12, "seconds": 2.0,
        "reasons": {"no reason": 3}, "unreproduced": 0, "coverage": {"turn/dense": 9},
        "deeds": {"kept": 7, "loaded": 2},
    }  # fmt: skip


def test_what_is_known_is_not_new() -> None:
    s = soundness.summary("flash", {"llama": document({}), "qwen35": document({"known": "server-ubatch"})})
    assert s["new"] == [FOUND]
    assert (s["requests"], s["shares"]) == (300, {"llama": 150, "qwen35": 150})
    assert [f["known"] for f in s["known"]] == ["server-ubatch"]
    out = io.StringIO()
    result = {"server": "s", "models": ["llama"], "sets": [s], "new": [FOUND["signature"]]}
    soundness.show(result, Console(file=out, width=100))
    text = out.getvalue()
    assert "14 kept, 4 loaded" in text
    assert "not judged in 6 programs: no reason" in text
    assert "new with flash: another answer  (server-answer/hybrid)" in text
    assert soundness.line(s).startswith("flash: 300 requests of 24 programs, 1 new findings")


@pytest.mark.parametrize("findings", [(), ({"known": "server-ubatch"},), ({},)])
def test_every_set_of_flags_is_checked(
    findings: tuple[dict[str, Any], ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, str, int]] = []

    def checked(_args: argparse.Namespace, flags: str, name: str, requests: int, _out: Path) -> dict[str, Any]:
        seen.append((flags, name, requests))
        return document(*findings)

    monkeypatch.setattr(soundness, "checked", checked)
    monkeypatch.setattr(soundness, "find_server", lambda: BUILD)
    monkeypatch.setattr(sys, "argv", ["ci/soundness", "--json"])
    assert soundness.main() == int(findings == ({},))
    assert seen == [(flags, name, 3334) for flags in FLAG_SETS for name in ("llama", "gemma3", "qwen35")]
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] == 3 * 150 * len(FLAG_SETS)


def test_a_campaign_that_cannot_be_run_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soundness, "find_server", lambda: BUILD)
    monkeypatch.setattr(soundness, "REDRAFT", "/bin/false")
    monkeypatch.setattr(sys, "argv", ["ci/soundness", "--requests", "1"])
    assert soundness.main() == 2
    assert "the campaign with plain on llama ended with 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "requests", "why"),
    [(0, 150, ""), (1, 151, ""), (3, 150, "ended with 3"), (0, 149, "checked 149 requests of 150")],
)
def test_a_campaign_that_checked_less_says_nothing(
    code: int, requests: int, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "redraft"
    script.write_text(f"#!/bin/sh\necho '{json.dumps(document() | {'requests': requests})}'\nexit {code}\n", "utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(soundness, "REDRAFT", str(script))
    args = argparse.Namespace(seed=1, jobs=None)
    if why:
        with pytest.raises(soundness.Stop, match=why):
            soundness.checked(args, "plain", "llama", 150, tmp_path)
    else:
        assert soundness.checked(args, "plain", "llama", 150, tmp_path)["requests"] == requests


# ---------------------------------------------------------------------------------------------------------------------
# Discovery


def test_edits_of_a_server_s_program_are_those_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = (BlobEdit(how="flip"),) * 2
    program = ServerScenario(model=ModelRef(recipe="llama"), requests=(Turn(conv=0), DamageFile(0, edits)))
    monkeypatch.setattr(discovery, "load_any", lambda _: argparse.Namespace(scenario=program))
    assert discovery.edits_of(Path("a")) == 2


def test_other_faults_of_the_server_are_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "load_all", list)
    with pytest.raises(Stop, match="corpora/known has no other fault of llama-server"):
        discovery.server_others()
