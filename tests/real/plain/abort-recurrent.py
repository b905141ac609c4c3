"""After an aborted decode the positions count a ubatch that was not computed, and the recurrent state is nobody's.

The control has an abort callback too, which never fires.
"""

import ctypes

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, span, text

calls = [0]


def main(model, control):
    ctx = context(model)
    history = text(56)
    assert decode(ctx, 0, 0, history[:16]) == 0

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
    def stop(_):
        calls[0] += 1
        return calls[0] == 3 and not control

    L.llama_set_abort_callback(ctx, stop, None)
    rc = decode(ctx, 0, 16, history[16:])
    end = span(ctx, 0)[1] + 1
    L.llama_set_abort_callback(ctx, ctypes.cast(None, type(stop)), None)
    if rc == 2:
        prefix = clean(model, history[:16], text(4, stream=2))
    note = f"decode returned {rc}, {end} positions left"
    want = clean(model, history[:end], text(4, stream=2))
    return compare(follow(ctx, 0, end, text(4, stream=2)), want, note)


run(main)
