"""Findings: what the campaign keeps of a fault, as a folder that a person pastes into a bug report.

A folder appears complete or not at all: it is written beside its place, under a name that begins with a dot, and
renamed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from fuzz.repro import driver_cpp, plain
from fuzz.repro.cpp import repro_cpp
from fuzz.repro.python import repro_py
from fuzz.repro.readme import explain, readme
from oracles.verdict import Check, Violation
from subjects import scenario as scenarios
from subjects import trace as stored
from subjects.scenario import Scenario
from subjects.trace import Trace

VERSION = 1
Kind = Literal["fault", "contract", "crash", "misuse"]

_NEW, _OLD = ".new-", ".old-"
_TRACES = {"subject": "trace.msgpack", "reference": "reference.msgpack"}


class BadFinding(ValueError):
    """A folder that is no finding of this version; the message says which file and why."""


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


def slug_of(signature: str) -> str:
    """A name for files: lower case, digits and dashes, at most 80 characters."""
    return re.sub(r"[^a-z0-9_]+", "-", signature.lower()).strip("-")[:80].strip("-") or "finding"


def write(finding: Finding, traces: Mapping[str, Trace], folder: Path, *, replace: bool = False) -> Path:
    """Write `folder/<slug>` atomically and return it. `traces` has "subject", and "reference" where the check has one.

    A folder that is there is replaced only with `replace`; a kill in the middle of that is put right by `sweep`.

    Raises:
        FileExistsError: the folder is there and `replace` is not given.
        OSError: it cannot be written.
    """
    finding = _finite(finding)
    target = folder / finding.slug
    if target.exists() and not replace:
        raise FileExistsError(f"{target} exists")
    folder.mkdir(parents=True, exist_ok=True)
    # what mkdtemp makes is for its owner alone, and a finding is to be read
    scratch = Path(tempfile.mkdtemp(prefix=f"{_NEW}{finding.slug}-", dir=folder))
    try:
        scratch.chmod(0o755)
        for name, data in files(finding, traces).items():
            (scratch / name).write_bytes(data)
        if target.exists():
            old = folder / f"{_OLD}{finding.slug}"
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            scratch.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return target


def files(finding: Finding, traces: Mapping[str, Trace]) -> dict[str, bytes]:
    """Contents of a finding's folder by file name."""
    subject, reference = traces["subject"], traces.get("reference")
    text = {
        "finding.json": _json(finding),
        "scenario.json": scenarios.dumps(finding.scenario),
        "original.json": scenarios.dumps(finding.original),
        "environment.json": _json(finding.environment),
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
    path = folder / "finding.json"
    try:
        text = path.read_bytes()
        raw = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            raise BadFinding(f"{path}: not a finding of version {VERSION}")
        finding = msgspec.json.decode(text, type=Finding, strict=True)
        for name, ours in (("scenario.json", finding.scenario), ("original.json", finding.original)):
            if scenarios.loads((folder / name).read_bytes()).key() != ours.key():
                raise BadFinding(f"{folder / name} is not the program of {path.name}")
    except BadFinding:
        raise
    except OSError as e:
        raise BadFinding(f"{folder} is not a finding: {Path(str(e.filename)).name}: {e.strerror}") from None
    except ValueError as e:
        raise BadFinding(f"{path}: {e}") from None
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


def sweep(folder: Path) -> list[Path]:
    """Put right what a kill left in a folder of findings: half-written ones go, one that was being replaced comes back.

    Only for a folder that nobody writes into. Returns the findings that came back.
    """
    back: list[Path] = []
    for old in folder.glob(f"{_OLD}*"):
        target = folder / old.name[len(_OLD) :]
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, target)
            back.append(target)
    for new in folder.glob(f"{_NEW}*"):
        shutil.rmtree(new, ignore_errors=True)
    return sorted(back)


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2).decode() + "\n"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [k for k, _ in pairs]
    if len(set(keys)) != len(keys):
        raise BadFinding(f"duplicate key {next(k for k in keys if keys.count(k) > 1)!r}")
    return dict(pairs)


def _finite(finding: Finding) -> Finding:
    """JSON has no NaN: a size that is none is stored as the largest number."""
    v = finding.violation
    if v is None:
        return finding
    sizes = {name: getattr(v, name) for name in ("error", "band", "nmse")}
    fixed = {name: x if math.isfinite(x) else sys.float_info.max for name, x in sizes.items()}
    return msgspec.structs.replace(finding, violation=msgspec.structs.replace(v, **fixed))
