"""Lowers a traced scenario to the flat list of library calls that it became: plain data, nothing symbolic left.

Everything that was executed is in the list, also saves and queries that an oracle only asked for: order and number of
the calls are what was seen to fail. The last call may be one that never returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fuzz.repro.words import describe
from oracles.verdict import Check
from subjects.scenario import (
    ON_DEVICE,
    Ask,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Medium,
    Query,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
)
from subjects.state.parse import TYPES
from subjects.trace import Batch, Piece, Row, Step, Trace

Out = Literal["NONE", "LAST", "ALL"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call. op: the step that it belongs to (-1: before the first). why: words, on the first call of a step."""

    op: int
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class NewContext(Call):
    """llama_init_from_model, after llama_free of the context before."""

    params: ContextParams


@dataclass(frozen=True, kw_only=True)
class DecodeRows(Call):
    """llama_decode. first: number of its first output row in the trace, -1 for none."""

    rows: tuple[Row, ...]
    abort_after: int | None
    rc: int | None
    first: int


@dataclass(frozen=True, kw_only=True)
class Memory(Call):
    """llama_memory_`name`(memory, *args); rc is None for void."""

    name: str
    args: tuple[int, ...]
    rc: int | None


@dataclass(frozen=True, kw_only=True)
class SaveState(Call):
    """A save into a slot; seq None is the whole context. keep: False where the slot must not change (a comparison)."""

    slot: int
    seq: int | None
    flags: int
    medium: Medium
    keep: bool
    ok: bool | None


@dataclass(frozen=True, kw_only=True)
class RestoreState(Call):
    """A restore of a slot; ok: accepted (None: never returned)."""

    slot: int
    seq: int | None
    flags: int
    medium: Medium
    ok: bool | None


@dataclass(frozen=True, kw_only=True)
class CorruptSlot(Call):
    """A slot's bytes put together anew. media: how each slot that a piece comes from is kept."""

    slot: int
    pieces: tuple[Piece, ...]
    media: dict[int, Medium]


@dataclass(frozen=True, kw_only=True)
class AskFor(Call):
    """A query; its answer is in the trace."""

    what: Query
    seq: int
    flags: int


@dataclass(frozen=True)
class Run:
    """Rows of one sequence at consecutive positions, as reproducers write them."""

    seq: int
    pos: int
    tokens: tuple[int, ...]
    out: Out


def lower(scenario: Scenario, trace: Trace) -> list[Call]:
    """All calls of a traced run, in order, up to one that never returned."""
    params = scenario.params
    calls: list[Call] = [NewContext(op=-1, why="", params=params)]
    media: dict[int, Medium] = {}
    for step in trace.steps:
        if step.skipped:
            continue
        op = scenario.ops[step.op]
        if isinstance(op, Reopen):
            params = op.params or params
        if isinstance(op, Save | SaveAll):
            media[op.slot] = op.medium
        calls += _calls(scenario, step, params, media)
    return calls


def _calls(scenario: Scenario, step: Step, params: ContextParams, media: dict[int, Medium]) -> list[Call]:
    op, i = scenario.ops[step.op], step.op
    why = describe(op, step)
    match op:
        case Decode() | Draft():
            abort = op.abort_after if isinstance(op, Decode) else None
            return [_decode(i, why if k == 0 else "", batch, abort) for k, batch in enumerate(step.batches)]
        case SeqRm() | SeqCp() | SeqKeep() | SeqAdd() | SeqDiv():
            return [Memory(op=i, why=why, name=str(op.__struct_config__.tag), args=tuple(step.args), rc=step.rc)]
        case Clear():
            return [Memory(op=i, why=why, name="clear", args=tuple(step.args), rc=None)]
        case Save() | SaveAll():
            seq, flags = (op.seq, op.flags) if isinstance(op, Save) else (None, 0)
            save = SaveState(op=i, slot=op.slot, seq=seq, flags=flags, medium=op.medium, keep=True, ok=None)
            return [replace(save, why="" if k else why, ok=_moved(step, k)) for k in range(1 + op.again)]
        case Restore() | RestoreAll():
            seq = op.seq if isinstance(op, Restore) else None
            flags, medium = step.args[2], media[op.slot]
            one = RestoreState(op=i, slot=op.slot, seq=seq, flags=flags, medium=medium, ok=None)
            calls: list[Call] = [replace(one, why="" if k else why, ok=_moved(step, k)) for k in range(op.times)]
            if op.resave and (step.rc or not step.done) and medium == "buffer" and not flags & ON_DEVICE:
                calls.append(SaveState(op=i, slot=op.slot, seq=seq, flags=flags, medium=medium, keep=False, ok=None))
            return calls
        case Corrupt():
            return [CorruptSlot(op=i, why=why, slot=op.slot, pieces=tuple(step.pieces), media=dict(media))]
        case Reopen():
            return [NewContext(op=i, why=why, params=params)]
        case Ask():
            return [AskFor(op=i, why=why, what=op.what, seq=op.seq, flags=op.flags)]
        case _:
            raise TypeError(op)


