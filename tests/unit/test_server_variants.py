"""Programs that differ in what must not matter: which requests an answer was made by, and what is changed around it."""

from __future__ import annotations

import pytest

from oracles.server.variants import PROBES, continuations, other_histories, upto, without_drafting
from subjects.scenario import DriverParams, ModelRef
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    Cut,
    EraseSlot,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
)
from subjects.server.trace import Reply

NEW = Cut("start")


def program(*requests: AnyRequest, driver: DriverParams | None = None) -> ServerScenario:
    return ServerScenario(model=ModelRef(recipe="llama"), requests=requests, driver=driver)


def changed(at: int, *requests: AnyRequest, part: int = 0) -> list[tuple[int, int]] | None:
    """Which completions say something else, by request and part; None where there is no other history."""
    old = program(*requests)
    new = other_histories(old, Reply(request=at, part=part))
    if new is None:
        return None
    assert len(new.requests) == at + 1
    found = []
    for i, (a, b) in enumerate(zip(old.requests, new.requests, strict=False)):
        assert type(a) is type(b)
        mine, theirs = (x.asks if isinstance(x, Together) else (x,) for x in (a, b))
        for p, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            if x != y:
                # as many tokens at the same places, of another stream
                assert isinstance(x, Turn | Chat)
                assert isinstance(y, Turn | Chat)
                assert y.stream > x.stream
                found.append((i, p))
    return found


T = Turn


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        # its own conversation alone
        ((T(conv=0), T(conv=0), T(conv=0)), None),
        # another one between
        ((T(conv=0), T(conv=1), T(conv=0)), [1]),
        # an edit and a repetition go on from it, a new beginning does not
        ((T(conv=0), T(conv=1), T(conv=0, keep=Cut("end", -3))), [1]),
        ((T(conv=0), T(conv=1), T(conv=0, keep=Cut("prompt"), n=0)), [1]),
        ((T(conv=0), T(conv=1), T(conv=0, keep=NEW)), [0, 1]),
        ((T(conv=0), T(conv=1), T(conv=0, keep=Cut("start", 5))), [1]),
        # it began anew since
        ((T(conv=0), T(conv=0, keep=NEW), T(conv=0)), [0]),
        # a branch comes of what the other conversation was then
        ((T(conv=0), T(conv=1, base=0), T(conv=0), T(conv=1)), [2]),
        ((T(conv=0), T(conv=0), T(conv=1, base=0), T(conv=2), T(conv=1)), [3]),
        ((T(conv=0), T(conv=1), T(conv=2, base=1)), [0]),
        # into a conversation that said something else
        ((T(conv=1), T(conv=0), T(conv=1, base=0), T(conv=1)), [0]),
        # chats and conversations are apart
        ((T(conv=0), Chat(conv=0), T(conv=0)), [1]),
        ((Chat(conv=0), T(conv=0), Chat(conv=0)), [1]),
        ((Chat(conv=0), Chat(conv=1), Chat(conv=0, keep=2)), [1]),
        ((Chat(conv=0), Chat(conv=1), Chat(conv=0, keep=0)), [0, 1]),
        # what is no completion stays
        ((T(conv=0), SaveSlot(0, 0), T(conv=1), EraseSlot(0), RestoreSlot(0, 0), Restart(), T(conv=0)), [2]),
    ],
)
def test_other_conversations_say_something_else(requests: tuple[AnyRequest, ...], expected: list[int] | None) -> None:
    found = changed(len(requests) - 1, *requests)
    assert found == (expected if expected is None else [(i, 0) for i in expected])


def test_requests_that_are_sent_together_are_told_apart() -> None:
    together = Together(asks=(T(conv=0), T(conv=1), Chat(conv=0)))
    requests = (T(conv=0), T(conv=1), together, T(conv=1))
    assert changed(2, *requests) == [(1, 0), (2, 1), (2, 2)]
    assert changed(2, *requests, part=1) == [(0, 0), (2, 0), (2, 2)]
    assert changed(2, *requests, part=2) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert changed(3, *requests) == [(0, 0), (2, 0), (2, 2)]


def test_a_branch_of_a_request_that_was_sent_at_the_same_time_comes_of_what_was_before() -> None:
    together = Together(asks=(T(conv=0, keep=NEW), T(conv=1, base=0)))
    assert changed(1, T(conv=0), together, part=1) == [(1, 0)]


def test_drafting_is_left_out_up_to_the_answer() -> None:
    p = program(T(conv=0), T(conv=0), T(conv=0), driver=DriverParams(kind="draft-mtp"))
    without = without_drafting(p, Reply(request=1))
    assert without.driver is None
    assert without.requests == upto(p, 1) == p.requests[:2]


def test_a_state_goes_on_in_other_ways() -> None:
    p = program(T(conv=0, n=9), T(conv=0, n=0, predict=3), T(conv=0))
    found = continuations(p, Reply(request=1))
    assert len({f.key() for f in found}) == PROBES
    for f in found:
        assert f.requests[0] == p.requests[0]
        last = f.requests[-1]
        assert isinstance(last, Turn)
        # a token more than was asked for, so that there is another one
        assert (len(f.requests), last.n, last.keep) == (2, 1, Cut())
        assert last.predict >= 12
    assert continuations(program(Chat(conv=0)), Reply(request=0)) == []
    assert continuations(program(Together(asks=(T(conv=0), T(conv=1)))), Reply(request=0)) == []
