"""How libFuzzer is called, and what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Seconds and megabytes for one input. Under the sanitizers a program runs in some hundredths of a second; a Python with
# libllama and five models takes 300 MB.
TIMEOUT = 20
MEMORY_MB = 3072
MAX_LEN = 4096

_STATUS = re.compile(r"^#(\d+)\s+([A-Za-z]+)\s+(.*)$")
_COUNTER = re.compile(r"(\w+(?:/s)?): (\d+)")
_FINAL = re.compile(r"^stat::(\w+):\s+(\d+)$")
_MERGED = re.compile(r"^MERGE-OUTER: (\d+) new files with ", re.MULTILINE)
_ARTIFACTS = ("crash-", "timeout-", "oom-", "leak-")


@dataclass(frozen=True)
class Stat:
    """A line of progress. what: INITED, NEW, REDUCE, pulse, DONE, ...; edges, features: reached so far; corpus: inputs
    kept; rate: executions a second of this run; rss_mb: resident size."""

    executions: int
    what: str
    edges: int
    features: int
    corpus: int
    rate: int
    rss_mb: int


def status(line: str) -> Stat | None:
    """A line of progress, None for any other."""
    found = _STATUS.match(line)
    if found is None:
        return None
    n = {name: int(value) for name, value in _COUNTER.findall(found[3])}
    # the first line of a run, before anything was executed, has no coverage
    return Stat(
        int(found[1]),
        found[2],
        n.get("cov", 0),
        n.get("ft", 0),
        n.get("corp", 0),
        n.get("exec/s", 0),
        n.get("rss", 0),
    )


def final(line: str) -> tuple[str, int] | None:
    """One of the figures that are printed at the end: its name and value."""
    found = _FINAL.match(line)
    return (found[1], int(found[2])) if found else None


def merged(log: str) -> int | None:
    """How many inputs a merge says that it has chosen; None where it did not get so far."""
    found = _MERGED.findall(log)
    return int(found[-1]) if found else None


def fuzzing(folder: Path, artifacts: Path, *, seconds: float, seed: int) -> list[str]:
    """Arguments for a run that begins with the inputs of a folder, and adds to them."""
    return [
        f"-artifact_prefix={artifacts}/",
        f"-max_total_time={max(1, round(seconds))}",
        f"-seed={seed & 0x7FFFFFFF or 1}",
        "-print_final_stats=1",
        # its bookkeeping for every feature takes half the time of a slice, and found no more
        "-entropic=0",
        *_limits(),
        str(folder),
    ]


def merging(into: Path, folder: Path, artifacts: Path) -> list[str]:
    """Arguments for copying the fewest inputs of a folder that reach all that it reaches."""
    return ["-merge=1", f"-artifact_prefix={artifacts}/", *_limits(), str(into), str(folder)]


def _limits() -> list[str]:
    return [f"-timeout={TIMEOUT}", f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MAX_LEN}", "-detect_leaks=0"]


def artifacts_in(folder: Path) -> list[Path]:
    """Inputs that ended a run, oldest first."""
    found = [p for p in folder.iterdir() if p.name.startswith(_ARTIFACTS)] if folder.is_dir() else []
    return sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name))
