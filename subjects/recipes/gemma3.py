"""Dense attention with a sliding window: two caches, one that forgets."""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import VOCAB, attention, ends, ffn, metadata, norm

_BLOCKS = 6
_PERIOD = 3  # every third block is full attention, so this gives two of them
_WIDTH = 32
_HIDDEN = 64
_WINDOW = 16
_GAIN = 0.6  # at 2.0 the honest split noise is 1.2e-3, a hundred times as much


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    keys = metadata(
        "gemma3",
        {
            "block_count": _BLOCKS,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.head_count": 2,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": _WINDOW,
            "attention.sliding_window_pattern": _PERIOD,
            "rope.dimension_count": 16,
            "rope.freq_base": 1e4,
        },
    )
    tensors = ends(_WIDTH)
    for b in range(_BLOCKS):
        tensors += [norm(f"blk.{b}.{name}", _WIDTH) for name in ("attn_norm", "ffn_norm")]
        # These norms set the size of what a block adds to the residual stream.
        tensors += [
            [f"blk.{b}.{name}.weight", [_WIDTH], ["sum", ["const", _GAIN], ["normal", 0.1]]]
            for name in ("post_attention_norm", "post_ffw_norm")
        ]
        tensors += attention(b, _WIDTH, qk_norm=True)
        tensors += ffn(b, _WIDTH, _HIDDEN)
    return keys, tensors


RECIPE = Recipe(
    name="gemma3",
    version=1,
    arch="gemma3",
    memory="window",
    rollback=False,
    can_shift=True,
    window=_WINDOW,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about=(
        "window of 16 in blocks 0, 1, 3, 4, full attention in 2, 5; honest split noise 2e-5, an old token "
        "moves logits by 1.1"
    ),
    build=build,
)
