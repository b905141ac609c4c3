"""Instrumented builds, as far as nothing is compiled: which clang, what flags, which name, what is out of date, what is
said, and what a process needs that loads one. cmake is a script here that leaves what a build would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fuzz.cli import build as build_verb
from fuzz.cli import main
from fuzz.doctor import judge_counters
from subjects import instrument, making, sources
from subjects.instrument import CannotBuild, Clang, Stamp, flags, made, place, ready, stamp_of
from subjects.making import snapshot
from subjects.shimcache import BadBuild

CLANG = Clang(Path("/opt/clang-19"), Path("/opt/clang++-19"), "Debian clang version 19.1.7 (3)")
BOTH = instrument.SANITIZERS

CMAKE = """#!{python}
import os, pathlib, sys, time
args = sys.argv[1:]
with open({calls!r}, "a") as f:
    f.write(" ".join(args) + "\\n")
if "-B" in args:
    there = pathlib.Path(args[args.index("-B") + 1])
    (there / "CMakeCache.txt").write_text("llama.cpp_SOURCE_DIR:STATIC=" + args[args.index("-S") + 1])
else:
    print("[1/2] Building", flush=True)
    time.sleep(float(os.environ.get("TAKES", "0")))
    print("x.cpp:3:1: error: no such thing" if "FAILS" in os.environ else "[2/2] Linking", flush=True)
    sys.exit("FAILS" in os.environ)
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A machine with all tools, where compiling takes no time; gives the calls of cmake."""
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path / "cache"))
    for name in ("CC", "CXX", "ASAN_OPTIONS", "UBSAN_OPTIONS", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    bin_, calls = tmp_path / "bin", tmp_path / "calls"
    bin_.mkdir()
    calls.touch()
    script(bin_ / "cmake", CMAKE.format(python=sys.executable, calls=str(calls)))
    script(bin_ / "ninja", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    monkeypatch.setattr(instrument, "clang", lambda: CLANG)
    monkeypatch.setattr(Clang, "file", lambda self, name: Path("/opt/lib") / name)
    monkeypatch.setattr(Clang, "tool", lambda self, name: Path("/opt/bin") / name)
    monkeypatch.setattr(instrument, "preload", lambda sanitize: Path("/site/asan_with_fuzzer.so"))
    return lambda: calls.read_text().splitlines()


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A checkout."""
    root = tmp_path / "llama.cpp"
    for name in (*sources.WHOLE.markers, "src/llama.cpp", "tests/t.cpp", "models/big.gguf", ".git/HEAD", "build/x.o"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def said() -> tuple[list[str], Callable[[str], None]]:
    lines: list[str] = []
    return lines, lines.append


# -- tools


def test_the_newest_clang_of_those_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name, version in (("clang", 18), ("clang-16", 16), ("clang-19", 19), ("clang-21", 21), ("clang-13", 13)):
        script(tmp_path / name, f"#!/bin/sh\necho 'clang version {version}.1.0'\n")
        if version != 21:  # without a C++ compiler it serves nobody
            script(tmp_path / name.replace("clang", "clang++"), "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    found = instrument.clang()
    assert found is not None
    assert (found.cc.name, found.cxx.name, found.major) == ("clang-19", "clang++-19", 19)
    for cc, cxx, want in (
        ("clang-16", "", 16),
        ("", "clang++-16", 16),
        (str(tmp_path / "clang-16"), "", 16),
        ("gcc", "g++", 19),
        ("clang-16", "g++", 19),
    ):
        monkeypatch.setenv("CC", cc)
        monkeypatch.setenv("CXX", cxx)
        found = instrument.clang()
        assert found and found.major == want, (cc, cxx)


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, src: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert instrument.missing_tools() == []
    monkeypatch.setattr(instrument, "preload", lambda sanitize: None)
    assert instrument.missing_tools() == ["atheris"]
    assert instrument.missing_tools("report", ()) == []
    monkeypatch.setattr(Clang, "file", lambda self, name: None)
    assert instrument.missing_tools() == ["clang's runtime libraries (libclang-rt-19-dev)", "atheris"]
    monkeypatch.setattr(instrument, "clang", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotBuild) as e:
        made("fuzzer", BOTH, src, say=print)
    text = str(e.value)
    assert "needs clang 14 or newer, cmake, ninja or make, atheris: ci/setup --fuzz" in text
    assert "\n" not in text
    assert isinstance(e.value, BadBuild)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert instrument.missing_tools() == ["Linux (this is darwin)"]


# -- what is built


def test_flags() -> None:
    fuzzing = flags("fuzzer", BOTH)
    assert {"-fsanitize=address", "-fsanitize=undefined", "-fsanitize=fuzzer-no-link"} <= set(fuzzing.llama)
    assert "-fsanitize=address" in fuzzing.ggml
    assert not {"-fsanitize=undefined", "-fsanitize=fuzzer-no-link"} & set(fuzzing.ggml)
    report = flags("report", ())
    assert {"-fprofile-instr-generate", "-fcoverage-mapping", "-runtime-counter-relocation"} <= set(report.llama)
    assert report.link == ("-fprofile-instr-generate",)
    assert not [x for x in (*report.llama, *report.ggml) if "sanitize" in x]
    assert not [x for x in report.ggml if "profile" in x]


def test_places(src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "release", lambda: "9.9")
    a = place("fuzzer", BOTH)
    assert a.parent == tmp_path / "cache/builds"
    assert a.name.startswith("llama-cpp-python-9.9-fuzzer-asan-ubsan-")
    assert place("fuzzer", ("undefined", "address")) == a
    assert place("report", (), src).name.startswith("llama.cpp-report-")
    assert place(None, ("address",)).name.startswith("llama-cpp-python-9.9-plain-asan-")
    other = tmp_path / "other/llama.cpp"
    other.parent.mkdir()
    src.rename(other)
    different = {a, place("report"), place(None), place("report", (), other)}
    src.mkdir()
    assert len(different) == 4
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path / "moved"))
    assert place("fuzzer", BOTH).name != a.name, "a build directory that was moved is none"
    with pytest.raises(CannotBuild, match="no sanitizer thread: there are address, undefined"):
        place("fuzzer", ("thread",))
    with pytest.raises(CannotBuild, match=r"is no llama\.cpp checkout: it has no CMakeLists\.txt; name one with --src"):
        place("fuzzer", (), src)


