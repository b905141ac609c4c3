"""Requests of a program in words, with what they became and what was answered; and its flags."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fuzz.repro.phrases import count, listed
from fuzz.repro.text import scrub
from fuzz.repro.words import edit_words
from oracles.server.words import told
from subjects.scenario import DriverParams
from subjects.server.process import argv
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    DamageFile,
    EraseSlot,
    Flags,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
    file_name,
)
from subjects.server.trace import Event, Reply, ServerTrace

_SERVER, _MODEL = Path("llama-server"), Path("MODEL.gguf")
_ALWAYS = ("--spec-type", "--spec-draft-n-max")
NO_ANSWER = "**no answer**"
# what is done before a prompt is processed
_BEFORE = ("cached", "loaded", "cleared", "restored", "reset")


def seen_with(build: str, environment: Mapping[str, str | int | list[str]]) -> str:
    """The server for people: its build's name, llama.cpp's version, and the fingerprint."""
    if "build" not in environment:
        return build
    version = [str(environment["llama_cpp"])] if environment.get("llama_cpp", "unknown") != "unknown" else []
    fingerprint = environment.get("fingerprint", build)
    return f"{environment['build']} ({', '.join([*version, f'build {fingerprint}'])})"


# --- flags ------------------------------------------------------------------------------------------------------------


def units(command: Sequence[str]) -> list[list[str]]:
    """A command line in pieces: the program, and each flag with its value."""
    out: list[list[str]] = []
    for i, word in enumerate(command):
        if i == 0 or word.startswith("-") or len(out) == 1:
            out.append([word])
        else:
            out[-1].append(word)
    return out


def flags_text(flags: Flags, driver: DriverParams | None) -> str:
    """The flags that differ from redraft's defaults, as on the command line."""
    draft = Path("DRAFT.gguf") if driver is not None and driver.draft is not None else None
    usual = units(argv(_SERVER, _MODEL, Flags(), DriverParams(kind=driver.kind) if driver else None, None, None))
    ours = units(argv(_SERVER, _MODEL, flags, driver, draft, None))
    return " ".join(" ".join(u) for u in ours if u not in usual or u[0] in _ALWAYS)


# --- requests ---------------------------------------------------------------------------------------------------------


def program(scenario: ServerScenario, trace: ServerTrace) -> list[str]:
    """One sentence for each request that was sent."""
    so_far = Words()
    lines: list[str] = []
    for i, request in enumerate(scenario.requests):
        replies = [r for r in trace.replies if r.request == i]
        if not replies:
            break
        lines.append(so_far.sentence(request, replies))
    return lines


