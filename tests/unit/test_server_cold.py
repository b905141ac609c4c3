"""The pool of cold servers, with servers that are none: which one answers, what is asked once, when one goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from oracles.server import cold as colds
from oracles.server.cold import POOL, Cold
from subjects.scenario import DriverParams
from subjects.server.process import ServerError
from subjects.server.scenario import Flags
from subjects.server.trace import End, Reply

MTP = DriverParams(kind="draft-mtp")


class FakeServer:
    made: ClassVar[list[FakeServer]] = []

    patience = 0.0

    def __init__(self, command: Callable[[Path | None], list[str]], _model: Path):
        self.command = command(None)
        self.port, self.closed, self.end = 1, 0, None
        self.made.append(self)

    def ended(self, wait: float = 0.0) -> End | None:
        return self.end

    def log(self) -> str:
        return "said"

    def close(self) -> None:
        self.closed += 1

    port: int
    closed: int
    end: End | None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was posted to servers that answer everything but a prompt that begins with 666."""
    posted: list[dict[str, Any]] = []

    def complete(_client: object, body: dict[str, Any], reply: Reply) -> Reply:
        posted.append(body)
        if reply.prompt[:1] == (666,):
            reply.error = "gone"
            return reply
        reply.status, reply.tokens = 200, (len(posted),)
        return reply

    monkeypatch.setattr(FakeServer, "made", [])
    monkeypatch.setattr(colds, "Server", FakeServer)
    monkeypatch.setattr(colds, "complete", complete)
    return posted


@pytest.fixture
def cold() -> Cold:
    return Cold(Path("llama-server"), Path("model.gguf"), Path("draft.gguf"))


def reply(*prompt: int, predict: int = 4, **more: Any) -> Reply:
    return Reply(request=3, part=1, prompt=prompt, predict=predict, status=200, tokens=(9,), slot=2, cached=5, **more)


def test_a_prompt_is_asked_as_it_was_without_cache(asked: list[dict[str, Any]], cold: Cold) -> None:
    found = cold.reply(reply(1, 2), Flags())
    (body,) = asked
    assert (body["prompt"], body["n_predict"], body["cache_prompt"]) == ([1, 2], 4, False)
    assert "id_slot" not in body
    # nothing of the answer that it is compared with
    assert (found.request, found.part, found.tokens, found.slot, found.cached) == (3, 1, (1,), -1, 0)


def test_an_answer_is_asked_for_once(asked: list[dict[str, Any]], cold: Cold) -> None:
    first = cold.reply(reply(1, 2), Flags())
    assert cold.reply(reply(1, 2), Flags()) is first
    assert len(asked) == 1
    for other in (reply(1, 3), reply(1, 2, predict=5), reply(messages=(("user", "red"),))):
        assert cold.reply(other, Flags()) is not first
    assert cold.reply(reply(1, 2), Flags(batch=8)) is not first
    assert cold.reply(reply(1, 2), Flags(), MTP) is not first
    assert len(asked) == 6
    assert len(FakeServer.made) == 3
    assert ["draft.gguf" in s.command for s in FakeServer.made] == [False, False, True]


def test_the_oldest_server_makes_room(asked: list[dict[str, Any]], cold: Cold) -> None:
    for ubatch in range(1, POOL + 1):
        cold.reply(reply(1), Flags(ubatch=ubatch))
    cold.reply(reply(2), Flags(ubatch=1))  # it is met again
    cold.reply(reply(1), Flags(ubatch=POOL + 1))
    assert [s.closed for s in FakeServer.made] == [0, 1, *[0] * (POOL - 1)]
    cold.close()
    assert [s.closed for s in FakeServer.made] == [1] * (POOL + 1)
    assert len(asked) == POOL + 2


def test_a_server_that_ended_or_answered_long_is_replaced(
    asked: list[dict[str, Any]], cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold.reply(reply(1), Flags())
    FakeServer.made[0].end = End(how="signal", number=9)
    cold.reply(reply(2), Flags())
    assert len(FakeServer.made) == 2
    assert FakeServer.made[0].closed == 1
    monkeypatch.setattr(colds, "_FRESH_AFTER", 3)
    for n in range(3, 6):
        cold.reply(reply(n), Flags())
    assert len(FakeServer.made) == 3
    assert len(asked) == 5


def test_a_confirmation_takes_no_server_and_no_answer_again(asked: list[dict[str, Any]], cold: Cold) -> None:
    cold.reply(reply(1), Flags())
    cold.forget()
    cold.reply(reply(1), Flags())
    assert len(asked) == len(FakeServer.made) == 2
    assert FakeServer.made[0].closed == 1


@pytest.mark.usefixtures("asked")
def test_a_cold_server_that_gives_no_answer_is_told_and_not_remembered(cold: Cold) -> None:
    with pytest.raises(ServerError, match="the cold server gave no answer: gone") as e:
        cold.reply(reply(666), Flags())
    assert (e.value.end, e.value.log) == (End(how="hang"), "said")
    FakeServer.made[0].end = End(how="signal", number=6)
    with pytest.raises(ServerError):
        cold.reply(reply(666), Flags())
    assert len(FakeServer.made) == 2
