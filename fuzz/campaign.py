"""The campaign: starts jobs, listens to their events, shows progress, ends them, and says what was found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from fuzz import finding as findings
from fuzz.engine import corpus
from fuzz.found import summary
from fuzz.journal import Progress, TargetProgress, read_json, sweep, write_atomically
from fuzz.loop import Coverage, JobConfig, ServerPart, events
from fuzz.models import Model
from fuzz.programs import Subject
from fuzz.server.finding import load_any
from fuzz.targets import script

FailOn = Literal["new", "any", "never"]
# How long a job may take to put away what it is at when it is told to stop.
GRACE = 20.0


class CampaignError(RuntimeError):
    """The campaign cannot be started; the message says what to do."""


class Plan(msgspec.Struct, kw_only=True):
    """What was asked; a resumed campaign must ask the same, apart from how long. driver: the driver library's name,
    drivers: the options that it was named with. engine: what makes up programs: Hypothesis blindly, or libFuzzer by
    coverage, with these targets on this instrumented build (its fingerprint). subject: what is tested; of llama-server,
    flags are the names of the flag sets that programs are made with, empty for all, and server_bin or server_src says
    which one it is, where it is not the usual one: absolute paths, which a resumed campaign may name anew."""

    models: list[Model]
    build: str
    seed: int
    jobs: int
    avoid: Literal["auto", "always", "never"]
    misuse: bool = False
    fault: str = ""
    driver: str = ""
    drivers: list[str] = []
    variants: bool = False
    engine: Literal["hypothesis", "coverage"] = "hypothesis"
    targets: list[str] = []
    coverage_build: str = ""
    subject: Subject = "library"
    flags: list[str] = []
    server_bin: str = ""
    server_src: str = ""


@dataclass(frozen=True)
class Tested:
    """Where the jobs find what a plan names. environment: what findings say of it. coverage: what the coverage-guided
    engine runs on; server: llama-server, where that is tested (it needs no shim)."""

    cache: Path
    environment: dict[str, str | int | list[str]]
    shim: Path | None = None
    driver: Path | None = None
    coverage: Coverage | None = None
    server: ServerPart | None = None


@dataclass
class Status:
    """What is known of a running campaign."""

    out: Path
    minutes: float | None
    scenarios: int | None
    began: float = field(default_factory=time.monotonic)
    jobs: dict[int, Progress] = field(default_factory=dict)
    own_rss_kb: dict[int, int] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    doing: dict[int, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    instrumented: str = ""
    """the build that targets run on"""
    subject: Subject = "library"
    requests: int | None = None
    """answers of llama-server to check"""

    def total(self, name: str) -> int:
        """Sum of a counter over the jobs."""
        return sum(int(getattr(p, name)) for p in self.jobs.values())

    def targets(self) -> dict[str, TargetProgress]:
        """What the targets of the coverage-guided engine did, over all jobs; empty without it."""
        out: dict[str, TargetProgress] = {}
        for name in dict.fromkeys(n for p in self.jobs.values() for n in p.targets):
            out[name] = together([p.targets[name] for p in self.jobs.values() if name in p.targets])
        return out

    def coverage(self) -> dict[str, int]:
        """Operations (requests) by memory kind, over all jobs."""
        out: dict[str, int] = {}
        for p in self.jobs.values():
            for k, n in p.coverage.items():
                out[k] = out.get(k, 0) + n
        return out

    def deeds(self) -> dict[str, int]:
        """What llama-server did, by how often, over all jobs."""
        return _sum(p.deeds for p in self.jobs.values())

    @property
    def seconds(self) -> float:
        """Fuzzing time, earlier parts of a resumed campaign included."""
        return max((p.seconds for p in self.jobs.values()), default=0.0)

    @property
    def per_second(self) -> float:
        """Programs a second over the whole campaign."""
        return self.total("scenarios") / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        """Checked answers a second over the whole campaign."""
        return self.total("requests") / self.seconds if self.seconds else 0.0

    @property
    def past(self) -> float:
        """Seconds that it took past the end, to bring to its end what was begun before."""
        return max(self.seconds - self.minutes * 60, 0.0) if self.minutes is not None else 0.0

    @property
    def left(self) -> float | None:
        """Seconds left, by time, programs or requests, whichever ends it first; None before the first estimate."""
        parts = []
        if self.minutes is not None:
            parts.append(self.minutes * 60 - self.seconds)
        if self.scenarios is not None and self.per_second:
            parts.append((self.scenarios - self.total("scenarios")) / self.per_second)
        if self.requests is not None and self.requests_per_second:
            parts.append((self.requests - self.total("requests")) / self.requests_per_second)
        return max(min(parts), 0.0) if parts else None


def together(parts: list[TargetProgress]) -> TargetProgress:
    """One target's progress in several jobs, which share its corpus: what one reached, all have."""
    firsts = [t.first for t in parts if t.first is not None]
    out = TargetProgress(
        executions=sum(t.executions for t in parts),
        tried=sum(t.tried for t in parts),
        seconds=sum(t.seconds for t in parts),
        first=min(firsts, default=None),
        features=max((t.features for t in parts), default=0),
        corpus=max((t.corpus for t in parts), default=0),
        crashes=sum(t.crashes for t in parts),
    )
    for seconds, edges in sorted(point for t in parts for point in t.curve):
        if edges > out.edges:
            out.edges = edges
            out.curve.append((seconds, edges))
    return out


