"""ON_DEVICE save, decode, ON_DEVICE save again, restore the first: neither refused nor right.

--long makes both states equally long where all attention has a window, so that their sizes do not differ.
The control does not save the second time.
"""

import sys

from _plain import ON_DEVICE, clean, compare, context, decode, follow, restore, run, save, text


def main(model, control):
    ctx = context(model)
    n = 20 if "--long" in sys.argv else 12
    assert decode(ctx, 0, 0, text(n)) == 0
    first = save(ctx, 0, ON_DEVICE)
    assert decode(ctx, 0, n, text(8, stream=1)) == 0
    if not control:
        save(ctx, 0, ON_DEVICE)
    answer = restore(ctx, 0, first, ON_DEVICE)
    if answer == 0:
        return 0, "refused"
    want = clean(model, text(n), text(4, stream=2))
    return compare(follow(ctx, 0, n, text(4, stream=2)), want, f"restore returned {answer}")


run(main)
