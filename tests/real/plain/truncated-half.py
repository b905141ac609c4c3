"""A refused restore of a short blob leaves a sequence that is neither as it was nor empty.

--host uses the ordinary route, else ON_DEVICE. --cut N keeps N percent of the blob. The control cuts nothing.
"""

import sys

from _plain import ON_DEVICE, clean, compare, context, decode, follow, restore, run, save, span, text


def main(model, control):
    flags = 0 if "--host" in sys.argv else ON_DEVICE
    percent = int(sys.argv[sys.argv.index("--cut") + 1]) if "--cut" in sys.argv else 30
    ctx = context(model)
    assert decode(ctx, 0, 0, text(16)) == 0
    blob = save(ctx, 0, flags)
    assert decode(ctx, 0, 16, text(8, stream=1)) == 0
    n = restore(ctx, 0, blob if control else blob[: len(blob) * percent // 100], flags)
    note = f"restore returned {n}, positions {span(ctx, 0)}"
    if n == 0 and span(ctx, 0) == (-1, -1):
        want = clean(model, text(16, stream=2), text(4, stream=2))
        assert decode(ctx, 0, 0, text(16, stream=2)) == 0
        return compare(follow(ctx, 0, 16, text(4, stream=2)), want, note)
    end = span(ctx, 0)[1] + 1
    want = clean(model, (text(16) + text(8, stream=1))[:end], text(4, stream=2))
    return compare(follow(ctx, 0, end, text(4, stream=2)), want, note)


run(main)
