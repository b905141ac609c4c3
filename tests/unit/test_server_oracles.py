"""What each oracle of llama-server says of accounts made by hand, and which one reports."""

from __future__ import annotations

import re
from typing import Any

import pytest

from oracles.server.account import Clean, Other, ServerAccount, hold
from oracles.server.alive import Alive
from oracles.server.answer import Answer
from oracles.server.drafting import Acceptance, Drafting
from oracles.server.history import History
from oracles.server.judge import ServerJudgement, tainted
from oracles.server.registry import ORACLES, by_name
from oracles.server.slot import SlotFiles
from oracles.verdict import Verdict
from subjects.scenario import BlobEdit, DriverParams, ModelRef
from subjects.server.scenario import (
    AnyRequest,
    DamageFile,
    EraseSlot,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Turn,
)
from subjects.server.trace import End, Event, Reply, ServerTrace

BAND = 1e-3
EDIT = (BlobEdit(how="flip"),)
MTP = DriverParams(kind="draft-mtp")


def program(*requests: AnyRequest, **fields: Any) -> ServerScenario:
    return ServerScenario(model=ModelRef(recipe="llama"), requests=requests or (Turn(conv=0),) * 4, **fields)


def account(*replies: Reply, end: End | None = None, log: str = "", **fields: Any) -> ServerAccount:
    trace = ServerTrace(replies=[*replies], end=end or End(), log=log)
    return ServerAccount(program(**fields), trace)


def reply(request: int = 1, *tokens: int, **more: Any) -> Reply:
    tops = tuple(((t, -0.1), (t + 1, -3.0)) for t in tokens)
    fields: dict[str, Any] = {"status": 200, "prompt": (1, 2, 3), "length": 3, "tokens": tokens, "tops": tops}
    return Reply(request=request, **(fields | more))


# ---------------------------------------------------------------------------------------------------------------------
# Alive


def alive(how: str, number: int = 0, request: int = 1, log: str = "", text: str = "") -> Verdict:
    return Alive().judge(account(end=End(how=how, number=number, request=request, text=text), log=log))  # type: ignore[arg-type]


def test_a_server_that_lives_is_right() -> None:
    assert alive("ok").value == "ok"


@pytest.mark.parametrize(
    ("how", "number", "log", "text"),
    [
        ("signal", 6, "/src/llama-batch.cpp:539: GGML_ASSERT(n_ubatch > n_keep_tail) failed\n",
         "llama-batch.cpp: GGML_ASSERT(n_ubatch > n_keep_tail) failed"),
        ("signal", 11, "said\n", "SIGSEGV"),
        ("exit", 1, "", "exit 1"),
        ("hang", 0, "", "hang"),
        ("broken", 0, "", "reset by peer"),
    ],
)  # fmt: skip
def test_an_end_is_told_by_what_the_server_said(how: str, number: int, log: str, text: str) -> None:
    (v,) = alive(how, number, log=log, text="reset by peer").violations
    assert v.kind == "crash"
    assert (v.check.kind, v.check.step, v.suspects) == ("alive", 1, (1,))
    assert text.lower() in v.check.what.lower()
    assert v.key == f"server-alive:{v.check.what}"
    verbs = {"hang": "was given no answer", "broken": "lost its connection, while the server lives"}
    verb = verbs.get(how, "ended the server")
    assert v.because.startswith(f"Request 1 (turn) must be answered; but it {verb}: ")
    assert "/src" not in v.because


def test_a_server_that_does_not_start_is_judged_by_how_it_ended() -> None:
    # 1: it refused flags or model, and said so
    refused = alive("start", 1, -1, text="llama-server did not start: invalid argument")
    assert (refused.value, refused.unknown) == (
        "unknown", ("not started: llama-server did not start: invalid argument",),
    )  # fmt: skip
    assert alive("error", 0, -1, text="no such file").value == "unknown"
    assert alive("start", 0, -1, text="llama-server did not start in time").value == "unknown"
    (v,) = alive("start", -6, -1, log="/s/ggml.c:7: GGML_ASSERT(x) failed\n").violations
    assert v.because.startswith("Request 0 (the start) must be answered; but it ended the server: ggml.c: GGML_ASSERT")


