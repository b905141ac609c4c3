"""Subjects without native code: `Tape` writes a trace down by hand, `Ideal` is a llama.cpp without faults in plain
Python.

`Ideal` computes every output row as a pure function of the positions and tokens that the row may attend to, so a
history
is right exactly when its rows are bit for bit those of the same history in a clean context.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oracles.judge import Judge
from oracles.ledger import Ledger, State, read
from subjects.child import Replay
from subjects.runner import Refused, Runner
from subjects.scenario import ON_DEVICE, AnyOp, ContextParams, Decode, ModelRef, Part, Scenario
from subjects.trace import Batch, Blob, End, Facts, Row, Step, Trace, from_bytes, to_bytes

N_VOCAB, N_EMBD = 64, 8
MODEL = ModelRef(recipe="llama", sha256="00")
GONE = (-1, -1)


def facts_of(memory: str, p: ContextParams, n_swa: int = 16, n_ctx: int = 256) -> Facts:
    """What a library says of a model of this memory kind; `n_ctx` cells a sequence, or in all of a unified cache."""
    return Facts(
        n_vocab=N_VOCAB,
        n_embd=N_EMBD,
        recurrent=memory == "recurrent",
        hybrid=memory == "hybrid",
        n_swa=n_swa if memory == "window" else 0,
        n_layer=2,
        n_ctx=n_ctx if p.kv_unified else n_ctx * p.n_seq_max,
        n_ctx_seq=n_ctx,
        n_batch=p.n_batch,
        n_ubatch=p.n_ubatch,
        n_seq_max=p.n_seq_max,
        n_rs_seq=p.n_rs_seq if memory == "hybrid" else 0,
        can_shift=memory in ("dense", "window"),
    )


class Tape:
    """A trace by hand: every call says what was asked and what was answered; positions are as an honest dense or
    window cache (or one recurrent state) tells them unless `pos` says otherwise.
    """

    def __init__(self, memory: str = "dense", params: ContextParams | None = None, n_ctx: int = 256) -> None:
        self.memory, self.params, self.n_ctx = memory, params or ContextParams(), n_ctx
        self.ops: list[AnyOp] = []
        self.steps: list[Step] = []
        self.rows = 0
        self.pos = [GONE] * self.params.n_seq_max
        self.facts = [facts_of(memory, self.params, n_ctx=n_ctx)]
        self.all_params = [self.params]

    def decode(
        self,
        *parts: tuple[int, Sequence[int]],
        rc: int | None = 0,
        out: str = "last",
        at: int | None = None,
        pos: dict[int, tuple[int, int]] | None = None,
        op: AnyOp | None = None,
        done: bool = True,
    ) -> Tape:
        """One batch of (sequence, tokens); `at` is the first position of the rows."""
        rows = []
        for seq, tokens in parts:
            start = self.pos[seq][1] + 1 if at is None else at
            for j, t in enumerate(tokens):
                rows.append(Row(seq, start + j, t, out == "all" or (out == "last" and j == len(tokens) - 1)))
        seen = any(r.out for r in rows) and rc == 0
        batch = Batch(rows, rc, self.rows if seen else -1)
        if rc == 0:
            self.rows += sum(r.out for r in rows)
            for r in rows:
                lo = r.pos if self.memory in ("recurrent", "hybrid") else max(self.pos[r.seq][0], 0)
                self.pos[r.seq] = (lo, r.pos)
        ops = op or Decode(parts=tuple(Part(seq=s, n=len(t), tokens=tuple(t)) for s, t in parts))
        return self.step(ops, rc=rc, batches=[batch], pos=pos, done=done)

    def draft(self, op: AnyOp, seq: int, tokens: Sequence[int]) -> Tape:
        """Single-row batches of one operation."""
        batches = []
        for t in tokens:
            p = self.pos[seq][1] + 1
            batches.append(Batch([Row(seq, p, t, True)], 0, self.rows))
            self.rows += 1
            self.pos[seq] = (p if self.memory in ("recurrent", "hybrid") else 0, p)
        return self.step(op, rc=0, batches=batches)

    def step(
        self,
        op: AnyOp,
        *args: int,
        rc: int | None = None,
        pos: dict[int, tuple[int, int]] | None = None,
        batches: list[Batch] | None = None,
        blobs: Sequence[tuple[int, int]] = (),
        value: int | None = None,
        skipped: str = "",
        done: bool = True,
    ) -> Tape:
        """Any operation with its resolved arguments and answer; `pos` are the sequences whose positions change."""
        for seq, pair in (pos or {}).items():
            self.pos[seq] = pair
        self.steps.append(
            Step(
                op=len(self.ops),
                args=list(args),
                rc=rc,
                batches=batches or [],
                blobs=[Blob(a, b, f"{len(self.ops)}") for a, b in blobs],
                pos=list(self.pos) if done else [],
                value=value,
                skipped=skipped,
                done=done,
            )
        )
        self.ops.append(op)
        return self

    def reopen(self, op: AnyOp, params: ContextParams) -> Tape:
        """A new context."""
        self.facts.append(facts_of(self.memory, params, n_ctx=self.n_ctx))
        self.all_params.append(params)
        self.pos = [GONE] * params.n_seq_max
        return self.step(op)

    @property
    def scenario(self) -> Scenario:
        """The program of the tape."""
        return Scenario(model=MODEL, params=self.all_params[0], ops=tuple(self.ops))

    def trace(self, end: End | None = None) -> Trace:
        """The trace, its rows all zero."""
        logits = np.zeros((self.rows, N_VOCAB), np.float32).tobytes()
        return Trace(self.steps, self.facts, end or End("ok"), logits=logits, params=self.all_params)

    def ledger(self) -> Ledger:
        """Its account."""
        return read(self.scenario, self.trace())

    def after(self, seq: int = 0) -> State:
        """What the ledger says of a sequence at the end."""
        return self.ledger().moments[-1].after[seq]


Content = list[tuple[int, int]]


class Ideal:
    """See the module. It speaks the shim's interface (`subjects.shim.Shim`), so that `subjects.runner` drives it.

    Subclasses plant faults. `memory` as in Facts; a recurrent one refuses what it cannot take back, a hybrid one takes
    back up to n_rs_seq tokens, always exactly.
    """

    def __init__(self, memory: str = "dense") -> None:
        self.memory = memory
        self.p = ContextParams()
        self.seqs: list[Content] = []
        self.device: dict[int, tuple[bytes, Content]] = {}
        self.seen: list[Content] = []

    # --- contexts

    def new_context(self, p: ContextParams) -> int:
        self.p, self.seqs, self.device = p, [[] for _ in range(p.n_seq_max)], {}
        return 1

    def free_context(self, ctx: int) -> None:
        pass

    def take_log(self) -> list[str]:
        return []

    def model_facts(self, model: int) -> dict[str, int]:
        return {k: int(v) for k, v in msgspec.structs.asdict(facts_of(self.memory, self.p)).items()}

    def context_facts(self, ctx: int) -> dict[str, int]:
        return {k: int(v) for k, v in msgspec.structs.asdict(facts_of(self.memory, self.p)).items()}

    def positions(self, ctx: int, n_seq: int) -> list[tuple[int, int]]:
        one_state = self.memory in ("recurrent", "hybrid")
        told = []
        for c in self.seqs:
            places = [p for p, _ in c]
            told.append((max(places) if one_state else min(places), max(places)) if c else GONE)
        return told

    # --- decoding

    def room(self, need: dict[int, int]) -> bool:
        if self.memory == "recurrent":
            return True
        if self.p.kv_unified:
            return sum(map(len, self.seqs)) + sum(need.values()) <= 256
        return all(len(self.seqs[s]) + n <= 256 for s, n in need.items())

    def decode(
        self,
        ctx: int,
        token: Sequence[int],
        pos: Sequence[int],
        seq: Sequence[int],
        out: Sequence[int],
        abort_after: int | None = None,
    ) -> int:
        if not self.room({s: list(seq).count(s) for s in seq}):
            return 1
        n = len(token) if abort_after is None else min(abort_after * self.p.n_ubatch, len(token))
        self.seen = []
        for t, p, s in list(zip(token, pos, seq, strict=True))[:n]:
            self.seqs[s].append((p, t))
            self.seen.append(sorted(x for x in self.seqs[s] if x[0] <= p))
        return 0 if n == len(token) else 2

    def logits(self, ctx: int, i: int, n_vocab: int) -> bytes:
        return self._row(self.seen[i], n_vocab, "logits")

    def hidden(self, ctx: int, i: int, n_embd: int) -> bytes:
        return self._row(self.seen[i], n_embd, "hidden")

    def _row(self, content: Content, n: int, what: str) -> bytes:
        digest = hashlib.sha256(repr((what, content)).encode()).digest() * (n // 32 + 1)
        return array("f", [(x - 128) / 16 for x in digest[:n]]).tobytes()

    # --- memory

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        lo, hi = max(p0, 0), 1 << 31 if p1 < 0 else p1
        targets = range(len(self.seqs)) if seq < 0 else [seq]
        for s in targets:
            gone = [p for p, _ in self.seqs[s] if lo <= p < hi]
            if self.memory in ("recurrent", "hybrid") and gone and len(gone) < len(self.seqs[s]):
                tail = max(gone) == max(p for p, _ in self.seqs[s])
                if not tail or len(gone) > (self.p.n_rs_seq if self.memory == "hybrid" else 0):
                    return 0
        for s in targets:
            self.seqs[s] = [(p, t) for p, t in self.seqs[s] if not lo <= p < hi]
        return 1

    def seq_cp(self, ctx: int, src: int, dst: int, p0: int, p1: int) -> None:
        lo, hi = max(p0, 0), 1 << 31 if p1 < 0 else p1
        if src != dst:
            self.seqs[dst] += [(p, t) for p, t in self.seqs[src] if lo <= p < hi]

    def seq_keep(self, ctx: int, seq: int) -> None:
        self.seqs = [c if s == seq else [] for s, c in enumerate(self.seqs)]

    def seq_add(self, ctx: int, seq: int, p0: int, p1: int, delta: int) -> None:
        lo, hi = max(p0, 0), 1 << 31 if p1 < 0 else p1
        self.seqs[seq] = [(p + delta if lo <= p < hi else p, t) for p, t in self.seqs[seq]]

    def seq_div(self, ctx: int, seq: int, p0: int, p1: int, d: int) -> None:
        lo, hi = max(p0, 0), 1 << 31 if p1 < 0 else p1
        self.seqs[seq] = [(p // d if lo <= p < hi else p, t) for p, t in self.seqs[seq]]

    def clear(self, ctx: int, data: bool) -> None:
        self.seqs = [[] for _ in self.seqs]

    # --- states

    def _pack(self, value: Any) -> bytes:
        kind = [self.p.type_k, self.p.type_v, self.p.flash_attn]
        body = json.dumps([kind, value]).encode()
        return hashlib.sha256(body).digest() + body

    def _unpack(self, blob: bytes) -> Any:
        if hashlib.sha256(blob[32:]).digest() != blob[:32]:
            return None
        kind, value = json.loads(blob[32:])
        return value if kind == [self.p.type_k, self.p.type_v, self.p.flash_attn] else None

    def seq_size(self, ctx: int, seq: int, flags: int) -> int:
        return 8 if flags & ON_DEVICE else len(self._pack(self.seqs[seq]))

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        if flags & ON_DEVICE:
            data = hashlib.sha256(repr((seq, self.seqs[seq])).encode()).digest()[:8]
            self.device[seq] = (data, list(self.seqs[seq]))
        else:
            data = self._pack(self.seqs[seq])
        return len(data), data

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        if flags & ON_DEVICE:
            kept = [c for handle, c in self.device.values() if handle == blob]
            content: Content | None = kept[0] if kept else None
        else:
            content = self._unpack(blob)
        if content is None:
            return 0
        others = sum(len(c) for s, c in enumerate(self.seqs) if s != seq)
        if self.p.kv_unified and self.memory != "recurrent" and others + len(content) > 256:
            return 0
        self.seqs[seq] = [(p, t) for p, t in content]
        return len(blob)

    def all_size(self, ctx: int) -> int:
        return len(self._pack(self.seqs))

    def all_get(self, ctx: int, room: int) -> tuple[int, bytes]:
        data = self._pack(self.seqs)
        return len(data), data

    def all_set(self, ctx: int, blob: bytes) -> int:
        value = self._unpack(blob)
        if value is None or len(value) != len(self.seqs):
            return 0
        self.seqs = [[(p, t) for p, t in c] for c in value]
        return len(blob)

    def _file(self, path: Path, data: bytes, tokens: Sequence[int]) -> int:
        whole = json.dumps([list(tokens), data.hex()]).encode()
        path.write_bytes(whole)
        return len(whole)

    def _loaded(self, path: Path) -> tuple[list[int], bytes, int]:
        whole = path.read_bytes()
        try:
            tokens, data = json.loads(whole)
            return tokens, bytes.fromhex(data), len(whole)
        except ValueError:
            return [], b"", len(whole)

    def seq_save_file(self, ctx: int, path: Path, seq: int, tokens: Sequence[int]) -> int:
        return self._file(path, self.seq_get(ctx, seq, 0, 0)[1], tokens)

    def seq_load_file(self, ctx: int, path: Path, seq: int, room: int) -> tuple[int, list[int]]:
        tokens, data, n = self._loaded(path)
        return (n if self.seq_set(ctx, seq, 0, data) else 0), tokens

    def all_save_file(self, ctx: int, path: Path, tokens: Sequence[int]) -> int:
        self._file(path, self.all_get(ctx, 0)[1], tokens)
        return 1

    def all_load_file(self, ctx: int, path: Path, room: int) -> tuple[int, list[int]]:
        tokens, data, _ = self._loaded(path)
        return int(self.all_set(ctx, data) > 0), tokens


class _Sink:
    def __init__(self) -> None:
        self.trace = Trace([], [], End("ok"))
        self.logits: list[bytes] = []
        self.hidden: list[bytes] = []
        self.states: list[bytes] = []

    def facts(self, facts: Facts, params: ContextParams) -> None:
        self.trace.facts.append(facts)
        self.trace.params.append(params)

    def begin(self, op: int, args: list[int]) -> None:
        self.trace.steps.append(Step(op=op, args=list(args)))

    def batch(self, rows: list[Row]) -> None:
        self.trace.steps[-1].batches.append(Batch(rows))

    def code(self, rc: int, first: int) -> None:
        batch = self.trace.steps[-1].batches[-1]
        batch.rc, batch.first = rc, first

    def end(self, step: Step) -> None:
        steps = self.trace.steps
        if steps and steps[-1].op == step.op:
            step.batches = steps.pop().batches
        steps.append(step)

    def state(self, data: bytes) -> None:
        self.states.append(data)

    def row(self, logits: bytes, hidden: bytes) -> None:
        self.logits.append(logits)
        if hidden:
            self.hidden.append(hidden)


def run(scenario: Scenario, ideal: Ideal) -> Trace:
    """Run a scenario on an ideal library, in this process: there is nothing native in it."""
    sink = _Sink()
    try:
        Runner(ideal, 1, sink, ideal.new_context).run(scenario)  # type: ignore[arg-type]
    except Refused as e:
        sink.trace.end = End("error", 0, str(e))
    sink.trace.logits, sink.trace.hidden = b"".join(sink.logits), b"".join(sink.hidden)
    sink.trace.states = b"".join(sink.states)
    return from_bytes(to_bytes(sink.trace))


def replayed(history: Replay, ideal: Ideal) -> Trace:
    """Decode a reference's history as the shim's rd_replay does: calls as words of code, length and arguments."""
    words, logits, hidden, states = array("i", history.words), [], [], []
    ideal.new_context(history.params)
    at = 0
    while at < len(words):
        code, n = words[at : at + 2]
        args = words[at + 2 : at + 2 + n]
        at += 2 + n
        if code == 4:
            blob = ideal.seq_get(1, args[0], 0, 0)[1]
            states.append(len(blob).to_bytes(8, "little") + blob)
            continue
        if code:
            [ideal.seq_rm, ideal.seq_add, ideal.seq_div][code - 1](1, *args)  # type: ignore[operator]
            continue
        seq, pos, out, *tokens = args
        k = len(tokens)
        assert k <= history.params.n_batch
        if ideal.decode(1, tokens, range(pos, pos + k), [seq] * k, [1] * k):
            return Trace([], [], End("error", 0, "refused"))
        for i in range(k) if out == 2 else [k - 1] if out == 1 else []:
            logits.append(ideal.logits(1, i, N_VOCAB))
            hidden.append(ideal.hidden(1, i, N_EMBD) if history.params.embeddings else b"")
    assert len(logits) == history.rows
    rows, more = b"".join(logits), b"".join(hidden)
    return Trace([], [], End("ok"), logits=rows, hidden=more, states=b"".join(states))


class IdealSandbox:
    """What `oracles.judge` needs of a sandbox. `fault` True plants the subclass in subject runs, not in references."""

    driver = None  # no library

    def __init__(self, memory: str = "dense", broken: type[Ideal] = Ideal) -> None:
        self.memory, self.broken = memory, broken
        self.programs: list[Scenario] = []

    def run(self, scenario: Scenario, model: Path, *, fresh: bool = True, fault: str = "") -> Trace:
        self.programs.append(scenario)
        return run(scenario, self.broken(self.memory) if fault else Ideal(self.memory))

    def run_many(self, scenarios: Sequence[Scenario], model: Path, *, fresh: bool = True) -> list[Trace]:
        return [self.run(s, model) for s in scenarios]

    def replay_many(self, histories: Sequence[Replay]) -> list[Trace]:
        return [replayed(h, Ideal(self.memory)) for h in histories]


def ideal_judge(memory: str = "dense", broken: type[Ideal] = Ideal) -> Judge:
    """A judge over an ideal library; `fault="x"` judges the broken one against ideal references."""
    return Judge(IdealSandbox(memory, broken), MODEL, Path("none"), "ideal")  # type: ignore[arg-type]
