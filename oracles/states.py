"""Saved states held against those of clean contexts, and restored ones against what was saved: the first rung."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from oracles.band import FAR, Bands
from oracles.ledger import Ledger, StateClaim, window_need
from oracles.reference import Key, StateReferences, key_of
from subjects.scenario import PARTIAL, ContextParams, Restore, RestoreAll, Save, SaveAll
from subjects.state.canon import Canon, Difference, Place, Reader, Rows, Sequence, differences, summary
from subjects.state.parse import BadBlob

# What a partial state has, and what no next token ever looks at again: how much of it is kept is the library's affair.
PARTIAL_PARTS = frozenset({"window", "recurrent"})
WINDOWS = frozenset({"window"})
# Compressed rows are kept in rings whose unused places hold anything; they are held against each other, bit for bit,
# before and after a restore only.
CELLS = frozenset({"attn", "window", "index", "recurrent", "raw"})


@dataclass(frozen=True, slots=True)
class HeldState:
    """One saved sequence against the same history in a clean context.

    found: where they differ by more than FAR times the band, first part first; near: where they differ by more than the
    band. told: in one line, what differs first and what is equal. error, band: of the first difference (0 without one).
    at, ref_at: places of the first row that differs in both blobs. unjudged: why it could not be compared.
    """

    claim: StateClaim
    found: tuple[Difference, ...] = ()
    near: tuple[Difference, ...] = ()
    told: str = ""
    error: float = 0.0
    band: float = 0.0
    at: Place | None = None
    ref_at: Place | None = None
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
    """A restore whose result was saved again: sequences and where they differ, bit for bit, from what was saved."""

    differences: tuple[tuple[int, Difference], ...]
    told: str


@dataclass(slots=True)
class States:
    """All that was seen of saved states in one run. again: by step, for restores that were saved again and of which the
    bytes are there."""

    held: list[HeldState]
    again: dict[int, Again]


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
    _seen(mine, theirs, claim)
    if not differences(mine, theirs):
        return HeldState(claim, told=summary(mine, theirs, []))
    limits = limits_of(claim) if claim.chain else {}
    if limits is None:
        return HeldState(claim, unjudged="no band could be measured")
    measured = {k for k in (*mine.rows, *theirs.rows) if f"{k.part}.{k.tensor}" in limits}
    for side in (mine, theirs):
        side.rows = {k: rows for k, rows in side.rows.items() if k in measured}
    far = {name: FAR * band for name, band in limits.items()}
    found, near = differences(mine, theirs, far), differences(mine, theirs, limits)
    if not near:
        return HeldState(claim, told="equal in every part but for honest differences")
    told = summary(mine, theirs, found or near)
    if not found:
        return HeldState(claim, near=tuple(near), told=told)
    first = found[0]
    at = ref_at = None
    if first.pos >= 0 and reference is not None:
        name = first.key._replace(part="attn") if _renamed(subject.get(seq, Sequence()), claim) else first.key
        at = reader.layout(data, partial=claim.partial).place(data, seq, name, first.pos)
        ref_at = reader.layout(reference).place(reference, 0, first.key, first.pos)
    band = limits.get(f"{first.key.part}.{first.key.tensor}", 0.0)
    return HeldState(claim, tuple(found), tuple(near), told, first.error, band, at, ref_at)


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
    return Sequence({p: x for p, x in named if p in parts}, {k: r for k, r in rows if k.part in parts})


def _seen(mine: Sequence, theirs: Sequence, claim: StateClaim) -> None:
    """Leave of windows what the next token can see. Where the library does not tell how long they are (deepseek4), that
    is what both sides go back to."""
    for part in WINDOWS & {*mine.positions, *theirs.positions}:
        sides = [s.positions[part] for s in (mine, theirs) if s.positions.get(part)]
        if claim.facts.n_swa > 0 and claim.positions:
            need = window_need(claim.positions, claim.facts.n_swa)
        else:
            need = max(min(p) for p in sides) if len(sides) == 2 else -1
        for side in (mine, theirs):
            side.positions[part] = tuple(p for p in side.positions.get(part, ()) if p >= need)
            for key, rows in side.rows.items():
                if key.part == part and rows.positions and min(rows.positions) < need:
                    kept = [i for i, p in enumerate(rows.positions) if p >= need]
                    side.rows[key] = Rows(rows.type, tuple(rows.positions[i] for i in kept), rows.data[kept])


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
            before, after = (reader.canonical(d, partial=partial) for d in data if d is not None)
        except BadBlob:
            continue
        found[m.step.op] = _differ(before, after)
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
