"""llama-server's flags of generated programs: named sets for a campaign's parts, and draws around them."""

from __future__ import annotations

import random

import msgspec

from fuzz.damage import Below
from fuzz.server.fit import PAD, crowded
from fuzz.traits import Traits
from subjects.scenario import DriverParams, KvType
from subjects.server.scenario import Flags

replace = msgspec.structs.replace
PALETTE = 5

FLAG_SETS: dict[str, Flags] = {
    "plain": Flags(),
    "checkpoints": Flags(checkpoints=32, batch=64, ubatch=16),
    "few-checkpoints": Flags(checkpoints=2, spacing=16, batch=32, ubatch=8),
    "ram-cache": Flags(parallel=2, checkpoints=8, spacing=4, cache_ram=8, idle_slots=True),
    "unified": Flags(parallel=3, kv_unified=True, checkpoints=8, cache_ram=1, idle_slots=True, ubatch=16),
    "swa-full": Flags(swa_full=True, parallel=2, checkpoints=8, batch=32, ubatch=32),
    "flash": Flags(flash_attn=True, type_k="f16", type_v="f16", checkpoints=8, spacing=8, cache_ram=8),
    "small-batch": Flags(batch=16, ubatch=4, checkpoints=8, spacing=4),
}
"""the server starts with each of them on every kind of memory"""

# (batch, ubatch); the first is the simplest
_BATCH = ((64, 32), (64, 16), (32, 32), (32, 8), (16, 16), (16, 4), (8, 8), (64, 8), (32, 16), (16, 8))
# (checkpoints, spacing), by how often
_CHECKPOINTS = ((32, 0), (8, 0), (8, 4), (2, 0), (1, 0), (3, 16), (32, 64), (4, 8), (0, 0))
# (K, V, flash attention)
_Kv = tuple[KvType, KvType, bool]
_STRICT: list[_Kv] = [("f32", "f32", False)]
_FLASH: list[_Kv] = [("f32", "f32", True), ("f32", "f32", True), ("f16", "f16", True), ("f16", "f16", False)]
_Q8: list[_Kv] = [("q8_0", "q8_0", True), ("f16", "q8_0", True), ("q8_0", "f32", False), ("q8_0", "f16", True)]
_KV = tuple(_STRICT * 12 + _FLASH)


def flag_set(name: str, traits: Traits) -> Flags:
    """A named set for a model: with `flash`, V is quantised where the size of the model's heads allows it. Raises
    KeyError."""
    flags = FLAG_SETS[name]
    return replace(flags, type_v="q8_0") if name == "flash" and traits.q8 else flags


def draw_flags(below: Below, traits: Traits, driver: DriverParams | None = None) -> Flags:
    """Flags with which the server starts on this model."""
    parallel = (1, 2, 1, 3, 1, 2)[below(6)]
    unified = parallel > 1 and below(3) == 2
    batch, ubatch = _BATCH[below(len(_BATCH))]
    # the server dies at its first request (known): seldom is enough
    if driver is not None and crowded(Flags(batch=batch, ubatch=ubatch), driver, traits.rollback) and below(4):
        ubatch = min(batch, 2 * (driver.n_max + 1))
    checkpoints, spacing = _CHECKPOINTS[below(len(_CHECKPOINTS))]
    cache_ram = (0, 8, 1, 0)[below(4)]
    kv = (*_KV, *(_Q8 if traits.q8 else ()))
    type_k, type_v, flash = kv[below(len(kv))]
    return Flags(
        parallel=parallel,
        ctx=2 * PAD if unified else PAD * max(parallel, 2),
        batch=batch,
        ubatch=ubatch,
        checkpoints=checkpoints,
        spacing=spacing,
        cache_ram=cache_ram,
        idle_slots=cache_ram > 0 and below(2) == 1,
        similarity=(10, 10, 10, 50, 0)[below(5)],
        swa_full=traits.window > 0 and below(6) == 5,
        kv_unified=unified,
        flash_attn=flash,
        type_k=type_k,
        type_v=type_v,
    )


def draw_driver(below: Below, base: DriverParams) -> DriverParams:
    """A driver as the server sets it up; how long drafts are is left alone for the ngram kinds (`fuzz.drivers.gen`)."""
    learns = base.kind.startswith("ngram")
    n_max = base.n_max if learns or below(3) else 1 + below(base.n_max)
    return replace(
        base,
        n_max=n_max,
        n_min=0 if learns or below(6) else 1 + below(n_max),
        p_min=0.0 if learns or below(6) else (0.2, 0.5, 0.8)[below(3)],
        backend_sampling=base.kind in ("draft-mtp", "draft-eagle3") and below(6) == 5,
    )


def palette(
    traits: Traits, base: DriverParams | None, seed: int, count: int = PALETTE
) -> tuple[tuple[Flags, DriverParams | None], ...]:
    """The few flags and drivers that a slice of programs shares, so that cold servers are met again.

    One more with a driver on a memory that keeps earlier states: a micro-batch without room for a draft, with which the
    server is dead (known) before it costs anything.
    """
    rnd = random.Random(seed)

    def below(n: int) -> int:
        return rnd.randrange(n) if n > 1 else 0

    out: list[tuple[Flags, DriverParams | None]] = []
    for _ in range(count):
        driver = draw_driver(below, base) if base else None
        out.append((draw_flags(below, traits, driver), driver))
    if base is not None and crowded(Flags(ubatch=1), base, traits.rollback):
        flags, driver = out[-1]
        assert driver is not None
        out.append((replace(flags, ubatch=min(driver.n_max + 1, flags.batch)), driver))
    return tuple(out)
