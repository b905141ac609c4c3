"""Coverage over time as a picture: a panel for each target, edges against minutes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuzz.journal import TargetProgress

_LINE = "#0072B2"


def draw(targets: Mapping[str, TargetProgress], seconds: float, path: Path) -> bool:
    """Write the picture; False where no target has a curve. seconds: how long the campaign ran."""
    # slow to import, and of no use to the other verbs
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {name: t for name, t in targets.items() if t.curve}
    if not curves:
        return False
    settings: Any = {"font.size": 9}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(1.0 + 2.4 * len(curves), 2.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(curves), squeeze=False)[0]
        for ax, (name, t) in zip(axes, curves.items(), strict=True):
            minutes = [at / 60 for at, _ in t.curve] + [seconds / 60]
            ax.step(minutes, [edges for _, edges in t.curve] + [t.edges], where="post", color=_LINE)
            ax.set_title(name, fontsize=9)
            ax.set_xlabel("minutes")
            ax.set_xlim(left=0)
            ax.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes[0].set_ylabel("edges")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, metadata={"Software": "redraft"})
    return True
