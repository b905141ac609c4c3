"""Recurrent memory with two kinds of state: the last token's rows and a matrix per head."""

from typing import Any

from subjects.recipes import Metadata, Recipe, Tensors
from subjects.recipes._parts import VOCAB, ends, matrix, metadata, norm, vector

_BLOCKS = 2
_WIDTH = 64  # also the head size: a multiple of 64 is right on AVX-512 builds too, others give wrong numbers silently
_HIDDEN = 64
_RANK = 8
_GAIN = 1.5


def _norm_with_bias(name: str) -> list[list[Any]]:
    return [norm(name, _WIDTH), vector(f"{name}.bias", _WIDTH, 0.1)]


def _block(b: int) -> Tensors:
    time, channel = f"blk.{b}.time_mix", f"blk.{b}.channel_mix"
    tensors = [*_norm_with_bias(f"blk.{b}.attn_norm"), *_norm_with_bias(f"blk.{b}.attn_norm_2")]
    # w decay, a in-context learning rate, v value residual (block 0 must have it and never reads it), g gate
    for letter, offset_std, second_std in (("w", 1.0, None), ("a", 0.1, None), ("v", 0.1, None), ("g", None, 0.71)):
        if offset_std is not None:
            tensors.append(vector(f"{time}_{letter}0.weight", _WIDTH, offset_std))
        tensors.append(matrix(f"{time}_{letter}1", _RANK, _WIDTH))
        second = ["fan_in", 1.0] if second_std is None else ["normal", second_std]
        tensors.append([f"{time}_{letter}2.weight", [_WIDTH, _RANK], second])
    # The loader insists on the inner dimensions of length 1 here.
    tensors.append([f"{time}_lerp_fused.weight", [6, 1, 1, _WIDTH], ["uniform", 0.0, 1.0]])
    tensors += [norm(f"{time}_{name}", _WIDTH) for name in ("k_k", "k_a")]
    tensors.append(vector(f"{time}_r_k.weight", _WIDTH, 0.3))
    tensors += [matrix(f"{time}_{name}", _WIDTH, _WIDTH) for name in ("key", "value", "receptance")]
    tensors.append(matrix(f"{time}_output", _WIDTH, _WIDTH, gain=_GAIN))
    tensors += _norm_with_bias(f"{time}_ln")
    tensors.append([f"{channel}_lerp_k.weight", [1, 1, _WIDTH], ["uniform", 0.0, 1.0]])
    tensors.append(matrix(f"{channel}_key", _HIDDEN, _WIDTH))
    tensors.append(matrix(f"{channel}_value", _WIDTH, _HIDDEN, gain=_GAIN))
    return tensors


def build() -> tuple[Metadata, Tensors]:
    """Return metadata and tensors."""
    keys = metadata(
        "rwkv7",
        {
            "block_count": _BLOCKS,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.head_count": 0,
            "wkv.head_size": _WIDTH,
            "attention.decay_lora_rank": _RANK,
            "attention.iclr_lora_rank": _RANK,
            "attention.value_residual_mix_lora_rank": _RANK,
            "attention.gate_lora_rank": _RANK,
        },
    )
    # Here token_embd_norm follows the embedding (in lfm2 it is the final norm).
    tensors = [*_norm_with_bias("token_embd_norm"), *ends(_WIDTH), vector("output_norm.bias", _WIDTH, 0.1)]
    for b in range(_BLOCKS):
        tensors += _block(b)
    return keys, tensors


RECIPE = Recipe(
    name="rwkv7",
    version=1,
    arch="rwkv7",
    memory="recurrent",
    rollback=False,
    can_shift=True,
    window=0,
    n_vocab=VOCAB,
    n_embd=_WIDTH,
    about="RWKV-7, token shift and matrix states; std 4.8, old token 0.49, gap 1.9 (2 %)",
    build=build,
)
