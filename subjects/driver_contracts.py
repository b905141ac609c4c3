"""The contract of speculative drivers, as `subjects.contracts` has it for llama.h; part of the one table there.

`FORMS` lists the argument forms of every operation of a program with a driver (those of plain programs that it takes
have fewer there); `forms_of` tells which ones a concrete operation is.

Sources: common/speculative.h and common/speculative.cpp of the llama.cpp that llama-cpp-python 0.3.36 brings, and
tools/server/server-context.cpp for what a caller does.
"""

# ruff: noqa: E501 (quotes are kept in one piece)
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Protocol, get_args

from subjects.clauses import Clause, Contract, Says
from subjects.scenario import (
    PIECES,
    Accept,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    Mangle,
    Mangling,
    Op,
    Propose,
    Reopen,
    Rewind,
    SeqRm,
    Verify,
)


def _c(id: str, text: str, source: str, says: Says) -> Clause:
    return Clause(id, text, source, says)


_SERVER = "tools/server/server-context.cpp does so"
_SILENT = "speculative.h says nothing about it"
_SUBSETS = tuple("+".join(parts) for k in (3, 2, 1) for parts in combinations(PIECES, k))

DRIVER_CONTRACTS: tuple[Contract, ...] = (
    Contract(
        "propose",
        "common_speculative_draft, llama_memory_seq_rm on the draft",
        owes=(
            _c(
                "propose.ids",
                "sequence ids lie in [0, n_seq)",
                "speculative.cpp common_speculative_get_draft_params(): GGML_ASSERT",
                "spec-source",
            ),
            _c("propose.once", "a sequence is asked once, and holds something", _SERVER, "spec-source"),
            _c(
                "propose.rows",
                "the drafts of all sequences that are asked fit into n_batch",
                "common/common.cpp common_batch::get_sub_batch(): GGML_ABORT",
                "spec-source",
            ),
            _c("propose.answered", "no verification of the sequence is open", _SERVER, "spec-source"),
        ),
        gets=(
            _c(
                "propose.drafts",
                "the draft follows from the sequence's tokens and the next one",
                _SILENT,
                "spec-silent",
            ),
            _c(
                "propose.after-cut",
                "after a cut that no call tells it of, the driver is right or says that it is not",
                _SILENT,
                "spec-silent",
            ),
            _c("propose.own", "what other sequences do does not change it", _SILENT, "spec-silent"),
        ),
        forms=(
            "one sequence",
            "several sequences",
            "next token of a stream",
            "greedy token",
            "given token",
            "unlimited",
            "limited",
            "drafted already",
        ),
    ),
    Contract(
        "verify",
        "llama_decode of the drafts, common_speculative_process, common_speculative_accept, llama_memory_seq_rm",
        owes=(
            _c(
                "verify.ids",
                "sequence ids lie in [0, n_seq)",
                "speculative.cpp common_speculative_accept(): unchecked vector",
                "spec-source",
            ),
            _c(
                "verify.rows",
                "drafts of all sequences fit into n_batch, on recurrent memory into n_ubatch",
                "src/llama-context.cpp decode(): GGML_ASSERT(n_tokens_all <= cparams.n_batch)",
                "spec-source",
            ),
            _c(
                "verify.count",
                "one number of accepted drafts for each sequence, or none at all",
                _SERVER,
                "spec-source",
            ),
            _c(
                "verify.route",
                "recurrent memory without rollback takes another route than `cut`",
                _SERVER,
                "spec-source",
            ),
        ),
        gets=(
            _c("verify.greedy", "the target answers as in plain decoding", _SILENT, "spec-silent"),
            _c(
                "verify.rolled-back",
                "what was rejected does not matter any more, by whatever route",
                _SILENT,
                "spec-silent",
            ),
            _c(
                "verify.agree",
                "target and draft agree on positions, and the sequence is longer",
                _SILENT,
                "spec-silent",
            ),
        ),
        forms=(
            "one sequence",
            "several sequences",
            "cut",
            "host",
            "device",
            "whole",
            "accept none",
            "accept some",
            "accept all",
            "accept greedily",
            "left open",
        ),
    ),
    Contract(
        "accept",
        "common_speculative_accept, llama_memory_seq_rm",
        owes=(
            _c(
                "accept.open",
                "a verification of the sequence is open",
                "speculative.cpp common_speculative_accept(): GGML_ASSERT(n_accepted == 0)",
                "spec-source",
            ),
        ),
        gets=(
            _c(
                "accept.row",
                "after n accepted drafts the next token is paired with the row of the n-th",
                'speculative.h: "informs the speculative context that n_accepted tokens were accepted by the target model"',
                "spec",
            ),
        ),
        forms=("none", "some", "all", "at once", "after other work"),
    ),
    Contract(
        "checkpoint",
        "llama_state_seq_get_data_ext on target and draft, common_speculative_get_state",
        owes=(
            _c(
                "checkpoint.ids", "sequence ids lie in [0, n_seq), the sequence holds something", _SERVER, "spec-source"
            ),
            _c(
                "checkpoint.device",
                "one snapshot on the device a sequence",
                'llama.h: "invalidates all prior states gotten for that seq_id with this flag"',
                "spec-source",
            ),
        ),
        gets=(
            _c(
                "checkpoint.driver",
                "what a driver keeps between calls is offered, or does not matter",
                _SILENT,
                "spec-silent",
            ),
        ),
        forms=("flags 0", "flags 1", "flags 2", "flags 3", "draft waiting", "verification open"),
    ),
    Contract(
        "rewind",
        "llama_state_seq_set_data_ext on target and draft, common_speculative_set_state, llama_memory_seq_rm",
        owes=(
            _c("rewind.ids", "sequence ids lie in [0, n_seq)", _SERVER, "spec-source"),
            _c(
                "rewind.slot",
                "the slot holds a checkpoint, of this context where it is on the device",
                _SERVER,
                "spec-source",
            ),
            _c(
                "rewind.prefix",
                "what a partial checkpoint leaves out still holds its tokens",
                "llama.h: LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY",
                "spec-source",
            ),
        ),
        gets=(
            _c(
                "rewind.state",
                "the sequence drafts as it did when it was saved",
                'speculative.h: "(optional) get/set internal state"',
                "spec",
            ),
        ),
        forms=(
            *_SUBSETS,
            "flags 0",
            "flags 1",
            "flags 2",
            "flags 3",
            "same sequence",
            "other sequence",
            "onto an empty sequence",
            "after reopen",
            "verification open",
            "malformed",
        ),
    ),
    Contract(
        "mangle",
        "common_speculative_set_state of bytes that get_state never gave",
        owes=(_c("mangle.slot", "the slot holds a checkpoint", _SERVER, "spec-source"),),
        gets=(
            _c("mangle.refused", "nothing changes", _SILENT, "spec-silent"),
            _c("mangle.told", "the caller can see it", _SILENT, "spec-silent"),
        ),
        forms=get_args(Mangling),
    ),
    Contract(
        "begin",
        "common_speculative_begin",
        owes=(
            _c(
                "begin.ids",
                "sequence ids lie in [0, n_seq)",
                "speculative.cpp: GGML_ASSERT(seq_id < (llama_seq_id) n_seq)",
                "spec-source",
            ),
        ),
        gets=(
            _c(
                "begin.fresh",
                "a new conversation does not depend on the one before",
                'speculative.h: "optionally call once at the beginning of a new generation"',
                "spec-silent",
            ),
        ),
        forms=("goes on", "after a cut or restore"),
    ),
)

