"""Text for people: lists, paragraphs, and paths of other machines left out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

WIDTH = 120


def numbered(lines: Iterable[str]) -> str:
    """From 0, as the operations of a scenario are counted everywhere."""
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines))


def bullets(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def fill(text: str, indent: str = "") -> str:
    """A paragraph of lines that fit."""
    return textwrap.fill(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def scrub(text: str) -> str:
    """Files without the folders of the machine that they are on."""
    return re.sub(r"(?<![\w.])/(?:[^\s/:]+/)+(?=(?:[\w.-]+/)?[\w.-]+\.(?:cpp|c|h|hpp|cu|gguf|so|bin)\b)", "", text)


def number(x: float) -> str:
    """Two digits, and as many noughts as it takes."""
    return f"{float(f'{x:.2g}'):,.0f}" if 10 <= x < 1e9 else f"{x:.2g}"
