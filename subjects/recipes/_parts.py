"""Tensor sets and metadata that several architectures share.

Shapes are numpy shapes (the reverse of ggml's ne): a matrix is (outputs, inputs). `gain` scales the matrices that
write into the residual stream (attn_output, ffn_down, ssm_out): it sets how strongly the history of a sequence moves
its logits. Functions that make a layer's tensors take the block number `b` first.
"""

from typing import Any

from subjects.recipes import Metadata, Tensors

VOCAB = 64
CONTEXT = 512

_SCALAR_TYPES = {bool: "bool", int: "u32", float: "f32", str: "str"}
_ARRAY_TYPES = {bool: "bools", int: "i32s", float: "f32s", str: "strs"}


def metadata(arch: str, keys: dict[str, Any], *, words: bool = False) -> Metadata:
    """Return a model's metadata: the general keys, then `keys` with the prefix of the architecture.

    `words` gives the vocabulary texts (tok_0, tok_1, ...), which draft-simple compares. The GGUF type follows the
    Python type (int u32, list of int i32s, ...); a pair (type, value) names it explicitly.
    """
    entries: Metadata = [
        ["general.architecture", "str", arch],
        ["tokenizer.ggml.model", "str", "test" if words else "no_vocab"],
        [f"{arch}.vocab_size", "u32", VOCAB],
        [f"{arch}.context_length", "u32", CONTEXT],
    ]
    if words:
        entries.append(["tokenizer.ggml.tokens", "strs", [f"tok_{i}" for i in range(VOCAB)]])
    for key, value in keys.items():
        if isinstance(value, tuple):
            kind, value = value
        elif isinstance(value, list):
            kind = _ARRAY_TYPES[type(value[0])]
        else:
            kind = _SCALAR_TYPES[type(value)]
        entries.append([f"{arch}.{key}", kind, value])
    return entries


def norm(name: str, *shape: int) -> list[Any]:
    """Return a norm weight around 1; `name` is complete except for ".weight"."""
    return [f"{name}.weight", list(shape), ["around_one", 0.1]]


def matrix(name: str, *shape: int, gain: float = 1.0) -> list[Any]:
    """Return a matrix (or stack of matrices) that keeps the size of its input times `gain`."""
    return [f"{name}.weight", list(shape), ["fan_in", gain]]


def vector(name: str, n: int, std: float) -> list[Any]:
    """Return a bias-like vector; `name` is complete."""
    return [name, [n], ["normal", std]]


def embedding(width: int) -> list[Any]:
    """Return token_embd."""
    return ["token_embd.weight", [VOCAB, width], ["normal", 1.0]]


def cycle_output(width: int, multiplier: int = 5, offset: int = 3) -> list[Any]:
    """Return an output matrix under which token i leads to token 5i + 3 mod VOCAB, or another such map.

    That map is one cycle through the whole vocabulary, so greedy text does not fall into a short loop as it does under
    a random matrix, and history shows as steps that leave the cycle. The factor gives logits a spread of about 3.
    """
    return ["output.weight", [VOCAB, width], ["cycle", "token_embd.weight", multiplier, offset, 0.6]]


def ends(width: int, *, final_norm: str = "output_norm") -> Tensors:
    """Return token_embd, the final norm and a cycle output."""
    return [embedding(width), norm(final_norm, width), cycle_output(width)]


def attention(
    b: int, width: int, *, heads: int = 2, head: int = 16, qk_norm: bool = False, gated: bool = False, gain: float = 1.0
) -> Tensors:
    """Return q, k, v and output of full multi-head attention; `gated` doubles q's rows (query and gate)."""
    rows = heads * head
    tensors = [
        matrix(f"blk.{b}.attn_q", rows * (2 if gated else 1), width),
        matrix(f"blk.{b}.attn_k", rows, width),
        matrix(f"blk.{b}.attn_v", rows, width),
        matrix(f"blk.{b}.attn_output", width, rows, gain=gain),
    ]
    if qk_norm:
        tensors += [norm(f"blk.{b}.attn_q_norm", head), norm(f"blk.{b}.attn_k_norm", head)]
    return tensors


