"""A batch of two micro-batches that fills holes in a window cache: the first is computed without keys it needs.

Two sequences in a unified cache, interleaved row by row; the first is removed, the other goes on with 7 tokens. With
--alone there is one sequence in a stream of its own, with two removals in its middle instead. --full sets swa_full.
Compared with a context whose micro-batches hold all of it. The control has one micro-batch in both.
"""

import sys

import llama_cpp.llama_cpp as L
import numpy as np
from _plain import compare, context, decode, decode_rows, run, text


def main(model, control):
    alone, out = "--alone" in sys.argv, []
    old, new = (text(24), text(10, stream=2)) if alone else (text(15), text(7, stream=2))
    for n_ubatch in (len(new) - 1 + control, 32):
        ctx = context(model, kv_unified=not alone, n_ubatch=n_ubatch, swa_full="--full" in sys.argv)
        memory = L.llama_get_memory(ctx)
        for i, token in enumerate(old):
            assert decode_rows(ctx, [(1, i, 9 + i)] * (not alone and i < 6) + [(0, i, token)]) == 0
        if alone:
            assert L.llama_memory_seq_rm(memory, 0, 1, 9)
            assert L.llama_memory_seq_rm(memory, 0, 16, 17)
        else:
            assert L.llama_memory_seq_rm(memory, 1, -1, -1)
        assert decode(ctx, 0, len(old), new) == 0
        out.append(np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, -1), (64,)).copy())
    return compare(out[0], out[1])


run(main)
