"""Programs that differ from a program in what must not matter to one of its answers."""

from __future__ import annotations

import msgspec

from subjects.server.scenario import AnyRequest, Chat, ServerScenario, Together, Turn, asks_of
from subjects.server.trace import Reply

_OTHER = 5000
"""added to the streams of other conversations"""
PROBES = 6


def upto(program: ServerScenario, request: int) -> tuple[AnyRequest, ...]:
    """The requests up to one, and that one."""
    return program.requests[: request + 1]


def other_histories(program: ServerScenario, reply: Reply) -> ServerScenario | None:
    """The program up to a reply, in which the conversations that it does not go on from say something else; None where
    there are none."""
    requests = list(upto(program, reply.request))
    own = _lineage(requests, reply)
    changed = False
    for i, request in enumerate(requests):
        asks = asks_of(request)
        new = tuple(
            ask if (i, part) in own else msgspec.structs.replace(ask, stream=ask.stream + _OTHER)
            for part, ask in enumerate(asks)
        )
        if new != asks:
            changed = True
            requests[i] = Together(asks=new) if isinstance(request, Together) else new[0]
    return msgspec.structs.replace(program, requests=tuple(requests)) if changed else None


def _lineage(requests: list[AnyRequest], reply: Reply) -> set[tuple[int, int]]:
    """The completions that a reply's conversation was made by, itself included."""
    found = {(reply.request, reply.part)}
    ask = asks_of(requests[reply.request])[reply.part]
    chat, conv = isinstance(ask, Chat), _goes_on(ask)
    for i in range(reply.request - 1, -1, -1):
        if conv is None:
            break
        for part, ask in enumerate(asks_of(requests[i])):
            if isinstance(ask, Chat) == chat and ask.conv == conv:
                found.add((i, part))
                conv = _goes_on(ask)
                break
    return found


def _goes_on(ask: Turn | Chat) -> int | None:
    """The conversation that a request goes on from; None where it begins anew."""
    if isinstance(ask, Chat):
        return None if ask.keep == 0 else ask.conv
    if ask.keep.at == "start" and ask.keep.d <= 0:
        return None
    return ask.conv if ask.base is None else ask.base


def without_drafting(program: ServerScenario, reply: Reply) -> ServerScenario:
    """The program up to a reply, without its driver."""
    return msgspec.structs.replace(program, requests=upto(program, reply.request), driver=None)


def continuations(program: ServerScenario, reply: Reply) -> list[ServerScenario]:
    """The program up to a reply, with other tokens at the end of the reply's prompt: the same state goes on another
    way. Only for a reply that was asked alone."""
    ask = program.requests[reply.request]
    if not isinstance(ask, Turn):
        return []
    return [
        msgspec.structs.replace(
            program,
            requests=(
                *program.requests[: reply.request],
                msgspec.structs.replace(
                    ask, n=max(ask.n, 1), stream=ask.stream + _OTHER + k, predict=max(ask.predict, 12)
                ),
            ),
        )
        for k in range(1, PROBES + 1)
    ]
