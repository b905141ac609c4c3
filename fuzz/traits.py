"""Traits: what the generator must know of a model, from a recipe or from what the library says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from subjects.recipes import Recipe
from subjects.trace import Facts

Memory = Literal["dense", "window", "recurrent", "hybrid"]


@dataclass(frozen=True)
class Traits:
    """What the generator must know of a model.

    rollback: llama.cpp keeps n_rs_seq earlier recurrent states. any_rollback: it keeps them across decodes too
    (deepseek4), so that the rule d <= k - 1 does not apply. q8: head size fits quantised K/V. mixed_kv: K and V may
    have different types. hidden_aborts: a context with embeddings aborts at its first decode. undoes: a refused
    restore is undone in all parts (llama_memory_hybrid_idx).
    """

    memory: Memory = "dense"
    rollback: bool = False
    any_rollback: bool = False
    can_shift: bool = True
    window: int = 0
    q8: bool = False
    n_vocab: int = 64
    mixed_kv: bool = True
    hidden_aborts: bool = False
    undoes: bool = False

    @property
    def recurrent(self) -> bool:
        """The memory has a recurrent (or compressed) part, which cannot forget its middle."""
        return self.memory in ("recurrent", "hybrid")

    @property
    def parts(self) -> bool:
        """A partial state leaves something out, so that the caller must hold the rest (llama.h: SWA KV cache or
        recurrent cache).
        """
        return self.memory in ("window", "hybrid")


@cache
def _q8(recipe: Recipe) -> bool:
    """Head size a multiple of 64: ggml's q8_0 blocks are 32 wide, and llama.cpp rotates K in 64s."""
    if recipe.memory not in ("dense", "window"):
        return False
    values = {str(key): value for key, _, value in recipe.build()[0]}

    def get(name: str) -> Any:
        return values.get(f"{recipe.arch}.{name}")

    head = get("attention.key_length") or recipe.n_embd // int(get("attention.head_count") or 1)
    return int(head) % 64 == 0


def traits_of(recipe: Recipe) -> Traits:
    """Traits of a generated model."""
    return Traits(
        memory=recipe.memory, rollback=recipe.rollback, any_rollback=recipe.arch == "deepseek4",
        can_shift=recipe.can_shift, window=recipe.window, q8=_q8(recipe), n_vocab=recipe.n_vocab, mixed_kv=recipe.arch
        != "deepseek4", hidden_aborts=recipe.arch in ("deepseek4", "qwen4exp"),
        undoes=recipe.arch == "qwen4exp", )  # fmt: skip


def traits_from_facts(facts: Facts) -> Traits:
    """Traits of a foreign GGUF, from a context that was opened with n_rs_seq > 0 (llama.cpp clamps it to 0 without
    rollback).
    """
    return Traits(
        memory=facts.memory, rollback=facts.n_rs_seq > 0, can_shift=facts.can_shift, window=facts.n_swa,
        n_vocab=facts.n_vocab, mixed_kv=False,
    )  # fmt: skip
