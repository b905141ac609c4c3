"""Finds the llama-server to test, names it by its contents, and has one built where none is named.

The server runs in children only, here as everywhere. `python -m subjects.server.build` builds it where it is not there.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from subjects import making, shimcache, sources
from subjects.shimcache import BadBuild, stem

TARGET = "llama-server"
MAKE = "redraft build --server"
"""the command that builds it"""

_ANSWER_SECONDS = 30.0
"""for what a server says of itself; it takes 0.02 s"""
_OURS = re.compile(r"lib(?:llama|ggml|mtmd)[\w-]*\.(?:so|dylib|\d)")


@dataclass(frozen=True)
class ServerBuild:
    """A llama-server: what a campaign starts."""

    path: Path
    fingerprint: str
    """16 hex digits over the contents of the program and of llama.cpp's libraries that it loads"""
    name: str
    """for people; holds no path"""
    version: str
    """as it says it"""


# ---------------------------------------------------------------------------------------------------------------------
# Building


class Ordinary(making.Kind):
    """The kind of build that people run: optimised, by the ordinary compiler, with nothing in it that is not needed."""

    part = sources.SERVER
    label = "server"
    what = "llama-server"
    advice = "on Debian and Ubuntu: apt-get install g++ cmake make"

    @property
    def compiler(self) -> str | None:
        """See Kind."""
        try:
            return shimcache.compiler_line()
        except BadBuild:
            return None

    @property
    def compiler_name(self) -> str:
        """See Kind."""
        return self.compiler or "no compiler"

    def missing(self) -> list[str]:
        """See Kind."""
        return [*([] if self.compiler else ["a C++ compiler"]), *making.missing_builders()]

    def said(self) -> list[str]:
        """See Kind."""
        off = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI", "OPENSSL", "CURL")
        return [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=ON",
            # so that equal builds are equal wherever they lie
            "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
            "-DLLAMA_ALL_WARNINGS=OFF",
            "-DLLAMA_BUILD_COMMON=ON",
            "-DLLAMA_BUILD_TOOLS=ON",
            "-DLLAMA_BUILD_SERVER=ON",
            *(f"-DLLAMA_{x}=OFF" for x in off),
        ]

    def options(self, tree: Path, there: Path, targets: Sequence[str]) -> list[str]:
        """See Kind."""
        # What an assertion says of its file goes into findings, and must not name somebody's cache.
        names = f"-fmacro-prefix-map={tree}/="
        return [*self.said(), *(f"-DCMAKE_{x}_FLAGS={names}" for x in ("C", "CXX"))]


def ready_server(src: Path | None = None) -> Path | None:
    """The directory of the build that `made_server` would give without building anything; None where it would have to.

    Raises:
        CannotBuild: no checkout at `src`, or no llama-cpp-python whose sources could be taken.
    """
    return making.ready(Ordinary(), src, targets=(TARGET,))


def made_server(src: Path | None = None, *, say: Callable[[str], None]) -> Path:
    """The directory of a build of the server, from the cache or built now: see `subjects.making.made`.

    Raises:
        CannotBuild: a tool or the sources are missing, or it does not compile; the first line says what to do.
    """
    return making.made(Ordinary(), src, targets=(TARGET,), say=say)


def program(build: Path) -> Path:
    """The server in a build directory."""
    return build / "bin" / TARGET


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def find_server(binary: Path | None = None, src: Path | None = None) -> ServerBuild:
    """The llama-server `binary`, or that of the checkout `src` or of the installed llama-cpp-python from the cache.

    Raises:
        BadBuild: it is not there, cannot be run, or is none; the message says what to do.
    """
    if binary is not None:
        if src is not None:
            raise BadBuild("a llama-server and a checkout to take one of: name either")
        path = _given(binary)
        version = _version(path)
        return ServerBuild(path, _fingerprint(path, version), f"{path.name} {version}", version)
    build = ready_server(src)
    if build is None:
        of = f" --src {src}" if src else ""
        what = "this checkout" if src else f"llama-cpp-python {making.release()}"
        raise BadBuild(f"there is no llama-server of {what}: make it with `{MAKE}{of}` (about 4 minutes, once)")
    path = program(build)
    stamp = making.stamp_of(build)
    version = _version(path)
    origin = making.origin(stamp) if stamp else "a build that was taken away"
    return ServerBuild(path, _fingerprint(path, version), f"llama-server of {origin}", version)


