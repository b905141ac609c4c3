"""Programs of every subject, where it does not matter of which one they are: read, written, told apart."""

from __future__ import annotations

from typing import Literal

from subjects import scenario as library
from subjects.scenario import BadScenario, Scenario, raw_object
from subjects.server import scenario as server
from subjects.server.scenario import ServerScenario

Subject = Literal["library", "server"]
AnyProgram = Scenario | ServerScenario


def subject_of(program: AnyProgram) -> Subject:
    """What a program is for."""
    return "server" if isinstance(program, ServerScenario) else "library"


def loads(text: str | bytes) -> AnyProgram:
    """Parse a program of any subject strictly. Raises BadScenario."""
    match raw_object(text).get("subject", "library"):
        case "library":
            return library.loads(text)
        case server.SUBJECT:
            return server.loads(text)
        case other:
            raise BadScenario(f"subject {other!r}, this redraft knows library and server")


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
