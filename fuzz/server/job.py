"""One job of a campaign over llama-server: a process that makes up programs, has them run and judged on real servers,
and triages (see fuzz/loop.py).

The servers are children of this process, which the judges start and end.
"""

from __future__ import annotations

from pathlib import Path

from fuzz.found import end_line, slug, summary
from fuzz.known import KnownFault, match_server
from fuzz.loop import JobConfig, Loop, ServerPart, emit, made_for, slice_seed
from fuzz.models import Model
from fuzz.server import finding as findings
from fuzz.server.avoid import repaired, to_blame
from fuzz.server.finding import ServerFinding
from fuzz.server.flags import flag_set, palette
from fuzz.server.gen import Setting, programs
from fuzz.server.triage import ROUTES, ServerTriaged, triage
from fuzz.strategies import generate
from fuzz.triage import Symptom
from oracles.server.judge import NoServer, ServerJudge, ServerJudgement
from subjects.server.build import ServerBuild
from subjects.server.scenario import ServerScenario
from subjects.server.trace import ended

# Programs of one model: a dozen requests each, of which two cores check some sixty a second.
SLICE = 24


# what titles of findings say, by oracle
_WRONG = {
    "server-answer": "another answer than a cold server's",
    "server-history": "an answer depends on other conversations",
    "server-drafting": "drafting changes an answer",
    "server-acceptance": "fewer drafts are accepted",
}


class ServerJob(Loop[ServerScenario]):
    """See the module."""

    subject = "server"
    fatal = (NoServer,)

    def __init__(self, config: JobConfig, server: ServerPart):
        super().__init__(config)
        self.server = server
        self.build = ServerBuild(Path(server.path), server.fingerprint, server.name, server.version)
        self._judges: dict[str, ServerJudge] = {}

    def _judge(self, model: Model) -> ServerJudge:
        """The judge of a model, with its cold servers."""
        if model.label not in self._judges:
            draft = Path(model.draft) if model.draft else None
            self._judges[model.label] = ServerJudge(
                self.build, model.ref, Path(model.path), draft, Path(self.config.cache), model.traits.memory
            )
        return self._judges[model.label]

    def _close(self) -> None:
        for judge in self._judges.values():
            judge.close()

    def _peak_kb(self) -> int:
        return max((judge.max_rss_kb for judge in self._judges.values()), default=0)

    def over(self) -> bool:
        """Whether to stop now: all requests are checked, too."""
        most = self.server.requests
        return super().over() or (most is not None and self.progress.requests >= most)

    def _take_up(self, program: ServerScenario) -> None:
        model = next((m for m in self.config.models if made_for(program, m)), None)
        if model is not None:
            self._examine(program, model, left_over=True)

    def _slice(self) -> None:
        c, p = self.config, self.progress
        model = self._model_at(p.slices)
        for label, judge in self._judges.items():
            if label != model.label:
                judge.close()  # of its cold servers there may be four, and models a dozen
        number = slice_seed(c.seed, c.job, c.jobs, p.slices)
        for program in generate(programs(model, self._settings(model, number)), number, SLICE)[p.in_slice :]:
            if self.over():
                return  # --resume goes on within the slice
            p.in_slice += 1
            self._examine(repaired(p.avoiding, program), model)
        p.slices, p.in_slice = p.slices + 1, 0
        self._save()

    def _settings(self, model: Model, number: int) -> tuple[Setting, ...]:
        """The flags that the programs of a slice share, so that cold servers are met again."""
        drawn = palette(model.traits, model.driver, number)
        if not self.server.flags:
            return drawn
        return tuple((flag_set(n, model.traits), drawn[i % len(drawn)][1]) for i, n in enumerate(self.server.flags))

    def _examine(self, program: ServerScenario, model: Model, *, left_over: bool = False) -> None:
        """Judge a program and follow up what is wrong; one that is left over is tried with its variants too."""

        def judging() -> None:
            p = self.progress
            judgement = self._judge(model).judge(
                program,
                fault=self.config.fault,
                variants=True if left_over or self.config.variants else None,
                avoid=p.avoiding,
            )
            p.unjudged += not judgement.judged
            p.requests += judgement.checked
            for reason in set(judgement.unknown):
                p.unknown[reason] = p.unknown.get(reason, 0) + 1
            for request in program.requests:
                key = f"{request.__struct_config__.tag}/{memory_of(model)}"
                p.coverage[key] = p.coverage.get(key, 0) + 1
            for event in (e for reply in judgement.trace.replies for e in reply.events):
                p.deeds[event.what] = p.deeds.get(event.what, 0) + 1
            if judgement.violations:
                p.violating += 1
                self._violated(judgement, model)

        self._guarded(program, judging)

    def _violated(self, judgement: ServerJudgement, model: Model) -> None:
        first, program = judgement.violations[0], judgement.program
        symptom = f"{first.oracle}|{first.key}|{memory_of(model)}"

        def triaged() -> bool:
            result = triage(
                self._judge(model),
                judgement,
                model.traits.memory,
                fault=self.config.fault,
                avoid=tuple(self.progress.avoiding),
                seconds=self.config.reduce_seconds,
                stop=lambda: self.stopped,
            )
            if not isinstance(result, ServerTriaged):
                return False
            self._found(result, model, symptom)
            return True

        self._pursue(
            program,
            symptom,
            str(Symptom.of(first).key),
            lambda name: to_blame(name, program, judgement.trace, max(first.check.step, 0)),
            triaged,
        )

    def _found(self, t: ServerTriaged, model: Model, symptom: str) -> None:
        known = match_server(t.signature, t.program, t.judgement.trace, self.known, t.culprit)
        self._met(known, symptom)
        finding = make(t, known, self.config, model.traits.memory)
        if (self.folder / finding.slug).exists():
            return
        j = t.judgement
        path = self._written(finding.slug, lambda: findings.write(finding, j.trace, j.cold, self.folder))
        if path is not None:
            emit("finding", job=self.config.job, **summary(finding, path))


