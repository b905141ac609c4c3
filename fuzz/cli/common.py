"""What the verbs share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fuzz.drivers import fit
from fuzz.finding import BadFinding
from fuzz.found import AnyFinding
from fuzz.models import BadModel, Model, of_program
from fuzz.programs import AnyProgram
from fuzz.programs import loads as load_program
from fuzz.server.finding import load_any
from fuzz.state import valid
from oracles.judge import Judge, Judgement
from subjects import instrument
from subjects.builds import (
    BadBuild,
    Build,
    NoDrivers,
    cache_dir,
    compile_shim,
    driver_library,
    driver_origin,
    find_build,
)
from subjects.sandbox import Sandbox, SandboxError
from subjects.scenario import BadScenario, Scenario

PROGRAM = "scenario.json"
"""the program in a folder of a finding, and of an input that ended a target"""


class Usage(Exception):
    """Something to tell the user, exit 2."""


def add_build(parser: argparse.ArgumentParser) -> None:
    """The --build option."""
    parser.add_argument(
        "--build",
        metavar="DIR",
        type=Path,
        help="a llama.cpp build tree or install directory to test (default: the installed llama-cpp-python)",
    )


def add_drivers(parser: argparse.ArgumentParser) -> None:
    """The options that say whose speculative drivers are tested: --llama-src and --driver-patch."""
    add_llama_src(parser)
    parser.add_argument(
        "--driver-patch",
        metavar="FILE",
        type=Path,
        help="a diff of common/speculative.cpp that is compiled in and tested",
    )


def add_llama_src(parser: argparse.ArgumentParser) -> None:
    """The --llama-src option."""
    parser.add_argument(
        "--llama-src",
        metavar="DIR",
        type=Path,
        help="a llama.cpp checkout that matches the build: its common/speculative.cpp is compiled in and tested in "
        "place of the build's (default: the drivers of the build, with headers fetched once through pip)",
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """A reader that went away is no new finding, which rich's exit code 1 would say."""
        raise SystemExit(2)


def console(*, stderr: bool = False) -> Console:
    """Where people read: the terminal as wide as it is, files and pipes wide enough for tables."""
    found = _Console(stderr=stderr)
    return found if found.is_terminal else _Console(stderr=stderr, width=120)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The --json option."""
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, for machines")


@dataclass
class Bench:
    """A build with its compiled shim. `llama_src`: a checkout whose drivers are tested in place of the build's,
    `driver_patch`: a diff of speculative.cpp that is compiled in."""

    build: Build
    shim: Path
    cache: Path
    llama_src: Path | None = None
    driver_patch: Path | None = None

    @property
    def models(self) -> Path:
        """Where generated models are kept."""
        return self.cache / "models"

    def driver_origin(self) -> dict[str, str | list[str]]:
        """Whose drivers are tested, as findings say it. Raises Usage where the drivers cannot be reached."""
        try:
            return driver_origin(self.build, self.driver, self.llama_src, self.driver_patch)
        except NoDrivers as e:
            raise Usage(str(e)) from None

    @property
    def driver(self) -> Path:
        """The driver library, compiled when it is not in the cache.

        Raises Usage where the drivers cannot be reached.
        """
        try:
            return driver_library(self.build, self.llama_src, self.driver_patch, _compiling)
        except NoDrivers as e:
            raise Usage(str(e)) from None


def bench(build_path: Path | None, llama_src: Path | None = None, driver_patch: Path | None = None) -> Bench:
    """Find and compile what is under test; the drivers only once they are asked for.

    From then on the children of this process can load it, also where it is an instrumented build.
    """
    try:
        build = find_build(build_path)
        if build_path is not None and instrument.stamp_of(build_path):
            os.environ.update(instrument.variables(build_path))
        return Bench(build, compile_shim(build), cache_dir(), llama_src, driver_patch)
    except BadBuild as e:
        raise Usage(str(e)) from None


def _compiling() -> None:
    print("compiling drivers …", file=sys.stderr, flush=True)


@contextmanager
def judge_of(b: Bench, scenario: Scenario) -> Iterator[tuple[Judge, Model]]:
    """A judge for the model of a stored scenario."""
    try:
        model = of_program(scenario, b.models, b.shim)
        fit.check_program(scenario, Path(model.path), Path(model.draft) if model.draft else None)
        driver = b.driver if scenario.driver else None
        models = [(Path(model.path), model.ref.n_gpu_layers)]
        with Sandbox(b.shim, models, driver=driver, drafts=model.drafts()) as sandbox:
            yield Judge(sandbox, model.ref, Path(model.path), b.build.fingerprint, b.cache), model
    except (BadModel, SandboxError, fit.Misfit) as e:
        raise Usage(str(e)) from None


def check_duties(scenario: Scenario, model: Model) -> None:
    """Refuse a program that breaks the caller's duties and does not say so: what it shows is no fault of llama.cpp.

    Raises Usage.
    """
    broken = [] if scenario.misuse else valid(scenario, model.traits)
    if broken:
        raise Usage(
            f"the program breaks {', '.join(dict.fromkeys(broken))} (see `redraft contracts`); mend it, or set "
            '"misuse": true'
        )


def stopped(j: Judgement) -> str:
    """Why a run says nothing of what it was to show: it did not get so far. Empty where it did, or llama.cpp ended it,
    which is an answer."""
    trace = j.account.ledger.trace
    if trace.end.how == "error":
        return trace.end.text
    if trace.end.how == "exit":  # by a fault of redraft's own, where liveness cannot say
        return "; ".join(dict.fromkeys(x for v in j.verdicts if v.oracle == "liveness" for x in v.unknown))
    if trace.end.how == "ok" and not any(s.done for s in trace.steps):
        return "no operation ran"
    return ""


def read(path: Path) -> AnyFinding | AnyProgram:
    """A finding's folder, a scenario file of any subject, or a folder of an input that ended a target."""
    try:
        if path.is_dir():
            if _met(path):
                return load_program((path / PROGRAM).read_bytes())
            return load_any(path)
        return load_program(path.read_bytes())
    except OSError as e:
        raise Usage(f"{path}: {e.strerror}") from None
    except BadFinding as e:  # it names the file
        raise Usage(str(e)) from None
    except BadScenario as e:
        raise Usage(f"{path}: {e}") from None


def _met(path: Path) -> bool:
    """Whether a folder is one that the coverage-guided engine keeps of an input (OUT/crashes/NAME), as a program."""
    return (path / PROGRAM).exists() and any(path.glob("*.input"))


def expand(paths: list[Path]) -> list[Path]:
    """Folders of findings, of scenarios and of inputs that ended a target, opened; the own folder of one stays one."""
    out: list[Path] = []
    for path in paths:
        if path.is_dir() and not (path / "finding.json").exists() and not _met(path):
            inside = (
                sorted(p.parent for p in path.rglob("finding.json"))
                or sorted(path.glob("*.json"))
                or sorted(p for p in path.iterdir() if _met(p))
            )
            if not inside:
                raise Usage(f"{path}: no findings and no scenarios in it")
            out += inside
        else:
            out.append(path)
    return out
