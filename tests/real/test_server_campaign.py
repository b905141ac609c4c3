"""Campaigns over a real llama-server as people run them, a few dozen programs each; and what is stored of it."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from campaigns import Command, document

from fuzz import programs
from fuzz.cli import served
from fuzz.known import FOLDER, load_all, match_server
from fuzz.server import avoid
from fuzz.server import finding as findings
from fuzz.server.triage import route_of, sign
from subjects.server.build import ServerBuild
from subjects.server.scenario import ServerScenario

SERVER = ("fuzz", "--subject", "server")
# nothing is cached but in the slot, and no state is restored: what is planted is all that there is
PLANTED = (
    *SERVER,
    "--model",
    "llama",
    "--flags",
    "plain",
    "--plant",
    "server-stale",
    "--avoid",
    "always",
    "--seed",
    "3",
)
PATIENCE = 240.0
redraft = Command(PATIENCE)
STORED = {
    p.name: program
    for p in sorted((FOLDER.parent / "scenarios").glob("*.json"))
    if isinstance(program := programs.loads(p.read_bytes()), ServerScenario)
}
KNOWN = {f.scenario: f for f in load_all() if f.subject == "server"}


def wait_for(path: Path, pattern: str) -> None:
    until = time.monotonic() + PATIENCE
    while not any(path.glob(pattern)):
        assert time.monotonic() < until, f"no {pattern} in {path}"
        time.sleep(0.05)


def servers(family: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for p in family:
        try:
            found += [p] if "llama-server" in p.name() else []
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_planted_fault_is_found_by_the_seed_and_is_not_in_the_build(
    server_build: ServerBuild, tmp_path: Path
) -> None:
    args = (*PLANTED, "--jobs", 1, "--scenarios", 4)
    # the second is not to be reduced once more
    runs = {"one": 6, "two": 0.01}
    one, two = (
        document(redraft(*args, "--out", tmp_path / x, "--reduce-seconds", s, "--json"), 1) for x, s in runs.items()
    )
    assert one["scenarios"] == 4
    assert one["requests"] > 20
    assert one["deeds"]["kept"] > 5
    assert one["coverage"] == two["coverage"]
    assert {f["oracle"] for f in two["findings"]} == {"server-answer"}
    found = one["findings"][0]
    assert (found["oracle"], found["known"]) == ("server-answer", None)
    assert found["requests"] <= 8
    folder = Path(found["path"])
    assert findings.load(folder).environment["fingerprint"] == server_build.fingerprint
    assert findings.load_trace(folder)
    explained = redraft("explain", folder)
    assert (explained.returncode, "cold server" in explained.stdout) == (0, True)
    replayed = document(redraft("replay", folder, "--json"), 0)
    assert [r["verdict"] for r in replayed["results"]] == ["FIXED"]


def test_the_server_that_dies_on_its_first_request_is_found_and_known(
    server_build: ServerBuild, tmp_path: Path
) -> None:
    args = (*SERVER, "--driver", "qwen35-mtp", "--flags", "small-batch", "--scenarios", 3, "--jobs", 1, "--seed", 1)
    done = document(redraft(*args, "--out", tmp_path / "out", "--json"), 0, 1)
    mine = [f for f in done["findings"] if f["known"] == "server-ubatch"]
    assert [(f["requests"], f["reproduced"]) for f in mine] == [(1, [3, 3])]
    assert redraft("fuzz", "--out", tmp_path / "out", "--resume", "--scenarios", 4, "--json").returncode in (0, 1)


def test_ctrl_c_keeps_what_was_found_and_kill_9_leaves_no_server(server_build: ServerBuild, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = (*PLANTED, "--jobs", 2, "--scenarios", 100_000, "--out", out)
    with redraft.running(*args, "--json") as process:
        wait_for(out, "findings/[!.]*")
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        done = json.loads(process.stdout.read())
        assert process.wait(PATIENCE) == 130
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert not alive
    assert done["interrupted"] is True
    assert {Path(f["path"]).name for f in done["findings"]} == {p.name for p in (out / "findings").iterdir()}

    with redraft.running(*args, "--resume") as process:
        family = []
        until = time.monotonic() + PATIENCE
        while not servers(family) and time.monotonic() < until:
            family = psutil.Process(process.pid).children(recursive=True)
        assert servers(family)
        process.kill()
        process.wait(PATIENCE)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE)
        assert not alive, "servers live on without their campaign"
    assert not [p for p in out.rglob("*") if p.name.startswith((".new-", ".old-"))]
    more = (*PLANTED, "--jobs", 2, "--scenarios", 1, "--out", out, "--resume", "--fail-on", "never", "--json")
    assert document(redraft(*more), 0)["findings"]


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_shows_as_its_entry_says(server_build: ServerBuild, name: str) -> None:
    """Where a known fault does not show any more, the build has the fix: the entry goes ("fixed?"). What is not known
    was a false alarm, and is silent."""
    program, fault = STORED[name], KNOWN.get(name)
    with served.judge_of(server_build, program) as (judge, model):
        for fresh in (True, False):
            judgement = judge.judge(program, fresh=fresh, variants=True)
            if fault is None:
                assert judgement.judged
                assert judgement.violations == [], judgement.violations[0].because
                continue
            assert judgement.violations, "fixed?"
            first = judgement.violations[0]
            signature = sign(first, program, model.traits.memory, route_of(judgement, first))
            assert match_server(signature, program, judgement.trace, [fault], first.check.step) == fault, signature
            assert avoid.to_blame(fault.avoidance, program, judgement.trace, first.check.step)


def test_known_faults_are_stored() -> None:
    assert {*STORED} >= {*KNOWN}
    assert KNOWN
