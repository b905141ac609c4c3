"""Lists the oracles: what each judges and what it asks to be observed. Those of llama-server begin with `server-`."""

from __future__ import annotations

import argparse
import sys

import msgspec
from rich.table import Table

from fuzz.cli.common import add_json
from fuzz.cli.common import console as open_console
from oracles.registry import ORACLES
from oracles.server.registry import ORACLES as SERVER_ORACLES

HELP = "list the oracles"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    add_json(p)


def run(args: argparse.Namespace) -> int:
    """List."""
    rows = [
        {
            "name": o.name,
            "title": o.title,
            "observes": sorted(o.observations),
            "about": " ".join((type(o).__doc__ or "").split()),
        }
        for o in ORACLES
    ]
    # llama-server is observed from outside
    rows += [
        {"name": s.name, "title": s.title, "observes": [], "about": " ".join((type(s).__doc__ or "").split())}
        for s in SERVER_ORACLES
    ]
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("name", "judges", "observes", "about"):
        table.add_column(name, overflow="fold")
    for o in rows:
        table.add_row(str(o["name"]), str(o["title"]), ", ".join(o["observes"]), str(o["about"]))
    open_console().print(table)
    return 0
