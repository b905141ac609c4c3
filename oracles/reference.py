"""References: what an honest library gives for a history, computed in clean contexts.

Solo: the history of one sequence, in the batches that decoded it, alone in a context of its own. Twin: the same program
with the rows that did not survive left out, so that the batches of the other sequences keep their composition.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from oracles.ledger import Edit, Item, Ledger, RowClaim, Seg, StateClaim, count_outputs, output_choice
from subjects.child import Replay
from subjects.scenario import OPEN, AnyOp, ContextParams, Decode, Edge, ModelRef, Part, Scenario, SeqAdd, SeqDiv, SeqRm
from subjects.trace import Floats, Row, Trace

Key = tuple[ContextParams, int, tuple[Item, ...]]


def key_of(claim: RowClaim | StateClaim) -> Key:
    """The solo reference of a row or a state: its history as sequence 0 of a context with room for one.

    Which id a sequence has, how many there could be, whether their caches are one, and how many threads compute must
    not matter, and measured on all kinds of memory it does not, to the bit. So equal histories share a reference.
    """
    p = claim.params
    params = msgspec.structs.replace(p, n_seq_max=1, kv_unified=False, n_threads=1, n_batch=max(p.n_batch, 64))
    return params, 0, claim.chain


def _edge(p: int) -> Edge:
    return OPEN if p < 0 else Edge(at="start", d=p)


def _ops(seq: int, item: Item, n_batch: int) -> list[AnyOp]:
    if isinstance(item, Edit):
        lo, hi = _edge(item.args[0]), _edge(item.args[1])
        if item.call == "seq_rm":
            return [SeqRm(seq=seq, lo=lo, hi=hi)]
        if item.call == "seq_add":
            return [SeqAdd(seq=seq, lo=lo, hi=hi, delta=item.args[2])]
        return [SeqDiv(seq=seq, lo=lo, hi=hi, d=item.args[2])]
    # rows that were decoded in a context with larger batches, before a reopen, have to be cut into several
    pieces = [item.tokens[i : i + n_batch] for i in range(0, len(item.tokens), n_batch)]
    outs = [item.out if item.out != "last" or i == len(pieces) - 1 else "none" for i in range(len(pieces))]
    return [Decode(parts=(Part(seq=seq, n=len(t), tokens=t, out=out),)) for t, out in zip(pieces, outs, strict=True)]


def solo(model: ModelRef, params: ContextParams, seq: int, chain: Sequence[Item]) -> Scenario:
    """The program that decodes one history in a clean context, same parameters and sequence id."""
    ops = tuple(op for item in chain for op in _ops(seq, item, params.n_batch))
    return Scenario(model=model, params=params, ops=ops, note="reference: solo")


def twin(ledger: Ledger, claim: RowClaim) -> Scenario | None:
    """The program's own batches with only the rows of `claim`'s surviving history and those of the other sequences.

    Every kept row is output or not as it was, where that is a regular choice. None where another sequence went through
    more than decodes (its rows would not mean the same), or where the history was edited. `row_at` finds the claim's
    row in the twin's trace.
    """
    if any(isinstance(item, Edit) for item in claim.chain):
        return None
    alive = {item.start + j: t for item in claim.chain if isinstance(item, Seg) for j, t in enumerate(item.tokens)}
    ops: list[AnyOp] = []
    at = 0
    for m in ledger.moments:
        if m.step.op > claim.step:
            return None  # what follows is no part of the claim's history
        if not m.step.batches and any(s != claim.seq for s in m.touched):
            return None
        for batch in m.step.batches:
            if batch.rc != 0:
                continue
            parts: list[Part] = []
            for seq in dict.fromkeys(r.seq for r in batch.rows):
                kept: list[Row] = []
                for r in batch.rows:
                    if r.seq != seq:
                        continue
                    if seq != claim.seq:
                        kept.append(r)
                    elif r.pos == at and alive.get(at) == r.token:  # what was decoded and cut again is left out
                        kept.append(r)
                        at += 1
                if kept:
                    tokens = tuple(r.token for r in kept)
                    out = output_choice([r.out for r in kept])
                    parts.append(Part(seq=seq, n=len(tokens), tokens=tokens, out=out))
            if parts:
                ops.append(Decode(parts=tuple(parts)))
            if at > claim.pos:
                return Scenario(model=ledger.scenario.model, params=m.params, ops=tuple(ops), note="reference: twin")
    return None


def row_at(trace: Trace, seq: int, pos: int) -> int:
    """Number of the last output row of a sequence at a position, -1 when there is none."""
    found = -1
    for step in trace.steps:
        for batch in step.batches:
            outs = [r for r in batch.rows if r.out]
            for k, r in enumerate(outs):
                if batch.first >= 0 and (r.seq, r.pos) == (seq, pos):
                    found = batch.first + k
    return found


_CALLS = {"seq_rm": 1, "seq_add": 2, "seq_div": 3}
_SAVE = 4
_OUTPUTS = {"none": 0, "last": 1, "all": 2}


def replay(model: ModelRef, path: Path, key: Key, saves: Sequence[int] = ()) -> Replay:
    """The same program as `solo`, as one call of the shim; a test holds them together.

    saves: after how many items of the chain the state is saved, ascending.
    """
    params, seq, chain = key
    words = array("i")
    for k, item in enumerate(chain):
        if k in saves:
            words.extend((_SAVE, 1, seq))
        if isinstance(item, Edit):
            words.extend((_CALLS[item.call], 1 + len(item.args), seq, *item.args))
            continue
        n = params.n_batch
        for i in range(0, len(item.tokens), n):
            tokens = item.tokens[i : i + n]
            out = _OUTPUTS[item.out] if item.out != "last" or i + n >= len(item.tokens) else 0
            words.extend((0, 3 + len(tokens), seq, item.start + i, out, *tokens))
    if len(chain) in saves:
        words.extend((_SAVE, 1, seq))
    return Replay(params, words.tobytes(), count_outputs(chain), str(path), model.n_gpu_layers, len(saves))


@dataclass(frozen=True, slots=True)
class Rows:
    """Output rows of a chain: logits (n, n_vocab) and hidden (n, n_embd or 0)."""

    logits: Floats
    hidden: Floats


@dataclass(slots=True)
class _Run:
    """One reference run: its rows, their bytes, and the chains that it answers for."""

    rows: Rows
    size: int
    number: int
    keys: set[Key] = field(default_factory=set)


class References:
    """Solo references by history, remembered: a chain answers for all its beginnings. Not for other models than its
    own.

    Bounded by bytes, those longest unused out first; only `evict` drops anything, so what a program needs stays until
    it was compared.
    """

    def __init__(self, limit_bytes: int = 48 << 20):
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._of: dict[Key, _Run] = {}
        self._bytes = 0
        self._made = 0
        self._limit = limit_bytes

    def get(self, key: Key) -> Rows | None:
        """Rows of a chain (perhaps more than it has, when it is the beginning of a longer one), None when not
        computed.
        """
        run = self._of.get(key)
        if run is None:
            return None
        self._runs.move_to_end(run.number)
        return run.rows

    def missing(self, wanted: Iterable[Key]) -> list[Key]:
        """The chains that must be run so that all of `wanted` are known, longest first, no beginnings of others."""
        run: list[Key] = []
        covered: set[Key] = set()
        for key in sorted(set(wanted), key=lambda k: -len(k[2])):
            if key in self._of or key in covered:
                continue
            run.append(key)
            params, seq, chain = key
            covered.update((params, seq, chain[:i]) for i in range(1, len(chain) + 1))
        return run

    def put(self, key: Key, trace: Trace, n_vocab: int, n_embd: int) -> None:
        """Remember the rows of a reference run; one that did not end well is not remembered."""
        if trace.end.how != "ok":
            return
        params, seq, chain = key
        rows = Rows(
            np.frombuffer(trace.logits, np.float32).reshape(-1, n_vocab),
            np.frombuffer(trace.hidden, np.float32).reshape(-1, n_embd),
        )
        self._made += 1
        run = self._runs[self._made] = _Run(rows, len(trace.logits) + len(trace.hidden), self._made)
        self._bytes += run.size
        for i in range(1, len(chain) + 1):
            beginning = (params, seq, chain[:i])
            old = self._of.get(beginning)
            self._of[beginning] = run
            run.keys.add(beginning)
            if old is not None and old is not run:
                old.keys.discard(beginning)
                if not old.keys:  # a longer chain has taken its place
                    self._drop(old)

    def evict(self) -> None:
        """Drop what was unused for longest until the limits are kept again."""
        while self._runs and (self._bytes > self._limit or len(self._of) > 20000):
            self._drop(next(iter(self._runs.values())))

    def _drop(self, run: _Run) -> None:
        del self._runs[run.number]
        self._bytes -= run.size
        for key in run.keys:
            del self._of[key]


class StateReferences:
    """States that an honest library saves after a history, as blobs of a single sequence, remembered.

    Histories that are beginnings of one another share a run, which saves on the way; rows come from runs without saves
    (`References`). Bounded by bytes, as there.
    """

    def __init__(self, limit_bytes: int = 24 << 20):
        self._of: OrderedDict[Key, bytes] = OrderedDict()
        self._bytes = 0
        self._limit = limit_bytes

    def get(self, key: Key) -> bytes | None:
        """The state after a chain, None when it is not known."""
        data = self._of.get(key)
        if data is not None:
            self._of.move_to_end(key)
        return data

    def missing(self, wanted: Iterable[Key]) -> list[tuple[Key, list[int]]]:
        """The chains that must be run so that all of `wanted` are known, each with where on it to save."""
        runs: list[tuple[Key, list[int]]] = []
        run_of: dict[Key, int] = {}
        for key in sorted({k for k in wanted if k not in self._of}, key=lambda k: -len(k[2])):
            params, seq, chain = key
            at = run_of.get(key)
            if at is None:
                at = len(runs)
                runs.append((key, []))
                run_of.update(((params, seq, chain[:i]), at) for i in range(1, len(chain) + 1))
            runs[at][1].insert(0, len(chain))
        return runs

    def put(self, key: Key, saves: Sequence[int], trace: Trace) -> None:
        """Remember the states of a run; one that did not end well is not remembered, nor what was too long to keep."""
        if trace.end.how != "ok":
            return
        params, seq, chain = key
        at = 0
        for n in saves:
            size = int.from_bytes(trace.states[at : at + 8], "little")
            data = trace.states[at + 8 : at + 8 + size]
            at += 8 + size
            if size and len(data) == size:
                self._of[params, seq, chain[:n]] = data
                self._bytes += size

    def evict(self) -> None:
        """Drop what was unused for longest until the limit is kept again."""
        while self._of and self._bytes > self._limit:
            self._bytes -= len(self._of.popitem(last=False)[1])
