"""One job of a campaign: a process that generates, runs, judges and triages, and tells its parent in events (a JSON
line each). With the coverage-guided engine libFuzzer generates: see fuzz/engine.

Native code never runs here: the job owns a sandbox. What is generated depends on seed, number of the job and number
of jobs only, and (with
`avoid` auto) on which known faults this job has met.
"""

from __future__ import annotations

import ctypes
import hashlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from fuzz import finding as findings
from fuzz.avoid import Avoider, triggers
from fuzz.drivers.gen import programs
from fuzz.journal import Journal, Progress
from fuzz.known import KnownFault, load_all, match
from fuzz.models import Model
from fuzz.strategies import generate, palette, scenarios
from fuzz.triage import Symptom, Triaged, triage
from oracles.crash import crash_text
from oracles.judge import Judge, Judgement
from oracles.observe import observe
from oracles.registry import OBSERVATIONS
from oracles.rows import NAME_OF
from subjects.sandbox import Sandbox, SandboxError
from subjects.scenario import ModelRef, Scenario
from subjects.trace import Trace

SLICE = 100
# Violations of one symptom that are triaged: the first may be one fault and the next another, but not for ever.
TRIAGES = 4
PROGRESS_EVERY = 0.5
# what the title of a finding says of a driver
WRONG_DRAFT = {
    "row": "the next token is paired with another hidden row",
    "tokens": "other tokens are drafted",
    "logits": "drafts are made from another state",
    "target": "the target diverges from plain decoding",
    "positions": "target and draft disagree on positions",
    "two drivers": "llama.cpp's driver and the one in Python draft different tokens",
}


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


class JobConfig(msgspec.Struct, kw_only=True):
    """What one job is told. driver: the compiled driver library. variants: compare every program with its variants, not
    one in eight. coverage: for the coverage-guided engine, the instrumented build and which targets run on it."""

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


@dataclass(frozen=True)
class Bed:
    """Where programs are run and judged, and what findings say of the build there. note: what their titles add."""

    sandbox: Sandbox
    judges: dict[ModelRef, Judge]
    build: str
    environment: dict[str, str | int | list[str]]
    note: str = ""


def bed_of(sandbox: Sandbox, config: JobConfig, note: str = "") -> Bed:
    """A sandbox with a judge for each of a job's models."""
    build, cache = config.build, Path(config.cache)
    judges = {m.ref: Judge(sandbox, m.ref, Path(m.path), build, cache) for m in config.models}
    return Bed(sandbox, judges, build, config.environment, note)


def models_of(config: JobConfig) -> list[tuple[Path, int]]:
    """What a sandbox loads."""
    return list(dict.fromkeys((Path(m.path), m.ref.n_gpu_layers) for m in config.models))


def drafts_of(config: JobConfig) -> dict[ModelRef, Path]:
    """Where the models of drafts are."""
    return {ref: path for m in config.models for ref, path in m.drafts().items()}


