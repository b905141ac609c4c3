"""Bands: how much honest runs of one history differ, measured for a build, a model, parameters and a kind of
composition change.

Two runs of one history differ by float reordering as soon as a batch's composition, the place of cells or a kernel
differs. A difference is judged against what such changes really do here, never against a fixed number. Kinds:

split  the same tokens cut into other batches
mixed  another sequence's rows in the same batches
cells  other sequences' cells in the cache, or the history's cells in other places
edited the edits of an edited history, with cells in other places
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from oracles.store import Store, name_of
from subjects.scenario import AnyOp, ContextParams, Decode, ModelRef, Part, Save, Scenario, SeqRm
from subjects.state.canon import Reader
from subjects.state.parse import BadBlob
from subjects.trace import Trace

# An honest difference may be this many times the largest one that was measured on a handful of prompts.
SAFETY = 8.0
# A state error must be this many times outside the band; what lies between is ambiguous, which is unknown.
FAR = 30.0
# Below so many units in the last place of the largest logit nothing is told apart: the sum of some dozens of float32
# terms.
FLOOR_ULPS = 64.0
# Where K/V are stored with fewer bits, noise can tip one stored value over to its neighbour. That happens too seldom to
# be met by a handful of prompts, so a quarter of one such step at the size of the largest logit always counts as
# honest.
STEP = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 2.0**-8, "q4_0": 2.0**-4}
PROMPTS = 5

Run = Callable[[Sequence[Scenario]], list[Trace]]


def least_share(*types: str) -> float:
    """What always counts as honest, as a share of the largest value, with K/V of these types."""
    return max(FLOOR_ULPS * float(np.finfo(np.float32).eps), *(STEP[t] / 4 for t in types))


class Measured(msgspec.Struct):
    """Largest honest absolute difference by kind, for logits, for hidden rows and for saved states, and the size of
    the values themselves.
    """

    logits: dict[str, float] = {}
    hidden: dict[str, float] = {}
    scale: float = 0.0
    hidden_scale: float = 0.0
    runs: int = 0
    # by tensor of the state, such as "recurrent.s": the same by kind, and the largest value
    states: dict[str, dict[str, float]] = {}
    state_scale: dict[str, float] = {}


def arithmetic(p: ContextParams) -> ContextParams:
    """The parameters that honest differences depend on; the rest at values that let the measuring programs run.

    n_ubatch and the number of kept recurrent states are the same on both sides of every comparison. The number of
    sequences, threads and n_batch are not (see `oracles.reference.key_of`), but measured they do not matter, to the
    bit.
    """
    return ContextParams(
        n_batch=128,
        kv_unified=p.kv_unified,
        type_k=p.type_k,
        type_v=p.type_v,
        flash_attn=p.flash_attn,
        swa_full=p.swa_full,
        offload_kqv=p.offload_kqv,
        embeddings=p.embeddings,
    )


class Bands:
    """Measured bands of one build and model, kept in memory and in `folder` (None: memory only).

    run: executes scenarios in clean contexts of the subject and returns their traces.
    """

    def __init__(self, run: Run, model: ModelRef, build: str, folder: Path | None):
        self._run, self._model = run, model
        self._known: dict[ContextParams, Measured] = {}
        self._store = Store[Measured](folder, build, model, "6", Measured)
        self._reader = Reader()

    def measured(self, params: ContextParams) -> Measured:
        """What honest runs under these parameters differ by; measured on first use (some tens of milliseconds)."""
        key = arithmetic(params)
        if key not in self._known:
            name = name_of(key)
            found = self._store.get(name)
            if found is None:
                found = self._measure(key)
                if found.runs:  # where nothing ran, later runs are not to remember it
                    self._store.put(name, found)
            self._known[key] = found
        return self._known[key]

    def known(self, params: ContextParams) -> bool:
        """Whether there is a band at all: some honest run worked."""
        return self.measured(params).runs > 0

    def band(self, params: ContextParams, kinds: Iterable[str], *, hidden: bool = False) -> float:
        """Largest absolute difference that counts as honest for a history with these composition changes."""
        m = self.measured(params)
        seen = m.hidden if hidden else m.logits
        scale = (m.hidden_scale if hidden else m.scale) or 1.0  # 1.0 where nothing was measured
        floor = least_share(params.type_k, params.type_v) * scale
        # "split" always counts: which rows are output, and where a cut history ends, already changes kernels
        return max([floor, *(SAFETY * seen.get(k, 0.0) for k in {"split", *kinds})])

    def states(self, params: ContextParams, kinds: Iterable[str]) -> dict[str, float]:
        """The same for the tensors of a saved state ("attn.k", "recurrent.s"); those that were not measured are not in
        it.

        A stored value of K or V may tip over to its neighbour, which in a state is seen as the whole step that it is.
        """
        m = self.measured(params)
        asked = {"split", *kinds}
        steps = {"k": 2 * STEP[params.type_k], "v": 2 * STEP[params.type_v]}
        least = least_share(params.type_k, params.type_v)
        return {
            name: max(
                max(least, steps.get(name.rpartition(".")[2], 0.0)) * m.state_scale[name],
                *(SAFETY * seen.get(kind, 0.0) for kind in asked),
            )
            for name, seen in m.states.items()
        }

    def share(self, params: ContextParams, kinds: Iterable[str]) -> float:
        """The same as a share of the rows' size, for what is made of them elsewhere."""
        return self.band(params, kinds) / (self.measured(params).scale or 1.0)

    def _measure(self, p: ContextParams) -> Measured:
        programs: list[Scenario] = []
        plan: list[tuple[str, int]] = []
        for prompt in range(PROMPTS):
            base = len(programs)
            for kind, ops in _honest(prompt):
                programs.append(Scenario(model=self._model, params=p, ops=(*ops, Save(seq=0, slot=0))))
                plan.append((kind, base))
        traces = self._run(programs)
        out = Measured()
        for (kind, base), trace in zip(plan, traces, strict=True):
            if kind == "base" or not _worked(trace) or not _worked(traces[base]):
                continue
            self._measure_state(kind, trace, traces[base], out)
            a, b = trace.logit_rows(), traces[base].logit_rows()
            n = min(len(a), len(b), _OUT)
            if n and np.isfinite(a[-n:]).all() and np.isfinite(b[-n:]).all():
                out.runs += 1
                out.logits[kind] = max(out.logits.get(kind, 0.0), float(np.abs(a[-n:] - b[-n:]).max()))
                out.scale = max(out.scale, float(np.abs(b[-n:]).max()))
                if p.embeddings:
                    c, d = trace.hidden_rows(), traces[base].hidden_rows()
                    if not (np.isfinite(c[-n:]).all() and np.isfinite(d[-n:]).all()):
                        continue
                    out.hidden[kind] = max(out.hidden.get(kind, 0.0), float(np.abs(c[-n:] - d[-n:]).max()))
                    out.hidden_scale = max(out.hidden_scale, float(np.abs(d[-n:]).max()))
        out.logits["edited"] = 4 * max(
            out.logits.values(), default=0.0
        )  # shifted keys are rotated twice: measured by `cells`, once more
        out.hidden["edited"] = 4 * max(out.hidden.values(), default=0.0)
        for seen in out.states.values():
            seen["edited"] = 4 * max(seen.values(), default=0.0)
        return out

    def _measure_state(self, kind: str, trace: Trace, base: Trace, out: Measured) -> None:
        """Add how the states differ that both programs saved at their end, in what both hold."""
        blobs = [t.state(t.steps[-1].blobs[-1]) if t.steps and t.steps[-1].blobs else None for t in (trace, base)]
        if blobs[0] is None or blobs[1] is None:
            return
        try:
            mine, theirs = (self._reader.canonical(b)[0] for b in blobs if b is not None)
        except BadBlob:
            return  # of another version: no state is judged
        for key, rows in theirs.rows.items():
            other = mine.rows.get(key)
            if other is None or other.type != rows.type or other.data.shape[1:] != rows.data.shape[1:]:
                continue
            both = sorted(set(rows.positions) & set(other.positions))
            a = other.values()[[other.positions.index(p) for p in both]]
            b = rows.values()[[rows.positions.index(p) for p in both]]
            if a.size and np.isfinite(a).all() and np.isfinite(b).all():
                name = f"{key.part}.{key.tensor}"
                seen = out.states.setdefault(name, {})
                seen[kind] = max(seen.get(kind, 0.0), float(np.abs(a - b).max()))
                out.state_scale[name] = max(out.state_scale.get(name, 0.0), float(np.abs(b).max()))


