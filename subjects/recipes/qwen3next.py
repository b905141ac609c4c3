"""Hybrid memory (gated delta net and attention) with experts; unlike its sibling qwen35 without rollback."""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import DELTA_NET_KEYS, VOCAB, attention, delta_net, ends, experts, metadata, norm

_BLOCKS = 4  # gated delta net in blocks 0 and 2, attention in 1 and 3
_WIDTH = 32
_HIDDEN = 32
_GAIN = 1.0


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    keys = metadata(
        "qwen3next",
        {
            "block_count": _BLOCKS,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.head_count": 2,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "full_attention_interval": 2,
            # All experts are used: a choice that noise can flip would hide faults.
            "expert_count": 2,
            "expert_used_count": 2,
            "expert_feed_forward_length": _HIDDEN,
            "expert_shared_feed_forward_length": _HIDDEN,
            "rope.dimension_count": 8,
            **DELTA_NET_KEYS,
        },
    )
    tensors = ends(_WIDTH)
    for b in range(_BLOCKS):
        tensors += [norm(f"blk.{b}.attn_norm", _WIDTH), norm(f"blk.{b}.post_attention_norm", _WIDTH)]
        if b % 2:
            tensors += attention(b, _WIDTH, qk_norm=True, gated=True, gain=_GAIN)
        else:
            tensors += delta_net(b, _WIDTH, fused_beta_alpha=True, gain=_GAIN)
        tensors += experts(b, _WIDTH, _HIDDEN, gain=_GAIN)
    return keys, tensors


RECIPE = Recipe(
    name="qwen3next",
    version=1,
    arch="qwen3next",
    memory="hybrid",
    rollback=False,
    can_shift=True,
    window=0,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about="gated delta net + attention, experts; std 3.5, old token 0.50, gap 3.1 (1 %)",
    build=build,
)
