"""The list of functions whose coverage counts (functions.txt).

The list has groups (`[title]`), `#` comments, and a function's name on each other line: qualified, without parameters;
`*` stands for anything but a colon. A lambda or a local class belongs to the function around it, overloads to one name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("functions.txt")


class BadList(ValueError):
    """A list that cannot be read; the message names the line."""


@dataclass(frozen=True)
class Group:
    """Some functions of the list under one title."""

    title: str
    patterns: tuple[str, ...]


def load(path: Path = LIST) -> list[Group]:
    """The groups of a list. Raises BadList."""
    groups: list[Group] = []
    seen: set[str] = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        if text.startswith("["):
            if not text.endswith("]") or not text[1:-1].strip():
                raise BadList(f"{path.name}:{number}: a title is written [like this]")
            groups.append(Group(text[1:-1].strip(), ()))
        elif not groups:
            raise BadList(f"{path.name}:{number}: {text} stands before the first title")
        elif text in seen:
            raise BadList(f"{path.name}:{number}: {text} is listed twice")
        else:
            seen.add(text)
            groups[-1] = Group(groups[-1].title, (*groups[-1].patterns, text))
    return groups


def assign(groups: Iterable[Group], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The title for each name that the list has, and the patterns that no name fits: the sources have moved.

    A name that several patterns fit belongs to the first.
    """
    titles: dict[str, str] = {}
    missing: list[str] = []
    for group in groups:
        for pattern in group.patterns:
            like = re.compile(re.escape(pattern).replace(r"\*", "[^:]*"))
            fit = [n for n in names if like.fullmatch(n)]
            if not fit:
                missing.append(pattern)
            for name in fit:
                titles.setdefault(name, group.title)
    return titles, missing
