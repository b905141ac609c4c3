"""Compiles the shim against a build of llama.cpp, keeps what was compiled, and says in words what went wrong.

Nothing here loads native code into the calling process: whether a shim loads is tried in a child.
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
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fdiagnostics-color=never")

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


def place(fingerprint: str, link: Sequence[Path]) -> Path:
    """Where the shim for a build is kept."""
    # Where the libraries are is burnt into the shim, so an equal build elsewhere gets one of its own.
    where = hashlib.sha256("\0".join(str(p.absolute()) for p in link).encode()).hexdigest()[:8]
    return cache_dir() / "shims" / f"{fingerprint}-{where}.so"


def compile_into_cache(fingerprint: str, include: Sequence[Path], link: Sequence[Path], source: Path = SOURCE) -> Path:
    """The compiled shim for a build, from the cache or made now. Any number of processes may ask at once.

    `link` are the libraries to link, libllama first; their directories become the shim's search path. What is in the
    cache has loaded once.

    Raises:
        BadBuild: no compiler, no cache, llama.h says something else than the shim, or the result does not load.
    """
    done = place(fingerprint, link)
    shims = done.parent
    if done.is_file():
        return done
    try:
        shims.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=shims, prefix=".tmp-") as tmp:
            made = Path(tmp) / "shim.so"
            _compile(made, include, link, source)
            check_loads(made, link)
            # Atomic: a second process that did the same work replaces it by an equal one.
            os.replace(made, done)
    except OSError as e:
        raise BadBuild(f"the cache {shims} cannot be used: {e}; set REDRAFT_CACHE to a writable directory") from e
    return done


def compile_command(to: Path, include: Sequence[Path], link: Sequence[Path], source: Path = SOURCE) -> list[str]:
    """The compiler's command line."""
    command = [*compiler(), *FLAGS, *(f"-I{p}" for p in include), str(source), "-o", str(to)]
    if sys.platform == "linux":
        # DT_RPATH instead of DT_RUNPATH: it holds for the libraries' own dependencies as well (`cmake --install` strips
        # theirs) and goes before LD_LIBRARY_PATH. All are linked although the shim calls few of them, to pin them all.
        command += ["-Xlinker", "--disable-new-dtags", "-Xlinker", "--no-as-needed"]
    command += [str(p) for p in link]
    for d in dict.fromkeys(p.parent.absolute() for p in link):
        command += ["-Xlinker", "-rpath", "-Xlinker", str(d)]
    return command


