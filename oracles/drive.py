"""Claims on drafts against their references: what a clean target, draft and driver give for the same tokens.

A reference is a solo: the tokens decoded and processed in a context of their own, then one proposal. It is the real
driver also where our own is the subject, draws no sampler onto the backend so that logits can be read, and drafts as
far as the driver goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from oracles.band import FAR, SAFETY, least_share
from oracles.lines import LEARNS, DraftClaim, Drive, Event, Given, given
from oracles.store import Store, name_of
from subjects.scenario import (
    AnyOp,
    Begin,
    ContextParams,
    Decode,
    DriverParams,
    ModelRef,
    Part,
    Propose,
    Scenario,
    SeqRm,
    Verify,
    token,
)
from subjects.trace import Floats, Trace

Run = Callable[[Sequence[Scenario]], list[Trace]]
Noise = Callable[[ContextParams, Iterable[str]], float]
"""`oracles.band.Bands.share`"""

# Where honest runs differ by this share of what they show, the drivers that the band is measured with are wrong
# themselves: nothing can be told with them, which must be said instead of being called honest.
HOPELESS = 0.25


@dataclass(frozen=True, slots=True)
class Key:
    """One reference: parameters, driver, what the sequence went through, and the token that it drafts behind."""

    params: ContextParams
    driver: DriverParams
    events: tuple[Event, ...]
    last: int


@dataclass(frozen=True, slots=True)
class Clean:
    """What a reference gave."""

    drafts: tuple[int, ...]
    given: Given

    @property
    def finite(self) -> bool:
        """Nothing in it is NaN or infinite."""
        row = self.given.hidden
        return bool(np.isfinite(self.given.logits).all()) and (row is None or bool(np.isfinite(row).all()))


@dataclass(frozen=True, slots=True)
class Held:
    """One claim held against its reference.

    row_error / row_band: the paired row; nan where none was seen. error / band: draft logits up to the first different
    token. at: number of the first draft that differs, -1 for none; gap: by how much the reference prefers its own there
    (nan where its logits are not known). expected: what the reference drafts under the subject's limits; unsure: its
    length hangs on a probability near p_min.
    """

    claim: DraftClaim
    row_error: float
    row_band: float
    error: float
    band: float
    nmse: float
    at: int
    gap: float
    expected: tuple[int, ...]
    unsure: bool
    changed: int

    @property
    def misplaced(self) -> bool:
        """The paired row is at another position than it must be."""
        return self.claim.pos != self.claim.want_pos and not np.isnan(self.row_error)

    @property
    def row_wrong(self) -> bool:
        """The paired row is far outside the band."""
        return self.misplaced or self.row_error > self.row_band * FAR

    @property
    def tokens_wrong(self) -> bool:
        """Another token was drafted, and it is no near tie."""
        return self.at >= 0 and not self.unsure and not self.gap <= 2 * self.band * FAR

    @property
    def row_doubtful(self) -> bool:
        """The paired row is between noise and error, so nothing can be said of what was drafted from it."""
        return not self.row_wrong and self.row_error > self.row_band

    @property
    def drafts_wrong(self) -> bool:
        """Logits far outside the band, or other tokens that are no near tie."""
        return not self.row_doubtful and (self.error > self.band * FAR or self.tokens_wrong)

    @property
    def wrong(self) -> bool:
        """Anything is wrong."""
        return self.row_wrong or self.drafts_wrong

    @property
    def ambiguous(self) -> bool:
        """Between noise and error."""
        return not self.wrong and (self.row_doubtful or self.error > self.band or self.at >= 0)


@dataclass(slots=True)
class Driven:
    """The driver's side of an account: what was claimed, and how it compares."""

    drive: Drive
    driver: DriverParams
    apart: bool
    """it writes rows of its own into a memory of its own, from what it carries between calls"""
    held: list[Held] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)


def key_of(claim: DraftClaim, scenario: Scenario, params: ContextParams) -> Key:
    """The reference of a claim; the number of sequences, threads and batch rows do not matter."""
    assert scenario.driver is not None
    p = msgspec.structs.replace(params, n_seq_max=1, kv_unified=False, n_threads=1, n_batch=max(params.n_batch, 64))
    if scenario.driver.kind in LEARNS:
        return Key(p, scenario.driver, claim.line.events, claim.last)
    return Key(p, plain_driver(scenario.driver), (Event("decode", claim.line.tokens),), max(claim.last, 0))


