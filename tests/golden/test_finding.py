"""What people read of a finding: README, explanation and reproducers, for findings made by hand.

`REDRAFT_UPDATE_GOLDEN=1 pytest tests/golden/test_finding.py` writes the files anew; read the difference first.
"""

import ast
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fuzz import finding as findings
from fuzz.finding import BadFinding, Finding
from oracles.verdict import Check, Violation
from subjects.scenario import (
    ON_DEVICE,
    OPEN,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    Edge,
    ModelRef,
    Part,
    Propose,
    Restore,
    Rewind,
    Save,
    Scenario,
    SeqRm,
)
from subjects.trace import Batch, Blob, End, Facts, Row, Step, Tap, TapRow, Trace

DATA = Path(__file__).parent / "data"
SHOWN = ("README.md", "explanation.txt", "repro.py", "repro.cpp")
MODEL = ModelRef(recipe="qwen35", version=1, seed=0)
ENVIRONMENT: dict[str, str | int | list[str]] = {
    "build": "llama-cpp-python 0.3.36",
    "llama_cpp": "llama.cpp 0.5.0 0c1e57098",
    "fingerprint": "0123456789abcdef",
    "cpu": "some CPU",
    "platform": "Linux-6.1-x86_64",
    "cores": 2,
    "packages": ["numpy 2.0"],
}
ASSERTION = "/tmp/build/llama.cpp/src/llama-memory-recurrent.cpp:123: GGML_ASSERT(size == expected) failed\n"


def facts(params: ContextParams) -> Facts:
    return Facts(
        n_vocab=64, n_embd=32, recurrent=False, hybrid=True, n_swa=0, n_layer=5, n_ctx=512, n_ctx_seq=256,
        can_shift=False, n_batch=params.n_batch, n_ubatch=params.n_ubatch, n_seq_max=params.n_seq_max,
        n_rs_seq=params.n_rs_seq,
    )  # fmt: skip


def rows(tokens: list[int], pos: int = 0, seq: int = 0) -> list[Row]:
    return [Row(seq, pos + i, t, i + 1 == len(tokens)) for i, t in enumerate(tokens)]


def decoded(op: int, batch: list[Row], first: int) -> Step:
    pos = [(batch[-1].pos, batch[-1].pos), (-1, -1)]
    return Step(op=op, rc=0, batches=[Batch(batch, 0, first)], pos=pos, done=True)


def decode(n: int, tokens: tuple[int, ...] | None = None) -> Decode:
    return Decode(parts=(Part(seq=0, n=n, tokens=tokens),))


def rollback() -> tuple[Finding, dict[str, Trace]]:
    params = ContextParams(n_rs_seq=4)
    history, more = [5, 1, 63, 9, 9, 30, 2, 7], [11, 12, 13]
    ops = (decode(8), decode(1), decode(1), SeqRm(seq=0, lo=Edge(at="end", d=-2), hi=OPEN), decode(1))
    scenario = Scenario(model=MODEL, params=params, ops=ops)
    reference = Scenario(model=MODEL, params=params, ops=(decode(8, tuple(history)), decode(1, (11,))))
    removed = Step(op=3, args=[0, 8, -1], rc=1, pos=[(7, 7), (-1, -1)], done=True)
    logits = np.zeros((4, 64), np.float32)
    logits[3, 7] = 5.25
    subject = Trace(
        steps=[
            decoded(0, rows(history), 0),
            decoded(1, rows(more[:1], 8), 1),
            decoded(2, rows(more[1:2], 9), 2),
            removed,
            decoded(4, rows(more[:1], 8), 3),
        ],
        facts=[facts(params)],
        end=End("ok"),
        logits=logits.tobytes(),
    )
    clean = Trace(
        steps=[decoded(0, rows(history), 0), decoded(1, rows(more[:1], 8), 1)],
        facts=[facts(params)],
        end=End("ok"),
        logits=logits[:2].tobytes(),
    )
    check = Check(kind="rows", step=4, seq=0, row=3, ref_row=1, band=3.4e-5, reference=reference)
    violation = Violation(
        oracle="removal",
        key="tail",
        rule="llama.h says that llama_memory_seq_rm returns false where it cannot remove; it said true.",
        because="The logits at position 8 must equal those of a clean context with the same nine tokens because seq_rm "
        "said that it took positions 8 and 9 off; but the recurrent part still holds a later state.",
        check=check,
        error=5.25,
        band=3.4e-5,
        nmse=0.41,
        suspects=(3,),
    )
    finding = Finding(
        signature="removal/seq_rm/hybrid",
        slug=findings.slug_of("removal/seq_rm/hybrid"),
        title="seq_rm of a tail leaves a later recurrent state",
        oracle="removal",
        kind="fault",
        memory="hybrid",
        build="llama-cpp-python 0.3.36",
        reproduced=(5, 5),
        scenario=scenario,
        original=scenario,
        violation=violation,
        known="stale-rollback",
        culprit=3,
        attached=("first-token: token 7 in place of 0 at position 8",),
        seed=7,
        job=0,
        environment=ENVIRONMENT,
    )
    return finding, {"subject": subject, "reference": clean}


