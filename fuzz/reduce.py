"""Reduction of scenarios: the smallest program that still shows the same violation.

Works on programs with their observations written out, so that what is left is all there is. Every candidate is run and
judged in fresh contexts; it counts only while the same oracle reports the same key. The best so far is kept at any
moment, so a deadline or Ctrl-C loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from fuzz.drivers import fit
from subjects.scenario import (
    OPEN,
    PIECES,
    Accept,
    AnyOp,
    Ask,
    Begin,
    BlobEdit,
    Checkpoint,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    DriverParams,
    Edge,
    Mangle,
    Part,
    Propose,
    Reopen,
    Restore,
    RestoreAll,
    Rewind,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
    Verify,
)

replace = msgspec.structs.replace
WithSlot = Save | SaveAll | Restore | RestoreAll | Corrupt | Checkpoint | Rewind | Mangle
Holds = Callable[[Scenario], bool]


class Keyed(Protocol):
    """A program of any subject."""

    def key(self) -> str:
        """Equal programs have equal keys."""


P = TypeVar("P", bound=Keyed)


@dataclass
class Smaller(Generic[P]):
    """The result: the smallest program found, how many candidates were run, and whether time ran out first."""

    scenario: P
    tried: int = 0
    kept: int = 0
    complete: bool = True


Reduction = Smaller[Scenario]


@dataclass(frozen=True)
class Ways(Generic[P]):
    """How programs of a subject are made smaller: which ones may be run at all, how many steps one has, the program
    without the steps from i up to j, and what else yields simpler programs, tried in this order."""

    fits: Callable[[P], bool]
    count: Callable[[P], int]
    without: Callable[[P, int, int], P]
    candidates: Sequence[Callable[[P], Iterator[P]]]


def minimise(
    program: P,
    holds: Callable[[P], bool],
    ways: Ways[P],
    *,
    seconds: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
) -> Smaller[P]:
    """Reduce while `holds` is true of the candidate. `program` itself must hold (the caller has confirmed it).

    Deterministic for a deterministic `holds`, apart from the deadline.
    """
    state = Smaller(program)
    deadline = time.monotonic() + seconds
    seen: set[str] = {program.key()}

    def attempt(candidate: P) -> bool:
        key = candidate.key()
        if key in seen or not ways.fits(candidate):
            return False
        seen.add(key)
        state.tried += 1
        if not holds(candidate):
            return False
        state.scenario = candidate
        state.kept += 1
        return True

    def out_of_time() -> bool:
        if time.monotonic() > deadline or stop():
            state.complete = False
            return True
        return False

    progress = True
    while progress and not out_of_time():
        progress = _drop(state, ways, attempt, out_of_time)
        for candidates in ways.candidates:
            # restart after each success: a simpler program has other, fewer candidates
            again = True
            while again and not out_of_time():
                again = False
                for candidate in candidates(state.scenario):
                    if out_of_time():
                        break
                    if attempt(candidate):
                        progress = again = True
                        break
    return state


def _drop(state: Smaller[P], ways: Ways[P], attempt: Callable[[P], bool], out_of_time: Callable[[], bool]) -> bool:
    """Delete steps, large runs first (delta debugging)."""
    progress = False
    size = max(ways.count(state.scenario) // 2, 1)
    while size:
        i = ways.count(state.scenario) - size
        while i >= 0 and not out_of_time():
            if attempt(ways.without(state.scenario, i, i + size)):
                progress = True
            i -= size if size > 1 else 1
        size //= 2
    return progress


def reduce(
    scenario: Scenario, holds: Holds, *, seconds: float = 30.0, stop: Callable[[], bool] = lambda: False
) -> Reduction:
    """Reduce a program for the library; see `minimise`."""
    return minimise(scenario, holds, _WAYS, seconds=seconds, stop=stop)


def _params(s: Scenario) -> Iterator[Scenario]:
    """Default parameters, then one by one."""
    plain = ContextParams()
    p = s.params
    if p != plain:
        yield replace(s, params=plain)
        yield replace(s, params=replace(plain, n_rs_seq=p.n_rs_seq, n_seq_max=p.n_seq_max, kv_unified=p.kv_unified))
        for field in ContextParams.__struct_fields__:
            if getattr(p, field) != getattr(plain, field):
                yield replace(s, params=replace(p, **{field: getattr(plain, field)}))
        if p.n_seq_max != 1:
            yield replace(s, params=replace(p, n_seq_max=p.n_seq_max - 1))
        if p.n_rs_seq > 1:
            yield replace(s, params=replace(p, n_rs_seq=p.n_rs_seq - 1))
    if s.driver is not None:
        yield from (replace(s, driver=d) for d in drivers(s.driver))
    for i, op in enumerate(s.ops):
        if isinstance(op, Reopen) and op.params is not None:
            yield _with(s, i, Reopen())
            for field in ContextParams.__struct_fields__:
                if getattr(op.params, field) != getattr(s.params, field):
                    yield _with(s, i, Reopen(params=replace(op.params, **{field: getattr(s.params, field)})))


def drivers(d: DriverParams) -> Iterator[DriverParams]:
    """A driver with its defaults, one by one, and shorter drafts."""
    plain = DriverParams(kind=d.kind, draft=d.draft, impl=d.impl)
    for field in ("n_min", "p_min", "backend_sampling", "late"):
        if getattr(d, field) != getattr(plain, field):
            yield replace(d, **{field: getattr(plain, field)})
    for n in numbers(d.n_max):
        shorter = fit.sized(replace(d, n_max=n))
        if shorter.n_max < d.n_max:
            yield shorter


def _sequences(s: Scenario) -> Iterator[Scenario]:
    """Swap the sequence ids in use for lower ones, all operations at once."""
    used = sorted({x for op in s.ops for x in _ids(op)})
    for i, seq in enumerate(used):
        if seq > i:
            yield replace(s, ops=tuple(_renamed(op, {seq: i, i: seq}) for op in s.ops))
    slots = sorted({op.slot for op in s.ops if isinstance(op, WithSlot)})
    for i, slot in enumerate(slots):
        if slot > i:
            yield replace(
                s,
                ops=tuple(replace(op, slot=i) if isinstance(op, WithSlot) and op.slot == slot else op for op in s.ops),
            )


def _ids(op: AnyOp) -> list[int]:
    match op:
        case Decode():
            return [p.seq for p in op.parts]
        case SeqCp():
            return [op.src, op.dst]
        case Ask():
            return [op.seq] if op.what in ("positions", "size") else []
        case Draft() | Save() | Restore() | SeqRm() | SeqKeep() | SeqAdd() | SeqDiv():
            return [op.seq] if op.seq >= 0 else []
        case Accept() | Checkpoint() | Rewind() | Begin():
            return [op.seq]
        case Propose() | Verify():
            return list(op.seqs)
        case _:
            return []


def _renamed(op: AnyOp, to: dict[int, int]) -> AnyOp:
    match op:
        case Decode():
            return replace(op, parts=tuple(replace(p, seq=to.get(p.seq, p.seq)) for p in op.parts))
        case SeqCp():
            return replace(op, src=to.get(op.src, op.src), dst=to.get(op.dst, op.dst))
        case Draft() | Save() | Restore() | SeqRm() | SeqKeep() | SeqAdd() | SeqDiv() | Ask():
            return replace(op, seq=to.get(op.seq, op.seq))
        case Accept() | Checkpoint() | Rewind() | Begin():
            return replace(op, seq=to.get(op.seq, op.seq))
        case Propose() | Verify():
            return replace(op, seqs=tuple(to.get(s, s) for s in op.seqs))
        case _:
            return op


def _with(s: Scenario, i: int, *ops: AnyOp) -> Scenario:
    return replace(s, ops=s.ops[:i] + ops + s.ops[i + 1 :])


def numbers(n: int, least: int = 1) -> Iterator[int]:
    """Smaller numbers, the smallest first."""
    for k in (least, least + 1, n // 2, n - 1):
        if least <= k < n:
            yield k


def _edges(lo: Edge, hi: Edge) -> Iterator[tuple[Edge, Edge]]:
    if hi != OPEN:
        yield lo, OPEN
    if lo != OPEN:
        yield OPEN, hi
    for d in (0, -1, 1):
        if abs(lo.d) > abs(d):
            yield replace(lo, d=d), hi
        if abs(hi.d) > abs(d):
            yield lo, replace(hi, d=d)
    for e, put in ((lo, lambda x: (x, hi)), (hi, lambda x: (lo, x))):
        if abs(e.d) > 1:
            yield put(replace(e, d=e.d - (1 if e.d > 0 else -1)))


def _operations(s: Scenario) -> Iterator[Scenario]:
    """Each operation made simpler."""
    for i, op in enumerate(s.ops):
        for simpler in _simpler(op):
            yield _with(s, i, simpler)


def _simpler(op: AnyOp) -> Iterator[AnyOp]:
    match op:
        case Decode():
            yield from _simpler_decode(op)
        case Draft():
            yield Decode(parts=(Part(seq=op.seq, n=op.n, stream=op.stream),))
            yield from (replace(op, n=n) for n in numbers(op.n))
            if op.stream:
                yield replace(op, stream=0)
        case Save():
            for change in ({"flags": 0}, {"medium": "buffer"}, {"again": False}, {"flags": op.flags & 2}):
                yield replace(op, **change)
        case SaveAll():
            for change in ({"medium": "buffer"}, {"again": False}):
                yield replace(op, **change)
        case Restore() | RestoreAll():
            for change in ({"times": 1}, {"resave": False}):
                yield replace(op, **change)
        case SeqRm() | SeqCp() | SeqAdd() | SeqDiv():
            yield from (replace(op, lo=lo, hi=hi) for lo, hi in _edges(op.lo, op.hi))
            if isinstance(op, SeqRm) and op.seq < 0:
                yield replace(op, seq=0)
            if isinstance(op, SeqAdd):
                yield from (replace(op, delta=d) for d in (1, -1) if abs(op.delta) > 1)
        case Propose() | Verify() | Checkpoint() | Rewind() | Accept():
            yield from _simpler_round(op)
        case Mangle() if op.at:
            yield replace(op, at=0)
        case Corrupt():
            yield from (replace(op, edits=edits) for edits in simpler_edits(op.edits))
        case _:
            return


def simpler_edits(edits: tuple[BlobEdit, ...]) -> Iterator[tuple[BlobEdit, ...]]:
    """Fewer edits, and simpler ones."""
    for j, edit in enumerate(edits):
        if len(edits) > 1:
            yield edits[:j] + edits[j + 1 :]
        yield from ((*edits[:j], e, *edits[j + 1 :]) for e in _simpler_edit(edit))


def _simpler_edit(e: BlobEdit) -> Iterator[BlobEdit]:
    """Nearer to the front, to a small number, to a change of one field."""
    if e.nth:
        yield replace(e, nth=0)
    if e.how in ("set", "add", "insert", "zero", "cut", "flip"):
        yield from (replace(e, value=v) for v in (0, 1, 2, e.value // 2) if 0 <= v < abs(e.value))
    if e.how in ("drop", "double", "swap") and e.value:
        yield replace(e, value=0)


def _simpler_round(op: Propose | Verify | Checkpoint | Rewind | Accept) -> Iterator[AnyOp]:
    match op:
        case Propose():
            if len(op.seqs) > 1:
                for i in range(len(op.seqs)):
                    last = op.last[:i] + op.last[i + 1 :] if op.last else None
                    yield replace(op, seqs=op.seqs[:i] + op.seqs[i + 1 :], last=last)
            if op.n_max > 0:
                yield replace(op, n_max=-1)
            if op.stream:
                yield replace(op, stream=0)
        case Verify():
            yield Decode(parts=tuple(Part(seq=s, n=1) for s in op.seqs))
            if len(op.seqs) > 1:
                for i in range(len(op.seqs)):
                    fewer = op.accept[:i] + op.accept[i + 1 :]
                    yield replace(op, seqs=op.seqs[:i] + op.seqs[i + 1 :], accept=fewer)
            if op.route != "cut":
                yield replace(op, route="cut")
            for i, k in enumerate(op.accept):
                if k:
                    yield replace(op, accept=(*op.accept[:i], 0, *op.accept[i + 1 :]))
        case Checkpoint():
            if op.flags:
                yield replace(op, flags=0)
        case Rewind():
            if op.parts != PIECES:
                yield replace(op, parts=PIECES)
        case Accept():
            yield from (replace(op, n=n) for n in numbers(op.n, 0))


def _simpler_decode(op: Decode) -> Iterator[AnyOp]:
    if len(op.parts) > 1:
        for j in range(len(op.parts)):
            yield replace(op, parts=op.parts[:j] + op.parts[j + 1 :])
    if op.interleave:
        yield replace(op, interleave=False)
    if op.abort_after is not None:
        yield replace(op, abort_after=None)
        yield from (replace(op, abort_after=n) for n in numbers(op.abort_after, 0))
    for j, part in enumerate(op.parts):

        def put(p: Part, j: int = j) -> Decode:
            return replace(op, parts=(*op.parts[:j], p, *op.parts[j + 1 :]))

        if part.tokens is None:
            yield from (put(replace(part, n=n)) for n in numbers(part.n))
        if part.stream:
            yield put(replace(part, stream=0))
        if part.out != "last":
            yield put(replace(part, out="last"))


_WAYS: Ways[Scenario] = Ways(
    fits=lambda s: bool(s.ops),
    count=lambda s: len(s.ops),
    without=lambda s, i, j: replace(s, ops=s.ops[:i] + s.ops[j:]),
    candidates=(_params, _sequences, _operations),
)
