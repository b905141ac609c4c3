"""A state with a position that seq_rm(-1, -1) does not reach is taken, and its cell stays, whatever is restored later.

The position of the first cell is set to -5, with --largest to 2147483647. A good restore follows, which replaces the
sequence, so that the positions must be what they were. The control restores the blob as it was saved.
"""

import struct
import sys

from _plain import context, decode, restore, run, save, span, text


def main(model, control):
    ctx = context(model)
    assert decode(ctx, 0, 0, text(8)) == 0
    blob, was = save(ctx, 0), span(ctx, 0)
    # magic, sequence id, number of streams, number of cells, then the first cell's position
    assert blob[16:20] == struct.pack("<i", 0)
    bad = blob[:16] + struct.pack("<i", 2147483647 if "--largest" in sys.argv else -5) + blob[20:]
    first = restore(ctx, 0, blob if control else bad)
    again = restore(ctx, 0, blob)
    assert again == len(blob)
    return int(span(ctx, 0) != was), f"restore returned {first}, then the good one {again}: positions {span(ctx, 0)}"


run(main)
