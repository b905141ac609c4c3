"""The state of an empty sequence is restored into one that has tokens: accepted, and the tokens stay.

On hybrids the recurrent part is emptied and attention is not. The control restores it into an empty sequence.
"""

from _plain import clean, compare, context, decode, follow, restore, run, save, span, text


def main(model, control):
    ctx = context(model)
    empty = save(ctx, 0)
    assert decode(ctx, 1 if control else 0, 0, text(5)) == 0
    answer = restore(ctx, 0, empty)
    note = f"restore returned {answer} of {len(empty)}, positions {span(ctx, 0)}"
    if answer == 0:
        return 0, note
    if span(ctx, 0) != (-1, -1):
        return 1, note
    assert decode(ctx, 0, 0, text(3, stream=3)) == 0
    want = clean(model, text(3, stream=3), text(4, stream=2))
    return compare(follow(ctx, 0, 3, text(4, stream=2)), want, f"{note}; then started anew")


run(main)
