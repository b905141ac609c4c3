"""A second ON_DEVICE save of a sequence that has as many cells as at the first, in more pieces, ends the process.

--wrap has one sequence with a window, whose cells go round the end of their cache, instead of two sequences. --flash
turns flash attention on. The control has its cells in one piece at both saves.
"""

import sys

import llama_cpp.llama_cpp as L
from _plain import ON_DEVICE, clean, compare, context, decode, follow, restore, run, save, text

PARTIAL = 1


def wrap(ctx, control):
    end = 248 if control else 256
    for start in range(0, end, 8):
        assert decode(ctx, 0, start, text(end)[start : start + 8]) == 0
    save(ctx, 0, ON_DEVICE | PARTIAL)
    assert decode(ctx, 0, end, text(3, stream=1)) == 0
    return 0, f"saved {len(save(ctx, 0, ON_DEVICE | PARTIAL))} bytes twice"


def main(model, control):
    params = {"kv_unified": True, "swa_full": False, "flash_attn_type": "--flash" in sys.argv, "n_ctx": 512}
    ctx = context(model, **params)
    if "--wrap" in sys.argv:
        return wrap(ctx, control)
    assert decode(ctx, 0, 0, text(8)) == 0
    save(ctx, 0, ON_DEVICE)
    assert L.llama_memory_seq_rm(L.llama_get_memory(ctx), 0, 4, -1)
    if not control:
        assert decode(ctx, 1, 0, text(2, stream=1)) == 0
    assert decode(ctx, 0, 4, text(8)[4:]) == 0
    blob = save(ctx, 0, ON_DEVICE)
    assert decode(ctx, 0, 8, text(4, stream=1)) == 0
    answer = restore(ctx, 0, blob, ON_DEVICE)
    want = clean(model, text(8), text(4, stream=2), **params)
    return compare(follow(ctx, 0, 8, text(4, stream=2)), want, f"restore returned {answer} of {len(blob)}")


run(main)
