"""What oracles say of a reply: which request it was, and what the server did for it."""

from __future__ import annotations

from oracles.server.account import Held
from subjects.server.trace import Event, Reply

# what an answer may be wrong by
_MATTERS = ("loaded", "restored", "reset", "replay", "refused")


def tokens(n: int) -> str:
    """`1 token`, `2 tokens`."""
    return f"{n} token{'' if n == 1 else 's'}"


def place(reply: Reply) -> str:
    """The request, as "request 3", or "request 3 (part 1)" where several were sent together."""
    return f"request {reply.request}" + (f" (part {reply.part})" if reply.part else "")


def told(e: Event) -> str:
    """A thing that the server did; empty for what a sentence has no room for, or tells of several at once, and for what
    was done to an empty prompt."""
    match e.what:
        case "cached" | "cleared" if not e.n:
            return ""
        case "cached":
            return f"the slot's prompt of {tokens(e.n)} put into the prompt cache"
        case "loaded":
            return "a prompt taken out of the prompt cache"
        case "cleared":
            return f"the slot's prompt of {tokens(e.n)} dropped"
        case "restored":
            return f"a checkpoint restored at {tokens(e.n)}" + (f" of its {e.of}" if e.of not in (0, e.n) else "")
        case "reset":
            return "all of it processed again for want of a checkpoint"
        case "replay":
            return "a draft accepted in part and the state before it restored"
        case "refused":
            return f'"{e.text}"'
        case _:
            return ""


def did(reply: Reply) -> str:
    """What the server had done before it answered, that matters: "a checkpoint restored at 36 tokens, ..."."""
    seen = [told(e) for e in reply.events if e.what in _MATTERS]
    if reply.cached:
        seen.append(f"{reply.cached} of {tokens(reply.length)} kept")
    return ", ".join(dict.fromkeys(seen)) or "all of the prompt processed"


def difference(held: Held) -> str:
    """How an answer differs from the cold one."""
    if held.ends_elsewhere:
        return f"it ends behind {tokens(len(held.reply.tokens))}, where the cold server's has {len(held.cold.tokens)}"
    if held.token != held.expected:
        return (
            f"token {held.row} is {held.token}, not {held.expected}, which the cold server prefers by {held.gap:.3g}"
            f" (band {held.band:.2g})"
        )
    return f"the log-probabilities of token {held.row} are off by up to {held.error:.3g} (band {held.band:.2g})"