def test_built_once_and_again_after_an_edit(src: Path, machine: Callable[[], list[str]]) -> None:
    lines, say = said()
    there = made("fuzzer", BOTH, src, say=say)
    assert there == place("fuzzer", BOTH, src) == ready("fuzzer", BOTH, src)
    assert "building llama with clang 19, once: about " in lines[0]
    assert "built in 0 min 0 s" in lines[-1]
    configure, build = machine()
    assert f"-S {there / 'redraft-sources'} -B {there} -G Ninja" in configure
    assert "-DCMAKE_CXX_COMPILER=/opt/clang++-19" in configure
    assert "-DLLAMA_BUILD_COMMON=OFF" in configure
    assert build.endswith("--target llama")
    assert not (there / "redraft-sources/models").exists()
    assert "-fsanitize=address" in (there / "redraft-ggml.cmake").read_text()

    assert made("fuzzer", BOTH, src, say=say) == there
    assert len(machine()) == 2, "it is taken from the cache"

    # an older file with an older time: a checkout of another branch by rsync, say
    (src / "src/llama.cpp").write_text("edited")
    os.utime(src / "src/llama.cpp", (1, 1))
    assert ready("fuzzer", BOTH, src) is None
    assert made("fuzzer", BOTH, src, say=say) == there
    assert len(machine()) == 4
    assert "the sources have changed" in lines[-2]
    assert (there / "redraft-sources/src/llama.cpp").read_text() == "edited"
    assert (there / "redraft-sources/src/llama.cpp").stat().st_mtime > 1e9
    (src / "models/big.gguf").write_text("of no interest")
    assert ready("fuzzer", BOTH, src) == there


