"""What a campaign keeps on disk so that a kill at any moment loses nothing.

out/campaign.json   what was asked (a resumed campaign must ask the same)
out/findings/       finished findings, a folder each, written atomically
out/state/job-N.json       where job N is: slices done, counters, avoidances
out/state/pending-N.json   a violation of job N that is being confirmed and reduced
out/state/inflight-N.bin   the program that job N is judging right now (memory mapped: survives a kill without a sync)

and with the coverage-guided engine

out/corpus/TARGET/         inputs that reach something that the others do not
out/crashes/               inputs whose crash showed nowhere else, as programs too, and what was said, one of each kind
out/state/crash-N/TARGET/  inputs that ended a target, until they have been looked at
out/state/tmp-N/           temporary files of job N's targets
out/state/report-N.jsonl   what a target's own checks complain of
out/state/tried-N.bin      how many inputs its target did something with
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from fuzz import programs
from fuzz.programs import AnyProgram
from subjects.scenario import BadScenario

_IN_FLIGHT_BYTES = 1 << 18


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step. Raises OSError, which names the file."""
    tmp = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, tmp = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        with os.fdopen(fd, "wb") as f:
            f.write(data)
        Path(tmp).chmod(0o644)
        Path(tmp).replace(path)
    except OSError as e:
        if tmp:
            Path(tmp).unlink(missing_ok=True)
        raise OSError(e.errno, e.strerror or str(e), str(path)) from None  # a full disk says no name


def sweep(state: Path) -> None:
    """Remove what a killed campaign left half-written; no job of it may be running."""
    for pattern in (".new-*", "report-*.jsonl", "tried-*.bin"):
        for left in state.glob(pattern):
            left.unlink(missing_ok=True)
    for folder in state.glob("tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


# Points of a curve of coverage; when there are more, every second one goes.
CURVE = 400


class TargetProgress(msgspec.Struct):
    """What one target of the coverage-guided engine did in a job.

    tried: executions that did something; the others stood for no program, or a known fault was in the way. seconds:
    that it ran. first: edges that the corpus reached at the start, None before it was read. edges, features,
    corpus: reached and kept by now, by all jobs together as far as this one has seen. curve: (seconds of the campaign,
    edges), where edges grew.
    """

    executions: int = 0
    tried: int = 0
    seconds: float = 0.0
    first: int | None = None
    edges: int = 0
    features: int = 0
    corpus: int = 0
    crashes: int = 0
    curve: list[tuple[float, int]] = []

    def reached(self, seconds: float, edges: int) -> None:
        """Note the edges reached at a time."""
        if self.first is None:
            self.first = edges
        if edges > self.edges:
            self.edges = edges
            self.curve.append((round(seconds, 1), edges))
            if len(self.curve) > CURVE:
                self.curve = [*self.curve[:-1:2], self.curve[-1]]


class Progress(msgspec.Struct):
    """Where a job is: `slices` done and programs of the next one (`in_slice`).

    symptoms: triaged violations by oracle, key and memory. avoiding: known faults met so far. tired: known faults that
    were triaged often enough, where none are avoided. rate: executions a second right now. crashes: ends of targets, by
    what identifies them; examined: how many of these were looked at (until a known fault is stepped round); inputs:
    that were tried as programs; lost: of these, those that showed nowhere else. undefined: places of undefined
    behaviour that a sanitizer told of while the target went on. gave_up: no target runs. requests: answers of
    llama-server that were held against a cold server's. deeds: what it did for them (`subjects.server.trace.Deed`).
    unsaved: something of this could not be written.
    """

    slices: int = 0
    in_slice: int = 0
    scenarios: int = 0
    unjudged: int = 0
    violating: int = 0
    unreproduced: int = 0
    unwritten: int = 0
    seconds: float = 0.0
    symptoms: dict[str, int] = {}
    avoiding: list[str] = []
    tired: list[str] = []
    coverage: dict[str, int] = {}
    unknown: dict[str, int] = {}
    max_rss_kb: int = 0
    executions: int = 0
    rate: int = 0
    targets: dict[str, TargetProgress] = {}
    crashes: dict[str, int] = {}
    examined: dict[str, int] = {}
    inputs: int = 0
    lost: int = 0
    undefined: dict[str, int] = {}
    gave_up: bool = False
    requests: int = 0
    deeds: dict[str, int] = {}
    unsaved: bool = False


class Journal:
    """The files of one job."""

    def __init__(self, out: Path, job: int):
        self.state = out / "state"
        self.state.mkdir(parents=True, exist_ok=True)
        self._job = self.state / f"job-{job}.json"
        self._pending = self.state / f"pending-{job}.json"
        self._in_flight = self.state / f"inflight-{job}.bin"
        self.left_over = self._left_over()
        self._fd = os.open(self._in_flight, os.O_RDWR | os.O_CREAT, 0o644)
        _reserve(self._fd, _IN_FLIGHT_BYTES, self._in_flight)
        self._map = mmap.mmap(self._fd, _IN_FLIGHT_BYTES)

    def _left_over(self) -> list[AnyProgram]:
        """Programs that an earlier process was at when it was killed: a pending violation, and what was in flight."""
        found = []
        if self._pending.exists():
            with contextlib.suppress(BadScenario):
                found.append(programs.loads(self._pending.read_bytes()))
        if self._in_flight.exists():
            data = self._in_flight.read_bytes()
            size = struct.unpack_from("<I", data)[0] if len(data) > 4 else 0
            if size:
                with contextlib.suppress(BadScenario):
                    found.append(programs.loads(data[4 : 4 + size]))
        return found

    def progress(self) -> Progress:
        """Where the job was, from the start if it never was."""
        try:
            return msgspec.json.decode(self._job.read_bytes(), type=Progress)
        except (FileNotFoundError, msgspec.DecodeError):
            return Progress()

    def save(self, progress: Progress) -> None:
        """Keep where the job is."""
        write_atomically(self._job, msgspec.json.encode(progress))

    def in_flight(self, program: AnyProgram) -> None:
        """Note the program that is about to run; one that is too large leaves no note, and never that of another."""
        data = programs.packed(program)
        self._map[0:4] = b"\0\0\0\0"
        if len(data) + 4 <= _IN_FLIGHT_BYTES:
            self._map[4 : 4 + len(data)] = data
            self._map[0:4] = struct.pack("<I", len(data))

    def pending(self, program: AnyProgram) -> None:
        """Note a violation that is being worked on."""
        write_atomically(self._pending, programs.dumps(program).encode())

    def trouble(self, program: AnyProgram) -> str:
        """Keep a program that could not be made a finding, for us to look at; returns its file's name."""
        path = self.state / f"trouble-{program.key()}.json"
        write_atomically(path, programs.dumps(program).encode())
        return path.name

    def settled(self) -> None:
        """The pending violation is a finding now, or nothing."""
        self._pending.unlink(missing_ok=True)

    def close(self) -> None:
        """End well: nothing is in flight."""
        self._map[0:4] = b"\0\0\0\0"
        self._map.close()
        os.close(self._fd)


def _reserve(fd: int, size: int, path: Path) -> None:
    """Make a file so large that all of it can be mapped and written: one with holes ends the process on a full disk.

    Raises OSError.
    """
    os.ftruncate(fd, size)
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # not Linux
        return
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems that cannot
            raise OSError(e.errno, e.strerror, str(path)) from None


def read_json(path: Path) -> Any:
    """A small JSON file, None when it is not there."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
