"""Programs of every subject, where it does not matter of which one they are: read, written, told apart."""

from __future__ import annotations

from typing import Any, Literal

from subjects import scenario as library
from subjects.scenario import BadScenario, Scenario, raw_object
from subjects.server import scenario as server
from subjects.server.scenario import REQUEST_NAMES, ServerScenario

Subject = Literal["library", "server"]
AnyProgram = Scenario | ServerScenario


def subject_of(program: AnyProgram) -> Subject:
    """What a program is for."""
    return "server" if isinstance(program, ServerScenario) else "library"


def loads(text: str | bytes) -> AnyProgram:
    """Parse a program of any subject strictly. Raises BadScenario."""
    raw = raw_object(text)
    match raw.get("subject", "library"):
        case "library":
            if "requests" in raw and "ops" not in raw:
                raise BadScenario('it has requests: add "subject": "server" where it is a program of llama-server')
            return library.loads(text)
        case server.SUBJECT:
            _check_asks(raw)
            return server.loads(text)
        case other:
            raise BadScenario(f"subject {other!r}, this redraft knows library and server")


def _check_asks(raw: dict[str, Any]) -> None:
    """Raises BadScenario for a request that is none of the vocabulary."""
    requests = raw.get("requests")
    for i, request in enumerate(requests if isinstance(requests, list) else ()):
        if not isinstance(request, dict):
            continue
        _check_ask(f"request {i}", request, REQUEST_NAMES)
        asks = request.get("asks") if request["ask"] == "together" else None
        for j, ask in enumerate(asks if isinstance(asks, list) else ()):
            if isinstance(ask, dict):
                _check_ask(f"request {i}, asks {j},", ask, ("turn", "chat"))


def _check_ask(where: str, request: dict[str, Any], names: tuple[str, ...]) -> None:
    ask = request.get("ask")
    if ask not in names:
        said = f"has no ask {ask!r}" if "ask" in request else 'has no "ask"'
        raise BadScenario(f"{where} {said}; there are {', '.join(names)}")


def dumps(program: AnyProgram) -> str:
    """JSON text of a program, stable, with a final newline."""
    return server.dumps(program) if isinstance(program, ServerScenario) else library.dumps(program)


def packed(program: AnyProgram) -> bytes:
    """The same without what is for people, in one line."""
    encoder = server.ENCODER if isinstance(program, ServerScenario) else library.ENCODER
    return encoder.encode(program)


def size(program: AnyProgram) -> int:
    """Its operations or requests."""
    return len(program.requests if isinstance(program, ServerScenario) else program.ops)
