"""The names of all fields and groups of the grammar, so that a wrong one is told apart from one that a blob lacks."""

from __future__ import annotations

from functools import cache

_CELL = ("", ".pos", ".n_seq", ".seq", ".x", ".y", ".token")
_ATTENTION = (
    "", ".n_stream", ".stream", ".stream.n_cells", ".stream.v_trans", ".stream.n_layer",
    *(f".stream.cell{f}" for f in _CELL),
    *(f".stream.k{f}" for f in ("", ".type", ".row", ".data")),
    *(f".stream.v{f}" for f in ("", ".type", ".row", ".element", ".width", ".data")),
)  # fmt: skip
_RECURRENT = (
    "", ".n_cells", ".s_trans", ".n_layer",
    *(f".cell{f}" for f in _CELL[:4]),
    *(f".r{f}" for f in ("", ".type", ".row", ".data", ".ngram_row", ".ngram_data")),
    *(f".s{f}" for f in ("", ".type", ".row", ".data")),
)  # fmt: skip
_ROWS = ("", ".type", ".values", ".rows", ".row", ".data")
_CACHE = ("", ".version", ".n_rows", ".n_stream", ".n_layer", ".layer", ".layer.id", *(f".layer.k{f}" for f in _ROWS))
_STATE = (
    "", ".version", ".ratio", ".size", ".n_embd", ".n_stream", ".n_layer", ".layer", ".layer.id",
    *(f".layer.{t}{f}" for t in ("kv", "score") for f in _ROWS),
)  # fmt: skip
_HEADERS = (
    "magic", "seq", "file", "file.magic", "file.version", "file.n_tokens", "file.token", "arch", "arch.length",
    "arch.name",
)  # fmt: skip


@cache
def names() -> frozenset[str]:
    """All names that an edit's `where` may have, beside the empty one."""
    found = [*_HEADERS]
    found += [f"{part}{f}" for part in ("attn", "window", "index", "dsv4.raw", "dsv4.window") for f in _ATTENTION]
    found += [f"recurrent{f}" for f in _RECURRENT]
    found += ["dsv4", "dsv4.magic", "dsv4.version", "dsv4.mode"]
    found += [f"dsv4.{part}{f}" for part in ("csa", "hca", "index") for f in _CACHE]
    found += [f"dsv4.{part}{f}" for part in ("csa_state", "hca_state", "index_state") for f in _STATE]
    return frozenset(found)
