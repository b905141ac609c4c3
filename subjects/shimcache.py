"""Compiles the shim and the driver library against a build of llama.cpp, keeps what was compiled, and says in words
what went wrong.

Nothing here loads native code into the calling process: whether a library loads is tried in a child.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.cpp")
PARAMS = SOURCE.with_name("shim_params.h")
"""What all of our C++ includes."""
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fdiagnostics-color=never")
# An exception that leaves the C API ends at the shim, with its type and text told: further out somebody may catch it
# (Atheris does, and knows neither).
SHIM_FLAGS = (*FLAGS, "-fno-exceptions", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables")

_COMPILE_SECONDS = 300
_LOAD_SECONDS = 120
_RAW_LINES = 12


class BadBuild(RuntimeError):
    """A build of llama.cpp that cannot be tested; the message says what was looked for, where, and what to do."""


def cache_dir() -> Path:
    """Where compiled shims and remembered hashes are: $REDRAFT_CACHE, $XDG_CACHE_HOME/redraft or ~/.cache/redraft."""
    if own := os.environ.get("REDRAFT_CACHE"):
        return Path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "redraft"


def child_env() -> dict[str, str]:
    """Environment for children that load the library: otherwise an abort of ggml starts a debugger, for seconds."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1"}


def _compiler_env() -> dict[str, str]:
    # A preloaded sanitizer runtime is meant for the library under test, not for the compiler.
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")}
    # C: the messages are parsed.
    return {**env, "LC_ALL": "C", "LANGUAGE": "C"}


def run_quietly(command: Sequence[str], env: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a child without input, keep its output as text. Raises OSError, subprocess.TimeoutExpired."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=env,
        timeout=seconds,
        check=False,
    )


def compiler() -> list[str]:
    """The C++ compiler as an argument list: $CXX, or the first of c++, g++ and clang++.

    Raises:
        BadBuild: there is none.
    """
    wanted = os.environ.get("CXX", "").strip()
    if wanted:
        try:
            words = shlex.split(wanted)
        except ValueError:
            words = [wanted]
        if shutil.which(words[0]):
            return words
        raise BadBuild(f"CXX={wanted}: no such command; set CXX to a C++17 compiler, or unset it")
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BadBuild(
        "no C++ compiler: looked for $CXX, c++, g++ and clang++ on PATH; the shim is compiled against llama.h on first "
        "use, so install one (Debian and Ubuntu: apt-get install g++) or set CXX"
    )


@functools.lru_cache
def _version_line(command: tuple[str, ...]) -> str:
    try:
        p = run_quietly([*command, "--version"], _compiler_env(), 60)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BadBuild(f"{shlex.join(command)} --version: {e}; set CXX to a C++17 compiler") from None
    lines = p.stdout.strip().splitlines()
    if p.returncode or not lines:
        said = p.stderr.strip()[:300]
        raise BadBuild(f"{shlex.join(command)} --version: {p.returncode}, {said}; set CXX to a C++17 compiler")
    return lines[0]


def compiler_line() -> str:
    """First line of the compiler's --version. Raises BadBuild where there is no compiler."""
    return _version_line(tuple(compiler()))


def file_hash(path: Path) -> str:
    """SHA-256 (hex) of a file; remembered in the cache by path, size and times, since CUDA libraries are large."""
    path = path.resolve()
    st = path.stat()
    # ctime too: copying with preserved times replaces a library and leaves its mtime alone.
    name = hashlib.sha256(f"{path}\0{st.st_size}\0{st.st_mtime_ns}\0{st.st_ctime_ns}".encode()).hexdigest()[:32]
    memo = cache_dir() / "hashes" / name
    try:
        known = memo.read_text("ascii")
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    except (OSError, UnicodeDecodeError):
        pass
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        _replace(memo, digest.encode())
    except OSError:
        pass  # only slower next time; compiling says so where the cache cannot be written
    return digest


def _replace(path: Path, data: bytes) -> None:
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------------------------------------------------------------
# Compiling


