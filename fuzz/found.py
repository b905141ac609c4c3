"""Findings of every subject, where it does not matter of which one they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fuzz import programs
from fuzz.finding import Finding
from fuzz.folder import slug_of
from fuzz.known import KnownFault
from fuzz.server.finding import ServerFinding
from oracles.crash import crash_text
from subjects.trace import End

AnyFinding = Finding | ServerFinding


def slug(signature: str, known: KnownFault | None) -> str:
    """The name of a finding's folder."""
    # two faults may show themselves with one signature: a known one must hide neither another known one nor a new one
    identity = f"{signature}|{known.name}" if known else signature
    digest = hashlib.sha256(identity.encode()).hexdigest()[:6]
    return f"{slug_of(signature)[:64].strip('-')}-{digest}"


def summary(f: AnyFinding, path: Path) -> dict[str, Any]:
    """What is told of a finding in events and in --json."""
    size = "requests" if isinstance(f, ServerFinding) else "operations"
    return {
        "signature": f.signature,
        "title": f.title,
        "kind": f.kind,
        "oracle": f.oracle,
        "memory": f.memory,
        "known": f.known,
        "reproduced": list(f.reproduced),
        size: programs.size(f.scenario),
        "path": str(path),
    }


def size_of(told: dict[str, Any]) -> tuple[int, str]:
    """How long the program of a summary is, and what it consists of: operations, or requests to a server."""
    return (told["requests"], "request") if "requests" in told else (told["operations"], "operation")


def end_line(end: End, log: str, what: str) -> str:
    """What a crash said, with the numbers of this run: the line of a log that was told apart as `what`."""
    # the name of a signal comes from no line
    return (
        what
        if crash_text(end, "") == what
        else next((line.strip() for line in log.splitlines() if crash_text(end, line) == what), what)
    )
