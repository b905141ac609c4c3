"""Which positions a state must show, by memory kind."""

from __future__ import annotations

from oracles.ledger import HalfRestored, History, State, window_need
from subjects.trace import Facts


def position_error(state: State, facts: Facts, told: tuple[int, int]) -> tuple[tuple[int, int], str] | None:
    """None when `told` = (pos_min, pos_max) is right or nothing can be said, else the expected pair and what it means
    in words.

    llama.h: pos_min "is typically non-zero only for SWA caches", and all positions in [pos_min, pos_max] are
    guaranteed to be present.
    """
    if isinstance(state, HalfRestored) or not isinstance(state, History):
        return None
    held = state.held()
    if not held:
        return None if told == (-1, -1) else ((-1, -1), "be empty, positions (-1, -1)")
    lo, hi = held[0], held[-1]
    if facts.recurrent or facts.hybrid:
        lo = hi  # one state, at the last position; a hybrid reports the larger of both minima
    elif facts.n_swa:
        # what the next token attends to must be there, as far as it was not removed; older cells may be gone
        need = window_need(held, facts.n_swa)
        if told[1] == hi and lo <= told[0] <= need:
            return None
        return (need, hi), f"hold positions up to {hi}, none below {lo}, and its window from {need} at the latest"
    if told == (lo, hi):
        return None
    return (lo, hi), f"hold positions {lo}..{hi}"