@dataclass(frozen=True)
class Ours:
    """A library of ours that is compiled against a build and kept: the shim, or the drivers."""

    fingerprint: str
    include: Sequence[Path]
    link: Sequence[Path]
    """libraries of the build, in the order in which symbols are looked for; their directories become the search path"""
    source: Path = SOURCE
    more: Sequence[Path] = ()
    """sources of llama.cpp that are compiled in"""
    what: str = "shim"
    flags: Sequence[str] = SHIM_FLAGS

    @property
    def place(self) -> Path:
        """Where it is kept."""
        # Where the libraries are is burnt into it, so an equal build elsewhere gets one of its own.
        where = hashlib.sha256("\0".join(str(p.absolute()) for p in self.link).encode()).hexdigest()[:8]
        return cache_dir() / f"{self.what}s" / f"{self.fingerprint}-{where}.so"

    def made(self) -> Path:
        """The compiled library, from the cache or made now. Any number of processes may ask at once.

        What is in the cache has loaded once.

        Raises:
            BadBuild: no compiler, no cache, a header says something else than our source, or the result does not load.
        """
        done = self.place
        if done.is_file():
            return done
        try:
            done.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=done.parent, prefix=".tmp-") as tmp:
                made = Path(tmp) / f"{self.what}.so"
                self._compile(made)
                check_loads(made, self.link, self.what)
                # Atomic: a second process that did the same work replaces it by an equal one.
                os.replace(made, done)
        except OSError as e:
            raise BadBuild(
                f"the cache {done.parent} cannot be used: {e}; set REDRAFT_CACHE to a writable directory"
            ) from e
        return done

    def command(self, to: Path) -> list[str]:
        """The compiler's command line."""
        dirs = [*self.include, PARAMS.parent]
        command = [*compiler(), *self.flags, *(f"-I{p}" for p in dirs)]
        command += [*map(str, (self.source, *self.more)), "-o", str(to)]
        if sys.platform == "linux":
            # DT_RPATH instead of DT_RUNPATH: it holds for the libraries' own dependencies as well (`cmake --install`
            # strips theirs) and goes before LD_LIBRARY_PATH. All are linked although the shim calls few of them, to
            # pin them all.
            command += ["-Xlinker", "--disable-new-dtags", "-Xlinker", "--no-as-needed"]
        command += [str(p) for p in self.link]
        # Backwards: beside an installed libllama-common lie copies of libllama, which llama_cpp does not use.
        for d in dict.fromkeys(p.parent.absolute() for p in reversed(self.link)):
            command += ["-Xlinker", "-rpath", "-Xlinker", str(d)]
        return command

    def _compile(self, to: Path) -> None:
        command = self.command(to)
        try:
            p = run_quietly(command, _compiler_env(), _COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise BadBuild(
                f"compiling the {self.what} took more than {_COMPILE_SECONDS} s: {shlex.join(command)}"
            ) from None
        if p.returncode:
            raise BadBuild(compile_message(p.stderr, self, shlex.join(command)))


def compile_into_cache(fingerprint: str, include: Sequence[Path], link: Sequence[Path], source: Path = SOURCE) -> Path:
    """The compiled shim for a build, see Ours.

    Raises:
        BadBuild: see Ours.made.
    """
    return Ours(fingerprint, include, link, source).made()


@dataclass
class Moved:
    """One thing that a build's headers say otherwise than a source of ours expects, and the lines that need it."""

    what: str
    uses: str
    source: str = SOURCE.name
    lines: list[int] = field(default_factory=list)
    hint: str = ""

    def __str__(self) -> str:
        text = self.what
        if self.lines:
            verb = self.uses if len(self.lines) == 1 else self.uses.removesuffix("s")
            text += f"; {self.source}:{', '.join(map(str, self.lines))} {verb} it"
        return f"{text} (the compiler suggests {self.hint})" if self.hint else text


# What follows "error: " in the words of g++ and of clang, what it means, and what our source does with it. Names: Q is
# a quote, NAME an identifier. {more} says which way a number of arguments is off, {owner} where the name should be.
_WORDINGS = [
    (re.compile(pattern.replace("Q", "['\u2018\u2019\"`]").replace("NAME", r"(\w+)")), what, verb)
    for pattern, what, verb in (
        (r"QNAMEQ (?:was not|has not been) declared", "{owner} of this build has no {0}", "uses"),
        (r"use of undeclared identifier QNAMEQ", "{owner} of this build has no {0}", "uses"),
        (r"QNAMEQ does not name a type", "{owner} of this build has no type {0}", "uses"),
        (r"unknown type name QNAMEQ", "{owner} of this build has no type {0}", "uses"),
        (r"Q(?:struct )?NAMEQ(?: \{.*?\})? has no member named QNAMEQ", "{0} of this build has no member {1}", "uses"),
        (r"no member named QNAMEQ in Q(?:struct )?NAMEQ", "{1} of this build has no member {0}", "uses"),
        (r"too (many|few) arguments to function Q[^(]*?\bNAME\(", "{1} of this build takes {more} arguments", "calls"),
        (r"too (many|few) arguments to function call", "{1} of this build takes {more} arguments", "calls"),
        (r"no matching function for call to QNAME", "{0} of this build takes other arguments", "calls"),
        (r"((?:invalid conversion|cannot (?:convert|initialize)|assigning to) .*)", "other types: {0}", "needs"),
        (r"([\w./-]+\.h): No such file", "the headers of this build lack {0}", "needs"),
        (r"Q([\w./-]+\.h)Q file not found", "the headers of this build lack {0}", "needs"),
    )
]
_THEIRS = re.compile(r"llama|ggml|gguf|common_|LLAMA|GGML|GGUF|COMMON_")
_ERROR_LINE = re.compile(r"^(?P<file>.+?):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$")


def what_moved(errors: str, source: str = SOURCE.name) -> list[Moved]:
    """What the compiler's messages say has moved in the headers: one entry a name, with the lines of ours that need it.

    `errors` is what g++ or clang++ wrote (LC_ALL=C); only errors in `source`, in what all of ours includes, and missing
    headers count.
    """
    found: dict[tuple[str, str], Moved] = {}
    lines = errors.splitlines()
    for i, line in enumerate(lines):
        m = _ERROR_LINE.match(line)
        if not m:
            continue
        name = Path(m["file"]).name
        here = name in (source, PARAMS.name)
        if not here and "No such file" not in line and "file not found" not in line:
            continue
        for pattern, what, verb in _WORDINGS:
            hit = pattern.search(m["text"])
            if not hit:
                continue
            groups = list(hit.groups())
            if "{more}" in what and len(groups) < 2:
                groups.append(_declared_note(lines[i + 1 :]) or "a function")  # clang names it in a note
            if "has no {0}" in what and not _THEIRS.match(groups[0]):
                break  # a name of our own that an earlier error left without a declaration
            owner = "common/*.h" if groups[0].lower().startswith("common_") else "llama.h"
            text = what.format(*groups, owner=owner, more="fewer" if groups[0] == "many" else "more")
            hint = re.search(r"; did you mean '(\w+)'\?", m["text"])
            file = name if here else source
            entry = found.setdefault((text, file), Moved(text, verb, file, hint=hint[1] if hint else ""))
            if here and int(m["line"]) not in entry.lines:
                entry.lines.append(int(m["line"]))
            break
        else:
            if re.search(r"\b(?:llama|ggml|common|LLAMA|GGML|COMMON)_\w+", m["text"]):
                found.setdefault((m["text"], name), Moved(m["text"], "needs", name, [int(m["line"])]))
    # A wrong type is said once more by the number of arguments.
    named = {(x.source, n) for x in found.values() if x.uses != "needs" for n in x.lines}
    return [
        x
        for x in found.values()
        if x.uses != "needs" or not x.lines or not named.issuperset((x.source, n) for n in x.lines)
    ]


def _declared_note(rest: Iterable[str]) -> str | None:
    for line in rest:
        if _ERROR_LINE.match(line):
            return None
        if m := re.search(r"note: '(\w+)' declared here", line):
            return m[1]
    return None


def compile_message(errors: str, ours: Ours, command: str) -> str:
    """What a person is told when a library of ours did not compile: what moved first, then the compiler's own words."""
    moved = what_moved(errors, ours.source.name)
    theirs = [p.name for p in ours.more if re.search(rf"^(?:.*/)?{re.escape(p.name)}:\d+:.*error:", errors, re.M)]
    raw = errors.strip().splitlines()
    shown = [*raw[:_RAW_LINES], *([f"... {len(raw) - _RAW_LINES} more lines"] if len(raw) > _RAW_LINES else [])]
    if moved:
        head = [f"the {ours.what} does not compile against the headers of this build:", *(f"  - {m}" for m in moved)]
        name = f"subjects/{ours.source.name}"
        advice = (
            f"They are older or newer than what {name} was written for: take a release nearer to the pinned "
            f"llama-cpp-python, or adapt {name}."
        )
    elif theirs:
        head = [f"the {ours.what} does not compile, because {', '.join(theirs)} does not:"]
        advice = "Mend it, or take sources that are of this build."
    else:
        head = [f"the {ours.what} does not compile:"]
        advice = "If the compiler is too old for C++17, set CXX to another one."
    return "\n".join([*head, advice, "The compiler said:", *(f"  {x}" for x in shown), f"Command: {command}"])


# ---------------------------------------------------------------------------------------------------------------------
# Loading

_LOADER = """
import ctypes, json, sys
try:
    ctypes.CDLL(sys.argv[1])
except OSError as e:
    print(json.dumps({"error": str(e)}))
    sys.exit(3)
try:
    mapped = sorted({line.split(None, 5)[5].rstrip("\\n") for line in open("/proc/self/maps") if "/lib" in line})
except OSError:
    mapped = []
print(json.dumps({"mapped": mapped}))
"""


def check_loads(library: Path, link: Sequence[Path] = (), what: str = "shim") -> None:
    """Load a compiled library in a child process; on Linux see too that all it loads lies beside the libraries in
    `link`.

    Raises:
        BadBuild: it does not load, or brings a libllama or libggml from elsewhere; the message says why.
    """
    command = [sys.executable, "-I", "-S", "-c", _LOADER, str(library)]
    try:
        p = run_quietly(command, child_env(), _LOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise BadBuild(f"loading the {what} took more than {_LOAD_SECONDS} s") from None
    try:
        answer = json.loads(p.stdout)
        error, mapped = answer.get("error"), [Path(x) for x in answer.get("mapped", [])]
    except (ValueError, AttributeError, TypeError):
        raise BadBuild(death_message(p.returncode, p.stderr)) from None
    if error is not None:
        raise BadBuild(load_message(str(error), what))
    if not link:
        return
    # Each where it was linked, and what they bring beside any of them.
    homes = {stem(x): {x.parent.resolve(), x.resolve().parent} for x in link}
    ours = set().union(*homes.values())
    loaded = [x for x in mapped if re.match(r"lib(llama|ggml)\b", x.name)]
    foreign = [x for x in loaded if x.parent not in homes.get(stem(x), ours)]
    if foreign:
        raise BadBuild(
            f"the {what} loaded {', '.join(map(str, foreign))}, which is not of this build "
            f"({', '.join(map(str, sorted(ours)))}); take that directory out of LD_LIBRARY_PATH and LD_PRELOAD"
        )


def stem(path: Path) -> str:
    """A library's name without version and suffix."""
    return re.split(r"\.(?:so|dylib|\d)", path.name)[0]


def load_message(error: str, what: str = "shim") -> str:
    """What a person is told for a message of the dynamic linker (glibc, musl, macOS)."""
    symbol = (
        re.search(r"(?P<file>\S+): undefined symbol: (?P<name>\w+)", error)
        or re.search(r"Error relocating (?P<file>\S+): (?P<name>\w+): symbol not found", error)
        or re.search(r"[Ss]ymbol not found(?: in flat namespace)?:? '?_(?P<name>\w+)'?", error)
    )
    missing = re.search(r"(\S+\.(?:so|dylib)\S*): cannot open shared object file", error) or re.search(
        r"(?:Library not loaded: |Error loading shared library )(\S+?)(?=[:\s]|$)", error
    )
    if symbol:
        name = _demangled(symbol["name"])
        file = Path(symbol.groupdict().get("file") or f"{what}.so").name
        owners = {"ggml": "libggml", "gguf": "libggml", "common": "libllama-common"}
        owner = owners.get(name.split("_")[0], "libllama")
        if file.startswith("lib"):
            text = f"{owner} lacks {name}, which {file} needs: libraries of different versions; build them all again"
        else:
            text = (
                f"{owner} lacks {name}: headers and library are from different versions; build the library again from "
                "the sources that these headers are of"
            )
    elif missing:
        text = (
            f"{Path(missing[1]).name} cannot be found: the build is incomplete or was moved; build it again, or, if it "
            "belongs to the system (CUDA, ROCm), add its directory to LD_LIBRARY_PATH"
        )
    elif "GLIBCXX_" in error or "CXXABI_" in error or "GLIBC_" in error:
        text = (
            "the library was built with a newer C or C++ library than the one here; build it on this machine, or put "
            "its libstdc++ into LD_PRELOAD"
        )
    else:
        text = f"the {what} does not load"
    return f"{text}\nThe dynamic linker said: {error}"


def _demangled(symbol: str) -> str:
    """The name in a symbol; of a C++ function without its arguments."""
    rest, names = re.sub("^_ZN?K?", "", symbol), list[str]()
    while rest != symbol and (m := re.match(r"\d+", rest)):
        end = m.end() + int(m[0])
        names.append(rest[m.end() : end])
        rest = rest[end:]
    return "::".join(names) or symbol


def death_message(returncode: int, stderr: str) -> str:
    """What a person is told when a child that loaded the library ended without an answer."""
    tail = "\n".join(f"  {x}" for x in stderr.strip().splitlines()[-_RAW_LINES:])
    if "runtime does not come first" in stderr or "__asan_init" in stderr:
        text = (
            "this build is instrumented with a sanitizer, whose runtime must be loaded first: set LD_PRELOAD to it "
            "(clang++ -print-file-name=libclang_rt.asan-x86_64.so) and ASAN_OPTIONS=detect_leaks=0"
        )
    elif returncode == -signal.SIGILL:
        text = "the library was built for another CPU (illegal instruction): build it here, or with -DGGML_NATIVE=OFF"
    elif returncode < 0:
        text = f"the process that loaded the library was killed by {_signal_name(-returncode)}"
    else:
        text = f"the process that loaded the library ended with {returncode}"
    return f"{text}\nIt said:\n{tail}" if tail else text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