def slice_seed(seed: int, job: int, jobs: int, number: int) -> int:
    """Seed of one slice of generated programs."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{job}/{jobs}/{number}".encode()).digest()[:6], "big")


class Job:
    """See the module."""

    def __init__(self, config: JobConfig):
        self.config = config
        self.journal = Journal(Path(config.out), config.job)
        self.progress: Progress = self.journal.progress()
        self.known: list[KnownFault] = load_all()
        self.sandbox = self._opened()
        self.bed = bed_of(self.sandbox, config)
        self.began = time.monotonic()
        self.before = self.progress.seconds
        self.stopped = False
        self.found_by = ""
        """options that findings name beside the seed"""
        self.progress.unsaved = False
        self._told = 0.0
        self._not_written: set[str] = set()
        if config.avoid == "always":
            self.progress.avoiding = sorted({k.avoidance for k in self.known})
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides

    def _opened(self) -> Sandbox:
        """Where programs run."""
        c = self.config
        driver = Path(c.driver) if c.driver else None
        return Sandbox(Path(c.shim), models_of(c), driver=driver, drafts=drafts_of(c))

    def _stop(self, *_: object) -> None:
        self.stopped = True

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
                model = next((m for m in self.config.models if _made_for(left, m)), None)
                if model is not None and not self.stopped:
                    self._examine(left, model, left_over=True)
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
            self.sandbox.close()
            self._tell_progress(force=True)
            if whole:  # a job that was thrown out of its loop must not look like one that ended
                emit("done", job=self.config.job)

    def _finish(self) -> None:
        """What is to be done when the time is over, and nobody has told to stop."""

    def _slice(self) -> None:
        c, p = self.config, self.progress
        # jobs begin with different models, so that a short campaign sees all kinds of memory early
        model = c.models[(p.slices + c.job * len(c.models) // c.jobs) % len(c.models)]
        avoider = Avoider(p.avoiding)
        number = slice_seed(c.seed, c.job, c.jobs, p.slices)
        if model.driver is not None:
            strategy = programs(model.ref, model.driver, model.traits, model.n_rs)
        else:
            params = palette(model.traits, number, avoider)
            strategy = scenarios(model.ref, model.traits, avoid=avoider, misuse=c.misuse, params_from=params)
        for program in generate(strategy, number, SLICE)[p.in_slice :]:
            if self.over():
                return  # --resume goes on within the slice
            p.in_slice += 1
            if p.avoiding != list(avoider.names):  # met a known fault within this slice
                avoider = Avoider(p.avoiding)
            self._examine(avoider.repair(program, model.traits), model)
        p.slices, p.in_slice = p.slices + 1, 0
        self._save()

    # --- one program --------------------------------------------------------------------------------------------------

    def _examine(
        self, program: Scenario, model: Model, *, left_over: bool = False, bed: Bed | None = None, fresh: bool = False
    ) -> Judgement | None:
        """Judge a program, on the ordinary library unless another bed is given, and follow up what is wrong; None where
        it could not be judged.

        One that is left over has its observations already, and is tried with its variants too.
        """
        bed = bed or self.bed
        plain = program.driver is None and not left_over
        executed = observe(program, OBSERVATIONS, variety=int(program.key(), 16)) if plain else program
        self.journal.in_flight(executed)
        p = self.progress
        p.scenarios += 1
        judgement = None
        try:
            judgement = bed.judges[model.ref].judge(
                executed,
                fresh=fresh,
                observed=False,
                variants=True if left_over or self.config.variants else None,
                fault=self.config.fault,
            )
            p.unjudged += not judgement.judged
            for reason in set(judgement.unknown):
                p.unknown[reason] = p.unknown.get(reason, 0) + 1
            memory = judgement.account.memory
            for op in program.ops:
                key = f"{NAME_OF[type(op)]}/{memory}"
                p.coverage[key] = p.coverage.get(key, 0) + 1
            if judgement.violations:
                p.violating += 1
                self._violated(judgement, model, bed)
        except SandboxError:
            raise
        except Exception:
            p.unjudged += 1
            self._trouble(executed, "could not be judged")
        self._tell_progress()
        return judgement

    def _trouble(self, program: Scenario, what: str) -> None:
        """A fault of ours costs one program or report, not the campaign; the program is kept."""
        told = traceback.format_exc()
        try:
            kept = self.journal.trouble(program)
        except OSError as e:
            self._cannot_write(e)
            kept = "a program"
        emit("trouble", job=self.config.job, text=f"{kept} {what}:\n{told}")

    def _violated(self, judgement: Judgement, model: Model, bed: Bed) -> None:
        p = self.progress
        first = judgement.violations[0]
        symptom = f"{first.oracle}|{first.key}|{judgement.account.memory}"
        if p.symptoms.get(symptom, 0) >= TRIAGES:
            return
        if any(triggers(name, judgement.executed, model.traits) for name in p.tired):
            return  # most likely one of those that were triaged often enough
        p.symptoms[symptom] = p.symptoms.get(symptom, 0) + 1
        try:
            self.journal.pending(judgement.executed)
        except OSError as e:
            self._cannot_write(e)
        emit("reducing", job=self.config.job, symptom=str(Symptom.of(first).key))
        try:
            result = triage(
                bed.judges[model.ref],
                judgement,
                model.traits,
                fault=self.config.fault,
                seconds=self.config.reduce_seconds,
                stop=lambda: self.stopped,
            )
            if isinstance(result, Triaged):
                self._found(result, model, symptom, bed)
            else:
                p.unreproduced += 1
        except SandboxError:
            raise
        except Exception:
            self._trouble(judgement.executed, "could not be made a finding")
        self.journal.settled()
        self._save()

    def _found(self, t: Triaged, model: Model, symptom: str, bed: Bed) -> None:
        known = match(t.signature, t.scenario, model.traits, self.known, t.culprit)
        p = self.progress
        if known is not None and self.config.avoid != "never" and known.avoidance not in p.avoiding:
            p.avoiding = sorted({*p.avoiding, known.avoidance})
            p.symptoms.pop(symptom, None)  # what shows the same symptom from now on is something else
        if known is not None and self.config.avoid == "never":
            # each known fault uses up its own triages, or a frequent one would hide the others behind its symptom
            p.symptoms[symptom] -= 1
            own = f"{symptom}|{known.name}"
            p.symptoms[own] = p.symptoms.get(own, 0) + 1
            if p.symptoms[own] == TRIAGES:
                p.tired = sorted({*p.tired, known.avoidance})
        config = msgspec.structs.replace(self.config, build=bed.build, environment=bed.environment)
        finding = make(t, known, config, self.found_by)
        if bed.note:
            finding = msgspec.structs.replace(finding, title=f"{finding.title} ({bed.note})")
        folder = Path(self.config.out) / "findings"
        if (folder / finding.slug).exists():
            return
        traces = {"subject": t.judgement.account.ledger.trace}
        reference = t.violation.check.reference
        if reference is not None:
            traces["reference"] = bed.sandbox.run(reference, Path(model.path), fresh=True)
        try:
            path = findings.write(finding, traces, folder)
        except FileExistsError:
            return  # another job was faster
        except OSError as e:
            if not (folder / finding.slug).exists():
                p.unwritten += 1
                emit("trouble", job=self.config.job, text=f"cannot write {folder / finding.slug}: {e}")
            return
        emit("finding", job=self.config.job, **summary(finding, path))

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

    # --- telling ------------------------------------------------------------------------------------------------------

    def _tell_progress(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._told >= PROGRESS_EVERY:
            self._told = now
            self.progress.seconds = self.before + now - self.began
            self.progress.max_rss_kb = max(self.progress.max_rss_kb, self.sandbox.peak_kb())
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            emit("progress", job=self.config.job, own_rss_kb=own, progress=msgspec.to_builtins(self.progress))


def _made_for(program: Scenario, model: Model) -> bool:
    """Whether a program is one of those that are generated for a model."""
    if program.model != model.ref or (program.driver is None) != (model.driver is None):
        return False
    a, b = program.driver, model.driver
    return a is None or b is None or (a.kind, a.draft, a.impl) == (b.kind, b.draft, b.impl)


def make(t: Triaged, known: KnownFault | None, config: JobConfig, found_by: str = "") -> findings.Finding:
    """The finding of a triaged violation. found_by: options of the campaign."""
    v = t.violation
    # two faults may show themselves with one signature: a known one must hide neither another known one nor a new one
    identity = f"{t.signature}|{known.name}" if known else t.signature
    digest = hashlib.sha256(identity.encode()).hexdigest()[:6]
    others = [
        f"{o.oracle}: {o.because}"
        for o in t.judgement.violations
        if o is not v and (o.oracle, o.check.step) != (v.oracle, v.check.step)
    ]
    trace = t.judgement.account.ledger.trace
    return findings.Finding(
        signature=t.signature,
        slug=f"{findings.slug_of(t.signature)[:64].strip('-')}-{digest}",
        title=known.title if known else title_of(t),
        oracle=v.oracle,
        kind=v.kind,
        memory=t.judgement.account.memory,
        build=config.build,
        reproduced=t.reproduced,
        scenario=t.scenario,
        original=t.original,
        violation=v,
        route=t.route,
        known=known.name if known else None,
        culprit=t.culprit,
        attached=tuple(dict.fromkeys(others))[:5],
        end=end_text(trace, v.check.what) if v.oracle == "liveness" else "",
        hang=trace.end.how == "hang",
        seed=config.seed,
        job=config.job,
        found_by=found_by,
        environment=config.environment,
    )


def end_text(trace: Trace, what: str) -> str:
    """What a crash said, with the numbers of this run: the line of stderr that was told apart as `what`."""
    lines = trace.stderr.splitlines()
    # the name of a signal comes from no line
    return (
        what
        if crash_text(trace.end, "") == what
        else next((line.strip() for line in lines if crash_text(trace.end, line) == what), what)
    )


def title_of(t: Triaged) -> str:
    """One line for a bug tracker."""
    name = NAME_OF[type(t.scenario.ops[t.culprit])]
    memory = t.judgement.account.memory
    if t.violation.oracle == "liveness":
        return f"{name} ends the process on {memory} memory: {t.violation.check.what}"
    if t.violation.check.kind == "draft":
        where = f"{name} ({t.route})" if t.route else name
        return f"{where}: {WRONG_DRAFT.get(t.violation.check.what, 'a malformed driver state is not refused')}"
    if t.violation.check.kind in ("rows", "state"):
        return f"{name} ({t.route or memory}) leaves a wrong state on {memory} memory"
    return f"{name} ({t.route or memory}) breaks its contract on {memory} memory: {t.violation.key}"


def summary(f: findings.Finding, path: Path) -> dict[str, Any]:
    """What is told of a finding in events and in --json."""
    return {
        "signature": f.signature,
        "title": f.title,
        "kind": f.kind,
        "oracle": f.oracle,
        "memory": f.memory,
        "known": f.known,
        "reproduced": list(f.reproduced),
        "operations": len(f.scenario.ops),
        "path": str(path),
    }


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


def main() -> None:
    """Entry of a job process: its configuration is on standard input."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: a job that outlived its campaign by a reduction would write into what --resume works on
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=JobConfig)
    try:
        if config.coverage is None:
            Job(config).run()
        else:
            from fuzz.engine.job import CoverageJob  # over this module

            CoverageJob(config, config.coverage).run()
    except OSError as e:  # a full disk most likely, which a traceback does not say more of
        emit("trouble", job=config.job, text=f"job {config.job} cannot go on: {e}")
        sys.exit(1)


if __name__ == "__main__":
    from fuzz.job import main as entry  # under its name, by which the engine knows it too

    entry()
