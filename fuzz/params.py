"""Context parameters of generated programs: mostly the strict setting, with the boundary values that matter."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.avoid import Avoider
from fuzz.state import Traits, params_broken
from subjects.scenario import ContextParams, KvType

Below = Callable[[int], int]

# (n_batch, n_ubatch); the first is the simplest
_BATCH = (
    (64, 32), (64, 64), (64, 16), (64, 8), (32, 32), (32, 16), (32, 8), (32, 6), (16, 16), (16, 8), (16, 6), (16, 4), (64, 6), (64, 4),
    (32, 2), (16, 1),
)  # fmt: skip
# (K, V, flash attention), in 1/20: F32 70 %, and flash attention in a fifth
_KV: tuple[tuple[KvType, KvType, bool], ...] = (
    *[("f32", "f32", False)] * 12, *[("f32", "f32", True)] * 2, *[("f16", "f16", False)] * 3, ("f16", "f16", True), ("bf16", "bf16", False),
    ("f16", "f32", False),
)  # type: ignore[assignment] # fmt: skip
_KV_Q8: tuple[tuple[KvType, KvType, bool], ...] = (
    *_KV, ("q8_0", "f32", False), ("q8_0", "q8_0", True), ("q8_0", "q8_0", True), ("f16", "q8_0", True),
)  # type: ignore[assignment] # fmt: skip
# rare switches, in 1/20: (embeddings, threads, offload)
_SWITCH = (*[(False, 1, False)] * 15, (True, 1, False), (True, 1, True), (False, 1, True), (False, 2, False), (False, 2, True))
_N_SEQ = (1, 2, 2, 2, 3, 3, 4, 4)


def draw_params(below: Below, traits: Traits, avoid: Avoider | None) -> ContextParams:
    """Parameters for a new context; never ones that the contract or an avoidance rules out."""
    n_rs = (0, 1, 2, 3, 4, 4)[below(6)] if traits.rollback or below(16) == 1 else 0
    n_batch, n_ubatch = _BATCH[below(len(_BATCH))]
    # n_ubatch <= n_rs_seq + 1 aborts (known): about 4 % of the programs are enough to find it
    small_ok = traits.rollback and n_rs > 0 and below(12) == 11
    if traits.rollback and n_rs and (n_ubatch <= n_rs + 1) != small_ok:
        n_ubatch = max(1, n_rs + 1 - below(2)) if small_ok else (n_rs + 2 + below(2))
        n_batch = max(n_batch, n_ubatch)
    kv = _KV_Q8 if traits.q8 else _KV
    type_k, type_v, flash = kv[below(len(kv))]
    embeddings, threads, offload = _SWITCH[below(len(_SWITCH))]
    params = ContextParams(
        n_batch=n_batch, n_ubatch=n_ubatch, n_seq_max=_N_SEQ[below(len(_N_SEQ))], n_rs_seq=n_rs, kv_unified=below(2) == 1,
        type_k=type_k, type_v=type_v, flash_attn=flash, embeddings=embeddings, n_threads=threads, offload_kqv=offload,
        swa_full=bool(traits.window) and below(5) == 4,
    )  # fmt: skip
    assert not params_broken(params, traits)
    return avoid.params(params, traits) if avoid is not None else params


def draw_other(below: Below, params: ContextParams, traits: Traits, avoid: Avoider | None) -> ContextParams:
    """Parameters for a reopened context: mostly the same but for one or two, so that restoring into it stays meaningful."""
    new = draw_params(below, traits, avoid)
    keep = below(3)
    if keep == 0:  # other batches only: every blob must still fit
        new = _with(params, n_batch=new.n_batch, n_ubatch=new.n_ubatch, n_rs_seq=new.n_rs_seq)
    elif keep == 1:  # other sequences
        new = _with(params, n_seq_max=new.n_seq_max, kv_unified=not params.kv_unified)
        if not params_broken(new, traits) and avoid is not None:
            new = avoid.params(new, traits)
    return new


def _with(params: ContextParams, **changes: object) -> ContextParams:
    import msgspec

    return msgspec.structs.replace(params, **changes)