def device() -> tuple[Finding, dict[str, Trace]]:
    params = ContextParams()
    ops = (
        decode(3),
        Save(seq=0, slot=0, flags=ON_DEVICE),
        decode(1),
        Save(seq=0, slot=1, flags=ON_DEVICE),
        Restore(seq=0, slot=0),
    )
    scenario = Scenario(model=MODEL, params=params, ops=ops)

    def saved(op: int, slot: int) -> Step:
        return Step(
            op=op, args=[slot, 0, ON_DEVICE], rc=96, blobs=[Blob(96, 96, "00")], pos=[(2, 2), (-1, -1)], done=True
        )

    subject = Trace(
        steps=[
            decoded(0, rows([5, 1, 63]), 0),
            saved(1, 0),
            decoded(2, rows([9], 3), 1),
            saved(3, 1),
            Step(op=4, args=[0, 0, ON_DEVICE]),
        ],
        facts=[facts(params)],
        end=End("signal", 6),
        logits=np.zeros((2, 64), np.float32).tobytes(),
        stderr=ASSERTION,
    )
    violation = Violation(
        oracle="liveness",
        key="GGML_ASSERT(size == expected)",
        rule="llama.h is silent about older on-device handles; a call must return.",
        because="Restoring an older handle must be refused or right; but it ends the process.",
        check=Check(kind="alive", step=4),
        kind="crash",
        suspects=(4,),
    )
    finding = Finding(
        signature="liveness/GGML_ASSERT(size == expected)/hybrid",
        slug=findings.slug_of("liveness/GGML_ASSERT(size == expected)/hybrid"),
        title="restore of an older on-device handle aborts",
        oracle="liveness",
        kind="crash",
        memory="hybrid",
        route="device",
        build="llama-cpp-python 0.3.36",
        reproduced=(3, 3),
        scenario=scenario,
        original=scenario,
        violation=violation,
        culprit=4,
        end=ASSERTION,
        environment=ENVIRONMENT,
    )
    return finding, {"subject": subject}


def positions() -> tuple[Finding, dict[str, Trace]]:
    params = ContextParams(n_seq_max=1)
    ops = (decode(4), Save(seq=0, slot=0), decode(1), Restore(seq=0, slot=0))
    scenario = Scenario(model=ModelRef(path="/somewhere/real-model.gguf", sha256="ab" * 32), params=params, ops=ops)
    steps = [
        decoded(0, rows([5, 1, 63, 9]), 0),
        Step(op=1, args=[0, 0, 0], rc=640, blobs=[Blob(640, 640, "00")], pos=[(3, 3)], done=True),
        decoded(2, rows([9], 4), 1),
        Step(
            op=3, args=[0, 0, 0], rc=640, blobs=[Blob(640, 640, "00")], pos=[(0, 4)], done=True, log=["something odd\n"]
        ),
    ]
    logits = np.zeros((2, 64), np.float32).tobytes()
    subject = Trace(steps=steps, facts=[facts(params)], end=End("ok"), logits=logits)
    violation = Violation(
        oracle="positions",
        key="restore",
        rule="llama.h says that llama_memory_seq_pos_max gives the largest position present; it does not.",
        because="Sequence 0 must end at position 3, because it ended there when it was saved; but it ends at 4.",
        check=Check(kind="positions", step=3, seq=0, expected=(3, 3)),
        kind="contract",
        suspects=(3, 1),
    )
    finding = Finding(
        signature="positions/restore/hybrid",
        slug=findings.slug_of("positions/restore/hybrid"),
        title="positions after a restore",
        oracle="positions",
        kind="contract",
        memory="hybrid",
        build="a llama.cpp tree",
        reproduced=(2, 5),
        scenario=scenario,
        original=scenario,
        violation=violation,
    )
    return finding, {"subject": subject}


