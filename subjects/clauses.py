"""What the contract table is made of: a clause with its source, and the contract of one operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Says = Literal["header", "source", "silent", "spec", "spec-source", "spec-silent"]
VERDICT: dict[Says, str] = {
    "header": "llama.h says",
    "source": "the sources show, llama.h is silent",
    "silent": "llama.h is silent",
    "spec": "speculative.h says",
    "spec-source": "the sources show, speculative.h is silent",
    "spec-silent": "speculative.h is silent",
}


@dataclass(frozen=True)
class Clause:
    """One precondition or promise: its id (operation.name), what it is, where it is written, and who says it."""

    id: str
    text: str
    source: str
    says: Says


@dataclass(frozen=True)
class Contract:
    """One operation: the calls it stands for, what the caller owes, what the caller gets, and its documented forms."""

    op: str
    calls: str
    owes: tuple[Clause, ...]
    gets: tuple[Clause, ...]
    forms: tuple[str, ...]
