"""A state with a negative position is taken, and its cell cannot be removed any more, neither by seq_rm nor a restore.

The position of the first cell is set to -5. A good restore follows, which replaces the sequence, so that the minimum
position must be what it was. The control restores the blob as it was saved.
"""

import struct

from _plain import context, decode, restore, run, save, span, text


def main(model, control):
    ctx = context(model)
    assert decode(ctx, 0, 0, text(8)) == 0
    blob, was = save(ctx, 0), span(ctx, 0)
    # magic, sequence id, number of streams, number of cells, then the first cell's position
    assert blob[16:20] == struct.pack("<i", 0)
    bad = blob[:16] + struct.pack("<i", -5) + blob[20:]
    first = restore(ctx, 0, blob if control else bad)
    again = restore(ctx, 0, blob)
    assert again == len(blob)
    return int(span(ctx, 0) != was), f"restore returned {first}, then the good one {again}: positions {span(ctx, 0)}"


run(main)
