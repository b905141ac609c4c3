"""What the fields of a blob are called: the names that edits of a scenario use, and words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from subjects.state.canon import PART_WORDS, WORDS
from subjects.state.parse import TYPES
from subjects.state.tree import Node

TENSORS = ("k", "v", "r", "s")
FIELDS = {
    "n_stream": "number of streams",
    "n_cells": "number of cells",
    "pos": "position",
    "n_seq": "number of sequences",
    "seq": "sequence",
    "n_layer": "number of layers",
    "v_trans": "mark of transposed V",
    "s_trans": "mark of transposed state",
    "row": "bytes of a row",
    "element": "bytes of an element",
    "width": "values of a row",
    "n_tokens": "number of tokens",
    "length": "length of the name",
    "ngram_row": "bytes of an n-gram row",
    "ngram_data": "n-gram rows",
    "data": "rows",
}
HEADS = {"file": "file header", "arch": "architecture", "driver": "driver"}
MUST_BE = {
    "magic": "one that is known",
    "n_stream": "1 to 256",
    "n_cells": "so many that 8 bytes for each are there",
    "n_seq": "1 in the blob of one sequence (0 if recurrent), in a context's the number of sequences with the cell",
    "seq": "0 to 255",
    "v_trans": "0 or 1",
    "s_trans": "0",
    "n_layer": "at most 1024, and of a recurrent part at least 1",
    "type": "a type that a cache can have: " + ", ".join(f"{i} ({name})" for i, (name, _, _) in TYPES.items()),
    "row": "a multiple of the type's block",
    "element": "the size of the type",
    "width": "at most 1048576",
    "length": "1 to 64, of an architecture's name: what begins with no magic is read as the state of a whole context",
    "name": "the name of an architecture",
    "n_tokens": "so many that 4 bytes for each are there",
}
"""What a reading takes for plausible (subjects/state/parse.py)."""


class Place(NamedTuple):
    """A node in its tree. nth: which of those of its name, as `Edit.nth` counts them; path: the groups that it is in
    from the outermost, each with its number among its like.
    """

    node: Node
    nth: int
    path: tuple[tuple[Node, int], ...]


def places(tree: Node) -> Iterator[Place]:
    """All nodes below the root, in the order of their bytes."""
    seen: Counter[str] = Counter()

    def below(parent: Node, path: tuple[tuple[Node, int], ...]) -> Iterator[Place]:
        like: Counter[str] = Counter()
        for child in parent.children:
            nth, number = seen[child.name], like[child.last]
            seen[child.name] += 1
            like[child.last] += 1
            yield Place(child, nth, path)
            yield from below(child, (*path, (child, number)))

    return below(tree, ())


def place_at(tree: Node, offset: int) -> Place | None:
    """The field that has the byte of that offset."""
    for place in places(tree):
        if place.node.kind != "group" and place.node.start <= offset < place.node.end:
            return place
    return None


def many(word: str, n: int) -> str:
    """A word in the number that fits: "position", "positions"."""
    return word if n == 1 else f"{word}s"


def bytes_of(n: int) -> str:
    """A size: "1 byte", "20 bytes"."""
    return f"{n} {many('byte', n)}"


def shown(node: Node) -> str:
    """The value of a field that is no data."""
    if node.last == "magic" and isinstance(node.value, int):
        return f"0x{node.value:08x}"
    return node.value.hex(" ") if isinstance(node.value, bytes) else str(node.value)


def part_words(name: str) -> str:
    """What a memory part or a header is called."""
    last = name.rpartition(".")[2]
    return PART_WORDS.get(last) or HEADS.get(last, last)


def words(place: Place) -> str:
    """A field in words: "position of cell 3 of attention", "type of layer 0, attention K"."""
    what = FIELDS.get(place.node.last, place.node.last.replace("_", " "))
    return f"{what} of {where(place.path)}" if place.path else f"{what} in the header"


def where(path: tuple[tuple[Node, int], ...]) -> str:
    """A group in words."""
    node, number = path[-1]
    outer = path[:-1]
    if node.last == "cell":
        owners = [shown(c) for c in node.group("seq")]
        of = f" (of {many('sequence', len(owners))} {', '.join(owners)})" if owners else ""
        return f"cell {number}{of} of {where(outer)}"
    if node.last == "stream":
        alone = len(outer[-1][0].group("stream")) == 1
        return where(outer) if alone else f"{where(outer)}, stream {number}"
    if node.last in TENSORS and outer and outer[-1][0].last != "layer":
        part, stream = where(outer).partition(",")[::2]
        return f"layer {number}, {part} {WORDS[node.last]}" + (f",{stream}" if stream else "")
    if outer and outer[-1][0].last == "layer":  # of a compressed cache
        layer = outer[-1][0]
        at = layer.number("id") if layer.children else outer[-1][1]
        return f"layer {at}, {where(outer[:-1])} {WORDS.get(node.last, node.last)}"
    return part_words(node.last)