@dataclass
class Result:
    """How a campaign ended."""

    status: Status
    interrupted: bool
    died: list[int]

    @property
    def new(self) -> list[dict[str, Any]]:
        """Findings that are no known fault."""
        return [f for f in self.status.findings if f["known"] is None]

    @property
    def gave_up(self) -> list[int]:
        """Jobs for which no target runs."""
        return [j for j, p in self.status.jobs.items() if p.gave_up]

    @property
    def unsaved(self) -> list[int]:
        """Jobs that could not write where they are."""
        return [j for j, p in self.status.jobs.items() if p.unsaved]

    def exit_code(self, fail_on: FailOn) -> int:
        """0 nothing new, 1 new findings, 2 jobs died, gave up or could not write, 3 nothing judged, 130 interrupted."""
        if self.interrupted:
            return 130
        s = self.status
        if s.total("unwritten"):
            return 2
        # an input that ended a target was tried too
        tried = any(t.tried or t.crashes for t in s.targets().values())
        judged = tried or s.total("scenarios") > s.total("unjudged")
        if s.subject == "server":
            # one that dies of every first request was judged by that
            judged = s.total("requests") > 0 or bool(s.findings)
        trouble = self.died or self.gave_up or self.unsaved
        if not judged:
            return 2 if trouble else 3
        if (fail_on == "new" and self.new) or (fail_on == "any" and s.findings):
            return 1
        return 2 if trouble else 0

    def document(self) -> dict[str, Any]:
        """The one document of --json."""
        s = self.status
        return {
            "scenarios": s.total("scenarios"),
            "per_second": round(s.per_second, 2),
            "seconds": round(s.seconds, 2),
            "unknown": s.total("unjudged"),
            "unwritten": s.total("unwritten"),
            "unreproduced": s.total("unreproduced"),
            "interrupted": self.interrupted,
            "died": self.died,
            "unsaved": self.unsaved,
            "troubles": s.troubles,
            "reasons": _sum(p.unknown for p in s.jobs.values()),
            "coverage": s.coverage(),
            "memory_kb": {
                "children": max((p.max_rss_kb for p in s.jobs.values()), default=0),
                "jobs": max(s.own_rss_kb.values(), default=0),
            },
            "findings": s.findings,
            **(self._engine() if s.targets() else {}),
            **(self._served() if s.subject == "server" else {}),
        }

    def _served(self) -> dict[str, Any]:
        """What llama-server was asked, and did."""
        s = self.status
        return {
            "requests": s.total("requests"),
            "requests_per_second": round(s.requests_per_second, 2),
            "deeds": s.deeds(),
        }

    def _engine(self) -> dict[str, Any]:
        """What the coverage-guided engine did."""
        s = self.status
        return {
            "executions": s.total("executions"),
            "gave_up": self.gave_up,
            "inputs": s.total("inputs"),
            "tried": sum(t.tried for t in s.targets().values()),
            "targets": {
                name: {
                    "executions": t.executions,
                    "tried": t.tried,
                    "per_second": round(t.executions / t.seconds, 1) if t.seconds else 0.0,
                    "edges": [t.first or 0, t.edges],
                    "features": t.features,
                    "corpus": t.corpus,
                    "crashes": t.crashes,
                    "coverage": t.curve,
                }
                for name, t in s.targets().items()
            },
            "crashes": _sum(p.crashes for p in s.jobs.values()),
            "lost": s.total("lost"),
            "undefined": _sum(p.undefined for p in s.jobs.values()),
        }