def _given(binary: Path) -> Path:
    path = binary.expanduser().absolute()
    if path.is_dir():
        inside = [path / x for x in (TARGET, f"bin/{TARGET}", f"build/bin/{TARGET}")]
        named = next((x for x in inside if x.is_file()), None)
        raise BadBuild(f"{binary} is a directory: name the program{f', {named}' if named else ''}")
    if not path.is_file():
        what = "no file" if binary.exists() else "not there"
        raise BadBuild(f"{binary} is {what}: name a llama-server, or make one with `{MAKE}`")
    if not os.access(path, os.X_OK):
        raise BadBuild(f"{binary} cannot be run: it is not executable (chmod +x)")
    return path


def _version(path: Path) -> str:
    """What a server says that it is. Raises BadBuild where it is none."""
    told = re.search(r"^version: *(\S.*?) *$", _said(path, "--version"), re.M)
    # llama.cpp's other programs know --version too
    if told is None or "--slot-save-path" not in _said(path, "--help"):
        raise BadBuild(f"{path} is no llama-server: it does not answer --version and --help as one does")
    return told[1]


def _said(path: Path, option: str) -> str:
    try:
        p = shimcache.run_quietly([str(path), option], shimcache.child_env(), _ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        raise BadBuild(f"{path} is no llama-server: {option} has no end after {_ANSWER_SECONDS:.0f} s") from None
    except OSError as e:
        raise BadBuild(f"{path} cannot be run: {e.strerror or e}") from None
    if p.returncode:
        last = "\n".join(f"  {x[:200]}" for x in (p.stderr or p.stdout).strip().splitlines()[-3:])
        how = f"signal {-p.returncode}" if p.returncode < 0 else f"exit {p.returncode}"
        raise BadBuild(
            f"{path} {option} ended with {how}; build it again, or name another llama-server\n{last}".strip()
        )
    return f"{p.stdout}\n{p.stderr}"


def _fingerprint(path: Path, version: str) -> str:
    h = hashlib.sha256(f"{version}\n".encode())
    parts = {(stem(x), shimcache.file_hash(x)) for x in _libraries(path)}
    for name, digest in sorted({("program", shimcache.file_hash(path)), *parts}):
        h.update(f"{name} {digest}\n".encode())
    return h.hexdigest()[:16]


def _libraries(path: Path) -> set[Path]:
    """llama.cpp's libraries that a program loads: those that it is linked with, and those beside it, among which
    backends are that it looks for when it runs."""
    found = {x for x in path.resolve().parent.iterdir() if _OURS.match(x.name)}
    if sys.platform == "linux":
        # asks the dynamic linker, in the program's place
        env = {**shimcache.child_env(), "LD_TRACE_LOADED_OBJECTS": "1"}
        try:
            said = shimcache.run_quietly([str(path), "--version"], env, _ANSWER_SECONDS).stdout
        except (OSError, subprocess.TimeoutExpired):
            said = ""
        linked = [Path(x) for x in re.findall(r"=> (/.+) \(0x[0-9a-f]+\)$", said, re.M)]
        found |= {x for x in linked if _OURS.match(x.name)}
    return {x.resolve() for x in found if x.is_file()}


def main() -> int:
    """Build the server of the installed llama-cpp-python where it is not in the cache; 2 when that fails."""
    try:
        made_server(say=sources.say)
    except BadBuild as e:
        print(f"subjects.server.build: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
