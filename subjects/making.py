"""Makes a build of llama.cpp with cmake, once, and keeps it in the cache: whatever kind of build it is.

A kind (`Kind`) says what is compiled and how: `subjects.instrument` has those that a fuzzer follows,
`subjects.server.build` the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import msgspec

from subjects import sources
from subjects.shimcache import BadBuild, cache_dir

Coverage = Literal["fuzzer", "report"]

STAMP = "redraft-build.json"
"""In a build directory, written last: what was built there. A build without it is not finished."""
LOG = "redraft-build.log"
_SNAPSHOT = "redraft-sources"

_SIGN_OF_LIFE = 20.0
"""seconds"""
_CORE_MINUTES = {"llama": 5.0, "llama-common": 2.5, "llama-server": 7.0}
"""What targets take on one core (measured, EPYC); others about one minute each."""


class CannotBuild(BadBuild):
    """A build cannot be made; everything that needs none still works. The first line says why and what to do."""


# ---------------------------------------------------------------------------------------------------------------------
# What is built


class Kind(ABC):
    """What is compiled, and how."""

    coverage: Coverage | None = None
    sanitize: tuple[str, ...] = ()
    part: sources.Part = sources.WHOLE
    """of llama.cpp's tree, that it is built from"""
    label: str
    """in the build directory's name"""
    what: str
    """is built, for people"""
    advice: str
    """where tools are missing; empty where there is none to give"""

    @property
    @abstractmethod
    def compiler(self) -> str | None:
        """The compiler's version line; None where there is no compiler that serves."""

    @property
    @abstractmethod
    def compiler_name(self) -> str:
        """The compiler, for people."""

    @abstractmethod
    def missing(self) -> list[str]:
        """In words, what is not installed of what is needed."""

    @abstractmethod
    def said(self) -> list[str]:
        """All that makes one such build differ from another, beside the compiler and the sources."""

    @abstractmethod
    def options(self, tree: Path, there: Path, targets: Sequence[str]) -> list[str]:
        """cmake's, to build targets of the sources `tree` in the directory `there`, in which files may be left that the
        options name."""

    def recipe(self) -> str | None:
        """A hash over the compiler's version and all options; None where there is no compiler."""
        if self.compiler is None:
            return None
        return hashlib.sha256("\0".join([self.compiler, *self.said()]).encode()).hexdigest()[:16]


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


def place(kind: Kind, src: Path | None = None) -> Path:
    """Where a build is kept, whether it is there or not.

    Raises:
        CannotBuild: no checkout at `src`, or no llama-cpp-python whose sources could be taken.
    """
    origin = str(_checkout(src, kind.part)) if src else release()
    name = Path(origin).name if src else f"llama-cpp-python-{origin}"
    folder = cache_dir() / "builds"
    # The path of the cache too: a build directory that was moved is none any more.
    key = hashlib.sha256(f"{folder}\0{origin}\0{bool(src)}".encode()).hexdigest()[:8]
    return folder / f"{name}-{kind.label}-{key}"


def release() -> str:
    """The version of the llama-cpp-python that is installed.

    Raises:
        CannotBuild: none is.
    """
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        raise CannotBuild(
            "llama-cpp-python, whose sources would be built, is not installed: run ci/setup, or name a llama.cpp "
            "checkout with --src"
        ) from None


def _checkout(src: Path, part: sources.Part) -> Path:
    root = src.expanduser().resolve()
    if missing := sources.missing_of(root, part):
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
        return stamp.sources == release()
    except CannotBuild:
        return False


def origin(stamp: Stamp) -> str:
    """What a build was made from, for people; holds no path."""
    if stamp.of_checkout:
        return f"a checkout (contents {stamp.sources[:16]})"
    return f"llama-cpp-python {stamp.sources}"


def ready(kind: Kind, src: Path | None = None, *, targets: Sequence[str]) -> Path | None:
    """The build that `made` would give without building anything; None where it would have to build.

    Needs no compiler: a finished build is used where there is none any more.

    Raises:
        CannotBuild: see `place`.
    """
    there = place(kind, src)
    stamp = stamp_of(there)
    if stamp is None or not set(targets) <= set(stamp.targets):
        return None
    tree = there / _SNAPSHOT if src else _release_tree(release(), kind.part)
    if sources.missing_of(tree, kind.part):
        return None  # its headers were taken away
    recipe = kind.recipe()
    if recipe and stamp.recipe != recipe:
        return None
    return there if stamp.sources == _wanted(kind, src) else None


def _wanted(kind: Kind, src: Path | None) -> str:
    """What the stamp has to say of the sources."""
    return _digest(_checkout(src, kind.part), kind.part) if src else release()


def _release_tree(version: str, part: sources.Part) -> Path:
    return cache_dir() / "sources" / f"llama-cpp-python-{version}{part.suffix}"


# ---------------------------------------------------------------------------------------------------------------------
# Building


def missing_builders() -> list[str]:
    """In words, what is not installed of what every kind needs beside a compiler."""
    lacks = [] if shutil.which("cmake") else ["cmake"]
    return lacks if shutil.which("ninja") or shutil.which("make") else [*lacks, "ninja or make"]


def plain_environment() -> dict[str, str]:
    """For compilers and cmake: a preloaded sanitizer is meant for the library, and what they say is parsed."""
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    return {**env, "LC_ALL": "C", "LANGUAGE": "C"}


def on(yes: bool) -> str:
    """cmake's word for it."""
    return "ON" if yes else "OFF"


