"""Lists the faults known to be open upstream, with the scenario that shows each and its avoidance."""

from __future__ import annotations

import argparse
import sys

import msgspec
from rich.table import Table

from fuzz.cli.common import Usage, add_json
from fuzz.cli.common import console as open_console
from fuzz.known import BadKnown, load_all

HELP = "list the known faults"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    add_json(p)


def run(args: argparse.Namespace) -> int:
    """List."""
    try:
        faults = load_all()
    except BadKnown as e:
        raise Usage(str(e)) from None
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(faults), indent=2).decode() + "\n")
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("name", "title", "references", "scenario"):
        table.add_column(name, overflow="fold")
    for f in faults:
        table.add_row(f.name, f.title, ", ".join(f.references), f.scenario)
    open_console().print(table)
    return 0
