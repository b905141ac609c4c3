"""Prints what would be tested, and proves that it works: compiles the shim, writes a model, saves and restores in a
child. Of a build with coverage counters (`redraft build`: the one in the cache, or --build), that they move."""

from __future__ import annotations

import argparse

from fuzz import doctor
from fuzz.cli.common import add_build, add_json, add_llama_src

HELP = "show what would be tested and prove that it works"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    add_build(p)
    add_llama_src(p)
    add_json(p)


def run(args: argparse.Namespace) -> int:
    """Examine."""
    return doctor.run(args.build, args.json, args.llama_src)
