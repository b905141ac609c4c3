"""Runs programs of ours, and upstream's state tests, on a build with coverage, and gives what each reached.

A profile is one file that all processes of one source map and count in (`%m%c`: one for each library, continuously), so
nothing is lost when a child is taken down by an assertion or a kill -9, and thousands of children leave no thousands of
files. Counters are not atomic: counts may be a little low, but what was reached once stays reached.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fuzz.coverage import export, functions
from fuzz.coverage.export import Function, Measured, Share
from fuzz.repro.phrases import count
from oracles.judge import Judge
from subjects import instrument
from subjects.processes import end_with_parent
from subjects.scenario import BadScenario, Scenario
from subjects.scenario import loads as load_scenario

REDRAFT = str(Path(sys.executable).with_name("redraft"))
UPSTREAM = ("test-recurrent-state-rollback", "test-save-load-state")
GENERATOR = "test-llama-archs"
NOTHING = "nothing was measured"
"""the note on a source that left no profile"""
# How often a test that runs for minutes is told of, in seconds.
SIGN_OF_LIFE = 15.0

# The files that the figures of whole files are about, and those that functions of the list are in.
STATE_FILES = re.compile(r"llama-(memory.*|kv-cache.*|context|batch)\.cpp|llama-kv-cells\.h")
READ_FILES = re.compile(r"llama-(memory.*|kv-c.*|context|batch|io)\.(cpp|h)")


class CannotMeasure(RuntimeError):
    """A tool is missing, or one failed; the message is for people."""


class NotRun(RuntimeError):
    """Programs of a kind cannot be run on this build; the first line says why."""


@dataclass(frozen=True)
class Tools:
    """LLVM's tools, of the version that compiled the build: their formats change with it."""

    cov: Path
    profdata: Path
    cxxfilt: Path

    def merge(self, folders: Iterable[Path], into: Path) -> bool:
        """One indexed profile of all raw profiles in some folders; False where there are none."""
        raw = sorted(str(p) for f in folders for p in f.glob("*.profraw"))
        if not raw:
            return False
        _tool([self.profdata, "merge", "-sparse", "-o", into, *raw])
        return True

    def export(self, library: Path, profile: Path) -> Measured:
        """What a profile says of a library."""
        text = _tool([self.cov, "export", "-format=text", "-skip-expansions", f"-instr-profile={profile}", library])
        try:
            document = json.loads(text)
        except ValueError as e:
            raise CannotMeasure(f"llvm-cov export: {e}") from None
        return export.read(document, lambda name: READ_FILES.fullmatch(name) is not None, self.demangled)

    def demangled(self, names: list[str]) -> list[str]:
        """Names of functions as people write them."""
        return _tool([self.cxxfilt], "\n".join(names)).splitlines()

    def pages(self, library: Path, profile: Path, files: Sequence[str], folder: Path) -> None:
        """Sources with counts and branches as HTML, written into `folder`."""
        shown = ["-format=html", "-show-branches=count", f"-output-dir={folder}", f"-instr-profile={profile}"]
        _tool([self.cov, "show", *shown, library, *files])


def tools() -> Tools:
    """The tools beside the compiler. Raises CannotMeasure."""
    compiler = instrument.clang()
    if compiler is None:
        raise CannotMeasure("clang is missing: ci/setup --fuzz installs it")
    found = {name: compiler.tool(name) for name in ("llvm-cov", "llvm-profdata", "llvm-cxxfilt")}
    if missing := [name for name, path in found.items() if path is None]:
        raise CannotMeasure(f"{', '.join(missing)} of clang {compiler.major} not found: ci/setup --fuzz installs them")
    return Tools(*(path for path in found.values() if path))


def _tool(command: Sequence[str | Path], text: str | None = None) -> str:
    try:
        p = subprocess.run([str(c) for c in command], input=text, capture_output=True, text=True, check=False)
    except OSError as e:
        raise CannotMeasure(f"{command[0]}: {e.strerror}") from None
    if p.returncode:
        raise CannotMeasure(f"{Path(command[0]).name} failed: {p.stderr.strip()[-500:]}")
    return p.stdout


