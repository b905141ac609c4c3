"""Which known faults a changed state sets off: by its edits, without the blob, and by how far a blob would be read.

After the sources: src/llama-kv-cache.cpp state_read_sinfo() empties the target's stream where a section is refused, but
not where its first numbers end short; the memories of several parts differ in what they undo when a later part is
refused: llama_memory_hybrid the attention part, llama_memory_hybrid_idx everything, windowed memories and deepseek4's
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fuzz.traits import Traits
from subjects.scenario import BlobEdit, ContextParams, Medium
from subjects.state.follow import LARGEST, Reached

_FREE = frozenset({"pos", "x", "y", "token", "data", "ngram_data"})
"""Fields that no reader looks at."""
_HEADERS = frozenset({"magic", "seq", "file", "arch"})
_CHECKED = frozenset(
    {"v_trans", "n_layer", "type", "row", "element", "width", "s_trans", "ngram_row", "version", "ratio", "size", "id"}
)
"""Numbers that must be what the context has; nothing is read wrongly because of them, since reading ends there."""


@dataclass(frozen=True)
class Target:
    """What a changed state is restored into. streams: attention is in several."""

    traits: Traits
    whole: bool
    partial: bool
    medium: Medium
    streams: bool


def _parts(e: BlobEdit) -> tuple[str, str]:
    return e.where.partition(".")[0], e.where.rpartition(".")[2]


def _taken(e: BlobEdit, t: Target) -> bool:
    """No reader minds this edit."""
    first, last = _parts(e)
    if e.how == "insert" and not e.where and e.nth >= 1000:
        return not (t.whole and t.medium == "file")  # which wants to have read everything
    if e.how in ("set", "add", "flip", "zero") and e.where:
        return last in _FREE or (last == "seq" and not t.whole)
    # of one sequence a recurrent memory has one cell
    if e.where == "recurrent.cell":
        return e.how == "swap"
    # not so a cell that is dropped: of an only one the rest of its stream is left
    return e.how in ("double", "swap") and last == "cell" and e.value == 0 and first != "dsv4" and not t.whole


def _early(e: BlobEdit, t: Target) -> bool:
    """The state is refused before anything is touched."""
    first, _ = _parts(e)
    if e.how in ("set", "add", "flip", "zero"):
        return first in _HEADERS or e.where == ("window.n_stream" if t.partial and t.traits.window else "attn.n_stream")
    return e.how == "cut" and first in _HEADERS and e.value <= 0


def _ends_short(e: BlobEdit) -> bool:
    """The reader may come to the end of the bytes where it expects a number: nothing is undone there."""
    _, last = _parts(e)
    if e.how in ("set", "add", "flip", "zero"):
        return bool(e.where) and last not in _CHECKED
    return True


def leaves_half(edits: Iterable[BlobEdit], t: Target) -> bool:
    """Whether a refused restore of the edited state may leave its target half restored (known: half-restore)."""
    return any(_half(e, t) for e in edits if not _taken(e, t) and not _early(e, t))


def streams_of(p: ContextParams) -> int:
    """How many streams attention has."""
    return 1 if p.kv_unified else p.n_seq_max


def refused_in_attention(t: Target) -> bool:
    """Whether a state that is refused in its attention part leaves its target half restored: attention is emptied, and
    what there is beside it as it was or restored."""
    if t.traits.undoes:
        return False
    return t.traits.window > 0 or t.traits.memory == "hybrid" or (t.partial and t.traits.parts)


def _undone(part: str, t: Target) -> bool:
    """Whether a refusal in that part undoes attention: llama_memory_hybrid does so for a whole recurrent part."""
    return part == "recurrent" and not (t.traits.window or t.traits.any_rollback or t.partial)


def _half(e: BlobEdit, t: Target) -> bool:
    first, last = _parts(e)
    if refused_in_attention(t) and not _undone(first, t):
        return True
    if t.traits.undoes:
        return False
    if t.whole:
        return _ends_short(e)
    if t.traits.memory == "hybrid":
        return e.how in ("cut", "drop", "take") and last in ("recurrent", "n_cells")  # it may end at the count
    return t.streams and e.how in ("cut", "drop", "take")


def half_reached(r: Reached, t: Target) -> bool:
    """The same of a blob that is refused, by how far it is read."""
    if t.traits.undoes or r.early:
        return False
    if refused_in_attention(t) and not _undone(r.field.partition(".")[0], t):
        return True
    in_numbers = r.ended and not r.field.endswith(("data", "type", "row", "element", "width"))
    if t.whole:
        return in_numbers or (t.medium == "file" and not r.field)
    if t.traits.memory == "hybrid":
        return r.ended and r.field == "recurrent.n_cells"
    return in_numbers


def leaves_stuck_cells(edits: Iterable[BlobEdit]) -> bool:
    """Whether an edit leaves attention with a cell that no removal reaches: below 0, or at the largest position (known:
    stuck-cell).
    """
    for e in edits:
        if not e.where.endswith("stream.cell.pos"):
            continue
        value = e.value & 0xFFFFFFFF
        if e.how == "set" and value >= LARGEST:
            return True
        # the first cell is most often at position 0
        if e.how == "add" and (value == 1 << 31 or (value > LARGEST and e.nth == 0)):
            return True
    return False


def moves_indexer_apart(edits: Iterable[BlobEdit]) -> bool:
    """Whether an edit moves cells of the indexer away from attention's, or those from these (known: index-pos)."""
    return any(
        e.where.startswith(("index.stream.cell", "attn.stream.cell"))
        and e.how != "cut"
        and e.where.endswith(("pos", "cell"))
        for e in edits
    )


def claims_several_recurrent_cells(edits: Iterable[BlobEdit], n_seq: int) -> bool:
    """Whether the edits make the state of one sequence claim several recurrent cells, as many as there may be, and
    bring them along (known: recurrent-cells). n_seq: cells of the memory.
    """
    mine = [e for e in edits if e.where in ("recurrent.n_cells", "recurrent.cell")]
    if any(e.how == "double" and e.where == "recurrent.cell" and e.value == 0 for e in mine):
        return n_seq > 1
    counts = [e for e in mine if e.where == "recurrent.n_cells" and e.how in ("set", "add")]
    claimed = any(1 < (e.value if e.how == "set" else 1 + e.value) <= n_seq for e in counts)
    # alone, the next numbers are no cell
    return claimed and any(e not in counts for e in edits)


def reads_past_the_end(edits: Iterable[BlobEdit]) -> bool:
    """Whether a session file ends before what its numbers announce (known: file-cut)."""
    return any(not e.where or e.how in ("cut", "drop", "take", "insert", "double") or _ends_short(e) for e in edits)
