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
    PARTIAL,
    Accept,
    Ask,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    ModelRef,
    Op,
    Part,
    Propose,
    Rewind,
    Scenario,
    SeqRm,
    Verify,
)

MODEL = ModelRef(recipe="qwen35", version=recipes.get("qwen35").version)
MTP = DriverParams(kind="draft-mtp")
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
def judge(build: builds.Build, model: Path) -> Iterator[Judge]:
    library = builds.driver_library(build)
    with Sandbox(builds.compile_shim(build), [(model, 0)], driver=library) as box:
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
def reproduce(tmp_path: Path, build: builds.Build, model: Path, judge: Judge) -> Reproduce:
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
        p = subprocess.run(
            [tmp_path / "repro", model],
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


def unoffered(judgement: Judgement) -> Violation:
    return next(v for v in judgement.violations if v.key == "driver_contract:draft-mtp:unoffered")


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
