"""Saved states held against those of clean contexts, and restored ones against what was saved: the first rung."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from oracles.band import FAR, Bands
from oracles.ledger import Ledger, StateClaim, window_need
from oracles.reference import Key, StateReferences, key_of
from subjects.scenario import PARTIAL, ContextParams, Restore, RestoreAll, Save, SaveAll
from subjects.state.canon import Canon, Difference, Layout, Reader, Sequence, differences, facts, summary
from subjects.state.parse import BadBlob

# What a partial state has, and what no next token ever looks at again: how much of it is kept is the library's affair.
PARTIAL_PARTS = frozenset({"window", "recurrent"})
WINDOWS = frozenset({"window"})
# Compressed rows are kept in rings whose unused places hold anything; they are held against each other, bit for bit,
# before and after a restore only.
CELLS = frozenset({"attn", "window", "index", "recurrent", "raw"})
LOWEST = -(1 << 31)
"""No position is below it."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """One saved sequence against the same history in a clean context.

    found: where they differ by more than FAR times the band, first part first; near: where they differ by more than the
    band. told: in one line, what differs first and what is equal. error, band: of the first difference (0 without one).
    places: of the first difference in both blobs (see `places_of`). unjudged: why it could not be compared.
    """

    claim: StateClaim
    found: tuple[Difference, ...] = ()
    near: tuple[Difference, ...] = ()
    told: str = ""
    error: float = 0.0
    band: float = 0.0
    places: tuple[int, ...] = ()
    unjudged: str = ""

    @property
    def wrong(self) -> bool:
        """Far outside the bands."""
        return bool(self.found)

    @property
    def ambiguous(self) -> bool:
        """Between noise and error."""
        return bool(self.near) and not self.found


class Again(NamedTuple):
    """A restore whose result was saved again: sequences and where they differ, bit for bit, from what was saved.

    places: of the first difference in what was saved and in what was saved again (see `places_of`).
    """

    differences: tuple[tuple[int, Difference], ...]
    told: str
    places: tuple[int, ...] = ()


@dataclass(slots=True)
class States:
    """All that was seen of saved states in one run. again: by step, for restores that were saved again and of which the
    bytes are there."""

    held: list[HeldState]
    again: dict[int, Again]


class Spot(NamedTuple):
    """One of two blobs that are compared. seq: the sequence as its canonical form has it; said: its id, -1 where the
    blob is of it alone; stream: the one that it is in where it has no cells."""

    data: bytes
    layout: Layout
    seq: int
    said: int
    stream: int


def places_of(
    first: Difference, mine: Spot, theirs: Spot | None, part: str = "", least: int = LOWEST
) -> tuple[int, ...]:
    """Where a difference is in both blobs, for `Check.expected`: of a row 5 numbers for each, of cells 4; empty where
    it is of neither. theirs: None where nothing must be there. part: what `mine` calls the part, where it has another
    name; least: cells below that position are not looked at.
    """
    if first.key.tensor in ("cells", "extension"):
        at = mine.layout.cells(mine.seq, part or first.key.part, mine.stream)
        ref = None if theirs is None else theirs.layout.cells(theirs.seq, first.key.part, theirs.stream)
        if at is None or (ref is None and theirs is not None):
            return ()
        ext = int(at.ext or (ref is not None and ref.ext))
        other = (-1, 0, 0, -1) if ref is None or theirs is None else (ref.at, ext, least, theirs.said)
        return (at.at, ext, least, mine.said, *other)
    if first.pos < 0 or theirs is None:
        return ()
    key = first.key._replace(part=part or first.key.part)
    row = mine.layout.place(mine.data, mine.seq, key, first.pos)
    other_row = theirs.layout.place(theirs.data, theirs.seq, first.key, first.pos)
    return () if row is None or other_row is None else (*row, *other_row)


def compare_states(ledger: Ledger, references: StateReferences, bands: Bands, reader: Reader) -> States:
    """Hold every claimed state against its reference; references must have been computed (StateReferences.missing)."""
    known: dict[tuple[str, int, bool, Key, frozenset[str]], HeldState] = {}
    limits: dict[tuple[ContextParams, frozenset[str]], dict[str, float] | None] = {}

    def limits_of(claim: StateClaim) -> dict[str, float] | None:
        which = (claim.params, claim.kinds)
        if which not in limits:
            limits[which] = bands.states(*which) if bands.known(claim.params) else None
        return limits[which]

    held: list[HeldState] = []
    for claim in ledger.states:
        step = ledger.moments[claim.step].step
        blobs = step.blobs
        if isinstance(ledger.moments[claim.step].op, Save | SaveAll) and blobs[0].sha != blobs[-1].sha:
            held.append(HeldState(claim, unjudged="saved twice, it gave other bytes"))  # the blob contract's to report
            continue
        key = key_of(claim)
        same = (blobs[claim.blob].sha, claim.seq if claim.whole else 0, claim.partial, key, claim.kinds)
        if same not in known:
            known[same] = _hold(ledger, claim, references.get(key), limits_of, reader)
        held.append(replace(known[same], claim=claim))
    return States(held, _again(ledger, reader))


def _hold(
    ledger: Ledger,
    claim: StateClaim,
    reference: bytes | None,
    limits_of: Callable[[StateClaim], dict[str, float] | None],
    reader: Reader,
) -> HeldState:
    data = ledger.trace.state(ledger.moments[claim.step].step.blobs[claim.blob])
    if data is None or (claim.chain and reference is None):
        return HeldState(claim, unjudged="the reference program did not run" if data else "its bytes were not kept")
    if data == reference:
        return HeldState(claim, told="equal in every part")
    try:
        subject = reader.canonical(data, partial=claim.partial)
        clean = reader.canonical(reference)[0] if claim.chain and reference is not None else Sequence()
    except BadBlob as e:
        return HeldState(claim, unjudged=f"a state cannot be read: {e.field}")
    seq = claim.seq if claim.whole else 0
    mine, theirs = _relevant(subject.get(seq, Sequence()), claim, partial=claim.partial), _relevant(clean, claim)
    need = _seen(mine, theirs, claim)
    if not (mine.positions or theirs.positions) and claim.chain:
        return HeldState(claim, unjudged="it has no part that the next token looks at")
    exact = list(facts(mine, theirs))
    if not exact:
        return HeldState(claim, told=summary(mine, theirs, []))
    limits = limits_of(claim) if claim.chain else {}
    if limits is None:
        return HeldState(claim, unjudged="no band could be measured")
    # rows of which nobody knows how far honest ones differ say nothing, unless they are equal
    names = {f"{f.key.part}.{f.key.tensor}" for f in exact if f.what == "rows"}
    unmeasured = sorted(names - limits.keys())
    limits = limits | dict.fromkeys(unmeasured, math.inf)
    far = {name: FAR * band for name, band in limits.items()}
    found, near = differences(mine, theirs, far), differences(mine, theirs, limits)
    if not near:
        if unmeasured:
            return HeldState(claim, unjudged=f"no band could be measured for {', '.join(unmeasured)}")
        return HeldState(claim, told="equal in every part but for honest differences")
    told = summary(mine, theirs, found or near)
    if not found:
        return HeldState(claim, near=tuple(near), told=told)
    first = found[0]
    spot = Spot(data, reader.layout(data, partial=claim.partial), seq, claim.seq if claim.whole else -1, claim.seq)
    clean_spot = None
    if claim.chain and reference is not None:
        clean_spot = Spot(reference, reader.layout(reference), 0, -1, 0)
    part = "attn" if first.key.part == "window" and _renamed(subject.get(seq, Sequence()), claim) else ""
    places = places_of(first, spot, clean_spot, part, need.get(first.key.part, LOWEST))
    band = limits.get(f"{first.key.part}.{first.key.tensor}", 0.0)
    return HeldState(claim, tuple(found), tuple(near), told, first.error, band, places)


def _renamed(state: Sequence, claim: StateClaim) -> bool:
    """Whether what is read as attention is a window: a partial state does not say which half it has."""
    return claim.partial and claim.facts.n_swa > 0 and "attn" in state.positions and "window" not in state.positions


def _relevant(state: Sequence, claim: StateClaim, *, partial: bool = False) -> Sequence:
    """What of a state is claimed: its cells, of a partial state those of its parts."""
    rename = {"attn": "window"} if partial and _renamed(state, claim) else {}
    parts = CELLS & PARTIAL_PARTS if claim.partial else CELLS
    named = ((rename.get(part, part), positions) for part, positions in state.positions.items())
    # compressed rows have no cells, also where their part is called as one that has (deepseek4's index)
    rows = (
        (k._replace(part=rename.get(k.part, k.part)), r) for k, r in state.rows.items() if k.part in state.positions
    )
    extensions = ((rename.get(part, part), more) for part, more in state.extensions.items())
    return Sequence(
        {p: x for p, x in named if p in parts},
        {k: r for k, r in rows if k.part in parts},
        {p: x for p, x in extensions if p in parts},
    )


def _seen(mine: Sequence, theirs: Sequence, claim: StateClaim) -> dict[str, int]:
    """Leave of windows what the next token can see, and say from which position on that is. Where the library does not
    tell how long they are (deepseek4), that is what both sides go back to."""
    needs: dict[str, int] = {}
    for part in WINDOWS & {*mine.positions, *theirs.positions}:
        sides = [s.positions[part] for s in (mine, theirs) if s.positions.get(part)]
        if claim.facts.n_swa > 0 and claim.positions:
            need = window_need(claim.positions, claim.facts.n_swa)
        else:
            need = max(min(p) for p in sides) if len(sides) == 2 else -1
        needs[part] = need
        for side in (mine, theirs):
            side.drop_below(part, need)
    return needs


def _again(ledger: Ledger, reader: Reader) -> dict[int, Again]:
    found: dict[int, Again] = {}
    for m in ledger.moments:
        op = m.op
        if not isinstance(op, Restore | RestoreAll) or len(m.step.blobs) <= op.times:
            continue
        was, now = m.step.blobs[op.times - 1], m.step.blobs[op.times]
        if was.sha == now.sha:
            found[m.step.op] = Again((), "")
            continue
        data = [ledger.trace.state(was), ledger.trace.state(now)]
        if data[0] is None or data[1] is None:
            continue
        partial = m.slot is not None and bool(m.slot.flags & PARTIAL)
        try:
            layouts = [reader.layout(d, partial=partial) for d in data if d is not None]
        except BadBlob:
            continue
        before, after = (layout.canonical(d) for layout, d in zip(layouts, data, strict=True) if d is not None)
        again = _differ(before, after)
        if again.differences:
            seq, first = again.differences[0]
            said = seq if isinstance(op, RestoreAll) else -1
            streams = (seq, seq) if isinstance(op, RestoreAll) else (m.slot.seq if m.slot else 0, op.seq)
            was_spot, now_spot = (
                Spot(d, layout, seq, said, stream)
                for d, layout, stream in zip(data, layouts, streams, strict=True)
                if d is not None
            )
            again = again._replace(places=places_of(first, was_spot, now_spot))
        found[m.step.op] = again
    return found


def _differ(before: Canon, after: Canon) -> Again:
    all_of: list[tuple[int, Difference]] = []
    told = ""
    for seq in sorted({*before, *after}):
        a, b = after.get(seq, Sequence()), before.get(seq, Sequence())
        some = differences(a, b)
        if some and not told:
            told = summary(a, b, some)
        all_of += [(seq, d) for d in some]
    return Again(tuple(all_of), told)
