"""The targets that restore malformed states, and what they have in common."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Literal

from fuzz.models import Model
from fuzz.targets.config import Complaints, TargetConfig
from fuzz.targets.draw import Drawn, Setting, draw
from fuzz.targets.stage import Complaint, Stage, never_tried, steps_round
from subjects.runner import Refused
from subjects.scenario import Medium, Scenario
from subjects.shim import Shim

MOST_STAGES = 256

Outcome = Literal["skipped", "refused", "taken", "complained"]
"""What became of an input. skipped: it was not tried, a known fault or its parameters are in the way."""


class BlobTarget:
    """A target of malformed states. whole: of the whole context."""

    def __init__(self, name: str, *, whole: bool, medium: Medium):
        self.name, self.whole, self.medium = name, whole, medium

    def draw(self, data: bytes, models: list[Model]) -> Drawn:
        """What an input stands for; where there are files, its first byte says which format."""
        if self.medium == "buffer":
            return draw(data, models, whole=self.whole, medium="buffer")
        return draw(data[1:], models, whole=bool(data[:1] and data[0] & 1), medium="file")

    def scenario(self, data: bytes, models: list[Model]) -> tuple[Scenario, Model] | None:
        """See fuzz.targets.config.Target."""
        drawn = self.draw(data, models)
        return drawn.scenario(), drawn.model

    def open(self, config: TargetConfig) -> BlobRun:
        """Ready to try inputs in this process."""
        return BlobRun(self, config)


class BlobRun:
    """Tries inputs of a target, in stages that are kept. outcome: of the newest."""

    def __init__(self, target: BlobTarget, config: TargetConfig):
        self.target, self.models = target, config.models
        self.avoid = frozenset(config.avoid)
        self.complaints = Complaints(Path(config.report))
        self.shim = Shim(Path(config.shim))
        self.outcome: Outcome = "skipped"
        self._handles: dict[str, int | None] = {}
        self._stages: OrderedDict[tuple[str, Setting], Stage | None] = OrderedDict()

    def __call__(self, data: bytes) -> None:
        """One input."""
        self.outcome = "skipped"
        drawn = self.target.draw(data, self.models)
        if never_tried(self.avoid, drawn.setting):
            return
        key = (drawn.model.path, drawn.setting)
        stage = self._stage(key, drawn, data)
        if stage is None:
            return
        bad = stage.changed(drawn)
        if steps_round(self.avoid, stage, bad):
            return
        try:
            taken = stage.attempt(bad, tolerate_half=lambda: "half-restore" in self.avoid and stage.half_known(bad))
            self.outcome = "taken" if taken else "refused"
        except Complaint as e:
            self._complain(e, drawn, data)
            self._drop(key)

    def _complain(self, e: Complaint, drawn: Drawn, data: bytes) -> None:
        self.outcome = "complained"
        self.complaints.add(f"{e.symptom} {drawn.setting.kind} {drawn.model.traits.memory}", str(e), data)

    def _stage(self, key: tuple[str, Setting], drawn: Drawn, data: bytes) -> Stage | None:
        if key in self._stages:
            self._stages.move_to_end(key)
            return self._stages[key]
        if drawn.model.path not in self._handles:
            self._handles[drawn.model.path] = self.shim.load_model(Path(drawn.model.path), 0)
        handle = self._handles[drawn.model.path]
        stage: Stage | None = None
        if handle is not None:
            try:
                stage = Stage(self.shim, handle, drawn.model.traits, drawn.setting)
                stage.settle()
            except Refused:
                stage = None  # parameters that this model cannot have
            except Complaint as e:
                self._complain(e, drawn, data)
                if stage is not None:
                    stage.close()
                stage = None
        self._stages[key] = stage
        if len(self._stages) > MOST_STAGES:
            self._drop(next(iter(self._stages)))
        return stage

    def _drop(self, key: tuple[str, Setting]) -> None:
        stage = self._stages.pop(key, None)
        if stage is not None:
            stage.close()
