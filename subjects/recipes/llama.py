"""Dense attention: the smallest memory there is, every cell independent."""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import VOCAB, attention, ends, ffn, metadata, norm

_BLOCKS = 2
_WIDTH = 32
_HIDDEN = 64


def _build(head: int, gain: float) -> tuple[Metadata, Tensors]:
    keys = metadata(
        "llama",
        {
            "block_count": _BLOCKS,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.head_count": 2,
            "attention.head_count_kv": 2,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": head,
        },
    )
    tensors = ends(_WIDTH)
    for b in range(_BLOCKS):
        tensors += [norm(f"blk.{b}.attn_norm", _WIDTH), norm(f"blk.{b}.ffn_norm", _WIDTH)]
        tensors += attention(b, _WIDTH, head=head, gain=gain)
        tensors += ffn(b, _WIDTH, _HIDDEN, gain=gain)
    return keys, tensors


def _recipe(name: str, head: int, gain: float, about: str) -> Recipe:
    return Recipe(
        name=name,
        version=1,
        arch="llama",
        memory="dense",
        rollback=False,
        can_shift=True,
        window=0,
        n_vocab=VOCAB,
        n_embd=_WIDTH,
        about=about,
        build=lambda: _build(head, gain),
    )


RECIPES = [
    _recipe("llama", 16, 0.9, "dense attention, head size 16; std 3.6, old token 0.94, gap 5.3 (0 %)"),
    _recipe("llama-h64", 64, 0.9, "as llama with head size 64, for q8_0 K/V; std 3.6, old token 0.61, gap 5.2 (0 %)"),
]
