"""A state saved between seq_add and the next decode has the new positions and the keys of the old ones.

Compared with the same edits without save and restore. The control decodes a token of another sequence before.
"""

import llama_cpp.llama_cpp as L
from _plain import compare, context, decode, follow, restore, run, save, text


def main(model, control):
    rows = []
    for saved in (True, False):
        ctx = context(model, n_seq_max=3)
        memory = L.llama_get_memory(ctx)
        assert decode(ctx, 0, 0, text(16)) == 0
        assert L.llama_memory_seq_rm(memory, 0, 2, 5)
        L.llama_memory_seq_add(memory, 0, 5, -1, -3)
        if control:
            assert decode(ctx, 2, 0, [7]) == 0
        if saved:
            blob = save(ctx, 0)
            assert L.llama_memory_seq_rm(memory, 0, -1, -1)
            assert restore(ctx, 0, blob) == len(blob)
        rows.append(follow(ctx, 0, 13, text(4, stream=2)))
    return compare(rows[0], rows[1])


run(main)
