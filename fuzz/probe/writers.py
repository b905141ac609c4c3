"""The results as text: a table for people and for pull requests, one line a run for spreadsheets, and everything."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuzz.probe.measure import ABOUT, Compared, Error
from fuzz.probe.table import Cell, Report

_LOG_LINES = 8
_FAILED = {"failed": "failed", "crashed": "CRASHED", "hung": "HUNG", "left out": "not run"}

CSV_COLUMNS = (
    "route", "position", "driver_state", "outcome", "why", "restored_by",
    "hidden_max_abs", "hidden_nmse", "draft_vectors", "draft_vectors_changed", "draft_top1_changed",
    "drafted", "accepted_before", "accepted_after",
    "target_max_abs", "target_nmse", "target_rows", "target_rows_changed", "target_top1_changed",
    "target_bytes", "draft_bytes", "driver_bytes", "save_ms", "restore_ms",
)  # fmt: skip


def number(x: float, digits: int = 3) -> str:
    """A number as people read it."""
    return "0" if x == 0 else f"{x:.{digits}g}"


def csv_text(report: Report) -> str:
    """A line for every route, position and driver state; fields that do not apply are empty."""
    out = io.StringIO()
    w = csv.writer(out, lineterminator="\n")
    w.writerow(CSV_COLUMNS)
    for c in report.cells:
        x = c.compared
        hidden = (x.hidden.max_abs, x.hidden.nmse) if x and x.hidden else (None, None)
        drafts = (x.vectors, x.changed, x.top1) if x and x.vectors else (None, None, None)
        taken = (x.drafted, x.before, x.accepted) if x and x.drafted else (None, None, None)
        target = (x.target.max_abs, x.target.nmse, x.rows, x.target_changed, x.target_top1) if x else (None,) * 5
        state = "" if c.state == "only" else c.state
        sizes = (c.target_bytes, c.draft_bytes, c.driver_bytes)
        w.writerow(
            [c.route, c.position, state, c.outcome, c.why, c.how, *hidden, *drafts, *taken, *target, *sizes]
            + [None if t is None else f"{t:.4f}" for t in (c.save_ms, c.restore_ms)]
        )
    return out.getvalue()


def json_text(report: Report) -> str:
    """Everything; an infinite error (rows that are missing or no numbers) is null."""
    return json.dumps(json.loads(msgspec.json.encode(report)), indent=2) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# The table


class _Row:
    """A route at a position: the run without the driver's state and the run with it, or the only one."""

    def __init__(self, report: Report, route: str, position: int):
        self.route, self.position = route, position
        only = report.cell(route, position, "only")
        self.out = only or report.cell(route, position, "left out")
        self.back = None if only else report.cell(route, position, "restored")

    @property
    def cells(self) -> list[Cell]:
        return [c for c in (self.out, self.back) if c]

    def both(self, show: Callable[[Compared], str]) -> list[str]:
        """What each run says; a run that failed says so."""
        return [show(c.compared) if c.compared else _FAILED[c.outcome] for c in self.cells]

    def pair(self, show: Callable[[Compared], str]) -> str:
        """Both runs, with a slash between."""
        return "/".join(self.both(show))

    def size(self, driven: bool, terse: bool) -> str:
        c = next((c for c in self.cells if c.target_bytes is not None), None)
        if c is None:
            return ""
        sizes = [c.target_bytes, c.draft_bytes, c.driver_bytes] if driven else [c.target_bytes]
        return "+".join(_size(n or 0, terse) for n in sizes)

    def time(self, name: str) -> str:
        found = [t for c in self.cells if (t := getattr(c, name)) is not None]
        return number(sum(found) / len(found)) if found else ""


def _error(e: Error | None, terse: bool = False) -> str:
    if e is None:
        return ""
    return number(e.max_abs) if terse or e.max_abs == 0 else f"{number(e.max_abs)} ({number(e.nmse, 2)})"