def _moved(step: Step, k: int) -> bool | None:
    """Whether the k-th save or restore of a step moved anything; None where it never returned."""
    return bool(step.blobs[k].moved) if k < len(step.blobs) else None


def _decode(op: int, why: str, batch: Batch, abort_after: int | None) -> DecodeRows:
    return DecodeRows(op=op, why=why, rows=tuple(batch.rows), abort_after=abort_after, rc=batch.rc, first=batch.first)


def runs(rows: Sequence[Row]) -> list[Run]:
    """Rows as few runs: consecutive positions of one sequence whose outputs are none, the last, or all of them."""
    found: list[Run] = []
    group: list[Row] = []

    def flush() -> None:
        if group:
            out: Out = "ALL" if all(r.out for r in group) else "LAST" if group[-1].out else "NONE"
            if len(group) == 1 and out == "ALL":
                out = "LAST"
            found.append(Run(group[0].seq, group[0].pos, tuple(r.token for r in group), out))
            group.clear()

    for row in rows:
        if group:
            before = group[-1]
            follows = row.seq == before.seq and row.pos == before.pos + 1
            # After an output in the middle a run goes on only if everything so far was output, and so is this row.
            if not follows or (before.out and not (row.out and all(r.out for r in group))):
                flush()
        group.append(row)
    flush()
    return found


def find_row(calls: Sequence[Call], row: int) -> tuple[int, int, Row]:
    """(index of the call, number among its outputs, the batch row) of output row `row` of a trace.

    Raises LookupError where no call gave that row.
    """
    for i, call in enumerate(calls):
        if isinstance(call, DecodeRows) and call.first >= 0:
            out = [r for r in call.rows if r.out]
            if call.first <= row < call.first + len(out):
                return i, row - call.first, out[row - call.first]
    raise LookupError(f"no call gave output row {row}")


def needed(calls: Sequence[Call], check: Check, *, reference: bool = False) -> list[Call]:
    """The calls up to the one after which `check` can be made."""
    if check.kind == "rows":
        i, _, _ = find_row(calls, check.ref_row if reference else check.row)
        return list(calls[: i + 1])
    if reference:
        return list(calls)
    return [c for c in calls if c.op <= check.step]


REFERENCE_KINDS = frozenset({"rows", "state"})
"""Kinds of checks that compare with a program for a clean context."""


class RowPlace(NamedTuple):
    """Where a row of a saved state is in a blob (subjects.state.canon.Place), with the name of its type."""

    type: str
    start: int
    pieces: int
    size: int
    apart: int


def places(check: Check) -> tuple[RowPlace, RowPlace] | None:
    """The row that is compared in the two blobs of a check; None where none is."""
    numbers = _places(check)
    if len(numbers) != 10:
        return None
    mine, theirs = numbers[:5], numbers[5:]
    return RowPlace(TYPES[mine[0]][0], *mine[1:]), RowPlace(TYPES[theirs[0]][0], *theirs[1:])


class CellsPlace(NamedTuple):
    """Where cells are in a blob: the offset of their number (-1: no blob has them), whether they have an extension, the
    least position that counts, and the sequence (-1: all)."""

    at: int
    ext: int
    least: int
    seq: int


def cells_places(check: Check) -> tuple[CellsPlace, CellsPlace] | None:
    """The cells that are compared in the two blobs of a check; None where none are."""
    numbers = _places(check)
    return (CellsPlace(*numbers[:4]), CellsPlace(*numbers[4:])) if len(numbers) == 8 else None


def _places(check: Check) -> tuple[int, ...]:
    return check.expected[2:] if check.kind == "blob" else check.expected


def blob_pair(check: Check) -> tuple[int, int]:
    """Which of the collected blobs are compared: numbers within the step, or the first and last of a span of steps."""
    a, b = check.expected[:2]
    return (0, -1) if check.what == "neighbour" else (a, b)


def collect_from(check: Check) -> int:
    """The step at which blobs begin to be collected."""
    return check.expected[0] if check.what == "neighbour" else check.step


def first_of(calls: Sequence[Call], step: int) -> int:
    """Index of the first call of a step; the number of calls if there is none."""
    return next((i for i, c in enumerate(calls) if c.op >= step), len(calls))
