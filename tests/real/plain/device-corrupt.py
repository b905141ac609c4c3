"""A malformed blob given with ON_DEVICE is answered by a C++ exception that leaves the C interface, not by 0.

The blob is cut within its first eight bytes; with --magic it has another magic.
"""

import sys

from _plain import ON_DEVICE, context, decode, restore, run, save, text


def main(model, control):
    ctx = context(model)
    assert decode(ctx, 0, 0, text(16)) == 0
    blob = save(ctx, 0, ON_DEVICE)
    bad = b"\0\0\0\0" + blob[4:] if "--magic" in sys.argv else blob[:6]
    n = restore(ctx, 0, blob if control else bad, ON_DEVICE)
    return int((n != 0) != control), f"restore returned {n} of {len(blob)}"


run(main)
