"""A whole context that is saved between seq_cp and the next decode is saved without the copy's data.

The control decodes one token of a third sequence between seq_cp and the save.
"""

import ctypes

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, text


def main(model, control):
    ctx, fresh = context(model, n_seq_max=3), context(model, n_seq_max=3)
    assert decode(ctx, 0, 0, text(16)) == 0
    L.llama_memory_seq_cp(L.llama_get_memory(ctx), 0, 1, -1, -1)
    if control:
        assert decode(ctx, 2, 0, [7]) == 0
    size = L.llama_state_get_size(ctx)
    blob = (ctypes.c_uint8 * size)()
    assert L.llama_state_get_data(ctx, blob, size) == size
    n = L.llama_state_set_data(fresh, blob, size)
    want = clean(model, text(16), text(4, stream=2))
    return compare(follow(fresh, 1, 16, text(4, stream=2)), want, f"restore returned {n} of {size}")


run(main)
