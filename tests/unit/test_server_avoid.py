"""Known faults of llama-server: what sets each off, what does not, and which answers a run may have spoilt."""

import msgspec
import pytest

from fuzz import programs
from fuzz.known import FOLDER, KnownFault, load_all, match_server
from fuzz.server.avoid import SERVER_AVOIDANCES, repaired, to_blame, triggered
from oracles.server.spoilt import SPOILERS, foreign_row, misdrafted, spoilt, stale_checkpoint, worn_checkpoint
from subjects.scenario import BlobEdit, DriverParams, ModelRef
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    Cut,
    DamageFile,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
)
from subjects.server.trace import Event, Reply, ServerTrace

KNOWN = [f for f in load_all() if f.subject == "server"]
CACHED = Flags(parallel=2, cache_ram=1)
MTP = DriverParams(kind="draft-mtp")
ASK, PINNED, GONE = Turn(conv=0), Turn(conv=1, slot=0), Turn(conv=0, cancel=1)


def program(
    *requests: AnyRequest, flags: Flags = CACHED, driver: DriverParams | None = None, recipe: str = "qwen35"
) -> ServerScenario:
    return ServerScenario(model=ModelRef(recipe=recipe), requests=requests, flags=flags, driver=driver)


def stored(fault: KnownFault) -> ServerScenario:
    found = programs.loads((FOLDER.parent / "scenarios" / fault.scenario).read_bytes())
    assert isinstance(found, ServerScenario)
    return found


@pytest.mark.parametrize("fault", KNOWN, ids=lambda f: f.name)
def test_what_is_stored_sets_it_off_and_its_repair_does_not(fault: KnownFault) -> None:
    name = fault.avoidance
    assert (triggered(name, stored(fault)) is None) == (name in SPOILERS)
    mended = repaired([name], stored(fault))
    assert (mended == stored(fault)) == (name in SPOILERS)
    assert name in SPOILERS or triggered(name, mended) is None


def test_every_avoidance_has_its_entry() -> None:
    assert {f.avoidance for f in KNOWN} == {*SERVER_AVOIDANCES}


@pytest.mark.parametrize(
    ("at", "given"),
    [
        (0, program(Together(asks=(ASK, PINNED)))),
        (1, program(GONE, PINNED)),
        (None, program(ASK, PINNED)),
        (None, program(GONE, Restart(), PINNED)),
        (None, program(Together(asks=(msgspec.structs.replace(ASK, slot=1), PINNED)))),
        (None, program(Together(asks=(ASK, PINNED)), flags=Flags(parallel=2))),
        (None, program(Together(asks=(ASK, PINNED)), flags=Flags(parallel=2, cache_ram=1, similarity=0))),
    ],
)
def test_a_busy_slot_is_asked_for(at: int | None, given: ServerScenario) -> None:
    assert triggered("server-busy-slot", given) == at


@pytest.mark.parametrize(
    ("at", "parallel", "recipe", "driver", "requests"),
    [
        (0, 3, "qwen35", MTP, (Together(asks=(ASK, PINNED)),)),
        (1, 3, "qwen35", MTP, (GONE, ASK)),
        (None, 2, "qwen35", MTP, (Together(asks=(ASK, PINNED)),)),
        (None, 3, "llama", MTP, (Together(asks=(ASK, PINNED)),)),
        (None, 3, "qwen35", None, (Together(asks=(ASK, PINNED)),)),
        (None, 3, "qwen35", MTP, (ASK, PINNED)),
    ],
)
def test_three_slots_draft(
    at: int | None, parallel: int, recipe: str, driver: DriverParams | None, requests: tuple[AnyRequest, ...]
) -> None:
    given = program(*requests, flags=Flags(parallel=parallel), driver=driver, recipe=recipe)
    assert triggered("server-rollback", given) == at
    assert triggered("server-rollback", repaired(["server-rollback"], given)) is None


