"""can_shift says true, but with K of type BF16 the decode after seq_add ends the process.

--flash turns flash attention on, --q8_0 has K of type Q8_0 instead. The control has K of type F16.
"""

import sys

import llama_cpp.llama_cpp as L
from _plain import context, decode, run, text

F16, Q8_0, BF16 = 1, 8, 30


def main(model, control):
    type_k = F16 if control else Q8_0 if "--q8_0" in sys.argv else BF16
    ctx = context(model, type_k=type_k, flash_attn_type=int("--flash" in sys.argv))
    memory = L.llama_get_memory(ctx)
    if not L.llama_memory_can_shift(memory):
        return 0, "can_shift says false"
    assert decode(ctx, 0, 0, text(16)) == 0
    L.llama_memory_seq_add(memory, 0, -1, -1, 1)
    rc = decode(ctx, 0, 17, [7])
    return int(rc != 0), f"decode returned {rc}"


run(main)
