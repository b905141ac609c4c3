"""Drafts that read the inputs of three of the target's blocks, and are one position behind the target.

Embeddings and output matrix come from the same random streams as those of llama and qwen35, so a draft belongs to a
target that was written with its seed.
"""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import VOCAB, ends, matrix, metadata, norm

_WIDTH = 32
_HIDDEN = 64
# Dials: one head as wide as the model, queries and keys nearly _LOOK times the embedding of the token. A large _LOOK
# makes attention look at its own position and copy its token (accepted often, blind for the memory), a small one
# spreads it over the memory. _COPY is what attention adds to the residual stream, and _ROW is the size of the hidden
# row there and beside the embedding. With qwen35 and seed 0, rounds that accepted 0/1/2/3, drafts of 32 that another
# hidden row and another memory change: 36/24/10/10, 14, 16 as it is; 12/21/18/29, 2, 3 with _LOOK 0.8; 63/14/3/0, 29,
# 30 with _LOOK 0.5; 21/32/9/18, 6, 11 with _ROW 0.4; 38/26/11/5, 22, 15 with _ROW 0.8. norm_before_residual false
# leaves the row in the stream at its full size: 31/39/7/3, 21, 14 at best (_LOOK 0.8, _ROW 1.0).
_LOOK = 0.7
_COPY = 1.5
_ROW = 0.6
_NOISE = 0.1


def _build(taps: list[int], hidden_gain: float) -> tuple[Metadata, Tensors]:
    keys = metadata(
        "eagle3",
        {
            "block_count": 1,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.head_count": 1,
            "attention.head_count_kv": 1,
            "attention.key_length": _WIDTH,
            "attention.value_length": _WIDTH,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": _WIDTH,
            "rope.freq_base": 1e4,
            "target_layers": taps,
            "target_hidden_size": _WIDTH,
            "norm_before_residual": True,
        },
    )
    look = ["sum", ["eye", _LOOK, 0.0], ["fan_in", _NOISE]]
    tensors = ends(_WIDTH)
    tensors += [
        matrix("fc", _WIDTH, 3 * _WIDTH, gain=hidden_gain),
        norm("blk.0.attn_norm", _WIDTH),
        ["blk.0.attn_norm_2.weight", [_WIDTH], ["sum", ["const", _ROW], ["normal", 0.1 * _ROW]]],
        # Input is [embedding of the token | hidden row].
        ["blk.0.attn_q.weight", [_WIDTH, 2 * _WIDTH], look],
        ["blk.0.attn_k.weight", [_WIDTH, 2 * _WIDTH], look],
        ["blk.0.attn_v.weight", [_WIDTH, 2 * _WIDTH], ["sum", ["eye", 1.0, 0.0], ["fan_in", _NOISE]]],
        ["blk.0.attn_output.weight", [_WIDTH, _WIDTH], ["eye", _COPY]],
        norm("blk.0.ffn_norm", _WIDTH),
        matrix("blk.0.ffn_gate", _HIDDEN, _WIDTH),
        matrix("blk.0.ffn_up", _HIDDEN, _WIDTH),
        matrix("blk.0.ffn_down", _WIDTH, _HIDDEN, gain=0.3),
    ]
    return keys, tensors


def _recipe(name: str, taps: list[int], hidden_gain: float, about: str) -> Recipe:
    return Recipe(
        name=name,
        version=1,
        arch="eagle3",
        memory="dense",
        rollback=False,
        can_shift=True,
        window=0,
        n_vocab=VOCAB,
        n_embd=_WIDTH,
        about=about,
        build=lambda: _build(taps, hidden_gain),
        role="driver",
    )


RECIPES = [
    _recipe("eagle3-llama", [0, 1, 1], 1.0, "draft of llama: one block, reads the inputs of blocks 0, 1, 1"),
    _recipe("eagle3-qwen35", [1, 2, 3], 1.0, "draft of qwen35: one block, reads the inputs of blocks 1, 2, 3"),
]
