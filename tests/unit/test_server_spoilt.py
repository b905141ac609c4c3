"""Which answers a known fault may have spoilt, read off runs made by hand: a checkpoint of one token too many."""

from __future__ import annotations

from collections.abc import Sequence

from oracles.server.spoilt import SPOILERS, spoilt, stale_checkpoint
from subjects.scenario import ModelRef
from subjects.server.scenario import AnyRequest, Chat, EraseSlot, Restart, RestoreSlot, SaveSlot, ServerScenario, Turn
from subjects.server.trace import Deed, Event, Reply, ServerTrace

NAME = "server-checkpoint"
Done = tuple[AnyRequest, Reply]
ON = Turn(conv=0)


def event(what: Deed, n: int = 0, of: int = 0, slot: int = 0) -> Event:
    return Event(what, slot, n, of)


def turn(prompt: Sequence[int], *events: Event, slot: int = 0, answer: Sequence[int] = (90, 91)) -> Done:
    return ON, Reply(
        request=0, status=200, prompt=tuple(prompt), tokens=tuple(answer), events=events, slot=slot, task=0,
        length=len(prompt),
    )  # fmt: skip


def action(request: SaveSlot | RestoreSlot | EraseSlot | Restart, status: int = 200) -> Done:
    return request, Reply(request=0, status=status, slot=getattr(request, "slot", -1), n=9)


def bad(*done: Done) -> set[int]:
    """The requests that are spoilt."""
    replies = []
    for i, (_, reply) in enumerate(done):
        reply.request, reply.task = i, i if reply.task >= 0 else -1
        replies.append(reply)
    program = ServerScenario(model=ModelRef(recipe="qwen35"), requests=tuple(r for r, _ in done))
    return {*stale_checkpoint(program, ServerTrace(replies=replies))}


A = [*range(20)]


def edited(at: int, *events: Event) -> Done:
    """The conversation with other tokens from one on."""
    return turn([*A[:at], *[77] * 6], *events)


def began() -> Done:
    return turn(A, event("kept"), event("checkpoint", 12), event("checkpoint", 16))


def test_a_checkpoint_within_what_is_common_is_good() -> None:
    assert bad(began(), edited(14, event("restored", 12, 12), event("kept", 12), event("erased", 16))) == set()
    assert bad(began(), edited(16, event("restored", 16, 16), event("kept", 16))) == set()
    assert bad(began(), turn([*A, 90, 5, 6], event("kept", 21), event("checkpoint", 21))) == set()


def test_one_token_more_than_is_common_is_spoilt_and_so_is_what_comes_behind() -> None:
    stale = edited(15, event("restored", 15, 16), event("kept", 15))
    again = turn([*A[:15], *[77] * 6, 90, 91, 5], event("kept", 22))
    assert bad(began(), stale) == {1}
    assert bad(began(), stale, again) == {1, 2}


def test_one_that_is_left_spoils_the_answer_that_goes_on_from_it() -> None:
    left = edited(15, event("restored", 12, 12), event("kept", 12))  # that of 16 was to be erased
    then = turn([*A[:15], 77, 77, 5, 5], event("restored", 16, 16), event("kept", 16))
    assert bad(began(), left) == set()
    assert bad(began(), left, then) == {2}
    # it was erased: another one of as many tokens is good
    erased = edited(15, event("restored", 12, 12), event("kept", 12), event("erased", 16), event("checkpoint", 16))
    assert bad(began(), erased, then) == set()


def test_what_is_processed_from_its_beginning_is_good_again() -> None:
    stale = edited(15, event("restored", 15, 16), event("kept", 15))
    fresh = turn([3, 4, 5], event("erased", 12), event("erased", 16), event("kept", 0))
    assert bad(began(), stale, fresh) == {1}
    assert bad(began(), stale, action(Restart()), turn(A, event("kept"))) == {1}
    assert bad(began(), stale, action(EraseSlot(slot=0)), turn(A, event("kept"))) == {1}


def test_another_slot_is_not_spoilt() -> None:
    stale = edited(15, event("restored", 15, 16), event("kept", 15))
    other = turn([5, 6, 7], event("kept", 0, slot=1), slot=1)
    assert bad(began(), other, stale, turn([5, 6, 7, 90, 91, 8], event("kept", 4, slot=1), slot=1)) == {2}


def test_a_spoilt_slot_spoils_its_file_and_who_takes_it() -> None:
    stale = edited(15, event("restored", 15, 16), event("kept", 15))
    on = turn([*A[:15], *[77] * 6, 90, 91, 5], event("kept", 22, slot=1), slot=1)
    save, restore = action(SaveSlot(slot=0, file=0)), action(RestoreSlot(slot=1, file=0))
    assert bad(began(), stale, save, restore, on) == {1, 4}
    # a file of another slot, and one that was refused
    assert bad(began(), action(SaveSlot(slot=0, file=0)), stale, action(RestoreSlot(slot=1, file=0)),
               turn([*A, 90, 5], event("kept", 21, slot=1), slot=1)) == {2}  # fmt: skip


def test_a_spoilt_prompt_spoils_who_takes_it_out_of_the_prompt_cache() -> None:
    stale = edited(15, event("restored", 15, 16), event("kept", 15))
    length = 15 + 6 + 1
    away = turn([3, 4, 5], event("cached", length, slot=-1), event("kept", 0))
    back = turn(
        [*A[:15], *[77] * 6, 90, 91, 5], event("cached", 4, slot=-1), event("loaded", slot=-1), event("kept", 22)
    )
    assert bad(began(), stale, away, back) == {1, 3}
    good = edited(15, event("restored", 12, 12), event("erased", 16), event("kept", 12))
    assert bad(began(), good, away, back) == set()


def test_a_run_of_which_nothing_was_read_is_not_spoilt() -> None:
    silent = (Chat(conv=0), Reply(request=0, status=200, messages=(("user", "red"),)))
    assert bad(silent, silent) == set()


def test_spoilt_requests_have_the_name_of_the_fault() -> None:
    stale = edited(15, event("restored", 15, 16), event("kept", 15))
    done = [began(), stale]
    replies = [r for _, r in done]
    replies[1].request = 1
    program = ServerScenario(model=ModelRef(recipe="qwen35"), requests=(ON, ON))
    assert spoilt((NAME,), program, ServerTrace(replies=replies)) == {1: NAME}
    assert spoilt((), program, ServerTrace(replies=replies)) == {}
    assert spoilt(("another",), program, ServerTrace(replies=replies)) == {}
    assert NAME in SPOILERS
