"""A sequence that was rolled back and then removed by seq_keep does not start anew from an empty state.

--range removes it with seq_rm(1, 0, 14), which names all its positions, instead.
The control removes it with seq_rm(1, -1, -1).
"""

import sys

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, span, text


def main(model, control):
    ctx = context(model, kv_unified=True)
    memory = L.llama_get_memory(ctx)
    assert decode(ctx, 0, 0, text(16)) == 0
    assert decode(ctx, 1, 0, text(16, stream=1)) == 0
    assert L.llama_memory_seq_rm(memory, 1, 14, -1)
    if control:
        assert L.llama_memory_seq_rm(memory, 1, -1, -1)
    elif "--range" in sys.argv:
        assert L.llama_memory_seq_rm(memory, 1, 0, 14)
    elif "--clear" in sys.argv:
        L.llama_memory_clear(memory, False)
    else:
        L.llama_memory_seq_keep(memory, 0)
    note = f"positions {span(ctx, 1)} before starting anew"
    assert decode(ctx, 1, 0, text(16, stream=3)) == 0
    want = clean(model, text(16, stream=3), text(4, stream=2), kv_unified=True)
    return compare(follow(ctx, 1, 16, text(4, stream=2)), want, note)


run(main)