def test_more_targets_are_added(src: Path, machine: Callable[[], list[str]]) -> None:
    lines, say = said()
    there = made("report", (), src, say=say)
    made("report", (), src, targets=("llama", "llama-common", "test-save-load-state"), say=say)
    assert "building llama-common, test-save-load-state with clang 19" in lines[-2]
    assert "-DLLAMA_BUILD_COMMON=ON -DLLAMA_BUILD_TESTS=ON" in machine()[2]
    stamp = stamp_of(there)
    assert stamp and stamp.targets == ("llama", "llama-common", "test-save-load-state")
    assert made("report", (), src, say=say) == there
    assert len(machine()) == 4


def test_what_is_there_stays_usable_while_a_target_is_added(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = made("report", (), src, say=print)
    usable: list[bool] = []
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(CannotBuild):
        made("report", (), src, targets=("x",), say=lambda _: usable.append(ready("report", (), src) == there))
    assert usable == [True]
    assert ready("report", (), src) == there
    assert (there / "CMakeCache.txt").is_file()
    assert ready("report", (), src, targets=("x",)) is None


def test_another_compiler_builds_all_again(
    src: Path, machine: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = made("fuzzer", BOTH, src, say=print)
    (there / "left").touch()
    monkeypatch.setattr(instrument, "clang", lambda: None)
    assert ready("fuzzer", BOTH, src) == there, "a finished build needs no compiler"
    newer = Clang(Path("/opt/clang-20"), Path("/opt/clang++-20"), "clang version 20.1.0")
    monkeypatch.setattr(instrument, "clang", lambda: newer)
    assert ready("fuzzer", BOTH, src) is None
    made("fuzzer", BOTH, src, say=print)
    assert not (there / "left").exists()


def test_a_failure_leaves_nothing_that_could_be_used(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = made("fuzzer", BOTH, src, say=print)
    (src / "src/llama.cpp").write_text("edited")
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(CannotBuild) as e:
        made("fuzzer", BOTH, src, say=print)
    assert str(e.value).splitlines() == [
        f"building an instrumented llama.cpp failed; all that was said is in {there / 'redraft-build.log'}",
        "  x.cpp:3:1: error: no such thing",
    ]
    assert stamp_of(there) is None
    monkeypatch.delenv("FAILS")
    assert ready("fuzzer", BOTH, src) is None
    assert made("fuzzer", BOTH, src, say=print) == there


def test_interrupted(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "_SIGN_OF_LIFE", 0.05)
    monkeypatch.setenv("TAKES", "60")

    def say(text: str) -> None:
        if "[1/2]" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made("fuzzer", BOTH, src, say=say)
    assert stamp_of(place("fuzzer", BOTH, src)) is None
    monkeypatch.setenv("TAKES", "0")
    # at once: nobody holds the lock any more
    assert made("fuzzer", BOTH, src, say=print) == place("fuzzer", BOTH, src)


def test_one_builds_for_many(src: Path, machine: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKES", "0.3")
    lines: list[str] = []
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            lines.append(text)

    with ThreadPoolExecutor(4) as pool:
        got = set(pool.map(lambda _: made("fuzzer", BOTH, src, say=say), range(4)))
    assert got == {place("fuzzer", BOTH, src)}
    assert len(machine()) == 2
    assert sum("waiting for it" in x for x in lines) >= 1


def test_a_cache_that_cannot_be_written(src: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CannotBuild, match=r"cannot be built in: .*set REDRAFT_CACHE"):
        made("fuzzer", BOTH, src, say=print)


def test_snapshot_touches_only_what_differs(src: Path, tmp_path: Path) -> None:
    to = tmp_path / "copy"
    one = snapshot(src, to)
    kept = {p.relative_to(to).as_posix() for p in to.rglob("*") if p.is_file()}
    assert kept == {*sources.WHOLE.markers, "src/llama.cpp", "tests/t.cpp"}
    for p in to.rglob("*"):
        os.utime(p, (1, 1))
    (src / "tests/t.cpp").unlink()
    (src / "src/new.h").write_text("new")
    assert snapshot(src, to) != one
    changed = {p.name for p in to.rglob("*") if p.is_file() and p.stat().st_mtime > 1}
    assert changed == {"new.h"}
    assert not (to / "tests/t.cpp").exists()
    (src / "src/new.h").rename(src / "src/newer.h")
    two = snapshot(src, to)
    (src / "src/newer.h").write_text("ne")
    (src / "src/newer.i").write_text("w")
    assert snapshot(src, to) != two


def test_progress_and_failures(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("-- [9/9] no\n[1/78] Building\n[ 12/78] Building x [3/4]\n")
    assert making.progress_in(log) == "[ 12/78]"
    log.write_text("[  3%] Building\n")
    assert making.progress_in(log) == "[  3%]"
    log.write_text("")
    assert making.progress_in(log) == ""
    last = making.failure_message("building", "a\nb\nc\nd\n\nkilled\n", log).splitlines()
    assert last[1:] == ["  b", "  c", "  d", "  killed"]


# -- using


def stamped(at: Path, coverage: instrument.Coverage | None, sanitize: tuple[str, ...]) -> Path:
    at.mkdir(exist_ok=True)
    stamp = Stamp(coverage, sanitize, ("llama",), "9.9", "0", 1.0)
    (at / instrument.STAMP).write_bytes(msgspec.json.encode(stamp))
    return at


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=1")
    env = instrument.environment(stamped(tmp_path / "b", "fuzzer", BOTH))
    assert env["LD_PRELOAD"] == "/site/asan_with_fuzzer.so"
    assert env["GGML_NO_BACKTRACE"] == "1"
    assert env["PATH"] == os.environ["PATH"]
    asan = env["ASAN_OPTIONS"].split(":")
    assert {"detect_leaks=0", "allocator_may_return_null=1"} <= set(asan)
    assert asan[-1] == "detect_leaks=1", "the last one holds"
    assert "print_stacktrace=1" in env["UBSAN_OPTIONS"]
    assert env["ASAN_SYMBOLIZER_PATH"] == "/opt/bin/llvm-symbolizer"

    env = instrument.variables(stamped(tmp_path / "b", None, ("address",)))
    assert env["LD_PRELOAD"].startswith("/opt/lib/libclang_rt.asan-")
    assert "abort_on_error=1" in env["ASAN_OPTIONS"]
    assert "UBSAN_OPTIONS" not in env
    monkeypatch.delenv("LLVM_PROFILE_FILE", raising=False)
    quiet = {"GGML_NO_BACKTRACE": "1", "LLVM_PROFILE_FILE": "/dev/null"}
    assert instrument.variables(stamped(tmp_path / "b", "report", ())) == quiet


def test_environment_without_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "preload", lambda sanitize: None)
    monkeypatch.setattr(Clang, "file", lambda self, name: None)
    with pytest.raises(CannotBuild, match="needs atheris to be loaded: ci/setup --fuzz"):
        instrument.variables(stamped(tmp_path / "b", "fuzzer", BOTH))
    with pytest.raises(CannotBuild, match="needs clang's runtime libraries to be loaded: ci/setup --fuzz"):
        instrument.variables(stamped(tmp_path / "b", None, ("address",)))
    (tmp_path / "b" / instrument.STAMP).write_text('{"coverage": "fuzzer"}')
    with pytest.raises(CannotBuild, match="is no finished instrumented build: make one with redraft build"):
        instrument.variables(tmp_path / "b")


def test_loadable_is_for_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASAN_OPTIONS", "x=1")
    before = dict(os.environ)
    with instrument.loadable(stamped(tmp_path / "b", "fuzzer", BOTH)):
        assert os.environ["LD_PRELOAD"]
        assert os.environ["ASAN_OPTIONS"].endswith(":x=1")
    assert dict(os.environ) == before
    for other in (None, tmp_path):
        with instrument.loadable(other):
            assert dict(os.environ) == before


def test_preload_is_found_beside_atheris(tmp_path: Path) -> None:
    (tmp_path / "atheris").mkdir()
    (tmp_path / "atheris/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "asan_with_fuzzer.so").touch()
    code = "from subjects.instrument import preload; print(preload(['address'])); print(preload([]))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert p.stdout.split() == [str(tmp_path / "asan_with_fuzzer.so"), "None"]


# -- the command line


def test_the_verb(src: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--src", str(src)]) == 0
    out, err = capsys.readouterr()
    there = place("fuzzer", BOTH, src)
    lines = out.splitlines()
    assert lines[0] == str(there)
    assert lines[1] == f"  redraft doctor --build {there}"
    assert lines[2] == f"  redraft fuzz --engine coverage --build {there}"
    assert "redraft build: building llama" in err
    assert main(["build", "--src", str(src)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == lines
    assert err == f"redraft build: it is there already, nothing is to be built: {there}\n"
    assert main(["build", "--src", str(src), "--coverage", "report", "--sanitize", "address"]) == 2
    assert "leave out --sanitize" in capsys.readouterr().err
    assert main(["build", "--src", str(src), "--coverage", "report", "--driver", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["build"] == str(place("report", (), src))
    assert document["targets"] == ["llama", "llama-common"]
    assert document["sanitize"] == []
    assert document["environment"]["GGML_NO_BACKTRACE"] == "1" and "LD_PRELOAD" not in document["environment"]
    uses = build_verb._uses
    assert uses(there, "fuzzer", None, usual=True) == ["redraft doctor", "redraft fuzz --engine coverage"]
    assert uses(there, "report", None, usual=False) == ["redraft coverage"]
    assert uses(there, "report", src, usual=False) == [f"redraft coverage --src {src}"]
    assert uses(there, None, None, usual=False) == [f"redraft fuzz --build {there}"]


@pytest.mark.parametrize("argv", [["--sanitize", "thread"], ["--sanitize", ","], ["--coverage", "lines"], ["stray"]])
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["build", *argv])
    assert e.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_no_checkout_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--src", str(tmp_path)]) == 2
    assert "redraft build: " in capsys.readouterr().err


# -- what libFuzzer says

LOADED = "INFO: Loaded 1 modules   (110072 inline 8-bit counters): 110072 [0x7f, 0x7f), \n"
RUN = "#2\tINITED cov: 2511 ft: 2512 corp: 1/1b\n#7\tNEW    cov: 2530 ft: 9\n#200\tDONE   cov: 2595 ft: 12 corp: 5/9b\n"


def test_counters_that_move() -> None:
    check = judge_counters(0, LOADED + RUN)
    assert (check.state, check.detail) == ("ok", "110,072 counters, 2,511 → 2,595 edges in 200 executions")


@pytest.mark.parametrize(
    ("returncode", "text", "detail"),
    [
        (0, RUN, "libFuzzer saw no counters"),
        (0, LOADED, "libFuzzer saw no counters"),
        (0, LOADED + RUN.replace("2595", "2511").replace("2530", "2511"), "110,072 counters, 2,511 → 2,511"),
        (1, "no context: refused", "the process that loaded the library ended with 1"),
        (-6, LOADED + RUN, "the process that loaded the library was killed by SIGABRT"),
    ],
)
def test_counters_that_do_not(returncode: int, text: str, detail: str) -> None:
    check = judge_counters(returncode, text)
    assert check.state == "FAILED"
    assert check.detail.startswith(detail)