def ffn(b: int, width: int, hidden: int, *, gate: bool = True, gain: float = 1.0) -> Tensors:
    """Return a feed-forward network: up and down, and the gate unless `gate` is false."""
    tensors = [
        matrix(f"blk.{b}.ffn_up", hidden, width),
        matrix(f"blk.{b}.ffn_down", width, hidden, gain=gain),
    ]
    return [*tensors, matrix(f"blk.{b}.ffn_gate", hidden, width)] if gate else tensors


def experts(b: int, width: int, hidden: int, *, count: int = 2, shared_gate: bool = True, gain: float = 1.0) -> Tensors:
    """Return a mixture of `count` experts and a shared one, the latter scaled by a gate of its own if `shared_gate`."""
    tensors = [
        matrix(f"blk.{b}.ffn_gate_inp", count, width),
        matrix(f"blk.{b}.ffn_gate_exps", count, hidden, width),
        matrix(f"blk.{b}.ffn_up_exps", count, hidden, width),
        matrix(f"blk.{b}.ffn_down_exps", count, width, hidden, gain=gain),
        matrix(f"blk.{b}.ffn_gate_shexp", hidden, width),
        matrix(f"blk.{b}.ffn_up_shexp", hidden, width),
        matrix(f"blk.{b}.ffn_down_shexp", width, hidden, gain=gain),
    ]
    return [*tensors, matrix(f"blk.{b}.ffn_gate_inp_shexp", width)] if shared_gate else tensors


def decay(name: str, *shape: int) -> list[Any]:
    """Return a state decay (ssm_a): negative and small, so that a state remembers tens of tokens."""
    return [name, list(shape), ["negative_abs", 0.2, 0.1, 0.02]]


MAMBA2_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 1,
}
"""The metadata that belongs to `mamba2` with its default sizes."""


def mamba2(
    b: int, width: int, *, inner: int = 64, state: int = 16, heads: int = 4, kernel: int = 4, gain: float = 1.0
) -> Tensors:
    """Return a Mamba-2 mixer with one group."""
    channels = inner + 2 * state
    return [
        matrix(f"blk.{b}.ssm_in", inner + channels + heads, width),
        matrix(f"blk.{b}.ssm_conv1d", channels, kernel),
        # The loader calls this bias optional, but a file without it crashes at context creation.
        vector(f"blk.{b}.ssm_conv1d.bias", channels, 0.1),
        vector(f"blk.{b}.ssm_dt.bias", heads, 0.5),
        decay(f"blk.{b}.ssm_a", heads, 1),
        [f"blk.{b}.ssm_d", [heads, 1], ["around_one", 0.1]],
        norm(f"blk.{b}.ssm_norm", 1, inner),
        matrix(f"blk.{b}.ssm_out", width, inner, gain=gain),
    ]


DELTA_NET_KEYS = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 32,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 2,
    "ssm.group_count": 2,
}
"""The metadata that belongs to `delta_net` with its default sizes."""


def delta_net(
    b: int,
    width: int,
    *,
    inner: int = 32,
    state: int = 16,
    heads: int = 2,
    kernel: int = 4,
    fused_beta_alpha: bool = False,
    gain: float = 1.0,
) -> Tensors:
    """Return a gated delta net with as many key heads as value heads; beta and alpha in one tensor or in two."""
    channels = 3 * inner
    tensors = [
        matrix(f"blk.{b}.attn_qkv", channels, width),
        matrix(f"blk.{b}.attn_gate", inner, width),
        matrix(f"blk.{b}.ssm_conv1d", channels, kernel),
        vector(f"blk.{b}.ssm_dt.bias", heads, 0.5),
        decay(f"blk.{b}.ssm_a", heads),
        norm(f"blk.{b}.ssm_norm", state),
        matrix(f"blk.{b}.ssm_out", width, inner, gain=gain),
    ]
    if fused_beta_alpha:
        return [*tensors, matrix(f"blk.{b}.ssm_ba", 2 * heads, width)]
    return [*tensors, matrix(f"blk.{b}.ssm_beta", heads, width), matrix(f"blk.{b}.ssm_alpha", heads, width)]
