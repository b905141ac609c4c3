"""A host blob that claims two recurrent cells for one sequence ends the process in state_read_meta.

The count is set to 2 and the 8 bytes of the one cell (position, number of sequences) are there twice. The control
restores the blob as it was saved. --cells N claims N.
"""

import struct
import sys

from _plain import context, decode, restore, run, save, text

PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part comes first


def main(model, control):
    n = int(sys.argv[sys.argv.index("--cells") + 1]) if "--cells" in sys.argv else 2
    ctx = context(model)
    assert decode(ctx, 0, 0, text(16)) == 0
    blob = save(ctx, 0, PARTIAL)
    # magic, sequence id, number of cells; then position and number of sequences of each cell
    assert blob[8:12] == struct.pack("<I", 1)
    bad = blob[:8] + struct.pack("<I", n) + blob[12:20] * n + blob[20:]
    got = restore(ctx, 0, blob if control else bad, PARTIAL)
    return int((got != 0) != control), f"restore returned {got} of {len(blob)}"


run(main)
