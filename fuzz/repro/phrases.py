"""Small pieces of sentences that operations are told with."""

from __future__ import annotations

from collections.abc import Iterable

from subjects.scenario import ON_DEVICE, PARTIAL
from subjects.trace import Row


def flags_text(flags: int) -> str:
    """Names of state flags, as llama.h writes them without their long prefix."""
    names = [name for bit, name in ((PARTIAL, "PARTIAL_ONLY"), (ON_DEVICE, "ON_DEVICE")) if flags & bit]
    rest = flags & ~(PARTIAL | ON_DEVICE)
    return " | ".join(names + ([hex(rest)] if rest else [])) or "0"


def count(n: int, noun: str, form: str = "") -> str:
    """`1 token`, `2 tokens`. form: of the number, `,` for thousands."""
    return f"{n:{form}} {noun}{'' if n == 1 else 's'}"


def ordinal(n: int) -> str:
    """`1st`, `2nd`, `11th`."""
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def listed(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def span(first: int, last: int) -> str:
    """`position 3` or `positions 3..5`."""
    return f"position {first}" if first == last else f"positions {first}..{last}"


def rows_text(rows: list[Row]) -> str:
    """`16 tokens into sequence 0 (positions 0..15)`, for each sequence of a batch."""
    by_seq: dict[int, list[int]] = {}
    for r in rows:
        by_seq.setdefault(r.seq, []).append(r.pos)
    parts = [f"{count(len(p), 'token')} into sequence {s} ({span(min(p), max(p))})" for s, p in by_seq.items()]
    return " and ".join(parts) if parts else "an empty batch"
