"""The registry of target and draft pairs names what there is, and what is said of a pair does not contradict itself."""

from typing import get_args

import pytest

from subjects import pairs, recipes
from subjects.scenario import DriverKind

NAMES = pairs.names()


def test_names_are_unique_and_every_kind_of_driver_has_a_pair() -> None:
    assert [pair.name for pair in pairs.all_pairs()] == NAMES
    assert len(set(NAMES)) == len(NAMES) == len(pairs.all_pairs())
    assert {pair.kind for pair in pairs.all_pairs()} == set(get_args(DriverKind))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_is_consistent(name: str) -> None:
    pair = pairs.get(name)
    target = recipes.get(pair.target)
    own = pair.draft is None
    assert own or recipes.get(pair.draft or "").role == "driver"
    assert pair.has_draft_context or (own and not pair.shares_memory and not pair.lag)
    assert pair.rolls_back == target.rollback
    assert pair.n_rs_seq in (0, pair.n_max)
    assert not pair.offers_state or pair.keeps_hidden_state


@pytest.mark.parametrize("name", NAMES)
def test_three_seeds_were_measured(name: str) -> None:
    pair = pairs.get(name)
    assert [m.seed for m in pair.measured] == [0, 100, 200]
    for m in pair.measured:
        assert len(m.accepted) == pair.n_max + 1
        assert sum(m.accepted) == 80
        assert (m.memory is not None) == pair.has_draft_context
        assert (m.hidden is not None) == (pair.has_draft_context and pair.keeps_hidden_state)
        if pair.has_draft_context:
            assert min(m.accepted) > 0
            assert min(n for n in (m.hidden, m.memory) if n is not None) >= pairs.SAMPLES // 4


@pytest.mark.parametrize("name", [n for n in NAMES if pairs.get(n).draft])
def test_a_draft_has_the_vocabulary_of_its_target(name: str) -> None:
    pair = pairs.get(name)
    target, draft = recipes.get(pair.target), recipes.get(pair.draft or "")
    assert draft.n_vocab == target.n_vocab
    words = [
        next((value for key, _, value in recipe.build()[0] if key == "tokenizer.ggml.tokens"), None)
        for recipe in (target, draft)
    ]
    assert words[0] == words[1]
    assert (words[0] is not None) == (pair.kind == "draft-simple")


def test_unknown_name_lists_near_ones() -> None:
    with pytest.raises(KeyError, match=r"no pair is called 'qwen35-mpt'; did you mean qwen35-mtp"):
        pairs.get("qwen35-mpt")
    with pytest.raises(KeyError, match=r"did you mean qwen35-mtp, step35-mtp, .*llama-ngram-simple"):
        pairs.get("@@@@")
