"""One job of a coverage-guided campaign: runs targets in slices, and makes findings of the inputs that end them.

An input is an ordinary program once it is decoded (see fuzz/targets/config.py), so what a target meets is run, judged,
triaged and reduced like any other program, on the ordinary library first. Only what does not show there is looked for
on the instrumented build, and its finding says so.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

import msgspec

from fuzz import finding as findings
from fuzz.engine import corpus, libfuzzer
from fuzz.engine.libfuzzer import Stat
from fuzz.engine.process import Ended, run
from fuzz.job import Bed, Coverage, Job, JobConfig, bed_of, drafts_of, emit, models_of, slice_seed
from fuzz.journal import TargetProgress, write_atomically
from fuzz.models import Model
from fuzz.targets import DRIVEN, load, script
from fuzz.targets.config import VARIABLE, Complaint, Target, TargetConfig, complaints
from oracles import crash as crashes
from oracles.crash import Crash
from oracles.judge import Judgement
from subjects.sandbox import Limits, Sandbox
from subjects.trace import End

ROOT = Path(__file__).resolve().parents[2]

# Seconds that a target runs before the next one's turn: every target comes twice where there is time, but starting one
# takes some seconds.
SLICE = (10.0, 120.0)
# A target that is not started for less than this.
LEAST = 3.0
# What a process may take to start, to read its corpus and to end, beyond its time.
EXTRA = 90.0
# Inputs with one way to end that are looked at; the first may be one fault and the next another, but not for ever.
EXAMINED = 4
# Inputs that showed nowhere else are kept with what was said, so many of a job.
KEPT = 20
# Runs one after the other that end before anything was executed, after which a target is left alone.
FAILURES = 2
# A corpus is minimised once it is so many times as large as after the last time, and not small: it is read whenever a
# target starts.
GROWN, LARGE = 2, 1000
# That takes a second for some inputs, and never longer than this; at the end not more than this share of the campaign,
# for all targets of a job together.
MERGED, MERGE, SHARE = 5, 300.0, 0.1


class CoverageJob(Job):
    """See the module."""

    def __init__(self, config: JobConfig, coverage: Coverage):
        super().__init__(config)
        self.coverage = coverage
        self.targets: dict[str, Target] = {name: load(name) for name in coverage.targets}
        self.failures = dict.fromkeys(coverage.targets, 0)
        self.out = Path(config.out)
        state = self.out / "state"
        self.scratch = state / f"tmp-{config.job}"
        self.artifacts = state / f"crash-{config.job}"
        self.report = state / f"report-{config.job}.jsonl"
        self.sizes: dict[str, int] = {}
        self._sanitized: Bed | None = None
        for name in coverage.targets:
            (self.artifacts / name).mkdir(parents=True, exist_ok=True)
            self.progress.targets.setdefault(name, TargetProgress())
            self.sizes[name] = corpus.count(self._corpus(name))

    def run(self) -> None:
        """Run until it is over; nothing but findings, corpora and where it was is left."""
        try:
            super().run()
        finally:
            if self._sanitized is not None:
                self._sanitized.sandbox.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.report.unlink(missing_ok=True)
            if not any(libfuzzer.artifacts_in(self.artifacts / name) for name in self.targets):
                shutil.rmtree(self.artifacts, ignore_errors=True)

    # --- slices -------------------------------------------------------------------------------------------------------

    def _slice(self) -> None:
        p, c = self.progress, self.config
        for name in self.targets:  # left by a job that was killed
            self._take_inputs(name, Crash("exit", "left over"), "")
        # one that does not start is not tried again
        names = [name for name, n in self.failures.items() if n < FAILURES]
        if not names:
            self._say("no target runs; what they say is above")
            self.stopped = True
            return
        name = names[(p.slices + c.job * len(names) // c.jobs) % len(names)]
        left = self._slice_seconds(len(names))
        while left >= LEAST and self.failures[name] < FAILURES and not self.over():
            ended = self._fuzz(name, self._within(left))
            left -= ended.seconds
            self._after(name, ended)
        p.slices += 1
        self.journal.save(p)
        grown = corpus.count(self._corpus(name))
        if grown > max(GROWN * self.sizes[name], LARGE):
            self._minimise(name)

    def _slice_seconds(self, targets: int) -> float:
        least, most = SLICE
        whole = self.config.seconds
        return most if whole is None else min(most, max(least, whole / (2 * targets)))

    def _within(self, seconds: float) -> float:
        whole = self.config.seconds
        return seconds if whole is None else min(seconds, max(LEAST, whole - self.progress.seconds))

    def _fuzz(self, name: str, seconds: float) -> Ended:
        p, t = self.progress, self.progress.targets[name]
        executions, runs = t.executions, p.executions
        self.report.unlink(missing_ok=True)

        def listen(stat: Stat) -> None:
            # coverage that lines without it (the first) do not show
            if stat.edges:
                self.over()  # the time goes on
                t.reached(p.seconds, stat.edges)
                t.features, t.corpus = max(t.features, stat.features), stat.corpus
            t.executions, p.executions, p.rate = executions + stat.executions, runs + stat.executions, stat.rate
            p.max_rss_kb = max(p.max_rss_kb, stat.rss_mb << 10)
            self._tell_progress()

        number = slice_seed(self.config.seed, self.config.job, self.config.jobs, p.slices) + t.crashes
        # libFuzzer reads it when it starts, and what other jobs add every now and then
        arguments = libfuzzer.fuzzing(self._corpus(name), self.artifacts / name, seconds=seconds, seed=number)
        ended = run(
            [*self._command(name), *arguments],
            self._environment(name),
            seconds=seconds + EXTRA,
            listen=listen,
            stop=self.over,
        )
        t.executions, p.executions, p.rate = executions + ended.executions, runs + ended.executions, 0
        t.seconds += ended.seconds
        self._empty(self.scratch)
        return ended

    def _command(self, name: str) -> list[str]:
        return [sys.executable, str(script(name))]

    def _environment(self, name: str) -> dict[str, str]:
        driven = name in DRIVEN
        told = TargetConfig(
            models=[m for m in self.config.models if (m.driver is not None) == driven],
            build=self.coverage.build,
            shim=self.coverage.shim,
            driver=self.coverage.driver,
            avoid=self.progress.avoiding,
            report=str(self.report),
            cache=self.config.cache,
        )
        self.scratch.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **self.coverage.variables}
        # merging runs the script itself, by its first line
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        env["PYTHONPATH"] = str(ROOT)
        env["TMPDIR"] = str(self.scratch)
        return env | {VARIABLE: msgspec.json.encode(told).decode()}

    def _corpus(self, name: str) -> Path:
        return corpus.folder_of(self.out, name)

    @staticmethod
    def _empty(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    # --- what a run left ----------------------------------------------------------------------------------------------

    def _after(self, name: str, ended: Ended) -> None:
        """Look at what a run met."""
        p = self.progress
        for text in ended.undefined:
            self._undefined(text)
        crash = crashes.read(End("exit", ended.code) if ended.code >= 0 else End("signal", -ended.code), ended.log)
        met = self._take_inputs(name, crash, ended.log)
        for complaint in complaints(self.report):
            self._complaint(name, complaint)
        failed = not met and ended.code != 0 and not ended.late and not ended.stopped
        if failed:  # it does not start, or what ended it was none of its inputs
            self.failures[name] += 1
            self._say(f"target {name} ended by itself: {crash.text}\n{_last_lines(ended.log)}")
        elif ended.executions:
            self.failures[name] = 0
        if ended.late:
            self._say(f"target {name} did not end in time and was killed")
        self.journal.save(p)

    def _take_inputs(self, name: str, crash: Crash, log: str) -> bool:
        """Examine the inputs that ended a run; whether there were any."""
        found = libfuzzer.artifacts_in(self.artifacts / name)
        for path in found:
            data = path.read_bytes()
            corpus.remove(self._corpus(name), data)
            looked_at = self._count(name, crash)
            if looked_at and crash.kind == "python":
                self.progress.examined[crash.key] = EXAMINED
                self._keep(name, crash, data, log)
                self._say(f"target {name} has a fault of its own: {crash.text}\n{_last_lines(log)}")
            elif looked_at:
                self._input(name, crash, data, log)
            path.unlink(missing_ok=True)
            if self.stopped:
                break  # the others wait for --resume
        return bool(found)

    def _complaint(self, name: str, complaint: Complaint) -> None:
        crash = Crash("exit", complaint.symptom)
        if self._count(name, crash):
            self._input(name, crash, complaint.input, complaint.text, ended=False)

    def _count(self, name: str, crash: Crash) -> bool:
        """Count an end; whether it is to be looked at."""
        p = self.progress
        p.crashes[crash.text] = p.crashes.get(crash.text, 0) + 1
        p.targets[name].crashes += 1
        return p.examined.get(crash.key, 0) < EXAMINED

    def _input(self, name: str, crash: Crash, data: bytes, log: str, *, ended: bool = True) -> None:
        """Look for what an input showed, where it matters most: on the ordinary library, then on the instrumented one.

        ended: it ended the target; otherwise the target's own checks complained.
        """
        p = self.progress
        p.examined[crash.key] = p.examined.get(crash.key, 0) + 1
        avoiding = list(p.avoiding)
        try:
            made = self.targets[name].scenario(data, self._models(name))
        except Exception as e:  # a fault of the target's costs one input
            self._say(f"target {name} cannot say what {corpus.name_of(data)} stands for: {e!r}")
            made = None
        shown = False
        if made is not None:
            program, model = made
            shown = _shows(self._examine(program, model, fresh=True), crash if ended else None)
            # A sanitizer refuses memory by ending the process where the ordinary library throws, and catches it.
            if not shown and crash.kind != "memory" and not self.stopped:
                judgement = self._examine(program, model, fresh=True, bed=self._instrumented())
                shown = _shows(judgement, crash if ended else None)
        if not shown and not self.stopped:
            p.lost += 1
            self._keep(name, crash, data, log)
        if p.avoiding != avoiding:
            p.examined.pop(crash.key, None)  # from now on the same end is something else

    def _models(self, name: str) -> list[Model]:
        return [m for m in self.config.models if (m.driver is not None) == (name in DRIVEN)]

    def _instrumented(self) -> Bed:
        """The instrumented build as a place to judge; started when it is first asked for."""
        if self._sanitized is None:
            c, cov = self.config, self.coverage
            sandbox = Sandbox(
                Path(cov.shim),
                models_of(c),
                driver=Path(cov.driver) if cov.driver else None,
                drafts=drafts_of(c),
                limits=Limits(memory_mb=0),  # a sanitizer's shadow takes terabytes of address space
                env=cov.variables,
            )
            own = msgspec.structs.replace(c, build=cov.fingerprint, environment=cov.environment)
            self._sanitized = bed_of(sandbox, own, "seen on an instrumented build only")
        return self._sanitized

    def _undefined(self, text: str) -> None:
        p = self.progress
        for place in crashes.undefined(text):
            known = place.text in p.undefined
            p.undefined[place.text] = p.undefined.get(place.text, 0) + 1
            if not known:
                emit("note", job=self.config.job, text=f"undefined behaviour  {place.key}")
                write_atomically(self._kept(place) / "log.txt", text.encode())

    def _keep(self, name: str, crash: Crash, data: bytes, log: str) -> None:
        """Keep an input that showed nowhere else, with what was said."""
        folder = self._kept(crash)
        if folder.exists() or len(list(folder.parent.glob("*"))) >= KEPT * self.config.jobs:
            return
        write_atomically(folder / f"{name}.input", data)
        write_atomically(folder / "log.txt", "\n".join(crashes.condensed(log)).encode())

    def _kept(self, crash: Crash) -> Path:
        digest = hashlib.sha256(crash.key.encode()).hexdigest()[:6]
        return self.out / "crashes" / f"{findings.slug_of(crash.text)[:64].strip('-')}-{digest}"

    def _say(self, text: str) -> None:
        emit("trouble", job=self.config.job, text=text)

    # --- the corpus ---------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Minimise the corpora, a share for each job."""
        until = time.monotonic() + max(MERGE / 10, SHARE * self.progress.seconds)
        for i, name in enumerate(self.targets):
            left = until - time.monotonic()
            if i % self.config.jobs == self.config.job and not self.stopped and left > LEAST:
                self._minimise(name, left)

    def _minimise(self, name: str, most: float = MERGE) -> None:
        # what it takes to start a target, and its inputs
        seconds = min(most, MERGE, 20 + corpus.count(self._corpus(name)) / MERGED)
        emit("doing", job=self.config.job, text=f"minimising the corpus of {name}")

        def merge(into: Path, source: Path) -> bool:
            ended = run(
                [*self._command(name), *libfuzzer.merging(into, source, self.scratch)],
                self._environment(name),
                seconds=seconds,
                stop=lambda: self.stopped,
            )
            self._empty(self.scratch)
            return ended.code == 0 and not ended.late and not ended.stopped

        if corpus.minimise(self._corpus(name), merge):
            self.progress.targets[name].corpus = corpus.count(self._corpus(name))
        self.sizes[name] = corpus.count(self._corpus(name))
        self._tell_progress(force=True)


def _shows(judgement: Judgement | None, crash: Crash | None) -> bool:
    """Whether a run shows what the target met: the crash, or for a complaint (None) anything wrong.

    An assertion and an exception say the same on every build; what a sanitizer sees is a signal to others.
    """
    found = judgement.violations if judgement else []
    if crash is None:
        return bool(found)
    ends = [v.check.what for v in found if v.oracle == "liveness"]
    told = crash.kind == "assertion" or (crash.kind == "exception" and not crash.text.startswith("uncaught exception"))
    return crash.text in ends if told else bool(ends)


def _last_lines(log: str, n: int = 12) -> str:
    return "\n".join([line for line in log.splitlines() if line.strip()][-n:])
