"""Speculative drivers as subjects: one small interface, two implementations.

`native` is the real `common_speculative_*` of the llama.cpp under test, `reference` our own MTP in Python over
llama_cpp. Both draft with a draft context beside the target's; both show what goes into that context and what comes
out of it (Tap), which is where a wrong restore shows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from subjects.trace import Row, Tap, TapRow

__all__ = ["DraftAsk", "Driver", "Tap", "TapRow"]


class DraftAsk(NamedTuple):
    """One sequence that is to draft: `last` is the token at `pos0`, which the target has not seen yet, `prompt` all
    before it. At most `n_max` tokens where it is positive.
    """

    seq: int
    pos0: int
    last: int
    n_max: int
    prompt: Sequence[int]


class Driver(Protocol):
    """A speculative driver between two contexts. Sequence ids are below the number that it was made for."""

    n_max: int
    """the longest draft, after the driver's own limits"""

    def process(self, rows: Sequence[Row]) -> bool:
        """The target has just decoded these rows (contiguous and ascending for each sequence). False: it failed."""

    def draft(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """Draft for several sequences in one call. What it leaves in the draft's memory from pos0 on is the caller's
        to remove."""

    def accept(self, seq: int, n: int) -> None:
        """The target has taken the first `n` tokens of the sequence's last draft."""

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """A new generation of the sequence begins behind this prompt, which was processed."""

    def state(self, seq: int) -> bytes | None:
        """What the driver offers of a sequence's state, None where it offers nothing."""

    def restore(self, seq: int, blob: bytes) -> None:
        """Put back what `state` gave. A refusal shows in the log, if at all: there is no return value."""

    def take(self) -> list[Tap]:
        """The decodes of the draft context since the last call."""

    def log(self) -> list[str]:
        """Warnings and errors since the last call, a line each."""

    def close(self) -> None:
        """Free the driver; its contexts are the caller's."""
