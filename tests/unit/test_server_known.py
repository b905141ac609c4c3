"""Known faults of llama-server at the end of a context, of and behind a slot file, in a window that slots share."""

from __future__ import annotations

import pytest

from fuzz.server.avoid import repaired, triggered
from fuzz.server.fit import valid
from oracles.server.spoilt import at_the_brim, from_file, misdrafted
from subjects.scenario import BlobEdit, DriverParams, ModelRef
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    DamageFile,
    EraseSlot,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
)
from subjects.server.trace import Deed, Event, Reply, ServerTrace

MTP = DriverParams(kind="draft-mtp")
ONE_SLOT = Flags()
ASK = Turn(conv=0)
SAVE, BACK, GONE = SaveSlot(0, 0), RestoreSlot(0, 0), EraseSlot(0)


def program(
    *requests: AnyRequest, driver: DriverParams | None = MTP, flags: Flags = ONE_SLOT, recipe: str = "qwen35"
) -> ServerScenario:
    return ServerScenario(model=ModelRef(recipe=recipe), requests=requests, driver=driver, flags=flags)


@pytest.mark.parametrize(
    ("length", "tokens", "cancelled", "driver", "spoilt"),
    [
        (504, 7, False, MTP, True),
        (504, 8, False, MTP, False),  # all that was asked for
        (480, 7, False, MTP, False),  # a token that ends an answer
        (504, 7, True, MTP, False),
        (504, 7, False, None, False),
        (493, 7, False, DriverParams(kind="ngram-simple", ngram_m=12), True),
    ],
)
def test_an_answer_that_ends_near_the_end_of_the_context(
    length: int, tokens: int, cancelled: bool, driver: DriverParams | None, spoilt: bool
) -> None:
    reply = Reply(request=0, status=200, length=length, predict=8, tokens=(1,) * tokens, cancelled=cancelled)
    assert at_the_brim(program(ASK, driver=driver), ServerTrace(replies=[reply])) == ({0} if spoilt else set())


def test_of_slots_each_has_its_share_of_the_context() -> None:
    trace = ServerTrace(replies=[Reply(request=0, status=200, length=250, predict=8, tokens=(1, 2))])
    assert at_the_brim(program(ASK, flags=Flags(parallel=2)), trace) == {0}
    assert at_the_brim(program(ASK, flags=Flags(parallel=2, kv_unified=True)), trace) == set()


def kept(n: int, *before: Deed, slot: int = 0, task: int = 0) -> Reply:
    events = (*(Event(what, slot) for what in before), Event("kept", slot, n))
    return Reply(request=0, status=200, slot=slot, task=task, events=events)


def drafted(*done: tuple[AnyRequest, Reply | None], driver: DriverParams = MTP) -> list[int]:
    """The requests whose drafts are spoilt."""
    replies = [r or Reply(request=0, status=200, slot=0) for _, r in done]
    for i, reply in enumerate(replies):
        reply.request = i
    given, trace = program(*(r for r, _ in done), driver=driver), ServerTrace(replies=replies)
    assert {*misdrafted(["server-draft-mtp-file"], given, trace)} == {*from_file(given, trace)}
    return sorted(from_file(given, trace))


def test_what_a_file_brought_drafts_badly_until_nothing_of_it_is_kept() -> None:
    assert drafted((ASK, kept(0)), (SAVE, None), (BACK, None), (ASK, kept(9)), (ASK, kept(4)), (ASK, kept(0))) == [3, 4]
    assert drafted((BACK, None), (GONE, None), (ASK, kept(0))) == []
    assert drafted((BACK, None), (Restart(), None), (ASK, kept(0)), (ASK, kept(5))) == []
    assert drafted((BACK, None), (ASK, kept(9, slot=1)), (ASK, kept(9))) == [2]
    assert drafted((BACK, Reply(request=0, status=400, slot=0)), (ASK, kept(9))) == []
    assert drafted((BACK, None), (ASK, Reply(request=0, status=200, task=-1))) == [1]


def test_the_prompt_cache_may_hold_it_too() -> None:
    saved, taken = (ASK, kept(0, "cached")), (ASK, kept(9, "loaded", slot=1))
    assert drafted((BACK, None), saved, taken) == [2]
    assert drafted(saved, taken, (BACK, None), (ASK, kept(9, slot=1))) == []


def test_a_drafts_model_drafts_out_of_the_targets_memory() -> None:
    other = DriverParams(kind="draft-mtp", draft=ModelRef(recipe="gemma4-assistant"))
    assert drafted((BACK, None), (ASK, kept(9)), driver=other) == []


SHARED = Flags(parallel=2, swa_full=True, kv_unified=True)


@pytest.mark.parametrize(
    ("at", "flags", "requests"),
    [
        (1, SHARED, (ASK, ASK)),
        (0, SHARED, (Together(asks=(ASK, Turn(conv=1))),)),
        (3, SHARED, (ASK, Restart(), ASK, Chat(conv=0))),
        (None, SHARED, (ASK,)),
        (None, Flags(swa_full=True, kv_unified=True), (ASK, ASK)),
        (None, Flags(parallel=2, kv_unified=True), (ASK, ASK)),
        (None, Flags(parallel=2, swa_full=True), (ASK, ASK)),
    ],
)
def test_slots_share_a_window_that_is_to_be_kept(
    at: int | None, flags: Flags, requests: tuple[AnyRequest, ...]
) -> None:
    given = program(*requests, driver=None, flags=flags, recipe="gemma3")
    assert triggered("server-window-reuse", given) == at
    mended = repaired(["server-window-reuse"], given)
    assert triggered("server-window-reuse", mended) is None
    assert (mended.flags.swa_full, mended.flags.slot_ctx) == (flags.swa_full, flags.slot_ctx)
    assert valid(mended) == valid(given)


def test_a_file_claims_more_cells_than_one() -> None:
    twice = DamageFile(
        0, (BlobEdit(how="double", where="recurrent.cell"), BlobEdit(how="set", where="recurrent.cell.pos"))
    )
    given = program(ASK, SAVE, twice, BACK, flags=Flags(parallel=2))
    assert triggered("server-double-cell", given) == 3
    assert repaired(["server-double-cell"], given).requests[2] == DamageFile(0, twice.edits[1:])
    assert triggered("server-double-cell", program(ASK, SAVE, twice, BACK)) is None
