"""Hybrid memory with rollback: gated delta net, attention with an indexer, hyper-connections, n-gram embeddings."""

from typing import Any

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import (
    DELTA_NET_KEYS,
    VOCAB,
    attention,
    cycle_output,
    delta_net,
    embedding,
    experts,
    matrix,
    metadata,
    norm,
)

_BLOCKS = 4  # gated delta net in blocks 0 and 2, attention in 1 and 3
_WIDTH = 32
_HIDDEN = 32
_STREAMS = 2  # hyper-connections
_LOW_RANK = 4
_INDEXER_HEADS = 2
_INDEXER_KEY = 16
_PLE_BLOCK = 0  # exactly one, and a recurrent one
_PLE_HEADS = 4  # (ngram_size - 1) * heads_per_ngram
_PLE_WIDTH = _WIDTH // _PLE_HEADS
_KERNEL = 4
_GAIN = 1.5


def _mixer(name: str) -> list[list[Any]]:
    wide = _STREAMS * _WIDTH
    return [norm(f"{name}_norm", wide), matrix(f"{name}_down", _LOW_RANK, wide), matrix(f"{name}_up", wide, _LOW_RANK)]


def _block(b: int) -> Tensors:
    wide = _STREAMS * _WIDTH
    tensors = []
    for name in (f"blk.{b}.hc_attn", f"blk.{b}.hc_ffn"):
        tensors += [*_mixer(name), matrix(f"{name}_inject", _STREAMS, wide)]
    if b % 2:
        tensors += attention(b, _WIDTH, qk_norm=True, gated=True, gain=_GAIN)
        tensors += [
            matrix(f"blk.{b}.indexer.q_proj", _INDEXER_HEADS * _INDEXER_KEY, _WIDTH),
            matrix(f"blk.{b}.indexer.k_proj", _INDEXER_KEY, _WIDTH),
            norm(f"blk.{b}.indexer.q_norm", _INDEXER_KEY),
            norm(f"blk.{b}.indexer.k_norm", _INDEXER_KEY),
        ]
    else:
        tensors += delta_net(b, _WIDTH, kernel=_KERNEL, gain=_GAIN)
    if b == _PLE_BLOCK:
        tensors += [
            matrix(f"blk.{b}.ple_key", wide, _WIDTH),
            matrix(f"blk.{b}.ple_value", _WIDTH, _WIDTH),
            *(norm(f"blk.{b}.ple_norm_{name}", wide) for name in ("key", "query", "conv")),
            matrix(f"blk.{b}.ple_conv1d", wide, _KERNEL),
        ]
    return tensors + experts(b, _WIDTH, _HIDDEN, gain=_GAIN)


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    keys = metadata(
        "qwen4exp",
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
            "expert_count": 2,
            "expert_used_count": 2,
            "expert_feed_forward_length": _HIDDEN,
            "expert_shared_feed_forward_length": _HIDDEN,
            "rope.dimension_count": 8,
            "rope.dimension_sections": [1, 1, 2, 0],
            "hyper_connection.count": _STREAMS,
            "hyper_connection.low_rank": _LOW_RANK,
            "attention.indexer.head_count": _INDEXER_HEADS,
            "attention.indexer.key_length": _INDEXER_KEY,
            # Matters once more than top_k + ratio - 1 tokens are visible.
            "attention.indexer.top_k": 8,
            "attention.compress_ratios": [4] * _BLOCKS,
            "ple.layers": [_PLE_BLOCK],
            "ple.ngram_size": 3,
            "ple.heads_per_ngram": 2,
            "ple.conv_kernel": _KERNEL,
            "ple.eos_token_id": 0,
            "embedding_length_per_layer_input": _PLE_WIDTH,
            # These three are refused with any other element type.
            "ple.layer_multipliers": ("u64s", [1, 3, 5]),
            "ple.head_offsets": ("u64s", [VOCAB * i for i in range(_PLE_HEADS)]),
            "ple.head_vocab_sizes": ("u64s", [VOCAB] * _PLE_HEADS),
            **DELTA_NET_KEYS,
        },
    )
    tensors = [
        embedding(_WIDTH),
        ["per_layer_token_embd.weight", [_PLE_HEADS * VOCAB, _PLE_WIDTH], ["normal", 1.0]],
        cycle_output(_WIDTH),
        *_mixer("output_hc"),
    ]
    for b in range(_BLOCKS):
        tensors += _block(b)
    return keys, tensors


RECIPE = Recipe(
    name="qwen4exp",
    version=1,
    arch="qwen4exp",
    memory="hybrid",
    rollback=True,
    can_shift=False,
    window=0,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about="gated delta net + indexed attention, n-gram rows; std 1.7, old token 0.41, gap 1.5 (3 %)",
    build=build,
)
