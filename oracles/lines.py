"""The ledger of programs with a driver: what target memory, draft memory and driver hold of every sequence.

A sequence has three holders: the target's memory, the draft's memory, and what the driver carries between calls (the
hidden row that its next token is paired with). They are in step when all three stand behind the same tokens; then the
draft is a function of these tokens and the next one alone, whatever rounds, rollbacks and restores led there, and that
is what is claimed. Where the caller left a part out of a restore that the driver offers, nothing is claimed. Where the
driver offers no state, the restore is held to what it must do all the same: it is the driver that keeps the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from oracles.ledger import EMPTY, WINDOW_GONE, History, Ledger, Moment, RowClaim, Seg, cut, window_need
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    Accept,
    Ask,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    Mangle,
    Op,
    Propose,
    Reopen,
    Rewind,
    Scenario,
    SeqRm,
    Verify,
)
from subjects.trace import Batch, Floats, Step, Tap, Trace

Tokens = tuple[int, ...]
# ngram kinds that learn while they draft: what they must answer depends on their own calls, not on the tokens alone
LEARNS = ("ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
CARRIES = ("draft-mtp", "draft-eagle3")
# parameters of a context into which a state of another one must fit
MUST_FIT = ("kv_unified", "n_seq_max", "type_k", "type_v", "flash_attn", "swa_full", "n_ctx")


@dataclass(frozen=True, slots=True)
class Event:
    """A call of the driver, for a reference of a kind that learns to repeat."""

    what: str
    tokens: Tokens = ()
    n: int = 0


LOST = Event("lost")
"""What a driver that learns has gone through is not known."""


NOWHERE: Tokens = (-1,)
"""Behind no tokens that there can be."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one sequence must hold.

    history: in the target's memory. draft: behind which tokens the draft's memory stands, None for none that is known;
    carry: the same of the row that the driver carries. undefined: why nothing can be said. open: tokens before the
    verification that is still open (-1 for none), opened: by which operation. proposed: the drafts of its last proposal
    (None for none), made behind `last`. seeded: the last position of the draft's memory is filled (eagle3 is one behind
    until it drafts). shaped: operations other than decodes and drafts that it went through. unoffered: the last restore
    had no state of the driver to put back. was_cut: a tail went, and no call tells the driver. events: calls of the
    driver, for kinds that learn.
    """

    history: History = EMPTY
    draft: Tokens | None = ()
    carry: Tokens = ()
    undefined: str = ""
    open: int = -1
    opened: int = -1
    last: int = -1
    proposed: Tokens | None = None
    seeded: bool = False
    shaped: tuple[int, ...] = ()
    unoffered: bool = False
    was_cut: bool = False
    events: tuple[Event, ...] = ()

    @property
    def tokens(self) -> Tokens:
        """Tokens in the target's memory."""
        return self.history.tokens() or ()

    def rewound_open(self, ops: Sequence[Op]) -> bool:
        """It was put back, out of the program `ops`, since its last verification was left open."""
        return any(i > self.opened and isinstance(ops[i], Rewind) for i in self.shaped)


@dataclass(frozen=True, slots=True)
class Given:
    """What the trace shows of one claim: the paired row (None where it cannot be seen) and draft logits, row by row."""

    hidden: Floats | None
    logits: Floats


@dataclass(frozen=True, slots=True)
class DraftClaim:
    """Sequence `seq` stands behind `line.tokens` and was asked to draft behind `last` (-1: only the paired row was
    seen). `pos`: position of the paired row, `want_pos` where it must be."""

    step: int
    seq: int
    line: Line
    last: int
    n_max: int
    drafts: Tokens
    given: Given
    pos: int
    want_pos: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What a checkpoint must give back."""

    line: Line
    flags: int
    offered: bool
    epoch: int
    seq: int
    params: ContextParams
    mangled: str = ""
    number: int = -1


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that had to be taken was not: in which step, for which sequence, `failed` or `refused`, and in words."""

    step: int
    seq: int
    key: str
    because: str


