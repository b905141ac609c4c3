"""Set-ups of speculative drivers: which target goes with which draft, and what is known of the driver between them.

Target and draft of a pair are written with the same seed (see the recipes). All facts are of the llama.cpp of
llama-cpp-python 0.3.36; `python -m fuzz.measure.pairs` measures the numbers again. A pair is worth testing with when
every number of accepted tokens occurs, and when it is *sensitive*: a draft that only copies a map of tokens is right
whatever state it is made from, and proves nothing.
"""

import difflib
from dataclasses import dataclass

from subjects import recipes
from subjects.scenario import DriverKind

SAMPLES = 32
"""drafts of which each sensitivity was measured"""


def states_kept(kind: DriverKind | None, n_max: int, rolls_back: bool = True) -> int:
    """n_rs_seq of the target's context: llama-server asks for as many earlier recurrent states as a draft is long, and
    a model without rollback gets none (common/speculative.cpp, common_speculative_n_rs)."""
    return n_max if rolls_back and kind in ("draft-mtp", "draft-eagle3") else 0


@dataclass(frozen=True)
class Measured:
    """What was measured with the models of one seed."""

    seed: int
    accepted: tuple[int, ...]
    """in how many of 80 rounds (40 of two sequences) 0, 1, ... tokens of the draft were accepted"""
    hidden: int | None = None
    """drafts of SAMPLES that changed with another sequence's hidden row in the driver, None where it keeps none"""
    memory: int | None = None
    """drafts of SAMPLES that changed with another sequence's draft memory (the target's, where that is shared)"""


@dataclass(frozen=True)
class Pair:
    """A target, its draft and the driver between them."""

    name: str
    kind: DriverKind
    target: str
    """recipe"""
    draft: str | None
    """recipe; None where the target's own file drafts (draft-mtp), and where nothing does (the ngram kinds)"""
    about: str
    """one line: what is special"""
    n_max: int = 3
    """tokens of the longest draft"""
    shares_memory: bool = False
    """the draft context has no memory but the target's"""
    lag: int = 0
    """by how many positions the draft memory is shorter than the target's after process()"""
    offers_state: bool = False
    """get_state gives something"""
    keeps_hidden_state: bool = True
    """the driver holds what its next draft depends on: hidden rows, or what an ngram kind has learnt"""
    measured: tuple[Measured, ...] = ()

    @property
    def has_draft_context(self) -> bool:
        """A second context drafts."""
        return self.kind.startswith("draft-")

    @property
    def mtp(self) -> bool:
        """The draft context is of the type MTP."""
        return self.kind == "draft-mtp"

    @property
    def rolls_back(self) -> bool:
        """The target honours n_rs_seq, so that its recurrent part goes back as far as a draft is long."""
        return recipes.get(self.target).rollback

    @property
    def n_rs_seq(self) -> int:
        """What the server sets for the target."""
        return states_kept(self.kind, self.n_max, self.rolls_back)


