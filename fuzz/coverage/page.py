"""The report as HTML: a page of ours with the tables and what was not reached, and llvm-cov's pages of the sources."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from fuzz.coverage import assertions
from fuzz.coverage.measure import Report, Tools
from fuzz.coverage.table import Row, by_file, by_group, left_out, missed, percent

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
tr.total td { font-weight: bold; }
code { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; }
details { margin: .3em 0; }
.bad { color: #b00; }
"""


def write(r: Report, tools: Tools, profile: Path, out: Path) -> Path:
    """Write everything into `out` and give the page to begin with. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    column = r.columns[r.union]
    used = {f.file for f in r.chosen(column)} | set(r.files())
    paths = {name: path for name, path in column.measured.paths.items() if name in used}
    tools.pages(r.library, profile, sorted(paths.values()), out / "source")
    pages = {p.name.removesuffix(".html"): p.relative_to(out).as_posix() for p in (out / "source").rglob("*.html")}
    index = out / "index.html"
    index.write_text(page(r, pages.get), "utf-8")
    return index


def page(r: Report, link: Callable[[str], str | None]) -> str:
    """Our page; `link` gives the page of a source file by name, from the page's own folder."""
    about = "".join(f"<li>{escape(c.name)}: {escape(c.about)}</li>" for c in r.columns)
    out = "".join(f"<li>{n} {escape(why)}</li>" for why, n in left_out(r).items())
    trouble = [*(f"not in this build, the sources have moved: {n}" for n in r.missing), *r.notes]
    notes = "".join(f"<li class=bad>{escape(t)}</li>" for t in trouble)
    parts = [
        "<!doctype html><meta charset=utf-8><title>Coverage of llama.cpp's state code</title>",
        f"<style>{_STYLE}</style><h1>Coverage of llama.cpp's state code</h1><p>Build {escape(r.build)}</p>",
        f"<ul>{about}{notes}</ul>",
        "<h2>Functions that save, restore, remove, copy, shift, find slots or answer positions</h2>",
        _table(r, by_group(r), 1),
        "<p>A branch is one side of one condition. Not counted:</p>",
        f"<ul>{out}</ul><p>{escape(' '.join((assertions.__doc__ or '').split()))}</p>",
        "<h2>Whole files</h2>",
        _table(r, by_file(r), 2),
        f"<h2>Not taken by {escape(r.columns[r.union].name)}</h2>",
        "<p>Functions of the list, those with most sides not taken first; each opens.</p>",
        *(_function(f, link(f["file"])) for f in missed(r)),
    ]
    return "\n".join(parts) + "\n"


def _table(r: Report, rows: list[Row], totals: int) -> str:
    head = "".join(f"<th>{escape(c.name)}<br>lines %<th><br>branches %<th><br>of" for c in r.columns)
    body = []
    for i, row in enumerate(rows):
        cells = "".join(f"<td>{percent(a)}<td>{percent(b)}<td>{b.all or ''}" for a, b in row.shares)
        style = " class=total" if i >= len(rows) - totals else ""
        body.append(f"<tr{style}><td>{escape(row.title)}{cells}")
    return f"<table><tr><th>{head}{''.join(body)}</table>"


def _function(f: dict[str, Any], to: str | None) -> str:
    def line(n: int) -> str:
        return f'<a href="{escape(to)}#L{n}">{n}</a>' if to else str(n)

    sides = "".join(
        f"<li>{line(s['line'])}: <code>{escape(s['condition'])}</code> never <b>{str(s['value']).lower()}</b></li>"
        for s in f["missed"]
    )
    head = f"{len(f['missed'])} of {f['sides']}: {escape(f['function'])}, {escape(f['file'])}:{line(f['line'])}"
    return f"<details><summary>{head}</summary><ul>{sides}</ul></details>"