def driver() -> tuple[Finding, dict[str, Trace]]:
    params = ContextParams(n_rs_seq=3)
    eagle = DriverParams(kind="draft-eagle3", draft=ModelRef(recipe="eagle3-qwen35", seed=100), p_min=0.5)
    model = ModelRef(recipe="qwen35", version=1, seed=100)
    history, more = [5, 1, 63, 9], [9, 30]
    ops = (
        decode(4),
        Checkpoint(seq=0, slot=0),
        decode(2),
        Rewind(seq=0, slot=0),
        Propose(seqs=(1, 0)),
    )
    scenario = Scenario(model=model, params=params, driver=eagle, ops=ops)
    clean_ops = (decode(4, tuple(history)), Propose(seqs=(0,), last=(7,)))
    reference = Scenario(model=model, params=ContextParams(n_rs_seq=3, n_seq_max=1), driver=eagle, ops=clean_ops)

    def after(step: Step, draft: int) -> Step:
        step.draft_pos = [(0, draft), (-1, -1)]
        return step

    def drafted(op: int, drafts: list[list[int]], hidden: float, logits: float) -> Step:
        row = TapRow(7, 3, 0, True, np.full(32, hidden, np.float32).tobytes())
        tap = Tap(0, [row], np.full(64, logits, np.float32).tobytes())
        pos = [(3, 3), (-1, -1)]
        return Step(op=op, args=[0, 7][-len(drafts) :], rc=1, drafts=drafts, taps=[tap], pos=pos, done=True)

    blobs = [Blob(640, 640, "00"), Blob(196, 196, "01"), Blob(-1, 0)]
    subject = Trace(
        steps=[
            after(decoded(0, rows(history), 0), 2),
            after(Step(op=1, args=[0, 0, 0], blobs=blobs, pos=[(3, 3), (-1, -1)], done=True), 2),
            after(decoded(2, rows(more, 4), 1), 4),
            after(Step(op=3, args=[0, 0, 0], rc=1, value=1, blobs=blobs, pos=[(3, 3), (-1, -1)], done=True), 2),
            after(drafted(4, [[], [8, 9]], 4.5, 8.0), 3),
        ],
        facts=[facts(params)],
        end=End("ok"),
        logits=np.zeros((2, 64), np.float32).tobytes(),
    )
    clean = Trace(
        steps=[decoded(0, rows(history), 0), drafted(1, [[8, 60]], 4.0, 8.0)], facts=[facts(params)], end=End("ok")
    )
    violation = Violation(
        oracle="driver_contract",
        key="driver_contract:draft-eagle3:unoffered",
        rule="speculative.h is silent; what a driver keeps between calls is offered, or does not matter.",
        because="draft-eagle3 offers no state, so everything was put back that there is; but when sequence 0 drafts "
        "behind 4 tokens in operation 4, its token is paired with a hidden row that is off by 4.5.",
        check=Check(kind="draft", step=4, seq=0, what="row", expected=(8, 60), band=2.0e-5, reference=reference),
        kind="contract",
        error=4.5,
        band=2.0e-5,
        suspects=(3,),
        rungs=(
            "paired row: off by 4.5, honest differences stay below 2e-05 (225,000 times)",
            "draft tokens: number 1 differs, no near tie",
        ),
    )
    finding = Finding(
        signature="driver_contract/rewind/hybrid",
        slug=findings.slug_of("driver_contract/rewind/hybrid"),
        title="a restore leaves the driver's row behind",
        oracle="driver_contract",
        kind="contract",
        memory="hybrid",
        build="llama-cpp-python 0.3.36",
        reproduced=(3, 3),
        scenario=scenario,
        original=scenario,
        violation=violation,
        culprit=3,
        environment=ENVIRONMENT,
    )
    return finding, {"subject": subject, "reference": clean}


def patched() -> tuple[Finding, dict[str, Trace]]:
    """The same with a checkout's drivers and a patch, on the user's own models."""
    finding, traces = driver()
    scenario = finding.scenario
    assert scenario.driver is not None
    own = msgspec.structs.replace(
        scenario,
        model=ModelRef(path="/somewhere/q.gguf", sha256="ab" * 32),
        driver=msgspec.structs.replace(scenario.driver, draft=ModelRef(path="/somewhere/d.gguf")),
    )
    environment = ENVIRONMENT | {
        "kind": "tree",
        "build": "llama.cpp/build",
        "drivers": "compiled from the given checkout llama.cpp (common/speculative.cpp 1111111111111111), patched with "
        "fix.diff (2222222222222222); library 3333333333333333",
        "driver_fingerprint": "3333333333333333",
        "driver_sources": ["common/speculative.cpp 1111111111111111", "common/ngram-mod.cpp 4444444444444444"],
        "driver_checkout": "llama.cpp",
        "driver_patch": "fix.diff 2222222222222222",
    }
    return msgspec.structs.replace(finding, scenario=own, original=own, environment=environment), traces


CASES = {"rollback": rollback, "device": device, "positions": positions, "driver": driver, "patched": patched}