_PAIRS = (
    Pair(
        name="qwen35-mtp",
        kind="draft-mtp",
        target="qwen35",
        draft=None,
        about="hybrid target, one head; the row that waits for the next token is not offered",
        measured=(
            Measured(0, (22, 20, 14, 24), hidden=24, memory=21),
            Measured(100, (30, 21, 6, 23), hidden=23, memory=25),
            Measured(200, (16, 9, 19, 36), hidden=17, memory=18),
        ),
    ),
    Pair(
        name="step35-mtp",
        kind="draft-mtp",
        target="step35",
        draft=None,
        about="target with a window, a head for each drafted token, one layer of the draft memory each",
        measured=(
            Measured(0, (24, 21, 12, 23), hidden=21, memory=28),
            Measured(100, (40, 20, 9, 11), hidden=20, memory=21),
            Measured(200, (42, 17, 7, 14), hidden=22, memory=26),
        ),
    ),
    Pair(
        name="gemma4-mtp",
        kind="draft-mtp",
        target="gemma4",
        draft="gemma4-assistant",
        shares_memory=True,
        about="the draft reads the target's memory and has none; all tokens of a draft are decoded at one position",
        measured=(
            Measured(0, (23, 18, 7, 32), hidden=23, memory=23),
            Measured(100, (16, 19, 10, 35), hidden=20, memory=23),
            Measured(200, (17, 13, 11, 39), hidden=26, memory=23),
        ),
    ),
    Pair(
        name="qwen35-eagle3",
        kind="draft-eagle3",
        target="qwen35",
        draft="eagle3-qwen35",
        lag=1,
        offers_state=True,
        about="hybrid target; the one driver that offers state (position and row that wait for the next token)",
        measured=(
            Measured(0, (36, 24, 10, 10), hidden=14, memory=16),
            Measured(100, (37, 21, 11, 11), hidden=11, memory=17),
            Measured(200, (21, 32, 13, 14), hidden=14, memory=18),
        ),
    ),
    Pair(
        name="llama-eagle3",
        kind="draft-eagle3",
        target="llama",
        draft="eagle3-llama",
        lag=1,
        about="dense target; the driver keeps the same as with a hybrid one, and offers nothing",
        measured=(
            Measured(0, (32, 28, 13, 7), hidden=10, memory=15),
            Measured(100, (17, 30, 20, 13), hidden=12, memory=18),
            Measured(200, (34, 18, 16, 12), hidden=13, memory=17),
        ),
    ),
    Pair(
        name="llama-simple",
        kind="draft-simple",
        target="llama-words",
        draft="llama-draft",
        keeps_hidden_state=False,
        about="a small model of its own; everything is in the draft memory",
        measured=(
            Measured(0, (22, 17, 20, 21), memory=17),
            Measured(100, (7, 22, 11, 40), memory=15),
            Measured(200, (34, 16, 6, 24), memory=23),
        ),
    ),
    Pair(
        name="llama-ngram-map-k",
        kind="ngram-map-k",
        target="llama-loop",
        draft=None,
        n_max=4,
        about="learns where a sequence has shown its n-grams; aborts when the text is shorter than at the last draft",
        measured=(
            Measured(0, (61, 6, 3, 2, 8)),
            Measured(100, (45, 4, 2, 1, 28)),
            Measured(200, (26, 5, 6, 2, 41)),
        ),
    ),
    Pair(
        name="llama-ngram-map-k4v",
        kind="ngram-map-k4v",
        target="llama-loop",
        draft=None,
        n_max=4,
        about="as map-k with up to four continuations and how often each was accepted",
        measured=(
            Measured(0, (63, 6, 2, 1, 8)),
            Measured(100, (46, 3, 2, 1, 28)),
            Measured(200, (26, 5, 6, 2, 41)),
        ),
    ),
    Pair(
        name="llama-ngram-mod",
        kind="ngram-mod",
        target="llama-loop",
        draft=None,
        n_max=4,
        about="one hash table for all sequences, so what one has shown is drafted for another",
        measured=(
            Measured(0, (61, 6, 4, 2, 7)),
            Measured(100, (42, 6, 6, 1, 25)),
            Measured(200, (27, 6, 5, 1, 41)),
        ),
    ),
    Pair(
        name="llama-ngram-cache",
        kind="ngram-cache",
        target="llama-loop",
        draft=None,
        n_max=8,
        about="counts of the n-grams that a sequence has shown; one new token a call teaches it nothing",
        measured=(
            Measured(0, (54, 7, 3, 1, 8, 1, 0, 4, 2)),
            Measured(100, (58, 1, 1, 1, 2, 2, 2, 1, 12)),
            Measured(200, (42, 8, 4, 4, 0, 0, 0, 0, 22)),
        ),
    ),
    Pair(
        name="llama-ngram-simple",
        kind="ngram-simple",
        target="llama-loop",
        draft=None,
        n_max=4,
        keeps_hidden_state=False,
        about="a search in the prompt, no state",
        measured=(
            Measured(0, (57, 5, 4, 1, 13)),
            Measured(100, (44, 2, 1, 1, 32)),
            Measured(200, (34, 2, 2, 1, 41)),
        ),
    ),
)
_BY_NAME = {pair.name: pair for pair in _PAIRS}


def names() -> list[str]:
    """Return the names of all pairs."""
    return list(_BY_NAME)


def all_pairs() -> list[Pair]:
    """Return all pairs, those with a draft context first."""
    return list(_PAIRS)


def get(name: str) -> Pair:
    """Return the pair called `name`; raise KeyError with near matches if there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        near = difflib.get_close_matches(name, names()) or names()
        raise KeyError(f"no pair is called {name!r}; did you mean {', '.join(near)}?") from None