@dataclass(slots=True)
class Drive:
    """The driver's part of the account of one trace.

    claims: what must be drafted, or paired. unknown: why nothing was claimed. refusals: malformed states that were
    handed over, as (step, how, whether a line of the log told of it). refused: calls that had to be taken and were not.
    lines: what every sequence must hold after each step.
    """

    claims: list[DraftClaim] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    refusals: list[tuple[int, str, bool]] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    lines: list[dict[int, Line]] = field(default_factory=list)


def read(scenario: Scenario, trace: Trace) -> tuple[Ledger, Drive]:
    """Fold a trace into its account; rows of the target are claimed as those of plain decoding are."""
    fold = _Fold(scenario, trace)
    for step in trace.steps:
        fold.step(step)
    return fold.ledger, fold.drive


class _Fold:
    def __init__(self, scenario: Scenario, trace: Trace):
        assert scenario.driver is not None
        self.ledger, self.drive = Ledger(scenario, trace), Drive()
        self.kind, self.uses_state = scenario.driver.kind, scenario.driver.state
        self.kept: dict[int, Kept] = {}
        self.epoch = -1
        self.saves = 0
        self.device: dict[int, int] = {}
        self._open()

    def _open(self) -> None:
        self.epoch += 1
        trace = self.ledger.trace
        i = min(self.epoch, len(trace.facts) - 1)
        self.facts, self.params = trace.facts[i], trace.params[i]
        self.lines = {s: Line() for s in range(self.params.n_seq_max)}
        self.device.clear()

    def step(self, step: Step) -> None:
        """Take one step."""
        op = self.ledger.scenario.ops[step.op]
        before = {s: line.history for s, line in self.lines.items()}
        m = Moment(step, op, self.facts, self.params, dict(before))
        self.ledger.moments.append(m)
        if step.done and not step.skipped:
            was = dict(self.lines)
            _RULES[type(op)](self, op, m)
            m.touched = frozenset(s for s, line in self.lines.items() if was.get(s) != line)
            if isinstance(op, Reopen):
                m.facts, m.params = self.facts, self.params
        m.after = {s: line.history for s, line in self.lines.items()}
        self.drive.lines.append(dict(self.lines))

    # --- decoding -----------------------------------------------------------------------------------------------------

    def _rows(self, batch: Batch, m: Moment, firsts: dict[int, tuple[int, Floats]]) -> None:
        """A batch that the target took and the driver processed."""
        by_seq: dict[int, list[tuple[int, int, int]]] = {}
        k = 0
        for r in batch.rows:
            number = batch.first + k if r.out and batch.first >= 0 else -1
            k += r.out
            by_seq.setdefault(r.seq, []).append((r.pos, r.token, number))
        for seq, rows in by_seq.items():
            line = self.lines[seq]
            if rows[0][0] != line.history.length:
                self.lines[seq] = replace(line, undefined="decoded at a position that the ledger does not expect")
                continue
            line = self._heard(line, m.step)
            self._claim_first(line, seq, firsts.get(seq), m)
            self.lines[seq] = self._extend(line, seq, rows, m, mixed=len(by_seq) > 1)

    def _heard(self, line: Line, step: Step) -> Line:
        """After a cut, of which no call tells the driver, a warning is as good as being right."""
        return replace(line, was_cut=False) if line.was_cut and line.carry != line.tokens and step.log else line

    def _expects(self, line: Line) -> str:
        """Why nothing is claimed of the row that the driver carries, "" when something is."""
        if line.undefined:
            return line.undefined
        if self.kind in CARRIES and line.carry != line.tokens and line.history.length and not line.was_cut:
            return "the driver carries a row of other tokens"
        return ""

    def _claim_first(self, line: Line, seq: int, first: tuple[int, Floats] | None, m: Moment) -> None:
        """The first row of a processed batch is paired with the row that the driver carries."""
        if self.kind not in CARRIES or self.facts.draft_shares:
            return
        lag = int(self.kind == "draft-eagle3")
        if lag and (line.seeded or not line.history.length):
            return  # nothing is waiting: the batch begins with a row of its own
        if reason := self._expects(line):
            self.drive.unknown.append(reason)
            return
        pos, hidden = first or (-1, np.empty(0, np.float32))
        none = np.empty((0, 0), np.float32)
        self.drive.claims.append(
            DraftClaim(m.step.op, seq, line, -1, -1, (), Given(hidden, none), pos, line.history.length - lag)
        )

    def _extend(self, line: Line, seq: int, rows: list[tuple[int, int, int]], m: Moment, *, mixed: bool) -> Line:
        h = line.history
        new = tuple(t for _, t, _ in rows)
        shown = [number for _, _, number in rows if number >= 0]
        out: str = "none" if not shown else "all" if len(shown) == len(rows) else "last"
        seg = Seg(h.length, new, out)  # type: ignore[arg-type]
        kinds = h.kinds | ({"mixed"} if mixed else set())
        if self.params.kv_unified and any(x.history.length for s, x in self.lines.items() if s != seq):
            kinds |= {"cells"}
        items = (*h.items, seg)
        if not line.undefined:
            for j, (pos, _, number) in enumerate(rows):
                if number >= 0:
                    ref = h.outputs + (j if out == "all" else 0)
                    self.ledger.rows.append(
                        RowClaim(m.step.op, number, seq, items, ref, frozenset(kinds), line.shaped, True, False, pos,
                                 self.params)
                    )  # fmt: skip
        history = History(items, h.length + len(new), h.shaped, frozenset(kinds), None, False, h.outputs + len(shown))
        tokens = history.tokens() or ()
        in_step = line.draft == line.tokens
        if self.kind in CARRIES and line.history.length and not line.was_cut:
            in_step = in_step and line.carry == line.tokens
        if self.kind == "draft-eagle3" and line.seeded and rows[0][1] != line.last:
            in_step = False  # its memory has the token that it drafted behind, and another one came
        return replace(
            line,
            history=history,
            draft=tokens if in_step or self.facts.draft_shares else None,
            carry=tokens,
            proposed=None,
            seeded=False,
            was_cut=False,
            events=(*line.events, Event("decode", new)),
        )

    def _decode(self, op: Decode, m: Moment) -> None:
        self._batches(m)

    def _batches(self, m: Moment) -> bool:
        """Take the step's batches in turn; False when one was not taken."""
        taps = list(m.step.taps)
        for batch in m.step.batches:
            if batch.rc != 0 or m.step.rc == -100:
                self._failed(batch, m)
                return False
            self._rows(batch, m, _firsts(taps, {r.seq for r in batch.rows}))
        return True

    def _failed(self, batch: Batch, m: Moment) -> None:
        """The target or the driver did not take a batch, which it must where all its sequences are as they should be
        and there is room."""
        seqs = sorted({r.seq for r in batch.rows})
        if not any(self._lost(self.lines[s]) for s in seqs) and self._room(len(batch.rows)):
            what = "the driver did not process it" if m.step.rc == -100 else f"llama_decode returned {batch.rc}"
            self.drive.refused.append(Refusal(m.step.op, seqs[0], "failed", f"must be taken; but {what}"))
        for seq in seqs:
            kept = self.lines[seq].proposed if isinstance(m.op, Verify) else None
            self.lines[seq] = replace(self.lines[seq], undefined="a decode failed", proposed=kept)

    def _room(self, rows: int) -> bool:
        """Whether so many rows more fit in any case; nothing is sure beside a sequence that is undefined."""
        if any(line.undefined for line in self.lines.values()):
            return False
        held = sum(line.history.length for line in self.lines.values())
        return not self.params.kv_unified or held + rows <= self.facts.n_ctx

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _lost(self, line: Line) -> bool:
        """Nothing is sure of what a sequence brings into a batch of drafts."""
        astray = self.kind in CARRIES and line.history.length > 0 and line.carry != line.tokens
        return bool(line.undefined) or line.draft != line.tokens or astray

    def _propose(self, op: Propose, m: Moment) -> None:
        # one batch for all: a sequence that cannot be decoded takes the others with it
        lost = [s for s in op.seqs if self._lost(self.lines[s])]
        for seq, last, drafts in zip(op.seqs, m.step.args, m.step.drafts, strict=True):
            line = self._heard(self.lines[seq], m.step)
            reason = self._expects(line)
            if not reason and line.open >= 0:
                reason = "a verification is open"
            if not reason and not self.facts.draft_shares and any(s != seq for s in lost):
                reason = "drafted together with a sequence that is undefined"
            if not reason and not line.history.length:
                reason = "there is nothing to draft from"
            if not reason and self.kind == "ngram-mod" and sum(bool(x.events) for x in self.lines.values()) > 1:
                reason = "ngram-mod shares on purpose what it learns"
            if not reason and LOST in line.events:
                reason = "the driver has learnt from other tokens"
            if not reason and line.draft != line.tokens and not self.facts.draft_shares:
                reason = "the draft's memory holds other tokens"
            if reason:
                self.drive.unknown.append(reason)
            else:
                pos, got = given(m.step, seq, self.facts.n_vocab, self.kind in CARRIES)
                lag = int(self.kind == "draft-eagle3")
                self.drive.claims.append(
                    DraftClaim(m.step.op, seq, line, last, op.n_max, tuple(drafts), got, pos, line.history.length - lag)
                )
            if self.kind == "draft-eagle3" and (line.carry != line.tokens or any(s != seq for s in lost)):
                # it cuts, and writes, at the position of the row that it carries, and the batch may have failed
                line = replace(line, draft=None)
            self.lines[seq] = replace(
                line,
                last=last,
                proposed=tuple(drafts),
                seeded=True,
                events=(*line.events, Event("propose", (last,), op.n_max)),
            )

    def _verify(self, op: Verify, m: Moment) -> None:
        batches = list(m.step.batches)
        rows = batches[0].rows if batches else []
        mine = list(dict.fromkeys(r.seq for r in rows))
        # as it was handed over, which a line that is undefined need not know
        before = {s: replace(self.lines[s], proposed=tuple(r.token for r in rows if r.seq == s)[1:]) for s in mine}
        m.step.batches = batches[:1]
        ok = self._batches(m)
        m.step.batches = batches
        if not ok:
            return
        again = {r.seq for b in batches[1:] for r in b.rows}
        for s, k in zip(mine, m.step.args, strict=True) if op.accept else []:
            was = before[s]
            if s in again:
                self._back(s, was, op, m)
            else:
                self._taken(s, was, k, m, rolled=k < len(was.proposed or ()))
        if not op.accept:
            for s in mine:
                self.lines[s] = replace(
                    self.lines[s],
                    open=before[s].history.length,
                    opened=m.step.op,
                    proposed=before[s].proposed,
                    last=before[s].last,
                    events=before[s].events,  # its answer is the event, which decodes the rows again
                )
        for batch in batches[1:]:
            if batch.rc != 0 or m.step.rc == -100:
                self._failed(batch, m)
                continue
            taps = m.step.taps[len(m.step.taps) // 2 :]  # as many for each batch
            self._rows(batch, m, _firsts(taps, {r.seq for r in batch.rows}))
            for s in {r.seq for r in batch.rows}:
                n = sum(r.seq == s for r in batch.rows) - 1
                self.lines[s] = replace(self.lines[s], events=(*before[s].events, Event("verify", (), n)))

    def _back(self, seq: int, was: Line, op: Verify, m: Moment) -> None:
        """The sequence was put back to where it was before the batch."""
        offered = self.kind not in CARRIES or m.step.blobs[-1].size >= 0
        h = replace(was.history, kinds=was.history.kinds | {"cells", "split"})
        unoffered = not offered or (was.unoffered and self.kind in LEARNS)
        if not self.uses_state and not offered:  # it is the caller who leaves it out
            was, unoffered = replace(was, draft=None), False
        if not m.step.value and not was.undefined:
            self.drive.refused.append(
                Refusal(m.step.op, seq, "refused", "must go back to what was saved before it; but a part was refused")
            )
            was = replace(was, undefined="a part was refused")
        self.lines[seq] = replace(was, history=h, proposed=None, shaped=(*was.shaped, m.step.op), unoffered=unoffered)

    def _taken(self, seq: int, was: Line, k: int, m: Moment, *, rolled: bool) -> None:
        line = self.lines[seq]
        at = was.history.length + 1 + k
        tokens = line.tokens[:at]
        line = replace(
            line,
            history=cut(line.history, at) if rolled else line.history,
            draft=tokens if line.draft is not None else None,
            carry=tokens,
            events=(*was.events, Event("verify", (), k)),
        )
        if rolled:
            # what a driver has learnt stays wrong, a row is taken anew
            unoffered = line.unoffered and self.kind in LEARNS
            line = replace(line, shaped=(*line.shaped, m.step.op), unoffered=unoffered)
        if rolled and self._stale(m, was):
            line = replace(line, undefined="rolled back further than the last ubatch (known fault stale-rollback)")
        if not m.step.value:
            if rolled and not line.undefined and not was.undefined:
                self.drive.refused.append(
                    Refusal(m.step.op, seq, "refused", "must lose what was rejected; but a removal was refused")
                )
            line = replace(line, undefined="a removal was refused")
        if rolled:
            line = self._window(line, seq, m.step)
        self.lines[seq] = line

    def _window(self, line: Line, seq: int, step: Step) -> Line:
        """A cut behind which the next token needs cells that a sliding window no longer holds: a saved state has the
        window of its own end only, with swa_full too."""
        n = line.history.length
        if not self.facts.n_swa or not n or not step.pos or line.undefined:
            return line
        draft = step.draft_pos[seq] if step.draft_pos else (-1, -1)
        own = self.kind.startswith("draft-") and not self.facts.draft_shares
        # cut to before the window of what was put back, a memory is empty
        empty = own and draft[1] < 0 and n > int(self.kind == "draft-eagle3") and bool(line.draft and line.shaped)
        gone = max(step.pos[seq][0], draft[0]) > window_need(range(n), self.facts.n_swa)
        return replace(line, undefined=WINDOW_GONE) if gone or empty else line

    def _stale(self, m: Moment, was: Line) -> bool:
        """Recurrent parts go back within the sequence's last ubatch only; sequences of unequal length share one."""
        if not (self.facts.recurrent or self.facts.hybrid):
            return False
        made = m if m.step.batches else self.ledger.moments[was.opened]  # an open verification's batch came earlier
        rows = [r for b in made.step.batches[:1] for r in b.rows]
        if not rows:
            return False
        counts = {s: sum(r.seq == s for r in rows) for s in {r.seq for r in rows}}
        return len(set(counts.values())) > 1 or len(rows) > self.facts.n_ubatch

    def _accept(self, op: Accept, m: Moment) -> None:
        line = self.lines[op.seq]
        k = m.step.args[1]
        if line.proposed is None or line.open < 0:
            self.lines[op.seq] = replace(line, undefined="accepted what the ledger does not know of")
            return
        rolled = k < len(line.proposed)
        was = replace(line, history=cut(line.history, line.open))
        unoffered, shaped = line.unoffered, line.shaped
        self._taken(op.seq, was, k, m, rolled=rolled)
        if rolled or line.rewound_open(self.ledger.scenario.ops):  # with all of it taken nothing is taken back
            shaped = (*shaped, m.step.op)
        after = replace(self.lines[op.seq], open=-1, proposed=None, shaped=shaped, unoffered=unoffered)
        if self.kind in CARRIES and line.carry != line.tokens:
            after = replace(after, undefined="the driver was put back without the rows of its open verification")
        if (
            rolled
            and (self.facts.recurrent or self.facts.hybrid)
            and any(isinstance(self.ledger.scenario.ops[i], Rewind) for i in shaped)
        ):
            after = replace(after, undefined="rolled back behind a restore, where no earlier state is kept")
        between = [x for x in self.ledger.moments if line.opened < x.step.op < m.step.op and x.step.batches]
        if rolled and (self.facts.recurrent or self.facts.hybrid) and between:
            after = replace(after, undefined="rolled back after other decodes (known fault moved-rollback)")
        self.lines[op.seq] = after

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _checkpoint(self, op: Checkpoint, m: Moment) -> None:
        offered = m.step.blobs[-1].size >= 0
        self.saves += 1
        if op.flags & ON_DEVICE:
            self.device[op.seq] = self.saves
        self.kept[op.slot] = Kept(
            self.lines[op.seq], op.flags, offered, self.epoch, op.seq, self.params, "", self.saves
        )

    def _mangle(self, op: Mangle, m: Moment) -> None:
        self.kept[op.slot] = replace(self.kept[op.slot], mangled=op.how)

    def _rewind(self, op: Rewind, m: Moment) -> None:
        kept = self.kept[op.slot]
        line, saved = _known(self.lines[op.seq]), _known(kept.line)
        want = saved.tokens
        undefined = saved.undefined if "target" in op.parts else line.undefined
        if kept.flags & ON_DEVICE and (kept.epoch != self.epoch or self.device.get(op.seq) != kept.number):
            undefined = undefined or "an older or foreign handle of the device"
        if kept.flags & PARTIAL and line.tokens[: len(want)] != want:
            undefined = undefined or "partial restore onto something that does not hold the saved prefix"
        if not m.step.rc or not m.step.value:
            same = all(getattr(kept.params, k) == getattr(self.params, k) for k in MUST_FIT)
            if not undefined and not line.undefined and same and self._room(saved.history.length):
                self.drive.refused.append(
                    Refusal(m.step.op, op.seq, "refused", "must be put back; but a restore or a removal was refused")
                )
            undefined = undefined or "a part was refused"
        if "target" in op.parts:
            kinds = saved.history.kinds | {"cells", "split"}
            history = replace(saved.history, kinds=kinds)
            moved = (kept.seq, kept.epoch) != (op.seq, self.epoch)  # the caller leaves its draft behind
            base = replace(saved, history=history, proposed=None if moved else saved.proposed)
        else:
            history, base = line.history, line
        n = history.length
        draft = saved.draft if "draft" in op.parts else line.draft
        draft = draft if draft is None else draft[:n]
        if kept.flags & PARTIAL and "draft" in op.parts and (line.draft or ())[: len(want)] != want:
            draft = None  # what a partial state of the draft leaves out is not there
        alone = self.facts.draft_shares or self.kind in LEARNS  # there is no memory of a draft
        # what is there to be put back at all
        there = {"target", *([] if alone else ["draft"]), *(["driver"] if kept.offered or kept.mangled else [])}
        everything = "target" in op.parts and ("draft" in op.parts or alone)
        carry = line.carry
        unoffered = False
        if "driver" in op.parts and kept.mangled:
            self.drive.refusals.append((m.step.op, kept.mangled, bool(m.step.log)))
        elif "driver" in op.parts and kept.offered:
            carry = saved.carry
        elif not kept.offered and everything and self.uses_state and self.kind in (*CARRIES, *LEARNS):
            carry = saved.carry
            unoffered = line.carry != carry or line.unoffered or self.kind in LEARNS or base.open >= 0
        if (
            self.kind in LEARNS
            and kept.offered
            and ("target" in op.parts) != ("driver" in op.parts and not kept.mangled)
        ):
            base = replace(base, events=(LOST,))  # the caller put one back without the other
        seeded, last = (saved.seeded, saved.last) if "draft" in op.parts else (line.seeded, line.last)
        if "draft" not in op.parts and (line.draft is None or len(line.draft) > n):
            # what is left of a longer draft memory ends with the token that came
            seeded, last = True, -1 if line.draft is None else line.draft[n]
        self.lines[op.seq] = replace(
            base,
            history=history,
            draft=draft,
            carry=carry,
            undefined=undefined,
            seeded=seeded,
            last=last,
            shaped=(*line.shaped, *([m.step.op] if there & set(op.parts) else [])),
            unoffered=unoffered,
        )
        self.lines[op.seq] = self._window(self.lines[op.seq], op.seq, m.step)  # a part that stays was only cut

    def _seq_rm(self, op: SeqRm, m: Moment) -> None:
        line = self.lines[op.seq]
        at = m.step.args[1]
        if not m.step.rc:
            whole = at == 0
            if whole or not (line.undefined or self.facts.recurrent or self.facts.hybrid):
                self.drive.refused.append(
                    Refusal(m.step.op, op.seq, "refused", "must be removed from both memories; but it was refused")
                )
            self.lines[op.seq] = replace(line, undefined="a removal was refused in one of the memories")
            return
        if at == 0:
            # nothing of what was there before may matter from here on
            self.lines[op.seq] = Line(shaped=(*line.shaped, m.step.op))
            return
        if at >= line.history.length:
            return
        undefined = line.undefined
        if self.facts.recurrent or self.facts.hybrid:
            undefined = undefined or "a recurrent state was cut outside a round"
        draft = line.draft[:at] if line.draft is not None else None
        # what is left of the longer memory of an eagle3 draft ends with the token that came
        seeded = self.kind == "draft-eagle3" and line.draft is not None and len(line.draft) > at
        self.lines[op.seq] = replace(
            line,
            history=cut(line.history, at),
            draft=draft,
            proposed=None,
            undefined=undefined,
            was_cut=self.kind in CARRIES,
            shaped=(*line.shaped, m.step.op),
            unoffered=line.unoffered and self.kind in LEARNS,
            seeded=seeded,
            last=line.draft[at] if seeded and line.draft is not None else line.last,
            events=(LOST,) if self.kind in LEARNS else line.events,
        )
        self.lines[op.seq] = self._window(self.lines[op.seq], op.seq, m.step)

    def _begin(self, op: Begin, m: Moment) -> None:
        line = self.lines[op.seq]
        self.lines[op.seq] = replace(line, events=(*line.events, Event("begin")))

    def _reopen(self, op: Reopen, m: Moment) -> None:
        self._open()

    def _ask(self, op: Ask, m: Moment) -> None:
        pass


def _known(line: Line) -> Line:
    """Of an undefined line draft and driver are not known either: they may stay where the target is put back."""
    return replace(line, draft=None, carry=NOWHERE) if line.undefined else line


def _firsts(taps: Iterable[Tap], seqs: set[int]) -> dict[int, tuple[int, Floats]]:
    """(position, paired row) of the first row of each sequence that went into the draft context."""
    found: dict[int, tuple[int, Floats]] = {}
    for _, rows, _ in taps:
        for _, pos, seq, _, hidden in rows:
            if seq in seqs and seq not in found and hidden:
                found[seq] = (pos, np.frombuffer(hidden, np.float32))
        break
    return found


def given(step: Step, seq: int, n_vocab: int, carries: bool) -> tuple[int, Given]:
    """What a proposal shows of one sequence: position and row of its first pairing, and logits draft by draft."""
    pos, hidden = -1, None
    logits: list[Floats] = []
    for _, rows, data in step.taps:
        k = 0
        table = np.frombuffer(data, np.float32).reshape(-1, n_vocab) if data else None
        for r in rows:
            if r.seq == seq and pos < 0:
                pos = r.pos
                hidden = np.frombuffer(r.hidden, np.float32) if r.hidden and carries else None
            if r.out:
                if r.seq == seq and table is not None and k < len(table):
                    logits.append(table[k])
                k += 1
    return pos, Given(hidden, np.stack(logits) if logits else np.empty((0, n_vocab), np.float32))


_RULES: dict[type[Op], Callable[..., None]] = {
    Decode: _Fold._decode,
    Propose: _Fold._propose,
    Verify: _Fold._verify,
    Accept: _Fold._accept,
    Checkpoint: _Fold._checkpoint,
    Rewind: _Fold._rewind,
    Mangle: _Fold._mangle,
    Begin: _Fold._begin,
    SeqRm: _Fold._seq_rm,
    Reopen: _Fold._reopen,
    Ask: _Fold._ask,
}
