"""Damage: what is done to saved states: edits drawn through the grammar of `subjects.state`.

Names are drawn by what a model's memory is made of, without a blob at hand; what a blob does not have is not changed.
Both engines draw here: the strategies with Hypothesis' numbers, the coverage-guided targets with the fuzzer's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuzz.traits import Traits
from subjects.scenario import BlobEdit, Medium

Below = Callable[[int], int]
"""Draws a number from 0 up to, but without, its argument; the simplest is 0."""

_CELL = ("pos", "n_seq", "seq", "x", "y", "token")
_ATTENTION = (
    "stream.n_cells",
    *(f"stream.cell.{f}" for f in _CELL[:3]),
    "n_stream",
    "stream.v_trans",
    "stream.n_layer",
    "stream.k.type",
    "stream.k.row",
    "stream.v.type",
    "stream.v.row",
    "stream.v.element",
    "stream.v.width",
    *(f"stream.cell.{f}" for f in _CELL[3:]),
)
_RECURRENT = (
    "n_cells",
    "cell.pos",
    "cell.n_seq",
    "cell.seq",
    "n_layer",
    "s_trans",
    "r.type",
    "r.row",
    "s.type",
    "s.row",
)
_DSV4 = (
    "magic", "version", "mode", "csa.n_rows", "csa.version", "csa.n_stream", "csa.n_layer", "csa.layer.id",
    "csa.layer.k.rows", "csa.layer.k.row", "csa.layer.k.type", "csa_state.version", "csa_state.ratio", "csa_state.size",
    "csa_state.n_embd", "csa_state.n_stream", "csa_state.n_layer", "csa_state.layer.kv.rows",
    "csa_state.layer.score.row", "hca.n_rows", "index.n_rows", "hca_state.size", "index_state.size",
)  # fmt: skip
_HEADERS = {
    (False, "buffer"): ("magic", "seq"),
    (False, "file"): ("file.n_tokens", "file.version", "file.magic", "file.token"),
    (True, "buffer"): ("arch.length", "arch.name"),
    (True, "file"): ("file.n_tokens", "file.version", "file.magic", "file.token", "arch.length", "arch.name"),
}
_VALUES = (0, 1, 2, 3, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 255, 256, 257, 64, 0x7FC00000)
_STEPS = (1, -1, 2, -2, 64, 256, 1 << 20, 1 << 31)
# src/llama-io.cpp read_string() makes room before it looks for the bytes: seconds, and nothing learned
_MOST_TEXT = 1 << 16
_CUTS = (0, 1, -1, 2, 4, 8)


def parts_of(traits: Traits) -> tuple[str, ...]:
    """Names of the memory parts that a model's states have, or may have."""
    if traits.any_rollback:
        return ("dsv4",)
    return {
        "dense": ("attn",),
        "window": ("attn", "window"),
        "recurrent": ("recurrent",),
        "hybrid": ("recurrent", "attn", "window", "index"),
    }[traits.memory]


def _fields(part: str) -> tuple[str, ...]:
    if part == "recurrent":
        return tuple(f"recurrent.{f}" for f in _RECURRENT)
    if part == "dsv4":
        return (*(f"dsv4.{f}" for f in _DSV4), *(f"dsv4.{h}.{f}" for h in ("raw", "window") for f in _ATTENTION))
    return tuple(f"{part}.{f}" for f in _ATTENTION)


def _groups(part: str) -> tuple[str, ...]:
    """Groups that may be dropped, doubled, swapped or taken from elsewhere, cells first."""
    if part == "recurrent":
        return ("recurrent.cell", "recurrent.s", "recurrent.r", "recurrent")
    if part == "dsv4":
        return ("dsv4.window.stream.cell", "dsv4.raw.stream.cell", "dsv4.csa_state.layer", "dsv4.csa", "dsv4.window")
    return (*(f"{part}.{g}" for g in ("stream.cell", "stream.k", "stream.v", "stream")), part)


def draw_edits(
    below: Below, traits: Traits, *, whole: bool, medium: Medium, others: Sequence[int] = ()
) -> tuple[BlobEdit, ...]:
    """One to three edits of a saved state. others: slots that a stretch may be taken from."""
    n = (1, 1, 1, 2, 1, 2, 3, 1)[below(8)]
    return tuple(_draw(below, traits, _HEADERS[whole, medium], others) for _ in range(n))


def _draw(below: Below, traits: Traits, header: tuple[str, ...], others: Sequence[int]) -> BlobEdit:
    parts = parts_of(traits)
    # the first two are in every state of that memory, the others in some models' alone
    part = (*parts[:2], *parts)[below(len(parts[:2]) + len(parts))]
    fields = _fields(part)
    # headers seldom: a state that is refused there is refused before anything was read
    names = header if below(8) == 7 else fields
    name, nth = names[below(len(names))], (0, 0, 1, 2, 5)[below(5)]
    groups = _groups(part)
    group = groups[(0, 0, 0, *range(len(groups)))[below(3 + len(groups))]]
    match below(10):
        case 0 | 1:
            value = _VALUES[below(len(_VALUES))]
            return BlobEdit(how="set", where=name, nth=nth, value=min(value, _MOST_TEXT) if "arch" in name else value)
        case 2:
            step = _STEPS[below(len(_STEPS))]
            return BlobEdit(how="add", where=name, nth=nth, value=step % _MOST_TEXT if "arch" in name else step)
        case 3:
            # one cell more, consistently: nothing but what a reader makes of it is wrong
            return BlobEdit(how="double", where=groups[0], nth=nth)
        case 4 | 5:
            how = ("double", "drop", "swap")[below(3)]
            return BlobEdit(how=how, where=group, nth=nth, value=(0, 0, 1)[below(3)])  # type: ignore[arg-type]
        case 6:
            return BlobEdit(how="cut", where=name, nth=nth, value=_CUTS[below(len(_CUTS))])
        case 7 if others:
            where = ("", *groups)[below(1 + len(groups))]
            return BlobEdit(how="take", where=where, nth=nth, value=others[below(len(others))])
        case 8:
            kind = below(3)
            if kind == 0:
                return BlobEdit(how="insert", nth=1000, value=(1, 4, 8, 64)[below(4)])
            return BlobEdit(how=("insert", "zero")[kind - 1], where=name, nth=nth, value=(4, 8, 12)[below(3)])
        case _:
            nth = (0, 1000, 500, 100, 900, 999)[below(6)]
            return BlobEdit(how=("cut", "flip", "set")[below(3)], nth=nth, value=_VALUES[below(len(_VALUES))] & 0xFF)
