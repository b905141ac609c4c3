"""Where the sources of a build's common/ are: its headers, which the speculative drivers are reached through, are
installed by no build.

A llama-cpp-python has them in its source distribution, which pip fetches once; a source tree has its own; anything else
needs a checkout that matches it (--llama-src). `python -m subjects.sources` fetches those of the installed one.

An instrumented build (`subjects.instrument`) and llama-server (`subjects.server.build`) take all of llama.cpp from the
same distribution.
"""

from __future__ import annotations

import difflib
import fcntl
import gzip
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from subjects.shimcache import BadBuild, cache_dir, run_quietly

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Part:
    """What is kept of llama.cpp's tree, and how its absence is told."""

    wanted: re.Pattern[str]
    """matches whole names below llama.cpp's folder"""
    markers: tuple[str, ...]
    """files without which it is not what is needed"""
    suffix: str = ""
    """of the folder's name in the cache"""
    most_bytes: int = _MOST_BYTES
    user: str = "the speculative drivers need"
    option: str = "--llama-src"
    """with which a checkout is named in its place"""


DRIVERS = Part(
    re.compile(r"common/.*|include/[^/]*|ggml/include/[^/]*|src/[^/]*\.h|vendor/.*\.(?:h|hpp)|LICENSE"),
    ("common/speculative.h",),
)
"""What the driver library is compiled with."""
_BUILT = "cmake|common|ggml|include|licenses|src|vendor"
_MARKERS = ("CMakeLists.txt", "ggml/CMakeLists.txt", "src/CMakeLists.txt", "include/llama.h", "common/speculative.h")
WHOLE = Part(
    re.compile(rf"CMakeLists\.txt|(?:{_BUILT}|tests)/.*|tools/(?!ui/).*|LICENSE"),
    _MARKERS,
    "-whole",
    4 * _MOST_BYTES,
    "an instrumented build needs",
    "--src",
)
"""What llama.cpp and its tests are built from; not its models, documents and converters, which are most of it."""
SERVER = Part(
    # Of the page for a browser, which is not built in, only what says so to cmake.
    re.compile(
        rf"CMakeLists\.txt|(?:{_BUILT})/.*|tools/(?!ui/|server/tests/).*|tools/ui/[^/]*\.(?:txt|cmake|in|cpp|h)"
        r"|scripts/[^/]*\.cmake|LICENSE"
    ),
    (*_MARKERS, "tools/server/CMakeLists.txt"),
    "-server",
    4 * _MOST_BYTES,
    "llama-server is built from",
    "--src",
)
"""What llama-server is built from."""

_PIP_SECONDS = 1800
_DIFFERENCES = 6
_DAMAGE = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    UnicodeDecodeError,
    # a name that is a file and a folder, or comes twice
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)


class NoDrivers(BadBuild):
    """The drivers of a build cannot be reached; everything that needs none still runs. The message says what to do."""


