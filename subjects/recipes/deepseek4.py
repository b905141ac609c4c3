"""Raw window, compressed caches and an indexer, with rollback: the memory with the most parts.

What reaches the logits when: the ratio-4 compressor from position 3, the indexer from about 19, the ratio-128
compressor from 127. A test of the latter needs more than 128 tokens.
"""

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import VOCAB, ends, experts, matrix, metadata, norm, vector

_RATIOS = [4, 128, 0, 4, 128, 0]  # 0: raw window only, 4: compressed with indexer, 128: heavily compressed
_WIDTH = 32
_HIDDEN = 16
_HEADS = 4
_HEAD = 16
_WINDOW = 16
_Q_RANK = 16
_OUT_GROUPS = 2
_OUT_RANK = 8
_INDEXER_HEADS = 2
_INDEXER_KEY = 64  # a multiple of 64: its cache is always rotated by a Hadamard matrix of at least that size
_STREAMS = 4  # hyper-connections; the only count that loads
_GAIN = 1.0


def _hyper_connection(b: int, name: str) -> Tensors:
    outputs = 2 * _STREAMS + _STREAMS * _STREAMS
    return [
        matrix(f"blk.{b}.{name}_fn", outputs, _STREAMS * _WIDTH),
        vector(f"blk.{b}.{name}_base.weight", outputs, 0.1),
        norm(f"blk.{b}.{name}_scale", 3),
    ]


def _compressor(name: str, ratio: int, head: int) -> Tensors:
    # Ratio 4 compresses overlapping windows, which takes twice the columns.
    rows = head * (2 if ratio == 4 else 1)
    return [
        matrix(f"{name}_compressor_kv", rows, _WIDTH),
        matrix(f"{name}_compressor_gate", rows, _WIDTH),
        [f"{name}_compressor_ape.weight", [ratio, rows], ["normal", 0.3]],
        norm(f"{name}_compressor_norm", head),
    ]


def _block(b: int, ratio: int) -> Tensors:
    blk = f"blk.{b}"
    tensors = [
        norm(f"{blk}.attn_norm", _WIDTH),
        norm(f"{blk}.ffn_norm", _WIDTH),
        vector(f"{blk}.attn_sinks.weight", _HEADS, 0.1),
        matrix(f"{blk}.attn_q_a", _Q_RANK, _WIDTH),
        norm(f"{blk}.attn_q_a_norm", _Q_RANK),
        matrix(f"{blk}.attn_q_b", _HEADS * _HEAD, _Q_RANK),
        matrix(f"{blk}.attn_kv", _HEAD, _WIDTH),
        norm(f"{blk}.attn_kv_a_norm", _HEAD),
        matrix(f"{blk}.attn_output_a", _OUT_GROUPS * _OUT_RANK, _HEADS * _HEAD // _OUT_GROUPS),
        matrix(f"{blk}.attn_output_b", _WIDTH, _OUT_GROUPS * _OUT_RANK, gain=_GAIN),
        vector(f"{blk}.exp_probs_b.bias", 2, 0.1),
        *_hyper_connection(b, "hc_attn"),
        *_hyper_connection(b, "hc_ffn"),
        *experts(b, _WIDTH, _HIDDEN, shared_gate=False, gain=_GAIN),
    ]
    if ratio:
        tensors += _compressor(f"{blk}.attn", ratio, _HEAD)
    if ratio == 4:
        tensors += [
            matrix(f"{blk}.indexer.proj", _INDEXER_HEADS, _WIDTH),
            matrix(f"{blk}.indexer.attn_q_b", _INDEXER_HEADS * _INDEXER_KEY, _Q_RANK),
            *_compressor(f"{blk}.indexer", ratio, _INDEXER_KEY),
        ]
    return tensors


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    keys = metadata(
        "deepseek4",
        {
            "block_count": len(_RATIOS),
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.head_count": _HEADS,
            "attention.head_count_kv": 1,
            "attention.key_length": _HEAD,
            "attention.value_length": _HEAD,
            "rope.dimension_count": 8,
            "rope.freq_base": 1e4,
            "attention.q_lora_rank": _Q_RANK,
            "attention.sliding_window": _WINDOW,
            "attention.output_group_count": _OUT_GROUPS,
            "attention.output_lora_rank": _OUT_RANK,
            "attention.compress_ratios": ("u32s", _RATIOS),
            "attention.compress_rope_freq_base": 160000.0,
            "attention.indexer.head_count": _INDEXER_HEADS,
            "attention.indexer.key_length": _INDEXER_KEY,
            "attention.indexer.top_k": 4,
            "hyper_connection.count": _STREAMS,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hash_layer_count": 0,
            "expert_count": 2,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "expert_feed_forward_length": _HIDDEN,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "expert_gating_func": 4,
            "swiglu_clamp_exp": 10.0,
        },
    )
    tensors = [
        *ends(_WIDTH),
        matrix("output_hc_fn", _STREAMS, _STREAMS * _WIDTH),
        vector("output_hc_base.weight", _STREAMS, 0.1),
        norm("output_hc_scale", 1),
    ]
    for b, ratio in enumerate(_RATIOS):
        tensors += _block(b, ratio)
    return keys, tensors


RECIPE = Recipe(
    name="deepseek4",
    version=1,
    arch="deepseek4",
    memory="hybrid",
    rollback=True,
    can_shift=False,
    window=_WINDOW,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about="window + compressed caches + indexer; std 3.4, old token 0.77, gap 1.4 (2 %)",
    build=build,
)
