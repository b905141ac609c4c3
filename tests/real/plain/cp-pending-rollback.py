"""A copy of a sequence that was just rolled back continues from the state before the roll back.

--at N cuts back to N tokens, else 20 (deepseek4 shows it where the cut ones complete a block of four).
The control lets the sequence decode one token between seq_rm and seq_cp.
"""

import sys

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, span, text


def main(model, control):
    ctx = context(model)
    memory = L.llama_get_memory(ctx)
    n = int(sys.argv[sys.argv.index("--at") + 1]) if "--at" in sys.argv else 20
    history = text(n)
    assert decode(ctx, 0, 0, history[:16]) == 0
    assert decode(ctx, 0, 16, history[16:] + text(2, stream=1)) == 0
    assert L.llama_memory_seq_rm(memory, 0, n, -1)
    if control:
        assert decode(ctx, 0, n, [7]) == 0
        history = [*history, 7]
    L.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    want = clean(model, history, text(4, stream=2))
    return compare(follow(ctx, 1, len(history), text(4, stream=2)), want, f"positions {span(ctx, 1)}")


run(main)
