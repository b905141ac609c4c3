"""seq_rm of the last tokens returns true although the state before them was never kept; decoding goes on from another.

Without an option: 16 tokens, 3 single ones, cut 3. With --batch: 16 tokens, 3 in one batch, cut all 3.
The control decodes the 3 in one batch with the last two of the 16, so that the state to go back to was kept.
"""

import sys

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, span, text


def main(model, control):
    ctx = context(model)
    prompt, extra = text(16), text(3, stream=1)
    cuts = [14, 19] if control else [16, 19] if "--batch" in sys.argv else [16, 17, 18, 19]
    start = 0
    for end in cuts:
        assert decode(ctx, 0, start, (prompt + extra)[start:end]) == 0
        start = end
    removed = L.llama_memory_seq_rm(L.llama_get_memory(ctx), 0, 16, -1)
    if not removed:
        return 0, f"seq_rm returned {removed}"
    note = f"seq_rm returned {removed}, positions {span(ctx, 0)}"
    want = clean(model, prompt, text(4, stream=2))
    return compare(follow(ctx, 0, 16, text(4, stream=2)), want, note)


run(main)
