"""Prints the contract table: for each call what the caller owes, what it gets, and whether llama.h, the source or
nobody says so."""

from __future__ import annotations

import argparse

from subjects import contracts

HELP = "print the contract table"


def add(p: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    """Print."""
    print(contracts.render())
    return 0
