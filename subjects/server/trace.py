"""What llama-server answered and did: one reply for each completion and each slot action of a program, with what the
log says the server did for it, and how the server ended.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from subjects.trace import End as ProcessEnd
from subjects.trace import Piece

Deed = Literal[
    "checkpoint",  # a context checkpoint of `n` tokens was made
    "restored",  # the prompt goes on from a context checkpoint: `n` tokens are kept
    "erased",  # a checkpoint of `n` tokens was dropped
    "reset",  # nothing of the prompt could be kept: all of it is processed again
    "cached",  # the slot's prompt of `n` tokens went into the prompt cache
    "loaded",  # a prompt came out of the prompt cache into the slot
    "kept",  # the slot goes on behind `n` tokens that it holds
    "cleared",  # the slot's prompt of `n` tokens was dropped
    "round",  # `n` of `of` drafted tokens were accepted
    "replay",  # a draft was accepted in part: the state before it was restored, and `n` tokens are decoded again
    "refused",  # a state was not taken, or a batch not decoded; `text` is the log's
]


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One thing that the server did, in slot `slot`."""

    what: Deed
    slot: int = -1
    n: int = 0
    of: int = 0
    text: str = ""


class Reply(msgspec.Struct, kw_only=True):
    """The answer to one completion or slot action: number `part` of request `request` of the program.

    status: HTTP status, 0 where there was no answer (`error` says why). prompt: token ids that were sent; messages:
    (role, content) for a chat. tokens: answered, or received before the client went away (`cancelled`). late: nothing
    came in time. tops: for each token the most probable ones with their logarithms of probability; empty for tokens
    that were drafted, of which the server tells none. cached: prompt tokens that were not processed again, of `length`.
    n: tokens that a slot action saved, restored or erased, or bytes of a file that were changed. pieces: what a changed
    file is put together from. events: what the log says.
    """

    request: int
    part: int = 0
    status: int = 0
    error: str = ""
    prompt: tuple[int, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()
    predict: int = 0
    tokens: tuple[int, ...] = ()
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    text: str = ""
    cancelled: bool = False
    late: bool = False
    cached: int = 0
    processed: int = 0
    length: int = 0
    drafted: int = 0
    accepted: int = 0
    slot: int = -1
    n: int = 0
    pieces: tuple[Piece, ...] = ()
    task: int = -1
    events: tuple[Event, ...] = ()

    @property
    def answered(self) -> bool:
        """Whether it is a whole and good answer."""
        return self.status == 200 and not self.cancelled

    def rounds(self) -> list[tuple[int, int]]:
        """(accepted, drafted) of every round of drafting, in order."""
        return [(e.n, e.of) for e in self.events if e.what == "round"]


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How the server was after the program.

    how: `ok`, it lived and we ended it; `signal` or `exit`, it ended by itself, in request `request`; `hang`, it gave
    no answer in time, or did nothing but write its log; `broken`, it broke a connection and lives; `start`, it did not
    start; `error`, a fault of ours. number: of the signal, or exit code; of a start a signal is negative, and 0 says
    that it was not ready in time. text: what it said last.
    """

    how: Literal["ok", "signal", "exit", "hang", "broken", "start", "error"] = "ok"
    number: int = 0
    request: int = -1
    text: str = ""


def ended(end: End) -> ProcessEnd:
    """The same as the end of a process, which `oracles.crash` reads."""
    if end.how == "start":
        return ProcessEnd("signal", -end.number) if end.number < 0 else ProcessEnd("exit", end.number)
    return ProcessEnd("hang" if end.how == "broken" else end.how, end.number)


class ServerTrace(msgspec.Struct, kw_only=True):
    """One run of a program. log: the server's output, without what loading a model says."""

    replies: list[Reply] = []
    end: End = End()
    log: str = ""
    seconds: float = 0.0
    max_rss_kb: int = 0

    def reply(self, request: int, part: int = 0) -> Reply | None:
        """The reply to a request, None where the program did not come so far."""
        return next((r for r in self.replies if (r.request, r.part) == (request, part)), None)


def to_json(trace: ServerTrace) -> bytes:
    """The trace as a file."""
    return msgspec.json.encode(trace)


def from_json(data: bytes) -> ServerTrace:
    """Read it back. Raises msgspec.DecodeError."""
    return msgspec.json.decode(data, type=ServerTrace)