# ---------------------------------------------------------------------------------------------------------------------
# Slot files


def slots(requests: tuple[AnyRequest, ...], *replies: Reply, flags: Flags | None = None) -> Verdict:
    p = program(*requests, flags=flags or Flags(parallel=2))
    trace = ServerTrace(replies=[*replies])
    return SlotFiles().judge(ServerAccount(p, trace, tainted=tainted(p, trace)))


def done(request: int, n: int = 0) -> Reply:
    return Reply(request=request, status=200, n=n)


def refused(request: int) -> Reply:
    return Reply(request=request, status=400, error="no")


SAVE, RESTORE, DAMAGE = SaveSlot(slot=0, file=0), RestoreSlot(slot=1, file=0), DamageFile(file=0, edits=EDIT)


@pytest.mark.parametrize(
    ("requests", "replies", "keys"),
    [
        ((SAVE, RESTORE), (done(0, 9), done(1, 9)), ""),
        ((SAVE, RESTORE), (done(0, 9), done(1, 8)), "slot-count"),
        ((SAVE, RESTORE), (done(0, 9), refused(1)), "slot-restore"),
        ((SAVE,), (refused(0),), "slot-save"),
        ((SAVE, RESTORE), (refused(0), done(1, 9)), "slot-save slot-restore"),
        ((RESTORE,), (refused(0),), ""),
        ((RESTORE,), (done(0),), "slot-restore"),
        ((EraseSlot(slot=1),), (done(0),), ""),
        ((EraseSlot(slot=1),), (refused(0),), "slot-erase"),
        # slots are counted round
        (
            (SaveSlot(slot=2, file=0), RestoreSlot(slot=3, file=0), EraseSlot(slot=9)),
            (done(0, 9), done(1, 9), done(2)),
            "",
        ),
        # a file stays over a restart
        ((SAVE, Restart(), RESTORE), (done(0, 9), done(1), done(2, 9)), ""),
        ((SAVE, Restart(), RESTORE), (done(0, 9), done(1), refused(2)), "slot-restore"),
        # the second file is another one
        ((SAVE, RestoreSlot(slot=1, file=1)), (done(0, 9), done(1, 9)), "slot-restore"),
        # the last save counts
        ((SAVE, SAVE, RESTORE), (done(0, 9), done(1, 5), done(2, 9)), "slot-count"),
    ],
)
def test_what_was_saved_is_restored_and_nothing_else(
    requests: tuple[AnyRequest, ...], replies: tuple[Reply, ...], keys: str
) -> None:
    verdict = slots(requests, *replies)
    assert [v.key for v in verdict.violations] == keys.split()
    assert verdict.compared == sum(not isinstance(r, Restart) for r in requests)
    for v in verdict.violations:
        assert re.match(
            rf"Request {v.check.step} must be .*; but the answer is status (200, \d tokens|400: no)", v.because
        )


@pytest.mark.parametrize("last", [done(2, 9), done(2, 3), refused(2)])
def test_a_changed_file_may_be_taken_or_refused(last: Reply) -> None:
    verdict = slots((SAVE, DAMAGE, RESTORE), done(0, 9), done(1, 4), last)
    assert not verdict.violations
    assert verdict.unknown == ("a changed slot file may be taken or refused",)
    # none of its bytes was changed
    assert slots((SAVE, DAMAGE, RESTORE), done(0, 9), done(1, 0), refused(2)).violations


