"""A copy that is saved before the next decode is saved without its data (sequences in streams of their own).

The control decodes one token of another sequence between seq_cp and the save.
"""

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, restore, run, save, text


def main(model, control):
    ctx = context(model, n_seq_max=3)
    memory = L.llama_get_memory(ctx)
    assert decode(ctx, 0, 0, text(16)) == 0
    L.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    if control:
        assert decode(ctx, 2, 0, [7]) == 0
    blob = save(ctx, 1)
    fresh = context(model, n_seq_max=3)
    n = restore(fresh, 1, blob)
    want = clean(model, text(16), text(4, stream=2))
    return compare(follow(fresh, 1, 16, text(4, stream=2)), want, f"restore returned {n} of {len(blob)}")


run(main)