def _columns(report: Report, terse: bool) -> list[tuple[str, Callable[[_Row], str]]]:
    """Titles and what goes below; only what there is something of."""
    seen = [c.compared for c in report.cells if c.compared]
    driven = report.driven
    columns: list[tuple[str, Callable[[_Row], str]]] = [
        ("route", lambda r: r.route),
        ("pos" if terse else "position", lambda r: str(r.position)),
    ]
    if any(x.hidden for x in seen):
        columns += [
            ("hidden error, left out", lambda r: r.both(lambda x: _error(x.hidden))[0]),
            ("hidden error, restored", lambda r: r.both(lambda x: _error(x.hidden))[1]),
        ]
    if any(x.vectors for x in seen):
        columns += [
            (
                "logits changed" if terse else "draft logits changed",
                lambda r: _of(r, lambda x: x.changed, lambda x: x.vectors),
            ),
            ("top-1 changed", lambda r: r.pair(lambda x: str(x.top1))),
        ]
    if any(x.drafted for x in seen):
        columns.append(("accepted", _accepted))
    columns.append(("target logits", lambda r: _target(r, terse)))
    if not driven:
        columns.append(("top-1 changed", lambda r: _of(r, lambda x: x.target_top1, lambda x: x.rows)))
    columns += [
        ("bytes", lambda r: r.size(driven, terse)),
        ("save ms", lambda r: r.time("save_ms")),
        ("restore ms", lambda r: r.time("restore_ms")),
    ]
    return columns


def _of(r: _Row, n: Callable[[Compared], int], m: Callable[[Compared], int]) -> str:
    total = next((m(c.compared) for c in r.cells if c.compared), None)
    return r.pair(lambda x: str(n(x))) + ("" if total is None else f" of {total}")


def _accepted(r: _Row) -> str:
    known = next((c.compared for c in r.cells if c.compared), None)
    if known is None:
        return r.pair(lambda x: "")
    return f"{known.before}→{r.pair(lambda x: str(x.accepted))} of {known.drafted}"


def _target(r: _Row, terse: bool) -> str:
    """The worse of both runs: the target knows nothing of the driver, so that they are the same."""
    known = [c.compared.target for c in r.cells if c.compared]
    return _error(max(known, key=lambda e: e.max_abs), terse) if known else r.pair(lambda x: "")


