"""Drivers without native code: `DriverTape` writes the trace of a program with a driver down by hand, `IdealDriver` is
a speculative driver without faults in plain Python.

What the ideal driver drafts is a pure function of the tokens behind which a sequence stands, whatever rounds,
rollbacks and restores led there: hidden rows are kept position by position, so that a cut is no news, and all is
offered as state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fakes
import msgspec
import numpy as np
from fakes import GONE, MODEL, N_EMBD, N_VOCAB, Ideal, _Sink, facts_of, replayed

from oracles.account import Account
from oracles.drive import Bands, Driven, DriverBands
from oracles.judge import Judge
from oracles.ledger import Ledger
from oracles.lines import LEARNS, DraftClaim, Drive, Line, read
from subjects.child import Replay
from subjects.drivers import DraftAsk
from subjects.driving import DriverRunner
from subjects.runner import Refused
from subjects.scenario import (
    OPEN,
    PIECES,
    Accept,
    AnyOp,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    Edge,
    Mangle,
    Mangling,
    Part,
    Piece,
    Propose,
    Reopen,
    Rewind,
    Route,
    Scenario,
    SeqRm,
    Verify,
)
from subjects.trace import Batch, Blob, End, Facts, Row, Step, Tap, TapRow, Trace, from_bytes, to_bytes

Tokens = tuple[int, ...]
HIDDEN = np.arange(N_EMBD, dtype=np.float32).tobytes()


class DriverTape:
    """A trace by hand: every call says what was asked and what was answered. What a caller keeps (tokens, the draft) is
    kept here; positions are honest ones unless `pos` and `draft_pos` say otherwise.
    """

    def __init__(
        self,
        kind: str = "draft-mtp",
        memory: str = "dense",
        params: ContextParams | None = None,
        *,
        shares: bool = False,
        offers: bool = False,
        **driver: Any,
    ) -> None:
        self.memory, self.shares, self.offers = memory, shares, offers
        self.driver = DriverParams(kind=kind, **driver)  # type: ignore[arg-type]
        self.has_draft = kind.startswith("draft-")
        self.carries = kind in ("draft-mtp", "draft-eagle3")
        self.lag = int(kind == "draft-eagle3")
        self.ops: list[AnyOp] = []
        self.steps: list[Step] = []
        self.rows = 0
        self.slots: dict[int, tuple[Tokens, tuple[int, Tokens] | None, bool]] = {}
        self.all_facts: list[Facts] = []
        self.all_params: list[ContextParams] = []
        self._open(params or ContextParams())

    def _open(self, params: ContextParams) -> None:
        self.params = params
        facts = msgspec.structs.replace(facts_of(self.memory, params), n_draft_max=3, draft_shares=self.shares)
        self.all_facts.append(facts)
        self.all_params.append(params)
        self.tokens: list[Tokens] = [()] * params.n_seq_max
        self.proposals: list[tuple[int, Tokens] | None] = [None] * params.n_seq_max
        self.opened = [False] * params.n_seq_max
        self.seeded = [False] * params.n_seq_max

    # --- steps

    def step(
        self,
        op: AnyOp,
        *args: int,
        pos: dict[int, tuple[int, int]] | None = None,
        draft_pos: dict[int, tuple[int, int]] | None = None,
        **answer: Any,
    ) -> DriverTape:
        """Any operation with its resolved arguments and answer."""
        lengths = [len(t) + self._behind(s) for s, t in enumerate(self.tokens)]
        told = [(0, n - 1) if n else GONE for n in lengths]
        behind = [n - self.lag * (not self.seeded[s]) for s, n in enumerate(lengths)]
        drafts = [(0, n - 1) if n else GONE for n in behind] if self.has_draft else []
        for seq, pair in (pos or {}).items():
            told[seq] = pair
        for seq, pair in (draft_pos or {}).items():
            drafts[seq] = pair
        self.steps.append(
            Step(op=len(self.ops), args=list(args), pos=told, draft_pos=drafts, **{"done": True, **answer})
        )
        self.ops.append(op)
        return self

    def _behind(self, seq: int) -> int:
        """Rows of a verification whose answer is open."""
        p = self.proposals[seq]
        return 1 + len(p[1]) if p is not None and self.opened[seq] else 0

    def _batch(self, parts: Sequence[tuple[int, Tokens]], out: str, rc: int = 0) -> Batch:
        rows = [
            Row(s, len(self.tokens[s]) + j, t, out == "all" or (out == "last" and j == len(tokens) - 1))
            for s, tokens in parts
            for j, t in enumerate(tokens)
        ]
        shown = any(r.out for r in rows) and rc == 0
        batch = Batch(rows, rc, self.rows if shown else -1)
        self.rows += sum(r.out for r in rows) * (rc == 0)
        return batch

    def _processed(self, parts: Sequence[tuple[int, Tokens]]) -> list[Tap]:
        """What the draft context gets: the first row of each sequence with the hidden row that it is paired with."""
        if not self.has_draft:
            return []
        rows = []
        for s, tokens in parts:
            waits = bool(self.lag and self.tokens[s] and not self.seeded[s])
            start = len(self.tokens[s]) - waits
            for j, t in enumerate(tokens[not waits and self.lag :]):
                rows.append(TapRow(t, start + j, s, False, HIDDEN if j == 0 and self.carries else b""))
        return [Tap(0, rows, b"")] if rows else []

    def decode(
        self,
        *parts: tuple[int, Sequence[int]],
        rc: int = 0,
        out: str = "last",
        taps: list[Tap] | None = None,
        **more: Any,
    ) -> DriverTape:
        """One batch of (sequence, tokens) that the target takes and the driver processes; rc -100: the driver fails."""
        pieces = [(s, tuple(t)) for s, t in parts]
        batch = self._batch(pieces, out, 0 if rc == -100 else rc)
        made = self._processed(pieces) if taps is None else taps
        op = Decode(parts=tuple(Part(seq=s, n=len(t), tokens=t) for s, t in pieces))
        for s, t in pieces:
            self.proposals[s] = None
            if rc == 0:
                self.tokens[s] += t
                self.seeded[s] = False
        return self.step(op, rc=rc, batches=[batch], taps=made, **more)

    def propose(
        self,
        *asks: tuple[int, int, Sequence[int]],
        n_max: int = -1,
        rc: int = 1,
        logits: Sequence[Sequence[float]] | None = None,
        **more: Any,
    ) -> DriverTape:
        """(sequence, token behind which it drafts, drafts). `logits`: of one sequence, row by row."""
        taps = []
        for j in range(max((len(d) for _, _, d in asks), default=0) if self.has_draft else 0):
            rows = [
                TapRow(
                    (last, *drafts)[j],
                    len(self.tokens[s]) - self.lag + j,
                    s,
                    True,
                    HIDDEN if j == 0 and self.carries else b"",
                )
                for s, last, drafts in asks
                if j < len(drafts)
            ]
            table = np.zeros((len(rows), N_VOCAB), np.float32) if logits is None else np.array([logits[j]], np.float32)
            taps.append(Tap(0, rows, table.tobytes()))
        for s, last, drafts in asks:
            self.proposals[s] = (last, tuple(drafts))
            self.seeded[s] = True
        op = Propose(seqs=tuple(s for s, _, _ in asks), n_max=n_max)
        return self.step(op, *(a[1] for a in asks), rc=rc, drafts=[list(a[2]) for a in asks], taps=taps, **more)

    def verify(
        self, *taken: tuple[int, int], route: Route = "cut", value: int = 1, open_: bool = False, **more: Any
    ) -> DriverTape:
        """(sequence, how many drafts it takes). By a route other than `cut` those that take fewer are put back, and the
        accepted tokens processed again."""
        parts, again, blobs = [], [], []
        for s, k in taken:
            p = self.proposals[s]
            assert p is not None
            parts.append((s, (p[0], *p[1])))
            if route != "cut" and k < len(p[1]) and not open_:
                again.append((s, (p[0], *p[1][:k])))
                blobs += self._blobs()
        batches, taps = [self._batch(parts, "all")], self._processed(parts)
        if again:
            batches.append(self._batch(again, "all"))
            taps += self._processed(again)
        for s, k in taken:
            if open_:
                self.opened[s] = True
            else:
                self._settle(s, k)
            self.seeded[s] = False
        op = Verify(seqs=tuple(s for s, _ in taken), accept=() if open_ else tuple(k for _, k in taken), route=route)
        args = [] if open_ else [k for _, k in taken]
        return self.step(op, *args, rc=0, batches=batches, taps=taps, value=value, blobs=blobs, **more)

    def _settle(self, seq: int, k: int) -> None:
        p = self.proposals[seq]
        assert p is not None
        self.tokens[seq] += (p[0], *p[1][:k])
        self.proposals[seq], self.opened[seq] = None, False

    def accept(self, seq: int, n: int, value: int = 1) -> DriverTape:
        """The answer to a verification that was left open."""
        self._settle(seq, n)
        return self.step(Accept(seq=seq, n=n), seq, n, value=value)

    def _blobs(self) -> list[Blob]:
        state = Blob(8, 8, "s") if self.offers else Blob(-1, 0, "")
        return [Blob(9, 9, "t"), *([Blob(9, 9, "d")] if self.has_draft else []), state]

    def checkpoint(self, seq: int, slot: int = 0, flags: int = 0) -> DriverTape:
        """Saved everywhere; `offers` says whether the driver gives something."""
        self.slots[slot] = (self.tokens[seq], self.proposals[seq], self.opened[seq])
        return self.step(Checkpoint(seq=seq, slot=slot, flags=flags), slot, seq, flags, blobs=self._blobs())

    def rewind(
        self, seq: int, slot: int = 0, parts: tuple[Piece, ...] = PIECES, rc: int = 1, value: int = 1, **more: Any
    ) -> DriverTape:
        """Parts of a checkpoint put back."""
        if "target" in parts:
            self.tokens[seq], self.proposals[seq], self.opened[seq] = self.slots[slot]
        return self.step(
            Rewind(seq=seq, slot=slot, parts=parts), slot, seq, 0, rc=rc, value=value, blobs=self._blobs(), **more
        )

    def mangle(self, slot: int = 0, how: Mangling = "short") -> DriverTape:
        """The driver's part made malformed."""
        return self.step(Mangle(slot=slot, how=how), slot, blobs=[Blob(7, 7, "m")])

    def begin(self, seq: int = 0) -> DriverTape:
        """A generation begins."""
        return self.step(Begin(seq=seq), seq)

    def rm(self, seq: int = 0, n: int | None = None, rc: int = 1, **more: Any) -> DriverTape:
        """The last n tokens go, all for None."""
        at = 0 if n is None else len(self.tokens[seq]) - n
        if rc:
            self.tokens[seq] = self.tokens[seq][:at]
            self.proposals[seq] = None
            self.seeded[seq] = False
        lo = OPEN if n is None else Edge(at="end", d=-n)
        return self.step(SeqRm(seq=seq, lo=lo), seq, at, -1, rc=rc, **more)

    def reopen(self, params: ContextParams | None = None) -> DriverTape:
        """New contexts."""
        self._open(params or self.params)
        return self.step(Reopen(params=params))

    # --- what becomes of it

    @property
    def scenario(self) -> Scenario:
        """The program of the tape."""
        return Scenario(model=MODEL, params=self.all_params[0], driver=self.driver, ops=tuple(self.ops))

    def trace(self, end: End | None = None) -> Trace:
        """The trace, the target's rows all zero."""
        logits = np.zeros((self.rows, N_VOCAB), np.float32).tobytes()
        return Trace(self.steps, self.all_facts, end or End("ok"), logits=logits, params=self.all_params)

    def read(self) -> tuple[Ledger, Drive]:
        """Its account."""
        return read(self.scenario, self.trace())

    def line(self, seq: int = 0) -> Line:
        """What a sequence must hold at the end."""
        return self.read()[1].lines[-1][seq]

    def claims(self, seq: int = 0) -> list[DraftClaim]:
        """All that is claimed of a sequence's rows and drafts."""
        return [c for c in self.read()[1].claims if c.seq == seq]

    def account(self) -> Account:
        """Its account with the driver's side, in which nothing is held against a reference yet."""
        ledger, drive = self.read()
        return Account(ledger, driven=Driven(drive, self.driver, apart=False))


