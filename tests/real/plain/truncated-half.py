"""A refused restore of a short blob leaves a sequence neither as it was nor empty, and untrue positions.

--device uses ON_DEVICE. --cut N keeps N percent of the blob, else 30. The control cuts nothing.
"""

import sys

from _plain import ON_DEVICE, clean, compare, context, decode, follow, restore, run, save, span, text


def main(model, control):
    flags = ON_DEVICE if "--device" in sys.argv else 0
    percent = int(sys.argv[sys.argv.index("--cut") + 1]) if "--cut" in sys.argv else 30
    ctx = context(model)
    old = text(16) + text(8, stream=1)
    assert decode(ctx, 0, 0, old[:16]) == 0
    blob = save(ctx, 0, flags)
    assert decode(ctx, 0, 16, old[16:]) == 0
    n = restore(ctx, 0, blob if control else blob[: len(blob) * percent // 100], flags)
    note = f"restore returned {n}, positions {span(ctx, 0)}"
    history = old[: span(ctx, 0)[1] + 1]
    if not history:
        # empty, the memory says: so a new text must come out as in a clean context
        history = text(16, stream=3)
        assert decode(ctx, 0, 0, history) == 0
    want = clean(model, history, text(4, stream=2))
    return compare(follow(ctx, 0, len(history), text(4, stream=2)), want, note)


run(main)