def test_what_is_saved_again_is_good_again_unless_the_server_took_a_changed_file() -> None:
    again = (SAVE, DAMAGE, SAVE, RESTORE)
    assert slots(again, done(0, 9), done(1, 4), done(2, 9), refused(3)).violations
    taken = (SAVE, DAMAGE, RESTORE, SAVE, RESTORE)
    verdict = slots(taken, done(0, 9), done(1, 4), done(2, 9), done(3, 9), refused(4))
    assert not verdict.violations
    assert len(verdict.unknown) == 2


def test_slots_that_share_a_cache_may_have_no_room() -> None:
    verdict = slots((SAVE, RESTORE), done(0, 9), refused(1), flags=Flags(parallel=2, kv_unified=True))
    assert not verdict.violations
    assert verdict.unknown == ("slots share a cache that may be full",)


def test_what_comes_after_the_end_is_not_judged() -> None:
    assert slots((SAVE, RESTORE), done(0, 9), Reply(request=1)).value == "ok"
    assert slots((RESTORE,), Reply(request=0)).value == "unknown"


def test_a_server_is_tainted_from_a_changed_file_to_its_restart() -> None:
    requests = (SAVE, DAMAGE, RESTORE, Turn(conv=0), SaveSlot(slot=0, file=1), Restart(), Turn(conv=0),
                RestoreSlot(slot=0, file=1), Turn(conv=0))  # fmt: skip
    replies = [done(i, 4) for i in range(len(requests))]
    assert tainted(program(*requests), ServerTrace(replies=replies)) == {3, 4, 5, 8}
    replies[2] = refused(2)
    assert tainted(program(*requests), ServerTrace(replies=replies)) == frozenset()


# ---------------------------------------------------------------------------------------------------------------------
# Answers


COLD = reply(1, 5, 7)
RIGHT, WRONG = hold(reply(1, 5, 7), COLD, BAND), hold(reply(1, 5, 8), COLD, BAND)
RESTORED = reply(1, 5, 8, events=(Event("restored", 0, 36, 40),), cached=36, length=50)


def test_a_right_answer_is_compared() -> None:
    a = account()
    a.held = [RIGHT, RIGHT]
    assert Answer().judge(a) == Verdict(oracle="server-answer", compared=2)
    assert Answer().judge(account()).value == "unknown"


def test_a_wrong_answer_says_what_the_server_did() -> None:
    a = account()
    a.held = [RIGHT, hold(RESTORED, COLD, BAND)]
    (v,) = Answer().judge(a).violations
    assert (v.key, v.check.what, v.check.step, v.check.row, v.check.expected) == ("tokens", "tokens", 1, 1, (8, 7))
    assert "after a checkpoint restored at 36 tokens of its 40, 36 of 50 tokens kept" in v.because
    assert "token 1 is 8, not 7, which the cold server prefers by 2.9" in v.because
    assert v.rungs == ("2 tokens compared, 2 of them with probabilities", "near tie: no, the cold server is decided")


def test_other_probabilities_are_wrong_by_themselves() -> None:
    off = reply(1, 5, 7, tops=(((5, -0.1), (6, -3.0)), ((7, -0.9), (8, -3.0))))
    a = account()
    a.held = [hold(off, COLD, BAND)]
    (v,) = Answer().judge(a).violations
    assert v.key == "logprob"
    assert v.error == pytest.approx(0.8)
    assert "the log-probabilities of token 1 are off by up to 0.8" in v.because


def test_what_is_between_noise_and_error_is_unknown() -> None:
    off = reply(1, 5, 7, tops=(((5, -0.1), (6, -3.0)), ((7, -0.105), (8, -3.0))))
    a = account()
    a.held = [hold(off, COLD, BAND)]
    a.unjudged = ["no reason"]
    verdict = Answer().judge(a)
    assert (verdict.value, verdict.unknown) == ("unknown", ("no reason", "a difference between noise and error"))