def _worked(trace: Trace) -> bool:
    """Whether an honest program did all that it should: it ended, and every decode was taken."""
    return trace.end.how == "ok" and all(b.rc == 0 for step in trace.steps for b in step.batches)


_OUT = 4  # rows compared: the last ones, single tokens


def _honest(prompt: int) -> list[tuple[str, tuple[AnyOp, ...]]]:
    """Programs that end with the same history of sequence 0; the first is what the others are compared with."""
    n = (24, 17, 31, 9, 40)[prompt % 5]
    stream, other = 100 + prompt, 200 + prompt

    def d(k: int, seq: int = 0, st: int = stream) -> AnyOp:
        return Decode(parts=(Part(seq=seq, n=k, stream=st, out="last"),))

    def both(k: int, j: int) -> AnyOp:
        return Decode(parts=(Part(seq=0, n=k, stream=stream, out="last"), Part(seq=1, n=j, stream=other, out="none")))

    tail: tuple[AnyOp, ...] = tuple(d(1) for _ in range(_OUT))
    mixed_tail: tuple[AnyOp, ...] = tuple(
        Decode(parts=(Part(seq=1, n=1, stream=other, out="none"), Part(seq=0, n=1, stream=stream))) for _ in range(_OUT)
    )
    all_tail = (Decode(parts=(Part(seq=0, n=_OUT, stream=stream, out="all"),)),)
    return [
        ("base", (d(n), *tail)),
        ("split", (d(n // 2), d(n - n // 2), *tail)),
        ("split", (*(d(1) for _ in range(n)), *tail)),
        ("split", (d(n), *all_tail)),
        ("split", (d(n - 5), *(d(1) for _ in range(5)), *all_tail)),
        ("mixed", (both(n, 7), *tail)),
        ("mixed", (both(n, n), *mixed_tail)),
        ("cells", (d(11, 1, other), d(n), *tail)),
        ("cells", (d(n // 2), d(9, 1, other), d(n - n // 2), *tail)),
        ("cells", (d(19, 1, other), d(n - 3), SeqRm(seq=1), d(3), *tail)),
    ]
