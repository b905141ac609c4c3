"""One job of a coverage-guided campaign: runs targets in slices, and makes findings of the inputs that end them.

An input is an ordinary program once it is decoded (see fuzz/targets/config.py), so what a target meets is run, judged,
triaged and reduced like any other program, on the ordinary library first. Only what does not show there is looked for
on the instrumented build, and its finding says so. An instrumented build of other sources than the installed library
is what is tested, and everything is looked for on it alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fuzz import finding as findings
from fuzz.engine import corpus, libfuzzer
from fuzz.engine.libfuzzer import Stat
from fuzz.engine.process import Ended, run
from fuzz.job import Bed, Job, bed_of, drafts_of, models_of
from fuzz.journal import TargetProgress, write_atomically
from fuzz.known import match, signed
from fuzz.loop import Coverage, JobConfig, emit, slice_seed
from fuzz.models import Model
from fuzz.repro import words
from fuzz.targets import DRIVEN, load, script
from fuzz.targets.config import VARIABLE, Complaint, Target, TargetConfig, Tried, complaints
from oracles import crash as crashes
from oracles.crash import Crash
from oracles.judge import Judgement
from subjects import scenario as scenarios
from subjects.sandbox import Limits, Sandbox
from subjects.scenario import Corrupt, Scenario
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
# Inputs that showed nowhere else are kept with what was said, so many of a job; and so many reports of undefined
# behaviour, which have none.
KEPT = 20
# Runs one after the other that end before anything was executed, after which a target is left alone.
FAILURES = 2
# The same for runs that something from outside ends (the system, for want of memory) before they got beyond reading
# their corpus once more. That may pass, and one that has got further is only started again.
KILLS = 5
# A corpus is minimised once it is so many times as large as after the last time, and not small: it is read whenever a
# target starts.
GROWN, LARGE = 2, 1000
# That takes a second for some inputs, and never longer than this; at the end not more than this share of the campaign,
# for all targets of a job together.
MERGED, MERGE, SHARE = 5, 300.0, 0.1


# How exceptions are told of: one that went through Python, which does not say what it was, and all.
_NAMELESS, _THROWN = "uncaught exception:", "uncaught "


class CoverageJob(Job):
    """See the module."""

    def __init__(self, config: JobConfig, coverage: Coverage):
        self.coverage = coverage
        super().__init__(config)
        self.targets: dict[str, Target] = {name: load(name) for name in coverage.targets}
        self.failures = dict.fromkeys(coverage.targets, 0)
        self.kills = dict.fromkeys(coverage.targets, 0)
        self.out = Path(config.out)
        state = self.out / "state"
        self.scratch = state / f"tmp-{config.job}"
        self.artifacts = state / f"crash-{config.job}"
        self.report = state / f"report-{config.job}.jsonl"
        self.tried = state / f"tried-{config.job}.bin"
        self.sizes: dict[str, int] = {}
        self._sanitized: Bed | None = None
        self.progress.gave_up = False  # a job that goes on tries again
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
            self.tried.unlink(missing_ok=True)
            if not any(libfuzzer.artifacts_in(self.artifacts / name) for name in self.targets):
                shutil.rmtree(self.artifacts, ignore_errors=True)

    # --- slices -------------------------------------------------------------------------------------------------------

    def _slice(self) -> None:
        p, c = self.progress, self.config
        for name in self.targets:  # left by a job that was killed
            self._take_inputs(name, Crash("exit", "left over"), "")
        # one that does not start is not tried again
        names = [name for name in self.targets if self._runs(name)]
        if not names:
            self._say("no target runs; what they say is above")
            self.stopped = p.gave_up = True
            return
        name = names[(p.slices + c.job * len(names) // c.jobs) % len(names)]
        left = self._slice_seconds(len(names))
        while left >= LEAST and self._runs(name) and not self.over():
            ended = self._fuzz(name, self._within(left))
            left -= ended.seconds
            self._after(name, ended)
        p.slices += 1
        self._save()
        grown = corpus.count(self._corpus(name))
        if grown > max(GROWN * self.sizes[name], LARGE):
            self._minimise(name)

    def _runs(self, name: str) -> bool:
        """Whether a target is still started."""
        return self.failures[name] < FAILURES and self.kills[name] < KILLS

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
        t.tried += Tried.read(self.tried)
        self._empty(self.scratch)
        return ended

    def _command(self, name: str) -> list[str]:
        return [sys.executable, str(script(name))]

    def _environment(self, name: str) -> dict[str, str]:
        driven = name in DRIVEN
        told = TargetConfig(
            models=[m for m in self.config.models if (m.driver is not None) == driven],
            build=self.coverage.fingerprint,
            shim=self.coverage.shim,
            driver=self.coverage.driver,
            avoid=self.progress.avoiding,
            report=str(self.report),
            cache=self.config.cache,
            tried=str(self.tried),
        )
        self.scratch.mkdir(parents=True, exist_ok=True)
        Tried.begin(self.tried)
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
        for text in ended.undefined:
            self._undefined(text)
        crash = crashes.read(End("exit", ended.code) if ended.code >= 0 else End("signal", -ended.code), ended.log)
        met = self._take_inputs(name, crash, ended.log)
        for complaint in complaints(self.report):
            self._complaint(name, complaint)
        if not met and ended.code != 0 and not ended.late and not ended.stopped:
            # it does not start, or what ended it was none of its inputs
            self._unexplained(name, ended)
            self._say(f"target {name} ended by itself: {crash.text}\n{_last_lines(ended.log)}")
            if not self._runs(name):
                self._say(f"target {name} is left alone from now on")
        elif ended.executions:
            self.failures[name] = self.kills[name] = 0
        if ended.late:
            self._say(f"target {name} did not end in time and was killed")
        self._save()

    def _unexplained(self, name: str, ended: Ended) -> None:
        if not ended.executions:
            self.failures[name] += 1
            return
        self.failures[name] = 0
        got_on = ended.executions > 2 * corpus.count(self._corpus(name))
        self.kills[name] = 0 if got_on else self.kills[name] + 1

    def _take_inputs(self, name: str, crash: Crash, log: str) -> bool:
        """Examine the inputs that ended a run; whether there were any."""
        found = libfuzzer.artifacts_in(self.artifacts / name)
        for path in found:
            data = path.read_bytes()
            corpus.remove(self._corpus(name), data)
            looked_at = self._count(name, crash)
            if looked_at and crash.kind == "python":
                self.progress.examined[crash.key] = EXAMINED
                self._keep(name, crash, data, log, self._decoded(name, data))
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
        """Look for what an input showed, where it matters most first.

        ended: it ended the target; otherwise the target's own checks complained.
        """
        p = self.progress
        p.examined[crash.key] = p.examined.get(crash.key, 0) + 1
        avoiding = list(p.avoiding)
        made = self._decoded(name, data)
        judgement: Judgement | None = None
        shown = False
        if made is not None:
            program, model = made
            self.found_by = f" --engine coverage --target {name}"
            for bed in self._beds(crash):
                judgement = self._examine(program, model, fresh=True, bed=bed) or judgement
                shown = self._shows(judgement, crash if ended else None, model)
                if shown or self.stopped:
                    break
        if not self.stopped:
            p.inputs += 1
        if not shown and not self.stopped:
            p.lost += 1
            self._keep(name, crash, data, log, made, judgement)
        if p.avoiding != avoiding:
            p.examined.pop(crash.key, None)  # from now on the same end is something else

    def _decoded(self, name: str, data: bytes) -> tuple[Scenario, Model] | None:
        """The program that an input stands for; None where it stands for none, or the target cannot say."""
        try:
            return self.targets[name].scenario(data, self._models(name))
        except Exception as e:  # a fault of the target's costs one input
            self._say(f"target {name} cannot say what {corpus.name_of(data)} stands for: {e!r}")
            return None

    def _models(self, name: str) -> list[Model]:
        return [m for m in self.config.models if (m.driver is not None) == (name in DRIVEN)]

    def _beds(self, crash: Crash) -> Iterator[Bed]:
        """Where a crash is looked for, one after the other: the ordinary library, the instrumented build. A sanitizer
        refuses memory by ending the process where the ordinary library throws, and catches it."""
        alone, memory = self.coverage.alone, crash.kind == "memory"
        if not (alone and memory):
            yield self.bed  # which is the instrumented build where that is alone
        if not (alone or memory):
            yield self._instrumented()

    def _instrumented(self) -> Bed:
        """The instrumented build as a second place to judge; started when it is first asked for."""
        if self._sanitized is None:
            cov = self.coverage
            own = msgspec.structs.replace(self.config, build=cov.fingerprint, environment=cov.environment)
            self._sanitized = bed_of(self._opened_instrumented(), own, "seen on an instrumented build only")
        return self._sanitized

    def _opened(self) -> Sandbox:
        """Where programs run first."""
        return self._opened_instrumented() if self.coverage.alone else super()._opened()

    def _opened_instrumented(self) -> Sandbox:
        c, cov = self.config, self.coverage
        return Sandbox(
            Path(cov.shim),
            models_of(c),
            driver=Path(cov.driver) if cov.driver else None,
            drafts=drafts_of(c),
            limits=Limits(memory_mb=0),  # a sanitizer's shadow takes terabytes of address space
            env=cov.variables,
        )

    def _shows(self, judgement: Judgement | None, crash: Crash | None, model: Model) -> bool:
        """Whether a run shows what the target met: the crash, or for a complaint (None) anything wrong.

        An assertion and an exception say the same on every build, or another thing that one known fault says as well;
        what a sanitizer sees is a signal to others, or goes by unseen until a known fault ends the process.
        """
        if judgement is None:
            return False
        if crash is None:
            return bool(judgement.violations)
        ends = [v for v in judgement.violations if v.oracle == "liveness"]
        if any(v.check.what == crash.text for v in ends):
            return True
        nameless = crash.kind == "exception" and crash.text.startswith(_NAMELESS)
        if nameless and any(v.check.what.startswith(_THROWN) for v in ends):
            return True
        program = judgement.executed
        both = [k for k in self.known if signed(k, f"liveness:{crash.text}")]
        if any(match(v.key, program, model.traits, both, v.check.step) for v in ends):
            return True
        if crash.kind in ("assertion", "exception") and not nameless:
            return False
        return any(match(v.key, program, model.traits, self.known, v.check.step) is None for v in ends)

    def _undefined(self, text: str) -> None:
        p = self.progress
        for place in crashes.undefined(text):
            known = place.text in p.undefined
            p.undefined[place.text] = p.undefined.get(place.text, 0) + 1
            if not known:
                emit("note", job=self.config.job, text=f"undefined behaviour  {place.key}")
                folder = self._kept(place)
                if not folder.exists() and self._room(with_input=False):
                    try:
                        write_atomically(folder / "log.txt", text.encode())
                    except OSError as e:
                        self._cannot_write(e)

    def _keep(
        self,
        name: str,
        crash: Crash,
        data: bytes,
        log: str,
        made: tuple[Scenario, Model] | None,
        judgement: Judgement | None = None,
    ) -> None:
        """Keep an input that showed nowhere else, with what was said, and its program where it stands for one."""
        folder = self._kept(crash)
        if _has_input(folder) or not self._room(with_input=True):
            return
        text = [f"{crash.text}  (target {name})", "", *_in_words(made, judgement), "", *crashes.condensed(log), ""]
        try:
            if made is not None:
                write_atomically(folder / "scenario.json", scenarios.dumps(made[0]).encode())
            write_atomically(folder / f"{name}.input", data)
            write_atomically(folder / "log.txt", "\n".join(text).encode("utf-8", "replace"))
        except OSError as e:
            self._cannot_write(e)

    def _room(self, *, with_input: bool) -> bool:
        """Whether one more folder may be kept, with an input in it or without."""
        folders = (self.out / "crashes").glob("*")
        return sum(_has_input(f) == with_input for f in folders) < KEPT * self.config.jobs

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
            whole = ended.code == 0 and not ended.late and not ended.stopped
            # on a full disk it ends with 0 as well
            return whole and libfuzzer.merged(ended.log) == corpus.count(into) and corpus.whole(into)

        if corpus.minimise(self._corpus(name), merge):
            self.progress.targets[name].corpus = corpus.count(self._corpus(name))
        self.sizes[name] = corpus.count(self._corpus(name))
        self._tell_progress(force=True)


def _in_words(made: tuple[Scenario, Model] | None, judgement: Judgement | None) -> list[str]:
    """The program of an input for people: operation by operation where it ran, otherwise its edits."""
    if made is None:
        return ["It stands for no program."]
    program, model = made
    lines = [f"Model {model.label}. Context: {words.params_text(program.params)}."]
    if judgement is not None:
        told = words.program(judgement.executed, judgement.account.ledger.trace)
    else:
        told = [words.changed(op) for op in program.ops if isinstance(op, Corrupt)]
    return [*lines, *(f"{i}. {line}" for i, line in enumerate(told))]


def _has_input(folder: Path) -> bool:
    return any(folder.glob("*.input"))


def _last_lines(log: str, n: int = 12) -> str:
    return "\n".join([line for line in log.splitlines() if line.strip()][-n:])
