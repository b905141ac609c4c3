"""Verbs that take llama-server: what is asked of a campaign, what makes no sense, and files of either subject."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console
from server_fakes import FakeJudge, violation
from server_fakes import model as fake_model

from fuzz import campaign, programs, show
from fuzz.campaign import Result, Status
from fuzz.cli import main, served
from fuzz.drivers import fit
from fuzz.journal import Progress
from fuzz.models import BadModel, from_recipe
from fuzz.server import models
from fuzz.server.finding import options_of
from oracles.verdict import Violation
from subjects.recipes import get
from subjects.scenario import BadScenario, ModelRef, Scenario
from subjects.server.build import ServerBuild
from subjects.server.scenario import Cut, ServerScenario, Turn, dumps
from subjects.server.trace import Deed
from subjects.shimcache import BadBuild

BUILD = ServerBuild(Path("/x/llama-server"), "f00", "llama-server 1", "1")
BEGIN, ON = Turn(conv=0, keep=Cut("start"), n=9), Turn(conv=0, n=3)
PROGRAM = ServerScenario(model=ModelRef(recipe="llama"), requests=(BEGIN, ON))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("REDRAFT_CACHE", str(folder))
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[tuple[campaign.Plan, campaign.Tested, dict[str, Any]]]:
    """The campaigns that were to run."""
    ran: list[tuple[campaign.Plan, campaign.Tested, dict[str, Any]]] = []

    def run(plan: campaign.Plan, out: Path, tested: campaign.Tested, **how: Any) -> Result:
        ran.append((plan, tested, how))
        jobs = {0: Progress(scenarios=1, requests=5, seconds=1.0, deeds={"restored": 2}, coverage={"turn/dense": 5})}
        status = Status(out, how["minutes"], None, jobs=jobs, subject=plan.subject, requests=how["requests"])
        return Result(status, False, [])

    monkeypatch.setattr(served, "find_server", lambda binary, src: BUILD)
    monkeypatch.setattr(campaign, "run", run)
    return ran


def fuzz(out: Path, *more: str) -> int:
    return main(["fuzz", "--subject", "server", "--out", str(out), *more])


def test_a_campaign_is_asked_for_what_is_said(
    tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["--model", "llama", "--flags", "unified", "--flags", "plain", "--requests", "70", "--seed", "3"]
    assert fuzz(tmp_path / "out", *said, "--all-variants", "--json") == 0
    (plan, tested, how) = asked[0]
    assert (plan.subject, plan.build, plan.seed, plan.flags) == ("server", "f00", 3, ["unified", "plain"])
    assert ([m.ref.recipe for m in plan.models], plan.variants) == (["llama"], True)
    assert (how["requests"], how["scenarios"], how["minutes"]) == (70, None, None), "requests end it, not the time"
    assert (tested.server.path, tested.shim, tested.coverage) == ("/x/llama-server", None, None)
    document = json.loads(capsys.readouterr().out)
    assert (document["requests"], document["requests_per_second"], document["deeds"]) == (5, 5.0, {"restored": 2})
    assert document["environment"]["build"] == "llama-server 1"
    assert "/x" not in json.dumps(document["environment"])
    assert "options" not in document["environment"], "the usual server"
    assert (document["models"], document["drivers"], document["flags"]) == (["llama"], [], ["unified", "plain"])


def test_a_campaign_goes_on_with_what_it_was_asked(
    tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert fuzz(out, "--model", "llama", "--flags", "plain", "--minutes", "1") == 0
    assert "Testing llama-server 1 (f00) with llama; seed" in capsys.readouterr().out
    assert main(["fuzz", "--out", str(out), "--resume", "--minutes", "3"]) == 0
    assert asked[0][0] == asked[1][0]
    assert main(["fuzz", "--subject", "library", "--out", str(out), "--resume"]) == 2
    assert "the campaign tests the server" in capsys.readouterr().err
    assert fuzz(out, "--resume", "--flags", "unified") == 2
    assert "other values of flags" in capsys.readouterr().err
    monkeypatch.setattr(served, "find_server", lambda binary, src: ServerBuild(Path("/y"), "bar", "other", "2"))
    assert main(["fuzz", "--out", str(out), "--resume"]) == 2
    assert "tests llama-server f00, this is bar: give its --server-bin" in capsys.readouterr().err


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    """None is there, which is said last."""

    def none(*_: object) -> ServerBuild:
        raise BadBuild("there is no llama-server: make it")

    monkeypatch.setattr(served, "find_server", none)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--subject", "server", "--engine", "coverage"], "--engine goes with --subject library"),
        (["--subject", "server", "--target", "seq_state"], "--target goes with --subject library"),
        (["--subject", "server", "--misuse"], "--misuse goes with --subject library"),
        (["--subject", "server", "--gpu-layers", "1"], "--gpu-layers goes with --subject library"),
        (["--subject", "server", "--build", "x"], "the server is named with --server-bin PATH"),
        (["--subject", "server", "--driver", "all", "--driver-impl", "reference"], "--driver-impl goes with"),
        (["--subject", "server", "--llama-src", "x"], "--llama-src goes with --subject library"),
        (["--subject", "server", "--driver-patch", "x"], "--driver-patch goes with --subject library"),
        (["--subject", "server", "--flags", "no-such"], "no flag set 'no-such'; there are plain, "),
        (["--subject", "server", "--plant", "draft-greedy"], "there are server-stale, "),
        (["--subject", "server", "--model", "no-such"], "neither a file nor a recipe"),
        (["--subject", "server", "--driver", "no-such"], "neither a pair nor a kind of driver"),
        (["--subject", "server", "--draft", "x"], "--draft goes with a driver"),
        (["--plant", "server-stale"], "no planted fault 'server-stale'"),
        (["--flags", "plain"], "--flags goes with --subject server"),
        (["--server-bin", "x"], "--server-bin goes with --subject server"),
        (["--src", "x"], "--src goes with --subject server"),
        (["--requests", "9"], "--requests counts answers of llama-server"),
    ],
)
@pytest.mark.usefixtures("no_server")
def test_what_makes_no_sense_is_said_before_anything_runs(
    argv: list[str], says: str, asked: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["fuzz", "--out", str(tmp_path / "out"), *argv]) == 2
    assert says in capsys.readouterr().err
    assert asked == []
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_is_said(
    asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(*_: object) -> ServerBuild:
        raise BadBuild("there is no llama-server: make it")

    monkeypatch.setattr(served, "find_server", none)
    assert fuzz(tmp_path / "out") == 2
    assert "there is no llama-server: make it" in capsys.readouterr().err
    # a file of the library beside it is replayed all the same, so it is an error of the one
    (tmp_path / "a.json").write_text(dumps(PROGRAM))
    assert main(["replay", str(tmp_path / "a.json"), "--json"]) == 2
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["verdict"], result["text"]) == ("ERROR", "there is no llama-server: make it")


def test_a_campaign_remembers_which_server_it_tests(
    tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(served, "find_server", lambda *which: (given.append(which), BUILD)[1])
    out = tmp_path / "out"
    assert fuzz(out, "--model", "llama", "--server-bin", "/x/llama-server") == 0
    assert main(["fuzz", "--out", str(out), "--resume", "--minutes", "3"]) == 0
    assert given == [(Path("/x/llama-server"), None)] * 2
    told = asked[1][1].environment
    assert told["options"] == "--server-bin PATH/TO/llama-server"
    assert "/x" not in json.dumps(told)
    assert options_of(told) == " --server-bin PATH/TO/llama-server"
    assert fuzz(tmp_path / "b", "--model", "llama", "--src", str(tmp_path)) == 0
    assert main(["fuzz", "--out", str(tmp_path / "b"), "--resume"]) == 0
    assert given[2:] == [(None, tmp_path)] * 2
    assert asked[3][1].environment["options"] == "--src DIR"
    capsys.readouterr()


def test_a_campaign_that_checked_nothing_says_so() -> None:
    jobs = {0: Progress(scenarios=9, requests=0, seconds=70.0)}
    s = Status(Path("out/x"), 1.0, None, jobs=jobs, subject="server")
    assert Result(s, False, []).exit_code("new") == 3
    text = io.StringIO()
    show.final(Result(s, False, []), Console(file=text, width=120))
    assert "no request was checked" in text.getvalue()
    assert "10 s of it were past the end" in text.getvalue()


@pytest.mark.parametrize("verb", ["replay", "explain", "reduce"])
@pytest.mark.parametrize("option", ["--build", "--llama-src", "--driver-patch", "--server-bin", "--src"])
def test_options_of_the_other_subject_are_refused(
    verb: str, option: str, judged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = option in ("--server-bin", "--src")
    if mine:
        judged.write_text(programs.dumps(Scenario(model=PROGRAM.model, ops=())))
    assert main([verb, str(judged), option, "x"]) == 2
    told = " ".join("".join(capsys.readouterr()).split())
    assert f"this program is of {'the library' if mine else 'llama-server'}: name " in told
    assert f"not {option}" in told


def test_a_program_says_what_it_is_for() -> None:
    request = {"ask": "turn", "conv": 0}
    model = {"recipe": "llama"}

    def load(**fields: Any) -> Any:
        return programs.loads(json.dumps({"model": model, **fields}))

    with pytest.raises(BadScenario, match='add "subject": "server"'):
        load(requests=[request])
    with pytest.raises(BadScenario, match="request 1 has no ask 'tern'; there are turn, chat, together"):
        load(subject="server", requests=[request, {"ask": "tern"}])
    with pytest.raises(BadScenario, match='request 0 has no "ask"; there are turn'):
        load(subject="server", requests=[{"conv": 0}])
    with pytest.raises(BadScenario, match=r"request 0, asks 1, has no ask 'restart'; there are turn, chat$"):
        load(subject="server", requests=[{"ask": "together", "asks": [request, {"ask": "restart"}]}])
    assert load(subject="server", requests=[request]).requests == (Turn(conv=0),)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stored program; where a conversation goes on the answer is wrong."""

    def wrong(p: ServerScenario) -> Violation | None:
        at = next((i for i, r in enumerate(p.requests) if isinstance(r, Turn) and r.keep.at == "end"), None)
        return None if at is None else violation(at)

    @contextmanager
    def judge_of(_: ServerBuild, program: ServerScenario) -> Iterator[Any]:
        made = fake_model()
        judge = FakeJudge(None, program.model, Path(), None, None, "dense")
        yield judge, made

    monkeypatch.setattr(served, "find_server", lambda *_: BUILD)
    monkeypatch.setattr(served, "judge_of", judge_of)
    monkeypatch.setattr(FakeJudge, "wrong", staticmethod(wrong))
    monkeypatch.setattr(FakeJudge, "asked", [])
    path = tmp_path / "a.json"
    path.write_text(dumps(PROGRAM))
    return path


