"""In a unified cache a sequence's logits depend on what another sequence of the context says.

Two contexts differ only in the tokens of sequence 0; sequence 1 is the same in both. The control gives each sequence a
stream of its own. A false alarm: nothing of the kind shows; only where the cells lie matters (on qwen4exp).
"""

import numpy as np
from _plain import compare, context, decode, follow, run, text


def main(model, control):
    rows = []
    for stream in (0, 5):
        ctx = context(model, kv_unified=not control)
        assert decode(ctx, 0, 0, text(16, stream=stream)) == 0
        assert decode(ctx, 1, 0, text(16, stream=3)) == 0
        rows.append(follow(ctx, 1, 16, text(4, stream=2)))
    return compare(rows[0], rows[1], f"bits {'equal' if np.array_equal(*rows) else 'differ'}")


run(main)
