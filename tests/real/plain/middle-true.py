"""seq_rm of a middle returns true with recurrent memory, whose state still holds the removed tokens.

The recurrent part of the saved state (PARTIAL_ONLY) is compared: a state without the removed tokens is another one.
The control removes a middle that no token is in.
"""

import llama_cpp.llama_cpp as L
from _plain import context, decode, run, save, span, text


def main(model, control):
    ctx = context(model)
    assert decode(ctx, 0, 0, text(16)) == 0
    before = save(ctx, 0, 1), save(ctx, 0)
    removed = L.llama_memory_seq_rm(L.llama_get_memory(ctx), 0, *((20, 23) if control else (2, 5)))
    after = save(ctx, 0, 1), save(ctx, 0)
    same = before[0] == after[0]
    note = f"positions {span(ctx, 0)}, recurrent part {'unchanged' if same else 'changed'}"
    note += f", whole blob {len(before[1])} -> {len(after[1])} bytes"
    return int(removed and same and not control), f"seq_rm returned {removed}, {note}"


run(main)
