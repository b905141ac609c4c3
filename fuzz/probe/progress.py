"""Where a probe is: a bar on a terminal, lines elsewhere, where runs are so long that silence would be a riddle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fuzz.probe.table import Listen

LONG = 2048
"""Tokens of a run that is worth a word of its length."""


@contextmanager
def progress(console: Console, runs: int, longest: int) -> Iterator[Listen]:
    """What is to be told of each step. longest: tokens of the last position."""
    long = longest >= LONG
    if long:
        console.print(f"{runs} runs, the longest of {longest} tokens and a few more", markup=False, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=runs)
        ended = 0

        def listen(what: str, done: int) -> None:
            nonlocal ended
            ended += done
            bar.update(task, advance=done, description=what or None)
            if what and long and not console.is_terminal:
                console.print(f"{ended}/{runs} runs; {what}", markup=False, highlight=False)

        yield listen
