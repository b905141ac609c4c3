"""seq_rm(-1, -1, -1), everything of any sequence, returns false and removes nothing with recurrent memory.

The control removes both sequences by their ids.
"""

import llama_cpp.llama_cpp as L
from _plain import context, decode, run, span, text


def main(model, control):
    ctx = context(model)
    assert decode(ctx, 0, 0, text(16)) == 0
    assert decode(ctx, 1, 0, text(16, stream=1)) == 0
    memory = L.llama_get_memory(ctx)
    answers = [L.llama_memory_seq_rm(memory, s, -1, -1) for s in ([0, 1] if control else [-1])]
    bad = not all(answers) or span(ctx, 0) != (-1, -1) or span(ctx, 1) != (-1, -1)
    return int(bad), f"seq_rm returned {answers}, positions left {span(ctx, 0)} and {span(ctx, 1)}"


run(main)
