"""Reproducers of findings with a speculative driver do on the real library what the finding says: exit code 1, or 0.

The programs are judged, each violation becomes a finding by hand, and its repro.cpp is compiled and run.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from fuzz import finding as findings
from fuzz.finding import Finding
from oracles.judge import Judge, Judgement
from oracles.verdict import Check, Violation
from subjects import builds, recipes
from subjects.sandbox import Sandbox
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    Accept,
    Ask,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    Edge,
    Mangle,
    ModelRef,
    Op,
    Part,
    Propose,
    Reopen,
    Rewind,
    Scenario,
    SeqRm,
    Verify,
)

MODEL = ModelRef(recipe="qwen35", version=recipes.get("qwen35").version)
DRAFT = ModelRef(recipe="eagle3-qwen35", version=recipes.get("eagle3-qwen35").version)
MTP = DriverParams(kind="draft-mtp")
EAGLE = DriverParams(kind="draft-eagle3", draft=DRAFT)
STALE = (
    Decode(parts=(Part(seq=0, n=20),)),
    Checkpoint(seq=0, slot=0),
    Decode(parts=(Part(seq=0, n=6),)),
    Rewind(seq=0, slot=0),
)
Reproduce = Callable[[Finding, Judgement], tuple[int, str]]


@pytest.fixture(scope="module")
def build() -> builds.Build:
    return builds.find_build()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    recipes.get("qwen35").write(path, seed=0)
    return path


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    recipes.get("eagle3-qwen35").write(path, seed=0)
    return path


@pytest.fixture(scope="module")
def judge(build: builds.Build, model: Path, draft: Path) -> Iterator[Judge]:
    library = builds.driver_library(build)
    with Sandbox(builds.compile_shim(build), [(model, 0)], driver=library, drafts={DRAFT: draft}) as box:
        yield Judge(box, MODEL, model, build.fingerprint)


def program(*ops: Op, driver: DriverParams = MTP, params: ContextParams | None = None) -> Scenario:
    return Scenario(model=MODEL, params=params or ContextParams(n_rs_seq=3), driver=driver, ops=ops)  # type: ignore[arg-type]


def found(judgement: Judgement, violation: Violation) -> Finding:
    """A finding as the campaign makes one."""
    return Finding(
        signature=f"{violation.oracle}/hand",
        slug="hand",
        title="made by hand",
        oracle=violation.oracle,
        kind=violation.kind,
        memory="hybrid",
        build="the installed build",
        reproduced=(3, 3),
        scenario=judgement.executed,
        original=judgement.executed,
        violation=violation,
    )


@pytest.fixture
def reproduce(tmp_path: Path, build: builds.Build, model: Path, draft: Path, judge: Judge) -> Reproduce:
    """Write a finding, compile its program and run it: return code and standard output."""

    def run(finding: Finding, judgement: Judgement) -> tuple[int, str]:
        traces = {"subject": judgement.account.ledger.trace}
        if finding.check.reference:
            traces["reference"] = judge.sandbox.run(finding.check.reference, model, fresh=True)
        folder = findings.write(finding, traces, tmp_path / "findings", replace=True)
        assert findings.load(folder) == finding
        assert not (folder / "repro.py").exists()
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "no C++ compiler"
        root = builds.driver_sources(build)
        command: list[str | Path] = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
        command += ["-Werror", folder / "repro.cpp", "-Wl,--no-as-needed"]
        for d in ("common", "include", "ggml/include", "vendor"):
            command += ["-isystem", root / d]
        for d in (*build.libdirs, build.libllama.parents[2] / "lib"):
            command += ["-L", d, f"-Wl,-rpath,{d}"]
        libraries = ["-lllama-common", "-lllama", "-lggml", "-lggml-base"]
        subprocess.run([*command, *libraries, "-o", tmp_path / "repro"], check=True, timeout=300)
        with_draft = finding.scenario.driver is not None and finding.scenario.driver.draft is not None
        p = subprocess.run(
            [tmp_path / "repro", model, *([draft] if with_draft else [])],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=120,
            check=False,
            cwd=tmp_path,
        )
        print(p.stdout, p.stderr)
        return p.returncode, p.stdout

    return run


def decode(n: int, seq: int = 0, stream: int = 0) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n, stream=stream),))


def unoffered(judgement: Judgement) -> Violation:
    return next(v for v in judgement.violations if v.key == "driver_contract:draft-mtp:unoffered")


def claim(judgement: Judgement, what: str, step: int, seq: int = -1, key: str = "hand") -> Finding:
    """A claim that nobody made, for a program that is sound."""
    check = Check(kind="draft", step=step, seq=seq, what=what, band=1e-3)
    return found(judgement, Violation(oracle="hand", key=key, rule="llama.h is silent.", because="It.", check=check))


def test_a_row_that_a_restore_leaves_behind(judge: Judge, reproduce: Reproduce) -> None:
    judgement = judge.judge(program(*STALE, Propose(seqs=(0,))), fresh=True, variants=False)
    violation = unoffered(judgement)
    assert violation.check.what == "row"
    rc, out = reproduce(found(judgement, violation), judgement)
    assert rc == 1, out
    assert "WRONG DRAFT" in out
    # the same claim of a program without the restore
    sound = judge.judge(program(STALE[0], Propose(seqs=(0,))), fresh=True, variants=False)
    assert not sound.violations
    check = msgspec.structs.replace(violation.check, step=1)
    rc, out = reproduce(found(sound, msgspec.structs.replace(violation, check=check)), sound)
    assert rc == 0, out
    assert "not reproduced" in out


@pytest.mark.parametrize("behind", [(decode(3),), (Propose(seqs=(0,)), Verify(seqs=(0,), accept=(1,), route="host"))])
def test_a_row_that_is_seen_while_a_batch_is_processed(
    behind: tuple[Op, ...], judge: Judge, reproduce: Reproduce
) -> None:
    # the restore leaves the row of position 26 behind, the batch is the first that is made from it
    judgement = judge.judge(program(*STALE, *behind), fresh=True, variants=False)
    violation = next(v for v in judgement.violations if v.check.step == 3 + len(behind))
    assert violation.check.what == "row"
    rc, out = reproduce(found(judgement, violation), judgement)
    assert rc == 1, out


def test_one_of_several_drafts(judge: Judge, reproduce: Reproduce) -> None:
    late = DriverParams(kind="draft-mtp", late=True, backend_sampling=True)
    sc = program(*STALE, decode(9, 1, stream=5), Propose(seqs=(1, 0)), driver=late)
    judgement = judge.judge(sc, fresh=True, variants=False)
    rc, out = reproduce(found(judgement, unoffered(judgement)), judgement)
    assert rc == 1, out


EVERYTHING = (
    decode(20),
    Propose(seqs=(0,)),
    Checkpoint(seq=0, slot=0),
    decode(6, 1, stream=3),
    Begin(seq=1),
    Propose(seqs=(1, 0), n_max=2),
    Verify(seqs=(0, 1), accept=(1, 0), route="host"),
    Propose(seqs=(0, 1), stream=-1),
    Verify(seqs=(0, 1), accept=(2, -1), route="device"),
    Propose(seqs=(0,)),
    Verify(seqs=(0,), accept=(0,), route="whole"),
    Propose(seqs=(0,)),
    Verify(seqs=(0,)),
    Accept(seq=0, n=1),
    Ask(what="positions", seq=1),
    Ask(what="size", seq=1),
    Ask(what="size_all"),
    Ask(what="can_shift"),
    Checkpoint(seq=1, slot=1, flags=PARTIAL | ON_DEVICE),
    Rewind(seq=1, slot=1),
    Rewind(seq=0, slot=0, parts=("target", "draft")),
    SeqRm(seq=1),
    Propose(seqs=(0,)),
    Reopen(params=ContextParams(n_rs_seq=3, n_seq_max=3)),
    decode(7, 2),
    Propose(seqs=(2,)),
    Verify(seqs=(2,), accept=(1,)),
    Propose(seqs=(2,)),
)


@pytest.mark.parametrize("driver", [MTP, EAGLE, DriverParams(kind="ngram-cache")], ids=lambda d: d.kind)
def test_every_operation_does_what_the_runner_does(driver: DriverParams, judge: Judge, reproduce: Reproduce) -> None:
    judgement = judge.judge(program(*EVERYTHING, driver=driver), fresh=True, variants=False)
    assert judgement.account.ledger.trace.end.how == "ok"
    for step in (22, 27):
        rc, out = reproduce(claim(judgement, "two drivers", step), judgement)
        assert (rc, "AS WHEN IT WAS FOUND" in out) == (1, True), out


@pytest.mark.parametrize("step", [0, 6, 8, 10, 12, 26])
def test_rows_of_the_target(step: int, judge: Judge, reproduce: Reproduce) -> None:
    judgement = judge.judge(program(*EVERYTHING), fresh=True, variants=False)
    rc, out = reproduce(claim(judgement, "target", step, 2 if step > 23 else 0), judgement)
    assert rc == 0, out
    assert "differ from plain decoding by up to" in out


def test_a_row_of_the_target_that_is_wrong(judge: Judge, reproduce: Reproduce) -> None:
    # a rollback to a state that was not kept
    ops = (decode(16), decode(1), decode(1), decode(1), SeqRm(seq=0, lo=Edge(at="end", d=-3)), decode(1))
    late = DriverParams(kind="draft-mtp", late=True)
    judgement = judge.judge(program(*ops, driver=late, params=ContextParams(n_rs_seq=4)), fresh=True, variants=False)
    rc, out = reproduce(claim(judgement, "target", 5, 0), judgement)
    assert (rc, "WRONG STATE" in out) == (1, True), out


def test_positions_and_a_program_that_lives(judge: Judge, reproduce: Reproduce) -> None:
    judgement = judge.judge(program(*EVERYTHING), fresh=True, variants=False)
    for step, seq in ((6, 0), (12, 0), (20, 0), (11, -1)):
        rc, out = reproduce(claim(judgement, "positions", step, seq), judgement)
        assert rc == 0, out
    trace = judgement.account.ledger.trace
    end = msgspec.structs.replace(claim(judgement, "", 0), hang=True)
    alive = Check(kind="alive", step=len(trace.steps) - 1)
    assert end.violation is not None
    violation = msgspec.structs.replace(end.violation, check=alive)
    rc, out = reproduce(msgspec.structs.replace(end, violation=violation), judgement)
    assert rc == 0, out
    assert "about to draft for sequence 2" in out
    assert "it survived: not reproduced" in out


@pytest.mark.parametrize("how", ["negative", "short", "model", "other"])
def test_a_malformed_state(how: str, judge: Judge, reproduce: Reproduce) -> None:
    ops = (decode(20), Checkpoint(seq=0, slot=0), Mangle(slot=0, how=how), Rewind(seq=0, slot=0))  # type: ignore[arg-type]
    judgement = judge.judge(program(*ops, driver=EAGLE), fresh=True, variants=False)
    rc, out = reproduce(claim(judgement, how, 3, key="driver_state:draft-eagle3:mute"), judgement)
    assert (rc, "WAS NOT TOLD" in out) == (1, True), out
    rc, out = reproduce(claim(judgement, how, 3, key="driver_state:draft-eagle3:taken"), judgement)
    assert rc == int(how in ("negative", "other")), out
