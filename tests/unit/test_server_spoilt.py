"""Which answers a known fault may have spoilt, read off runs made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from oracles.server.spoilt import SPOILERS, foreign_row, spoilt, stale_checkpoint, worn_checkpoint
from subjects.scenario import DriverKind, DriverParams, ModelRef
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    EraseSlot,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Turn,
)
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


def test_a_prompt_that_is_refused_leaves_what_the_slot_holds() -> None:
    # the checkpoint of 16 tokens is of the conversation, not of the prompt that was refused
    refused = turn([*A[:18], *[5] * 999])
    refused[1].status, refused[1].tokens = 400, ()
    assert bad(began(), refused, edited(17, event("restored", 16, 16), event("kept", 16))) == set()
    assert bad(began(), refused, edited(15, event("restored", 15, 16), event("kept", 15))) == {2}
    # nobody knows more of it than both have in common
    short = turn([*A[:14], *[5] * 999])
    short[1].status, short[1].tokens = 500, ()
    assert bad(began(), short, edited(17, event("restored", 16, 16), event("kept", 16))) == {2}


def drafted(kind: DriverKind, *done: Done, draft: str | None = None) -> set[int]:
    """The requests that are drafted with a position made of something else."""
    for i, (_, reply) in enumerate(done):
        reply.request, reply.task = i, i if reply.task >= 0 else -1
    driver = DriverParams(kind=kind, draft=ModelRef(recipe=draft) if draft else None)
    program = ServerScenario(model=ModelRef(recipe="qwen35"), driver=driver, requests=tuple(r for r, _ in done))
    return {*foreign_row(program, ServerTrace(replies=[r for _, r in done]))}


KEPT_0 = event("kept")


def on(prompt: Sequence[int], kept: int, *events: Event, slot: int = 0) -> Done:
    """A prompt that goes on behind so many tokens. Of A and its answer 21 are decoded."""
    return turn(prompt, *events, event("kept", kept, slot=slot), slot=slot)


def test_a_row_is_that_of_the_prompt_where_it_goes_on() -> None:
    assert drafted("draft-mtp", turn(A, KEPT_0), on([*A, 90, 91, 5], 21), on([*A, 90, 91, 5, 90, 91], 24)) == set()
    assert drafted("draft-mtp", turn(A, KEPT_0), on([*A[:10], 77], 10)) == {1}
    # a prompt that has nothing in common begins with it, too; in another slot there is none
    assert drafted("draft-mtp", turn(A, KEPT_0), on([5, 6], 0)) == {1}
    assert drafted("draft-mtp", turn(A, KEPT_0), on([5, 6], 0, slot=1)) == set()
    assert drafted("draft-mtp", turn(A, KEPT_0), action(Restart()), on([5, 6], 0)) == set()


def test_a_position_is_foreign_until_it_is_cut() -> None:
    back = on([*A[:10], 77], 10)  # 12 tokens are decoded; position 10 is foreign
    behind, before = on([*A[:10], 77, 90, 91], 12), on([*A[:10], 77, 90], 12)
    assert drafted("draft-mtp", turn(A, KEPT_0), back, behind, before) == {1, 2, 3}
    eagle = on([*A[:10], 77, 90, 91], 12)
    again = on([*A[:10], 77, 90, 91], 9)  # goes on from a checkpoint
    assert drafted("draft-eagle3", turn(A, KEPT_0), back, eagle) == {1, 2}
    assert drafted("draft-eagle3", turn(A, KEPT_0), back, eagle, again) == {1, 2}


def test_draft_eagle3_is_right_where_the_token_behind_is_the_same() -> None:
    # goes on from a checkpoint of 8 tokens, with 10 in common
    edited_ = [*A[:10], 77]
    assert drafted("draft-eagle3", turn(A, KEPT_0), on(edited_, 8, event("restored", 8, 8))) == set()
    assert drafted("draft-mtp", turn(A, KEPT_0), on(edited_, 8, event("restored", 8, 8))) == {1}
    assert drafted("draft-eagle3", turn(A, KEPT_0), on(edited_, 10)) == {1}
    assert drafted("draft-eagle3", turn(A, KEPT_0), on([5, 6], 0)) == set()
    assert drafted("draft-eagle3", turn(A, KEPT_0), on([*A, 90, 91, 5], 21)) == set()


def test_draft_eagle3_keeps_a_token_that_was_rejected_last() -> None:
    def rounds(*last: tuple[int, int]) -> Done:
        return turn(A, KEPT_0, *(event("round", n, of) for n, of in last), answer=(90, 91, 92))

    goes_on = [*A, 90, 91, 92, 5]
    assert drafted("draft-eagle3", rounds((0, 1)), on(goes_on, 22)) == {1}
    assert drafted("draft-mtp", rounds((0, 1)), on(goes_on, 22)) == set()
    assert drafted("draft-eagle3", rounds((0, 2), (1, 1)), on(goes_on, 22)) == set()
    # it stands at position 20: the next prompt goes on before it
    assert drafted("draft-eagle3", rounds((0, 1)), on([*A[:18], 5], 17)) == set()


def test_a_prompt_out_of_the_prompt_cache_has_another_row() -> None:
    away = on([5, 6, 7], 0, event("cached", 21, slot=-1))
    back = on([*A, 90, 91, 5], 21, event("loaded", slot=-1))
    assert drafted("draft-mtp", turn(A, KEPT_0), away, back) == {1, 2}
    # but for the slot that has drafted nothing since
    idle = on([5, 6, 7], 0, Event("cached", 0, 21), Event("cleared", 0, 21), slot=1)
    assert drafted("draft-mtp", turn(A, KEPT_0), idle, back) == set()
    assert drafted("draft-eagle3", turn(A, KEPT_0), idle, back) == set()


def test_nobody_knows_what_is_drafted_after_a_file_or_a_request_without_a_task() -> None:
    restore = action(RestoreSlot(slot=0, file=0))
    assert drafted("draft-mtp", turn(A, KEPT_0), restore, on([*A, 90, 5], 21)) == {2}
    silent = (ON, Reply(request=0, status=200, prompt=(1, 2)))
    assert drafted("draft-mtp", turn(A, KEPT_0), silent, on([*A, 90, 91, 5], 21)) == {1, 2}


def test_drivers_that_carry_no_row_are_not_blamed() -> None:
    assert drafted("draft-simple", turn(A, KEPT_0), on([*A[:10], 77], 10), draft="llama-draft") == set()
    assert drafted("draft-mtp", turn(A, KEPT_0), on([*A[:10], 77], 10), draft="gemma4-assistant") == set()


def test_in_a_shared_cache_the_checkpoint_behind_the_one_restored_may_be_worn() -> None:
    flags = Flags(parallel=2, kv_unified=True)
    replies = []
    back = [event("restored", 12, 13), event("kept", 12), event("checkpoint", 13)]
    for i, (_, reply) in enumerate([turn(A, KEPT_0, event("checkpoint", 13)), edited(14, *back), edited(14, *back)]):
        reply.request = reply.task = i
        replies.append(reply)
    program = ServerScenario(model=ModelRef(recipe="gemma3"), requests=(ON,) * 3)
    assert worn_checkpoint(program, ServerTrace(replies=replies)) == frozenset()
    shared = ServerScenario(model=ModelRef(recipe="gemma3"), flags=flags, requests=(ON,) * 3)
    assert worn_checkpoint(shared, ServerTrace(replies=replies)) == {2}
