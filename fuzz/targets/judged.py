"""Targets whose inputs are whole programs: run in this process and judged by all oracles, references included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from fuzz.avoid import Avoider
from fuzz.models import Model
from fuzz.targets.config import Complaints, TargetConfig
from oracles.judge import Judge
from oracles.observe import observe
from oracles.registry import OBSERVATIONS
from subjects.inprocess import InProcess
from subjects.scenario import ModelRef, Scenario
from subjects.shim import Shim

Make = Callable[[bytes, Model], Scenario | None]
"""The program that an input stands for on a model."""


class JudgedTarget:
    """A target of programs; an input's first byte picks the model."""

    def __init__(self, name: str, make: Make):
        self.name, self.make = name, make

    def scenario(self, data: bytes, models: list[Model]) -> tuple[Scenario, Model] | None:
        """See fuzz.targets.config.Target."""
        model = models[data[0] % len(models) if data else 0]
        program = self.make(data[1:], model)
        return None if program is None else (program, model)

    def open(self, config: TargetConfig) -> JudgedRun:
        """Ready to judge inputs in this process."""
        return JudgedRun(self, config)


class JudgedRun:
    """Judges programs. What is violated is a complaint; known faults are stepped round in every program. outcome: what
    became of the newest."""

    def __init__(self, target: JudgedTarget, config: TargetConfig):
        self.target, self.models = target, config.models
        self.avoider = Avoider(config.avoid)
        self.complaints = Complaints(Path(config.report))
        drafts: dict[ModelRef, Path] = {ref: path for m in config.models for ref, path in m.drafts().items()}
        driver = Path(config.driver) if config.driver else None
        self.sandbox = InProcess(Shim(Path(config.shim)), driver, drafts)
        self._build, self._cache = config.build, Path(config.cache)
        self._judges: dict[ModelRef, Judge] = {}
        self.outcome: Literal["skipped", "judged"] = "skipped"

    def __call__(self, data: bytes) -> None:
        """One input."""
        self.outcome = "skipped"
        made = self.target.scenario(data, self.models)
        if made is None:
            return
        program, model = self.avoider.repair(made[0], made[1].traits), made[1]
        if not program.ops:
            return
        if program.driver is None:
            program = observe(program, OBSERVATIONS, variety=int(program.key(), 16))
        if model.ref not in self._judges:
            self._judges[model.ref] = Judge(self.sandbox, model.ref, Path(model.path), self._build, self._cache)
        judgement = self._judges[model.ref].judge(program, observed=False, variants=False)
        self.outcome = "judged"
        for violation in judgement.violations[:1]:
            symptom = f"{violation.oracle} {violation.key} {judgement.account.memory}"
            self.complaints.add(symptom, violation.because, data)
