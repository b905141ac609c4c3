"""Coverage: exports of llvm-cov, what of them does not count, the list of functions, tables and pages."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from fuzz.cli import coverage as verb
from fuzz.cli import main
from fuzz.coverage import assertions, engine, export, functions, measure, page, table
from fuzz.coverage.export import DEBUG, FAILING, UNREADABLE, BadExport, Measured, Share
from fuzz.coverage.measure import Column, Report, Source, Tools
from oracles.judge import Judge
from subjects import instrument
from subjects.scenario import ContextParams, ModelRef, Scenario

DATA = Path(__file__).parent / "data" / "coverage"
NAMES = {
    "_Z3toyii": "toy(int, int)",
    "_Z5neveri": "never(int)",
    "_ZZ3toyiiENK3$_0clEi": "toy(int, int)::$_0::operator()(int) const",
    "_ZNK5cells3hasEi": "cells::has(int) const",
    "_ZL6largerIdET_S0_S0_": "double larger<double>(double, double)",
    "_ZL6largerIiET_S0_S0_": "int larger<int>(int, int)",
}


def toy() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((DATA / "toy.json").read_text())
    return document


def read(document: dict[str, Any]) -> Measured:
    return export.read(
        document,
        lambda name: name == "toy.cpp",
        lambda names: [NAMES[n] for n in names],
        lambda path: (DATA / Path(path).name).read_text().splitlines(),
    )


@pytest.fixture
def measured() -> Measured:
    return read(toy())


def missed(m: Measured, name: str) -> list[tuple[int, str, bool]]:
    f = m.functions["toy.cpp", name]
    return [(s.line, table.condition(f.texts, s), s.value) for s in f.missed()]


# --- an export --------------------------------------------------------------------------------------------------------


def test_lambdas_and_instantiations_count_with_their_function(measured: Measured) -> None:
    assert sorted(measured.functions) == [("toy.cpp", n) for n in ("cells::has", "larger", "never", "toy")]
    assert measured.sides([measured.functions["toy.cpp", "larger"]]) == Share(2, 2), "one side in each instantiation"
    assert (28, "x % 2", False) in missed(measured, "toy")


def test_sides_that_were_not_taken(measured: Measured) -> None:
    assert missed(measured, "toy") == [(28, "x % 2", False), (31, "b > 5", True)]
    assert missed(measured, "never") == [(40, "a", False), (40, "a", True)]
    # of GGML_ASSERT(a == 1 || b == 2) both sides of the first are honest and were taken; of the others one is left
    assert measured.sides([measured.functions["toy.cpp", "toy"]]) == Share(10, 12)


def test_what_does_not_count_is_counted(measured: Measured) -> None:
    every = list(measured.functions.values())
    assert measured.left_out(every) == {FAILING: 5, DEBUG: 2}
    f = measured.functions["toy.cpp", "toy"]
    assert {(s.line, s.value) for s in f.out[FAILING]} == {(21, True), (22, False), (23, False)}
    assert len(f.out[FAILING]) == 4
    assert {s.line for s in f.out[DEBUG]} == {24}
    assert not {24, 25, 26} & f.lines.keys()


def test_lines_are_those_of_llvm_cov(measured: Measured) -> None:
    f = measured.functions["toy.cpp", "toy"]
    assert f.first == 20
    assert f.lines[31] == 2 and f.lines[32] == 0 and f.lines[36] == 2
    assert measured.lines([measured.functions["toy.cpp", "never"]]) == Share(0, 3)
    assert measured.whole["toy.cpp"][1] == Share(13, 24), "llvm-cov takes the best instantiation, we the union"


def test_assertion_that_cannot_be_read_does_not_count() -> None:
    document = toy()
    for f in document["data"][0]["functions"]:
        if f["name"] == "_Z3toyii":
            # one condition more than the text has
            f["branches"].append(copy.deepcopy(f["branches"][4]))
    m = read(document)
    assert m.left_out(m.functions.values())[UNREADABLE] == 6


@pytest.mark.parametrize("document", [{}, {"data": []}, {"data": [{"files": [], "functions": [{}]}]}])
def test_something_else_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(BadExport):
        read(document)


# --- assertions -------------------------------------------------------------------------------------------------------

NONE: set[bool] = set()


@pytest.mark.parametrize(
    ("argument", "sides"),
    [
        ("a", [{True}]),
        ("!c", [{True}]),
        ("(f(a, b) && c)", [{False}, {False}]),
        ('(!c) && "why: a || b"', [{False}]),
        ("!c || b == 2", [NONE, {False}]),
        # clang's order: what is nested in an operator goes before its own sides
        ("a == 1 || (b == 2 && c)", [{False}, {False}, NONE]),
        ("!(c && b == 9) && a", [NONE, {True}, {False}]),
        ("a || b || c", [NONE, NONE, {False}]),
        ("x == '(' && v[i || j] < 3", [{False}, {False}]),
    ],
)
def test_failing_sides(argument: str, sides: list[set[bool]]) -> None:
    assert assertions.failing(argument, len(sides)) == sides
    assert assertions.failing(argument, len(sides) + 1) is None


def test_argument_over_several_lines() -> None:
    lines = ["    GGML_ASSERT(a == ')' &&", '        b && "x)");', "}"]
    assert assertions.argument(lines, 1, 5).split() == ["a", "==", "')'", "&&", "b", "&&", '"x)"']


def test_blocks_that_only_log() -> None:
    log = [
        "if (debug > 0) {",
        '    const char * s = "}";',
        "    if (x) {",
        "        LLAMA_LOG_DEBUG(s);",
        "    }",
        "}",
        "y",
    ]
    assert assertions.debug_lines(log) == {1, 2, 3, 4, 5, 6}
    assert assertions.debug_lines(["if (debug > 0) {", "    seq_rm(0, 0, 1);", "}"]) == set()
    assert assertions.debug_lines(["if (debugger) {", "    LLAMA_LOG_DEBUG(x);", "}"]) == set()


# --- the list ---------------------------------------------------------------------------------------------------------


def listed(tmp_path: Path, text: str) -> list[functions.Group]:
    path = tmp_path / "functions.txt"
    path.write_text(text)
    return functions.load(path)


def test_patterns(tmp_path: Path) -> None:
    groups = listed(tmp_path, "# why\n[edits]\na::seq_* # these\na::clear\n\n[rest]\na::*\ngone\n")
    titles, gone = functions.assign(groups, {"a::seq_rm", "a::clear", "a::b::c", "a::d", "xa::seq_rm"})
    assert titles == {"a::seq_rm": "edits", "a::clear": "edits", "a::d": "rest"}
    assert gone == ["gone"]


@pytest.mark.parametrize("text", ["a\n", "[x\na\n", "[]\n", "[x]\na\na\n"])
def test_bad_lists_name_the_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(functions.BadList, match=r"functions\.txt:\d"):
        listed(tmp_path, text)


def test_our_list_covers_each_kind_of_memory() -> None:
    patterns = {p for g in functions.load() for p in g.patterns}
    for memory in ("llama_kv_cache", "llama_kv_cache_iswa", "llama_memory_recurrent", "llama_memory_hybrid",
                   "llama_memory_hybrid_iswa", "llama_memory_hybrid_idx", "llama_kv_cache_dsv4"):  # fmt: skip
        for what in ("state_write", "state_read", "init_batch", "clear"):
            assert f"{memory}::{what}" in patterns
        assert f"{memory}::seq_rm" in patterns or f"{memory}::seq_*" in patterns


# --- what people read -------------------------------------------------------------------------------------------------


@pytest.fixture
def report(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(measure, "STATE_FILES", measure.re.compile(r"toy\.cpp"))
    groups = [functions.Group("toys", ("toy", "cells::*")), functions.Group("more", ("larger", "moved"))]
    columns = [Column("corpora", "3 programs", measured)]
    return Report("abc", groups, columns, ["corpora: one <bad> file"], Path("libtoy.so"))


def test_table(report: Report) -> None:
    out = io.StringIO()
    table.show(report, Console(file=out, width=120))
    text = out.getvalue()
    assert "corpora: 3 programs" in text
    assert "Not counted in the functions above: 5 failing sides of assertions." in text
    assert "Not in this build, the sources have moved: moved" in text
    rows = {line.split("│")[1].strip(): line.split("│")[2].split() for line in text.splitlines() if line[:1] == "│"}
    assert [float(x) for x in rows["toys"]] == [89.5, 84.6]
    assert [float(x) for x in rows["all functions of the list"]] == [90.9, 86.7]
    assert [float(x) for x in rows["the same, with nothing left out"]][1] == 54.2


def test_document(report: Report) -> None:
    d = table.document(report)
    assert d["groups"][-1]["columns"]["corpora"]["branches"] == {"hit": 13, "of": 15, "percent": 86.67}
    assert [(x["function"], len(x["missed"])) for x in d["missed"]] == [("toy", 2)]
    assert d["not_in_build"] == ["moved"]
    json.dumps(d)


def test_page(report: Report) -> None:
    text = page.page(report, {"toy.cpp": "source/toy.cpp.html"}.get)
    assert '<a href="source/toy.cpp.html#L31">31</a>: <code>b &gt; 5</code> never <b>true</b>' in text
    assert "one &lt;bad&gt; file" in text
    assert "5 failing sides of assertions" in text


def test_a_source_without_profiles_is_said(tmp_path: Path) -> None:
    s = Source("campaign", True, tmp_path / "none")
    assert measure.report("abc", Path("x"), [s], Tools(Path("a"), Path("b"), Path("c")), tmp_path) is None
    assert s.notes == ["nothing was measured"]


def test_stored_programs_say_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    programs, bad = measure.stored([tmp_path, tmp_path / "b.json"])
    assert programs == []
    assert [b.split(": ")[0].rsplit("/", 1)[1] for b in bad] == ["a.json", "b.json"]


@pytest.mark.parametrize("option", ["--out", "--scenarios"])
def test_what_is_wrong_is_found_out_before_anything_runs(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "tools", lambda: pytest.fail("something was looked for"))
    (tmp_path / "file").write_text("")
    wrong = tmp_path / ("file" if option == "--out" else "none")
    assert main(["coverage", option, str(wrong)]) == 2
    err = capsys.readouterr().err
    assert str(wrong) in err and len(err.splitlines()) == 1


def test_the_table_is_shown_where_the_page_cannot_be_written(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        assert capsys.readouterr().out, "the table comes first"
        raise OSError(28, "No space left on device", "index.html")

    monkeypatch.setattr(verb.measure, "tools", lambda: None)
    monkeypatch.setattr(verb.instrument, "made", lambda *_, **__: tmp_path)
    monkeypatch.setattr(
        verb, "bench", lambda _: SimpleNamespace(build=SimpleNamespace(fingerprint="f", libllama=Path("l")))
    )
    monkeypatch.setattr(verb, "_measure", lambda *_: ([], False))
    monkeypatch.setattr(verb.measure, "report", lambda *_: report)
    monkeypatch.setattr(verb.page, "write", full)
    assert main(["coverage", "--json", "--out", str(tmp_path / "html")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(verb.measure, "report", lambda *_: None)
    nothing = Source("corpora", True, tmp_path, notes=["a.json: malformed", measure.NOTHING])
    monkeypatch.setattr(verb, "_measure", lambda *_: ([nothing], False))
    assert main(["coverage"]) == 2
    assert capsys.readouterr().err == "redraft coverage: nothing was measured; a.json: malformed\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_campaign_ends_well_when_its_coverage_is_killed(tmp_path: Path) -> None:
    campaign = tmp_path / "campaign"
    campaign.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (open(sys.argv[0] + '.ended', 'w').close(), os._exit(130)))\n"
        "open(sys.argv[0] + '.began', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    campaign.chmod(0o755)
    code = (
        "from pathlib import Path\nfrom fuzz.coverage import measure\n"
        f"measure.REDRAFT = {str(campaign)!r}\nhere = Path({str(tmp_path)!r})\n"
        "measure.run_campaign(here, 1.0, None, measure.Source('campaign', True, here / 's'), here)\n"
    )
    began, ended = (campaign.with_name(f"campaign.{x}") for x in ("began", "ended"))
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(measure.__file__).resolve().parents[2]) as parent:
        while not (began.exists() and began.read_text()):
            assert parent.poll() is None
            time.sleep(0.05)
        child = psutil.Process(int(began.read_text()))
        parent.kill()
    child.wait(60)
    assert ended.exists()


def test_a_test_that_takes_minutes_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SIGN_OF_LIFE", 0.01)
    said: list[float] = []
    assert (
        measure._quiet([sys.executable, "-c", "import time; time.sleep(0.3); raise SystemExit(3)"], {}, said.append)
        == 3
    )
    assert said == sorted(said) != []


def test_a_folder_that_is_no_campaign(tmp_path: Path) -> None:
    with pytest.raises(measure.CannotMeasure, match="there is no campaign in"):
        engine.of_campaigns([tmp_path])


def test_programs_that_cannot_be_run_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLVM_PROFILE_FILE", raising=False)  # a test of a build for coverage may have set it

    @contextmanager
    def judge_of(program: Scenario) -> Iterator[Judge]:
        raise measure.NotRun("there are no drivers\nnone at all")
        yield

    p = Scenario(model=ModelRef(recipe="llama", version=1, seed=0, sha256="0" * 64), params=ContextParams(), ops=())
    s = Source("corpora", True, tmp_path / "raw")
    measure.run_programs([p, p], judge_of, s, print)
    assert s.notes == ["2 programs not run: there are no drivers"]
    assert "LLVM_PROFILE_FILE" not in os.environ


def test_what_is_missing_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(instrument, "clang", lambda: None)
    with pytest.raises(measure.CannotMeasure, match=r"^clang is missing: .*$"):
        measure.tools()
    bare = instrument.Clang(tmp_path / "clang", tmp_path / "clang++", "clang version 19.1.7")
    monkeypatch.setattr(instrument, "clang", lambda: bare)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(measure.CannotMeasure, match=r"^llvm-cov, llvm-profdata, .* of clang 19 not found: "):
        measure.tools()
