"""Runs a program on a real llama-server and returns what it answered and did."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from subjects.scenario import token
from subjects.server import log
from subjects.server.client import Client, NoAnswer
from subjects.server.planted import PLANTED, Plant
from subjects.server.process import Server, ServerError, argv
from subjects.server.scenario import (
    AnyRequest,
    Chat,
    DamageFile,
    EraseSlot,
    Restart,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
    file_name,
)
from subjects.server.trace import End, Reply, ServerTrace
from subjects.state.edits import OWN, Source, assemble, pieces_of

TOPS = 10
"""most probable tokens that are asked for with each token"""
LEAST = -80.0
"""of logarithms of probabilities: float32 has no smaller ones, and what is below is rounding"""
NO_NUMBER = -1e9
"""in place of one that is none (JSON's null): as far off as can be"""
NO_ANSWER = 599
"""status of what is answered with 200 and is no answer"""
DYING_SECONDS = 2.0
"""that an end of the server may take to show after it broke a connection"""
_WORDS = ("north", "south", "east", "west", "red", "green", "blue", "one", "two", "three", "up", "down")
_FIELDS = [
    "tokens",
    "content",
    "id_slot",
    "timings",
    "completion_probabilities",
    "error",
]


def run(
    program: ServerScenario, binary: Path, model: Path, draft: Path | None = None, *, fault: str = ""
) -> ServerTrace:
    """Start a server, send the requests, end it. What goes wrong is in the trace. fault: of `subjects.server.planted`.

    Raises KeyError for a fault that there is not.
    """
    plant = PLANTED[fault]() if fault else None
    began = time.monotonic()
    flags, driver = program.flags, program.driver
    # without a folder for them the server takes no slot action at all
    files = any(isinstance(r, SaveSlot | RestoreSlot | EraseSlot) for r in program.requests)
    trace = ServerTrace()
    try:
        server = Server(lambda saves: argv(binary, model, flags, driver, draft, saves), model, saves=files)
    except ServerError as e:
        number = -e.end.number if e.end.how == "signal" else e.end.number
        trace.end = End(how="error" if e.end.how == "error" else "start", number=number, text=str(e))
        trace.log = e.log
        return trace
    try:
        _Run(program, server, trace, plant).all()
        trace.log = "".join(session(log) for log in server.stop())
        if trace.end.how == "ok" and server.fell is not None:
            trace.end = msgspec.structs.replace(server.fell, request=len(program.requests) - 1)
        attribute(trace)
    finally:
        trace.max_rss_kb = server.max_rss_kb
        trace.seconds = time.monotonic() - began
        server.close()
    return trace


def words(stream: int, first: int, n: int) -> str:
    """`n` words of a stream, from number `first` on."""
    return " ".join(_WORDS[token(stream, first + i, len(_WORDS))] for i in range(n))


def session(text: str) -> str:
    """A server's log without times, and without what it says of itself and the model until it listens; all of it where
    it never does."""
    out, on = [], "listening on http://" not in text
    for line in text.splitlines():
        if "listening on http://" in line:
            on = True
        elif "cleaning up before exit" in line:
            on = False
        elif on:
            out.append(line.split(" ", 1)[-1] if line[:1].isdigit() else line)
    return "\n".join(out) + "\n" if out else ""


def attribute(trace: ServerTrace) -> None:
    """Give every reply what the log says was done for it. Of requests sent together those of equal length are told
    apart by the slot."""
    tasks = log.read(trace.log)
    for reply in trace.replies:
        if not reply.prompt and not reply.messages:
            continue
        for told in tasks:
            # a chat whose client went away says no length
            length = reply.length or len(reply.prompt)
            same = told.prompt < 0 or told.prompt == length or (not length and reply.status == 200)
            if same and reply.slot in (-1, told.slot):
                reply.task, reply.events = told.task, tuple(told.events)
                reply.slot = told.slot
                tasks.remove(told)
                break


class _Run:
    def __init__(self, program: ServerScenario, server: Server, trace: ServerTrace, plant: Plant | None):
        self.program, self.server, self.trace = program, server, trace
        self.plant = plant
        if plant:
            plant.pid, plant.drafts = server.process.pid, program.driver is not None
        self.client = Client(server.port, server.patience)
        self.n_vocab = 0
        self.conversations: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        """length of the last prompt of a conversation"""
        self.chats: dict[int, list[tuple[str, str]]] = {}

    def all(self) -> None:
        """Every request, until the server ends."""
        try:
            _, document = self.client.get("/v1/models")
            self.n_vocab = int(document["data"][0]["meta"]["n_vocab"])
        except (NoAnswer, LookupError, TypeError) as e:
            self.trace.end = End(how="error", text=f"the server does not say what its model is: {e}")
            return
        for i, request in enumerate(self.program.requests):
            replies = self._do(i, request)
            if self.plant:
                replies = [self.plant.answer(r) for r in replies]
            self.trace.replies += replies
            end = self._end(replies)
            if end is not None:
                self.trace.end = msgspec.structs.replace(end, request=i)
                return

    def _end(self, replies: list[Reply]) -> End | None:
        """How the server ended, after these replies; None where it goes on."""
        if self.server.fell is not None:
            return self.server.fell  # a restart found it ended
        lost = [r for r in replies if r.status == 0]
        end = self.server.ended(DYING_SECONDS if lost else 0.0)
        if end is None and lost:
            return End(how="hang" if any(r.late for r in lost) else "broken", text=lost[0].error)
        return end

    def _do(self, i: int, request: AnyRequest) -> list[Reply]:
        match request:
            case Turn() | Chat():
                return [self._keep(request, self._complete(self.client, i, 0, request, self._asked(request)))]
            case Together():
                return self._together(i, request)
            case SaveSlot():
                return [self._slot(i, request.slot, "save", request.file)]
            case RestoreSlot():
                return [self._slot(i, request.slot, "restore", request.file)]
            case EraseSlot():
                return [self._slot(i, request.slot, "erase", None)]
            case DamageFile():
                return [self._damage(i, request)]
            case Restart():
                return [self._restart(i)]

    # --- completions --------------------------------------------------------------------------------------------------

    def _asked(self, ask: Turn | Chat) -> Reply:
        """The prompt of a completion, as the reply that is to come has it."""
        if isinstance(ask, Chat):
            kept = self.chats.get(ask.conv, [])
            kept = kept[: len(kept) if ask.keep < 0 else ask.keep]
            message = ("user", words(ask.stream, len(kept), max(ask.words, 1)))
            return Reply(request=0, messages=(*kept, message), predict=ask.predict)
        conv = ask.conv if ask.base is None else ask.base
        tokens = self.conversations.get(conv, [])
        at = {"start": 0, "end": len(tokens), "prompt": self.prompts.get(conv, 0)}[ask.keep.at] + ask.keep.d
        kept_tokens = tokens[: min(max(at, 0), len(tokens))]
        first = len(kept_tokens)
        # a prompt without tokens is answered without the model
        n = ask.n if kept_tokens else max(ask.n, 1)
        more = [token(ask.stream, first + k, self.n_vocab) for k in range(n)]
        return Reply(request=0, prompt=(*kept_tokens, *more), predict=ask.predict)

    def _keep(self, ask: Turn | Chat, reply: Reply) -> Reply:
        """Make a good answer part of its conversation."""
        if reply.status == 200:
            if isinstance(ask, Chat):
                self.chats[ask.conv] = [*reply.messages, ("assistant", reply.text)]
            else:
                self.conversations[ask.conv] = [*reply.prompt, *reply.tokens]
                self.prompts[ask.conv] = len(reply.prompt)
        return reply

    def _together(self, i: int, request: Together) -> list[Reply]:
        asked = [self._asked(a) for a in request.asks]

        def one(part: int) -> Reply:
            client = Client(self.server.port, self.server.patience)
            try:
                return self._complete(client, i, part, request.asks[part], asked[part])
            finally:
                client.close()

        with ThreadPoolExecutor(len(request.asks)) as pool:
            replies = list(pool.map(one, range(len(request.asks))))
        return [self._keep(a, r) for a, r in zip(request.asks, replies, strict=True)]

    def _complete(self, client: Client, i: int, part: int, ask: Turn | Chat, asked: Reply) -> Reply:
        asked.request, asked.part = i, part
        body = body_of(asked)
        body["id_slot"] = ask.slot
        body["cache_prompt"] = ask.cache if isinstance(ask, Turn) else True
        if self.plant:
            body = self.plant.request(body, asked, self.n_vocab)
        reply = complete(client, body, asked, ask.cancel)
        if reply.cancelled and reply.messages:
            # a streamed chat leaves tokens out that have no text, or were drafted; not the first one
            reply.tokens, reply.tops = reply.tokens[:1], reply.tops[:1]
        return reply

    # --- slots and the server itself ----------------------------------------------------------------------------------

    def _slot(self, i: int, slot: int, action: str, file: int | None) -> Reply:
        reply = Reply(request=i, slot=slot)
        body = {} if file is None else {"filename": file_name(file)}
        try:
            reply.status, document = self.client.post(f"/slots/{slot}?action={action}", body)
        except NoAnswer as e:
            reply.error, reply.late = str(e), e.hang
            return reply
        if reply.status == 200 and isinstance(document, dict):
            reply.n = int(document.get({"save": "n_saved", "restore": "n_restored"}.get(action, "n_erased"), 0))
        else:
            reply.error = error_of(document)
        return reply

    def _damage(self, i: int, request: DamageFile) -> Reply:
        """Change a file; `n` bytes of it differ then, 0 where there is no file."""

        def read(number: int) -> bytes | None:
            path = self._path(number)
            return path.read_bytes() if path.is_file() else None

        reply = Reply(request=i, status=200)
        data = read(request.file)
        if data is None:
            return reply

        def other(number: int) -> Source | None:
            donor = read(number)
            return Source(donor) if donor is not None else None

        pieces = pieces_of(Source(data), request.edits, other)
        reply.pieces = tuple(p._replace(slot=request.file) if p.slot == OWN else p for p in pieces)
        changed = assemble(reply.pieces, lambda number: read(number) or b"")
        self._path(request.file).write_bytes(changed)
        reply.n = sum(a != b for a, b in zip(data, changed, strict=False)) + abs(len(data) - len(changed))
        return reply

    def _path(self, file: int) -> Path:
        assert self.server.saves is not None
        return self.server.saves / file_name(file)

    def _restart(self, i: int) -> Reply:
        self.client.close()
        try:
            self.server.restart()
        except ServerError as e:
            return Reply(request=i, error=str(e))
        if self.server.fell is not None:
            return Reply(request=i, error="it had ended before it was to be restarted")
        self.client = Client(self.server.port, self.server.patience)
        if self.plant:
            self.plant.pid = self.server.process.pid
        return Reply(request=i, status=200)


def body_of(asked: Reply) -> dict[str, Any]:
    """What is posted for a completion, but for the slot and the cache: greedy, with probabilities."""
    body: dict[str, Any] = {"temperature": 0.0, "seed": 1}
    if asked.messages:
        messages = [{"role": role, "content": text} for role, text in asked.messages]
        return {**body, "messages": messages, "max_tokens": asked.predict, "logprobs": True, "top_logprobs": TOPS}
    body |= {"prompt": list(asked.prompt), "n_predict": asked.predict, "n_probs": TOPS}
    return {**body, "return_tokens": True, "response_fields": _FIELDS}


def complete(client: Client, body: dict[str, Any], asked: Reply, cancel: int | None = None) -> Reply:
    """Ask for a completion and put the answer into `asked`, which it returns. cancel: go away after so many tokens."""
    path = "/v1/chat/completions" if asked.messages else "/completion"
    try:
        if cancel is None:
            asked.status, document = client.post(path, body)
            documents = [document]
        else:
            asked.status, documents = client.stream(path, body, cancel)
            asked.cancelled = True
    except NoAnswer as e:
        asked.error, asked.late = str(e), e.hang
        return asked
    if asked.status != 200:
        asked.error = error_of(documents[0])
        return asked
    read: Callable[[Reply, Any], None] = _read_chat if asked.messages else _read
    try:
        for document in documents:
            if "error" in document:
                asked.status, asked.error = 500, error_of(document)
                return asked
            read(asked, document)
    except (TypeError, ValueError, AttributeError, LookupError) as e:
        asked.status, asked.error = NO_ANSWER, f"the answer is none: {type(e).__name__}: {e}"
    return asked


def _read(reply: Reply, document: Any) -> None:
    # a whole answer has them, if none; a part that is streamed need not
    tokens = tuple(int(x) for x in (document.get("tokens", ()) if reply.cancelled else document["tokens"]))
    reply.tokens += tokens
    reply.tops += aligned(tokens, document.get("completion_probabilities") or [])
    reply.text += document.get("content", "")
    reply.slot = int(document.get("id_slot", reply.slot))
    _read_timings(reply, document)
    reply.length = len(reply.prompt)


def aligned(tokens: tuple[int, ...], probabilities: list[Any]) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The most probable tokens beside each token: nothing is told of a streamed part of a drafted token, nor of a token
    that leaves a character of several bytes incomplete."""
    out: list[tuple[tuple[int, float], ...]] = []
    at = 0
    for t in tokens:
        mine = at < len(probabilities) and int(probabilities[at]["id"]) == t
        out.append(_tops(probabilities[at]) if mine else ())
        at += mine
    return tuple(out)


def _read_chat(reply: Reply, document: Any) -> None:
    for choice in document.get("choices", ()):
        message = choice.get("message") or choice.get("delta") or {}
        content = (choice.get("logprobs") or {}).get("content") or []
        reply.text += message.get("content") or ""
        reply.tokens += tuple(int(p["id"]) for p in content)
        reply.tops += tuple(_tops(p) for p in content)
    reply.length = int((document.get("usage") or {}).get("prompt_tokens", reply.length))
    _read_timings(reply, document)


def _tops(probability: Any) -> tuple[tuple[int, float], ...]:
    told = ((int(t["id"]), t["logprob"]) for t in probability.get("top_logprobs", ()))
    return tuple((token_id, NO_NUMBER if p is None else max(float(p), LEAST)) for token_id, p in told)


def _read_timings(reply: Reply, document: Any) -> None:
    timings = document.get("timings") or {}
    reply.cached = int(timings.get("cache_n", reply.cached))
    reply.processed = int(timings.get("prompt_n", reply.processed))
    reply.drafted = int(timings.get("draft_n", reply.drafted))
    reply.accepted = int(timings.get("draft_n_accepted", reply.accepted))


def error_of(document: Any) -> str:
    """The message of an error's document."""
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or document)[:300]
