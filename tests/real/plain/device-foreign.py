"""An ON_DEVICE blob of another context is answered by an assertion, not by 0."""

import llama_cpp.llama_cpp as L
from _plain import ON_DEVICE, context, decode, restore, run, save, text


def main(model, control):
    ctx = context(model)
    assert decode(ctx, 0, 0, text(16)) == 0
    blob = save(ctx, 0, ON_DEVICE)
    if not control:
        L.llama_free(ctx)
        ctx = context(model)
    n = restore(ctx, 0, blob, ON_DEVICE)
    return int((n != 0) != control), f"restore returned {n}"


run(main)