FORMS: dict[str, tuple[str, ...]] = {c.op: c.forms for c in DRIVER_CONTRACTS} | {
    "decode": (
        "one sequence",
        "2 sequences",
        "outputs last",
        "outputs all",
        "tokens of a stream",
        "given tokens",
        "onto an empty sequence",
        "behind other tokens",
        "draft thrown away",
        "above n_ubatch",
    ),
    "seq_rm": ("whole", "tail"),
    "reopen": ("same parameters", "other parameters"),
}


class SeqView(Protocol):
    """What `forms_of` looks at in a sequence."""

    @property
    def hi(self) -> int:
        """Tokens at most."""

    @property
    def proposed(self) -> bool:
        """A draft of it is there."""

    @property
    def open(self) -> bool:
        """The answer to a verification is open."""

    @property
    def shrunk(self) -> bool:
        """It was cut or restored, and begin() was not called since."""

    @property
    def fresh_open(self) -> bool:
        """Nothing was done since its verification was left open."""


class SlotView(Protocol):
    """What `forms_of` looks at in a checkpoint."""

    @property
    def seq(self) -> int:
        """Of which sequence."""

    @property
    def state(self) -> SeqView:
        """That sequence as it was."""

    @property
    def flags(self) -> int:
        """How its memory was saved."""

    @property
    def epoch(self) -> int:
        """In which context."""

    @property
    def mangled(self) -> bool:
        """The driver's part is malformed."""