def made(kind: Kind, src: Path | None = None, *, targets: Sequence[str], say: Callable[[str], None]) -> Path:
    """A build directory, from the cache or built now, which takes minutes.

    Built is the installed llama-cpp-python's llama.cpp, or the checkout `src`: a copy of it, which is brought up to
    date and rebuilt where the checkout has been edited. `targets` are CMake's; what was built before stays. `say` is
    told what is going on, a line at a time.
    Any number of processes may ask at once; one builds. What was interrupted is gone on with the next time.

    Raises:
        CannotBuild: a tool or the sources are missing, or it does not compile; the first line says what to do.
    """
    if done := ready(kind, src, targets=targets):
        return done
    recipe = _tools(kind)
    there = place(kind, src)
    try:
        there.mkdir(parents=True, exist_ok=True)
        with _alone(there, say) as lock:
            # by another while this one waited
            if done := ready(kind, src, targets=targets):
                return done
            _Making(there, kind, recipe, tuple(targets), lock, say).run(src)
    except OSError as e:
        raise CannotBuild(f"{there} cannot be built in: {e}; set REDRAFT_CACHE to a writable directory") from e
    return there


def _tools(kind: Kind) -> str:
    missing, recipe = kind.missing(), kind.recipe()
    if missing or recipe is None:
        advice = f": {kind.advice}" if kind.advice else ""
        raise CannotBuild(f"building {kind.what} needs {', '.join(missing)}{advice}")
    return recipe


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
    kind: Kind
    recipe: str
    targets: tuple[str, ...]
    lock: IO[str]
    say: Callable[[str], None]

    def run(self, src: Path | None) -> None:
        """Build, and leave the stamp."""
        started = time.monotonic()
        kind, old = self.kind, stamp_of(self.there)
        if old and old.recipe != self.recipe:
            shutil.rmtree(self.there)
            self.there.mkdir()
            old = None
        if old is None or old.sources != _wanted(kind, src):
            # From here on it is not usable until it is finished. Where targets are added only, what is there stays so.
            (self.there / STAMP).unlink(missing_ok=True)
        targets = tuple(dict.fromkeys([*(old.targets if old else ()), *self.targets]))
        tree, what = self._sources(src)
        self._announce(targets, old)
        self._configure(tree, targets)
        self._build(targets)
        seconds = round(time.monotonic() - started, 1)
        stamp = Stamp(kind.coverage, kind.sanitize, targets, what, self.recipe, seconds)
        new = self.there / f"{STAMP}.new"
        new.write_bytes(msgspec.json.encode(stamp))
        os.replace(new, self.there / STAMP)
        self.say(f"built in {_minutes(stamp.seconds)}: {self.there}")

    def _sources(self, src: Path | None) -> tuple[Path, str]:
        part = self.kind.part
        if src:
            # A copy: what is edited while it is compiled, or before it is used, would be misread; and cmake goes by
            # times, which a checkout of an older file does not change forwards.
            tree = self.there / _SNAPSHOT
            return tree, snapshot(_checkout(src, part), tree, part)
        try:
            return sources.fetched(release(), part=part), release()
        except sources.NoDrivers as e:
            raise CannotBuild(str(e)) from None

    def _announce(self, targets: Sequence[str], old: Stamp | None) -> None:
        if old and set(targets) == set(old.targets):
            self.say(f"the sources have changed: building what they change again in {self.there}")
            return
        fresh = [t for t in targets if not old or t not in old.targets]
        minutes = math.ceil(sum(_CORE_MINUTES.get(t, 1.0) for t in fresh) / _cores())
        self.say(
            f"building {', '.join(fresh)} with {self.kind.compiler_name}, once: about {minutes} "
            f"minute{'s' * (minutes != 1)} on {_cores()} core{'s' * (_cores() != 1)}; into {self.there}"
        )

    def _configure(self, tree: Path, targets: Sequence[str]) -> None:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else ["-G", "Unix Makefiles"]
        options = self.kind.options(tree, self.there, targets)
        command = ["cmake", "-S", str(tree), "-B", str(self.there), *generator, *options]
        self._call("configuring", command, append=False)

    def _build(self, targets: Sequence[str]) -> None:
        names = [x for t in targets for x in ("--target", t)]
        self._call("building", ["cmake", "--build", str(self.there), "--parallel", str(_cores()), *names], append=True)

    def _call(self, what: str, command: Sequence[str], *, append: bool) -> None:
        log = self.there / LOG
        # What lies above the sources, a home directory under git for one, is none of theirs.
        env = {**plain_environment(), "GIT_CEILING_DIRECTORIES": str(cache_dir())}
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
            raise CannotBuild(failure_message(f"{what} {self.kind.what}", text, log))

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
    head = f"{what} failed; all that was said is in {log}"
    return "\n".join([head, *(f"  {x[:200]}" for x in shown)])


def snapshot(src: Path, to: Path, part: sources.Part = sources.WHOLE) -> str:
    """Make `to` a copy of what is built of the checkout `src`, and give the hash over its contents.

    Only what differs is written, so that only it is compiled again.
    """
    h, kept = hashlib.sha256(), set[str]()
    for name, data in _contents(src, part):
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


def _digest(src: Path, part: sources.Part) -> str:
    h = hashlib.sha256()
    for name, data in _contents(src, part):
        h.update(_entry(name, data))
    return h.hexdigest()


def _entry(name: str, data: bytes) -> bytes:
    return f"{name}\0{len(data)}\0".encode() + data


def _contents(src: Path, part: sources.Part) -> Iterator[tuple[str, bytes]]:
    """Name and contents of every file that is built or that cmake reads, in order."""
    wanted = part.wanted.fullmatch
    for top in sorted(src.iterdir()):
        # not into .git, models and builds
        for path in sorted(top.rglob("*")) if wanted(f"{top.name}/x.cmake") else [top]:
            name = path.relative_to(src).as_posix()
            if wanted(name) and path.is_file():
                yield name, path.read_bytes()
