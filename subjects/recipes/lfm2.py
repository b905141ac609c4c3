"""Hybrid memory whose recurrent part is a short convolution, with rollback; and the same with windowed attention."""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import VOCAB, attention, ends, ffn, matrix, metadata, norm

_BLOCKS = 4  # short convolution in blocks 0 and 2, attention in 1 and 3
_WIDTH = 32
_HIDDEN = 64
_L_CACHE = 3
_GAIN = 1.0


def _build(window: int) -> tuple[Metadata, Tensors]:
    keys = metadata(
        "lfm2",
        {
            "block_count": _BLOCKS,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.layer_norm_rms_epsilon": 1e-6,
            # A scalar: with a 0 for block 0 here the head size becomes 0.
            "attention.head_count": 2,
            "attention.head_count_kv": [0, 2] * (_BLOCKS // 2),
            "shortconv.l_cache": _L_CACHE,
            **({"attention.sliding_window": window} if window else {}),
        },
    )
    tensors = ends(_WIDTH, final_norm="token_embd_norm")
    for b in range(_BLOCKS):
        tensors += [norm(f"blk.{b}.attn_norm", _WIDTH), norm(f"blk.{b}.ffn_norm", _WIDTH)]
        if b % 2:
            tensors += attention(b, _WIDTH, qk_norm=True, gain=_GAIN)
        else:
            tensors += [
                matrix(f"blk.{b}.shortconv.in_proj", 3 * _WIDTH, _WIDTH),
                matrix(f"blk.{b}.shortconv.conv", _WIDTH, _L_CACHE),
                matrix(f"blk.{b}.shortconv.out_proj", _WIDTH, _WIDTH, gain=_GAIN),
            ]
        tensors += ffn(b, _WIDTH, _HIDDEN, gain=_GAIN)
    return keys, tensors


def _recipe(name: str, window: int, about: str) -> Recipe:
    return Recipe(
        name=name,
        version=1,
        arch="lfm2",
        memory="hybrid",
        rollback=True,
        can_shift=True,
        window=window,
        n_vocab=VOCAB,
        n_embd=_WIDTH,
        about=about,
        build=lambda: _build(window),
    )


RECIPES = [
    _recipe("lfm2", 0, "short convolution + attention; std 3.5, old token 0.57, gap 1.3 (3 %)"),
    _recipe("lfm2-swa", 16, "short convolution + attention in a window of 16; std 3.5, old token 0.12, gap 1.5 (2 %)"),
]
