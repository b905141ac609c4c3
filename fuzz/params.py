"""Context parameters of generated programs: mostly the strict setting, with the boundary values that matter."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fuzz.avoid import Avoider
from fuzz.state import Traits, params_broken
from subjects.scenario import ContextParams, KvType

Below = Callable[[int], int]
_Kv = tuple[KvType, KvType, bool]

# (n_batch, n_ubatch); the first is the simplest
_BATCH = (
    (64, 32), (64, 64), (64, 16), (64, 8), (32, 32), (32, 16), (32, 8), (32, 6),
    (16, 16), (16, 8), (16, 6), (16, 4), (64, 6), (64, 4), (32, 2), (16, 1),
)  # fmt: skip
# (K, V, flash attention), about 1/20 each: F32 in 70 %, and flash attention in a fifth
_STRICT: list[_Kv] = [("f32", "f32", False)]
_FLASH: list[_Kv] = [("f32", "f32", True)]
_F16: list[_Kv] = [("f16", "f16", False)]
_RARE: list[_Kv] = [("f16", "f16", True), ("bf16", "bf16", False)]
_MIXED: list[_Kv] = [("f16", "f32", False)]
_Q8: list[_Kv] = [("q8_0", "f32", False), ("q8_0", "q8_0", True), ("q8_0", "q8_0", True), ("f16", "q8_0", True)]
_KV = tuple(_STRICT * 12 + _FLASH * 3 + _F16 * 3 + _RARE)
# rare switches, 1/20 each: (embeddings, threads, offload)
_SWITCH = (
    *[(False, 1, False)] * 16,
    (True, 1, False),
    (True, 1, True),
    (False, 1, True),
    (False, 2, True),  # no more: two threads on a busy machine take seven times as long as one
)
_N_SEQ = (1, 2, 2, 2, 3, 3, 4, 4)


def draw_params(below: Below, traits: Traits, avoid: Avoider | None) -> ContextParams:
    """Parameters for a new context; never ones that the contract or an avoidance rules out."""
    n_rs = (0, 1, 2, 3, 4, 4)[below(6)] if traits.rollback or below(16) == 1 else 0
    n_batch, n_ubatch = _BATCH[below(len(_BATCH))]
    # n_ubatch <= n_rs_seq + 1 aborts (known): a few programs in a hundred are enough to find it
    small = traits.rollback and n_rs > 0 and below(16) == 15
    if traits.rollback and n_rs and (n_ubatch <= n_rs + 1) != small:
        n_ubatch = max(1, n_rs + 1 - below(2)) if small else n_rs + 2 + below(2)
        n_batch = max(n_batch, n_ubatch)
    kv = (*_KV, *(_MIXED if traits.mixed_kv else ()), *(_Q8 if traits.q8 else ()))
    type_k, type_v, flash = kv[below(len(kv))]
    embeddings, threads, offload = _SWITCH[below(len(_SWITCH))]
    params = ContextParams(
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_seq_max=_N_SEQ[below(len(_N_SEQ))],
        n_rs_seq=n_rs,
        kv_unified=below(2) == 1,
        type_k=type_k,
        type_v=type_v,
        flash_attn=flash,
        swa_full=bool(traits.window) and below(5) == 4,
        offload_kqv=offload,
        n_threads=threads,
        embeddings=embeddings,
    )
    assert not params_broken(params, traits)
    return avoid.params(params, traits) if avoid is not None else params


def draw_other(below: Below, params: ContextParams, traits: Traits, avoid: Avoider | None) -> ContextParams:
    """Parameters for a reopened context: mostly near the old ones, so that restoring into it stays meaningful."""
    new = draw_params(below, traits, avoid)
    match below(3):
        case 0:  # other batches only: every blob must still fit
            new = msgspec.structs.replace(params, n_batch=new.n_batch, n_ubatch=new.n_ubatch, n_rs_seq=new.n_rs_seq)
        case 1:  # other sequences
            new = msgspec.structs.replace(params, n_seq_max=new.n_seq_max, kv_unified=not params.kv_unified)
        case _:
            pass
    return avoid.params(new, traits) if avoid is not None else new
