"""What every job of a campaign is, whatever it tests: a loop that makes up programs, has them judged, follows up what
is wrong, keeps where it is, and tells its parent in events (a JSON line each).

What is generated depends on seed, number of the job and number of jobs only, and (with `avoid` auto) on which known
faults this job has met.
"""

from __future__ import annotations

import hashlib
import resource
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from fuzz import programs
from fuzz.journal import Journal, Progress
from fuzz.known import KnownFault, load_all
from fuzz.models import Model
from fuzz.programs import AnyProgram, Subject

# Violations of one symptom that are triaged: the first may be one fault and the next another, but not for ever.
TRIAGES = 4
PROGRESS_EVERY = 0.5
P = TypeVar("P", bound=AnyProgram)


class Coverage(msgspec.Struct, kw_only=True, frozen=True):
    """What the coverage-guided engine runs on. build: an instrumented build directory, with its fingerprint; shim and
    driver: our libraries compiled against it (driver empty for none). variables: what a process that loads it needs in
    its environment. environment: what findings say that were seen on it alone. alone: it is of other sources than the
    installed library, so it is the one that is tested, and everything is judged on it."""

    targets: list[str]
    build: str
    fingerprint: str
    shim: str
    driver: str = ""
    variables: dict[str, str]
    environment: dict[str, str | int | list[str]] = {}
    alone: bool = False


class ServerPart(msgspec.Struct, kw_only=True, frozen=True):
    """What a job that tests llama-server is told beside. path: the executable, with its fingerprint, name and version.
    flags: names of the flag sets that programs are made with, empty for all. requests: answers to check."""

    path: str
    fingerprint: str
    name: str
    version: str = ""
    flags: list[str] = []
    requests: int | None = None


class JobConfig(msgspec.Struct, kw_only=True):
    """What one job is told. driver: the compiled driver library. variants: compare every program with its variants, not
    one in eight. coverage: for the coverage-guided engine, the instrumented build and which targets run on it. server:
    for llama-server, which one."""

    models: list[Model]
    shim: str
    build: str
    cache: str
    out: str
    seed: int
    job: int
    jobs: int
    seconds: float | None = None
    scenarios: int | None = None
    avoid: Literal["auto", "always", "never"] = "auto"
    misuse: bool = False
    reduce_seconds: float = 30.0
    fault: str = ""
    driver: str = ""
    variants: bool = False
    environment: dict[str, str | int | list[str]] = {}
    coverage: Coverage | None = None
    server: ServerPart | None = None