class Words:
    """Tells one request after the other; it knows which conversations there are."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.chats: set[int] = set()

    def sentence(self, request: AnyRequest, replies: Sequence[Reply]) -> str:
        """What was sent, what the server did for it, and what it answered."""
        reply = replies[0]
        match request:
            case Turn() | Chat():
                return self._completion(request, reply)
            case Together():
                parts = [self._completion(a, r) for a, r in zip(request.asks, replies, strict=True)]
                return "at the same time: " + "; ".join(f"({k}) {p}" for k, p in enumerate(parts))
            case SaveSlot():
                return f"slot {request.slot} is saved into {file_name(request.file)}" + _done(reply)
            case RestoreSlot():
                return f"slot {request.slot} is restored from {file_name(request.file)}" + _done(reply)
            case EraseSlot():
                return f"slot {request.slot} is erased" + _done(reply)
            case DamageFile():
                edits = "; ".join(edit_words(e) for e in request.edits)
                what = f"{count(reply.n, 'byte')} of it" if reply.n else "nothing of it, or there is no such file"
                return f"{file_name(request.file)} is changed: {edits} → {what}"
            case Restart():
                return "the server is ended and started again" + ("" if reply.status else f" → {NO_ANSWER}")

    def _completion(self, ask: Turn | Chat, reply: Reply) -> str:
        text = self._chat(ask, reply) if isinstance(ask, Chat) else self._turn(ask, reply)
        if ask.slot >= 0:
            text += f", for slot {ask.slot}"
        if isinstance(ask, Turn) and not ask.cache:
            text += ", cache_prompt false"
        return ", ".join([text, *deeds(reply)]) + f" → {answer(reply)}"

    def _turn(self, ask: Turn, reply: Reply) -> str:
        source = ask.conv if ask.base is None else ask.base
        size = len(reply.prompt)
        kept = max(size - ask.n, 0) if source in self.known else 0
        if ask.keep.at == "start" and ask.keep.d <= 0:
            kept = 0
        more = size - kept
        anew = ask.conv in self.known
        if reply.status == 200:
            self.known.add(ask.conv)
        if kept == 0:
            return f"conversation {ask.conv} begins{' anew' if anew else ''}: {_prompt(size)}"
        if source != ask.conv:
            text = f"conversation {ask.conv} branches off conversation {source} behind {count(kept, 'token')}"
        elif ask.keep.at == "end" and ask.keep.d == 0:
            text = f"conversation {ask.conv} goes on" if ask.n else f"conversation {ask.conv} is to go on"
        elif ask.keep.at == "prompt" and ask.keep.d == 0:
            text = f"conversation {ask.conv} is asked " + ("the same again" if not more else "again without its answer")
        else:
            text = f"conversation {ask.conv} goes back to its first {count(kept, 'token')}"
        return f"{text}: {count(more, 'token')} more, {_prompt(size)}" if more else f"{text}: {_prompt(size)}"

    def _chat(self, ask: Chat, reply: Reply) -> str:
        kept, name = len(reply.messages) - 1, chat_name(ask.conv)
        anew = ask.conv in self.chats
        if reply.status == 200:
            self.chats.add(ask.conv)
        said = f"a message of {count(max(ask.words, 1), 'word')}"
        size = f", {_prompt(reply.length)}" if reply.length else ""
        if kept <= 0:
            return f"chat {name} begins{' anew' if anew else ''}: {said}{size}"
        if ask.keep < 0:
            return f"chat {name} goes on: {said}{size}"
        return f"chat {name} goes back to its first {count(kept, 'message')}: {said}{size}"


def chat_name(conv: int) -> str:
    """`A` for chat 0, `B` for the next: conversations, which are others, have numbers."""
    return (chat_name(conv // 26 - 1) if conv >= 26 else "") + chr(ord("A") + conv % 26)


def _prompt(n: int) -> str:
    return f"a prompt of {count(n, 'token')}"


def _done(reply: Reply) -> str:
    if reply.status == 200:
        return f" → {count(reply.n, 'token')}"
    return f" → {refusal(reply)}"


def refusal(reply: Reply) -> str:
    """An answer that is none."""
    if reply.status == 0:
        return NO_ANSWER
    return f"HTTP {reply.status}: {scrub(reply.error)}"


def worst(reply: Reply, clean: Reply, band: float) -> list[str]:
    """Where the probabilities of two answers are furthest apart, up to the token at which they part; none where that is
    within the band."""
    found: tuple[float, str] = (band, "")
    for row, (mine, theirs) in enumerate(zip(map(dict, reply.tops), map(dict, clean.tops), strict=False)):
        where = f"worst at token {row} of the answer: "
        for token in mine.keys() & theirs.keys():
            a, b = mine[token], theirs[token]
            apart = 0.0 if a == b else abs(a - b) if math.isfinite(a - b) else math.inf
            told = f"{where}the log-probability of token {token} is {a:.4g} as served, {b:.4g} of the cold server"
            found = max(found, (apart, told), key=lambda x: x[0])
        if mine and theirs and not mine.keys() & theirs.keys():
            told = f"{where}none of the most probable tokens as served, {_ids(mine)}, is one of the cold server's, "
            found = max(found, (math.inf, told + _ids(theirs)), key=lambda x: x[0])
        if reply.tokens[row : row + 1] != clean.tokens[row : row + 1]:
            break
    return [found[1]] if found[1] else []


def _ids(tops: Mapping[int, float]) -> str:
    return listed(map(str, tops))


def deeds(reply: Reply) -> list[str]:
    """What the server did with a prompt, in the order of its effect."""
    by: dict[str, list[Event]] = {}
    for e in reply.events:
        by.setdefault(e.what, []).append(e)
    said = [f"{reply.cached} cached"] if reply.cached else []
    said += dict.fromkeys(text for what in _BEFORE for e in by.get(what, ()) if (text := told(e)))
    for what, verb in (("erased", "dropped"), ("checkpoint", "made")):
        if places := _places(by.get(what, ())):
            said.append(f"{places} {verb}")
    return said + [scrub(told(e)) for e in by.get("refused", ())]


def _places(events: Iterable[Event]) -> str:
    """`checkpoints at 4 and 36`."""
    at = [str(e.n) for e in events]
    return f"checkpoint{'s' if len(at) > 1 else ''} at {listed(at)}" if at else ""


def answer(reply: Reply) -> str:
    """What came back."""
    if reply.status != 200:
        return refusal(reply)
    said = [count(len(reply.tokens), "token")]
    if reply.cancelled:
        said.append("then the client went away")
    if reply.drafted:
        said.append(f"{reply.accepted} of {count(reply.drafted, 'drafted token')} accepted")
    rounds = sum(e.what == "replay" for e in reply.events)
    if rounds:
        said.append(f"the state before a draft restored in {count(rounds, 'round')}")
    return ", ".join(said)