def test_of_a_damaged_file_what_is_harmless_stays() -> None:
    cut, position = BlobEdit(how="cut", where="", nth=1000, value=-1), BlobEdit(how="set", where="attn.stream.cell.pos")
    given = program(ASK, SaveSlot(0, 0), DamageFile(0, (cut, position)), RestoreSlot(0, 0))
    assert triggered("server-file-cut", given) == 3
    assert triggered("server-file-cut", program(ASK, SaveSlot(0, 0), DamageFile(0, (cut,)), SaveSlot(0, 0))) is None
    row = BlobEdit(how="set", where="attn.stream.k.row", value=1)
    mended = repaired(["server-file-cut"], program(ASK, SaveSlot(0, 0), DamageFile(0, (cut, row)), RestoreSlot(0, 0)))
    assert mended.requests[2] == DamageFile(0, (row,))


# --- runs -------------------------------------------------------------------------------------------------------------


def answered(request: int, prompt: tuple[int, ...], *events: Event, slot: int = 0, **more: object) -> Reply:
    reply = Reply(request=request, status=200, prompt=prompt, tokens=(50,), slot=slot, task=request, events=events)
    return msgspec.structs.replace(reply, **more)


def spoils(*replies: Reply, requests: tuple[AnyRequest, ...] | None = None) -> list[int]:
    given = program(*(requests or (ASK,) * len(replies)))
    found = stale_checkpoint(given, ServerTrace(replies=list(replies)))
    assert {*spoilt(["server-checkpoint"], given, ServerTrace(replies=list(replies)))} == found
    return sorted(found)


KEPT_0, KEPT_4 = Event("kept", 0, 0), Event("kept", 0, 4)
AT_4 = Event("checkpoint", 0, 4)
BACK_4 = Event("restored", 0, 4, 4)
FIRST = answered(0, (1, 2, 3, 4, 5), KEPT_0, AT_4)


def test_a_checkpoint_of_what_is_in_common_is_sound() -> None:
    assert spoils(FIRST, answered(1, (1, 2, 3, 4, 9), BACK_4, KEPT_4)) == []


def test_one_of_more_spoils_until_nothing_of_it_is_kept() -> None:
    bad = answered(1, (1, 2, 3, 9, 9), BACK_4, KEPT_4)
    behind = answered(2, (1, 2, 3, 9, 9, 50, 7), Event("kept", 0, 6))
    anew = answered(3, (8, 8), KEPT_0)
    assert spoils(FIRST, bad, behind, anew, answered(4, (8, 8, 50, 3), Event("kept", 0, 3))) == [1, 2]


def test_one_that_is_left_over_spoils_when_it_is_used() -> None:
    other = answered(1, (1, 2, 3, 9), KEPT_0)
    assert spoils(FIRST, other, answered(2, (1, 2, 3, 9, 7), BACK_4, KEPT_4)) == [2]


def test_one_that_is_made_where_another_was_restored_is_worn() -> None:
    back, made = Event("restored", 0, 3, 4), Event("checkpoint", 0, 3)
    short = answered(1, (1, 2, 3, 4), back, Event("kept", 0, 3), made)
    again = answered(2, (1, 2, 3, 4), Event("restored", 0, 2, 3), Event("kept", 0, 2))
    asks = program(*[ASK] * 3)
    assert worn_checkpoint(asks, ServerTrace(replies=[FIRST, short, again])) == {2}
    # a recurrent one goes on behind all of its tokens
    whole = answered(1, (1, 2, 3, 4, 9), BACK_4, KEPT_4, AT_4)
    assert worn_checkpoint(asks, ServerTrace(replies=[FIRST, whole, answered(2, (1, 2, 3, 4, 7), BACK_4)])) == set()


