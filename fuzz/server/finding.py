"""Findings on llama-server: what a person pastes into a bug report, as a folder like those on the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from fuzz import finding as library
from fuzz.finding import Finding, Kind
from fuzz.folder import NAME, VERSION, check, decode, finite, put, to_json, told
from fuzz.repro.text import scrub
from fuzz.server import model
from fuzz.server.readme import explain, readme
from fuzz.server.script import repro_sh
from oracles.verdict import Check, Violation
from subjects.server import scenario as scenarios
from subjects.server import trace as stored
from subjects.server.scenario import SUBJECT, ServerScenario
from subjects.server.trace import Reply, ServerTrace

Cold = Mapping[tuple[int, int], Reply]
"""What a cold server answered to each judged completion, by request and part."""


class ServerFinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Violations with one signature, and the fewest requests that show them. The fields are those of
    `fuzz.finding.Finding`; `end` is what the server said when it died.
    """

    signature: str
    slug: str
    title: str
    oracle: str
    kind: Kind
    memory: str
    build: str
    reproduced: tuple[int, int]
    scenario: ServerScenario
    original: ServerScenario
    violation: Violation | None
    known: str | None = None
    attached: tuple[str, ...] = ()
    end: str = ""
    hang: bool = False
    seed: int | None = None
    job: int | None = None
    found_by: str = ""
    environment: dict[str, str | int | list[str]] = {}
    subject: Literal["server"] = "server"
    version: int = VERSION

    @property
    def options(self) -> str:
        """See `options_of`."""
        return options_of(self.environment)

    @property
    def rule(self) -> str:
        """The first line of the report."""
        if self.violation:
            return self.violation.rule
        return "llama-server's README is silent; a server must live after every request."

    @property
    def check(self) -> Check:
        """What a reproducer must look at."""
        if self.violation:
            return self.violation.check
        return Check(kind="alive", step=max(len(self.scenario.requests) - 1, 0))


def options_of(environment: Mapping[str, object]) -> str:
    """Options that name the server of an environment, for a person to fill in, each behind a blank; empty for the
    usual one."""
    return f" {environment['options']}" if environment.get("options") else ""


def write(finding: ServerFinding, trace: ServerTrace, cold: Cold, folder: Path, *, replace: bool = False) -> Path:
    """Write `folder/<slug>` as `fuzz.folder.put` does, and return it.

    Raises:
        FileExistsError: the folder is there and `replace` is not given.
        OSError: it cannot be written.
        ValueError: a recipe is no longer of the version that the program names.
    """
    if finding.violation is not None:
        finding = msgspec.structs.replace(finding, violation=finite(finding.violation))
    return put(files(finding, trace, cold), folder, finding.slug, replace=replace)


def files(finding: ServerFinding, trace: ServerTrace, cold: Cold) -> dict[str, bytes]:
    """Contents of a finding's folder by file name."""
    text = {
        NAME: to_json(finding),
        "scenario.json": scenarios.dumps(finding.scenario),
        "original.json": scenarios.dumps(finding.original),
        "environment.json": to_json(finding.environment),
        "explanation.txt": explain(finding, trace, cold),
        "README.md": readme(finding, trace, cold),
        "server.log": scrub(trace.log),
        "repro.sh": repro_sh(finding, trace),
        "answers.py": (Path(__file__).parent / "answers.py").read_text("utf-8"),
        **model.files(finding.scenario),
    }
    data = {name: t.encode("utf-8", "replace") for name, t in text.items()}
    answers = [[request, part, reply] for (request, part), reply in sorted(cold.items())]
    bare = msgspec.structs.replace(trace, log="")
    return data | {"trace.json": stored.to_json(bare), "cold.json": msgspec.json.encode(answers)}


def load(folder: Path) -> ServerFinding:
    """Read a finding back, strictly.

    Raises:
        BadFinding: a file is missing, malformed, of another version, or does not belong to the others.
    """
    with told(folder):
        finding = decode(folder, ServerFinding)
        check(folder, finding.scenario, finding.original)
    return finding


def load_trace(folder: Path) -> tuple[ServerTrace, dict[tuple[int, int], Reply]]:
    """The run of a finding's program, and the cold server's answers. Raises BadFinding."""
    with told(folder):
        trace = stored.from_json((folder / "trace.json").read_bytes())
        trace.log = (folder / "server.log").read_text("utf-8")
        answers = msgspec.json.decode((folder / "cold.json").read_bytes(), type=list[tuple[int, int, Reply]])
    return trace, {(request, part): reply for request, part, reply in answers}


def kind_of(folder: Path) -> Literal["library", "server"]:
    """What a finding is about. Raises BadFinding for a folder that has none."""
    with told(folder):
        raw = msgspec.json.decode((folder / NAME).read_bytes())
    return "server" if isinstance(raw, dict) and raw.get("subject") == SUBJECT else "library"


def load_any(folder: Path) -> Finding | ServerFinding:
    """Read a finding of either kind. Raises BadFinding, as `load` does."""
    return load(folder) if kind_of(folder) == "server" else library.load(folder)