def plain_driver(d: DriverParams) -> DriverParams:
    """The driver of references: llama.cpp's own, which samples where logits can be read and drafts as far as it can."""
    return msgspec.structs.replace(d, impl="native", backend_sampling=False, late=False, n_min=0, p_min=0.0)


def program(model: ModelRef, key: Key) -> Scenario:
    """The reference as a scenario."""
    ops: list[AnyOp] = []
    for e in key.events:
        match e.what:
            case "decode":
                n = key.params.n_batch
                for i in range(0, len(e.tokens), n):
                    piece = e.tokens[i : i + n]
                    ops.append(Decode(parts=(Part(seq=0, n=len(piece), tokens=piece),)))
            case "propose":
                ops.append(Propose(seqs=(0,), last=e.tokens, n_max=e.n))
            case "verify":
                ops.append(Verify(seqs=(0,), accept=(e.n,)))
            case _:
                ops.append(Begin(seq=0))
    ops.append(Propose(seqs=(0,), last=(key.last,)))
    return Scenario(model=model, params=key.params, driver=key.driver, ops=tuple(ops), note="reference: solo")


def clean(trace: Trace, *, carries: bool) -> Clean | None:
    """What a reference's trace shows, None where it did not end well."""
    if trace.end.how != "ok" or not trace.steps or any(b.rc for s in trace.steps for b in s.batches):
        return None
    step = trace.steps[-1]
    _, got = given(step, 0, trace.facts[0].n_vocab, carries)
    return Clean(tuple(step.drafts[0]), got)


class DriverReferences:
    """References of one model, remembered, those longest unused out first."""

    def __init__(self, model: ModelRef, run: Run, limit: int = 8192):
        self._model, self._run, self._limit = model, run, limit
        self._known: OrderedDict[Key, Clean | None] = OrderedDict()

    def get(self, keys: Sequence[Key]) -> dict[Key, Clean | None]:
        """All that are asked for, run where they are not known."""
        wanted = list(dict.fromkeys(keys))
        missing = [k for k in wanted if k not in self._known]
        if missing:
            for key, trace in zip(missing, self._run([program(self._model, k) for k in missing]), strict=True):
                self._known[key] = clean(trace, carries=True)
        found = {}
        for k in wanted:
            self._known.move_to_end(k)
            found[k] = self._known[k]
        while len(self._known) > self._limit:
            self._known.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class Bands:
    """Largest honest differences of paired rows and of draft logits."""

    row: float
    logits: float