def test_it_goes_through_the_prompt_cache_and_files() -> None:
    bad = answered(1, (1, 2, 3, 9, 9), BACK_4, KEPT_4)
    away = answered(2, (8, 8), Event("cached", -1, 6), Event("cleared", 0, 6), KEPT_0)
    again = answered(3, (1, 2, 3, 9, 9, 50, 7), Event("loaded"), Event("kept", 1, 6), slot=1)
    assert spoils(FIRST, bad, away, again) == [1, 3]
    files: tuple[AnyRequest, ...] = (ASK, ASK, SaveSlot(0, 0), Restart(), RestoreSlot(1, 0), ASK)
    done = [Reply(request=i, status=200, slot=s) for i, s in ((2, 0), (3, -1), (4, 1))]
    last = answered(5, (1, 2, 3, 9, 9, 50, 7), Event("kept", 1, 6), slot=1)
    assert spoils(FIRST, bad, *done, last, requests=files) == [1, 5]


def test_of_a_slot_that_nobody_knows_everything_may_be_spoilt() -> None:
    lost = Reply(request=1, status=200, prompt=(1, 2), cancelled=True)
    assert spoils(FIRST, lost, answered(2, (1, 2, 3, 4, 9), BACK_4, KEPT_4)) == [2]


def test_what_chats_have_in_common_is_counted_in_pieces_of_text() -> None:
    said = (("user", "north south"), ("assistant", "x"))
    begin = answered(0, (), KEPT_0, AT_4, messages=(("user", "north south"),))
    good = answered(1, (), BACK_4, KEPT_4, messages=(*said, ("user", "west")))
    bad = answered(1, (), BACK_4, KEPT_4, messages=(("user", "north soutx"), *said[1:], ("user", "west")))
    chats = (Chat(conv=0), Chat(conv=0))
    assert spoils(begin, good, requests=chats) == []
    assert spoils(begin, bad, requests=chats) == [1]


def test_a_row_is_right_only_where_the_slot_goes_on() -> None:
    asks = program(*[ASK] * 3, driver=MTP)
    begin = answered(0, (1, 2, 3), KEPT_0, length=3)
    on, back = answered(1, (1, 2, 3, 50, 7), Event("kept", 0, 3), length=5), answered(1, (1, 2), Event("kept", 0, 1))
    behind = answered(2, (1, 2, 3, 50, 7, 50), Event("kept", 0, 5), length=6)
    assert foreign_row(asks, ServerTrace(replies=[begin, on, behind])) == frozenset()
    assert foreign_row(asks, ServerTrace(replies=[begin, back])) == {1}
    taken = answered(1, (1, 2, 3, 50, 7), Event("loaded"), Event("kept", 0, 3), length=5)
    assert foreign_row(asks, ServerTrace(replies=[begin, taken])) == {1}
    assert foreign_row(program(*[ASK] * 2), ServerTrace(replies=[begin, back])) == frozenset()
    # the answer is right all the same
    assert spoilt([*SPOILERS], asks, ServerTrace(replies=[begin, back])) == {}
    assert misdrafted([*SPOILERS], asks, ServerTrace(replies=[begin, back])) == {1: "server-draft-row"}


def test_what_is_seen_in_a_run_only_is_not_seen_in_a_program() -> None:
    assert triggered("server-checkpoint", program(ASK, Turn(conv=0, keep=Cut(at="start", d=1)))) is None


def test_what_is_set_off_is_to_blame_from_there_on() -> None:
    given = program(ASK, Together(asks=(ASK, PINNED)), ASK)
    assert [to_blame("server-busy-slot", given, ServerTrace(), i) for i in range(3)] == [False, True, True]


def test_what_is_seen_in_a_run_is_to_blame_for_what_it_spoilt_alone() -> None:
    bad = answered(1, (1, 2, 3, 9, 9), BACK_4, KEPT_4)
    trace = ServerTrace(replies=[FIRST, bad, answered(2, (8, 8), KEPT_0)])
    given = program(ASK, ASK, ASK, flags=Flags())
    assert [to_blame("server-checkpoint", given, trace, i) for i in range(3)] == [False, True, False]
    names = [match_server("server-answer/hybrid/checkpoint", given, trace, KNOWN, i) for i in range(3)]
    assert [f and f.name for f in names] == [None, "server-checkpoint", None]
