"""What a fuzz target counts while its speed is measured: 64-bit numbers in a mapped file, so that they are there in
whatever way the process ends. harness.cpp has the same as a struct."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

Outcome = Literal["skipped", "refused", "taken"]
OUTCOMES: tuple[Outcome, ...] = ("skipped", "refused", "taken")
MOST_MODELS = 16
_HEAD = 5
_TABLE = MOST_MODELS * len(OUTCOMES)
WORDS = _HEAD + 2 * _TABLE


class At(NamedTuple):
    """Where the number of executions of a class, and their processor time in nanoseconds, are."""

    number: int
    cpu: int


def at(model: int, outcome: int) -> At:
    """Of executions on a model that had an outcome, by their numbers."""
    place = _HEAD + model * len(OUTCOMES) + outcome
    return At(place, place + _TABLE)


class Class(NamedTuple):
    """Executions that are alike: the model by its number, and what became of them."""

    model: int
    outcome: Outcome


@dataclass
class Counts:
    """Of one side. executions: all, with those that warm up; warm: processor seconds until that was over. The others
    leave it out. wall: seconds. number, cpu: by class, processor time in seconds; classes without executions are left
    out."""

    executions: int = 0
    wall: float = 0.0
    complaints: int = 0
    warm: float = 0.0
    number: dict[Class, int] = field(default_factory=dict)
    cpu: dict[Class, float] = field(default_factory=dict)

    @staticmethod
    def blank(path: Path) -> None:
        """Make the file."""
        path.write_bytes(bytes(8 * WORDS))

    @classmethod
    def read(cls, path: Path) -> Counts:
        """What is in the file."""
        words = array("q", path.read_bytes())
        made = cls(words[0], (words[2] - words[1]) / 1e9, words[3], words[4] / 1e9)
        for model in range(MOST_MODELS):
            for i, outcome in enumerate(OUTCOMES):
                place = at(model, i)
                if words[place.number]:
                    made.number[Class(model, outcome)] = words[place.number]
                    made.cpu[Class(model, outcome)] = words[place.cpu] / 1e9
        return made

    def add(self, other: Counts) -> None:
        """Count another run of the same side too."""
        self.executions += other.executions
        self.wall += other.wall
        self.complaints += other.complaints
        self.warm += other.warm
        for c, n in other.number.items():
            self.number[c] = self.number.get(c, 0) + n
            self.cpu[c] = self.cpu.get(c, 0.0) + other.cpu[c]

    def of(self, *, model: int | None = None, outcomes: tuple[Outcome, ...] = OUTCOMES) -> tuple[int, float]:
        """Executions and processor seconds of some classes."""
        chosen = [c for c in self.number if c.outcome in outcomes and model in (None, c.model)]
        return sum(self.number[c] for c in chosen), sum(self.cpu[c] for c in chosen)

    def rate(self, *, model: int | None = None, outcomes: tuple[Outcome, ...] = OUTCOMES) -> float:
        """Executions of some classes in a processor second; 0 where there are none."""
        n, cpu = self.of(model=model, outcomes=outcomes)
        return n / cpu if cpu else 0.0

    def share(self, outcome: Outcome) -> float:
        """Of the inputs that were tried, or for skipped of all."""
        all_of = self.of(outcomes=OUTCOMES if outcome == "skipped" else TRIED)[0]
        return self.of(outcomes=(outcome,))[0] / max(1, all_of)


TRIED: tuple[Outcome, ...] = ("refused", "taken")
LEAST = 20
"""Executions of a class on either side, below which their mean says nothing."""


def alike(ours: Counts, theirs: Counts) -> float:
    """How fast ours is against theirs (above 1: faster) where they would spend their executions as we do: the time
    that theirs takes for our number of executions of each class, over ours. Classes that one side has seldom, and
    inputs that were not tried, are left out; 0 where nothing is left."""
    theirs_for_ours = own = 0.0
    for c, n in ours.number.items():
        if c.outcome in TRIED and n >= LEAST and theirs.number.get(c, 0) >= LEAST:
            theirs_for_ours += n * theirs.cpu[c] / theirs.number[c]
            own += ours.cpu[c]
    return theirs_for_ours / own if own else 0.0