def say(text: str) -> None:
    """Announce something slow."""
    print(f"redraft: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Of a llama-cpp-python: from its source distribution


def release_of(libllama: Path) -> str | None:
    """The version of the llama-cpp-python that a library belongs to, None where it belongs to none."""
    if libllama.parent.parts[-2:] != ("llama_cpp", "lib"):
        return None
    site = str(libllama.parents[2])
    found = next(iter(importlib.metadata.distributions(name="llama-cpp-python", path=[site])), None)
    return found.version if found else None


def fetched(version: str, fetch: Callable[[str, Path], Path] | None = None, part: Part = DRIVERS) -> Path:
    """The llama.cpp of a release of llama-cpp-python: a part of it, from the cache or fetched now.

    `fetch` puts the archive of a version into a folder. Any number of processes may ask at once.

    Raises:
        NoDrivers: it cannot be fetched, is no such archive, or the cache cannot be written.
    """
    folder = cache_dir() / "sources"
    done = folder / f"llama-cpp-python-{version}{part.suffix}"
    if missing_of(done, part) is None:
        return done
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as tmp:
            if missing_of(done, part) is None:
                return done
            archive = fetch(version, Path(tmp)) if fetch else _download(version, Path(tmp), part)
            extract(archive, Path(tmp) / "tree", part)
            shutil.rmtree(done, ignore_errors=True)
            # Atomic: what is there is whole.
            os.replace(Path(tmp) / "tree", done)
    except OSError as e:
        raise NoDrivers(f"the cache {folder} cannot be used: {e}; set REDRAFT_CACHE to a writable directory") from e
    return done


def missing_of(tree: Path, part: Part) -> str | None:
    """The first file that a tree lacks to be this part of llama.cpp; None where it lacks nothing."""
    return next((name for name in part.markers if not (tree / name).is_file()), None)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    # The file stays: removing it would let two in.
    with (folder / ".lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for left in folder.glob(".tmp-*"):  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def _download(version: str, folder: Path, part: Part) -> Path:
    say(f"fetching the sources of llama-cpp-python {version} through pip (about 75 MB, once)")
    wanted = folder / "wanted.txt"
    hashes = _locked(version)
    wanted.write_text(f"llama-cpp-python=={version} {' '.join(hashes)}\n", "ascii")
    pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # Without isolation, where the build tools are installed: only asking for a version's name then fetches none.
    built_with = ["--no-build-isolation"] if _has("scikit-build-core") else []
    command = [*pip, "download", "--no-deps", "--no-binary", ":all:", *built_with, "-d", str(folder), "-r", str(wanted)]
    try:
        p = run_quietly(command, os.environ, _PIP_SECONDS)
    except subprocess.TimeoutExpired:
        raise NoDrivers(_unfetched(version, part, [f"no end after {_PIP_SECONDS} s"])) from None
    archives = sorted(folder.glob("*.tar.gz"))
    if p.returncode or not archives:
        lines = [x for x in p.stderr.splitlines() if x.strip()]
        errors = [x for x in lines if x.startswith("ERROR")]
        raise NoDrivers(_unfetched(version, part, (errors or lines)[-4:]))
    return archives[0]


def _has(distribution: str) -> bool:
    return next(iter(importlib.metadata.distributions(name=distribution)), None) is not None


def _locked(version: str) -> list[str]:
    """The options for pip that name the hashes in the checkout's lock file, for the version that is locked."""
    try:
        lock = Path(__file__).resolve().parents[1].joinpath("requirements.lock").read_text("utf-8")
    except OSError:
        return []
    entry = re.search(rf"^llama-cpp-python=={re.escape(version)} ((?:.*\\\n)*.*)$", lock, re.M)
    return re.findall(r"--hash=sha256:[0-9a-f]{64}", entry[1]) if entry else []


def _unfetched(version: str, part: Part, said: list[str]) -> str:
    return "\n".join(
        [
            f"the sources of llama-cpp-python {version}, which {part.user}, cannot be fetched: try again with a "
            f"network (once is enough), or name a llama.cpp checkout of that release with {part.option}",
            "pip said:",
            *(f"  {x}" for x in said or ["nothing"]),
        ]
    )


def extract(archive: Path, to: Path, part: Part = DRIVERS) -> None:
    """Write a part of the llama.cpp in a source distribution of llama-cpp-python into the folder `to`.

    Raises:
        NoDrivers: it is no such archive, holds names that lead out of it, or far too much; `to` may then hold a part.
        OSError: the folder cannot be written.
    """
    room = part.most_bytes
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                if ".." in parts or member.name.startswith("/") or "\\" in member.name or "\0" in member.name:
                    raise NoDrivers(f"{archive.name} holds a name that leads out of it: {member.name!r}")
                name = "/".join(parts[3:])
                if parts[1:3] != ("vendor", "llama.cpp") or not part.wanted.fullmatch(name) or not member.isreg():
                    continue
                room -= member.size
                content = tar.extractfile(member)
                if room < 0 or content is None:
                    raise NoDrivers(
                        f"{archive.name} holds more than {part.most_bytes >> 20} MiB of headers and sources"
                    )
                path = to / name
                path.parent.mkdir(parents=True, exist_ok=True)
                # x: a name that comes twice, or is a folder elsewhere, is no honest archive
                with path.open("xb") as f:
                    shutil.copyfileobj(content, f)
    except _DAMAGE as e:
        raise NoDrivers(f"{archive.name} is damaged: {e}") from None
    if missing := missing_of(to, part):
        raise NoDrivers(
            f"{archive.name} has no vendor/llama.cpp/{missing}: its llama.cpp is too old or too new for this redraft"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Of a checkout


def check_match(root: Path, include: tuple[Path, ...], build: str) -> None:
    """See that the sources in `root` are of the release that the headers in `include` are of.

    Comments and spaces do not count.

    Raises:
        NoDrivers: they are not, or are no sources; the message says what differs.
    """
    if missing := missing_of(root, DRIVERS):
        raise NoDrivers(f"{root} is no llama.cpp checkout: it has no {missing}")
    theirs = {p.name: p for d in include for p in (*d.glob("llama*.h"), *d.glob("gg*.h"))}
    for own in (*sorted((root / "include").glob("*.h")), *sorted((root / "ggml/include").glob("*.h"))):
        if own.name not in theirs:
            continue
        lines = difflib.unified_diff(_code(theirs[own.name]), _code(own), lineterm="", n=0)
        differing = [x for x in lines if not x.startswith(("---", "+++", "@@"))]
        if differing:
            shown = [f"  {x}" for x in differing[:_DIFFERENCES]]
            if len(differing) > _DIFFERENCES:
                shown.append(f"  ... {len(differing) - _DIFFERENCES} more")
            advice = (
                "take a checkout of the release that the build is of, or build this checkout and name it with --build. "
                "Lines of the build (-) and of the checkout (+):"
            )
            what = f"{root} does not match the build ({build}): {own.name} differs; {advice}"
            raise NoDrivers("\n".join([what, *shown]))


def _code(header: Path) -> list[str]:
    text = header.read_text("utf-8", "replace")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    return [x for line in text.splitlines() if (x := " ".join(line.split()))]


# ---------------------------------------------------------------------------------------------------------------------
# Patches


_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def patched(text: str, patch: str) -> str:
    """`text` with a unified diff of one file applied. All its lines must be found, where it says so or elsewhere.

    Raises:
        NoDrivers: it does not fit, or is no such diff.
    """
    lines, out, at = text.splitlines(keepends=True), list[str](), 0
    diff = iter(patch.splitlines(keepends=True))
    hunks = files = 0
    for line in diff:
        files += line.startswith("+++ ")
        m = _HUNK.match(line)
        if not m:
            continue
        hunks += 1
        old, new = list[str](), list[str]()
        n_old, n_new = int(m[2] or 1), int(m[3] or 1)
        while len(old) < n_old or len(new) < n_new:
            body = next(diff, "")
            # editors take the space from an empty line
            mark, rest = (" ", body) if body == "\n" else (body[:1], body[1:])
            if mark not in (" ", "-", "+", "\\"):
                raise NoDrivers(f"the patch is damaged: its part for line {m[1]} ends too soon")
            old += [rest] if mark in " -" else []
            new += [rest] if mark in " +" else []
        places = [i for i in range(at, len(lines) - n_old + 1) if lines[i : i + n_old] == old]
        if not places:
            raise NoDrivers(f"the patch does not fit: its part for line {m[1]} finds other lines there")
        place = min(places, key=lambda i: abs(i + 1 - int(m[1])))
        out += lines[at:place] + new
        at = place + n_old
    if hunks == 0 or files > 1:
        raise NoDrivers("the patch is no unified diff of one file")
    return "".join(out + lines[at:])


def main() -> int:
    """Fetch the sources of the installed llama-cpp-python where they are not in the cache; 2 when that fails."""
    from subjects.builds import driver_sources, find_build

    try:
        driver_sources(find_build())
    except BadBuild as e:
        print(f"subjects.sources: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