class DriverBands:
    """How much honest runs of one history differ in rows and drafts, measured for parameters and a driver.

    Drafts are compared only between programs that hand the driver everything in one call, unless it has no memory that
    it writes rows of its own into (`apart`): what it carries from call to call is under test. How far a split of the
    tokens moves the rows that drafts are made from widens the band.
    """

    def __init__(self, model: ModelRef, run: Run, n_vocab: int, build: str, folder: Path | None):
        self._model, self._run, self._vocab = model, run, n_vocab
        self._known: dict[tuple[ContextParams, DriverParams], Bands | None] = {}
        self._store = Store[tuple[float, float]](folder, build, model, "drivers 3", tuple[float, float])

    def band(self, params: ContextParams, driver: DriverParams, *, apart: bool) -> Bands | None:
        """For the subject's parameters; None where no honest run worked, or where they differ hopelessly. Measured on
        first use, then remembered.

        Whether a driver works `apart` follows from model and driver, so it is no part of what is remembered.
        """
        # sizes of batches and how many sequences there could be do not matter to one call
        p = msgspec.structs.replace(params, n_batch=64, n_ubatch=64, n_seq_max=2, n_threads=1)
        which = (p, driver)
        if which not in self._known:
            name = name_of([p, driver])
            stored = self._store.get(name)
            found = Bands(*stored) if stored else self._measure(p, driver, apart=apart)
            if found is not None and stored is None:
                self._store.put(name, (found.row, found.logits))
            self._known[which] = found
        return self._known[which]

    def _measure(self, p: ContextParams, d: DriverParams, *, apart: bool) -> Bands | None:
        plans: list[tuple[int, bool, Scenario]] = []
        for prompt, n in enumerate((24, 9, 31, 17, 12)):
            tokens = tuple(token(300 + prompt, i, self._vocab) for i in range(n))
            other = tuple(token(400 + prompt, i, self._vocab) for i in range(n))
            base = len(plans)
            last = (token(500 + prompt, 0, self._vocab), token(600 + prompt, 0, self._vocab))
            for whole, both, ops in _honest(tokens, other):
                ask = Propose(seqs=(0, 1), last=last) if both else Propose(seqs=(0,), last=last[:1])
                plans.append((base, whole, Scenario(model=self._model, params=p, driver=d, ops=(*ops, ask))))
        found = [clean(t, carries=True) for t in self._run([s for _, _, s in plans])]
        # with flash attention llama.cpp casts F32 K and V to F16 (src/llama-graph.cpp build_attn_mha())
        floor = least_share(p.type_k, p.type_v, *(["f16"] if p.flash_attn else []))
        rows: dict[bool, float] = {True: 0.0, False: 0.0}
        logits = row_scale = scale = 0.0
        runs = 0
        for (base, whole, _), c in zip(plans, found, strict=True):
            b = found[base]
            if c is None or b is None or c is b or not (c.finite and b.finite):
                continue
            runs += 1
            if c.given.hidden is not None and b.given.hidden is not None:
                rows[whole] = max(rows[whole], float(np.abs(c.given.hidden - b.given.hidden).max(initial=0.0)))
                row_scale = max(row_scale, float(np.abs(b.given.hidden).max(initial=0.0)))
            same = next((i for i, (x, y) in enumerate(zip(c.drafts, b.drafts, strict=False)) if x != y), None)
            n = min(len(c.given.logits), len(b.given.logits), *([] if same is None else [same + 1]))
            if n and (whole or not apart):
                logits = max(logits, float(np.abs(c.given.logits[:n] - b.given.logits[:n]).max()))
                scale = max(scale, float(np.abs(b.given.logits[:n]).max()))
        if not runs or SAFETY * max(rows.values()) > row_scale * HOPELESS or SAFETY * logits > scale * HOPELESS:
            return None
        wider = max(1.0, rows[False] / max(rows[True], float(np.finfo(np.float32).eps) * max(row_scale, 1.0)))
        row = max(SAFETY * max(rows.values()), floor * row_scale)
        return Bands(row, max(SAFETY * logits * min(wider, SAFETY), floor * scale))


