"""The command line in this process, as far as nothing native is needed: usage errors, lists, reading files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import MODEL, ideal_judge

from fuzz import campaign, cli, models
from fuzz.cli import VERBS, common, main, replay
from fuzz.cli.common import Usage, expand, read
from fuzz.known import load_all
from fuzz.triage import Symptom
from oracles.registry import ORACLES
from oracles.server.registry import ORACLES as SERVER_ORACLES
from oracles.verdict import Check, Verdict, Violation
from subjects.pairs import all_pairs
from subjects.recipes import names
from subjects.scenario import Decode, ModelRef, Part, Scenario, dumps

PROGRAM = Scenario(model=ModelRef(recipe="llama"), ops=(Decode(parts=(Part(seq=0, n=1),)),))


def test_one_module_a_verb() -> None:
    folder = Path(cli.__file__).parent
    assert {p.stem for p in folder.glob("*.py")} - {"__init__", "common", "served"} == set(VERBS)
    for module in VERBS.values():
        assert module.HELP
        assert (module.__doc__ or "").strip()
        assert callable(module.add)
        assert callable(module.run)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["no-such-verb"],
        ["fuzz", "--jobs"],
        ["fuzz", "--jobs", "0"],
        ["fuzz", "--jobs", "x"],
        ["fuzz", "--minutes", "0"],
        ["fuzz", "--minutes", "-1"],
        ["fuzz", "--minutes", "nan"],
        ["fuzz", "--minutes", "inf"],
        ["fuzz", "--scenarios", "0"],
        ["fuzz", "--scenarios", "1.5"],
        ["fuzz", "--avoid", "sometimes"],
        ["fuzz", "--fail-on", "old"],
        ["fuzz", "--reduce-seconds", "0"],
        ["fuzz", "stray"],
        ["fuzz", "--gpu-layers", "-1"],
        ["replay"],
        ["reduce"],
        ["explain"],
        ["models", "write"],
        ["models", "write", "llama"],
        ["known", "--verbose"],
    ],
)
def test_wrong_usage_is_exit_2_and_says_so_on_stderr(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: redraft")


def test_errors_of_a_verb_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", "--plant", "no-such-fault"]) == 2
    assert main(["models", "write", "no-such-model", str(tmp_path / "x.gguf")]) == 2
    assert main(["models", "write", "llama", str(tmp_path / "no" / "x.gguf")]) == 2
    assert main(["explain", str(tmp_path / "nothing")]) == 2
    assert main(["fuzz", "--build", str(tmp_path)]) == 2
    assert main(["replay", str(tmp_path), "--build", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 6
    assert [line.partition(":")[0] for line in lines] == [
        "redraft fuzz",
        "redraft models",
        "redraft models",
        "redraft explain",
        "redraft fuzz",
        "redraft replay",
    ]
    assert "'no-such-fault'" in lines[0]
    assert "draft-greedy" in lines[0]
    assert "llama" in lines[1]
    assert "cannot write" in lines[2]

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(VERBS["known"], "run", interrupted)
    assert main(["known"]) == 130


@pytest.mark.parametrize(
    ("error", "says", "lines"),
    [
        (MemoryError(), "redraft known: out of memory", 1),
        (OSError(28, "No space left on device", "x.json"), "redraft known: [Errno 28] No space left on device", 1),
        (ValueError("odd"), "redraft known: this is a fault of redraft's own: ValueError: odd", None),
        (UnicodeEncodeError("utf-8", "s\udcff", 1, 2, "surrogates"), "redraft known: 's\\udcff' is not UTF-8", 1),
        (UnicodeEncodeError("latin-1", "→", 0, 1, "no"), "set PYTHONUTF8=1", 1),
    ],
)
def test_nothing_that_goes_wrong_has_the_exit_code_of_new_findings(
    error: Exception, says: str, lines: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(_: object) -> int:
        raise error

    monkeypatch.setattr(VERBS["known"], "run", wrong)
    assert main(["known"]) == 2
    err = capsys.readouterr().err
    assert says in err.splitlines()[-1]
    assert lines is None or len(err.splitlines()) == lines


def test_names_that_are_not_utf_8_are_refused_or_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["replay", "--json", "s/\udcff.json"], ["fuzz", "--out", "o\udcff"]):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and "is not UTF-8" in err and len(err.splitlines()) == 1


def test_an_interrupt_while_it_is_loaded_is_quiet() -> None:
    code = (
        "import builtins, sys\n"
        "load = builtins.__import__\n"
        "def stop(name, *rest):\n"
        "    if name.startswith('msgspec'):\n"
        "        raise KeyboardInterrupt\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = stop\n"
        "import fuzz.cli\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(cli.__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--driver", "qwen35-mtp", "--misuse"], "leave out --misuse or --driver"),
        (["--driver", "qwen35-mtp", "--gpu-layers", "3"], "--gpu-layers: pairs run on the CPU"),
        (["--driver", "llama-simple", "--draft", "x.gguf"], "a pair has its own draft; add --model FILE"),
        (["--model", "llama", "--draft", "x.gguf"], "--draft goes with a driver"),
        (["--driver-impl", "reference"], "--driver-impl goes with a driver; add --driver NAME"),
        (["--all-variants"], "--all-variants goes with a driver"),
        (["--resume", "--driver-impl", "reference"], "--driver-impl goes with a driver"),
        (["--resume", "--gpu-layers", "3"], "the campaign that goes on has its models"),
        (["--plant", "pending-row"], "no planted fault 'pending-row'"),
    ],
)
def test_an_option_that_nothing_would_come_of_is_refused(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VERBS["fuzz"], "bench", lambda *_: pytest.fail("the build was looked for"))
    assert main(["fuzz", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and len(err.splitlines()) == 1


def test_a_campaign_with_drivers_goes_on_with_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = SimpleNamespace(name="b", fingerprint="b", version="")
    at = SimpleNamespace(
        build=build,
        shim=tmp_path,
        cache=tmp_path,
        models=tmp_path,
        driver=tmp_path / "lib",
        driver_origin=lambda: {"drivers": "patched with fix.diff (0123456789abcdef); library lib"},
    )
    fuzz_verb = VERBS["fuzz"]
    monkeypatch.setattr(fuzz_verb, "bench", lambda *_: at)
    monkeypatch.setattr(fuzz_verb, "environment", lambda _: {})
    ran: list[campaign.Plan] = []

    def stop(asked: campaign.Plan, *_: object, **__: object) -> None:
        ran.append(asked)
        raise campaign.CampaignError("far enough")

    monkeypatch.setattr(campaign, "run", stop)

    def fuzz(*more: str) -> str:
        assert main(["fuzz", "--out", str(tmp_path / "o"), *more]) == 2
        return capsys.readouterr().err

    asked = ["--driver", "qwen35-mtp", "--plant", "pending-row"]
    assert main(["fuzz", "--out", str(tmp_path / "o"), *asked, "--seed", "1"]) == 2
    out, err = capsys.readouterr()
    assert "far enough" in err
    assert "Testing b (b), drivers patched with fix.diff (0123456789abcdef); library lib, with" in " ".join(out.split())
    assert "far enough" in fuzz("--resume")
    assert "far enough" in fuzz("--resume", "--driver", "qwen35-mtp")
    assert "far enough" in fuzz("--resume", *asked)
    assert ran[0].fault == "pending-row"
    assert all(p == ran[0] for p in ran) and len(ran) == 4
    for other in (["--driver", "step35-mtp"], ["--model", "llama"], ["--plant", "verify-rows"], ["--all-variants"]):
        assert "was started with other values of" in fuzz("--resume", *other)
    assert "other values of misuse" in fuzz("--resume", "--misuse")
    assert len(ran) == 4


def test_what_is_left_out_is_taken_from_the_campaign_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzz_verb = VERBS["fuzz"]
    ran: list[campaign.Plan] = []

    def bench(build: Path | None, src: Path | None, patch: Path | None) -> SimpleNamespace:
        drivers = f"lib-{src and src.name}-{patch and patch.name}"
        found = SimpleNamespace(name="b", fingerprint="own" if build else "b", version="")
        return SimpleNamespace(
            build=found,
            shim=tmp_path,
            cache=tmp_path,
            models=tmp_path,
            driver=Path(drivers),
            driver_origin=lambda: {"drivers": "d"},
        )

    def stop(asked: campaign.Plan, *_: object, **__: object) -> None:
        ran.append(asked)
        raise campaign.CampaignError("far enough")

    monkeypatch.setattr(fuzz_verb, "bench", bench)
    monkeypatch.setattr(fuzz_verb, "environment", lambda _: {})
    monkeypatch.setattr(campaign, "run", stop)

    def fuzz(out: str, *more: str) -> str:
        assert main(["fuzz", "--out", str(tmp_path / out), *more]) == 2
        return capsys.readouterr().err

    for avoid in ("always", "never"):
        fuzz(avoid, "--model", "llama", "--avoid", avoid)
        assert "far enough" in fuzz(avoid, "--resume")
        assert ran[-1] == ran[-2] and ran[-1].avoid == avoid
        assert "other values of avoid" in fuzz(avoid, "--resume", "--avoid", "auto")
    asked = ["--llama-src", "x/mine", "--driver-patch", "fix"]
    fuzz("src", "--driver", "qwen35-mtp", *asked)
    assert "give --llama-src and --driver-patch again" in fuzz("src", "--resume")
    assert fuzz("src", "--resume", *asked[2:]).endswith(": give --llama-src again\n")
    assert "compiled from other sources" in fuzz("src", "--resume", "--llama-src", "x/other", *asked[2:])
    assert "far enough" in fuzz("src", "--resume", *asked)
    fuzz("own", "--model", "llama", "--build", "t")
    assert fuzz("own", "--resume").endswith(": give --build again\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--driver", "draft-mpt"], "did you mean draft-mtp"),
        (["--driver", "draft-mpt", "--model", "qwen35"], "did you mean draft-mtp"),
        (["--driver", "all", "--model", "qwen35"], "'all' stands for pairs, which have models of their own; leave out"),
        (["--driver", "qwen35-mtp", "--model", "qwen35"], "'qwen35-mtp' stands for pairs"),
        (["--model", "qwen36"], "did you mean qwen35"),
        (["--model", "gemma4-assistant"], "is a model of programs with a driver: --driver gemma4-mtp"),
    ],
)
def test_a_name_that_is_none_is_answered_with_near_ones(
    argv: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = SimpleNamespace(models=tmp_path, shim=tmp_path)
    monkeypatch.setattr(VERBS["fuzz"], "bench", lambda *_: at)
    assert main(["fuzz", *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.splitlines()) == 1


def test_reduce_looks_first_whether_its_result_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VERBS["reduce"], "bench", lambda *_: pytest.fail("it began"))
    (tmp_path / "a.json").write_text(dumps(PROGRAM))
    for out in (tmp_path / "no" / "x.json", tmp_path):
        assert main(["reduce", str(tmp_path / "a.json"), "--out", str(out)]) == 2
        assert f"cannot write {out}: " in capsys.readouterr().err


def test_the_names_of_pairs_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pairs"]) == 0
    words = capsys.readouterr().out.split()
    assert all(words.count(p.name) == 2 and p.kind in words for p in all_pairs())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["models", "--json"], set(names(drivers=True))),
        (["oracles", "--json"], {o.name for o in (*ORACLES, *SERVER_ORACLES)}),
        (["known", "--json"], {f.name for f in load_all()}),
    ],
)
def test_lists_as_json(argv: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == expected
    assert len(rows) == len(expected)
    # and for people
    assert main(argv[:1]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in expected)


def test_a_model_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (tmp_path / x for x in "abc")
    assert main(["models", "write", "llama", str(a)]) == 0
    assert f"{a.stat().st_size} bytes" in capsys.readouterr().out
    assert main(["models", "write", "llama", str(b)]) == 0
    assert main(["models", "write", "llama", str(c), "--seed", "1"]) == 0
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()
    assert a.read_bytes()[:4] == b"GGUF"


def test_reading_files(tmp_path: Path) -> None:
    good = tmp_path / "a.json"
    good.write_text(dumps(PROGRAM))
    assert read(good) == PROGRAM
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "b.json", tmp_path / "c.json", tmp_path / "none.json", tmp_path):
        with pytest.raises(Usage) as e:
            read(path)
        assert str(e.value).count(str(path)) == 1, "said once"


def test_folders_are_opened(tmp_path: Path) -> None:
    for name in ("two.json", "one.json", "readme.txt"):
        (tmp_path / name).write_text(dumps(PROGRAM))
    assert expand([tmp_path]) == [tmp_path / "one.json", tmp_path / "two.json"]
    assert expand([tmp_path / "two.json"]) == [tmp_path / "two.json"]
    found = tmp_path / "out" / "findings" / "x"
    found.mkdir(parents=True)
    (found / "finding.json").write_text("{}")
    assert expand([tmp_path / "out"]) == [found]
    assert expand([found]) == [found]
    (tmp_path / "empty").mkdir()
    with pytest.raises(Usage, match="no findings and no scenarios"):
        expand([tmp_path / "empty"])


def test_pipes_are_wide_enough_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert common.console().width == 120
    assert common.console(stderr=True).width == 120


def plan(**changed: object) -> campaign.Plan:
    asked = {"models": [], "build": "b", "seed": 1, "jobs": 1, "avoid": "auto", "misuse": False, **changed}
    return campaign.Plan(**asked)  # type: ignore[arg-type]


def test_a_campaign_that_runs_is_not_resumed_beside_itself(tmp_path: Path) -> None:
    half = tmp_path / "state" / ".new-x"
    with campaign.prepare(tmp_path, plan(), resume=False):
        half.parent.mkdir()
        half.write_text("")  # what a job of it is writing
        with pytest.raises(campaign.CampaignError, match="is running"), campaign.prepare(tmp_path, plan(), resume=True):
            pass
        assert half.exists()
    with campaign.prepare(tmp_path, plan(), resume=True):
        assert not half.exists(), "what a kill left half-written"
    with (
        pytest.raises(campaign.CampaignError, match="other values of seed"),
        campaign.prepare(tmp_path, plan(seed=2), resume=True),
    ):
        pass


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"3", b"\xff"])
def test_a_damaged_campaign_is_a_usage_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "campaign.json").write_bytes(data)
    with pytest.raises(campaign.CampaignError, match=r"damaged|no campaign"):
        campaign.stored(tmp_path)
    with (
        pytest.raises(campaign.CampaignError, match=r"damaged|no campaign"),
        campaign.prepare(tmp_path, plan(), resume=True),
    ):
        pass


def test_layers_on_the_gpu_are_kept(tmp_path: Path) -> None:
    (model,) = models.resolve(["llama"], tmp_path, tmp_path / "no-shim", 7)
    assert model.ref.n_gpu_layers == 7
    assert models.of_scenario(model.ref, tmp_path, tmp_path / "no-shim") == model
    assert models.resolve(["llama"], tmp_path, tmp_path / "no-shim")[0].ref.n_gpu_layers == 0


def test_verdicts_have_three_values_and_a_finding_is_looked_for_behind_others() -> None:
    judge = ideal_judge("dense")
    program = Scenario(model=MODEL, ops=(Decode(parts=(Part(seq=0, n=3, out="all"),)),))
    judgement = judge.judge(program, fresh=True)
    assert judgement.violations == []
    lines = [replay._verdict(v) for v in replay._verdicts(judgement.verdicts)]
    assert any(line.startswith("logits: ok (") for line in lines)
    assert any(": unknown (0 compared, " in line for line in lines)

    def violation(oracle: str, step: int) -> Violation:
        check = Check(kind="answer", step=step, expected=(0,))
        return Violation(oracle=oracle, key="k", rule="r", because=oracle, check=check)

    wanted, other = violation("removal", 3), violation("decode", 1)
    judgement.verdicts = [Verdict(oracle=v.oracle, violations=(v,), compared=1) for v in (wanted, other)]
    assert not replay._again(judgement, wanted), "the oracle does not see it in the run"
    judgement.verdicts = judgement.verdicts[:1]
    assert replay._again(judgement, wanted)
    judgement.verdicts = [Verdict(oracle=v.oracle, violations=(v,), compared=1) for v in (wanted, other)]
    assert replay._text(judgement.violations, Symptom.of(wanted), True) == "removal"
    assert replay._text(judgement.violations, Symptom.of(violation("blob", 1)), False).startswith("but now decode")
