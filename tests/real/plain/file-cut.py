"""A sequence's state file that was cut short ends the process instead of being refused.

--unified has one stream. --cut N keeps N percent of the file, else 90. The control cuts nothing.
"""

import ctypes
import os
import sys
import tempfile

import llama_cpp.llama_cpp as L
from _plain import context, decode, run, span, text


def main(model, control):
    percent = int(sys.argv[sys.argv.index("--cut") + 1]) if "--cut" in sys.argv else 90
    ctx = context(model, kv_unified="--unified" in sys.argv)
    tokens, count = (ctypes.c_int32 * 16)(*text(16)), ctypes.c_size_t()
    assert decode(ctx, 0, 0, text(16)) == 0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state").encode()
        size = L.llama_state_seq_save_file(ctx, path, 0, tokens, 16)
        assert size == os.path.getsize(path)
        if not control:
            os.truncate(path, size * percent // 100)
        answer = L.llama_state_seq_load_file(ctx, path, 1, tokens, 16, ctypes.byref(count))
    right = (size, (0, 15)) if control else (0, (-1, -1))
    got = answer, span(ctx, 1)
    return int(got[0] != right[0] or got[1][1] != right[1][1]), f"load returned {answer} of {size}, positions {got[1]}"


run(main)
