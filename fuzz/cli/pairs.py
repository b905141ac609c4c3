"""Lists the pairs of target and draft that programs with a speculative driver run on, with what was measured of them.

redraft pairs
redraft fuzz --driver qwen35-mtp
"""

from __future__ import annotations

import argparse
import sys

import msgspec
from rich.table import Table

from fuzz.cli.common import add_json
from fuzz.cli.common import console as open_console
from subjects.pairs import SAMPLES, all_pairs

HELP = "list the pairs of target and draft"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    add_json(p)


def run(args: argparse.Namespace) -> int:
    """List."""
    rows = [
        {
            "name": p.name,
            "driver": p.kind,
            "target": p.target,
            "draft": p.draft,
            "n_max": p.n_max,
            "offers_state": p.offers_state,
            "about": p.about,
            "measured": [
                {"seed": m.seed, "accepted": list(m.accepted), "hidden": m.hidden, "memory": m.memory}
                for m in p.measured
            ],
        }
        for p in all_pairs()
    ]
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("name", "driver", "target", "draft", "accepted", "hidden", "memory"):
        table.add_column(name, no_wrap=name == "name", overflow="fold")
    about = Table(box=None, pad_edge=False)
    about.add_column("name", no_wrap=True)
    about.add_column("about")
    for pair in all_pairs():
        m = pair.measured[0] if pair.measured else None
        table.add_row(
            pair.name,
            pair.kind,
            pair.target,
            pair.draft or "",
            "/".join(map(str, m.accepted)) if m else "",
            "" if m is None or m.hidden is None else str(m.hidden),
            "" if m is None or m.memory is None else str(m.memory),
        )
        about.add_row(pair.name, pair.about)
    out = open_console()
    out.print(table)
    out.print(
        f"\naccepted: rounds of 80 that took 0, 1, ... drafts. hidden, memory: drafts of {SAMPLES} that change with "
        "another sequence's hidden row, or draft memory, put in.",
        highlight=False,
    )
    out.print()
    out.print(about)
    return 0
