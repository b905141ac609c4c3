"""deepseek4: seq_cp only queues the copy of the compressor's rows, so removing the source leaves the copy without.

The control decodes a token into a third sequence between the two calls.
"""

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, text


def main(model, control):
    ctx = context(model, n_seq_max=3)
    mem = L.llama_get_memory(ctx)
    history = text(5)
    assert decode(ctx, 1, 0, history) == 0
    L.llama_memory_seq_cp(mem, 1, 0, -1, -1)
    if control:
        assert decode(ctx, 2, 0, text(1, stream=3)) == 0
    assert L.llama_memory_seq_rm(mem, 1, -1, -1)
    rest = text(8, stream=2)
    return compare(
        follow(ctx, 0, len(history), rest), clean(model, history, rest), "after seq_cp and seq_rm of the source"
    )


run(main)
