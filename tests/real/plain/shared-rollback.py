"""seq_rm of the last tokens of one sequence also shortens the copy of it that another sequence holds, by its positions.

The control lets the copy decode one token before the cut, which gives it a cell of its own.
"""

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, span, text


def main(model, control):
    ctx = context(model)
    memory = L.llama_get_memory(ctx)
    history = text(16)
    assert decode(ctx, 0, 0, history) == 0
    L.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    if control:
        history = [*history, 7]
        assert decode(ctx, 1, 16, [7]) == 0
    before = span(ctx, 1)
    removed = L.llama_memory_seq_rm(memory, 0, 14, -1)
    note = f"seq_rm(0, 14, -1) returned {removed}, positions of sequence 1 {before} -> {span(ctx, 1)}"
    if span(ctx, 1) != before:
        return 1, f"{note}; decode of sequence 1 at {len(history)} returned {decode(ctx, 1, len(history), [9])}"
    want = clean(model, history, text(4, stream=2))
    return compare(follow(ctx, 1, len(history), text(4, stream=2)), want, note)


run(main)
