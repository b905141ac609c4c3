"""seq_rm of the last tokens returns true although the state before them was never kept; decoding goes on from another.

Without an option: 16 tokens, 3 single ones, cut 3. With --batch: 16 tokens, 3 in one batch, cut all 3.
With --restored: the 3 in one batch with the last two of the prompt, then restored elsewhere, cut 3.
--at N makes the prompt N tokens long (deepseek4 shows it where the cut ones complete a block of four).
The control decodes the 3 in one batch with the last two of the prompt, so that the state to go back to was kept, and
restores nothing.
"""

import sys

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, restore, run, save, span, text


def main(model, control):
    ctx = context(model)
    n = int(sys.argv[sys.argv.index("--at") + 1]) if "--at" in sys.argv else 16
    prompt, extra = text(n), text(3, stream=1)
    kept = control or "--restored" in sys.argv
    cuts = [n - 2, n + 3] if kept else [n, n + 3] if "--batch" in sys.argv else [n, n + 1, n + 2, n + 3]
    start = 0
    for end in cuts:
        assert decode(ctx, 0, start, (prompt + extra)[start:end]) == 0
        start = end
    if "--restored" in sys.argv and not control:
        blob, ctx = save(ctx, 0), context(model)
        assert restore(ctx, 0, blob) == len(blob)
    removed = L.llama_memory_seq_rm(L.llama_get_memory(ctx), 0, n, -1)
    if not removed:
        return 0, f"seq_rm returned {removed}"
    note = f"seq_rm returned {removed}, positions {span(ctx, 0)}"
    want = clean(model, prompt, text(4, stream=2))
    return compare(follow(ctx, 0, n, text(4, stream=2)), want, note)


run(main)