def test_what_a_cold_server_answers_must_be_answered() -> None:
    a = account()
    a.unanswered = [(Reply(request=1, status=500, error="failed to decode"), COLD)]
    (v,) = Answer().judge(a).violations
    assert (v.key, v.check.expected) == ("status", (500, 200))
    assert v.because == (
        "Request 1 must be answered, since its prompt fits into a slot; but the answer is status 500: failed to decode "
        "(a cold server's: 2 tokens)"
    )


def test_history_and_drafting_judge_runs_that_differ_in_them() -> None:
    a = account(driver=MTP)
    a.held = [WRONG]
    a.others = [Other("history", WRONG.reply, WRONG), Other("drafting", WRONG.reply, WRONG)]
    (history,) = History().judge(a).violations
    (drafting,) = Drafting().judge(a).violations
    assert (history.key, drafting.key) == ("history", "drafting")
    assert "whatever other conversations said before" in history.because
    assert "With drafting off the same requests are answered as the cold server does." in drafting.because
    a.others = [Other("history", RIGHT.reply, RIGHT)]
    assert History().judge(a) == Verdict(oracle="server-history", compared=1)
    assert Drafting().judge(a).value == "ok"
    # nothing is drafted: it has nothing to say
    assert Drafting().judge(account()).value == "unknown"


def test_lost_drafts_are_told_with_the_other_continuations() -> None:
    mine = reply(1, 5, 7, accepted=1, drafted=6, cached=2)
    a = account(driver=MTP)
    a.clean = [Clean(mine, reply(1, 5, 7, accepted=4, drafted=6), ((1, 4), (0, 3)))]
    (v,) = Acceptance().judge(a).violations
    assert (v.key, v.check.expected) == ("acceptance", (1, 4))
    assert "1 of 6 are, after 2 of 3 tokens kept, where a server that keeps nothing accepts 4 of 6" in v.because
    assert v.rungs[0].startswith("2 other continuations of the same state: 1 drafts accepted, 7 by a server")
    a.clean = [Clean(mine, reply(1, 5, 7, accepted=4))]
    assert Acceptance().judge(a) == Verdict(oracle="server-acceptance", compared=1)


def test_the_earliest_request_is_reported_and_of_these_the_most_specific_oracle() -> None:
    a = account(driver=MTP)
    later = hold(reply(2, 5, 8), reply(2, 5, 7), BAND)
    a.held = [WRONG, later]
    a.others = [Other("drafting", WRONG.reply, WRONG)]
    judged = ServerJudgement(a.program, a, [o.judge(a) for o in ORACLES])
    assert [(v.oracle, v.check.step) for v in judged.violations] == [
        ("server-drafting", 1), ("server-answer", 1), ("server-answer", 2),
    ]  # fmt: skip
    assert judged.judged
    assert judged.checked == 2


def test_nothing_is_judged_where_nothing_was_compared() -> None:
    a = account()
    judged = ServerJudgement(a.program, a, [o.judge(a) for o in ORACLES])
    assert not judged.judged
    assert judged.checked == 0


def test_oracles_are_in_order_of_rank_and_found_by_name() -> None:
    ranks = [o.rank for o in ORACLES]
    assert ranks == sorted({*ranks})
    assert all(by_name(o.name) is o for o in ORACLES)
    with pytest.raises(KeyError, match="there are server-alive, "):
        by_name("other")


def test_a_cold_server_that_ends_is_told() -> None:
    account = ServerAccount(ServerScenario(model=ModelRef(), requests=(Turn(conv=0), Turn(conv=0))), ServerTrace())
    log = "/s/llama-x.cpp:7: GGML_ASSERT(n < m) failed\n"
    account.fallen = (Reply(request=1), End(how="signal", number=6), log)
    (v,) = Alive().judge(account).violations
    assert v.check.step == 1
    assert v.because == (
        "Request 1 (turn), asked of a server that keeps nothing, must be answered; but it ended the server: "
        "llama-x.cpp: GGML_ASSERT(n < m) failed"
    )