@dataclass
class Source:
    """One source of coverage: what it is called, where its profiles are, and what people should know of it."""

    name: str
    ours: bool
    folder: Path
    about: str = ""
    notes: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """What a process needs so that it counts here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return {"LLVM_PROFILE_FILE": str(self.folder / "%m%c.profraw")}


@dataclass
class Column:
    """Coverage by one source, or by all of ours."""

    name: str
    about: str
    measured: Measured


@dataclass
class Report:
    """Everything that was measured."""

    build: str
    groups: list[functions.Group]
    columns: list[Column]
    notes: list[str]
    library: Path
    union: int = 0
    """the column of all of ours: that which pages and lists of what is missed are about"""

    def __post_init__(self) -> None:
        names = {f.name for c in self.columns for f in c.measured.functions.values()}
        self.titles, missing = functions.assign(self.groups, names)
        self.missing = missing

    def chosen(self, column: Column, title: str | None = None) -> list[Function]:
        """Functions of the list, of one group or of all."""
        return [
            f
            for f in column.measured.functions.values()
            if f.name in self.titles and (title is None or self.titles[f.name] == title)
        ]

    def of_file(self, column: Column, file: str) -> list[Function]:
        """All functions of a file, listed or not."""
        return [f for f in column.measured.functions.values() if f.file == file]

    def files(self) -> list[str]:
        """Names of the whole files that are shown."""
        return sorted({n for c in self.columns for n in c.measured.whole if STATE_FILES.fullmatch(n)})

    def plain_llvm(self, column: Column) -> tuple[Share, Share]:
        """Lines and sides of the whole files as llvm-cov counts them."""
        lines = sides = Share()
        for name in self.files():
            a, b = column.measured.whole.get(name, (Share(), Share()))
            lines, sides = lines + a, sides + b
        return lines, sides


def report(build: str, library: Path, sources: Sequence[Source], tools: Tools, folder: Path) -> Report | None:
    """Merge and read the profiles of all sources; the union of ours stays in `folder` as union.profdata. None where
    nothing was measured."""
    columns: list[Column] = []
    for number, s in enumerate(sources):
        profile = folder / f"{number}.profdata"
        if tools.merge([s.folder], profile):
            columns.append(Column(s.name, s.about, tools.export(library, profile)))
        else:
            s.notes.append(NOTHING)
    notes = [f"{s.name}: {n}" for s in sources for n in s.notes]
    if not columns:
        return None
    there = {c.name for c in columns}
    ours = [s for s in sources if s.ours and s.name in there]
    tools.merge([s.folder for s in ours or sources], folder / "union.profdata")
    union = 0
    if len(ours) > 1:
        union = len(ours)
        measured = tools.export(library, folder / "union.profdata")
        columns.insert(union, Column("all of ours", " and ".join(s.name for s in ours), measured))
    return Report(build, functions.load(), columns, notes, library, union)


# --- what is run ------------------------------------------------------------------------------------------------------


def stored(paths: Iterable[Path]) -> tuple[list[Scenario], list[str]]:
    """The programs in files and folders, and what could not be read."""
    found, bad = list[Scenario](), list[str]()
    for path in paths:
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                found.append(load_scenario(file.read_bytes()))
            except (OSError, BadScenario) as e:
                bad.append(f"{file}: {e}")
    return found, bad


def run_programs(
    programs: Sequence[Scenario],
    judge_of: Callable[[Scenario], AbstractContextManager[Judge]],
    source: Source,
    say: Callable[[str], None],
) -> None:
    """Run programs as `redraft replay` does, with their references and observations.

    judge_of: a judge for all programs with the model, and draft, of one; it raises NotRun where they cannot be run (a
    driver that the build does not have, a model that is not there), which is said in the notes.
    """
    by_model: dict[str, list[Scenario]] = defaultdict(list)
    for p in programs:
        draft = p.driver.draft if p.driver else None
        by_model[f"{p.model} {draft} {p.driver is not None}"].append(p)
    before = os.environ.get("LLVM_PROFILE_FILE")
    os.environ.update(source.environment())  # children inherit it
    done = 0
    failed: dict[str, int] = defaultdict(int)
    try:
        for same in by_model.values():
            until = done + len(same)
            try:
                with judge_of(same[0]) as judge:
                    for p in same:
                        judge.judge(p, fresh=True, observed=True, variants=True)
                        done += 1
                        if done % 50 == 0:
                            say(f"{source.name}: {done} of {len(programs)} programs")
            except Exception as e:  # one model must not cost the results of the others
                why = str(e).partition("\n")[0]
                failed[why if isinstance(e, NotRun) else f"{type(e).__name__}: {why}"] += until - done
    finally:
        del os.environ["LLVM_PROFILE_FILE"]
        os.environ.update({} if before is None else {"LLVM_PROFILE_FILE": before})
        source.about = count(done, "program")
        source.notes += [f"{count(n, 'program')} not run: {why}" for why, n in failed.items()]


def run_campaign(build: Path, minutes: float, seed: int | None, source: Source, folder: Path) -> None:
    """A campaign of the Hypothesis engine over all recipes. It ends early on KeyboardInterrupt, which is raised again
    when it has ended."""
    command = [REDRAFT, "fuzz", "--json", "--fail-on", "never", "--model", "all", "--build", str(build)]
    command += ["--minutes", f"{minutes:g}", "--out", str(folder / "fuzz")]
    command += [] if seed is None else ["--seed", str(seed)]
    # a session of its own: Ctrl-C in the terminal reaches this process alone, which passes it on once; were this one
    # killed, the campaign ends as well as after Ctrl-C
    p = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **source.environment()},
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGINT, os.getpid()),  # noqa: PLW1509 - there are no threads
    )
    try:
        text, _ = p.communicate()
    except KeyboardInterrupt:
        p.send_signal(signal.SIGINT)
        text, _ = p.communicate()
        _campaign_notes(text, source)
        raise
    finally:
        if p.poll() is None:
            p.kill()
            p.wait()
    if p.returncode not in (0, 3):
        source.notes.append(f"the campaign ended with {p.returncode}")
    _campaign_notes(text, source)


def _campaign_notes(text: str, source: Source) -> None:
    try:
        said: dict[str, Any] = json.loads(text)
        source.about = f"{said['scenarios']} programs in {said['seconds']:.0f} s, seed {said['seed']}"
    except (ValueError, KeyError):
        source.notes.append("the campaign did not say what it did")


def run_upstream(build: Path, source: Source, folder: Path, say: Callable[[str], None]) -> None:
    """Upstream's two state tests over the models that its own generator makes."""
    models = folder / "models"
    models.mkdir()
    say(f"{source.name}: generating models")
    elsewhere = {**os.environ, "LLVM_PROFILE_FILE": str(folder / "generator-%m%c.profraw")}
    _quiet([build / "bin" / GENERATOR, "-o", models], elsewhere, lambda _: None)
    number = len(list(models.glob("*.gguf")))
    if not number:
        source.notes.append(f"{GENERATOR} made no models")
        return
    for test in UPSTREAM:
        say(f"{source.name}: {test} over {number} models, a minute or two")
        # one thread: several spin while they wait for each other, which takes minutes where the cores are busy
        code = _quiet(
            [build / "bin" / test, "--models", models, "-t", "1", "-tb", "1"],
            {**os.environ, **source.environment()},
            partial(_going_on, say, f"{source.name}: ... {test}"),
        )
        if code:
            source.notes.append(f"{test} ended with {code}")
    source.about = f"{' and '.join(UPSTREAM)} over {number} generated models"


def _going_on(say: Callable[[str], None], what: str, seconds: float) -> None:
    say(f"{what}: {seconds:.0f} s")


def _quiet(command: Sequence[str | Path], env: dict[str, str], tell: Callable[[float], object]) -> int:
    """Run a program, which says nothing; `tell` is told now and then how long it has been running."""
    # The tests leave files in the working directory.
    with tempfile.TemporaryDirectory() as cwd:
        p = subprocess.Popen(
            [str(c) for c in command],
            env=env,
            cwd=cwd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(end_with_parent, signal.SIGKILL, os.getpid()),  # noqa: PLW1509 - there are no threads
        )
        began = time.monotonic()
        try:
            while True:
                try:
                    return p.wait(SIGN_OF_LIFE)
                except subprocess.TimeoutExpired:
                    tell(time.monotonic() - began)
        finally:
            if p.poll() is None:
                p.kill()
                p.wait()