def test_replay_says_what_shows(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(judged), "--json", "-v"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["build"], document["server"]) == (None, "f00")
    (result,) = document["results"]
    assert (result["verdict"], result["shown"], result["runs"]) == ("FAILED", 3, 3)
    assert result["text"] == "it must equal the cold server's"
    assert len(result["operations"]) == 2
    assert result["oracles"][0]["oracle"] == "server-answer"
    judged.write_text(dumps(ServerScenario(model=PROGRAM.model, requests=(BEGIN,))))
    assert main(["replay", str(judged), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["verdict"] == "FIXED"


def test_reduce_and_explain(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged.write_text(dumps(ServerScenario(model=PROGRAM.model, requests=(BEGIN, ON, BEGIN, ON, BEGIN))))
    assert main(["explain", str(judged)]) == 1
    assert "[server-answer] " in capsys.readouterr().out
    assert main(["reduce", str(judged)]) == 0
    told = capsys.readouterr()
    small = programs.loads(told.out)
    assert isinstance(small, ServerScenario)
    assert len(small.requests) < 5
    assert "5 requests reduced to" in told.err
    judged.write_text(dumps(ServerScenario(model=PROGRAM.model, requests=(BEGIN,))))
    assert main(["reduce", str(judged)]) == 2
    assert "it shows no violation" in capsys.readouterr().err
    assert main(["explain", str(judged)]) == 0


def test_requests_that_mean_nothing_are_refused(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged.write_text(dumps(ServerScenario(model=PROGRAM.model, requests=())))
    for verb in ("reduce", "explain"):
        assert main([verb, str(judged)]) == 2
        assert "there are none; a program has at least one" in capsys.readouterr().err


def test_programs_are_told_apart() -> None:
    plain = Scenario(model=PROGRAM.model, ops=())
    for program, subject in ((PROGRAM, "server"), (plain, "library")):
        assert programs.loads(programs.dumps(program)) == program
        assert programs.loads(programs.packed(program)) == program
        assert programs.subject_of(program) == subject
    assert (programs.size(PROGRAM), programs.size(plain)) == (2, 0)
    with pytest.raises(BadScenario, match="subject 'client', this redraft knows library and server"):
        programs.loads(b'{"subject": "client"}')


def test_models_of_the_server_have_files_of_their_own(cache: Path) -> None:
    folder = cache / "models"
    bare = from_recipe(get("llama"), folder)
    (dressed,) = models.resolve(["llama"], [], None, folder, lambda: pytest.fail("no file is looked at"))
    assert dressed.path != bare.path
    assert dressed.ref.sha256 != bare.ref.sha256
    assert (dressed.ref.recipe, dressed.traits) == (bare.ref.recipe, bare.traits)
    assert from_recipe(get("llama"), folder) == bare, "as it was"
    stored = ServerScenario(model=dressed.ref, requests=(BEGIN,))
    assert models.of_program(stored, folder, Path).path == dressed.path
    with pytest.raises(BadModel, match="another file"):
        models.of_program(ServerScenario(model=bare.ref, requests=()), folder, Path)


def test_files_without_a_tokenizer_are_refused(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, dressed = tmp_path / "bare.gguf", tmp_path / "dressed.gguf"
    assert main(["models", "write", "qwen35", str(bare)]) == 0
    assert main(["models", "write", "qwen35", str(dressed), "--server"]) == 0
    assert fit.look(dressed).vocabulary == "test"
    assert dressed.read_bytes() == Path(models.resolve(["qwen35"], [], None, cache, Path)[0].path).read_bytes()
    capsys.readouterr()
    assert main(["fuzz", "--subject", "server", "--model", str(bare), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "bare.gguf has no tokenizer (tokenizer.ggml.model: no_vocab)" in told
    assert "`redraft models write NAME FILE --server`" in told
    stored = ServerScenario(model=ModelRef(path=str(bare)), requests=(BEGIN,))
    with pytest.raises(BadModel, match="has no tokenizer"):
        models.of_program(stored, cache, Path)


def test_models_with_drivers(cache: Path) -> None:
    folder = cache / "models"
    found = models.resolve([], ["llama-eagle3"], None, folder, Path)
    assert [m.pair for m in found] == ["llama-eagle3"]
    assert all("-server" in Path(p).name for m in found for p in (m.path, m.draft))
    default = models.resolve([], [], None, folder, Path)
    assert [m.ref.recipe for m in default] == list(models.DEFAULT)
    (mine,) = models.resolve(["qwen35"], ["draft-mtp"], None, folder, Path)
    assert mine.driver is not None and mine.driver.kind == "draft-mtp"


def test_what_people_see_of_a_campaign_over_the_server() -> None:
    deeds = {"restored": 1200, "checkpoint": 5, "round": 7}
    coverage = {"turn/dense": 9, "together/hybrid": 2, "turn/hybrid": 1}
    jobs = {0: Progress(scenarios=20, requests=300, unjudged=1, seconds=5.0, deeds=deeds, coverage=coverage)}
    s = Status(Path("out/x"), 1.0, None, jobs=jobs, subject="server", requests=600)
    assert show.headline(s) == (
        "20 programs, 300 requests, 60/s, 1 unknown, 3 request x memory cells, findings: 0 new, 0 known, 0:05 left"
    )
    text = io.StringIO()
    show.final(Result(s, False, []), Console(file=text, width=120))
    shown = text.getvalue()
    assert shown.startswith("request")
    assert "The server: 5 checkpoints made, 1,200 restored, 7 rounds of drafting." in shown
    assert "20 programs, 300 checked requests in 5 s (60/s); 1 without a judged comparison (5.0 %)" in shown
    assert show.deeds_line({}) == ""
    event = {"signature": "server-answer/dense", "known": None, "requests": 2, "reproduced": [3, 3]}
    assert show.finding_line({**event, "oracle": "server-answer"}) == "server-answer/dense  (new; 2 requests; 3 of 3)"


def test_every_deed_has_words() -> None:
    assert set(show.DEEDS) == set(get_args(Deed))