def _size(n: int, terse: bool) -> str:
    if not terse or n < 100_000:
        return str(n)
    power = min((len(str(n)) - 1) // 3, 4)
    return f"{number(n / 1000**power)}{' kMGT'[power]}"


def rows(report: Report, *, terse: bool = False) -> tuple[list[str], list[list[str]]]:
    """The table as titles and fields. terse: to be narrow enough for a terminal."""
    columns = _columns(report, terse)
    lines = [_Row(report, route, p) for route in report.routes for p in report.positions]
    return [title for title, _ in columns], [[show(r) for _, show in columns] for r in lines]


def troubles(report: Report) -> list[str]:
    """Runs that went wrong in a way that no number shows, equal ones together."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for c in report.cells:
        if c.why:
            what = c.why if c.outcome == "ok" else f"{_FAILED[c.outcome]}: {c.why}"
            found.setdefault(("" if c.state == "only" else c.state, what), []).append(c)
    lines = []
    for (state, what), cells in found.items():
        at = dict.fromkeys(str(c.position) for c in cells)
        words = [", ".join(dict.fromkeys(c.route for c in cells)), f"position {', '.join(at)}"]
        lines.append(f"{'; '.join([*words, f'driver state {state}'] if state else words)}: {what}")
    return lines


def legend(report: Report) -> list[str]:
    """How to read the table, in sentences."""
    seen = [c.compared for c in report.cells if c.compared]
    plan = report.about
    drafts = " with a draft at each" if report.driven else ""
    lines = [
        "Position: tokens before the checkpoint. All is compared with a run that went straight on from there for "
        f"{plan['rounds']} tokens{drafts}."
    ]
    if report.driven:
        lines.append(
            "Two numbers: the driver's state left out / restored, beside target and draft memory, which both get back."
        )
    if any(x.hidden for x in seen):
        lines.append(
            "Hidden error: of the row that the first token after the restore is paired with, against the row there at "
            "the checkpoint: max abs (NMSE)."
        )
    if any(x.drafted for x in seen):
        lines.append(
            "Accepted: drafted tokens that the target's greedy decoding confirms, straight on → after the restore."
        )
    lines.append(
        "Target logits: max abs (NMSE). Bytes: target + draft + driver." if report.driven else "Errors: max abs (NMSE)."
    )
    cells, split = report.noise["cells"], report.noise["split"]
    honest = f"Honest differences here, largest: other cells {number(cells.target)} in the target's logits"
    if report.driven:
        honest += f", {number(cells.draft)} in draft logits, {number(cells.hidden)} in hidden rows"
    honest += f"; that, or the last token in a batch of its own, {number(split.target)}"
    if report.driven:
        honest += f", {number(split.draft)}, {number(split.hidden)}"
    bands = [number(n.draft_band if report.driven else n.target_band) for n in (cells, split)]
    lines.append(
        f"{honest}. A row has changed when it is off by more than 8 times that, and by more than rounding: {bands[0]}"
        + (f", or {bands[1]} for rollback, which cuts batches in other places." if bands[0] != bands[1] else ".")
    )
    return lines


def markdown(report: Report) -> str:
    """A section that can be pasted into a pull request."""
    a = report.about
    titles, lines = rows(report)
    out = [f"### State restore of {a['model']}" + (f" with {a['driver']}" if report.driven else ""), ""]
    out += [_what(report), ""]
    if lines:
        right = [":--" if i == 0 else "--:" for i in range(len(titles))]
        out += ["| " + " | ".join(x) + " |" for x in (titles, right, *lines)] + [""]
    out += [f"- {x}" for x in [*troubles(report), *(f"{r}: does not apply: {why}" for r, why in report.unfit.items())]]
    out += [f"- {x}" for x in [*legend(report), *report.notes]]
    out += ["", "Routes: " + "; ".join(f"**{r}** {ABOUT[r]}" for r in report.routes) + "."]
    if report.log:
        out += ["", "The library logged:", "", "```", *report.log[:_LOG_LINES]]
        out += [f"... {len(report.log) - _LOG_LINES} more"] if len(report.log) > _LOG_LINES else []
        out += ["```"]
    out += ["", f"`{a['command']}`"]
    return "\n".join(out) + "\n"


def _what(report: Report) -> str:
    a, f = report.about, report.facts
    memory = "hybrid" if f["hybrid"] else "recurrent" if f["recurrent"] else "window" if f["n_swa"] else "dense"
    words = [f"Model {a['model']} ({a['architecture']}, {memory} memory, {a['model_bytes']} bytes)"]
    if a["draft"]:
        words.append(f"draft {a['draft']} ({a['draft_bytes']} bytes)")
    if report.driven:
        # a draft with fewer heads than that drafts less
        less = f" (drafts {f['n_draft_max']} at most)" if f["n_draft_max"] != a["n_max"] else ""
        words.append(f"driver {a['driver']}, n_max {a['n_max']}{less}")
    p = a["params"]
    words.append(f"n_ctx {f['n_ctx']}, n_ubatch {f['n_ubatch']}, n_rs_seq {f['n_rs_seq']}")
    words.append(f"K/V {p['type_k']}, flash attention {'on' if p['flash_attn'] else 'off'}")
    words.append(f"{p['n_threads']} thread{'s' if p['n_threads'] != 1 else ''}")
    if a["n_gpu_layers"]:
        words.append(f"{a['n_gpu_layers']} layers on the GPU")
    words.append(a["prompt"])
    return "; ".join(words) + f". {a['build']}, {a['llama_cpp']}."


def show(report: Report, console: Console) -> None:
    """Print the table and what belongs to it."""
    console.print(_what(report), markup=False, highlight=False)
    titles, lines = rows(report, terse=True)
    if lines:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        for i, title in enumerate(titles):
            table.add_column(
                _narrow(title),
                justify="left" if i == 0 else "right",
                vertical="bottom",
                overflow="fold",
                no_wrap=i == 0,
            )
        before = ""
        for line in lines:
            table.add_row(Text("" if line[0] == before else line[0]), *map(_styled, line[1:]))
            before = line[0]
        console.print(table)
    for x in troubles(report):
        console.print(Text(x, style="red"))
    for route, why in report.unfit.items():
        console.print(Text(f"{route} does not apply: {why}", style="yellow"))
    for x in [*legend(report), *report.notes]:
        console.print(Text(x, style="dim"))


def _narrow(title: str) -> str:
    """A title on two lines."""
    first, _, second = title.replace("error, ", "").partition(" ")
    return f"{first}\n{second}" if second else first


def _styled(text: str) -> Text:
    return Text(text, style="bold red" if any(w in text for w in _FAILED.values()) else "")


def files(report: Report) -> Sequence[tuple[str, str]]:
    """Name and content of the text files."""
    return (("probe.md", markdown(report)), ("probe.csv", csv_text(report)), ("probe.json", json_text(report)))
