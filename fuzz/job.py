"""One job of a campaign over the library: a process that generates, runs, judges and triages (see fuzz/loop.py). With
the coverage-guided engine libFuzzer generates: see fuzz/engine. Also the entry of every job's process.

Native code never runs here: the job owns a sandbox.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fuzz import finding as findings
from fuzz.avoid import Avoider, triggers
from fuzz.drivers.gen import programs
from fuzz.found import end_line, slug, summary
from fuzz.known import KnownFault, match
from fuzz.loop import JobConfig, Loop, emit, made_for, slice_seed
from fuzz.models import Model
from fuzz.strategies import generate, palette, scenarios
from fuzz.triage import Symptom, Triaged, triage
from oracles.judge import Judge, Judgement
from oracles.observe import observe
from oracles.registry import OBSERVATIONS
from oracles.rows import NAME_OF
from subjects.processes import end_with_parent
from subjects.sandbox import Sandbox, SandboxError
from subjects.scenario import ModelRef, Scenario

SLICE = 100
# what the title of a finding says of a driver
WRONG_DRAFT = {
    "row": "the next token is paired with another hidden row",
    "tokens": "other tokens are drafted",
    "logits": "drafts are made from another state",
    "target": "the target diverges from plain decoding",
    "positions": "target and draft disagree on positions",
    "two drivers": "llama.cpp's driver and the one in Python draft different tokens",
}


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


class Job(Loop[Scenario]):
    """See the module."""

    subject = "library"
    fatal = (SandboxError,)

    def __init__(self, config: JobConfig):
        super().__init__(config)
        self.sandbox = self._opened()
        self.bed = bed_of(self.sandbox, config)
        self.found_by = ""
        """options that findings name beside the seed"""

    def _opened(self) -> Sandbox:
        """Where programs run."""
        c = self.config
        driver = Path(c.driver) if c.driver else None
        return Sandbox(Path(c.shim), models_of(c), driver=driver, drafts=drafts_of(c))

    def _close(self) -> None:
        self.sandbox.close()

    def _peak_kb(self) -> int:
        return self.sandbox.peak_kb()

    def _take_up(self, program: Scenario) -> None:
        model = next((m for m in self.config.models if made_for(program, m)), None)
        if model is not None:
            self._examine(program, model, left_over=True)

    def _slice(self) -> None:
        c, p = self.config, self.progress
        model = self._model_at(p.slices)
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
        judged: Judgement | None = None

        def judging() -> None:
            nonlocal judged
            p = self.progress
            judged = bed.judges[model.ref].judge(
                executed,
                fresh=fresh,
                observed=False,
                variants=True if left_over or self.config.variants else None,
                fault=self.config.fault,
            )
            p.unjudged += not judged.judged
            for reason in set(judged.unknown):
                p.unknown[reason] = p.unknown.get(reason, 0) + 1
            memory = judged.account.memory
            for op in program.ops:
                key = f"{NAME_OF[type(op)]}/{memory}"
                p.coverage[key] = p.coverage.get(key, 0) + 1
            if judged.violations:
                p.violating += 1
                self._violated(judged, model, bed)

        self._guarded(executed, judging)
        return judged

    def _violated(self, judgement: Judgement, model: Model, bed: Bed) -> None:
        first = judgement.violations[0]
        symptom = f"{first.oracle}|{first.key}|{judgement.account.memory}"

        def triaged() -> bool:
            result = triage(
                bed.judges[model.ref],
                judgement,
                model.traits,
                fault=self.config.fault,
                seconds=self.config.reduce_seconds,
                stop=lambda: self.stopped,
            )
            if not isinstance(result, Triaged):
                return False
            self._found(result, model, symptom, bed)
            return True

        executed = judgement.executed
        self._pursue(
            executed,
            symptom,
            str(Symptom.of(first).key),
            lambda name: triggers(name, executed, model.traits),
            triaged,
        )

    def _found(self, t: Triaged, model: Model, symptom: str, bed: Bed) -> None:
        known = match(t.signature, t.scenario, model.traits, self.known, t.culprit)
        self._met(known, symptom)
        config = msgspec.structs.replace(self.config, build=bed.build, environment=bed.environment)
        finding = make(t, known, config, self.found_by)
        if bed.note:
            finding = msgspec.structs.replace(finding, title=f"{finding.title} ({bed.note})")
        if (self.folder / finding.slug).exists():
            return
        traces = {"subject": t.judgement.account.ledger.trace}
        reference = t.violation.check.reference
        if reference is not None:
            traces["reference"] = bed.sandbox.run(reference, Path(model.path), fresh=True)
        path = self._written(finding.slug, lambda: findings.write(finding, traces, self.folder))
        if path is not None:
            emit("finding", job=self.config.job, **summary(finding, path))


def make(t: Triaged, known: KnownFault | None, config: JobConfig, found_by: str = "") -> findings.Finding:
    """The finding of a triaged violation. found_by: options of the campaign."""
    v = t.violation
    others = [
        f"{o.oracle}: {o.because}"
        for o in t.judgement.violations
        if o is not v and (o.oracle, o.check.step) != (v.oracle, v.check.step)
    ]
    trace = t.judgement.account.ledger.trace
    return findings.Finding(
        signature=t.signature,
        slug=slug(t.signature, known),
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
        end=end_line(trace.end, trace.stderr, v.check.what) if v.oracle == "liveness" else "",
        hang=trace.end.how == "hang",
        seed=config.seed,
        job=config.job,
        found_by=found_by,
        environment=config.environment,
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


def main() -> None:
    """Entry of a job process: its configuration is on standard input."""
    # a job that outlived its campaign by a reduction would write into what --resume works on
    end_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=JobConfig)
    try:
        if config.server is not None:
            from fuzz.server.job import ServerJob  # which the library's need not load

            ServerJob(config, config.server).run()
        elif config.coverage is not None:
            from fuzz.engine.job import CoverageJob  # over this module

            CoverageJob(config, config.coverage).run()
        else:
            Job(config).run()
    except (OSError, SandboxError) as e:  # a full disk, or what is tested does not start: a traceback says no more
        emit("trouble", job=config.job, text=f"job {config.job} cannot go on: {e}")
        sys.exit(1)


if __name__ == "__main__":
    from fuzz.job import main as entry  # under its name, by which the engine knows it too

    entry()
