"""qwen4exp: a state whose indexer's cells lie at other positions than attention's is taken, and the next decode aborts.

The position of the indexer's first cell is set to 300. The control restores the blob as it was saved.
"""

import struct

from _plain import context, decode, restore, run, save, text


def main(model, control):
    ctx = context(model, n_seq_max=1)
    assert decode(ctx, 0, 0, text(4)) == 0
    blob = save(ctx, 0)
    # the indexer's part is the last: one stream of four cells, the first at position 0, of one sequence
    at = blob.rindex(struct.pack("<IIiI", 1, 4, 0, 1)) + 8
    n = restore(ctx, 0, blob if control else blob[:at] + struct.pack("<i", 300) + blob[at + 4 :])
    rc = decode(ctx, 0, 4, [7])
    return int(not (n and rc == 0)), f"restore returned {n} of {len(blob)}, the decode {rc}"


run(main)