@pytest.mark.parametrize("case", CASES)
def test_what_people_read(case: str) -> None:
    written = findings.files(*CASES[case]())
    assert ("repro.py" in written) == (case not in ("driver", "patched"))
    for name in (n for n in SHOWN if n in written):
        golden = DATA / case / f"{name}.golden"
        if os.environ.get("REDRAFT_UPDATE_GOLDEN"):
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_bytes(written[name])
        assert written[name].decode() == golden.read_text("utf-8"), f"{golden.name} of {case} is another now"


@pytest.mark.parametrize("case", CASES)
def test_the_rule_is_the_first_line_and_the_script_is_python(case: str) -> None:
    finding, traces = CASES[case]()
    written = findings.files(finding, traces)
    assert written["README.md"].decode().splitlines()[0] == finding.rule
    text = b"".join(written[name] for name in SHOWN if name in written)
    assert b"/tmp/" not in text
    assert b"/somewhere" not in text
    if "repro.py" not in written:  # the one thing of ours in its program is how the models are written
        assert written["repro.cpp"].count(b"redraft") == (2 if case == "driver" else 0)
        return
    ast.parse(written["repro.py"])
    assert b"import subjects" not in written["repro.py"]
    assert b"redraft" not in written["repro.cpp"]


def test_a_crash_is_told_with_the_numbers_of_its_run() -> None:
    finding, traces = device()
    what = "ngram-map.cpp: map.idx_last_check > cur_len: N > N"
    violation = msgspec.structs.replace(
        finding.violation, because=f"It ended the process: {what}", check=Check(kind="alive", step=4, what=what)
    )
    end = "/tmp/build/common/ngram-map.cpp:260: map.idx_last_check > cur_len: 25 > 21"
    written = findings.files(msgspec.structs.replace(finding, violation=violation, end=end), traces)
    text = written["README.md"].decode()
    assert text.count("ngram-map.cpp:260: map.idx_last_check > cur_len: 25 > 21") == 2
    assert "N > N" not in text and "/tmp/" not in text


def test_a_folder_is_read_back_and_replaced_only_when_asked(tmp_path: Path) -> None:
    finding, traces = rollback()
    folder = findings.write(finding, traces, tmp_path / "out")
    assert folder.name == "removal-seq_rm-hybrid"
    assert findings.load(folder) == finding
    assert findings.load_traces(folder) == traces
    with pytest.raises(FileExistsError):
        findings.write(finding, traces, tmp_path / "out")
    other = msgspec.structs.replace(finding, reproduced=(1, 5))
    findings.write(other, traces, tmp_path / "out", replace=True)
    assert findings.load(folder) == other
    assert [p.name for p in (tmp_path / "out").iterdir()] == [folder.name]


def test_a_kill_while_replacing_is_put_right(tmp_path: Path) -> None:
    finding, traces = rollback()
    folder = findings.write(finding, traces, tmp_path)
    folder.rename(tmp_path / f".old-{finding.slug}")
    (tmp_path / ".new-removal-xyz").mkdir()
    assert findings.sweep(tmp_path) == [folder]
    assert findings.load(folder) == finding
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_an_error_that_is_no_number_is_kept(tmp_path: Path) -> None:
    finding, traces = rollback()
    assert finding.violation is not None
    bad = msgspec.structs.replace(finding, violation=msgspec.structs.replace(finding.violation, error=float("nan")))
    folder = findings.write(bad, traces, tmp_path)
    assert findings.load(folder).violation is not None
    assert "max abs difference not finite" in (folder / "README.md").read_text("utf-8")


def test_malformed_folders_are_refused(tmp_path: Path) -> None:
    finding, traces = device()
    folder = findings.write(finding, traces, tmp_path)
    good = (folder / "finding.json").read_text("utf-8")
    raw = json.loads(good)
    for bad in (
        "",
        "[]",
        good[:-20],
        json.dumps(raw | {"more": 1}),
        json.dumps(raw | {"version": 2}),
        good.replace('"kind": "crash"', '"kind": "odd"'),
        good.replace('"job":', '"seed": 1,\n  "job":'),
        json.dumps(raw | {"scenario": json.loads(good)["original"] | {"ops": []}}),
    ):
        (folder / "finding.json").write_text(bad, "utf-8")
        with pytest.raises(BadFinding):
            findings.load(folder)
    with pytest.raises(BadFinding):
        findings.load(tmp_path / "nothing")


def test_slugs() -> None:
    assert findings.slug_of("removal/seq_rm/hybrid") == "removal-seq_rm-hybrid"
    assert findings.slug_of("///") == "finding"
    assert len(findings.slug_of("a b" * 100)) <= 80
