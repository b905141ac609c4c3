"""What a target is told, and how it tells of what its own checks complain of."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Protocol

import msgspec

from fuzz.models import Model
from subjects.scenario import Scenario

VARIABLE = "REDRAFT_TARGET"
"""The environment variable with a TargetConfig as JSON."""


class Target(Protocol):
    """A target, as the supervisor sees it."""

    @property
    def name(self) -> str:
        """One of fuzz.targets.NAMES."""

    def scenario(self, data: bytes, models: list[Model]) -> tuple[Scenario, Model] | None:
        """The ordinary program that an input stands for, and the model that it runs on; None where it stands for
        none. Runs nothing."""


class TargetConfig(msgspec.Struct, kw_only=True, frozen=True):
    """models: to choose from. build: the fingerprint of the instrumented build, by which what may be kept between runs
    in the folder cache is told from another's. shim and driver: our libraries compiled against it (driver empty for
    none). avoid: names of known faults (fuzz/avoid.py) to step round. report: a file of Complaints, a JSON line each.
    tried: a file for Tried, empty for none."""

    models: list[Model]
    build: str
    shim: str
    driver: str = ""
    avoid: list[str] = []
    report: str
    cache: str
    tried: str = ""


class Complaint(msgspec.Struct, frozen=True):
    """What a target's own check found wrong. symptom: short, without numbers of the run. input: libFuzzer's."""

    symptom: str
    text: str
    input: bytes


def read() -> TargetConfig:
    """The configuration of this process, which ends with a sentence where there is none."""
    how = "targets are run by `redraft fuzz --engine coverage --target NAME`, which sets it"
    if VARIABLE not in os.environ:
        sys.exit(f"the environment variable {VARIABLE}, which says what is tested, is missing: {how}")
    try:
        return msgspec.json.decode(os.environ[VARIABLE], type=TargetConfig)
    except msgspec.DecodeError as e:
        sys.exit(f"the environment variable {VARIABLE} cannot be read ({e}): {how}")


class Complaints:
    """Where a target writes what is wrong without a crash: the first of each symptom."""

    def __init__(self, path: Path):
        self.path = path
        self._told: set[str] = set()

    def add(self, symptom: str, text: str, data: bytes) -> None:
        """Tell of one; it is in the file when this returns."""
        if symptom in self._told:
            return
        self._told.add(symptom)
        with self.path.open("ab") as f:
            f.write(msgspec.json.encode(Complaint(symptom, text, data)) + b"\n")


def complaints(path: Path) -> list[Complaint]:
    """What was told; lines that are none are skipped, the last may be the half of one."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(msgspec.json.decode(line, type=Complaint))
        except msgspec.DecodeError:
            continue
    return found


class Tried:
    """Counts the inputs that a target did something with; the others stand for no program, or a known fault or
    parameters that a model cannot have are in their way. What is counted survives the end of the process."""

    SIZE = 8

    def __init__(self, path: Path):
        """`path`: a file that `begin` made."""
        with path.open("r+b") as f:
            self._words = memoryview(mmap.mmap(f.fileno(), self.SIZE)).cast("q")

    def add(self) -> None:
        """One more."""
        self._words[0] += 1

    @classmethod
    def begin(cls, path: Path) -> None:
        """Make the file, at nothing."""
        path.write_bytes(bytes(cls.SIZE))

    @classmethod
    def read(cls, path: Path) -> int:
        """How many; 0 where there is no such file."""
        return int.from_bytes(path.read_bytes(), sys.byteorder) if path.exists() else 0
