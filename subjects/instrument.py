"""Instrumented builds of llama.cpp: with counters that libFuzzer follows, with sanitizers, with coverage for a report.

A build is made once by clang, kept in the cache, and used like any other (`subjects.builds.find_build`); `environment`
says what a process needs that loads it. Nothing here loads native code.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import msgspec

from subjects import sources
from subjects.shimcache import BadBuild, cache_dir, child_env, run_quietly

Coverage = Literal["fuzzer", "report"]

SANITIZERS = ("address", "undefined")
STAMP = "redraft-build.json"
"""In a build directory, written last: what was built there. A build without it is not finished."""
LOG = "redraft-build.log"
_SNAPSHOT = "redraft-sources"
_GGML = "redraft-ggml.cmake"

_SHORT = {"address": "asan", "undefined": "ubsan"}
_OLDEST_CLANG = 14
_NEWEST_CLANG = 23
_SIGN_OF_LIFE = 20.0
"""seconds"""
_CORE_MINUTES = {"llama": 5.0, "llama-common": 2.5}
"""What targets take on one core (measured, EPYC); others about one minute each."""

_SETUP = (
    "ci/setup --fuzz installs them (on Debian and Ubuntu: apt-get install clang-19 libclang-rt-19-dev llvm-19 cmake)"
)


class CannotBuild(BadBuild):
    """An instrumented build cannot be made; everything that needs none still works. The first line says why and what to
    do."""


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
            p = run_quietly([str(self.cc), f"-print-file-name={name}"], _plain_environment(), 60)
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
        p = run_quietly([c, "--version"], _plain_environment(), 60)
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
    if shutil.which("cmake") is None:
        out.append("cmake")
    if shutil.which("ninja") is None and shutil.which("make") is None:
        out.append("ninja or make")
    if coverage == "fuzzer" and preload(sanitize) is None:
        out.append("atheris")
    return out


def _plain_environment() -> dict[str, str]:
    """For compilers and cmake: a preloaded sanitizer is meant for the library, and what they say is parsed."""
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return {**env, "LC_ALL": "C", "LANGUAGE": "C"}


# ---------------------------------------------------------------------------------------------------------------------
# What is built


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a finished build directory holds."""

    coverage: Coverage | None
    sanitize: tuple[str, ...]
    targets: tuple[str, ...]
    sources: str
    """the release, or a hash over a checkout's contents"""
    recipe: str
    """a hash over the compiler's version and all options"""
    seconds: float
    """that building took, the last time"""

    @property
    def of_checkout(self) -> bool:
        """Whether it is of a checkout (--src)."""
        return re.fullmatch("[0-9a-f]{64}", self.sources) is not None


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


def place(coverage: Coverage | None, sanitize: Sequence[str] = (), src: Path | None = None) -> Path:
    """Where a build is kept, whether it is there or not.

    Raises:
        CannotBuild: no such sanitizer, no checkout at `src`, or no llama-cpp-python whose sources could be taken.
    """
    sanitize = _sorted(sanitize)
    origin = str(_checkout(src)) if src else _release()
    kind = "-".join([coverage or "plain", *(_SHORT[x] for x in sanitize)])
    label = Path(origin).name if src else f"llama-cpp-python-{origin}"
    folder = cache_dir() / "builds"
    # The path of the cache too: a build directory that was moved is none any more.
    key = hashlib.sha256(f"{folder}\0{origin}\0{bool(src)}".encode()).hexdigest()[:8]
    return folder / f"{label}-{kind}-{key}"


def _sorted(sanitize: Sequence[str]) -> tuple[str, ...]:
    if wrong := [x for x in sanitize if x not in SANITIZERS]:
        raise CannotBuild(f"no sanitizer {', '.join(wrong)}: there are {', '.join(SANITIZERS)}")
    return tuple(x for x in SANITIZERS if x in sanitize)


def _release() -> str:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        raise CannotBuild(
            "llama-cpp-python, whose sources would be built, is not installed: run ci/setup, or name a llama.cpp "
            "checkout with --src"
        ) from None


def _checkout(src: Path) -> Path:
    root = src.expanduser().resolve()
    if missing := sources.missing_of(root, sources.WHOLE):
        raise CannotBuild(f"{src} is no llama.cpp checkout: it has no {missing}; name one with --src")
    return root


