"""What makes up a program of any subject: moves drawn by weight, until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fuzz.damage import Below

_Move = TypeVar("_Move")


def drawn(below: Below, moves: Sequence[tuple[_Move, int]], stops: Sequence[int], done: int) -> _Move | None:
    """The next move of a program that has `done` operations, by weight; None where it ends, which it does as likely as
    `stops` says for so many, in 1/64 of all weights."""
    total = sum(w for _, w in moves)
    stop = total * stops[min(done, len(stops) - 1)] // 64
    x = below(total + stop) - stop
    if x < 0:
        return None
    for move, w in moves:
        x -= w
        if x < 0:
            return move
    return None
