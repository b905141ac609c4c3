"""Campaigns as people run them: the command in a process of its own, on a real libllama, a few dozen programs each."""

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from campaigns import ROOT, Command, document

from fuzz import finding
from fuzz.job import make
from fuzz.known import load_all
from fuzz.loop import JobConfig
from oracles.verdict import Check, Violation
from subjects.planted import CANARY
from subjects.scenario import Ask, ModelRef, Scenario
from subjects.trace import End, Trace

# on one model, in one process, one planted fault and nothing else
PLANTED = ("fuzz", "--model", "llama", "--plant", CANARY, "--avoid", "always", "--seed", "3", "--reduce-seconds", "60")
REAL = ("fuzz", "--model", "llama", "--avoid", "never", "--seed", "3", "--reduce-seconds", "60")
KEYS = {"seed", "jobs", "scenarios", "per_second", "seconds", "unknown", "unreproduced", "interrupted", "reasons"}
KEYS |= {"coverage", "memory_kb", "findings"}
FINDING_KEYS = {"signature", "title", "kind", "oracle", "memory", "known", "reproduced", "operations", "path"}
# nothing here waits by the clock for what should happen, only for what must not take for ever
PATIENCE = 120.0
redraft = Command(PATIENCE)


def signatures(value: dict[str, Any]) -> set[str]:
    return {f["signature"] for f in value["findings"]}


def whole(out: Path) -> None:
    """Everything that was found can be read, and nothing half-made is there."""
    for folder in (out / "findings").iterdir():
        finding.load(folder)
        finding.load_traces(folder)
    assert not [p for p in out.rglob("*") if p.name.startswith((".new-", ".old-", "pending-"))]


