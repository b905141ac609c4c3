"""A judge of llama-server without one: it answers every request, and what is wrong is what a test says is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from fuzz.models import Model
from fuzz.state import traits_of
from oracles.server.account import ServerAccount
from oracles.server.judge import ServerJudgement
from oracles.verdict import Check, Verdict, Violation
from subjects.recipes import get
from subjects.scenario import DriverParams, ModelRef
from subjects.server.scenario import Chat, ServerScenario, Together, Turn
from subjects.server.trace import End, Event, Reply, ServerTrace

Wrong = Callable[[ServerScenario], Violation | None]


def model(recipe: str = "llama", driver: DriverParams | None = None) -> Model:
    return Model(ModelRef(recipe=recipe), "none.gguf", traits_of(get(recipe)), driver=driver)


def violation(step: int, oracle: str = "server-answer", key: str = "tokens", part: int = 0) -> Violation:
    if oracle == "server-alive":
        check = Check(kind="alive", step=step, what=key.removeprefix("server-alive:"))
        return Violation(oracle=oracle, key=key, rule="r", because="it must live", check=check, kind="crash")
    check = Check(kind="reply", step=step, seq=part, row=0, expected=(1, 2), what="tokens")
    return Violation(oracle=oracle, key=key, rule="r", because="it must equal the cold server's", check=check)


def reply(request: int, part: int, ask: Turn | Chat, *events: Event) -> Reply:
    prompt = () if isinstance(ask, Chat) else tuple(range(max(ask.n, 1)))
    messages = (("user", "north"),) if isinstance(ask, Chat) else ()
    return Reply(
        request=request, part=part, status=200, prompt=prompt, messages=messages, predict=ask.predict, tokens=(1,),
        text="1", slot=0, events=events,
    )  # fmt: skip


def run(program: ServerScenario, found: Violation | None, *events: Event) -> ServerTrace:
    """Everything is answered, until the server ends."""
    dies = found is not None and found.check.kind == "alive"
    replies: list[Reply] = []
    for i, request in enumerate(program.requests):
        if dies and found is not None and i == found.check.step:
            return ServerTrace(replies=replies, end=End(how="signal", number=6, request=i), log="it ends\n")
        match request:
            case Turn() | Chat():
                replies.append(reply(i, 0, request, *events))
            case Together():
                replies += [reply(i, part, ask, *events) for part, ask in enumerate(request.asks)]
            case _:
                replies.append(Reply(request=i, status=200, slot=getattr(request, "slot", -1), n=1))
    return ServerTrace(replies=replies, max_rss_kb=1000)


class FakeJudge:
    """`wrong`: what is wrong with a program. `asked`: what was judged, and how."""

    wrong: Wrong = staticmethod(lambda _: None)
    events: tuple[Event, ...] = ()
    asked: ClassVar[list[tuple[ServerScenario, dict[str, Any]]]] = []
    closed = 0
    max_rss_kb = 1000

    def __init__(self, _build: object, _model: ModelRef, _path: Path, _draft: Path | None, _cache: object, memory: str):
        self.memory = memory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        type(self).closed += 1

    def judge(self, program: ServerScenario, **how: Any) -> ServerJudgement:
        self.asked.append((program, how))
        found = type(self).wrong(program)
        trace = run(program, found, *self.events)
        judged = sum(bool(r.prompt or r.messages) for r in trace.replies)
        account = ServerAccount(program, trace, self.memory)
        own = Verdict(oracle="server-answer", compared=judged)
        if found is not None:
            own = Verdict(oracle=found.oracle, violations=(found,), compared=judged)
        cold = {(r.request, r.part): r for r in trace.replies if r.prompt or r.messages}
        return ServerJudgement(program, account, [own], cold)
