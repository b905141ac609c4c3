"""Traces of llama-server: what is asked of them, and that they come back from a file; what is asked of programs."""

import msgspec
import pytest

from subjects.server import trace as stored
from subjects.server.scenario import Chat, Restart, Together, Turn, asks_of, shared
from subjects.server.trace import End, Event, Reply, ServerTrace
from subjects.trace import Piece


def test_a_trace_comes_back_from_its_file() -> None:
    trace = ServerTrace(
        replies=[
            Reply(request=0, status=200, prompt=(1, 2), tokens=(3,), tops=(((3, -0.5), (4, -1e30)),), events=(
                Event("restored", 1, 36, 40), Event("refused", text="failed to decode"),
            )),
            Reply(request=1, part=1, messages=(("user", "north"),), error="no answer"),
            Reply(request=2, status=200, n=8, pieces=(Piece(0, 0, 4, b""), Piece(-1, 0, 1, b"x"))),
        ],
        end=End(how="signal", number=6, request=2, text="it ended"),
        log="said\n",
        seconds=0.5,
    )  # fmt: skip
    assert stored.from_json(stored.to_json(trace)) == trace


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        stored.from_json(b'{"replies": [{"request": "first"}]}')


def test_a_reply_is_found_by_its_request_and_part() -> None:
    one, two = Reply(request=3), Reply(request=3, part=1)
    trace = ServerTrace(replies=[one, two])
    assert trace.reply(3, 1) is two
    assert trace.reply(3) is one
    assert trace.reply(4) is None


@pytest.mark.parametrize(
    ("reply", "answered"),
    [
        (Reply(request=0, status=200), True),
        (Reply(request=0, status=200, cancelled=True), False),
        (Reply(request=0, status=500), False),
        (Reply(request=0), False),
    ],
)
def test_an_answer_is_whole_and_good(reply: Reply, answered: bool) -> None:
    assert reply.answered is answered


def test_rounds_of_drafting_are_told_in_order() -> None:
    events = (Event("round", 0, 1, 3), Event("replay", 0, 1, 3), Event("kept", 0, 9), Event("round", 0, 0, 2))
    assert Reply(request=0, events=events).rounds() == [(1, 3), (0, 2)]


def test_what_a_request_asks_for() -> None:
    one, two = Turn(conv=0), Chat(conv=0)
    assert [asks_of(r) for r in (one, Together((one, two)), Restart())] == [(one,), (one, two), ()]


@pytest.mark.parametrize(
    ("a", "b", "n"), [((), (1,), 0), ((1, 2), (1, 2), 2), ((1, 2, 3), [1, 2], 2), ((1, "x", 3), (1, "y", 3), 1)]
)
def test_what_prompts_have_in_common(a: tuple[int, ...], b: tuple[int, ...], n: int) -> None:
    assert shared(a, b) == shared(b, a) == n
