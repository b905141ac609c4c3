"""What people read of a finding on llama-server: README, explanation and script, for findings made by hand.

`REDRAFT_UPDATE_GOLDEN=1 pytest tests/golden/test_server_finding.py` writes the files anew; read the difference first.
"""

import ast
import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from fuzz import finding as library
from fuzz.folder import BadFinding, slug_of
from fuzz.server import finding as findings
from fuzz.server.finding import ServerFinding
from oracles.verdict import Check, Violation
from subjects.scenario import DriverParams, ModelRef
from subjects.server.scenario import Chat, Cut, Flags, RestoreSlot, SaveSlot, ServerScenario, Together, Turn
from subjects.server.trace import End, Event, Reply, ServerTrace

DATA = Path(__file__).parent / "data"
SHOWN = ("README.md", "explanation.txt", "repro.sh")
MODEL = ModelRef(recipe="qwen35", version=1, seed=0)
ENVIRONMENT: dict[str, str | int | list[str]] = {
    "build": "llama-cpp-python 0.3.36",
    "llama_cpp": "llama.cpp 0.5.0 0c1e57098",
    "fingerprint": "0123456789abcdef",
    "cpu": "some CPU",
    "platform": "Linux-6.1-x86_64",
    "cores": 2,
}
LOG = (
    "I slot launch_slot_: id  0 | task 0 | processing task, is_child = 0\n"
    "/tmp/build/llama.cpp/src/llama-batch.cpp:641: GGML_ASSERT(n_ubatch > n_keep_tail) failed\n"
    "#0  0x00007f in ggml_abort () from /tmp/build/bin/libggml-base.so\n"
)
Case = tuple[ServerFinding, ServerTrace, dict[tuple[int, int], Reply]]


