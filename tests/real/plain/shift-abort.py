"""can_shift says true, seq_add is accepted, and the next decode aborts."""

import sys

import llama_cpp.llama_cpp as L
from _plain import context, decode, run, text


def main(model, control):
    ctx = context(model)
    memory = L.llama_get_memory(ctx)
    if not L.llama_memory_can_shift(memory):
        return 0, "can_shift says false"
    assert decode(ctx, 0, 0, text(16)) == 0
    end = 16
    if control:
        pass
    elif "--whole" in sys.argv:
        L.llama_memory_seq_add(memory, 0, -1, -1, 4)
        end = 20
    else:
        assert L.llama_memory_seq_rm(memory, 0, 2, 5)
        L.llama_memory_seq_add(memory, 0, 5, -1, -3)
        end = 13
    rc = decode(ctx, 0, end, [7])
    return int(rc != 0), f"decode returned {rc}"


run(main)
