"""The account of one run of llama-server: every answer held against the one that a cold server gives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from oracles.band import FAR
from subjects.server.scenario import ServerScenario
from subjects.server.trace import End, Reply, ServerTrace


@dataclass(frozen=True, slots=True)
class Held:
    """An answer against the cold one. row: the first token at which they part, or the one whose probabilities differ
    most. error: largest difference of the logarithm of a probability, up to where they part. gap: by how much the cold
    server prefers its own token there (0 where they do not part). compared: tokens that were compared; probable: those
    whose probabilities were, which the server does not tell of drafted ones.
    """

    reply: Reply
    cold: Reply
    band: float
    row: int = -1
    token: int = -1
    expected: int = -1
    error: float = 0.0
    gap: float = 0.0
    compared: int = 0
    probable: int = 0

    @property
    def parted(self) -> bool:
        """Another token, which is no near tie: the cold server prefers its own by more than both may be off."""
        return self.token != self.expected and self.gap > 2 * self.band

    @property
    def wrong(self) -> bool:
        """Another answer, or the same tokens with probabilities that are far off."""
        return self.parted or self.ends_elsewhere or not self.error <= self.band * FAR

    @property
    def ambiguous(self) -> bool:
        """Between noise and error."""
        return not self.wrong and self.error > self.band

    @property
    def ends_elsewhere(self) -> bool:
        """As far as both go the tokens are the same, but one goes on. A token that ends a text is one of its tokens, so
        it is limits that differ."""
        both = self.reply.answered and self.cold.answered
        return both and self.token == self.expected and len(self.reply.tokens) != len(self.cold.tokens)

    @property
    def near_tie(self) -> bool:
        """Another token, about which the cold server itself is undecided."""
        return self.token != self.expected and not self.parted


@dataclass(frozen=True, slots=True)
class Clean:
    """What a server that drafts and keeps nothing accepts of its drafts, against one that restored something.

    reply, clean: of the same prompt, with the same answer. probes: (accepted here, accepted by the clean server) for
    other continuations of the same state, which tell a lost state from a near tie of the draft. coarse: a known fault
    costs one draft in a hundred or so, and only a much greater loss is another.
    """

    reply: Reply
    clean: Reply
    probes: tuple[tuple[int, int], ...] = ()
    coarse: bool = False

    @property
    def drop(self) -> int:
        """Drafts that were lost."""
        return self.clean.accepted - self.reply.accepted

    @property
    def wrong(self) -> bool:
        """The drop shows with other continuations too, and they do not make up for it."""
        drops = sum(mine < theirs for mine, theirs in self.probes)
        mine, theirs = sum(a for a, _ in self.probes), sum(b for _, b in self.probes)
        if self.coarse:
            return self.drop > 0 and drops >= 4 and theirs >= 9 and 3 * mine <= 2 * theirs
        return self.drop > 0 and drops >= 2 and mine < theirs


@dataclass(frozen=True, slots=True)
class Other:
    """One answer of a run against the same answer of a run that differs in what must not matter."""

    what: str
    reply: Reply
    held: Held


@dataclass(slots=True)
class ServerAccount:
    """All that an oracle may look at. tainted: the requests before which the server took a changed file, so that nobody
    vouches for what it holds. memory: kind of memory of the model."""

    program: ServerScenario
    trace: ServerTrace
    memory: str = "?"
    held: list[Held] = field(default_factory=list)
    unanswered: list[tuple[Reply, Reply]] = field(default_factory=list)
    """answered with an error here though their prompts fit, with what the cold server answers"""
    fallen: tuple[Reply, End, str] | None = None
    """the request at which a cold server ended, how, and its log"""
    refused: int = 0
    """prompts too long for a slot, which both refuse"""
    clean: list[Clean] = field(default_factory=list)
    others: list[Other] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    tainted: frozenset[int] = frozenset()
    spoilt: dict[int, str] = field(default_factory=dict)
    """requests that a known fault may have spoilt, with its name"""
    misdrafted: dict[int, str] = field(default_factory=dict)
    """the same of those whose drafts alone it may have spoilt"""


def hold(reply: Reply, cold: Reply, band: float) -> Held:
    """Compare two answers to one prompt, token by token, until they part."""
    row = token = expected = -1
    error, gap, compared, probable = 0.0, 0.0, 0, 0
    for i, (a, b) in enumerate(zip(reply.tokens, cold.tokens, strict=False)):
        mine = dict(reply.tops[i]) if i < len(reply.tops) else {}
        theirs = dict(cold.tops[i]) if i < len(cold.tops) else {}
        both = mine.keys() & theirs.keys()
        off = max((_apart(mine[t], theirs[t]) for t in both), default=0.0)
        # a list that has nothing in common with the other one is as far off as it can be
        off = math.inf if mine and theirs and not both else off
        compared += 1
        probable += bool(mine)
        if not off <= error:
            row, error, token, expected = i, off, a, b
        if a != b:
            # where the cold server does not say how sure it was, it was
            least = min(theirs.values(), default=-math.inf)
            apart = theirs.get(b, 0.0) - theirs.get(a, least)
            return Held(reply, cold, band, i, a, b, error, apart, compared, probable)
    return Held(reply, cold, band, row, token, expected, error, gap, compared, probable)


def _apart(a: float, b: float) -> float:
    d = abs(a - b)
    return d if math.isfinite(d) else (0.0 if a == b else math.inf)