def _sum(parts: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for part in parts:
        for k, n in part.items():
            out[k] = out.get(k, 0) + n
    return dict(sorted(out.items(), key=lambda kv: -kv[1]))


def stored(out: Path) -> dict[str, Any]:
    """What the campaign in a folder was asked. Raises CampaignError."""
    file = out / "campaign.json"
    try:
        before = read_json(file)
    except (msgspec.DecodeError, OSError) as e:
        raise CampaignError(f"{file} is damaged: {e}") from None
    if before is None:
        raise CampaignError(f"there is no campaign in {out} to resume; leave --resume out, or give its --out")
    if not isinstance(before, dict):
        raise CampaignError(f"{file} is damaged: it is no object")
    return before


@contextlib.contextmanager
def prepare(out: Path, plan: Plan, *, resume: bool) -> Iterator[None]:
    """Make the output folder, or check that it belongs to the same campaign; within, the folder is ours alone.

    Raises CampaignError.
    """
    file = out / "campaign.json"
    asked = msgspec.json.decode(msgspec.json.encode(plan))
    if resume:
        before = stored(out)
        # the build says whether these are the same
        changed = [k for k in asked if k not in ("drivers", "server_bin", "server_src") and before.get(k) != asked[k]]
        if changed:
            raise CampaignError(
                f"the campaign in {out} was started with other values of {', '.join(changed)}; leave these out to go "
                "on with it, or give another --out"
            )
    elif file.exists():
        raise CampaignError(f"{out} holds a campaign; add --resume to go on with it, or give another --out")
    else:
        try:
            write_atomically(file, msgspec.json.format(msgspec.json.encode(plan), indent=2))
        except OSError as e:
            raise CampaignError(f"cannot write into {out}: {e.strerror}") from None
    with file.open("rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CampaignError(f"the campaign in {out} is running; end it first, or give another --out") from None
        except OSError:
            pass  # a file system without locks
        if resume:
            sweep(out / "state")
            findings.sweep(out / "findings") if (out / "findings").is_dir() else None
        for name in plan.targets:
            corpus.begin(corpus.folder_of(out, name), corpus.SEEDS / script(name).stem)
        yield


def found_so_far(out: Path) -> list[dict[str, Any]]:
    """Summaries of the findings in a campaign's folder."""
    folder = out / "findings"
    result = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and not path.name.startswith("."):
            with contextlib.suppress(findings.BadFinding):
                result.append(summary(load_any(path), path))
    return result


def run(
    plan: Plan,
    out: Path,
    tested: Tested,
    *,
    minutes: float | None,
    scenarios: int | None,
    requests: int | None = None,
    reduce_seconds: float = 30.0,
    listen: Callable[[Status, dict[str, Any] | None], None],
) -> Result:
    """Run the jobs to their end. `listen` is called with every event, and with None several times a second.

    Ctrl-C and SIGTERM end the jobs, which keep what they have; the result then says interrupted.
    """
    coverage, server = tested.coverage, tested.server
    status = Status(
        out,
        minutes,
        scenarios,
        findings=found_so_far(out),
        instrumented=coverage.build if coverage else "",
        subject=plan.subject,
        requests=requests,
    )
    processes: dict[int, subprocess.Popen[bytes]] = {}
    stop = False

    def on_signal(*_: object) -> None:
        nonlocal stop
        stop = True

    old = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    selector = selectors.DefaultSelector()
    try:
        for j in range(plan.jobs):
            if stop:
                break
            config = JobConfig(
                models=plan.models,
                shim=str(tested.shim or ""),
                build=plan.build,
                cache=str(tested.cache),
                out=str(out.resolve()),  # a job works in another directory
                seed=plan.seed,
                job=j,
                jobs=plan.jobs,
                seconds=None if minutes is None else minutes * 60,
                scenarios=_share(scenarios, j, plan.jobs),
                avoid=plan.avoid,
                misuse=plan.misuse,
                reduce_seconds=reduce_seconds,
                fault=plan.fault,
                driver=str(tested.driver or ""),
                variants=plan.variants,
                environment=tested.environment,
                coverage=coverage,
                server=msgspec.structs.replace(server, requests=_share(requests, j, plan.jobs)) if server else None,
            )
            process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.job"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).resolve().parent.parent,
                start_new_session=True,
            )
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
            processes[j] = process
            selector.register(process.stdout, selectors.EVENT_READ, j)
        died = _listen(status, processes, selector, listen, lambda: stop)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        selector.close()
        for s, handler in old.items():
            signal.signal(s, handler)
    status.findings = found_so_far(out)
    return Result(status, stop, died)


def _share(whole: int | None, job: int, jobs: int) -> int | None:
    """What one job does of a number of things."""
    return None if whole is None else whole // jobs + (job < whole % jobs)


def _listen(
    status: Status,
    processes: dict[int, subprocess.Popen[bytes]],
    selector: selectors.BaseSelector,
    listen: Callable[[Status, dict[str, Any] | None], None],
    stopped: Callable[[], bool],
) -> list[int]:
    """Take events until every job's output ends; returns the jobs that did not end by themselves."""
    rest: dict[int, bytes] = dict.fromkeys(processes, b"")
    done: set[int] = set()
    told_to_stop: float | None = None
    while selector.get_map():
        for key, _ in selector.select(0.2):
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fileobj)
                continue
            lines, _, rest[key.data] = (rest[key.data] + data).rpartition(b"\n")
            for event in events(lines):
                if _take(status, event, done):
                    listen(status, event)
        listen(status, None)
        if stopped() and told_to_stop is None:
            told_to_stop = time.monotonic()
            for process in processes.values():
                if process.poll() is None:
                    process.terminate()
        if told_to_stop is not None and time.monotonic() - told_to_stop > GRACE:
            break
    return [j for j in processes if j not in done]


def _take(status: Status, event: dict[str, Any], done: set[int]) -> bool:
    """Keep what an event tells; False for a finding that is known of already."""
    job = int(event.get("job", -1))
    match event["event"]:
        case "progress":
            status.jobs[job] = msgspec.convert(event["progress"], Progress)
            status.own_rss_kb[job] = int(event["own_rss_kb"])
            status.doing.pop(job, None)
        case "reducing":
            status.doing[job] = f"reducing {event['symptom']}"
        case "doing":
            status.doing[job] = str(event["text"])
        case "finding":
            status.doing.pop(job, None)
            found = {k: v for k, v in event.items() if k not in ("event", "job")}
            if any(_same(f, found) for f in status.findings):
                return False
            status.findings.append(found)
        case "trouble":
            status.troubles.append(str(event["text"]))
        case "done":
            done.add(job)
        case _:
            pass
    return True


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two summaries are of one folder; jobs name it from the root."""
    return Path(a["path"]).name == Path(b["path"]).name