def stamp_of(build: Path) -> Stamp | None:
    """What a build directory of ours holds; None where it is unfinished, damaged or none of ours."""
    try:
        return msgspec.json.decode((build / STAMP).read_bytes(), type=Stamp)
    except (OSError, msgspec.DecodeError):
        return None


def of_release(stamp: Stamp) -> bool:
    """Whether a build is of the sources of the llama-cpp-python that is installed."""
    try:
        return stamp.sources == _release()
    except CannotBuild:
        return False


def origin(stamp: Stamp) -> str:
    """What a build was made from, for people; holds no path."""
    if stamp.of_checkout:
        return f"a checkout (contents {stamp.sources[:16]})"
    return f"llama-cpp-python {stamp.sources}"


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
    sanitize = _sorted(sanitize)
    there = place(coverage, sanitize, src)
    stamp = stamp_of(there)
    if stamp is None or not set(targets) <= set(stamp.targets):
        return None
    tree = there / _SNAPSHOT if src else _release_tree(_release())
    if sources.missing_of(tree, sources.WHOLE):
        return None  # its headers were taken away
    compiler = clang()
    if compiler and stamp.recipe != _recipe(compiler, coverage, sanitize):
        return None
    return there if stamp.sources == (_digest(_checkout(src)) if src else _release()) else None


def _release_tree(version: str) -> Path:
    return cache_dir() / "sources" / f"llama-cpp-python-{version}{sources.WHOLE.suffix}"


def _recipe(compiler: Clang, coverage: Coverage | None, sanitize: Sequence[str]) -> str:
    said = [compiler.version, *_options(), repr(flags(coverage, sanitize))]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:16]


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


# ---------------------------------------------------------------------------------------------------------------------
# Building


def made(
    coverage: Coverage | None,
    sanitize: Sequence[str] = (),
    src: Path | None = None,
    *,
    targets: Sequence[str] = ("llama",),
    say: Callable[[str], None],
) -> Path:
    """A build directory for `subjects.builds.find_build`, from the cache or built now, which takes minutes.

    `coverage`: `fuzzer` counts edges for libFuzzer, `report` regions for llvm-cov; `sanitize`: of SANITIZERS. Built is
    the installed llama-cpp-python's llama.cpp, or the checkout `src`: a copy of it, which is brought up to date and
    rebuilt where the checkout has been edited. `targets` are CMake's: `llama`, `llama-common` (the speculative
    drivers), `test-...`; what was built before stays. `say` is told what is going on, a line at a time.
    Any number of processes may ask at once; one builds. What was interrupted is gone on with the next time.

    Raises:
        CannotBuild: a tool or the sources are missing, or it does not compile; the first line says what to do.
    """
    sanitize = _sorted(sanitize)
    if done := ready(coverage, sanitize, src, targets=targets):
        return done
    compiler = _tools(coverage, sanitize)
    there = place(coverage, sanitize, src)
    try:
        there.mkdir(parents=True, exist_ok=True)
        with _alone(there, say) as lock:
            # by another while this one waited
            if done := ready(coverage, sanitize, src, targets=targets):
                return done
            _Making(there, compiler, coverage, sanitize, tuple(targets), lock, say).run(src)
    except OSError as e:
        raise CannotBuild(f"{there} cannot be built in: {e}; set REDRAFT_CACHE to a writable directory") from e
    return there


def _tools(coverage: Coverage | None, sanitize: Sequence[str]) -> Clang:
    missing = missing_tools(coverage, sanitize)
    compiler = clang()
    if missing or compiler is None:
        advice = f": {_SETUP}" if sys.platform == "linux" else ""
        raise CannotBuild(f"an instrumented build of llama.cpp needs {', '.join(missing)}{advice}")
    return compiler


@contextmanager
def _alone(build: Path, say: Callable[[str], None]) -> Iterator[IO[str]]:
    # Beside it: the directory may be emptied. The file stays: removing it would let two in.
    with build.with_name(f"{build.name}.lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is building {build.name}: waiting for it")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield f


