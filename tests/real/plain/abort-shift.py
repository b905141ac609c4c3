"""A decode of sequence 1 is aborted while it rotates the keys of sequence 0 after seq_add: they are rotated again
later.

--once aborts the rotation only, so that the decode of sequence 1 returns 0.
Compared with the same calls and no abort. The control aborts as well, but after the rotation was done by a decode.
"""

import ctypes
import sys

import llama_cpp.llama_cpp as L
from _plain import compare, context, decode, follow, run, text

calls = [0]


def main(model, control):
    rows, codes = [], []
    for aborted in (True, False):
        ctx = context(model)
        assert decode(ctx, 0, 0, text(16)) == 0
        L.llama_memory_seq_add(L.llama_get_memory(ctx), 0, -1, -1, 1)
        if control:
            assert decode(ctx, 1, 0, [7]) == 0

        @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
        def stop(_):
            calls[0] += 1
            return calls[0] == 2 if "--once" in sys.argv else calls[0] >= 2

        if aborted:
            L.llama_set_abort_callback(ctx, stop, None)
        codes.append(decode(ctx, 1, int(control), [8]))
        L.llama_set_abort_callback(ctx, ctypes.cast(None, type(stop)), None)
        rows.append(follow(ctx, 0, 17, text(4, stream=2)))
    return compare(rows[0], rows[1], f"decode of the other returned {codes[0]}, without an abort {codes[1]}")


run(main)
