"""A context with embeddings ends the process at its first decode. The control has none."""

from _plain import context, decode, run, text


def main(model, control):
    ctx = context(model, embeddings=not control)
    rc = decode(ctx, 0, 0, text(4))
    return int(rc != 0), f"decode returned {rc}"


run(main)
