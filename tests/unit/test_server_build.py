"""The server's build and the server that is named, as far as nothing is compiled: which options, what is out of date,
what a program has to answer, and what makes its name. cmake and the servers are scripts here."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.cli import main
from subjects import making, shimcache, sources
from subjects.making import CannotBuild, stamp_of
from subjects.server import build as server
from subjects.server.build import Ordinary, find_server, made_server, ready_server
from subjects.shimcache import BadBuild

ANSWERS = """#!/bin/sh
case $1 in
--version) echo "version: 0.5.0-dev (build 7, commit abc1234)" >&2; echo "built with GNU 12 for Linux" >&2 ;;
--help) echo "--slot-save-path PATH" ;;
esac
"""
CMAKE = """#!{python}
import os, pathlib, sys
args = sys.argv[1:]
with open({calls!r}, "a") as f:
    f.write(" ".join(args) + "\\n")
if "-B" in args:
    pathlib.Path(args[args.index("-B") + 1], "CMakeCache.txt").touch()
elif "FAILS" in os.environ:
    print("FAILED: x.o\\nx.cpp:3:1: error: no such thing")
    sys.exit(1)
else:
    bin = pathlib.Path(args[args.index("--build") + 1], "bin")
    bin.mkdir(exist_ok=True)
    program = bin / "llama-server"
    program.write_text({answers!r})
    program.chmod(0o755)
    (bin / "libllama.so.0").write_text("library")
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A machine with a compiler, where compiling takes no time; gives the calls of cmake."""
    monkeypatch.setenv("REDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    bin_, calls = tmp_path / "bin", tmp_path / "calls"
    bin_.mkdir()
    calls.touch()
    script(bin_ / "cmake", CMAKE.format(python=sys.executable, calls=str(calls), answers=ANSWERS))
    script(bin_ / "ninja", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    monkeypatch.setattr(shimcache, "compiler_line", lambda: "c++ (Debian) 12.2.0")
    return lambda: calls.read_text().splitlines()


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def quiet(_: str) -> None:
    pass


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A checkout."""
    root = tmp_path / "llama.cpp"
    more = ("tools/ui/CMakeLists.txt", "tools/ui/src/big.ts", "scripts/ui-assets.cmake", "scripts/x.py", "tests/t.cpp")
    for name in (*sources.SERVER.markers, *more, "tools/server/tests/t.py", "models/big.gguf"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


# -- building


def test_built_once_and_again_after_an_edit(src: Path, machine: Callable[[], list[str]]) -> None:
    lines: list[str] = []
    assert ready_server(src) is None
    there = made_server(src, say=lines.append)
    assert there.name.startswith("llama.cpp-server-")
    assert "building llama-server with c++ (Debian) 12.2.0, once: about " in lines[0]
    configure, build = machine()
    assert "-DCMAKE_BUILD_TYPE=Release" in configure
    assert "-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF" in configure
    assert "-DLLAMA_BUILD_TESTS=OFF" in configure
    assert f"-DCMAKE_CXX_FLAGS=-fmacro-prefix-map={there / 'redraft-sources'}/=" in configure
    assert build.endswith("--target llama-server")
    kept = {p.relative_to(there / "redraft-sources").as_posix() for p in (there / "redraft-sources").rglob("*.*")}
    assert {"tools/ui/CMakeLists.txt", "scripts/ui-assets.cmake"} <= kept
    assert not kept & {"tools/ui/src/big.ts", "scripts/x.py", "tests/t.cpp", "tools/server/tests/t.py"}
    assert made_server(src, say=quiet) == there == ready_server(src)
    assert len(machine()) == 2, "it is taken from the cache"
    (src / "tests/t.cpp").write_text("of no interest")
    assert ready_server(src) == there
    (src / "tools/ui/CMakeLists.txt").write_text("edited")
    assert ready_server(src) is None
    made_server(src, say=quiet)
    assert len(machine()) == 4


def test_a_failure_is_told_and_leaves_nothing_usable(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(CannotBuild) as e:
        made_server(src, say=quiet)
    there = making.place(Ordinary(), src)
    assert str(e.value).splitlines() == [
        f"building llama-server failed; all that was said is in {there / 'redraft-build.log'}",
        "  FAILED: x.o",
        "  x.cpp:3:1: error: no such thing",
    ]
    assert stamp_of(there) is None


def test_what_is_missing(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise BadBuild("none")

    monkeypatch.setattr(shimcache, "compiler_line", none)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotBuild) as e:
        made_server(src, say=quiet)
    assert str(e.value).startswith("building llama-server needs a C++ compiler, cmake, ninja or make: on Debian")


def test_another_compiler_builds_it_again(src: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_server(src, say=quiet)
    monkeypatch.setattr(shimcache, "compiler_line", lambda: "c++ (Debian) 13.1.0")
    assert ready_server(src) is None


# -- finding


def test_the_one_in_the_cache(src: Path) -> None:
    with pytest.raises(BadBuild, match=r"no llama-server of this checkout: make it with `redraft build --server --src"):
        find_server(src=src)
    there = made_server(src, say=quiet)
    found = find_server(src=src)
    assert found.path == there / "bin/llama-server"
    assert found.version == "0.5.0-dev (build 7, commit abc1234)"
    assert found.name.startswith("llama-server of a checkout (contents ")
    assert str(src) not in found.name


def test_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "release", lambda: "9.9")
    with pytest.raises(BadBuild) as e:
        find_server()
    assert str(e.value) == (
        "there is no llama-server of llama-cpp-python 9.9: make it with `redraft build --server` "
        "(about 4 minutes, once)"
    )


def test_one_that_is_named(tmp_path: Path) -> None:
    program = script(tmp_path / "my-server", ANSWERS)
    found = find_server(program)
    assert (found.path, found.version) == (program, "0.5.0-dev (build 7, commit abc1234)")
    assert found.name == "my-server 0.5.0-dev (build 7, commit abc1234)"
    assert find_server(program) == found
    other = tmp_path / "elsewhere"
    other.mkdir()
    same = find_server(script(other / "llama-server", ANSWERS))
    assert same.fingerprint == found.fingerprint, "equal programs are equal anywhere"
    prints = {found.fingerprint}
    for name in ("libllama.so.0", "libggml-cpu-haswell.so", "libmtmd.dylib"):
        (tmp_path / name).write_text("library")
        prints.add(find_server(program).fingerprint)
    (tmp_path / "libother.so").write_text("none of ours")
    prints.add(find_server(program).fingerprint)
    script(program, f"{ANSWERS}# rebuilt\n")
    prints.add(find_server(program).fingerprint)
    assert len(prints) == 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("#!/bin/sh\necho hello\n", "is no llama-server: it does not answer --version and --help as one does"),
        (ANSWERS.replace("--slot-save-path", "--other"), "is no llama-server: it does not answer"),
        (
            "#!/bin/sh\necho no libx.so >&2; exit 127\n",
            "--version ended with exit 127; build it again, .*\n  no libx.so",
        ),
        ("#!/bin/sh\nkill -ILL $$\n", "--version ended with signal 4"),
        ("#!/no/such/interpreter\n", "cannot be run: No such file"),
        ("no program", "cannot be run: Exec format error"),
    ],
)
def test_what_is_no_server(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BadBuild, match=told):
        find_server(script(tmp_path / "x", text))


