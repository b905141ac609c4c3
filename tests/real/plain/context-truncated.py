"""A refused restore of a whole context leaves it neither as it was nor empty.

The blob is cut to 51 percent (--cut N: N percent). --file cuts a session file, --longer adds six bytes to it.
The control changes nothing.
"""

import ctypes
import os
import sys
import tempfile

import llama_cpp.llama_cpp as L
import numpy as np
from _plain import clean, compare, context, decode, follow, run, span, text


def main(model, control):
    percent = int(sys.argv[sys.argv.index("--cut") + 1]) if "--cut" in sys.argv else 51
    ctx = context(model)
    texts = [text(12, stream=s) for s in (0, 1)]
    for s in (0, 1):
        assert decode(ctx, s, 0, texts[s][:8]) == 0
    size = L.llama_state_get_size(ctx)
    blob = (ctypes.c_uint8 * size)()
    with tempfile.TemporaryDirectory() as folder:
        path, count = os.path.join(folder, "state").encode(), ctypes.c_size_t()
        if "--file" in sys.argv:
            assert L.llama_state_save_file(ctx, path, None, 0)
            full = os.path.getsize(path)
            if not control:
                os.truncate(path, full + 6 if "--longer" in sys.argv else full * percent // 100)
        else:
            assert L.llama_state_get_data(ctx, blob, size) == size
        for s in (0, 1):
            assert decode(ctx, s, 8, texts[s][8:]) == 0
        if "--file" in sys.argv:
            answer = L.llama_state_load_file(ctx, path, None, 0, ctypes.byref(count))
        else:
            answer = L.llama_state_set_data(ctx, blob, size if control else size * percent // 100)
    spans = [span(ctx, s) for s in (0, 1)]
    note = f"restore returned {answer}, positions {spans}"
    want_end = 7 if control else 11
    if [end for _, end in spans] not in ([want_end] * 2, [-1] * 2):
        return 1, note
    got, want = [], []
    for s in (0, 1):
        history = texts[s][: spans[s][1] + 1]
        if not history:
            history = text(8, stream=3 + s)
            assert decode(ctx, s, 0, history) == 0
        got.append(follow(ctx, s, len(history), text(4, stream=2)))
        want.append(clean(model, history, text(4, stream=2)))
    return compare(np.stack(got), np.stack(want), note)


run(main)
