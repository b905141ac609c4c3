"""The report as a table for people and a document for machines."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from fuzz.coverage.export import Share, Side
from fuzz.coverage.measure import Column, Report


class Row(NamedTuple):
    """Lines and sides of branches of something, by column."""

    title: str
    functions: int
    shares: list[tuple[Share, Share]]


def _row(title: str, columns: list[Column], chosen: list[list[Any]]) -> Row:
    shares = [(c.measured.lines(fs), c.measured.sides(fs)) for c, fs in zip(columns, chosen, strict=True)]
    return Row(title, max((len(fs) for fs in chosen), default=0), shares)


def by_group(r: Report) -> list[Row]:
    """The functions of the list, group by group; all of them last."""
    rows = [_row(g.title, r.columns, [r.chosen(c, g.title) for c in r.columns]) for g in r.groups]
    return [*rows, _row("all functions of the list", r.columns, [r.chosen(c) for c in r.columns])]


def by_file(r: Report) -> list[Row]:
    """Whole files; all of them, and the same as llvm-cov counts it, last."""
    rows = [_row(f, r.columns, [r.of_file(c, f) for c in r.columns]) for f in r.files()]
    every = [[x for f in r.files() for x in r.of_file(c, f)] for c in r.columns]
    llvm = Row("the same, with nothing left out", 0, [r.plain_llvm(c) for c in r.columns])
    return [*rows, _row("all whole files", r.columns, every), llvm]


def percent(share: Share) -> str:
    """A share as people read it."""
    return "" if share.percent is None else f"{share.percent:.1f}"


def missed(r: Report) -> list[dict[str, Any]]:
    """Functions of the list by how many sides of their branches nothing of ours took, with each such side."""
    column = r.columns[r.union]
    found: list[dict[str, Any]] = []
    for f in r.chosen(column):
        sides = f.missed()
        if sides or not any(f.lines.values()):
            found.append(
                {
                    "function": f.name,
                    "file": f.file,
                    "line": f.first,
                    "group": r.titles[f.name],
                    "sides": len(f.sides),
                    "missed": [{"line": s.line, "condition": condition(f.texts, s), "value": s.value} for s in sides],
                }
            )
    return sorted(found, key=lambda x: (-len(x["missed"]), x["file"], x["line"]))


def condition(texts: dict[tuple[int, int, tuple[int, ...]], str], side: Side) -> str:
    """The condition of a side as it is written."""
    return texts.get((side.line, side.column, side.inner), "")


def left_out(r: Report) -> dict[str, int]:
    """Sides of the listed functions that do not count, by reason."""
    column = r.columns[r.union]
    return column.measured.left_out(r.chosen(column))


def document(r: Report) -> dict[str, Any]:
    """The one document of --json."""
    names = [c.name for c in r.columns]

    def rows(found: list[Row]) -> list[dict[str, Any]]:
        return [
            {
                "title": row.title,
                "functions": row.functions,
                "columns": {
                    n: {"lines": _pair(lines), "branches": _pair(sides)}
                    for n, (lines, sides) in zip(names, row.shares, strict=True)
                },
            }
            for row in found
        ]

    return {
        "build": r.build,
        "columns": [{"name": c.name, "about": c.about} for c in r.columns],
        "groups": rows(by_group(r)),
        "files": rows(by_file(r)),
        "left_out": left_out(r),
        "not_in_build": r.missing,
        "notes": r.notes,
        "missed": missed(r),
    }


def _pair(share: Share) -> dict[str, Any]:
    return {"hit": share.hit, "of": share.all, "percent": None if share.percent is None else round(share.percent, 2)}


def show(r: Report, console: Console) -> None:
    """Print it."""
    for title, rows, totals in (
        ("Functions that save, restore, remove, copy, shift, find slots or answer positions", by_group(r), 1),
        ("Whole files", by_file(r), 2),
    ):
        console.print(_table(title, r.columns, rows, totals))
    for c in r.columns:
        console.print(f"{c.name}: {c.about}", markup=False, highlight=False)
    for why, n in left_out(r).items():
        console.print(f"Not counted in the functions above: {n} {why}.", markup=False, highlight=False)
    for name in r.missing:
        console.print(f"Not in this build, the sources have moved: {name}", style="red", markup=False, highlight=False)
    for note in r.notes:
        console.print(note, style="yellow", markup=False, highlight=False)


def _table(title: str, columns: list[Column], rows: list[Row], totals: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("% of lines, % of branches")
    for c in columns:
        table.add_column(c.name, justify="right")
    for i, row in enumerate(rows):
        last = i >= len(rows) - totals
        cells = [f"{percent(lines):>5} {percent(sides):>5}" for lines, sides in row.shares]
        table.add_row(row.title, *cells, style="bold" if last else None, end_section=i == len(rows) - totals - 1)
    return table
