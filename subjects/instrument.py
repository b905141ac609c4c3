"""Instrumented builds of llama.cpp: with counters that libFuzzer follows, with sanitizers, with coverage for a report.

A build is made once by clang, kept in the cache (`subjects.making`), and used like any other
(`subjects.builds.find_build`); `environment` says what a process needs that loads it. Nothing here loads native code.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from subjects import making
from subjects.making import STAMP, CannotBuild, Coverage, Stamp, of_release, origin, stamp_of
from subjects.shimcache import child_env, run_quietly

__all__ = [
    "SANITIZERS",
    "STAMP",
    "CannotBuild",
    "Clang",
    "Coverage",
    "Flags",
    "Instrumented",
    "Stamp",
    "clang",
    "environment",
    "flags",
    "joined",
    "loadable",
    "made",
    "missing_tools",
    "of_release",
    "origin",
    "place",
    "preload",
    "ready",
    "stamp_of",
    "variables",
]

SANITIZERS = ("address", "undefined")
_GGML = "redraft-ggml.cmake"

_SHORT = {"address": "asan", "undefined": "ubsan"}
_OLDEST_CLANG = 14
_NEWEST_CLANG = 23

_SETUP = (
    "ci/setup --fuzz installs them (on Debian and Ubuntu: apt-get install clang-19 libclang-rt-19-dev llvm-19 cmake)"
)


# ---------------------------------------------------------------------------------------------------------------------
# Tools


@dataclass(frozen=True)
class Clang:
    """A clang: the compilers for C and C++, and the first line of their --version."""

    cc: Path
    cxx: Path
    version: str

    @property
    def major(self) -> int:
        """14, ... , 19, ..."""
        m = re.search(r"clang version (\d+)", self.version)
        return int(m[1]) if m else 0

    def file(self, name: str) -> Path | None:
        """A file of the compiler's own, such as a runtime; None where it is not installed."""
        try:
            p = run_quietly([str(self.cc), f"-print-file-name={name}"], making.plain_environment(), 60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        path = Path(p.stdout.strip())
        return path.resolve() if path.is_absolute() and path.is_file() else None

    def runtime(self, name: str, suffix: str) -> Path | None:
        """A runtime (`asan`, `profile`, ...) as a static (.a) or shared (.so) library."""
        # the second is how a clang names it that keeps the runtimes of each target in a folder
        return self.file(f"libclang_rt.{name}-{platform.machine()}{suffix}") or self.file(f"libclang_rt.{name}{suffix}")

    def tool(self, name: str) -> Path | None:
        """An LLVM tool of the same version (`llvm-cov`, `llvm-profdata`, `llvm-symbolizer`), or any on PATH."""
        beside = self.cc.resolve().parent / name
        if beside.is_file():
            return beside
        found = shutil.which(f"{name}-{self.major}") or shutil.which(name)
        return Path(found) if found else None


def clang() -> Clang | None:
    """The clang that builds are made with: $CC and $CXX where they are one, else the newest on PATH that has a clang++;
    None where there is none of version 14 or newer."""
    own = [_named(os.environ.get("CC", ""), os.environ.get("CXX", ""))]
    names = [f"clang-{n}" for n in range(_NEWEST_CLANG, _OLDEST_CLANG - 1, -1)] + ["clang"]
    found = [_pair(name, _plus_plus(name)) for name in names]
    usable = [c for c in found if c and c.major >= _OLDEST_CLANG]
    return next((c for c in own if c), None) or max(usable, key=lambda c: c.major, default=None)


def _named(cc: str, cxx: str) -> Clang | None:
    """What $CC and $CXX name, where both are a clang; one may be left out."""
    cc, cxx = cc.strip(), cxx.strip()
    cc, cxx = cc or cxx.replace("clang++", "clang"), cxx or _plus_plus(cc)
    if "clang" not in Path(cc).name or "clang++" not in Path(cxx).name:
        return None
    return _pair(cc, cxx)


def _plus_plus(cc: str) -> str:
    head, slash, name = cc.rpartition("/")
    return f"{head}{slash}{name.replace('clang', 'clang++', 1)}"


def _pair(cc: str, cxx: str) -> Clang | None:
    c, cpp = shutil.which(cc), shutil.which(cxx)
    if not c or not cpp:
        return None
    try:
        p = run_quietly([c, "--version"], making.plain_environment(), 60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = p.stdout.splitlines()
    return Clang(Path(c), Path(cpp), lines[0].strip()) if p.returncode == 0 and lines else None


def preload(sanitize: Sequence[str]) -> Path | None:
    """Atheris' libFuzzer together with a sanitizer's runtime, which must be loaded first; None without Atheris."""
    # find_spec of a top-level name finds, and imports nothing.
    spec = importlib.util.find_spec("atheris")
    places = [Path(p).parent for p in (spec.submodule_search_locations or ())] if spec else []
    # That for UBSan serves a build with counters alone, too.
    name = "asan_with_fuzzer.so" if "address" in sanitize else "ubsan_with_fuzzer.so"
    return next((p / name for p in places if (p / name).is_file()), None)


def missing_tools(coverage: Coverage | None = "fuzzer", sanitize: Sequence[str] = SANITIZERS) -> list[str]:
    """In words, what is not installed of what an instrumented build needs to be made and used."""
    out = []
    if sys.platform != "linux":
        return [f"Linux (this is {sys.platform})"]
    compiler = clang()
    if compiler is None:
        out.append(f"clang {_OLDEST_CLANG} or newer")
    else:
        wanted = (
            ["asan"] if "address" in sanitize else ["ubsan_standalone"] if sanitize else [],
            ["profile"] if coverage == "report" else [],
        )
        lacks = [name for names in wanted for name in names if compiler.runtime(name, ".a") is None]
        if lacks:
            out.append(f"clang's runtime libraries (libclang-rt-{compiler.major}-dev)")
    out += making.missing_builders()
    if coverage == "fuzzer" and preload(sanitize) is None:
        out.append("atheris")
    return out


# ---------------------------------------------------------------------------------------------------------------------
# What is built


@dataclass(frozen=True)
class Flags:
    """The compiler's flags: of llama.cpp, and of the ggml in it."""

    llama: tuple[str, ...]
    ggml: tuple[str, ...]
    link: tuple[str, ...]


def flags(coverage: Coverage | None, sanitize: Sequence[str]) -> Flags:
    """What a kind of build is compiled with. Counters are for llama.cpp alone: ggml's kernels, where most of the time
    goes, hold nothing of memory and state."""
    both = ["-g1", "-fno-omit-frame-pointer", "-DNDEBUG"]
    llama, link = ["-O1"], list[str]()
    # Without UndefinedBehaviorSanitizer, which would cost the kernels most and says nothing of restores; with
    # AddressSanitizer, which costs 10 to 20 % of a decode here and sees what a wrong index reads.
    ggml = ["-O2"]
    if "address" in sanitize:
        both.append("-fsanitize=address")
    if "undefined" in sanitize:
        # Without vptr and function: the handler of the latter is not in Atheris' runtime, the former needs types that a
        # Python has not. Recovering, so that UBSAN_OPTIONS decides whether a report ends the process.
        llama += ["-fsanitize=undefined", "-fno-sanitize=vptr,function", "-fsanitize-recover=undefined"]
    if coverage == "fuzzer":
        llama.append("-fsanitize=fuzzer-no-link")
    elif coverage == "report":
        # relocation: counters are a mapped file (%c), so that a process that aborts leaves its profile
        llama += ["-fprofile-instr-generate", "-fcoverage-mapping", "-mllvm", "-runtime-counter-relocation"]
        link.append("-fprofile-instr-generate")
    return Flags((*both, *llama), (*both, *ggml), tuple(link))


class Instrumented(making.Kind):
    """A kind of build: with these counters and sanitizers.

    Raises:
        CannotBuild: no such sanitizer.
    """

    what = "an instrumented llama.cpp"

    def __init__(self, coverage: Coverage | None, sanitize: Sequence[str] = ()) -> None:
        if wrong := [x for x in sanitize if x not in SANITIZERS]:
            raise CannotBuild(f"no sanitizer {', '.join(wrong)}: there are {', '.join(SANITIZERS)}")
        self.coverage = coverage
        self.sanitize = tuple(x for x in SANITIZERS if x in sanitize)
        self.label = "-".join([coverage or "plain", *(_SHORT[x] for x in self.sanitize)])
        self.advice = _SETUP if sys.platform == "linux" else ""

    @cached_property
    def _clang(self) -> Clang | None:
        return clang()

    @property
    def compiler(self) -> str | None:
        """See Kind."""
        return self._clang.version if self._clang else None

    @property
    def compiler_name(self) -> str:
        """See Kind."""
        return f"clang {self._clang.major}" if self._clang else "clang"

    def missing(self) -> list[str]:
        """See Kind."""
        return missing_tools(self.coverage, self.sanitize)

    def said(self) -> list[str]:
        """See Kind."""
        return [*_options(), repr(flags(self.coverage, self.sanitize))]

    def options(self, tree: Path, there: Path, targets: Sequence[str]) -> list[str]:
        """See Kind."""
        own = flags(self.coverage, self.sanitize)
        # cmake reads it right after ggml's project() and before any of its targets.
        lines = [f'set(CMAKE_{x}_FLAGS "{" ".join(own.ggml)}")' for x in ("C", "CXX", "ASM")]
        # The profile's runtime complains, when it is loaded, of a library that has no counters.
        lines.append('set(CMAKE_SHARED_LINKER_FLAGS "")')
        (there / _GGML).write_text("\n".join([*lines, ""]), "utf-8")
        tests = any(t.startswith("test-") for t in targets)
        llama = " ".join(own.llama)
        compilers = (
            [f"-DCMAKE_C_COMPILER={self._clang.cc}", f"-DCMAKE_CXX_COMPILER={self._clang.cxx}"] if self._clang else []
        )
        return [
            *_options(),
            *compilers,
            f"-DCMAKE_C_FLAGS={llama}",
            f"-DCMAKE_CXX_FLAGS={llama}",
            f"-DCMAKE_ASM_FLAGS={' '.join(own.ggml)}",
            f"-DCMAKE_SHARED_LINKER_FLAGS={' '.join(own.link)}",
            f"-DCMAKE_EXE_LINKER_FLAGS={' '.join(own.link)}",
            f"-DCMAKE_PROJECT_ggml_INCLUDE={there / _GGML}",
            f"-DLLAMA_BUILD_COMMON={making.on(list(targets) != ['llama'])}",
            f"-DLLAMA_BUILD_TESTS={making.on(tests)}",
        ]


def _options() -> list[str]:
    off = ("TOOLS", "EXAMPLES", "SERVER", "APP", "UI")
    return [
        "-DCMAKE_BUILD_TYPE=Release",
        # all is in our own flags
        "-DCMAKE_C_FLAGS_RELEASE=",
        "-DCMAKE_CXX_FLAGS_RELEASE=",
        "-DCMAKE_ASM_FLAGS_RELEASE=",
        "-DBUILD_SHARED_LIBS=ON",
        "-DGGML_OPENMP=OFF",  # its threads do not survive a fork, and its runtime is not instrumented
        "-DGGML_CCACHE=OFF",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        *(f"-DLLAMA_BUILD_{x}=OFF" for x in off),
    ]


def place(coverage: Coverage | None, sanitize: Sequence[str] = (), src: Path | None = None) -> Path:
    """Where a build is kept, whether it is there or not.

    Raises:
        CannotBuild: no such sanitizer, no checkout at `src`, or no llama-cpp-python whose sources could be taken.
    """
    return making.place(Instrumented(coverage, sanitize), src)


def ready(
    coverage: Coverage | None,
    sanitize: Sequence[str] = (),
    src: Path | None = None,
    *,
    targets: Sequence[str] = ("llama",),
) -> Path | None:
    """The build that `made` would give without building anything; None where it would have to build.

    Needs no compiler: a finished build is used where there is none any more.

    Raises:
        CannotBuild: see `place`.
    """
    return making.ready(Instrumented(coverage, sanitize), src, targets=targets)


def made(
    coverage: Coverage | None,
    sanitize: Sequence[str] = (),
    src: Path | None = None,
    *,
    targets: Sequence[str] = ("llama",),
    say: Callable[[str], None],
) -> Path:
    """A build directory for `subjects.builds.find_build`, from the cache or built now (`subjects.making.made`).

    `coverage`: `fuzzer` counts edges for libFuzzer, `report` regions for llvm-cov; `sanitize`: of SANITIZERS. `targets`
    are CMake's: `llama`, `llama-common` (the speculative drivers), `test-...`.

    Raises:
        CannotBuild: a tool or the sources are missing, or it does not compile; the first line says what to do.
    """
    return making.made(Instrumented(coverage, sanitize), src, targets=targets, say=say)


# ---------------------------------------------------------------------------------------------------------------------
# Using


def variables(build: Path) -> dict[str, str]:
    """What must be set in the environment of a process that loads a build, beside what is always set for children.

    Options of the sanitizers that are set already are kept and go before ours.

    Raises:
        CannotBuild: the build is not ours or unfinished, or the runtime that it needs is not installed.
    """
    stamp = stamp_of(build)
    if stamp is None:
        raise CannotBuild(f"{build} is no finished instrumented build: make one with redraft build")
    out = {"GGML_NO_BACKTRACE": "1"}
    if stamp.coverage == "report" and "LLVM_PROFILE_FILE" not in os.environ:
        # whoever wants a profile says where; it would be left in the working directory
        out["LLVM_PROFILE_FILE"] = os.devnull
    runtime = _runtime(stamp)
    if runtime:
        out["LD_PRELOAD"] = str(runtime)
    asan = {
        "detect_leaks": "0",  # Python's own
        "allocator_may_return_null": "1",  # a size that a corrupt blob names is refused, which is right
        "quarantine_size_mb": "64",
        # libFuzzer keeps the input when the sanitizer ends the process; others should see a signal
        **({} if stamp.coverage == "fuzzer" else {"abort_on_error": "1"}),
    }
    compiler = clang()
    symbolizer = compiler.tool("llvm-symbolizer") if compiler else None
    # Malformed positions overflow a sum at once, and a null pointer is copied no bytes from: told, and gone past, since
    # libFuzzer would stop at every other input; UBSAN_OPTIONS=halt_on_error=1 stops at one.
    ubsan = {"print_stacktrace": "1", "halt_on_error": "0"}
    for sanitizer, name, options in (("address", "ASAN", asan), ("undefined", "UBSAN", ubsan)):
        if sanitizer not in stamp.sanitize:
            continue
        out[f"{name}_OPTIONS"] = joined(options, os.environ.get(f"{name}_OPTIONS", ""))
        if symbolizer:
            out[f"{name}_SYMBOLIZER_PATH"] = str(symbolizer)
    return out


def joined(ours: Mapping[str, str], theirs: str) -> str:
    """Options of a sanitizer: ours, and after them, so that they hold, those that somebody has set."""
    return ":".join([*(f"{k}={v}" for k, v in ours.items()), *([theirs] if theirs else [])])


def environment(build: Path) -> dict[str, str]:
    """The environment for a child that loads a build.

    Raises:
        CannotBuild: see `variables`.
    """
    return {**child_env(), **variables(build)}


@contextmanager
def loadable(build: Path | None) -> Iterator[None]:
    """Within it, children of this process can load a build; for one that is not of ours, nothing is done.

    Raises:
        CannotBuild: see `variables`.
    """
    before = dict(os.environ)
    if build and stamp_of(build):
        os.environ.update(variables(build))
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _runtime(stamp: Stamp) -> Path | None:
    """What must be loaded before anything else, None where nothing must."""
    if stamp.coverage == "fuzzer":
        found = preload(stamp.sanitize)
        if found is None:
            raise CannotBuild(f"a build with libFuzzer's counters needs atheris to be loaded: {_SETUP}")
        return found
    if not stamp.sanitize:
        return None
    compiler = clang()
    found = compiler.runtime("asan" if "address" in stamp.sanitize else "ubsan_standalone", ".so") if compiler else None
    if found is None:
        raise CannotBuild(f"a sanitized build needs clang's runtime libraries to be loaded: {_SETUP}")
    return found