def test_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ANSWER_SECONDS", 0.0)
    with pytest.raises(BadBuild, match="is no llama-server: --version has no end after 0 s"):
        find_server(script(tmp_path / "x", "#!/bin/sh\nexec sleep 60\n"))


def test_paths_that_are_no_program(tmp_path: Path, src: Path) -> None:
    with pytest.raises(BadBuild, match="is not there: name a llama-server, or make one with `redraft build --server`"):
        find_server(tmp_path / "none")
    plain = tmp_path / "plain"
    plain.write_text(ANSWERS)
    with pytest.raises(BadBuild, match="cannot be run: it is not executable"):
        find_server(plain)
    with pytest.raises(BadBuild, match=r"is a directory: name the program$"):
        find_server(src)
    (tmp_path / "build/bin").mkdir(parents=True)
    script(tmp_path / "build/bin/llama-server", ANSWERS)
    with pytest.raises(BadBuild, match=r"is a directory: name the program, .*build/bin/llama-server$"):
        find_server(tmp_path)
    with pytest.raises(BadBuild, match="name either"):
        find_server(plain, src)


# -- the command line


def test_the_verb(src: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--server", "--src", str(src)]) == 0
    out, err = capsys.readouterr()
    there = making.place(Ordinary(), src)
    program = there / "bin/llama-server"
    assert out.splitlines() == [str(there), f"  redraft fuzz --subject server --server-bin {program}"]
    assert "redraft build: building llama-server" in err
    assert main(["build", "--server", "--src", str(src), "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["server"] == str(program)
    assert document["targets"] == ["llama-server"]
    assert document["version"].startswith("0.5.0")
    assert err == f"redraft build: it is there already, nothing is to be built: {there}\n"
    for more in (["--coverage", "report"], ["--sanitize", "address"], ["--driver"]):
        assert main(["build", "--server", *more]) == 2
        assert "--server: the server is built without instruments" in capsys.readouterr().err


def test_the_verb_names_no_program_of_the_release(
    monkeypatch: pytest.MonkeyPatch, src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(making, "release", lambda: "9.9")
    shutil.copytree(src, tmp_path / "cache/sources/llama-cpp-python-9.9-server")
    assert main(["build", "--server"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  redraft fuzz --subject server"]