def slice_seed(seed: int, job: int, jobs: int, number: int) -> int:
    """Seed of one slice of generated programs."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{job}/{jobs}/{number}".encode()).digest()[:6], "big")


class Loop(ABC, Generic[P]):
    """See the module. A job says what it tests (`subject`), and which exceptions end it (`fatal`): anything else that
    goes wrong costs a program."""

    subject: ClassVar[Subject]
    fatal: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, config: JobConfig):
        self.config = config
        self.journal = Journal(Path(config.out), config.job)
        self.progress: Progress = self.journal.progress()
        self.known: list[KnownFault] = [k for k in load_all() if k.subject == self.subject]
        self.began = time.monotonic()
        self.before = self.progress.seconds
        self.stopped = False
        self.progress.unsaved = False
        self._told = 0.0
        self._not_written: set[str] = set()
        if config.avoid == "always":
            self.progress.avoiding = sorted({k.avoidance for k in self.known})
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides

    def _stop(self, *_: object) -> None:
        self.stopped = True

    # --- what a job does its own way ----------------------------------------------------------------------------------

    @abstractmethod
    def _slice(self) -> None:
        """Do some of the work, until it is over or a slice is done."""

    @abstractmethod
    def _take_up(self, program: P) -> None:
        """Judge a program that a killed predecessor left, where it is one of this job's."""

    @abstractmethod
    def _close(self) -> None:
        """End the processes that it has started."""

    @abstractmethod
    def _peak_kb(self) -> int:
        """The most memory that one of these took so far."""

    def _finish(self) -> None:
        """What is to be done when the time is over, and nobody has told to stop."""

    # --- the loop -----------------------------------------------------------------------------------------------------

    def over(self) -> bool:
        """Whether to stop now: told to, out of time, or all programs done."""
        c = self.config
        self.progress.seconds = self.before + time.monotonic() - self.began
        return (
            self.stopped
            or (c.seconds is not None and self.progress.seconds >= c.seconds)
            or (c.scenarios is not None and self.progress.scenarios >= c.scenarios)
        )

    def run(self) -> None:
        """Run until it is over; what was left by a killed predecessor comes first."""
        whole = False
        try:
            for left in self.journal.left_over:
                if programs.subject_of(left) == self.subject and not self.stopped:
                    self._take_up(left)  # type: ignore[arg-type]  # the subject says so
            if not self.stopped:
                self.journal.settled()  # what is not a violation any more would be tried at every --resume
            while not self.over():
                self._slice()
            if not self.stopped:
                self._finish()
            whole = True
        finally:
            self._save()
            self.journal.close()
            self._close()
            self._tell_progress(force=True)
            if whole:  # a job that was thrown out of its loop must not look like one that ended
                emit("done", job=self.config.job)

    def _model_at(self, number: int) -> Model:
        """The model of a slice: jobs begin with different ones, so that a short campaign sees all kinds of memory
        early."""
        c = self.config
        return c.models[(number + c.job * len(c.models) // c.jobs) % len(c.models)]

    def _guarded(self, program: P, judging: Callable[[], None]) -> None:
        """Judge a program: it is counted and noted, and a fault of ours costs it alone."""
        self.journal.in_flight(program)
        self.progress.scenarios += 1
        try:
            judging()
        except self.fatal:
            raise
        except Exception:
            self.progress.unjudged += 1
            self._trouble(program, "could not be judged")
        self._tell_progress()

    # --- what is wrong ------------------------------------------------------------------------------------------------

    def _pursue(
        self, program: P, symptom: str, shown_as: str, sets_off: Callable[[str], bool], triage: Callable[[], bool]
    ) -> None:
        """Triage a violation unless its symptom was triaged often enough. sets_off: whether the program sets off a
        known fault, by its avoidance. triage: whether it reproduced."""
        p = self.progress
        if p.symptoms.get(symptom, 0) >= TRIAGES:
            return
        if any(sets_off(name) for name in p.tired):
            return  # most likely one of those that were triaged often enough
        p.symptoms[symptom] = p.symptoms.get(symptom, 0) + 1
        try:
            self.journal.pending(program)
        except OSError as e:
            self._cannot_write(e)
        emit("reducing", job=self.config.job, symptom=shown_as)
        try:
            p.unreproduced += not triage()
        except self.fatal:
            raise
        except Exception:
            self._trouble(program, "could not be made a finding")
        self.journal.settled()
        self._save()

    def _met(self, known: KnownFault | None, symptom: str) -> None:
        """What a finding changes: a known fault is stepped round from now on, or uses up its own triages."""
        p = self.progress
        if known is None:
            return
        if self.config.avoid != "never":
            if known.avoidance not in p.avoiding:
                p.avoiding = sorted({*p.avoiding, known.avoidance})
                p.symptoms.pop(symptom, None)  # what shows the same symptom from now on is something else
            return
        # each known fault uses up its own triages, or a frequent one would hide the others behind its symptom
        p.symptoms[symptom] -= 1
        own = f"{symptom}|{known.name}"
        p.symptoms[own] = p.symptoms.get(own, 0) + 1
        if p.symptoms[own] == TRIAGES:
            p.tired = sorted({*p.tired, known.avoidance})

    @property
    def folder(self) -> Path:
        """Where findings go."""
        return Path(self.config.out) / "findings"

    def _written(self, slug: str, write: Callable[[], Path]) -> Path | None:
        """A finding's folder, once it is written; None where another job was faster, or it cannot be."""
        try:
            return write()
        except FileExistsError:
            return None
        except OSError as e:
            if not (self.folder / slug).exists():
                self.progress.unwritten += 1
                emit("trouble", job=self.config.job, text=f"cannot write {self.folder / slug}: {e}")
            return None

    def _trouble(self, program: P, what: str) -> None:
        """A fault of ours costs one program or report, not the campaign; the program is kept."""
        told = traceback.format_exc()
        try:
            kept = self.journal.trouble(program)
        except OSError as e:
            self._cannot_write(e)
            kept = "a program"
        emit("trouble", job=self.config.job, text=f"{kept} {what}:\n{told}")

    def _save(self) -> None:
        """Keep where the job is."""
        try:
            self.journal.save(self.progress)
        except OSError as e:
            self._cannot_write(e)

    def _cannot_write(self, e: OSError) -> None:
        """What cannot be written, a full disk for one, is told of once a file and costs no more than that file."""
        self.progress.unsaved = True
        text = f"cannot write {e.filename}: {e.strerror}"
        if text not in self._not_written:
            self._not_written.add(text)
            emit("trouble", job=self.config.job, text=text)

    def _tell_progress(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._told >= PROGRESS_EVERY:
            self._told = now
            self.progress.seconds = self.before + now - self.began
            self.progress.max_rss_kb = max(self.progress.max_rss_kb, self._peak_kb())
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            emit("progress", job=self.config.job, own_rss_kb=own, progress=msgspec.to_builtins(self.progress))


def made_for(program: AnyProgram, model: Model) -> bool:
    """Whether a program is one of those that are generated for a model."""
    if program.model != model.ref or (program.driver is None) != (model.driver is None):
        return False
    a, b = program.driver, model.driver
    return a is None or b is None or (a.kind, a.draft, a.impl) == (b.kind, b.draft, b.impl)


def emit(event: str, **fields: Any) -> None:
    """Tell the parent."""
    sys.stdout.buffer.write(msgspec.json.encode({"event": event, **fields}) + b"\n")
    sys.stdout.buffer.flush()


def events(data: bytes) -> Iterator[dict[str, Any]]:
    """Parse complete event lines; a job is our own process, but a line that is none is skipped all the same."""
    for line in data.splitlines():
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            continue