def _compile(to: Path, include: Sequence[Path], link: Sequence[Path], source: Path) -> None:
    command = compile_command(to, include, link, source)
    try:
        p = run_quietly(command, _compiler_env(), _COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise BadBuild(f"compiling the shim took more than {_COMPILE_SECONDS} s: {shlex.join(command)}") from None
    if p.returncode:
        raise BadBuild(compile_message(p.stderr, source.name, shlex.join(command)))


@dataclass
class Moved:
    """One thing that a build's llama.h says otherwise than the shim expects, and the shim's lines that need it."""

    what: str
    uses: str
    lines: list[int] = field(default_factory=list)
    hint: str = ""

    def __str__(self) -> str:
        text = self.what
        if self.lines:
            verb = self.uses if len(self.lines) == 1 else self.uses.removesuffix("s")
            text += f"; {SOURCE.name}:{', '.join(map(str, self.lines))} {verb} it"
        return f"{text} (the compiler suggests {self.hint})" if self.hint else text


# What follows "error: " in the words of g++ and of clang, what it means, and what the shim does with it. Names: Q is a
# quote, NAME an identifier. {more} says which way a number of arguments is off.
_WORDINGS = [
    (re.compile(pattern.replace("Q", "['\u2018\u2019\"`]").replace("NAME", r"(\w+)")), what, verb)
    for pattern, what, verb in (
        (r"QNAMEQ (?:was not|has not been) declared", "llama.h of this build has no {0}", "uses"),
        (r"use of undeclared identifier QNAMEQ", "llama.h of this build has no {0}", "uses"),
        (r"QNAMEQ does not name a type", "llama.h of this build has no type {0}", "uses"),
        (r"unknown type name QNAMEQ", "llama.h of this build has no type {0}", "uses"),
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
_THEIRS = re.compile(r"llama|ggml|gguf|LLAMA|GGML|GGUF")
_ERROR_LINE = re.compile(r"^(?P<file>.+?):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$")


def what_moved(errors: str, source: str = SOURCE.name) -> list[Moved]:
    """What the compiler's messages say has moved in llama.h: one entry a name, with the lines of the shim that need it.

    `errors` is what g++ or clang++ wrote (LC_ALL=C); only errors in `source` and missing headers count.
    """
    found: dict[str, Moved] = {}
    lines = errors.splitlines()
    for i, line in enumerate(lines):
        m = _ERROR_LINE.match(line)
        if not m:
            continue
        here = Path(m["file"]).name == source
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
                break  # a name of the shim itself that an earlier error left without a declaration
            text = what.format(*groups, more="fewer" if groups[0] == "many" else "more")
            hint = re.search(r"; did you mean '(\w+)'\?", m["text"])
            entry = found.setdefault(text, Moved(text, verb, hint=hint[1] if hint else ""))
            if here and int(m["line"]) not in entry.lines:
                entry.lines.append(int(m["line"]))
            break
        else:
            if re.search(r"\b(?:llama|ggml|LLAMA|GGML)_\w+", m["text"]):
                found.setdefault(m["text"], Moved(m["text"], "needs", [int(m["line"])]))
    # A wrong type is said once more by the number of arguments.
    named = {n for x in found.values() if x.uses != "needs" for n in x.lines}
    return [x for x in found.values() if x.uses != "needs" or not x.lines or not named.issuperset(x.lines)]


def _declared_note(rest: Iterable[str]) -> str | None:
    for line in rest:
        if _ERROR_LINE.match(line):
            return None
        if m := re.search(r"note: '(\w+)' declared here", line):
            return m[1]
    return None


def compile_message(errors: str, source: str, command: str) -> str:
    """What a person is told when the shim did not compile: what moved first, then the compiler's own words."""
    moved = what_moved(errors, source)
    raw = errors.strip().splitlines()
    shown = [*raw[:_RAW_LINES], *([f"... {len(raw) - _RAW_LINES} more lines"] if len(raw) > _RAW_LINES else [])]
    if moved:
        head = ["the shim does not compile against the headers of this build:", *(f"  - {m}" for m in moved)]
        advice = (
            "Its llama.h is older or newer than what subjects/shim.cpp was written for: take a release nearer to the "
            "pinned llama-cpp-python, or adapt subjects/shim.cpp."
        )
    else:
        head = ["the shim does not compile:"]
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


def check_loads(shim: Path, link: Sequence[Path] = ()) -> None:
    """Load a compiled shim in a child process; on Linux see too that all it loads lies beside the libraries in `link`.

    Raises:
        BadBuild: it does not load, or brings a libllama or libggml from elsewhere; the message says why.
    """
    command = [sys.executable, "-I", "-S", "-c", _LOADER, str(shim)]
    try:
        p = run_quietly(command, child_env(), _LOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise BadBuild(f"loading the shim took more than {_LOAD_SECONDS} s") from None
    try:
        answer = json.loads(p.stdout)
        error, mapped = answer.get("error"), [Path(x) for x in answer.get("mapped", [])]
    except (ValueError, AttributeError, TypeError):
        raise BadBuild(death_message(p.returncode, p.stderr)) from None
    if error is not None:
        raise BadBuild(load_message(str(error)))
    if not link:
        return
    ours = {p.parent.resolve() for p in link} | {p.resolve().parent for p in link}
    foreign = [p for p in mapped if re.match(r"lib(llama|ggml)\b", p.name) and p.parent not in ours]
    if foreign:
        raise BadBuild(
            f"the shim loaded {', '.join(map(str, foreign))}, which is not of this build "
            f"({', '.join(map(str, sorted(ours)))}); take that directory out of LD_LIBRARY_PATH and LD_PRELOAD"
        )


def load_message(error: str) -> str:
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
        name = symbol["name"]
        file = Path(symbol.groupdict().get("file") or "shim.so").name
        owner = "libggml" if name.startswith(("ggml_", "gguf_")) else "libllama"
        if file.startswith("lib"):
            text = f"{owner} lacks {name}, which {file} needs: libraries of different versions; build them all again"
        else:
            text = (
                f"{owner} lacks {name}: headers and library are from different versions; build the library again from "
                "the sources that this llama.h is of"
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
        text = "the shim does not load"
    return f"{text}\nThe dynamic linker said: {error}"


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
