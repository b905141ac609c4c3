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
from collections.abc import Iterable, Sequence
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
    """Environment for children that load the library: without it an abort of ggml starts a debugger and takes seconds."""
    return {**os.environ, "GGML_NO_BACKTRACE": "1"}


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
        "no C++ compiler: looked for $CXX, c++, g++ and clang++ on PATH; the shim is compiled against llama.h on first use, "
        "so install one (Debian and Ubuntu: apt-get install g++) or set CXX"
    )


@functools.lru_cache
def _version_line(command: tuple[str, ...]) -> str:
    try:
        p = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BadBuild(f"{shlex.join(command)} --version: {e}; set CXX to a C++17 compiler") from None
    lines = p.stdout.strip().splitlines()
    if p.returncode or not lines:
        said = p.stderr.strip()[:300]
        raise BadBuild(f"{shlex.join(command)} --version ended with {p.returncode}: {said}; set CXX to a C++17 compiler")
    return lines[0]


def compiler_line() -> str:
    """First line of the compiler's --version. Raises BadBuild where there is no compiler."""
    return _version_line(tuple(compiler()))


def file_hash(path: Path) -> str:
    """SHA-256 (hex) of a file; remembered in the cache by path, size and times, since CUDA libraries take seconds to read."""
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


def compile_into_cache(fingerprint: str, include: Sequence[Path], link: Sequence[Path], source: Path = SOURCE) -> Path:
    """The compiled shim for a build, from the cache or made now. Any number of processes may ask at once.

    `link` are the libraries to link, libllama first; their directories become the shim's search path. What is in the cache has
    loaded once.

    Raises:
        BadBuild: no compiler, no cache, llama.h says something else than the shim, or the result does not load.
    """
    # Where the libraries are is burnt into the shim, so an equal build elsewhere gets one of its own.
    place = hashlib.sha256("\0".join(str(p.absolute()) for p in link).encode()).hexdigest()[:8]
    shims = cache_dir() / "shims"
    done = shims / f"{fingerprint}-{place}.so"
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
        raise BadBuild(f"the cache {shims} cannot be used: {e}; set REDRAFT_CACHE to a directory that can be written") from e
    return done


def compile_command(to: Path, include: Sequence[Path], link: Sequence[Path], source: Path = SOURCE) -> list[str]:
    """The compiler's command line."""
    command = [*compiler(), *FLAGS, *(f"-I{p}" for p in include), str(source), "-o", str(to)]
    if sys.platform == "linux":
        # DT_RPATH instead of DT_RUNPATH: it holds for the libraries' own dependencies as well (`cmake --install` strips theirs)
        # and goes before LD_LIBRARY_PATH. Every library is linked although the shim calls few of them, to pin them all.
        command += ["-Xlinker", "--disable-new-dtags", "-Xlinker", "--no-as-needed"]
    command += [str(p) for p in link]
    for d in dict.fromkeys(p.parent.absolute() for p in link):
        command += ["-Xlinker", "-rpath", "-Xlinker", str(d)]
    return command


def _compile(to: Path, include: Sequence[Path], link: Sequence[Path], source: Path) -> None:
    # A preloaded sanitizer runtime is meant for the library under test, not for the compiler.
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")}
    # C: the messages are parsed.
    env |= {"LC_ALL": "C", "LANGUAGE": "C"}
    command = compile_command(to, include, link, source)
    try:
        p = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=env, timeout=_COMPILE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadBuild(f"compiling the shim took more than {_COMPILE_SECONDS} s: {shlex.join(command)}") from None
    if p.returncode:
        raise BadBuild(compile_message(p.stderr, source.name, shlex.join(command)))


@dataclass
class Moved:
    """One thing that llama.h of a build says differently from what the shim expects, and the shim's lines that need it."""

    what: str
    uses: str
    lines: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        where = ", ".join(map(str, self.lines))
        return f"{self.what}; {SOURCE.name}:{where} {self.uses if len(self.lines) == 1 else _PLURAL[self.uses]} it"


