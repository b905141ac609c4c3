"""Reproducers do on the real library what the finding says, without redraft: exit code 1, death by a signal, or 0.

The findings are made by hand from runs in the sandbox; nothing native is loaded into pytest's process.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fuzz import finding as findings
from fuzz.finding import Finding
from oracles.states import LOWEST
from oracles.verdict import Check, Violation
from subjects import builds, recipes
from subjects.sandbox import Sandbox
from subjects.scenario import (
    ON_DEVICE,
    OPEN,
    Ask,
    BlobEdit,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Edge,
    ModelRef,
    Op,
    Part,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    Scenario,
    SeqCp,
    SeqRm,
)
from subjects.state.canon import Key, Reader
from subjects.trace import Trace

MODEL = ModelRef(recipe="qwen35", version=recipes.get("qwen35").version, seed=0)
STRICT = ContextParams(n_rs_seq=4)
SILENCED = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def build() -> builds.Build:
    return builds.find_build()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    recipes.get("qwen35").write(path, seed=0)
    return path


@pytest.fixture(scope="module")
def sandbox(build: builds.Build, model: Path) -> Iterator[Sandbox]:
    with Sandbox(builds.compile_shim(build), [(model, 0)]) as box:
        yield box


def decode(n: int, *, seq: int = 0, tokens: tuple[int, ...] | None = None, abort: int | None = None) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n, tokens=tokens),), abort_after=abort)


def program(*ops: Op, params: ContextParams = STRICT) -> Scenario:
    return Scenario(model=MODEL, params=params, ops=ops)  # type: ignore[arg-type]


def clean(trace: Trace, *lengths: int, params: ContextParams = STRICT, seq: int = 0) -> Scenario:
    """The history that a sequence should have, from rows of a trace, decoded in batches of `lengths`."""
    tokens = {r.pos: r.token for s in trace.steps for b in s.batches for r in b.rows if r.seq == seq}
    history = tuple(tokens[p] for p in range(sum(lengths)))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return program(*(decode(n, tokens=history[e - n : e]) for n, e in zip(lengths, ends, strict=True)), params=params)


def found(scenario: Scenario, check: Check, *, slug: str) -> Finding:
    """A finding as the campaign makes one."""
    return Finding(
        signature=f"hand/{slug}",
        slug=slug,
        title=slug.replace("-", " "),
        oracle="hand",
        kind="fault",
        memory="hybrid",
        build="the installed build",
        reproduced=(3, 3),
        scenario=scenario,
        original=scenario,
        violation=Violation(oracle="hand", key=slug, rule="llama.h is silent.", because="It must.", check=check),
    )


@pytest.fixture
def reproduce(tmp_path: Path, build: builds.Build, model: Path, sandbox: Sandbox):  # type: ignore[no-untyped-def]
    """Write a finding, run both of its programs, and give their (return code, standard output)."""

    def run(finding: Finding, trace: Trace) -> list[tuple[int, str]]:
        traces = {"subject": trace}
        if finding.check.reference:
            traces["reference"] = sandbox.run(finding.check.reference, model)
        folder = findings.write(finding, traces, tmp_path / "findings")
        assert findings.load(folder) == finding
        return [python(folder), cpp(folder)]

    def python(folder: Path) -> tuple[int, str]:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | SILENCED
        p = subprocess.run(
            [sys.executable, "-P", folder / "repro.py"],
            capture_output=True,
            text=True,
            env=env,
            timeout=120,
            check=False,
            cwd=tmp_path,
        )
        assert "Traceback" not in p.stderr, p.stderr
        return p.returncode, p.stdout

    def cpp(folder: Path) -> tuple[int, str]:
        compiler = shutil.which("g++") or shutil.which("c++")
        assert compiler, "no C++ compiler"
        command: list[str | Path] = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", folder / "repro.cpp"]
        for d in build.include:
            command += ["-I", d]
        for d in build.libdirs:
            command += ["-L", d, f"-Wl,-rpath,{d}"]
        subprocess.run([*command, "-lllama", "-lggml-base", "-o", tmp_path / "repro"], check=True, timeout=120)
        p = subprocess.run(
            [tmp_path / "repro", model],
            capture_output=True,
            text=True,
            env=os.environ | SILENCED,
            timeout=120,
            check=False,
            cwd=tmp_path,
        )
        return p.returncode, p.stdout

    return run


def test_a_rollback_to_a_state_that_was_not_kept(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(16), decode(1), decode(1), decode(1), SeqRm(seq=0, lo=Edge(at="end", d=-3), hi=OPEN), decode(1))
    trace = sandbox.run(sc, model)
    reference = clean(trace, 16, 1)
    check = Check(kind="rows", step=5, seq=0, row=4, ref_row=1, band=1e-3, reference=reference)
    for rc, out in reproduce(found(sc, check, slug="rollback"), trace):
        assert rc == 1, out
        assert "WRONG STATE" in out
        assert 1 < float(out.split()[3]) < 14


def test_a_sound_program(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(16), decode(1))
    trace = sandbox.run(sc, model)
    check = Check(kind="rows", step=1, seq=0, row=1, ref_row=1, band=1e-3, reference=clean(trace, 16, 1))
    for rc, out in reproduce(found(sc, check, slug="sound"), trace):
        assert rc == 0, out
        assert "not reproduced" in out


def test_a_crash(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(16), params=ContextParams(n_rs_seq=4, n_ubatch=4))
    trace = sandbox.run(sc, model)
    assert trace.end.how == "signal"
    for rc, out in reproduce(found(sc, Check(kind="alive", step=0), slug="crash"), trace):
        assert rc == -signal.SIGABRT
        assert "about to decode 16 tokens" in out


def test_a_crash_on_an_older_device_handle(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    def device(slot: int) -> Save:
        return Save(seq=0, slot=slot, flags=ON_DEVICE)

    sc = program(decode(16), device(0), decode(1), device(1), Restore(seq=0, slot=0))
    trace = sandbox.run(sc, model)
    assert trace.end.how == "signal"
    for rc, out in reproduce(found(sc, Check(kind="alive", step=4), slug="device"), trace):
        assert rc == -signal.SIGABRT
        assert "about to restore slot 0" in out


@pytest.mark.parametrize("hidden", [False, True])
def test_drafts_reopened_contexts_and_hidden_rows(hidden, sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    params, other = ContextParams(embeddings=True), ContextParams(embeddings=True, n_ubatch=16)
    last = Decode(parts=(Part(seq=1, n=2, out="all"), Part(seq=0, n=3)), interleave=True)
    ops = (decode(16), Draft(seq=0, n=3), Save(seq=0, slot=0), Reopen(params=other), Restore(seq=1, slot=0), last)
    sc = program(*ops, Ask(what="can_shift"), params=params)
    trace = sandbox.run(sc, model)
    assert trace.steps[4].rc
    row = trace.steps[5].batches[0].first
    drafted = tuple(r.token for s in trace.steps[:2] for b in s.batches for r in b.rows)
    first = trace.steps[5].batches[0].rows[0].token
    reference = program(decode(19, tokens=drafted), decode(1, tokens=(first,)), params=params)
    check = Check(kind="rows", step=5, seq=1, row=row, ref_row=1, band=1e-3, hidden=hidden, reference=reference)
    for rc, out in reproduce(found(sc, check, slug="reopened"), trace):
        assert rc == 0, out
        assert "max abs difference" in out, out


def test_no_crash(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(16))
    for rc, out in reproduce(found(sc, Check(kind="alive", step=0), slug="alive"), sandbox.run(sc, model)):
        assert rc == 0
        assert "not reproduced" in out


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("wrong", [False, True])
def test_rows_of_saved_states(wrong, kind, sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    """A copy between streams that waits for a decode: what is saved of it has other rows."""
    params = ContextParams(type_k=kind, type_v=kind, flash_attn=True)
    sc = program(decode(5), SeqCp(src=0, dst=1), Save(seq=int(wrong), slot=0), params=params)
    trace = sandbox.run(sc, model)
    reference = clean(trace, 5, params=params)
    reference = msgspec.structs.replace(reference, ops=(*reference.ops, Save(seq=0, slot=0)))
    blobs = [t.state(t.steps[-1].blobs[0]) for t in (trace, sandbox.run(reference, model))]
    places = [Reader().layout(b).place(b, 0, Key("attn", 0, "v"), 3) for b in blobs if b]
    expected = tuple(n for place in places for n in place or ())
    check = Check(kind="state", step=2, seq=1, row=0, band=0.05, expected=expected, what="a row", reference=reference)
    for rc, out in reproduce(found(sc, check, slug="state"), trace):
        assert rc == int(wrong), out
        assert ("WRONG STATE" if wrong else "not reproduced") in out


def cells_of(data: bytes | None, part: str = "attn") -> tuple[int, ...]:
    """Where the cells of a part are, as checks have it."""
    assert data is not None
    place = Reader().layout(data).cells(0, part, 0)
    assert place is not None
    return place.at, int(place.ext), LOWEST, -1


OTHER_CELLS = {
    "the same": (5, ()),
    "fewer": (4, ()),
    "as many of another position": (5, (BlobEdit(how="set", where="attn.stream.cell.pos", nth=2, value=7),)),
    "another token": (5, (BlobEdit(how="set", where="attn.stream.cell.token", nth=2, value=63),)),
}


@pytest.mark.parametrize("how", OTHER_CELLS)
def test_other_cells_in_a_saved_state(how, sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    n, edits = OTHER_CELLS[how]
    ops = (decode(5), Save(seq=0, slot=0), Corrupt(slot=0, edits=edits), Restore(seq=1, slot=0), Save(seq=1, slot=1))
    sc = program(*ops)
    trace = sandbox.run(sc, model)
    assert trace.steps[3].rc
    reference = clean(trace, n)
    reference = msgspec.structs.replace(reference, ops=(*reference.ops, Save(seq=0, slot=0)))
    mine, theirs = (cells_of(t.state(t.steps[-1].blobs[0])) for t in (trace, sandbox.run(reference, model)))
    check = Check(kind="state", step=4, seq=1, row=0, expected=mine + theirs, what="cells", reference=reference)
    for rc, out in reproduce(found(sc, check, slug="cells"), trace):
        assert rc == int(how != "the same"), out
        assert "cells of the saved state" in out


@pytest.mark.parametrize("wrong", [False, True])
def test_cells_where_none_must_be(wrong, sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(5), Save(seq=int(not wrong), slot=0))
    trace = sandbox.run(sc, model)
    reference = program(Save(seq=0, slot=0))
    expected = (*cells_of(trace.state(trace.steps[1].blobs[0])), -1, 0, 0, -1)
    check = Check(kind="state", step=1, seq=0, row=0, expected=expected, what="cells", reference=reference)
    for rc, out in reproduce(found(sc, check, slug="none"), trace):
        assert rc == int(wrong), out


@pytest.mark.parametrize("n", [4, 5])
def test_a_saved_state_of_another_size(n, sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(5), Save(seq=0, slot=0))
    trace = sandbox.run(sc, model)
    reference = clean(trace, n)
    reference = msgspec.structs.replace(reference, ops=(*reference.ops, Save(seq=0, slot=0)))
    check = Check(kind="state", step=1, seq=0, row=0, what="layer 0, attention V is missing", reference=reference)
    for rc, out in reproduce(found(sc, check, slug="size"), trace):
        assert rc == int(n != 5), out
        assert "sizes of the states" in out


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("what", ["row", "cells"])
def test_saved_again_from_another_sequence(what, wrong, sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    """Their blobs have other bytes, in any order; of equal states no row and no cell differs. Rows of two positions
    that are held against each other do, as if a restore had swapped them.
    """
    sc = program(decode(5), Save(seq=0, slot=0), Restore(seq=1, slot=0, resave=True))
    trace = sandbox.run(sc, model)
    blobs = [trace.state(b) for b in trace.steps[2].blobs]
    assert sorted(blobs[0] or b"") != sorted(blobs[1] or b"")
    if what == "row":
        rows = [
            Reader().layout(b).place(b, 0, Key("attn", 0, "k"), p) for b, p in zip(blobs, (3, 3 - wrong), strict=True)
        ]
        places = tuple(n for place in rows for n in place or ())
    else:
        places = cells_of(blobs[0]) + cells_of(blobs[1], "recurrent" if wrong else "attn")
    check = Check(kind="blob", step=2, seq=1, expected=(0, 1, *places), what="places")
    for rc, out in reproduce(found(sc, check, slug="again"), trace):
        assert rc == int(wrong), out
        assert ("THEY DIFFER" if wrong else "equal: not reproduced") in out


@pytest.mark.parametrize("expected", [(0, 15), (0, 14)])
def test_positions(expected, sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(16), Save(seq=0, slot=0), decode(2), Restore(seq=0, slot=0))
    trace = sandbox.run(sc, model)
    truth = trace.steps[3].pos[0]
    expected = (truth[0], expected[1])
    check = Check(kind="positions", step=3, seq=0, expected=expected)
    for rc, out in reproduce(found(sc, check, slug="positions"), trace):
        assert rc == int(truth != expected), out


def test_a_removal_that_answers_otherwise(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(16), SeqRm(seq=0, lo=Edge(at="start", d=2), hi=OPEN))
    trace = sandbox.run(sc, model)
    assert trace.steps[1].rc == 0
    for rc, out in reproduce(found(sc, Check(kind="answer", step=1, expected=(1,)), slug="refused"), trace):
        assert rc == 1, out
        assert "the call returned 0, expected 1: WRONG" in out


def test_saved_twice(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(decode(16), Save(seq=0, slot=0, again=True))
    trace = sandbox.run(sc, model)
    check = Check(kind="blob", step=1, expected=(0, 1), what="bytes")
    for rc, out in reproduce(found(sc, check, slug="twice"), trace):
        assert rc == 0, out
    check = Check(kind="blob", step=1, expected=(0, 0), what="size")
    for rc, out in reproduce(found(sc, check, slug="size"), trace):
        assert rc == 0, out


def test_a_corrupt_blob_is_refused_by_both_programs(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    sc = program(
        decode(16), Save(seq=0, slot=0), Corrupt(slot=0, edits=(BlobEdit(how="cut", nth=500),)), Restore(seq=0, slot=0)
    )
    trace = sandbox.run(sc, model)
    assert trace.steps[3].rc == 0
    for rc, out in reproduce(found(sc, Check(kind="answer", step=3, expected=(0,)), slug="corrupt"), trace):
        assert rc == 0, out


LAST = {
    "flip": BlobEdit(how="flip", nth=999, value=7),
    "zero": BlobEdit(how="zero", nth=999, value=7),
    "set": BlobEdit(how="set", nth=999, value=7),
    "field": BlobEdit(how="set", where="recurrent.s.data", nth=1, value=9),
    "insert": BlobEdit(how="insert", nth=1000, value=7),
    "take": BlobEdit(how="take", where="recurrent.s.data", value=1),
    "cell": BlobEdit(how="drop", where="attn.stream.cell", nth=2),
}


@pytest.mark.parametrize("how", LAST)
def test_corruptions_are_the_runners(how, sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    # the last bytes are recurrent state: the restore is accepted, and gives the rows that the trace has
    ops = (
        decode(16),
        Save(seq=0, slot=0, medium="file"),
        Save(seq=0, slot=1),
        Corrupt(slot=0, edits=(LAST[how],)),
        Corrupt(slot=1, edits=(LAST[how],)),
        Restore(seq=1, slot=1),
        Restore(seq=0, slot=0),
    )
    sc = program(*ops)
    trace = sandbox.run(sc, model)
    wanted = int(trace.steps[6].rc or 0)
    for rc, out in reproduce(found(sc, Check(kind="answer", step=6, expected=(wanted,)), slug=f"bytes-{how}"), trace):
        assert rc == 0, out
        assert f"the call returned {wanted}" in out


def test_every_way_of_saving_and_restoring(sandbox, model, reproduce):  # type: ignore[no-untyped-def]
    ops = (
        decode(16),
        Save(seq=0, slot=0, medium="file"),
        SaveAll(slot=1, medium="file", again=True),
        SaveAll(slot=2),
        decode(4, abort=2),
        RestoreAll(slot=2, resave=True),
        RestoreAll(slot=1),
        Restore(seq=1, slot=0, times=2),
        decode(1, seq=1),
    )
    sc = program(*ops)
    trace = sandbox.run(sc, model)
    assert trace.end.how == "ok"
    assert all(trace.steps[i].rc for i in (5, 6, 7))
    row = len(trace.logit_rows()) - 1
    reference = clean(trace, 16, params=STRICT)
    tail = decode(1, tokens=(trace.steps[8].batches[0].rows[0].token,))
    reference = program(*reference.ops, tail)
    check = Check(kind="rows", step=8, seq=1, row=row, ref_row=1, band=1e-3, reference=reference)
    for rc, out in reproduce(found(sc, check, slug="ways"), trace):
        assert rc == 0, out
        assert "max abs difference" in out, out
