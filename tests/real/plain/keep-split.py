"""seq_keep(0) leaves sequence 1 as it was when sequences have streams of their own (kv_unified = false)."""

import llama_cpp.llama_cpp as L
from _plain import context, decode, run, span, text


def main(model, control):
    ctx = context(model, kv_unified=control)
    assert decode(ctx, 0, 0, text(16)) == 0
    assert decode(ctx, 1, 0, text(16, stream=1)) == 0
    L.llama_memory_seq_keep(L.llama_get_memory(ctx), 0)
    return int(span(ctx, 1) != (-1, -1)), f"after seq_keep(0) sequence 1 has positions {span(ctx, 1)}"


run(main)
