"""The results as a picture: error by position on a logarithmic scale, and accepted tokens, a column for each route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fuzz.probe.table import Cell, Report

# colours that differ for colour-blind eyes and in grey
_STYLE = {
    "left out": ("#D55E00", "o", "driver state left out"),
    "restored": ("#0072B2", "s", "driver state restored"),
    "only": ("#0072B2", "s", "after the restore"),
}
_BEFORE = "#999999"
_ZERO = 1e-9
"""Where the axis shows 0: below any difference that float32 rows of ordinary size can have."""


def draw(report: Report, folder: Path) -> list[Path]:
    """Write probe.png and probe.svg; their paths. Nothing where no run has a number."""
    # slow to import, and of no use to the other verbs
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [c for c in report.cells if c.compared]
    routes = list(dict.fromkeys(c.route for c in cells))
    if not routes:
        return []
    hidden = any(c.compared and c.compared.hidden for c in cells)
    accepted = any(c.compared and c.compared.drafted for c in cells)
    lower = 1 if accepted else 0
    settings: Any = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "redraft"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(1.6 + 1.75 * max(3, len(routes)), 3.4 + 1.9 * lower), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1 + lower, len(routes), sharex=True, sharey="row", squeeze=False)
        places = range(len(report.positions))
        for column, route in enumerate(routes):
            _errors(axes[0][column], report, route, hidden)
            axes[0][column].set_title(route, fontsize=9)
            if lower:
                _accepted(axes[1][column], report, route)
            axes[-1][column].set_xticks(list(places), [str(p) for p in report.positions])
            axes[-1][column].set_xlabel("position (tokens)")
            axes[-1][column].set_xlim(-0.6, len(report.positions) - 0.4)
        axes[0][0].set_ylabel("hidden row: max abs error" if hidden else "target logits: max abs error")
        if lower:
            axes[1][0].set_ylabel("accepted tokens")
            axes[1][0].set_ylim(bottom=0)
        driver = f", {report.about['driver']}" if report.driven else ""
        figure.suptitle(f"State restore: {report.about['model']}{driver}", fontsize=11)
        handles: dict[str, Any] = {}
        for ax in axes.flat:
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
        paths = [folder / "probe.png", folder / "probe.svg"]
        figure.savefig(paths[0], dpi=150, metadata={"Software": "redraft"})
        figure.savefig(paths[1], metadata={"Date": None, "Creator": "redraft"})
    return paths


def _states(report: Report) -> list[str]:
    return ["left out", "restored"] if report.driven else ["only"]


def _value(cell: Cell | None, hidden: bool) -> float | None:
    if cell is None or cell.compared is None:
        return None
    found = cell.compared.hidden if hidden else cell.compared.target
    return None if found is None else found.max_abs


def _errors(ax: Any, report: Report, route: str, hidden: bool) -> None:
    ax.set_yscale("log")
    ax.set_ylim(_ZERO / 3, 100)
    ticks = [_ZERO, 1e-7, 1e-5, 1e-3, 1e-1, 1e1]
    ax.set_yticks(ticks, ["0", *(f"1e{round(x):+d}" for x in (-7, -5, -3, -1, 1))])
    ax.minorticks_off()
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    for k, state in enumerate(_states(report)):
        colour, marker, label = _STYLE[state]
        shift = (k - (len(_states(report)) - 1) / 2) * 0.16
        at, values = [], []
        for i, position in enumerate(report.positions):
            value = _value(report.cell(route, position, state), hidden)
            if value is not None:
                at.append(i + shift)
                values.append(min(max(value, _ZERO), 90.0))
        ax.plot(at, values, marker, color=colour, markersize=5, label=label)
        ax.vlines(at, _ZERO / 3, values, color=colour, linewidth=0.8, alpha=0.5)


def _accepted(ax: Any, report: Report, route: str) -> None:
    states = _states(report)
    width = 0.8 / (1 + len(states))
    bars: list[tuple[str, str, list[float]]] = [("straight on", _BEFORE, [])]
    bars += [(_STYLE[s][2], _STYLE[s][0], []) for s in states]
    for position in report.positions:
        found = [c.compared if (c := report.cell(route, position, s)) else None for s in states]
        known = next((x for x in found if x), None)
        for (_, _, heights), height in zip(
            bars, [known.before if known else 0, *(x.accepted if x else 0 for x in found)], strict=True
        ):
            heights.append(height)
    for k, (label, colour, heights) in enumerate(bars):
        at = [i + (k - len(states) / 2) * width for i in range(len(report.positions))]
        # the error markers' legend names the colours already
        ax.bar(at, heights, width * 0.92, color=colour, label=label if k == 0 else None)
    ax.yaxis.get_major_locator().set_params(integer=True)