def _honest(tokens: tuple[int, ...], other: tuple[int, ...]) -> list[tuple[bool, bool, tuple[AnyOp, ...]]]:
    """Programs after which sequence 0 stands behind the same tokens: whether the driver got them in one call, and
    whether both sequences then draft together; the first is what the others are compared with."""

    def d(piece: tuple[int, ...], seq: int = 0) -> AnyOp:
        return Decode(parts=(Part(seq=seq, n=len(piece), tokens=piece),))

    def both(first: int, second: int) -> AnyOp:
        pieces = {0: tokens, 1: other}
        return Decode(parts=tuple(Part(seq=s, n=len(pieces[s]), tokens=pieces[s]) for s in (first, second)))

    n = len(tokens)
    return [
        (True, False, (d(tokens),)),
        (True, False, (both(0, 1),)),
        (True, True, (both(1, 0),)),
        (True, True, (d(other[:-2], 1), d(tokens))),
        (True, False, (d(other, 1), SeqRm(seq=1), d(tokens))),
        (False, False, (d(tokens[: n // 2]), d(tokens[n // 2 :]))),
        (False, False, tuple(d((t,)) for t in tokens)),
        (False, False, (d(tokens[:-4]), d(tokens[-4:]))),
        (False, False, (d(tokens[:5]), d(other[:1], 1), d(tokens[5:-2]), d(other[1:4], 1), d(tokens[-2:]))),
        (False, True, (d(other[:7], 1), d(tokens[:3]), d(other[7:], 1), *(d((t,)) for t in tokens[3:]))),
    ]


def hold(
    driven: Driven,
    scenario: Scenario,
    params: Sequence[ContextParams],
    references: DriverReferences,
    bands: DriverBands,
    noise: Noise,
) -> None:
    """Hold every claim against its reference. `params`: of the context in force, claim by claim. What the target's own
    rows may differ by (`noise`), rows taken from it and drafts made of these may too.
    """
    claims = driven.drive.claims
    lasts = {c.line.tokens: c.last for c in claims if c.last >= 0}
    keys: list[Key | None] = []
    for c, p in zip(claims, params, strict=True):
        if not c.line.history.length and c.last < 0:
            keys.append(None)  # nothing was processed: a fresh driver pairs with zeros
        else:
            known = c if c.last >= 0 else replace(c, last=lasts.get(c.line.tokens, 0))
            keys.append(key_of(known, scenario, p))
    plain = plain_driver(driven.driver)
    found = references.get([k for k in keys if k is not None])
    for c, k, p in zip(claims, keys, params, strict=True):
        ref = None if k is None else found[k]
        if k is not None and ref is None:
            driven.unjudged.append("the reference did not run")
            continue
        if ref is not None and not ref.finite:
            driven.unjudged.append("the reference itself is not finite")
            continue
        band = bands.band(p, plain, apart=driven.apart) if k is not None else Bands(0.0, 0.0)
        if band is None:
            driven.unjudged.append("no band could be measured")
            continue
        if ref is not None:
            share = noise(p, c.line.history.kinds)
            band = Bands(
                max(band.row, share * _size(ref.given.hidden)), max(band.logits, share * _size(ref.given.logits))
            )
        driven.held.append(_held(c, ref, band, driven.driver))


def _size(numbers: Floats | None) -> float:
    return 0.0 if numbers is None else float(np.abs(numbers).max(initial=0.0))


def _held(c: DraftClaim, ref: Clean | None, band: Bands, d: DriverParams) -> Held:
    row_error = float("nan")
    if c.given.hidden is not None:
        want = np.zeros_like(c.given.hidden) if ref is None else ref.given.hidden
        if want is None or want.shape != c.given.hidden.shape:
            row_error = float("inf")
        else:
            row_error = float(np.abs(want - c.given.hidden).max(initial=0.0))
            row_error = row_error if np.isfinite(row_error) else float("inf")  # nan says that there is none to see
    if ref is None or c.last < 0:
        return Held(c, row_error, band.row, 0.0, band.logits, 0.0, -1, 0.0, (), False, 0)
    expected, unsure = limited(ref, d, c.n_max, band.logits * FAR)
    pairs = list(zip(c.drafts, expected, strict=False))
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), -1)
    if at < 0 and len(c.drafts) != len(expected):
        at = len(pairs)
    n = min(len(c.given.logits), len(ref.given.logits))
    n = n if at < 0 else min(n, at + 1)
    mine, theirs = c.given.logits[:n], ref.given.logits[:n]
    difference = np.abs(mine - theirs)
    error = float(difference.max()) if n else 0.0
    nmse = float(((mine - theirs) ** 2).sum() / max(float((theirs**2).sum()), 1e-30)) if n else 0.0
    gap = float("nan")
    if 0 <= at < min(len(c.drafts), len(expected)) and at < len(ref.given.logits):
        row = ref.given.logits[at]
        gap = float(row[expected[at]] - row[c.drafts[at]])
    changed = int((~(difference.max(axis=1) <= band.logits)).sum()) if n else 0
    return Held(c, row_error, band.row, error if np.isfinite(error) else float("inf"), band.logits, nmse, at, gap,
                expected, unsure, changed)  # fmt: skip


def limited(ref: Clean, d: DriverParams, n_max: int, slack: float) -> tuple[tuple[int, ...], bool]:
    """What the reference drafts under the subject's p_min, n_min and n_max, and whether its length hangs on a
    probability that logits off by `slack` could carry over p_min. The probability is that of the first of the ten best
    (the driver's sampler: top-k 10).
    """
    drafts, unsure = ref.drafts, False
    if d.p_min > 0 and len(ref.given.logits):
        keep = 0
        for row in ref.given.logits[: len(drafts)]:
            best = np.sort(row)[-10:].astype(np.float64)
            p = float(1.0 / np.exp(best - best[-1]).sum())
            if abs(p - d.p_min) <= 2 * slack * p * (1 - p) + 1e-6:  # the derivative of a softmax, twice: both may move
                unsure = True
            if p < d.p_min:
                break
            keep += 1
        drafts = drafts[:keep]
    if d.kind == "draft-simple" and n_max > 0:
        drafts = drafts[:n_max]  # the only kind that stops there itself
    if len(drafts) < d.n_min:
        return (), unsure
    return (drafts[:n_max] if n_max > 0 else drafts), unsure
