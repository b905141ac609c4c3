"""Recipes as llama-server takes them: with a tokenizer and a chat template in the file, the weights as they are.

The tokenizer is llama.cpp's own for tests ("test"), which cuts text into pieces of five characters and makes a token
of each; a token is written as its number in hex. The two markers of the chat template are control tokens, so that the
server sees where a user's message begins, which is where it likes to make checkpoints.
"""

from __future__ import annotations

import dataclasses

from subjects.recipes import Metadata, Recipe, Tensors

VERSION = 1
"""raised whenever the bytes change"""
MARKERS = ("<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_NORMAL, _CONTROL = 1, 3  # llama.h: llama_token_type


def dressed(recipe: Recipe) -> Recipe:
    """The recipe with a tokenizer and a chat template; its name is the same, its bytes are not."""

    def build() -> tuple[Metadata, Tensors]:
        metadata, tensors = recipe.build()
        kept = [entry for entry in metadata if not str(entry[0]).startswith("tokenizer.")]
        words = [f"tok_{i}" for i in range(recipe.n_vocab - len(MARKERS))]
        tokenizer: Metadata = [
            ["tokenizer.ggml.model", "str", "test"],
            ["tokenizer.ggml.tokens", "strs", [*words, *MARKERS]],
            ["tokenizer.ggml.token_type", "i32s", [_NORMAL] * len(words) + [_CONTROL] * len(MARKERS)],
            ["tokenizer.chat_template", "str", TEMPLATE],
        ]
        return [*kept, *tokenizer], tensors

    return dataclasses.replace(recipe, build=build)
