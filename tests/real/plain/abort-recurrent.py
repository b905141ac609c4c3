"""After an aborted decode the positions count a ubatch that was not computed, and the recurrent state is nobody's.

--short aborts a decode of 3 tokens: these are "rolled back", to a state before the sequence's last tokens.
The control has an abort callback too, which never fires.
"""

import ctypes
import sys

import llama_cpp.llama_cpp as L
from _plain import clean, compare, context, decode, follow, run, span, text

calls = [0]


def main(model, control):
    ctx = context(model)
    history = text(19 if "--short" in sys.argv else 56)
    assert decode(ctx, 0, 0, history[:16]) == 0

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
    def stop(_):
        calls[0] += 1
        return calls[0] == 3 and not control

    L.llama_set_abort_callback(ctx, stop, None)
    rc = decode(ctx, 0, 16, history[16:])
    end = span(ctx, 0)[1] + 1
    L.llama_set_abort_callback(ctx, ctypes.cast(None, type(stop)), None)
    note = f"decode returned {rc}, {end} positions left"
    want = clean(model, history[:end], text(4, stream=2))
    return compare(follow(ctx, 0, end, text(4, stream=2)), want, note)


run(main)
