"""Folders of findings: each appears complete or not at all, and is read back strictly.

A folder is written beside its place, under a name that begins with a dot, and renamed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fuzz import programs
from fuzz.programs import AnyProgram
from oracles.verdict import Violation
from subjects.scenario import no_duplicates

VERSION = 1
NAME = "finding.json"

_NEW, _OLD = ".new-", ".old-"
_T = TypeVar("_T")


class BadFinding(ValueError):
    """A folder that is no finding of this version; the message says which file and why."""


def slug_of(signature: str) -> str:
    """A name for files: lower case, digits and dashes, at most 80 characters."""
    return re.sub(r"[^a-z0-9_]+", "-", signature.lower()).strip("-")[:80].strip("-") or "finding"


def put(files: Mapping[str, bytes], folder: Path, slug: str, *, replace: bool = False) -> Path:
    """Write `folder/<slug>` atomically and return it. Scripts (`.sh`) may be run.

    A folder that is there is replaced only with `replace`; a kill in the middle of that is put right by `sweep`.

    Raises:
        FileExistsError: the folder is there and `replace` is not given.
        OSError: it cannot be written.
    """
    target = folder / slug
    if target.exists() and not replace:
        raise FileExistsError(f"{target} exists")
    folder.mkdir(parents=True, exist_ok=True)
    # what mkdtemp makes is for its owner alone, and a finding is to be read
    scratch = Path(tempfile.mkdtemp(prefix=f"{_NEW}{slug}-", dir=folder))
    try:
        scratch.chmod(0o755)
        for name, data in files.items():
            (scratch / name).write_bytes(data)
            if name.endswith(".sh"):
                (scratch / name).chmod(0o755)
        if target.exists():
            old = folder / f"{_OLD}{slug}"
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


def to_json(value: Any) -> str:
    """A value as a file for people too: stable, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2).decode() + "\n"


def decode(folder: Path, kind: type[_T]) -> _T:
    """What finding.json holds, strictly. Raises BadFinding, OSError or ValueError; see `told`."""
    path = folder / NAME
    text = path.read_bytes()
    raw = json.loads(text, object_pairs_hook=no_duplicates)
    if not isinstance(raw, dict) or raw.get("version") != VERSION:
        raise BadFinding(f"{path}: not a finding of version {VERSION}")
    return msgspec.json.decode(text, type=kind, strict=True)


def check(folder: Path, scenario: AnyProgram, original: AnyProgram) -> None:
    """Raises BadFinding, OSError or ValueError (see `told`) where the programs beside finding.json are not these."""
    for name, ours in (("scenario.json", scenario), ("original.json", original)):
        if programs.loads((folder / name).read_bytes()).key() != ours.key():
            raise BadFinding(f"{folder / name} is not the program of {NAME}")


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Whatever goes wrong with reading a finding, as BadFinding."""
    try:
        yield
    except BadFinding:
        raise
    except OSError as e:
        raise BadFinding(f"{folder} is not a finding: {Path(str(e.filename)).name}: {e.strerror}") from None
    except ValueError as e:
        raise BadFinding(f"{folder / NAME}: {e}") from None


def finite(violation: Violation) -> Violation:
    """JSON has no NaN: a size that is none is stored as the largest number."""
    sizes = {name: getattr(violation, name) for name in ("error", "band", "nmse")}
    fixed = {name: x if math.isfinite(x) else sys.float_info.max for name, x in sizes.items()}
    return msgspec.structs.replace(violation, **fixed)
