"""The band of honest servers, measured on runs that are none: what it is made of, what it is kept under."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from oracles.band import SAFETY
from oracles.server.band import LENGTHS, PREDICT, ServerBands, cold_flags
from subjects.scenario import ModelRef
from subjects.server.scenario import Flags, ServerScenario, Together, Turn, asked
from subjects.server.trace import End, Reply, ServerTrace

MODEL = ModelRef(recipe="llama")


class Runs:
    """A server whose answers are those of a model that counts. off: how much probabilities move with the batches;
    together: with what was sent at the same time; dies: it does."""

    def __init__(self, off: float = 0.0, together: float = 0.0, *, dies: bool = False, tie: bool = False):
        self.off, self.together, self.dies, self.tie = off, together, dies, tie
        self.seen: list[ServerScenario] = []

    def __call__(self, program: ServerScenario) -> ServerTrace:
        self.seen.append(program)
        moved = self.off if program.flags.batch != 64 else 0.0
        moved += self.together if any(isinstance(r, Together) for r in program.requests) else 0.0
        conversations: dict[int, int] = {}
        replies = []
        for i, ask in asked(program):
            assert isinstance(ask, Turn)
            length = conversations.get(ask.conv, 0) + ask.n
            numbers = range(length, length + ask.predict)
            conversations[ask.conv] = length + ask.predict
            tokens = tuple((n + (self.tie and moved > 0)) % 50 for n in numbers)
            tops = tuple(((n % 50, -0.5 + moved), ((n + 1) % 50, -0.5 - moved)) for n in numbers)
            replies.append(Reply(request=i, status=200, prompt=(1,) * length, tokens=tokens, tops=tops))
        return ServerTrace(replies=replies, end=End(how="signal") if self.dies else End())


def band(runs: Runs, flags: Flags | None = None, folder: Path | None = None) -> float | None:
    return ServerBands(runs, "build", MODEL, folder).band(flags or Flags())


def test_a_server_that_never_differs_has_the_band_of_its_numbers() -> None:
    found = band(Runs())
    assert found is not None
    assert 0 < found < 1e-5


@pytest.mark.parametrize("runs", [Runs(off=1e-3), Runs(together=1e-3)])
def test_honest_differences_make_the_band(runs: Runs) -> None:
    assert band(runs) == pytest.approx(SAFETY * 1e-3)


def test_a_near_tie_of_an_honest_server_is_no_difference_of_its_own() -> None:
    assert band(Runs(off=1e-3, tie=True)) == pytest.approx(SAFETY * 1e-3)


def test_there_is_no_band_without_an_honest_answer() -> None:
    runs = Runs(dies=True)
    bands = ServerBands(runs, "build", MODEL, None)
    assert bands.band(Flags()) is None
    # it is tried again, since the next server may live
    before = len(runs.seen)
    assert bands.band(Flags()) is None
    assert len(runs.seen) > before


def test_quantised_caches_have_wider_bands() -> None:
    small, half, eighth = (band(Runs(), Flags(flash_attn=True, type_k="f32", type_v=v)) for v in ("f32", "f16", "q8_0"))
    assert small is not None
    assert half is not None
    assert eighth is not None
    assert small < half < eighth


def test_nothing_that_is_measured_restores_anything() -> None:
    runs = Runs()
    band(runs, Flags(parallel=3, ctx=1536, checkpoints=8, spacing=4, cache_ram=8, idle_slots=True, kv_unified=True))
    assert runs.seen
    for program in runs.seen:
        f = program.flags
        assert (f.checkpoints, f.cache_ram, f.idle_slots) == (0, 0, False)
        assert program.driver is None
        assert all(isinstance(a, Turn) and not a.cache for _, a in asked(program))
    assert {a.n for p in runs.seen for _, a in asked(p) if isinstance(a, Turn)} >= {*LENGTHS}
    assert max(a.predict for p in runs.seen for _, a in asked(p)) == PREDICT


def test_a_band_is_measured_once_for_flags_that_matter_to_it(tmp_path: Path) -> None:
    runs = Runs(off=1e-3)
    first = band(runs, Flags(), tmp_path)
    once = len(runs.seen)
    same = Flags(checkpoints=8, cache_ram=8, idle_slots=True, spacing=4, similarity=50, parallel=2, ctx=1024)
    # another process reads what was written
    assert band(runs, same, tmp_path) == first
    assert len(runs.seen) == once
    assert band(runs, Flags(ubatch=8), tmp_path) == first
    assert len(runs.seen) == 2 * once


def test_a_cold_server_keeps_nothing_and_computes_alike() -> None:
    f = Flags(parallel=3, ctx=1536, batch=32, ubatch=8, checkpoints=9, spacing=4, cache_ram=8, idle_slots=True,
              similarity=50, swa_full=True, kv_unified=False, flash_attn=True, type_k="f16", type_v="q8_0")  # fmt: skip
    cold = cold_flags(f)
    assert cold == Flags(ctx=512, batch=32, ubatch=8, flash_attn=True, type_k="f16", type_v="q8_0")
    assert cold_flags(msgspec.structs.replace(f, kv_unified=True)).ctx == 1536
    assert cold_flags(cold) == cold
