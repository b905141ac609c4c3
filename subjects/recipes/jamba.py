"""Hybrid memory (Mamba-1 and attention in turn) without rollback."""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import VOCAB, attention, decay, ends, ffn, matrix, metadata, norm, vector

_BLOCKS = 4  # Mamba-1 in blocks 0 and 2, attention in 1 and 3
_WIDTH = 32
_HIDDEN = 64
_INNER = 2 * _WIDTH  # anything else aborts at load
_STATE = 16
_RANK = 8
_KERNEL = 4
_GAIN = 0.6


def _mamba1(b: int) -> Tensors:
    return [
        matrix(f"blk.{b}.ssm_in", 2 * _INNER, _WIDTH),
        matrix(f"blk.{b}.ssm_conv1d", _INNER, _KERNEL),
        vector(f"blk.{b}.ssm_conv1d.bias", _INNER, 0.1),
        matrix(f"blk.{b}.ssm_x", _RANK + 2 * _STATE, _INNER),
        norm(f"blk.{b}.ssm_dt_norm", _RANK),
        matrix(f"blk.{b}.ssm_dt", _INNER, _RANK),
        vector(f"blk.{b}.ssm_dt.bias", _INNER, 0.5),
        norm(f"blk.{b}.ssm_b_norm", _STATE),
        norm(f"blk.{b}.ssm_c_norm", _STATE),
        decay(f"blk.{b}.ssm_a", _INNER, _STATE),
        [f"blk.{b}.ssm_d", [_INNER], ["around_one", 0.1]],
        matrix(f"blk.{b}.ssm_out", _WIDTH, _INNER, gain=_GAIN),
    ]


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    keys = metadata(
        "jamba",
        {
            "block_count": _BLOCKS,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.head_count": 2,
            "attention.head_count_kv": [0, 2] * (_BLOCKS // 2),
            "ssm.conv_kernel": _KERNEL,
            "ssm.inner_size": _INNER,
            "ssm.state_size": _STATE,
            "ssm.time_step_rank": _RANK,
        },
    )
    tensors = ends(_WIDTH)
    for b in range(_BLOCKS):
        tensors += [norm(f"blk.{b}.attn_norm", _WIDTH), norm(f"blk.{b}.ffn_norm", _WIDTH)]
        tensors += attention(b, _WIDTH, gain=_GAIN) if b % 2 else _mamba1(b)
        tensors += ffn(b, _WIDTH, _HIDDEN, gain=_GAIN)
    return keys, tensors


RECIPE = Recipe(
    name="jamba",
    version=1,
    arch="jamba",
    memory="hybrid",
    rollback=False,
    can_shift=True,
    window=0,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about="Mamba-1 + attention; std 3.3, old token 0.90, gap 1.2 (3 %)",
    build=build,
)
