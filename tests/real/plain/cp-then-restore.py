"""What is restored after a seq_cp and before the next decode is overwritten by the copy, which only then happens.

--source restores into the sequence that was copied from: the copy then takes what was restored.
The control decodes one token of another sequence between seq_cp and the restore.
"""

import sys

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, restore, run, save, text


def main(model, control):
    ctx = context(model, n_seq_max=3)
    memory = L.llama_get_memory(ctx)
    into = 0 if "--source" in sys.argv else 1
    assert decode(ctx, 0, 0, text(16)) == 0
    assert decode(ctx, 1, 0, text(16, stream=1)) == 0
    blob = save(ctx, 1)
    assert L.llama_memory_seq_rm(memory, 1, -1, -1)
    L.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    if control:
        assert decode(ctx, 2, 0, [7]) == 0
    n = restore(ctx, into, blob)
    want = clean(model, text(16, stream=into), text(4, stream=2))
    return compare(follow(ctx, 1, 16, text(4, stream=2)), want, f"restore returned {n} of {len(blob)}")


run(main)
