"""Findings: what the campaign keeps of a fault, as a folder that a person pastes into a bug report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from fuzz.folder import VERSION, BadFinding, check, decode, finite, put, slug_of, sweep, to_json, told
from fuzz.repro import driver_cpp, plain
from fuzz.repro.cpp import repro_cpp
from fuzz.repro.python import repro_py
from fuzz.repro.readme import explain, readme
from oracles.verdict import Check, Violation
from subjects import scenario as scenarios
from subjects import trace as stored
from subjects.scenario import Scenario
from subjects.trace import Trace

__all__ = [
    "BadFinding",
    "Finding",
    "Kind",
    "files",
    "load",
    "load_traces",
    "slug_of",
    "sweep",
    "write",
]

Kind = Literal["fault", "contract", "crash", "misuse"]

_TRACES = {"subject": "trace.msgpack", "reference": "reference.msgpack"}


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Violations with one signature, and the smallest program that shows them.

    signature: oracle/culprit/memory, what makes two findings one. route: how state got where it is wrong ("" for none).
    known: name of the known fault that it is. reproduced: (n, m), n of m re-runs showed it. scenario: the smallest
    program; its operation `culprit` broke it. attached: what other oracles said of the same run, a line each. end: for
    a crash, the text of the assertion. hang: it was killed because it took too long. found_by: options of the campaign,
    as on the command line.
    """

    signature: str
    slug: str
    title: str
    oracle: str
    kind: Kind
    memory: str
    build: str
    reproduced: tuple[int, int]
    scenario: Scenario
    original: Scenario
    violation: Violation | None
    route: str = ""
    known: str | None = None
    culprit: int | None = None
    attached: tuple[str, ...] = ()
    end: str = ""
    hang: bool = False
    seed: int | None = None
    job: int | None = None
    found_by: str = ""
    environment: dict[str, str | int | list[str]] = {}
    version: int = VERSION

    @property
    def rule(self) -> str:
        """The first line of the report."""
        return self.violation.rule if self.violation else "llama.h is silent; a call with valid arguments must return."

    @property
    def check(self) -> Check:
        """What a reproducer must look at."""
        return self.violation.check if self.violation else Check(kind="alive", step=max(len(self.scenario.ops) - 1, 0))


def write(finding: Finding, traces: Mapping[str, Trace], folder: Path, *, replace: bool = False) -> Path:
    """Write `folder/<slug>` atomically and return it. `traces` has "subject", and "reference" where the check has one.

    A folder that is there is replaced only with `replace`; a kill in the middle of that is put right by `sweep`.

    Raises:
        FileExistsError: the folder is there and `replace` is not given.
        OSError: it cannot be written.
    """
    if finding.violation is not None:
        finding = msgspec.structs.replace(finding, violation=finite(finding.violation))
    return put(files(finding, traces), folder, finding.slug, replace=replace)


def files(finding: Finding, traces: Mapping[str, Trace]) -> dict[str, bytes]:
    """Contents of a finding's folder by file name."""
    subject, reference = traces["subject"], traces.get("reference")
    text = {
        "finding.json": to_json(finding),
        "scenario.json": scenarios.dumps(finding.scenario),
        "original.json": scenarios.dumps(finding.original),
        "environment.json": to_json(finding.environment),
        "explanation.txt": explain(finding, subject, reference),
        "README.md": readme(finding, subject, reference),
        "stderr.txt": subject.stderr + "".join(f"operation {s.op}: {line}\n" for s in subject.steps for line in s.log),
    }
    text |= _programs(finding, subject, reference)
    data = {name: t.encode("utf-8", "replace") for name, t in text.items()}
    return data | {_TRACES.get(name, f"{name}.msgpack"): stored.to_bytes(t) for name, t in traces.items()}


def _programs(finding: Finding, subject: Trace, reference: Trace | None) -> dict[str, str]:
    """The reproducers. Drivers have no Python interface, so with one of them there is only repro.cpp."""
    if finding.scenario.driver is not None:
        return {"repro.cpp": driver_cpp.repro_cpp(finding, subject, reference)}
    calls = plain.lower(finding.scenario, subject)
    program = finding.check.reference
    reference_calls = plain.lower(program, reference) if program and reference else []
    return {
        "repro.py": repro_py(finding, calls, reference_calls),
        "repro.cpp": repro_cpp(finding, calls, reference_calls),
    }


def load(folder: Path) -> Finding:
    """Read a finding back, strictly.

    Raises:
        BadFinding: a file is missing, malformed, of another version, or does not belong to the others.
    """
    with told(folder):
        finding = decode(folder, Finding)
        check(folder, finding.scenario, finding.original)
    return finding


def load_traces(folder: Path) -> dict[str, Trace]:
    """The traces of a finding: "subject", and "reference" if there is one. Raises BadFinding for what is no trace."""
    found: dict[str, Trace] = {}
    for name, file in _TRACES.items():
        if (folder / file).exists():
            try:
                found[name] = stored.from_bytes((folder / file).read_bytes())
            except msgspec.DecodeError as e:
                raise BadFinding(f"{folder / file}: {e}") from None
    return found
