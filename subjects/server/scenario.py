"""Programs for llama-server: a model, the server's flags, and a list of requests, as plain data.

A conversation is a list of tokens that the client keeps: what it has sent and what was answered. Requests name
conversations, and say how the next prompt is made from one, so that the reducer can drop a request and leave the rest
meaningful.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from subjects.scenario import BlobEdit, DriverParams, KvType, ModelRef, Record, parsed

VERSION = 1
SUBJECT = "server"


class Flags(Record, frozen=True):
    """llama-server's flags that are part of a program; the defaults are the strict setting (see
    `subjects.scenario.ContextParams`), with one slot and nothing cached outside of it.

    ctx: --ctx-size, of all slots together unless `kv_unified`; llama.cpp rounds the share of each up to 256.
    checkpoints: --ctx-checkpoints, spacing: --checkpoint-min-step. cache_ram: --cache-ram in MiB, 0 for no prompt
    cache. idle_slots: --cache-idle-slots. similarity: --slot-prompt-similarity in hundredths, 0 takes the slot that was
    used longest ago. Speculative drafting is the program's `driver`.
    """

    parallel: int = 1
    ctx: int = 512
    batch: int = 64
    ubatch: int = 32
    checkpoints: int = 0
    spacing: int = 0
    cache_ram: int = 0
    idle_slots: bool = False
    similarity: int = 10
    swa_full: bool = False
    kv_unified: bool = False
    flash_attn: bool = False
    type_k: KvType = "f32"
    type_v: KvType = "f32"

    @property
    def shared_cache(self) -> bool:
        """Whether slots share a cache, which may be full through no fault of one of them."""
        return self.kv_unified and self.parallel > 1

    @property
    def slot_ctx(self) -> int:
        """Tokens that one slot can hold."""
        return self.ctx if self.kv_unified else self.ctx // self.parallel


class Cut(Record, frozen=True):
    """How much of a conversation is kept: all of it (`end`), its last prompt without the answer (`prompt`), or nothing
    (`start`), and `d` tokens more, or less."""

    at: Literal["start", "end", "prompt"] = "end"
    d: int = 0


class Request(Record, frozen=True, tag_field="ask"):
    """One request of a program; the subclasses are the whole vocabulary."""


class Turn(Request, frozen=True, tag="turn"):
    """POST /completion with a prompt of token ids: what `keep` keeps of conversation `base` (of `conv` itself where it
    is None), and `n` tokens of `stream` at the places behind it. Conversation `conv` is then this and its answer.

    So a conversation goes on, an earlier turn is edited (kept in part), shortened (n = 0), repeated exactly (`prompt`
    and n = 0), branched (another `base`), or begun anew (`start`).

    predict: n_predict, greedy. slot: id_slot, -1 leaves it to the server. cache: cache_prompt. cancel: the client goes
    away after so many tokens of the answer (None: it waits for all); the conversation keeps what it has received.
    """

    conv: int
    base: int | None = None
    keep: Cut = Cut()
    n: int = 8
    stream: int = 0
    predict: int = 8
    slot: int = -1
    cache: bool = True
    cancel: int | None = None


class Chat(Request, frozen=True, tag="chat"):
    """POST /v1/chat/completions: the first `keep` messages of chat `conv` (-1: all) and a user's message of `words`
    words of `stream`; the chat is then these and the answer, as text. Chats and conversations are apart."""

    conv: int
    keep: int = -1
    words: int = 4
    stream: int = 0
    predict: int = 8
    slot: int = -1
    cancel: int | None = None


class Together(Request, frozen=True, tag="together"):
    """Requests sent at the same time, each over a connection of its own; no two of one conversation."""

    asks: tuple[Turn | Chat, ...]


class SaveSlot(Request, frozen=True, tag="save_slot"):
    """POST /slots/`slot`?action=save into `file` of the --slot-save-path."""

    slot: int
    file: int


class RestoreSlot(Request, frozen=True, tag="restore_slot"):
    """POST /slots/`slot`?action=restore from `file`, which need not be there."""

    slot: int
    file: int


class EraseSlot(Request, frozen=True, tag="erase_slot"):
    """POST /slots/`slot`?action=erase."""

    slot: int


class DamageFile(Request, frozen=True, tag="damage_file"):
    """Change a saved slot's file, as `subjects.scenario.Corrupt` changes a saved state."""

    file: int
    edits: tuple[BlobEdit, ...]


class Restart(Request, frozen=True, tag="restart"):
    """End the server and start it again, with the same flags and the files that were saved."""


AnyRequest = Turn | Chat | Together | SaveSlot | RestoreSlot | EraseSlot | DamageFile | Restart
REQUEST_TYPES: tuple[type[Request], ...] = get_args(AnyRequest)
REQUEST_NAMES: tuple[str, ...] = tuple(str(t.__struct_config__.tag) for t in REQUEST_TYPES)


class ServerScenario(Record, frozen=True):
    """A program for llama-server. `note` is for people and takes no part in `key`."""

    model: ModelRef
    requests: tuple[AnyRequest, ...]
    flags: Flags = Flags()
    driver: DriverParams | None = None
    note: str = ""
    subject: Literal["server"] = "server"
    version: int = VERSION

    def key(self) -> str:
        """SHA-256 (16 hex digits) of everything that is executed; equal programs have equal keys."""
        return hashlib.sha256(ENCODER.encode(msgspec.structs.replace(self, note=""))).hexdigest()[:16]


ENCODER = msgspec.json.Encoder(order="deterministic")
_DECODER = msgspec.json.Decoder(ServerScenario, strict=True)


def dumps(program: ServerScenario, *, indent: int = 2) -> str:
    """JSON text of a program, stable, defaults included, with a final newline."""
    return msgspec.json.format(ENCODER.encode(program), indent=indent).decode() + "\n"


def loads(text: str | bytes) -> ServerScenario:
    """Parse a program strictly. Raises BadScenario, as `subjects.scenario.loads` does."""
    return parsed(text, _DECODER, VERSION)


def asks_of(request: AnyRequest) -> tuple[Turn | Chat, ...]:
    """The completions that a request asks for."""
    match request:
        case Turn() | Chat():
            return (request,)
        case Together(asks=asks):
            return asks
        case _:
            return ()


def asked(program: ServerScenario) -> list[tuple[int, Turn | Chat]]:
    """Every completion that a program asks for, with the number of its request, in order."""
    return [(i, ask) for i, request in enumerate(program.requests) for ask in asks_of(request)]


def file_name(file: int) -> str:
    """A saved slot's file in the --slot-save-path."""
    return f"slot-{file}.bin"


def shared(a: Sequence[object], b: Sequence[object]) -> int:
    """Tokens that two prompts have in common at their beginning."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
