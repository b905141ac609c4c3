"""repro.sh does on a real llama-server what the finding says, without redraft: exit code 1, or 0 where it is sound.

The findings are made by hand from real runs.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from fuzz.folder import slug_of
from fuzz.server import finding as findings
from fuzz.server.finding import ServerFinding
from oracles.server.band import cold_flags
from oracles.verdict import Check, Violation
from subjects import recipes
from subjects.scenario import BlobEdit, DriverParams, ModelRef
from subjects.server.build import ServerBuild
from subjects.server.dress import dressed
from subjects.server.runner import run
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    Cut,
    DamageFile,
    EraseSlot,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
)
from subjects.server.trace import Reply, ServerTrace

MODEL = ModelRef(recipe="qwen35", version=recipes.get("qwen35").version, seed=0)
SECONDS = 120


@pytest.fixture(scope="module")
def server(server_build: ServerBuild) -> Path:
    return server_build.path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "my model.gguf"
    dressed(recipes.get("qwen35")).write(path, seed=0)
    return path


def finding_of(program: ServerScenario, check: Check, trace: ServerTrace, into: Path, key: str = "tokens") -> Path:
    violation = Violation(oracle="server-answer", key=key, rule="It must.", because="X must equal Y.", check=check)
    finding = ServerFinding(
        signature="server-answer/x",
        slug=slug_of("server-answer/x"),
        title="An answer that is another one",
        oracle="server-answer",
        kind="fault",
        memory="hybrid",
        build="none",
        reproduced=(1, 1),
        scenario=program,
        original=program,
        violation=violation,
    )
    return findings.write(finding, trace, {}, into)


def reproduce(folder: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run repro.sh; it leaves no file behind."""
    scratch = folder.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    done = subprocess.run(
        [folder / "repro.sh", *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert not list(scratch.iterdir())
    return done


def program_of(*requests: AnyRequest, driver: bool = False, **flags: int) -> ServerScenario:
    d = DriverParams(kind="draft-mtp", n_max=3) if driver else None
    return ServerScenario(model=MODEL, requests=requests, flags=Flags(**flags), driver=d)


@pytest.mark.parametrize("driver", [False, True])
def test_a_sound_server_shows_nothing(server: Path, model: Path, tmp_path: Path, driver: bool) -> None:
    program = program_of(
        Turn(conv=0, n=40, predict=4),
        Turn(conv=1, n=30, stream=2, predict=200, cancel=3),
        Together(asks=(Turn(conv=2, n=9, stream=3), Chat(conv=0), Turn(conv=3, n=9, predict=100, cancel=2))),
        Chat(conv=0, cancel=2),
        SaveSlot(slot=0, file=0),
        RestoreSlot(slot=1, file=0),
        RestoreSlot(slot=1, file=3),
        EraseSlot(slot=1),
        DamageFile(file=0, edits=(BlobEdit(how="set", nth=500, value=7),)),
        Restart(),
        Turn(conv=0, keep=Cut(at="prompt"), n=0, predict=4),
        Turn(conv=4, base=0, keep=Cut(d=-2), n=3, slot=1, predict=6),
        driver=driver,
        parallel=2,
        ctx=1024,
        checkpoints=8,
        spacing=16,
        cache_ram=8,
    )
    trace = run(program, server, model)
    assert trace.end.how == "ok"
    check = Check(kind="reply", step=11, seq=0, row=0, band=1e-3, expected=(1, 2), what="tokens")
    done = reproduce(finding_of(program, check, trace, tmp_path), server)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith("not reproduced")
    answers = {line.split(":")[0]: line for line in lines}
    for reply in (trace.reply(0), trace.reply(10), trace.reply(11)):
        assert reply is not None
        assert (
            f"{' '.join(map(str, reply.tokens))}; {reply.cached} of the prompt cached"
            in (answers[f"request {reply.request}"])
        )
    assert answers["request 1"].endswith("then the client went away")
    assert "error 400" in answers["request 6"]


def test_another_answer_is_seen(server: Path, model: Path, tmp_path: Path) -> None:
    """The script of a run whose prompt was another one: the judged answer cannot be the cold server's."""
    program = program_of(Turn(conv=0, n=12, predict=4), Turn(conv=0, keep=Cut(at="prompt"), n=0, predict=4))
    trace = run(program, server, model)
    check = Check(kind="reply", step=1, seq=0, row=0, band=1e-4, expected=(1, 2), what="tokens")
    folder = finding_of(program, check, trace, tmp_path)
    script = folder / "repro.sh"
    text = script.read_text("utf-8")
    prompt = ",".join(map(str, trace.replies[1].prompt))
    before, cold = text.rsplit(prompt, 1)
    script.write_text(before + ",".join(map(str, reversed(trace.replies[1].prompt))) + cold, "utf-8")
    done = reproduce(folder, server)
    assert done.returncode == 1 and "DIFFERENT" in done.stdout, done.stdout + done.stderr


def test_the_cold_server_is_the_judges(server: Path, model: Path, tmp_path: Path) -> None:
    program = program_of(Turn(conv=0, n=12, predict=4), parallel=2, ctx=768, cache_ram=8, checkpoints=3)
    folder = finding_of(program, Check(kind="reply", step=0, seq=0), run(program, server, model), tmp_path)
    command = (folder / "repro.sh").read_text("utf-8").split("cold_command=(")[1].split("\n)")[0]
    assert f"--ctx-size {cold_flags(program.flags).ctx} --parallel 1" in " ".join(command.split())
    assert "--cache-ram 0" in command and "--ctx-checkpoints 0" in command


def test_slot_actions(server: Path, model: Path, tmp_path: Path) -> None:
    """A refusal that is said to be wrong is seen again; an action that is said to be is not, when it is refused."""
    program = program_of(Turn(conv=0, n=5, predict=1), RestoreSlot(slot=0, file=0))
    trace = run(program, server, model)
    for status, shown in ((400, 1), (200, 0)):
        check = Check(kind="reply", step=1, what="slot", expected=(status, 0))
        done = reproduce(finding_of(program, check, trace, tmp_path / str(status), "slot-restore"), server)
        assert done.returncode == shown, done.stdout + done.stderr


def test_the_known_death(server: Path, model: Path, tmp_path: Path) -> None:
    program = program_of(Turn(conv=0, n=8), driver=True, ubatch=4)
    trace = run(program, server, model)
    assert trace.end.how == "signal"
    done = reproduce(finding_of(program, Check(kind="alive", step=0), trace, tmp_path), server)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "request 0: THE SERVER DIED" in done.stdout
    assert not done.stderr
    assert "GGML_ASSERT(n_ubatch > n_keep_tail) failed" in done.stdout
    # it lives where it is not given so small a batch
    sound = program_of(Turn(conv=0, n=8), driver=True)
    trace = run(sound, server, model)
    done = reproduce(finding_of(sound, Check(kind="alive", step=0), trace, tmp_path / "sound"), server)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_users_own_model(server: Path, model: Path, tmp_path: Path) -> None:
    program = ServerScenario(model=ModelRef(path=str(model)), requests=(Turn(conv=0, n=12, predict=4),))
    check = Check(kind="reply", step=0, seq=0, row=0, band=1e-4, expected=(1, 2), what="logprob")
    folder = finding_of(program, check, run(program, server, model), tmp_path)
    assert not (folder / "model.py").exists()
    assert reproduce(folder, model, server).returncode == 0
    assert reproduce(folder).returncode == 2
    assert reproduce(folder, tmp_path / "nothing.gguf", server).returncode == 2


def test_the_writer_writes_what_was_run(model: Path, tmp_path: Path) -> None:
    program = program_of(Turn(conv=0))
    folder = finding_of(program, Check(kind="alive", step=0), ServerTrace(replies=[Reply(request=0)]), tmp_path)
    subprocess.run(["python3", folder / "model.py", tmp_path / "again.gguf"], check=True)
    assert (tmp_path / "again.gguf").read_bytes() == model.read_bytes()


def test_ctrl_c_leaves_nothing(server: Path, model: Path, tmp_path: Path) -> None:
    program = program_of(*(Turn(conv=0, n=4, predict=2) for _ in range(20)))
    folder = finding_of(program, Check(kind="alive", step=19), run(program, server, model), tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [folder / "repro.sh", server],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as script:
        assert script.stdout is not None and script.stdout.readline().startswith("request 0")
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait(SECONDS) == 130
    assert not list(scratch.iterdir())
    with pytest.raises(ProcessLookupError):
        os.killpg(script.pid, 0)


def test_drafts_are_counted_against_a_server_that_keeps_nothing(server: Path, model: Path, tmp_path: Path) -> None:
    """The known loss: a slot that is restored from its file has no state of the draft."""
    program = program_of(
        Turn(conv=0, n=59, predict=1),
        SaveSlot(slot=0, file=0),
        EraseSlot(slot=0),
        RestoreSlot(slot=0, file=0),
        Turn(conv=0, keep=Cut(at="prompt"), n=5, predict=4),
        driver=True,
    )
    trace = run(program, server, model)
    check = Check(kind="reply", step=4, seq=0, expected=(0, 1), what="acceptance")
    done = reproduce(finding_of(program, check, trace, tmp_path), server)
    assert "a server that keeps nothing accepts" in done.stdout.splitlines()[-1], done.stdout + done.stderr
    last = trace.replies[-1]
    assert f"{last.accepted} of {last.drafted} drafted tokens accepted; a server" in done.stdout
    assert not done.stderr


def test_what_is_not_there_is_named(tmp_path: Path, model: Path) -> None:
    program = ServerScenario(model=ModelRef(path=str(model)), requests=(Turn(conv=0),))
    folder = finding_of(program, Check(kind="alive", step=0), ServerTrace(replies=[Reply(request=0)]), tmp_path)
    for args in ((model, tmp_path / "nothing"), (tmp_path / "nothing", "bash")):
        done = reproduce(folder, *args)
        assert (done.returncode, done.stderr) == (2, f"not found: {tmp_path / 'nothing'}\n")
