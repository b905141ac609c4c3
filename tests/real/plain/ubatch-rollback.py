"""A context with n_ubatch <= n_rs_seq is made without complaint; its first decode aborts."""

from _plain import context, decode, run, text


def main(model, control):
    ctx = context(model, n_rs_seq=4, n_ubatch=6 if control else 4)
    rc = decode(ctx, 0, 0, text(16))
    return int(rc != 0), f"decode returned {rc}"


run(main)
