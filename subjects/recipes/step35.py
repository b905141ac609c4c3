"""Chained heads: three NextN blocks behind the trunk, one for each drafted token, in the target's own file."""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import VOCAB, attention, ends, ffn, metadata, norm

_TRUNK = 2
_HEADS = 3
_WIDTH = 32
_HIDDEN = 64
_WINDOW = 32
_GAIN = 0.8
# Dials of the draft, as in qwen35. With seed 0, rounds that accepted 0/1/2/3, drafts of 32 that another hidden row and
# another memory change (see subjects.pairs): 24/21/12/23, 21, 28 as it is; 15/12/9/44, 21, 12 with gain 1.0;
# 4/8/21/47, 12, 21 with noise 1.0; 55/18/7/0, 32, 28 with noise 3.0.
_NEXTN_ATTENTION_GAIN = 3.0
_NEXTN_NOISE = 1.5


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    blocks = _TRUNK + _HEADS
    keys = metadata(
        "step35",
        {
            "block_count": blocks,
            "nextn_predict_layers": _HEADS,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "expert_feed_forward_length": _HIDDEN,  # wanted of a dense model too
            "attention.head_count": 2,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": _WINDOW,
            "attention.sliding_window_pattern": [b > 0 for b in range(blocks)],
            "rope.dimension_count": 16,
            "rope.freq_base": 1e4,
            "rope.freq_base_swa": 1e4,
        },
    )
    tensors = ends(_WIDTH)
    for b in range(blocks):
        is_head = b >= _TRUNK
        tensors += [norm(f"blk.{b}.attn_norm", _WIDTH), norm(f"blk.{b}.ffn_norm", _WIDTH)]
        tensors += attention(b, _WIDTH, qk_norm=True, gain=_NEXTN_ATTENTION_GAIN if is_head else _GAIN)
        tensors += ffn(b, _WIDTH, _HIDDEN, gain=_GAIN)
        if is_head:
            # Input is [embedding of the token | hidden row]: the identity lets the token through.
            eh_proj = ["sum", ["eye", 1.0, 0.0], ["fan_in", _NEXTN_NOISE]]
            tensors.append([f"blk.{b}.nextn.eh_proj.weight", [_WIDTH, 2 * _WIDTH], eh_proj])
            tensors += [norm(f"blk.{b}.nextn.{name}", _WIDTH) for name in ("enorm", "hnorm", "shared_head_norm")]
    return keys, tensors


RECIPE = Recipe(
    name="step35",
    version=1,
    arch="step35",
    memory="window",
    rollback=False,
    can_shift=False,
    window=_WINDOW,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about=("window of 32 in block 1, full attention in 0, three NextN blocks; std 3.7, old token 0.51, gap 6.2 (0 %)"),
    build=build,
    role="driver",
)