@dataclass
class _Making:
    there: Path
    compiler: Clang
    coverage: Coverage | None
    sanitize: tuple[str, ...]
    targets: tuple[str, ...]
    lock: IO[str]
    say: Callable[[str], None]

    def run(self, src: Path | None) -> None:
        """Build, and leave the stamp."""
        started = time.monotonic()
        recipe = _recipe(self.compiler, self.coverage, self.sanitize)
        old = stamp_of(self.there)
        if old and old.recipe != recipe:
            shutil.rmtree(self.there)
            self.there.mkdir()
            old = None
        if old is None or old.sources != (_digest(_checkout(src)) if src else _release()):
            # From here on it is not usable until it is finished. Where targets are added only, what is there stays so.
            (self.there / STAMP).unlink(missing_ok=True)
        targets = tuple(dict.fromkeys([*(old.targets if old else ()), *self.targets]))
        tree, what = self._sources(src)
        self._announce(targets, old)
        self._configure(tree, targets)
        self._build(targets)
        stamp = Stamp(self.coverage, self.sanitize, targets, what, recipe, round(time.monotonic() - started, 1))
        new = self.there / f"{STAMP}.new"
        new.write_bytes(msgspec.json.encode(stamp))
        os.replace(new, self.there / STAMP)
        self.say(f"built in {_minutes(stamp.seconds)}: {self.there}")

    def _sources(self, src: Path | None) -> tuple[Path, str]:
        if src:
            # A copy: what is edited while it is compiled, or before it is used, would be misread; and cmake goes by
            # times, which a checkout of an older file does not change forwards.
            tree = self.there / _SNAPSHOT
            return tree, snapshot(_checkout(src), tree)
        try:
            return sources.fetched(_release(), part=sources.WHOLE), _release()
        except sources.NoDrivers as e:
            raise CannotBuild(str(e)) from None

    def _announce(self, targets: Sequence[str], old: Stamp | None) -> None:
        if old and set(targets) == set(old.targets):
            self.say(f"the sources have changed: building what they change again in {self.there}")
            return
        fresh = [t for t in targets if not old or t not in old.targets]
        minutes = math.ceil(sum(_CORE_MINUTES.get(t, 1.0) for t in fresh) / _cores())
        self.say(
            f"building {', '.join(fresh)} with clang {self.compiler.major}, once: about {minutes} "
            f"minute{'s' * (minutes != 1)} on {_cores()} core{'s' * (_cores() != 1)}; into {self.there}"
        )

    def _configure(self, tree: Path, targets: Sequence[str]) -> None:
        own = flags(self.coverage, self.sanitize)
        # cmake reads it right after ggml's project() and before any of its targets.
        lines = [f'set(CMAKE_{x}_FLAGS "{" ".join(own.ggml)}")' for x in ("C", "CXX", "ASM")]
        # The profile's runtime complains, when it is loaded, of a library that has no counters.
        lines.append('set(CMAKE_SHARED_LINKER_FLAGS "")')
        (self.there / _GGML).write_text("\n".join([*lines, ""]), "utf-8")
        tests = any(t.startswith("test-") for t in targets)
        llama = " ".join(own.llama)
        ours = [
            f"-DCMAKE_C_COMPILER={self.compiler.cc}",
            f"-DCMAKE_CXX_COMPILER={self.compiler.cxx}",
            f"-DCMAKE_C_FLAGS={llama}",
            f"-DCMAKE_CXX_FLAGS={llama}",
            f"-DCMAKE_ASM_FLAGS={' '.join(own.ggml)}",
            f"-DCMAKE_SHARED_LINKER_FLAGS={' '.join(own.link)}",
            f"-DCMAKE_EXE_LINKER_FLAGS={' '.join(own.link)}",
            f"-DCMAKE_PROJECT_ggml_INCLUDE={self.there / _GGML}",
            f"-DLLAMA_BUILD_COMMON={_on(list(targets) != ['llama'])}",
            f"-DLLAMA_BUILD_TESTS={_on(tests)}",
        ]
        generator = ["-G", "Ninja"] if shutil.which("ninja") else ["-G", "Unix Makefiles"]
        command = ["cmake", "-S", str(tree), "-B", str(self.there), *generator, *_options(), *ours]
        self._call("configuring", command, append=False)

    def _build(self, targets: Sequence[str]) -> None:
        names = [x for t in targets for x in ("--target", t)]
        self._call("building", ["cmake", "--build", str(self.there), "--parallel", str(_cores()), *names], append=True)

    def _call(self, what: str, command: Sequence[str], *, append: bool) -> None:
        log = self.there / LOG
        # What lies above the sources, a home directory under git for one, is none of theirs.
        env = {**_plain_environment(), "GIT_CEILING_DIRECTORIES": str(cache_dir())}
        with log.open("ab" if append else "wb") as f:
            f.write(f"== {shlex.join(command)}\n".encode())
            f.flush()
            start = f.tell()
            p = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=f,
                stderr=f,
                env=env,
                # It holds the lock too: were this process killed, it would compile on, and no second may start.
                pass_fds=(self.lock.fileno(),),
                start_new_session=True,
            )
            try:
                self._wait(p, what, log)
            except BaseException:
                _stop(p)
                raise
        if p.returncode:
            if stamp_of(self.there) is None:
                (self.there / "CMakeCache.txt").unlink(missing_ok=True)  # what it found out may be what is wrong
            text = log.read_bytes()[start:].decode("utf-8", "replace")
            raise CannotBuild(failure_message(what, text, log))

    def _wait(self, p: subprocess.Popen[bytes], what: str, log: Path) -> None:
        started = time.monotonic()
        while True:
            try:
                p.wait(timeout=_SIGN_OF_LIFE)
                return
            except subprocess.TimeoutExpired:
                done = progress_in(log)
                self.say(f"... {what}: {_minutes(time.monotonic() - started)}{f', {done}' if done else ''}")


