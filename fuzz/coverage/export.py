"""What `llvm-cov export` says, as functions with lines and sides of branches that count.

A *side* is one way out of one condition. What is compiled several times (templates, functions in headers) counts once,
with the hits of all. What does not count is said by `fuzz.coverage.assertions`; how much that is, is kept and printed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.coverage import assertions
from oracles.names import plain

FAILING = "failing sides of assertions"
UNREADABLE = "sides of assertions that could not be told apart"
DEBUG = "sides in blocks that only log for LLAMA_..._DEBUG"


class BadExport(ValueError):
    """Not what llvm-cov 14 or newer exports; the message says what is missing."""


class Side(NamedTuple):
    """One way out of a condition. `line`, `column`: where it is written, or where the macro is used that it is in.
    `inner`: where in the macro, and the how manieth there. `text`: the condition."""

    line: int
    column: int
    inner: tuple[int, ...]
    value: bool


@dataclass
class Function:
    """A function with the lambdas and overloads that go by its name, in one file."""

    name: str
    file: str
    lines: dict[int, int] = field(default_factory=dict)
    """executions by line, of those that have code"""
    sides: dict[Side, int] = field(default_factory=dict)
    """executions by side, of those that count"""
    texts: dict[tuple[int, int, tuple[int, ...]], str] = field(default_factory=dict)
    """the conditions, as they are written"""
    out: dict[str, set[Side]] = field(default_factory=dict)
    """sides that do not count, by reason"""

    @property
    def first(self) -> int:
        """The first line with code."""
        return min(self.lines, default=0)

    def missed(self) -> list[Side]:
        """Sides that were never taken, in the order of the source."""
        return sorted(s for s, n in self.sides.items() if not n)


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    hit: int = 0
    all: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(self.hit + other.hit, self.all + other.all)

    @property
    def percent(self) -> float | None:
        """None of nothing."""
        return 100 * self.hit / self.all if self.all else None


@dataclass
class Measured:
    """Coverage of a library, by file name and function."""

    functions: dict[tuple[str, str], Function]
    paths: dict[str, str]
    """files by name"""
    whole: dict[str, tuple[Share, Share]]
    """lines and sides of whole files as llvm-cov counts them, with nothing left out"""

    def lines(self, chosen: Iterable[Function]) -> Share:
        """Lines of some functions; what two of them share counts once."""
        by_line: dict[tuple[str, int], int] = {}
        for f in chosen:
            by_line.update({(f.file, n): count for n, count in f.lines.items()})
        return Share(sum(1 for n in by_line.values() if n), len(by_line))

    @staticmethod
    def sides(chosen: Iterable[Function]) -> Share:
        """Sides of branches of some functions."""
        total = Share()
        for f in chosen:
            total += Share(sum(1 for n in f.sides.values() if n), len(f.sides))
        return total

    def left_out(self, chosen: Iterable[Function]) -> dict[str, int]:
        """How many sides do not count, by reason."""
        total: dict[str, int] = defaultdict(int)
        for f in chosen:
            for why, sides in f.out.items():
                total[why] += len(sides)
        return dict(total)


def read(
    document: Mapping[str, Any],
    wanted: Callable[[str], bool],
    demangle: Callable[[list[str]], list[str]],
    source: Callable[[str], list[str]] | None = None,
) -> Measured:
    """What an export says of the files that are wanted.

    document: of `llvm-cov export -format=text`. wanted: whether a file, by its name without folders, is looked at.
    demangle: names of functions as people write them. source: the lines of a file, by path. Raises BadExport.
    """
    sources = _Sources(source or _lines)
    try:
        data = document["data"][0]
        files = [f for f in data["files"] if wanted(Path(f["filename"]).name)]
        records = [r for r in data["functions"] if r["regions"] and wanted(Path(r["filenames"][0]).name)]
        counts = {Path(f["filename"]).name: _line_counts(f["segments"]) for f in files}
        paths = {Path(f["filename"]).name: f["filename"] for f in files}
        whole = {
            Path(f["filename"]).name: (_share(f["summary"]["lines"]), _share(f["summary"]["branches"])) for f in files
        }
        names = _names(records, demangle)
        found: dict[tuple[str, str], Function] = {}
        for record, name in zip(records, names, strict=True):
            file = Path(record["filenames"][0]).name
            f = found.setdefault((file, name), Function(name, file))
            _add(f, record, counts.get(file, {}), sources)
    except (KeyError, IndexError, TypeError) as e:
        raise BadExport(f"this is no export of llvm-cov: {type(e).__name__} {e}") from None
    return Measured(found, paths, whole)


def _share(summary: Mapping[str, int]) -> Share:
    return Share(summary["covered"], summary["count"])


def _lines(path: str) -> list[str]:
    return Path(path).read_text("utf-8", "replace").splitlines()


def _line_counts(segments: Iterable[list[Any]]) -> dict[int, int]:
    """Executions by line, as llvm-cov shows them: the largest of the regions that begin on a line, or of the one that
    goes on. Lines without code are not there."""
    by_line: dict[int, list[list[Any]]] = defaultdict(list)
    for s in segments:
        by_line[s[0]].append(s)
    found: dict[int, int] = {}
    before: list[Any] | None = None
    for line in range(min(by_line, default=1), max(by_line, default=0) + 1):
        here = by_line.get(line, [])
        starts = [s for s in here if s[3] and s[4] and not s[5]]
        skipped = bool(here) and not here[0][3] and here[0][4]
        going_on = before is not None and before[3]
        if starts or any(s[3] and s[4] for s in here) or (going_on and not skipped):
            count = before[2] if before is not None and going_on else 0
            found[line] = max([count, *(s[2] for s in starts)]) if starts else count
        if here:
            before = here[-1]
    return found


def _extent(record: Mapping[str, Any]) -> tuple[int, int]:
    mine = [r for r in record["regions"] if r[5] == 0]
    return min(r[0] for r in mine), max(r[2] for r in mine)


def _names(records: list[Mapping[str, Any]], demangle: Callable[[list[str]], list[str]]) -> list[str]:
    """The name that each record goes by. One of a lambda or a local class goes by that of the function around it."""
    # a function that only its file sees has the file's name before it
    mangled = [r["name"].replace(";", ":").rsplit(":", 1)[-1] for r in records]
    readable = demangle(mangled)
    local = [m.startswith("_ZZ") for m in mangled]
    names = [plain(n) for n in readable]
    outer: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for r, name, inside in zip(records, names, local, strict=True):
        if not inside:
            outer[r["filenames"][0]].append((*_extent(r), name))
    for i, (r, inside) in enumerate(zip(records, local, strict=True)):
        if inside:
            first, last = _extent(r)
            around = [o for o in outer[r["filenames"][0]] if o[0] <= first and last <= o[1]]
            names[i] = min(around, key=lambda o: o[1] - o[0])[2] if around else names[i]
    return names


def _add(f: Function, record: Mapping[str, Any], counts: Mapping[int, int], sources: _Sources) -> None:
    path = record["filenames"][0]
    first, last = _extent(record)
    debug = sources.debug(path)
    f.lines.update({n: c for n, c in counts.items() if first <= n <= last and n not in debug})
    expanded = {r[6]: r for r in record["regions"] if r[7] == 1}
    by_place: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    by_expansion: dict[int, list[list[int]]] = defaultdict(list)
    for b in record["branches"]:
        by_place[(b[6], *b[:4])].append(b)
        by_expansion[b[6]].append(b)
    failing: dict[int, set[bool] | None] = {}
    for n, branches in by_expansion.items():
        if n in expanded:
            failing |= _failing(expanded[n], branches, record["filenames"], sources)
    for branches in by_place.values():
        for number, b in enumerate(branches):
            line, column, inner = _site(b, expanded)
            place = (line, column, (*inner, number))
            f.texts[place] = _text(sources.lines(path), b, line, column)
            for value, count in ((True, b[4]), (False, b[5])):
                side = Side(*place, value)
                why = ""
                if line in debug:
                    why = DEBUG
                elif id(b) in failing:
                    fails = failing[id(b)]
                    why = UNREADABLE if fails is None else FAILING if value in fails else ""
                if why:
                    f.out.setdefault(why, set()).add(side)
                else:
                    f.sides[side] = f.sides.get(side, 0) + count


def _failing(
    region: list[int], branches: list[list[int]], filenames: list[str], sources: _Sources
) -> dict[int, set[bool] | None]:
    """For an assertion's branches, by identity: which sides fail it, None where that cannot be told. Empty for another
    macro."""
    lines = sources.lines(filenames[region[5]])
    if lines[region[0] - 1][region[1] - 1 : region[3] - 1] != assertions.ASSERTION:
        return {}
    sides = assertions.failing(assertions.argument(lines, region[0], region[1]), len(branches))
    return {id(b): None if sides is None else sides[i] for i, b in enumerate(branches)}


def _site(b: list[int], expanded: Mapping[int, list[int]]) -> tuple[int, int, tuple[int, ...]]:
    """Line and column in the function itself of a branch, or of the macro that it is in, and the way on from there."""
    way, n = [(b[0], b[1])], b[6]
    while n in expanded:
        r = expanded[n]
        way.append((r[0], r[1]))
        n = r[5]
    return *way[-1], tuple(x for at in way[-2::-1] for x in at)


def _text(lines: list[str], b: list[int], line: int, column: int) -> str:
    """A condition as it is written; of one in a macro, the use of the macro."""
    if (b[0], b[1]) != (line, column):
        return lines[line - 1][column - 1 :].strip()
    if b[0] == b[2]:
        return lines[line - 1][column - 1 : b[3] - 1]
    return " ".join([lines[line - 1][column - 1 :].strip(), *(x.strip() for x in lines[line : b[2]])])


class _Sources:
    """Lines of sources, each read once."""

    def __init__(self, read: Callable[[str], list[str]]):
        self._read = read
        self._kept: dict[str, tuple[list[str], set[int]]] = {}

    def _file(self, path: str) -> tuple[list[str], set[int]]:
        if path not in self._kept:
            lines = self._read(path)
            self._kept[path] = lines, assertions.debug_lines(lines)
        return self._kept[path]

    def lines(self, path: str) -> list[str]:
        """All lines of a file."""
        return self._file(path)[0]

    def debug(self, path: str) -> set[int]:
        """The numbers of those that only log for debugging."""
        return self._file(path)[1]
