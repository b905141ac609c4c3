"""A sequence that was rolled back and then replaced by a copy of another one continues from a wrong plane of the copy.

The control empties the sequence with seq_rm(1, -1, -1) before the copy.
"""

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, span, text


def main(model, control):
    ctx = context(model)
    memory = L.llama_get_memory(ctx)
    assert decode(ctx, 0, 0, text(16)) == 0
    assert decode(ctx, 1, 0, text(16, stream=1)) == 0
    assert L.llama_memory_seq_rm(memory, 1, 14, -1)
    if control:
        assert L.llama_memory_seq_rm(memory, 1, -1, -1)
    L.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    want = clean(model, text(16), text(4, stream=2))
    return compare(follow(ctx, 1, 16, text(4, stream=2)), want, f"positions {span(ctx, 1)}")


run(main)