def _stop(p: subprocess.Popen[bytes]) -> None:
    # A group of its own: cmake's ninja or make, which takes away what is half written when it is told to stop, and all
    # its compilers.
    for sig in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(p.pid, sig)
            p.wait(timeout=20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _on(yes: bool) -> str:
    return "ON" if yes else "OFF"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def progress_in(log: Path) -> str:
    """How far ninja or make says it is: the last `[n/m]` or `[ n%]` of a log; empty where there is none."""
    with log.open("rb") as f:
        f.seek(max(0, log.stat().st_size - 4096))
        found = re.findall(rb"^\[ *\d+(?:/\d+|%)\]", f.read(), re.M)
    return found[-1].decode("ascii") if found else ""


def failure_message(what: str, text: str, log: Path) -> str:
    """What a person is told when cmake or a compiler failed: its first error and where all of it is."""
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    errors = [i for i, x in enumerate(lines) if re.search(r"\berror:|CMake Error|^FAILED|undefined reference", x)]
    shown = lines[errors[0] : errors[0] + 4] if errors else lines[-4:]
    head = f"{what} an instrumented llama.cpp failed; all that was said is in {log}"
    return "\n".join([head, *(f"  {x[:200]}" for x in shown)])


def snapshot(src: Path, to: Path) -> str:
    """Make `to` a copy of what is built of the checkout `src`, and give the hash over its contents.

    Only what differs is written, so that only it is compiled again.
    """
    h, kept = hashlib.sha256(), set[str]()
    for name, data in _contents(src):
        h.update(_entry(name, data))
        kept.add(name)
        path = to / name
        try:
            same = path.read_bytes() == data
        except OSError:
            same = False
        if not same:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for path in [p for p in to.rglob("*") if p.is_file()]:
        if path.relative_to(to).as_posix() not in kept:
            path.unlink()
    return h.hexdigest()


def _digest(src: Path) -> str:
    h = hashlib.sha256()
    for name, data in _contents(src):
        h.update(_entry(name, data))
    return h.hexdigest()


def _entry(name: str, data: bytes) -> bytes:
    return f"{name}\0{len(data)}\0".encode() + data


def _contents(src: Path) -> Iterator[tuple[str, bytes]]:
    """Name and contents of every file that is built or that cmake reads, in order."""
    wanted = sources.WHOLE.wanted.fullmatch
    for top in sorted(src.iterdir()):
        # not into .git, models and builds
        for path in sorted(top.rglob("*")) if wanted(f"{top.name}/x") else [top]:
            name = path.relative_to(src).as_posix()
            if wanted(name) and path.is_file():
                yield name, path.read_bytes()


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
