"""Lists the recipes of generated models, or writes one as a GGUF file.

redraft models
redraft models write qwen35 qwen35.gguf
redraft models write qwen35 qwen35.gguf --server      with a tokenizer and a chat template, as llama-server needs it
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.table import Table

from fuzz.cli.common import Usage, add_json
from fuzz.cli.common import console as open_console
from fuzz.models import DEFAULT
from subjects.pairs import all_pairs
from subjects.recipes import Recipe, all_recipes, get
from subjects.server.dress import dressed

HELP = "list the generated models, or write one"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    add_json(p)
    sub = p.add_subparsers(dest="what", metavar="write NAME PATH")
    w = sub.add_parser(
        "write",
        help="write a recipe's model",
        description="Writes the same bytes for the same recipe version and seed, on any machine.",
    )
    w.add_argument("name", metavar="NAME")
    w.add_argument("path", metavar="PATH", type=Path)
    w.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    w.add_argument(
        "--server",
        action="store_true",
        help="with a tokenizer and a chat template, as `fuzz --subject server` writes it: without them llama-server "
        "takes no requests",
    )


def _use(recipe: Recipe) -> str:
    """What campaigns take a recipe for: `plain`, or a side of a pair that `fuzz --driver` names."""
    if recipe.role == "plain":
        return "plain"
    return "draft" if any(p.draft == recipe.name for p in all_pairs()) else "target"


def run(args: argparse.Namespace) -> int:
    """List or write."""
    if args.what == "write":
        try:
            recipe = dressed(get(args.name)) if args.server else get(args.name)
        except KeyError as e:
            raise Usage(str(e.args[0])) from None
        try:
            recipe.write(args.path, seed=args.seed)
        except OSError as e:
            raise Usage(f"cannot write {args.path}: {e.strerror}") from None
        print(
            f"{args.path}: {recipe.name} version {recipe.version}, seed {args.seed}, {args.path.stat().st_size} bytes"
        )
        return 0
    rows = [
        {
            "name": r.name,
            "version": r.version,
            "memory": r.memory,
            "rollback": r.rollback,
            "can_shift": r.can_shift,
            "window": r.window,
            "default": r.name in DEFAULT,
            "for": _use(r),
            "about": r.about,
        }
        for r in all_recipes(drivers=True)
    ]
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return 0
    table = Table(box=None, pad_edge=False)
    for name in ("name", "memory", "rollback", "window", "for", "about"):
        table.add_column(name, no_wrap=name == "name")
    for row in rows:
        table.add_row(
            str(row["name"]),
            str(row["memory"]),
            "yes" if row["rollback"] else "",
            str(row["window"] or ""),
            "default" if row["default"] else str(row["for"]),
            str(row["about"]),
        )
    open_console().print(table)
    return 0