_PLURAL = {"uses": "use", "calls": "call", "needs": "need"}
_Q = "['\u2018\u2019\"`]"
_NAME = r"(\w+)"
# (regular expression on the text after "error: ", what it means, the verb). g++'s wording first, then clang's.
_WORDINGS: list[tuple[re.Pattern[str], str, str]] = [
    (re.compile(p.replace("Q", _Q).replace("NAME", _NAME)), what, verb)
    for p, what, verb in (
        (r"QNAMEQ (?:was not declared in this scope|has not been declared)", "llama.h of this build has no {0}", "uses"),
        (r"QNAMEQ does not name a type", "llama.h of this build has no type {0}", "uses"),
        (r"use of undeclared identifier QNAMEQ", "llama.h of this build has no {0}", "uses"),
        (r"unknown type name QNAMEQ", "llama.h of this build has no type {0}", "uses"),
        (r"Q(?:struct )?NAMEQ(?: \{aka .*?\})? has no member named QNAMEQ", "{0} of this build has no member {1}", "uses"),
        (r"no member named QNAMEQ in Q(?:struct )?NAMEQ", "{1} of this build has no member {0}", "uses"),
        (r"too (many|few) arguments to function Q(?:[^'\u2019]*?[ *&])?NAMEQ?\(", "{1} of this build takes {fewer} arguments", "calls"),
        (r"too (many|few) arguments to function call, expected (?:at \w+ )?(?:single argument \w+|\d+)", "{1} takes {fewer} arguments", "calls"),
        (r"no matching function for call to QNAME", "{0} of this build takes other arguments", "calls"),
        (r"QNAMEQ is deprecated", "{0} of this build is deprecated", "uses"),
        (r"((?:invalid conversion|cannot convert|no viable conversion|cannot initialize|assigning to) .*)", "a type is another one: {0}", "needs"),
        (r"NAME(?:\.h): No such file or directory", "headers of this build lack {0}.h", "needs"),
        (r"Q([\w./-]+\.h)Q file not found", "headers of this build lack {0}", "needs"),
    )
]  # fmt: skip
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
            if "{fewer}" in what:
                if len(groups) < 2:  # clang names the function in a note
                    groups.append(_declared_note(lines[i + 1 :]) or "a function of this build")
                what = what.replace("{fewer}", "fewer" if groups[0] == "many" else "more")
            text = what.format(*groups)
            entry = found.setdefault(text, Moved(text, verb))
            if here and int(m["line"]) not in entry.lines:
                entry.lines.append(int(m["line"]))
            break
        else:
            if re.search(r"\b(llama|ggml)_\w+|\bLLAMA_\w+", m["text"]):
                found.setdefault(m["text"], Moved(m["text"], "needs", [int(m["line"])]))
    return list(found.values())


def _declared_note(rest: Iterable[str]) -> str | None:
    for line in rest:
        if _ERROR_LINE.match(line):
            return None
        if m := re.search(rf"note: {_Q}(\w+){_Q} declared here", line):
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
            "Its llama.h is older or newer than what subjects/shim.cpp was written for: take a release nearer to the installed "
            "llama-cpp-python, or adapt subjects/shim.cpp."
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
    """Load a compiled shim in a child process, and see (on Linux) that it brought the libraries in `link` and no others.

    Raises:
        BadBuild: it does not load, or brings a libllama or libggml from elsewhere; the message says why.
    """
    command = [sys.executable, "-I", "-S", "-c", _LOADER, str(shim)]
    try:
        p = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=child_env(), timeout=_LOAD_SECONDS, check=False
        )
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
            f"the shim loaded {', '.join(map(str, foreign))}, which is not of this build ({', '.join(map(str, sorted(ours)))}); "
            "unset LD_LIBRARY_PATH and LD_PRELOAD, or take that directory out of them"
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
            text = f"{owner} lacks {name}, which {file} needs: the libraries are from different versions; build all of them again"
        else:
            text = (
                f"{owner} lacks {name}: headers and library are from different versions; build the library again from the sources "
                "whose llama.h is there"
            )
    elif missing:
        text = (
            f"{Path(missing[1]).name} cannot be found: the build is incomplete or was moved; build it again, or add its directory to "
            "LD_LIBRARY_PATH if it belongs to the system (CUDA, ROCm)"
        )
    elif "GLIBCXX_" in error or "CXXABI_" in error or "GLIBC_" in error:
        text = (
            "the library was built with a newer C or C++ library than the one here; build it on this machine, or preload its "
            "libstdc++ with LD_PRELOAD"
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
        text = "the library was built for another CPU (illegal instruction): build it on this machine, or with -DGGML_NATIVE=OFF"
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
