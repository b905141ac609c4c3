"""ON_DEVICE save, decode, ON_DEVICE save again, restore the first: neither refused nor right."""

from _plain import ON_DEVICE, clean, compare, context, decode, follow, restore, run, save, text


def main(model, control):
    ctx = context(model)
    assert decode(ctx, 0, 0, text(12)) == 0
    first = save(ctx, 0, ON_DEVICE)
    assert decode(ctx, 0, 12, text(8, stream=1)) == 0
    if not control:
        save(ctx, 0, ON_DEVICE)
    n = restore(ctx, 0, first, ON_DEVICE)
    if n == 0:
        return 0, "refused"
    want = clean(model, text(12), text(4, stream=2))
    return compare(follow(ctx, 0, 12, text(4, stream=2)), want, f"restore returned {n}")


run(main)
