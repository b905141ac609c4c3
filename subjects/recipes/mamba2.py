"""Recurrent memory only: one state per sequence, nothing to remove positions from."""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import MAMBA2_KEYS, VOCAB, ends, mamba2, metadata, norm

_BLOCKS = 2
_WIDTH = 32
_GAIN = 1.5


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    keys = metadata(
        "mamba2",
        {
            "block_count": _BLOCKS,
            "embedding_length": _WIDTH,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-6,
            **MAMBA2_KEYS,
        },
    )
    tensors = ends(_WIDTH)
    for b in range(_BLOCKS):
        tensors += [norm(f"blk.{b}.attn_norm", _WIDTH), *mamba2(b, _WIDTH, gain=_GAIN)]
    return keys, tensors


RECIPE = Recipe(
    name="mamba2",
    version=1,
    arch="mamba2",
    memory="recurrent",
    rollback=False,
    can_shift=True,
    window=0,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about="Mamba-2 only; std 3.3, old token 0.24, gap 1.2 (3 %)",
    build=build,
)