def tops(*tokens: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(((t, -0.125), ((t + 1) % 64, -3.5), ((t + 2) % 64, -5.0)) for t in tokens)


def restored() -> Case:
    """A checkpoint that is put back gives another answer, with drafting."""
    first, answer, more = tuple(range(1, 13)), (20, 21, 22, 23), (9, 8, 7)
    program = ServerScenario(
        model=MODEL,
        flags=Flags(checkpoints=4, spacing=8, cache_ram=8, ubatch=8),
        driver=DriverParams(kind="draft-mtp", n_max=3),
        requests=(
            Turn(conv=0, n=12, predict=4),
            Turn(conv=1, n=6, stream=2, predict=2),
            Turn(conv=0, keep=Cut(at="end", d=-2), n=3, predict=3),
        ),
    )
    prompt = (*first, *answer[:-2], *more)
    replies = [
        Reply(
            request=0, status=200, prompt=first, predict=4, tokens=answer, tops=(*tops(20), (), (), *tops(23)),
            processed=12, length=12, drafted=3, accepted=2, slot=0,
            events=(Event("checkpoint", 0, 8), Event("round", 0, 2, 3)),
        ),
        Reply(
            request=1, status=200, prompt=(40, 41, 42, 43, 44, 45), predict=2, tokens=(46, 47), tops=tops(46, 47),
            processed=6, length=6, slot=0, events=(Event("cached", 0, 15), Event("erased", 0, 8)),
        ),
        Reply(
            request=2, status=200, prompt=prompt, predict=3, tokens=(30, 31, 50), tops=(*tops(30, 31), *tops(50)),
            cached=8, processed=9, length=17, drafted=2, accepted=1, slot=0,
            events=(
                Event("cached", 0, 7), Event("loaded", 0), Event("restored", 0, 8, 8), Event("checkpoint", 0, 13),
                Event("round", 0, 1, 2), Event("replay", 0, 1, 2),
            ),
        ),
    ]  # fmt: skip
    cold = Reply(request=2, status=200, prompt=prompt, predict=3, tokens=(30, 31, 32), tops=tops(30, 31, 32), length=17)
    check = Check(kind="reply", step=2, seq=0, row=2, band=3e-4, expected=(50, 32), what="tokens")
    violation = Violation(
        oracle="server-answer",
        key="tokens",
        rule="llama-server's README says of cache_prompt that only the suffix that differs is processed again.",
        because="The answer to request 2 must equal the cold server's, because both continue the same 17 tokens; but "
        "token 2 is 50, not 32, which the cold server prefers by 4.88 (band 0.0003), after a checkpoint restored at 8 "
        "tokens.",
        check=check,
        error=4.875,
        band=3e-4,
        rungs=(
            "3 tokens compared, 3 of them with probabilities",
            "near tie: no, the cold server is decided",
        ),
    )
    finding = ServerFinding(
        signature="server-answer/tokens/restored/hybrid",
        slug=slug_of("server-answer/tokens/restored/hybrid"),
        title="An answer is another one after a checkpoint was restored",
        oracle="server-answer",
        kind="fault",
        memory="hybrid",
        build="0123456789abcdef",
        reproduced=(3, 3),
        scenario=program,
        original=program,
        violation=violation,
        attached=("server-history: the answer depends on what other conversations said",),
        seed=7,
        job=1,
        found_by=" --subject server --model qwen35",
        environment=ENVIRONMENT,
    )
    return finding, ServerTrace(replies=replies), {(2, 0): cold}


def died() -> Case:
    """The server dies on the user's own model, with a draft of the user's."""
    model = ModelRef(path="/somewhere/my model.gguf", sha256="ab" * 32)
    draft = ModelRef(path="/somewhere/draft.gguf")
    program = ServerScenario(
        model=model,
        flags=Flags(parallel=2, ubatch=4, kv_unified=True),
        driver=DriverParams(kind="draft-simple", draft=draft),
        requests=(
            SaveSlot(slot=0, file=1),
            RestoreSlot(slot=1, file=2),
            Together(asks=(Chat(conv=0, words=2), Turn(conv=0, n=3, predict=50, cancel=2))),
        ),
    )
    replies = [
        Reply(request=0, status=200, n=4, slot=0),
        Reply(request=1, status=400, error="Unable to restore slot: it's no file", slot=1),
        Reply(request=2, part=0, messages=(("user", "red don't"),), predict=8, error="RemoteDisconnected"),
        Reply(request=2, part=1, status=200, prompt=(1, 2, 3), predict=50, tokens=(4, 5), cancelled=True),
    ]
    text = "llama-batch.cpp: GGML_ASSERT(n_ubatch > n_keep_tail) failed"
    violation = Violation(
        oracle="server-alive",
        key=f"server-alive:{text}",
        rule="llama-server's README is silent; a request with valid arguments must be answered, and the next one too.",
        because=f"Request 2 (together) must be answered; but it ended the server: {text}",
        check=Check(kind="alive", step=2, what=text),
        kind="crash",
    )
    finding = ServerFinding(
        signature=f"server-alive:{text}",
        slug="died",
        title="llama-server dies with a small ubatch",
        oracle="server-alive",
        kind="crash",
        memory="dense",
        build="0123456789abcdef",
        reproduced=(2, 3),
        scenario=program,
        original=program,
        violation=violation,
        known="ubatch-rollback",
        end="/tmp/build/llama.cpp/src/llama-batch.cpp:641: GGML_ASSERT(n_ubatch > n_keep_tail) failed\n",
        environment=ENVIRONMENT,
    )
    end = End(how="signal", number=6, request=2)
    return finding, ServerTrace(replies=replies, end=end, log=LOG), {}


def slower() -> Case:
    """The answer is right, and a draft is lost; it does not show in every run."""
    finding, trace, _ = restored()
    request = trace.replies[2]
    clean = msgspec.structs.replace(request, cached=0, processed=17, drafted=3, accepted=2, events=())
    check = Check(kind="reply", step=2, seq=0, expected=(1, 2), what="acceptance")
    violation = Violation(
        oracle="server-acceptance",
        key="acceptance",
        rule="llama-server's README is silent; a restored state must draft like the state that was saved.",
        because="The answer to request 2 is the clean server's, so as many drafts must be accepted; but 1 of 2 are, "
        "where a server that keeps nothing accepts 2 of 3.",
        check=check,
    )
    other = msgspec.structs.replace(
        finding,
        title="Fewer drafts are accepted after a checkpoint was restored",
        oracle="server-acceptance",
        signature="server-acceptance/hybrid/draft-mtp/checkpoint",
        slug="slower",
        reproduced=(1, 3),
        violation=violation,
        attached=(),
    )
    return other, trace, {(2, 0): clean}


CASES = {"server": restored, "server_died": died, "server_slower": slower}


@pytest.mark.parametrize("case", CASES)
def test_what_people_read(case: str) -> None:
    written = findings.files(*CASES[case]())
    for name in SHOWN:
        golden = DATA / case / f"{name}.golden"
        if os.environ.get("REDRAFT_UPDATE_GOLDEN"):
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_bytes(written[name])
        assert written[name].decode() == golden.read_text("utf-8"), f"{golden.name} of {case} is another now"


@pytest.mark.parametrize("case", CASES)
def test_the_rule_is_first_and_the_programs_need_nothing_of_ours(case: str) -> None:
    finding, trace, cold = CASES[case]()
    written = findings.files(finding, trace, cold)
    assert written["README.md"].decode().splitlines()[0] == finding.rule
    for name in (*SHOWN, "server.log", "trace.json"):
        assert b"/tmp/" not in written[name] and b"/somewhere" not in written[name]
    assert ("model.py" in written) == (case != "server_died")
    for name in {"model.py", "answers.py"} & set(written):
        ast.parse(written[name])
    for name in {"model.py", "answers.py", "repro.sh"} & set(written):
        assert b"redraft" not in written[name]


@pytest.mark.parametrize("case", CASES)
def test_the_script_is_bash(case: str, tmp_path: Path) -> None:
    folder = findings.write(*CASES[case](), tmp_path)
    assert os.access(folder / "repro.sh", os.X_OK)
    subprocess.run(["bash", "-n", folder / "repro.sh"], check=True)


def test_what_cannot_be_run_is_told(tmp_path: Path) -> None:
    folder = findings.write(*restored(), tmp_path)
    done = subprocess.run([folder / "repro.sh", tmp_path / "nothing"], check=False, capture_output=True, text=True)
    assert done.returncode == 2 and f"not found: {tmp_path / 'nothing'}" in done.stderr
    folder = findings.write(*died(), tmp_path)
    done = subprocess.run([folder / "repro.sh"], check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "MODEL.gguf DRAFT.gguf [llama-server]" in done.stderr


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_read_back(case: str, tmp_path: Path) -> None:
    finding, trace, cold = CASES[case]()
    folder = findings.write(finding, trace, cold, tmp_path)
    assert findings.load(folder) == findings.load_any(folder) == finding
    found, clean = findings.load_trace(folder)
    assert (found.replies, found.end, clean) == (trace.replies, trace.end, cold)
    with pytest.raises(FileExistsError):
        findings.write(finding, trace, cold, tmp_path)
    other = msgspec.structs.replace(finding, reproduced=(1, 5))
    findings.write(other, trace, cold, tmp_path, replace=True)
    assert findings.load(folder) == other
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_findings_of_the_other_kind_and_malformed_ones_are_refused(tmp_path: Path) -> None:
    folder = findings.write(*restored(), tmp_path)
    with pytest.raises(BadFinding):
        library.load(folder)
    path = folder / "finding.json"
    good = path.read_text("utf-8")
    raw = json.loads(good)
    for bad in (
        "",
        "[]",
        good[:-20],
        json.dumps(raw | {"more": 1}),
        json.dumps(raw | {"version": 2}),
        json.dumps(raw | {"subject": "other"}),
        good.replace('"job":', '"seed": 1,\n  "job":'),
        json.dumps(raw | {"scenario": raw["scenario"] | {"requests": []}}),
    ):
        path.write_text(bad, "utf-8")
        with pytest.raises(BadFinding):
            findings.load_any(folder)
    with pytest.raises(BadFinding):
        findings.load_any(tmp_path / "nothing")
    path.write_text(good, "utf-8")
    (folder / "cold.json").write_text("{}", "utf-8")
    with pytest.raises(BadFinding):
        findings.load_trace(folder)


def test_a_connection_that_breaks_is_no_end() -> None:
    finding, trace, cold = died()
    for how, code, said in (("signal", 2, "ended the server by SIGABRT"), ("broken", 1, "the server lived on")):
        trace.end = End(how=how, number=6, request=2)  # type: ignore[arg-type]
        written = findings.files(finding, trace, cold)
        assert said in written["README.md"].decode()
        assert f'echo "$2: $(cat "$work/$1.error")"\n        exit {code}\n' in written["repro.sh"].decode()


def test_where_probabilities_are_furthest_apart_is_told() -> None:
    finding, trace, cold = restored()
    assert finding.violation is not None
    trace.replies[2].tokens = cold[2, 0].tokens
    trace.replies[2].tops = (*cold[2, 0].tops[:2], ((32, -0.25), (33, -1.5), (34, -5.0)))
    check = Check(kind="reply", step=2, seq=0, row=2, band=3e-4, expected=(32, 32), what="logprob")
    violation = msgspec.structs.replace(finding.violation, check=check, error=2.0)
    finding = msgspec.structs.replace(finding, violation=violation)
    said = "worst at token 2 of the answer: the log-probability of token 33 is -1.5 as served, -3.5 of the cold server"
    for name in ("README.md", "explanation.txt"):
        assert said in " ".join(findings.files(finding, trace, cold)[name].decode().split())


def test_a_program_that_was_reduced_is_told_from_one_that_was_not() -> None:
    finding, trace, cold = restored()
    first = msgspec.structs.replace(finding.scenario, requests=finding.scenario.requests[:1])
    for scenario, reproduced, said in (
        (finding.scenario, (3, 3), "### Smallest program\n"),
        (first, (2, 3), "### Program (not reduced: it shows in 2 of 3 runs)\n"),
        (msgspec.structs.replace(first, driver=None), (2, 3), "### Smallest program (it shows in 2 of 3 runs)\n"),
    ):
        told = msgspec.structs.replace(finding, scenario=scenario, reproduced=reproduced)
        told = msgspec.structs.replace(told, violation=None)
        assert said in findings.files(told, trace, cold)["README.md"].decode()
