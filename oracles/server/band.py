"""How much honest servers differ in the probabilities that they tell, measured for a server, a model and its flags.

Three changes are honest: the prompt cut into other batches, other slots in the same batches, and tokens that were
generated one by one processed as a prompt. None of them restores anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from oracles.band import SAFETY, least_share
from oracles.server.account import hold
from oracles.store import Store, name_of
from subjects.scenario import ModelRef
from subjects.server.runner import NO_NUMBER
from subjects.server.scenario import Flags, ServerScenario, Together, Turn
from subjects.server.trace import Reply, ServerTrace

Run = Callable[[ServerScenario], ServerTrace]
LENGTHS = (24, 57, 40, 9, 90)
PREDICT = 6
VERSION = "server-1"


class Measured(msgspec.Struct):
    """error: largest honest difference. scale: largest logarithm of a probability. runs: comparisons made."""

    error: float = 0.0
    scale: float = 0.0
    runs: int = 0


def cold_flags(f: Flags) -> Flags:
    """The flags of the cold server: one slot as large, the same batches and arithmetic, and nothing kept."""
    return Flags(
        ctx=f.slot_ctx, batch=f.batch, ubatch=f.ubatch, flash_attn=f.flash_attn, type_k=f.type_k, type_v=f.type_v
    )


class ServerBands:
    """Measured bands of one server and model. run: runs a program on a server of its own, without drafting."""

    def __init__(self, run: Run, build: str, model: ModelRef, folder: Path | None):
        self._run, self._model = run, model
        self._store = Store[Measured](folder, build, model, VERSION, Measured)

    def band(self, flags: Flags) -> float | None:
        """The largest difference that counts as honest; None where no honest server answered."""
        key = msgspec.structs.replace(
            flags, checkpoints=0, spacing=0, cache_ram=0, idle_slots=False, similarity=10, parallel=2, ctx=1024
        )
        measured = self._store.get(name_of(key))
        if measured is None:
            measured = self._measure(key)
            if measured.runs:
                self._store.put(name_of(key), measured)
        if not measured.runs:
            return None
        floor = least_share(flags.type_k, flags.type_v)
        return max(floor * (measured.scale or 1.0), SAFETY * measured.error)

    def _measure(self, flags: Flags) -> Measured:
        out = Measured()
        turns = tuple(_turn(i, n) for i, n in enumerate(LENGTHS))
        cold = cold_flags(flags)
        base = self._replies(cold, turns)
        if len(base) < len(turns):
            return out  # no cold server answers: there is nothing to compare
        for batch, ubatch in ((16, 8), (512, 512)):
            other = msgspec.structs.replace(cold, batch=batch, ubatch=ubatch)
            _add(out, base, self._replies(other, turns))
        for i in range(len(turns)):
            together = Together(asks=(turns[i], turns[(i + 1) % len(turns)]))
            _add(out, [base[i], base[(i + 1) % len(turns)]], self._replies(flags, (together,)))
        for k in (1, 3, 5):
            later = tuple(
                x
                for i, n in enumerate(LENGTHS)
                for x in (_turn(i, n, predict=k), Turn(conv=i, n=0, predict=1, cache=False))
            )
            after = self._replies(cold, later)[1::2]
            _add(out, [_from(r, k) for r in base], after)
        return out

    def _replies(self, flags: Flags, requests: tuple[Turn | Together, ...]) -> list[Reply]:
        trace = self._run(ServerScenario(model=self._model, flags=flags, requests=requests))
        return trace.replies if trace.end.how == "ok" else []


def _turn(i: int, n: int, predict: int = PREDICT) -> Turn:
    return Turn(conv=i, n=n, stream=300 + i, predict=predict, cache=False)


def _from(reply: Reply, k: int) -> Reply:
    """An answer from its k-th token on."""
    return msgspec.structs.replace(reply, tokens=reply.tokens[k:], tops=reply.tops[k:])


def _add(out: Measured, base: list[Reply], other: list[Reply]) -> None:
    for a, b in zip(base, other, strict=False):
        if a.status != 200 or b.status != 200 or not a.tokens:
            continue
        found = hold(b, a, 0.0)
        out.runs += 1
        # a token that differs was a near tie, and up to it all is told
        if np.isfinite(found.error):
            out.error = max(out.error, found.error)
        out.scale = max([out.scale, *(abs(p) for row in a.tops for _, p in row if p > NO_NUMBER)])
