"""Asking for the size of the whole state aborts when a sequence that was rolled back has a copy.

The control lets the sequence decode one token between seq_rm and seq_cp.
"""

import llama_cpp.llama_cpp as L
from _plain import context, decode, run, text


def main(model, control):
    ctx = context(model)
    memory = L.llama_get_memory(ctx)
    assert decode(ctx, 0, 0, text(16)) == 0
    assert L.llama_memory_seq_rm(memory, 0, 14, -1)
    if control:
        assert decode(ctx, 0, 14, [7]) == 0
    L.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    size = L.llama_state_get_size(ctx)
    return int(size == 0), f"llama_state_get_size returned {size}"


run(main)