def test_nothing_new_is_exit_0(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = document(
        redraft(
            "fuzz", "--model", "mamba2", "--avoid", "always", "--scenarios", 60, "--seed", 3, "--out", out, "--json"
        ),
        0,
    )
    assert done["findings"] == []
    assert done["scenarios"] >= 60
    assert done["unknown"] < done["scenarios"]


def test_planted_fault_is_exit_1_and_the_seed_fixes_what_is_generated(tmp_path: Path) -> None:
    args = (*PLANTED, "--jobs", 2, "--scenarios", 24)
    one = document(redraft(*args, "--out", tmp_path / "one", "--json"), 1)
    two = document(redraft(*args, "--out", tmp_path / "two", "--json"), 1)
    assert set(one) >= KEYS
    assert all(set(f) >= FINDING_KEYS for f in one["findings"])
    assert all(f["known"] is None and Path(f["path"]).is_dir() for f in one["findings"])
    assert one["findings"]
    assert (one["seed"], one["jobs"], one["interrupted"]) == (3, 2, False)
    assert one["scenarios"] == 24
    assert one["coverage"] == two["coverage"]
    assert signatures(one) == signatures(two)
    whole(tmp_path / "one")

    # goes on where it was, keeps what it has, and says so
    more = document(redraft(*args[:-1], 30, "--out", tmp_path / "one", "--resume", "--fail-on", "never", "--json"), 0)
    assert more["scenarios"] == 30
    assert signatures(more) >= signatures(one)
    whole(tmp_path / "one")

    # what is planted is not in the build: a replay does not show it
    replayed = redraft("replay", one["findings"][0]["path"], "--json")
    assert {r["verdict"] for r in document(replayed, 0)["results"]} == {"FIXED"}

    other = redraft(*args, "--out", tmp_path / "one", "--resume", "--misuse")
    assert other.returncode == 2
    assert "started with other values of misuse" in " ".join(other.stderr.split())


def test_relative_paths_are_of_the_directory_it_is_started_in(tmp_path: Path) -> None:
    done = document(redraft(*PLANTED, "--jobs", 1, "--scenarios", 20, "--out", "mine", "--json", cwd=tmp_path), 1)
    assert {p.name for p in (tmp_path / "mine").iterdir()} == {"campaign.json", "findings", "state"}
    assert all((tmp_path / f["path"]).is_dir() for f in done["findings"])
    assert not (ROOT / "mine").exists()


def test_usage_errors_are_exit_2_with_a_message_and_nothing_on_stdout(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF that is none")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "campaign.json").write_text("{}")
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "campaign.json").write_text("{")
    cases = {
        ("--model", "no-such-model"): "no-such-model",
        ("--model", tmp_path / "broken.gguf"): "broken.gguf",
        ("--plant", "no-such-fault"): CANARY,
        ("--resume", "--out", tmp_path / "never-begun"): "no campaign",
        ("--out", tmp_path / "used"): "--resume",
        ("--resume", "--out", tmp_path / "damaged"): "damaged",
        ("--out", tmp_path / "file"): "cannot write",
        ("--scenarios", "0"): "at least 1",
    }
    for args, message in cases.items():
        done = redraft("fuzz", "--scenarios", 5, "--out", tmp_path / "out", *args, "--json")
        assert (done.returncode, done.stdout) == (2, ""), (args, done.stderr)
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_nothing_judged_is_exit_3(tmp_path: Path) -> None:
    done = document(redraft("fuzz", "--model", "llama", "--minutes", "0.00001", "--out", tmp_path / "out", "--json"), 3)
    assert (done["scenarios"], done["findings"]) == (0, [])


def test_ctrl_c_is_exit_130_and_keeps_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with redraft.running(*PLANTED, "--jobs", 2, "--scenarios", 100_000, "--out", out, "--json") as process:
        until = time.monotonic() + PATIENCE
        while not any(out.glob("findings/[!.]*")) and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        text = process.stdout.read()
        assert process.wait(PATIENCE) == 130
    done = json.loads(text)
    assert done["interrupted"] is True
    assert signatures(done)
    assert {Path(f["path"]).name for f in done["findings"]} == {p.name for p in (out / "findings").iterdir()}
    whole(out)


def test_sigterm_in_the_middle_of_a_reduction_still_writes_the_finding(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with redraft.running(*PLANTED, "--jobs", 1, "--scenarios", 100_000, "--out", out, "--json") as process:
        until = time.monotonic() + PATIENCE
        while not (out / "state" / "pending-0.json").exists() and time.monotonic() < until:
            time.sleep(0.005)
        # a campaign that runs is nobody else's
        beside = redraft(*PLANTED, "--jobs", 1, "--scenarios", 5, "--out", out, "--resume")
        process.send_signal(signal.SIGTERM)
        assert (beside.returncode, "is running" in beside.stderr) == (2, True)
        assert process.stdout is not None
        done = json.loads(process.stdout.read())
        assert process.wait(PATIENCE) == 130
    assert done["interrupted"] is True
    assert done["died"] == []
    assert len(done["findings"]) >= 1
    whole(out)


def test_kill_9_loses_nothing_that_was_shown_and_a_finding_can_be_replayed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with redraft.running(*REAL, "--jobs", 2, "--scenarios", 100_000, "--out", out) as process:
        assert process.stdout is not None
        shown = next(line for line in process.stdout if line.startswith("found "))
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        shown += "".join(line for line in process.stdout if line.startswith("found "))
        process.wait(PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert not alive, "processes live on without their campaign"
    code = redraft(*REAL, "--jobs", 2, "--scenarios", 2, "--out", out, "--resume", "--fail-on", "never", "--json")
    done = document(code, 0)
    for line in shown.splitlines():
        assert any(f"found  {s}  (" in line for s in signatures(done)), line
    whole(out)

    replayed = document(redraft("replay", done["findings"][0]["path"], "--json"), 1)
    assert [r["verdict"] for r in replayed["results"]] == ["FAILED"]
    # the other way round: nothing of the folder is needed but its program
    again = document(redraft("replay", Path(done["findings"][0]["path"]) / "scenario.json", "--json"), 1)
    assert [r["verdict"] for r in again["results"]] == ["FAILED"]


def test_a_known_fault_hides_no_other_one_with_its_signature() -> None:
    """Once they had one folder: whichever came first, a new fault among them, was all that was ever told."""
    scenario = Scenario(model=ModelRef(recipe="llama"), ops=(Ask(what="positions"),))
    check = Check(kind="answer", step=0, expected=(0,))
    violation = Violation(oracle="removal", key="k", rule="r", because="b", check=check)
    account = SimpleNamespace(memory="hybrid", ledger=SimpleNamespace(trace=Trace([], [], End("ok"))))
    judgement = SimpleNamespace(violations=[violation], account=account)
    triaged: Any = SimpleNamespace(
        signature="removal/seq_rm/hybrid/tail",
        violation=violation,
        judgement=judgement,
        scenario=scenario,
        original=scenario,
        reproduced=(3, 3),
        culprit=0,
        route="tail",
    )
    config = JobConfig(models=[], shim="", build="", cache="", out="", seed=1, job=0, jobs=1)
    two = load_all()[:2]
    made = [make(triaged, known, config) for known in (None, *two)]
    assert len({f.slug for f in made}) == 3
    assert [f.known for f in made] == [None, *(k.name for k in two)]


def test_what_was_a_false_alarm_replays_as_fixed() -> None:
    known = {k.scenario for k in load_all()}
    files = [p for p in sorted((ROOT / "corpora" / "scenarios").glob("*.json")) if p.name not in known]
    assert files
    done = document(redraft("replay", *files[:3], "--runs", 1, "--json"), 0)
    assert {r["verdict"] for r in done["results"]} == {"FIXED"}
