"""How far llama.cpp reads a changed blob, before it is tried."""

import pytest

from subjects.state.follow import Plan, Reached, follow
from subjects.state.parse import parse
from subjects.state.tree import Node
from tests.unit.blob_builder import attention, context, recurrent, sequence, sequence_file, session, stream, u32

DENSE = sequence(attention(stream([0, 1, 2])))
HYBRID = sequence(attention(stream([0, 1, 2])), recurrent([2]))
WINDOW = sequence(attention(stream([0, 1, 2])), attention(stream([1, 2])))
FILE = sequence_file(attention(stream([0, 1])), tokens=(7, 11))
WHOLE = context(attention(stream([0, 1], [[0], [0]]), stream([0], [[1]])))
ALL = {"dense": DENSE, "hybrid": HYBRID, "window": WINDOW, "file": FILE, "whole": WHOLE}


def node(data: bytes, name: str) -> Node:
    return next(n for n in parse(data)[0].walk() if n.name == name)


def changed(data: bytes, name: str, value: int) -> Reached:
    at = node(data, name).start
    return follow(data[:at] + u32(value) + data[at + 4 :], Plan(parse(data)[0]))


@pytest.mark.parametrize("data", ALL.values(), ids=ALL)
def test_a_good_blob_is_taken(data: bytes) -> None:
    reached = follow(data, Plan(parse(data)[0]))
    assert not reached.field and not reached.ended and not reached.stuck


@pytest.mark.parametrize("data", ALL.values(), ids=ALL)
def test_a_cut_blob_ends_in_the_field_that_was_cut(data: bytes) -> None:
    tree = parse(data)[0]
    plan = Plan(tree)
    for leaf in tree.leaves():
        reached = follow(data[: leaf.end - 1], plan)
        assert reached.ended, leaf.name
        # tokens are read as one
        assert reached.field == leaf.name.replace("file.token", "file.n_tokens"), leaf.name


def test_parameters_must_be_the_same_and_positions_need_not() -> None:
    assert changed(DENSE, "attn.stream.cell.pos", 9).field == ""
    assert changed(DENSE, "seq", 9).field == ""
    assert changed(DENSE, "attn.stream.v_trans", 9).field == "attn.stream.v_trans"
    assert changed(DENSE, "attn.stream.cell.n_seq", 9).field == "attn.stream.cell.n_seq"
    assert changed(WHOLE, "arch.length", 9).field == "arch.length"


def test_early_is_before_anything_was_changed() -> None:
    assert changed(HYBRID, "magic", 0).early
    assert changed(HYBRID, "attn.n_stream", 9).early
    assert not changed(HYBRID, "attn.stream.v_trans", 9).early
    assert not changed(WINDOW, "window.n_stream", 9).early
    # the stream is emptied by then
    assert not follow(WHOLE[: node(WHOLE, "attn.stream.n_cells").start], Plan(parse(WHOLE)[0])).early


def test_recurrent_cells_are_counted_where_they_are_reached() -> None:
    assert follow(HYBRID, Plan(parse(HYBRID)[0])).recurrent == 1
    assert changed(HYBRID, "recurrent.n_cells", 3).recurrent == 3
    assert changed(HYBRID, "attn.stream.v_trans", 9).recurrent == 0


def test_positions_that_no_removal_reaches_are_those_of_attention() -> None:
    assert changed(HYBRID, "attn.stream.cell.pos", -1).stuck
    assert not changed(HYBRID, "recurrent.cell.pos", -1).stuck


def test_tokens_of_a_file_are_passed_over() -> None:
    more = session(attention(stream([0], [[0]])), tokens=(1, 2, 3))
    fewer = session(attention(stream([0], [[0]])))
    assert follow(more, Plan(parse(fewer)[0])).field == ""
