"""The names that edits may use are those of the grammar, and what is drawn uses no other."""

from __future__ import annotations

import random

import pytest

from fuzz.damage import draw_edits
from fuzz.state import State, broken
from fuzz.traits import traits_of
from subjects import recipes
from subjects.scenario import BlobEdit, ContextParams, Corrupt, Save
from subjects.state.names import names
from subjects.state.parse import parse
from tests.unit.blob_builder import attention, context, recurrent, sequence, sequence_file, session, stream


def test_every_name_that_is_read_may_be_used() -> None:
    parts = (attention(stream([0, 1])), attention(stream([1])), recurrent([1]))
    whole = (attention(stream([0, 1], [[0], [0]])),)
    for data in (sequence(*parts), sequence_file(*parts, tokens=(3,)), context(*whole), session(*whole, tokens=(1,))):
        assert {n.name for n in parse(data)[0].walk() if n.name} <= names()


@pytest.mark.parametrize("recipe", recipes.all_recipes(), ids=lambda r: r.name)
def test_every_name_that_is_drawn_is_one(recipe: recipes.Recipe) -> None:
    rnd, traits = random.Random(1), traits_of(recipe)
    for whole in (False, True):
        for medium in ("buffer", "file"):
            drawn = [
                e
                for _ in range(300)
                for e in draw_edits(rnd.randrange, traits, whole=whole, medium=medium, others=(1,))
            ]
            assert {e.where for e in drawn if e.where} <= names()


def test_a_name_that_is_none_is_told() -> None:
    state = State(traits_of(recipes.get("llama")), ContextParams())
    state.apply(Save(seq=0, slot=0))
    assert broken(state, Corrupt(slot=0, edits=(BlobEdit(how="set", where="attn.stream.cel.pos"),))) == [
        "corrupt.where"
    ]
    assert broken(state, Corrupt(slot=0, edits=(BlobEdit(how="set", where="recurrent.cell.pos"),))) == []
