"""Hybrid memory (Mamba-2 and attention in turn) without rollback."""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import MAMBA2_KEYS, VOCAB, attention, ends, ffn, mamba2, metadata, norm

_BLOCKS = 4  # Mamba-2 in blocks 0 and 2, attention in 1 and 3
_WIDTH = 32  # half of ssm.inner_size; anything else aborts at load
_HIDDEN = 64
_GAIN = 0.7


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    keys = metadata(
        "granitehybrid",
        {
            "block_count": _BLOCKS,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.head_count": 2,
            "attention.head_count_kv": [0, 2] * (_BLOCKS // 2),
            **MAMBA2_KEYS,
        },
    )
    tensors = ends(_WIDTH)
    for b in range(_BLOCKS):
        tensors += [norm(f"blk.{b}.attn_norm", _WIDTH), norm(f"blk.{b}.ffn_norm", _WIDTH)]
        tensors += attention(b, _WIDTH, gain=_GAIN) if b % 2 else mamba2(b, _WIDTH, gain=_GAIN)
        tensors += ffn(b, _WIDTH, _HIDDEN, gain=_GAIN)
    return keys, tensors


RECIPE = Recipe(
    name="granitehybrid",
    version=1,
    arch="granitehybrid",
    memory="hybrid",
    rollback=False,
    can_shift=True,
    window=0,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about="Mamba-2 + attention; std 3.5, old token 0.45, gap 3.3 (1 %)",
    build=build,
)