class View(Protocol):
    """The logical state in which an operation is about to be executed (`fuzz.drivers.state.Rounds` is one)."""

    @property
    def params(self) -> ContextParams:
        """Of the context in force."""

    @property
    def driver(self) -> DriverParams:
        """The driver."""

    @property
    def epoch(self) -> int:
        """Number of the context."""

    @property
    def seqs(self) -> Sequence[SeqView]:
        """All sequences."""

    @property
    def slots(self) -> Mapping[int, SlotView]:
        """All checkpoints."""


def forms_of(op: Op, view: View) -> set[str]:
    """The forms (`FORMS[operation]`) that an operation of a program with a driver has in its context."""
    return {form for form in _FORMS[type(op)](op, view) if form}


def _many(seqs: Sequence[int]) -> str:
    return "one sequence" if len(seqs) == 1 else "several sequences"


def _decode(op: Decode, v: View) -> list[str]:
    rows = sum(len(p.tokens) if p.tokens else p.n for p in op.parts)
    return [
        "one sequence" if len(op.parts) == 1 else f"{len(op.parts)} sequences",
        *(f"outputs {p.out}" for p in op.parts),
        *("given tokens" if p.tokens else "tokens of a stream" for p in op.parts),
        *("behind other tokens" if v.seqs[p.seq].hi else "onto an empty sequence" for p in op.parts),
        "draft thrown away" if any(v.seqs[p.seq].proposed for p in op.parts) else "",
        "above n_ubatch" if rows > v.params.n_ubatch else "",
    ]


def _propose(op: Propose, v: View) -> list[str]:
    return [
        _many(op.seqs),
        "given token" if op.last else "greedy token" if op.stream < 0 else "next token of a stream",
        "limited" if op.n_max > 0 else "unlimited",
        "drafted already" if any(v.seqs[s].proposed for s in op.seqs) else "",
    ]


def _taken(n: int, v: View) -> str:
    return "all" if n >= v.driver.n_max else "some" if n else "none"


def _verify(op: Verify, v: View) -> list[str]:
    mine = [i for i, s in enumerate(op.seqs) if v.seqs[s].proposed and not v.seqs[s].open]
    if not op.accept:
        return [_many(mine), "left open"]
    taken = [op.accept[i] for i in mine]
    return [
        _many(mine),
        op.route,
        *("accept greedily" if k < 0 else f"accept {_taken(k, v)}" for k in taken),
    ]


def _accept(op: Accept, v: View) -> list[str]:
    return [_taken(op.n, v), "at once" if v.seqs[op.seq].fresh_open else "after other work"]


def _checkpoint(op: Checkpoint, v: View) -> list[str]:
    s = v.seqs[op.seq]
    return [
        f"flags {op.flags}",
        "verification open" if s.open else "draft waiting" if s.proposed else "",
    ]


def _rewind(op: Rewind, v: View) -> list[str]:
    slot = v.slots[op.slot]
    return [
        "+".join(p for p in PIECES if p in op.parts),
        f"flags {slot.flags}",
        "same sequence" if slot.seq == op.seq else "other sequence",
        "" if v.seqs[op.seq].hi else "onto an empty sequence",
        "after reopen" if slot.epoch != v.epoch else "",
        "verification open" if slot.state.open else "",
        "malformed" if slot.mangled else "",
    ]


_FORMS: dict[type[Op], Callable[..., list[str]]] = {
    Decode: _decode,
    Propose: _propose,
    Verify: _verify,
    Accept: _accept,
    Checkpoint: _checkpoint,
    Rewind: _rewind,
    Mangle: lambda op, _: [op.how],
    Begin: lambda op, v: ["after a cut or restore" if v.seqs[op.seq].shrunk else "goes on"],
    SeqRm: lambda op, _: ["whole" if op.lo.at == "open" else "tail"],
    Reopen: lambda op, v: ["same parameters" if op.params in (None, v.params) else "other parameters"],
}
