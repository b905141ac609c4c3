"""Dense attention: the smallest memory there is, every cell independent.

llama-words and llama-draft are a target and its small draft for draft-simple, which compares the texts of their tokens.
They belong together when written with one seed: embeddings and the cycle of the output matrix are the same then.
llama-loop walks in short circles, for the ngram drivers, which draft what came before.
"""

from typing import Any

from subjects.recipes import Metadata, Recipe, Role, Tensors
from subjects.recipes._parts import VOCAB, attention, cycle_output, embedding, ffn, metadata, norm

_BLOCKS = 2
_WIDTH = 32
_HIDDEN = 64
_GAIN = 0.9
# Dials of the draft: its gain makes drafts depend on its memory, the noise on its output makes it disagree with the
# target now and then. With seed 0, rounds that accepted 0/1/2/3 and drafts of 32 that another memory changes (see
# subjects.pairs): 22/17/20/21, 17 as it is; 15/14/13/38, 12 with gain 0.9; 12/3/3/62, 9 with noise 0.3; 62/12/3/3, 31
# with noise 1.2.
_DRAFT_GAIN = 1.2
_DRAFT_NOISE = 0.6
# Token i leads to 17i + 8, which makes eight circles of 8 tokens, and the gain lets the text leave them now and then.
_LOOP = (17, 8)
_LOOP_GAIN = 1.5


def _build(
    head: int,
    *,
    blocks: int = _BLOCKS,
    gain: float = _GAIN,
    words: bool = False,
    noise: float = 0.0,
    step: tuple[int, int] = (5, 3),
) -> tuple[Metadata, Tensors]:
    keys = metadata(
        "llama",
        {
            "block_count": blocks,
            "embedding_length": _WIDTH,
            "feed_forward_length": _HIDDEN,
            "attention.head_count": 2,
            "attention.head_count_kv": 2,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": head,
        },
        words=words,
    )
    name, shape, cycle = cycle_output(_WIDTH, *step)
    output = ["sum", cycle, ["normal", noise]] if noise else cycle
    tensors = [embedding(_WIDTH), norm("output_norm", _WIDTH), [name, shape, output]]
    for b in range(blocks):
        tensors += [norm(f"blk.{b}.attn_norm", _WIDTH), norm(f"blk.{b}.ffn_norm", _WIDTH)]
        tensors += attention(b, _WIDTH, head=head, gain=gain)
        tensors += ffn(b, _WIDTH, _HIDDEN, gain=gain)
    return keys, tensors


def _recipe(name: str, about: str, head: int = 16, role: Role = "plain", **build: Any) -> Recipe:
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
        build=lambda: _build(head, **build),
        role=role,
    )


RECIPES = [
    _recipe("llama", "dense attention, head size 16; std 3.6, old token 0.94, gap 5.3 (0 %)"),
    _recipe("llama-h64", "as llama with head size 64, for q8_0 K/V; std 3.6, old token 0.61, gap 5.2 (0 %)", head=64),
    _recipe("llama-words", "as llama with texts for its tokens", role="driver", words=True),
    _recipe(
        "llama-draft",
        "draft of llama-words: one block",
        role="driver",
        blocks=1,
        gain=_DRAFT_GAIN,
        words=True,
        noise=_DRAFT_NOISE,
    ),
    _recipe(
        "llama-loop",
        "as llama, in circles of 8 tokens; std 3.5, old token 1.05, gap 3.2 (1 %)",
        role="driver",
        gain=_LOOP_GAIN,
        step=_LOOP,
    ),
]