# --- an ideal driver --------------------------------------------------------------------------------------------------


class Two:
    """Two ideal memories as one shim: the target's is context 1, the draft's context 2."""

    def __init__(self, target: Ideal, draft: Any) -> None:
        self.of: dict[int, Any] = {1: target, 2: draft}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda ctx, *args: getattr(self.of[ctx], name)(ctx, *args)

    def model_facts(self, model: int) -> dict[str, int]:
        return self.of[1].model_facts(model)

    def take_log(self) -> list[str]:
        return []

    def new_context(self, p: ContextParams) -> int:
        return self.of[1].new_context(p)


class View:
    """The draft's context where it looks into the target's memory: there is nothing of its own to save."""

    def __init__(self, target: Ideal) -> None:
        self.target = target

    def positions(self, ctx: int, n_seq: int) -> list[tuple[int, int]]:
        return self.target.positions(ctx, n_seq)

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        return self.target.seq_rm(ctx, seq, p0, p1)

    def seq_size(self, ctx: int, seq: int, flags: int) -> int:
        return 4

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        return 4, b"view"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        return len(blob)

    def free_context(self, ctx: int) -> None:
        pass


def number(*what: object) -> int:
    """A token for the draft's memory that says what a token was paired with."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:6], "big")


class IdealDriver:
    """See the module. Subclasses plant faults. `offers`: whether state() gives something."""

    offers = True

    def __init__(self, two: Two, p: DriverParams, n_seq: int, shares: bool) -> None:
        self.two, self.p, self.shares, self.n_max = two, p, shares, p.n_max
        self.lag = int(p.kind == "draft-eagle3")
        self.hidden = p.kind in ("draft-mtp", "draft-eagle3")
        # of each sequence: the hidden row behind every position, and what a kind that learns has seen
        self.rows: list[dict[int, bytes]] = [{} for _ in range(n_seq)]
        self.learnt: list[list[Any]] = [[] for _ in range(n_seq)]
        self.began = [0] * n_seq  # where the last processed batch began
        self.seeded = [-1] * n_seq  # eagle3: where the last token was drafted behind, nothing processed since
        self.taps: list[Tap] = []
        self.said: list[str] = []

    def before(self, seq: int, pos: int) -> bytes:
        """The hidden row that the token at `pos` is paired with; zeros at the beginning."""
        return self.rows[seq].get(pos - 1, b"?" * (4 * N_EMBD)) if pos else bytes(4 * N_EMBD)

    # --- the interface

    def process(self, rows: Sequence[Row]) -> bool:
        target = self.two.of[1]
        by_seq: dict[int, list[tuple[Row, bytes]]] = {}
        for i, r in enumerate(rows):
            by_seq.setdefault(r.seq, []).append((r, target._row(target.seen[i], N_EMBD, "hidden")))
        fed: list[TapRow] = []
        for seq, mine in by_seq.items():
            self.began[seq] = mine[0][0].pos
            held = self.two.of[2].positions(2, len(self.rows))[seq][1]
            seeded, self.seeded[seq] = (self.seeded[seq] if held >= self.seeded[seq] else -1), -1
            start = True
            for r, h in mine:
                pos = r.pos - self.lag
                paired = self.paired(seq, r.pos, start)
                self.rows[seq][r.pos] = h
                if self.lag and (not r.pos or (seeded == pos and r is mine[0][0])):
                    continue  # there is nothing before it, or it was drafted behind
                fed.append(TapRow(r.token, pos, seq, False, paired if start and self.hidden else b""))
                start = False
                self._feed(r.token, pos, seq, paired)
        if self.p.kind.startswith("draft-") and not self.shares and fed:
            self.taps.append(Tap(0, fed, b""))
        return True

    def paired(self, seq: int, pos: int, start: bool) -> bytes:
        """What a processed token is paired with; `start`: it is its sequence's first in the batch."""
        return self.before(seq, pos)

    def _feed(self, token: int, pos: int, seq: int, paired: bytes) -> None:
        if self.p.kind.startswith("draft-") and not self.shares:
            what = number(token, paired) if self.hidden else token
            self.two.of[2].seq_rm(2, seq, pos, -1)  # eagle3 may have drafted behind another token there
            self.two.of[2].decode(2, [what], [pos], [seq], [1])

    def draft(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        if self.p.kind.startswith("ngram"):
            return [self._remembered(a) for a in asks]
        found: list[list[int]] = [[] for _ in asks]
        row = {a.seq: self.before(a.seq, a.pos0) for a in asks}
        tok = {a.seq: a.last for a in asks}
        going = list(range(len(asks)))
        for a in asks:
            self.seeded[a.seq] = a.pos0 - 1
        for j in range(self.p.n_max):
            fed, table, on = [], [], []
            for i in going:
                a = asks[i]
                pos = a.pos0 - self.lag + j
                first = row[a.seq] if j == 0 and self.hidden else b""
                fed.append(TapRow(tok[a.seq], pos, a.seq, True, first))
                logits, row[a.seq] = self.answer(a, tok[a.seq], pos, row[a.seq], found[i])
                table.append(logits)
                best = np.sort(logits)[-10:].astype(np.float64)
                if 1.0 / np.exp(best - best[-1]).sum() < self.p.p_min:
                    continue
                tok[a.seq] = int(logits.argmax())
                found[i].append(tok[a.seq])
                if self.p.kind != "draft-simple" or len(found[i]) != a.n_max:
                    on.append(i)
            if fed:
                self.taps.append(Tap(0, fed, np.stack(table).tobytes() if not self.p.backend_sampling else b""))
            going = on
        short = [[] if len(f) < self.p.n_min else f for f in found]
        return [f[: a.n_max] if a.n_max > 0 else f for f, a in zip(short, asks, strict=True)]

    def answer(self, a: DraftAsk, token: int, pos: int, row: bytes, so_far: list[int]) -> tuple[Any, bytes]:
        """Logits and hidden row behind one drafted token."""
        if self.shares:
            content: object = (self.two.of[1].seqs[a.seq], row, a.last, so_far)
        else:
            self._feed(token, pos, a.seq, row)
            content = self.two.of[2].seen[0]
        logits, h = (
            self.two.of[1]._row(repr(content), N_VOCAB, "draft"),
            self.two.of[1]._row(repr(content), N_EMBD, "h"),
        )  # type: ignore[arg-type]
        return np.frombuffer(logits, np.float32), h

    def _remembered(self, a: DraftAsk) -> list[int]:
        if self.p.kind in LEARNS:
            self.learnt[a.seq].append([list(a.prompt), a.last])
        n = number(self.learnt[a.seq], list(a.prompt), a.last)
        drafts = [(n >> 6 * j) % N_VOCAB for j in range(min(n % 5, self.p.n_max))]
        return drafts[: a.n_max] if a.n_max > 0 else drafts

    def accept(self, seq: int, n: int) -> None:
        if self.p.kind in LEARNS:
            self.learnt[seq].append(n)

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        if self.p.kind in LEARNS:
            self.learnt[seq].append("begin")

    def state(self, seq: int) -> bytes | None:
        if not self.offers or not (self.hidden or self.p.kind in LEARNS):
            return None
        rows = {str(p): h.hex() for p, h in self.rows[seq].items()}
        body = json.dumps([rows, self.learnt[seq], self.seeded[seq], self.began[seq]]).encode()
        return hashlib.sha256(body).digest() + body

    def restore(self, seq: int, blob: bytes) -> None:
        if hashlib.sha256(blob[32:]).digest() != blob[:32]:
            self.said.append("this is no state of mine")
            return
        rows, self.learnt[seq], self.seeded[seq], self.began[seq] = json.loads(blob[32:])
        self.rows[seq] = {int(p): bytes.fromhex(h) for p, h in rows.items()}

    def take(self) -> list[Tap]:
        taps, self.taps = self.taps, []
        return taps

    def log(self) -> list[str]:
        said, self.said = self.said, []
        return said

    def close(self) -> None:
        pass


def run(
    scenario: Scenario,
    memory: str = "dense",
    driver: type[IdealDriver] = IdealDriver,
    target: type[Ideal] = Ideal,
    draft: type[Ideal] = Ideal,
    *,
    shares: bool = False,
) -> Trace:
    """Run a program with a driver on ideal memories, in this process: there is nothing native in it."""
    assert scenario.driver is not None
    p, sink = scenario.driver, _Sink()
    first = target(memory)
    two = Two(first, View(first) if shares else draft("dense"))

    def draft_context(params: ContextParams, _: int) -> int:
        if not p.kind.startswith("draft-"):
            two.of[2].new_context(params)
            return 0
        return 2 if shares else two.of[2].new_context(params) + 1

    runner = DriverRunner(
        two,  # type: ignore[arg-type]
        1,
        sink,
        two.new_context,
        draft_context=draft_context,
        make=lambda _, __, n_seq: driver(two, p, n_seq, shares),
        shares=lambda _, __: shares,
    )
    try:
        runner.run_driver(scenario)
    except Refused as e:
        sink.trace.end = End("error", 0, str(e))
    sink.trace.logits = b"".join(sink.logits)
    return from_bytes(to_bytes(sink.trace))


class DriverSandbox:
    """What `oracles.judge` needs of a sandbox. With `fault` the given classes are planted, never in references."""

    driver = None  # no library

    def __init__(self, memory: str, *, shares: bool = False, **planted: Any) -> None:
        self.memory, self.shares, self.planted = memory, shares, planted

    def run(self, scenario: Scenario, model: Path, *, fresh: bool = True, fault: str = "") -> Trace:
        if scenario.driver is None:  # what bands are measured with
            return fakes.run(scenario, Ideal(self.memory))
        return run(scenario, self.memory, shares=self.shares, **(self.planted if fault else {}))

    def run_many(self, scenarios: Sequence[Scenario], model: Path, *, fresh: bool = True) -> list[Trace]:
        return [self.run(s, model) for s in scenarios]

    def replay_many(self, histories: Sequence[Replay]) -> list[Trace]:
        return [replayed(h, Ideal(self.memory)) for h in histories]


class Fixed(DriverBands):
    """Bands that nobody measures: an ideal driver has no noise, and measuring says so each time anew."""

    def __init__(self) -> None:
        pass

    def band(self, params: ContextParams, driver: DriverParams, *, apart: bool) -> Bands:
        return Bands(1e-4, 1e-4)


def driver_judge(memory: str = "dense", *, shares: bool = False, measured: bool = False, **planted: Any) -> Judge:
    """A judge over ideal memories and driver; `fault="x"` judges the planted ones (driver, target, draft)."""
    judge = Judge(DriverSandbox(memory, shares=shares, **planted), MODEL, Path("none"), "ideal")  # type: ignore[arg-type]
    if not measured:
        judge.driver_bands = Fixed()
    return judge
