"""seq_keep(0) leaves sequence 1 as it was when sequences have streams of their own (kv_unified = false)."""

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, span, text


def main(model, control):
    ctx = context(model, kv_unified=control)
    assert decode(ctx, 0, 0, text(16)) == 0
    assert decode(ctx, 1, 0, text(16, stream=1)) == 0
    L.llama_memory_seq_keep(L.llama_get_memory(ctx), 0)
    note = f"after seq_keep(0) sequence 1 has positions {span(ctx, 1)}"
    if span(ctx, 1)[1] != -1:
        return 1, note
    assert decode(ctx, 1, 0, text(16, stream=3)) == 0
    want = clean(model, text(16, stream=3), text(4, stream=2), kv_unified=control)
    return compare(follow(ctx, 1, 16, text(4, stream=2)), want, f"{note}; then started anew")


run(main)