def memory_of(model: Model) -> str:
    """What the table of coverage calls a model: its kind of memory, and of driver."""
    return model.traits.memory + (f"-{model.driver.kind}" if model.driver else "")


def make(t: ServerTriaged, known: KnownFault | None, config: JobConfig, memory: str) -> ServerFinding:
    """The finding of a triaged violation."""
    v, trace = t.violation, t.judgement.trace
    end = ended(trace.end)
    others = [
        f"{o.oracle}: {o.because}"
        for o in t.judgement.violations
        if o is not v and (o.oracle, o.check.step) != (v.oracle, v.check.step)
    ]
    return ServerFinding(
        signature=t.signature,
        slug=slug(t.signature, known),
        title=known.title if known else title_of(t, memory),
        oracle=v.oracle,
        kind=v.kind,
        memory=memory,
        build=config.build,
        reproduced=t.reproduced,
        scenario=t.program,
        original=t.original,
        violation=v,
        known=known.name if known else None,
        attached=tuple(dict.fromkeys(others))[:5],
        end=end_line(end, trace.log, v.check.what) if v.oracle == "server-alive" else "",
        hang=trace.end.how == "hang",
        seed=config.seed,
        job=config.job,
        found_by=f" --subject server{findings.options_of(config.environment)}",
        environment=config.environment,
    )


def title_of(t: ServerTriaged, memory: str) -> str:
    """One line for a bug tracker."""
    program, v = t.program, t.violation
    on = f"on {memory} memory" + (f" with {program.driver.kind}" if program.driver else "")
    name = str(program.requests[t.culprit].__struct_config__.tag)
    if v.oracle == "server-alive":
        what = "breaks its connection" if t.judgement.trace.end.how == "broken" else "ends llama-server"
        return f"{name} {what} {on}: {v.check.what}"
    if v.oracle == "server-slot":
        return f"{name} is answered wrongly {on}: {v.key}"
    how = " and ".join(ROUTES[part][1] for part in t.route.split("+")) if t.route else ""
    return " ".join(x for x in (_WRONG.get(v.oracle, "a wrong answer"), how, on) if x)
