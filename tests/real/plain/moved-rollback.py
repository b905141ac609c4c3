"""A sequence whose recurrent cell was moved by a decode of other sequences is rolled back to another sequence's state.

Sequences 1, 2, 0 are begun in this order and have cells 0, 1, 2; a batch of 0 and 1 makes these neighbours and moves 2.
The control decodes 0 and 1 in batches of their own.
"""

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, decode_rows, follow, run, span, text


def main(model, control):
    ctx = context(model, n_seq_max=3)
    for seq in (1, 2, 0):
        assert decode(ctx, seq, 0, text(16, stream=seq)) == 0
    if control:
        assert decode(ctx, 0, 16, [7]) == 0 == decode(ctx, 1, 16, [9])
    else:
        assert decode_rows(ctx, [(0, 16, 7), (1, 16, 9)]) == 0
    removed = L.llama_memory_seq_rm(L.llama_get_memory(ctx), 2, 14, -1)
    history = text(16, stream=2)[: 14 if removed else 16]
    want = clean(model, history, text(4, stream=4))
    note = f"seq_rm(2, 14, -1) returned {removed}, positions {span(ctx, 2)}"
    return compare(follow(ctx, 2, len(history), text(4, stream=4)), want, note)


run(main)
