"""The calls of a traced program with a driver as C++ statements, one after the other, with what they resolved to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fuzz.repro import plain
from fuzz.repro.driver_pieces import mangle
from fuzz.repro.python import comment, wrap
from fuzz.repro.words import sentence
from subjects.driving import ROUTE_FLAGS, Proposal, Seat
from subjects.scenario import (
    Accept,
    Ask,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    Mangle,
    Propose,
    Reopen,
    Rewind,
    Scenario,
    SeqRm,
    Verify,
)
from subjects.trace import Batch, Row, Step, Trace

INDENT = "    "


def verified(step: Step) -> dict[int, list[Row]]:
    """The rows of each sequence in the batch of a verification: the token it began with, and its drafts."""
    mine: dict[int, list[Row]] = {}
    for r in step.batches[0].rows if step.batches else []:
        mine.setdefault(r.seq, []).append(r)
    return mine


class Calls:
    """Collects statements on a side called `name`, and keeps of every sequence what a caller keeps.

    names: functions that give context parameters. late: whether the draft context is made late, None where no side of
    the program does that.
    """

    def __init__(
        self, name: str, scenario: Scenario, trace: Trace, names: dict[ContextParams, str], late: bool | None = None
    ):
        self.late = "" if late is None else f", {str(late).lower()}"
        self.name, self.scenario, self.trace, self.names = name, scenario, trace, names
        self.lines: list[str] = []
        self.helpers: set[str] = set()
        self.slots: set[int] = set()
        self.kept: dict[int, Seat] = {}
        self.params = scenario.params
        self.seats: dict[int, Seat] = {}
        self._setup(scenario.params)

    def say(self, text: str) -> None:
        """Statements, one a line, broken where they are long."""
        for line in text.splitlines():
            bare = len(line) - len(line.lstrip())
            self.lines.append(wrap(INDENT + line, INDENT * 2 + " " * bare))

    def note(self, text: str) -> None:
        """A comment."""
        self.lines.append(comment(text, "// ", INDENT))

    def must(self, what: str, expression: str, recorded: int | None) -> None:
        """A call that must answer as it did; None: it is not known what."""
        if recorded is None:
            self.say(f"{expression};")
            return
        self.helpers.add("must")
        self.say(f'must("{what}", {expression}, {recorded});')

    def _setup(self, params: ContextParams) -> None:
        self.params = params
        self.seats = {s: Seat() for s in range(params.n_seq_max)}
        self.say(f"setup({self.name}, {self.names[params]}(){self.late});")

    # --- one operation ------------------------------------------------------------------------------------------------

    def until(self, step: int) -> None:
        """All operations before `step`."""
        for s in self.trace.steps:
            if s.op < step:
                self.step(s)

    def step(self, step: Step, rows: str = "") -> None:
        """One operation; `rows`: where its output rows of the target go."""
        if step.skipped:
            return
        op = self.scenario.ops[step.op]
        self.note(sentence(self.scenario, step))
        match op:
            case Decode():
                self._decode(step, rows)
            case Propose():
                self.propose(op, step)
            case Verify():
                self.verify(op, step, rows)
            case Accept():
                self._accept(op, step)
            case Checkpoint():
                self._checkpoint(op, step)
            case Rewind():
                self.rewind(op, step)
            case Mangle():
                self.say(mangle(op.how, step.args[1], f"slot{op.slot}.spec"))
            case Begin():
                n = len(self.seats[op.seq].tokens)
                text = f"{self.name}.text[{op.seq}]"
                self.say(f"{text}.resize({n});")
                self.say(f"common_speculative_begin({self.name}.spec, {op.seq}, {text});")
            case SeqRm():
                self._remove(op, step)
            case Reopen():
                self.say(f"teardown({self.name});")
                self._setup(op.params or self.params)
            case Ask():
                self.say(self._query(op))
            case _:
                raise TypeError(op)

    # --- decoding -----------------------------------------------------------------------------------------------------

    def decode(self, batch: Batch, rc: int | None, rows: str = "") -> None:
        """One batch on the target, processed by the driver."""
        runs = [
            f"{{ {r.seq}, {r.pos}, {{ {', '.join(map(str, r.tokens))} }}, {r.out} }}" for r in plain.runs(batch.rows)
        ]
        more = f", &{rows}" if rows else ""
        self.must("llama_decode", f"decode({self.name}, {{ {', '.join(runs)} }}{more})", rc)

    def _decode(self, step: Step, rows: str) -> None:
        for batch in step.batches:
            self.decode(batch, step.rc if step.done else None, rows)
            for seq in {r.seq for r in batch.rows}:
                tokens = tuple(r.token for r in batch.rows if r.seq == seq)
                before = self.seats[seq]
                self.seats[seq] = replace(before, proposal=None) if step.rc else Seat((*before.tokens, *tokens))

    def asks(self, op: Propose, step: Step) -> str:
        """What a proposal asks for."""
        pairs = zip(op.seqs, step.args, strict=False)
        asks = [f"{{ {s}, {len(self.seats[s].tokens)}, {last}, {op.n_max} }}" for s, last in pairs]
        return f"{{ {', '.join(asks)} }}"

    def propose(self, op: Propose, step: Step, into: str = "", removed: str = "") -> None:
        """A proposal; into: what its drafts are kept in; removed: where it says whether they were removed."""
        keep = f"const std::vector<llama_tokens> {into} = " if into else ""
        more = f", {removed}" if removed else ""
        self.say(f"{keep}draft({self.name}, {self.asks(op, step)}{more});")
        if step.drafts and not into:
            drafted = "; ".join(" ".join(map(str, d)) if d else "nothing" for d in step.drafts)
            self.note(f"drafted then: {drafted}")
        for i, seq in enumerate(op.seqs):
            if i < len(step.drafts):
                drafts = tuple(step.drafts[i])
                self.seats[seq] = replace(self.seats[seq], proposal=Proposal(step.args[i], drafts))

    # --- rounds -------------------------------------------------------------------------------------------------------

    def verify(self, op: Verify, step: Step, rows: str = "", *, again: bool = True) -> None:
        """A verification with all that follows; not `again`: up to where accepted tokens are processed again."""
        mine = verified(step)
        back = {s: f"back{step.op}_{s}" for s in mine} if op.route != "cut" and op.accept else {}
        for s, slot in back.items():
            self.helpers.add("checkpoint")
            self.say(f"const checkpoint {slot} = save({self.name}, {s}, {ROUTE_FLAGS[op.route]});")
        if not step.batches:
            return
        failed = not step.done or bool(step.rc)
        self.decode(step.batches[0], (step.rc if len(step.batches) == 1 else 0) if step.done else None, rows)
        if failed and step.rc:
            return
        ok = 1 if step.value and step.done else None
        taken = self._taken(op, step, mine)
        replayed: list[int] = []
        for s, batch in mine.items():
            seat, last = self.seats[s], batch[0].token
            drafts = tuple(r.token for r in batch[1:])
            if not op.accept:
                self.seats[s] = replace(seat, proposal=Proposal(last, drafts, len(seat.tokens)))
                continue
            k = taken[s]
            if k == len(drafts) or op.route == "cut":
                self._settle(s, seat.tokens, Proposal(last, drafts), k, ok)
                continue
            self.helpers.add("restore")
            self.must("the restore", f"restore({self.name}, {s}, {back[s]}, TARGET | DRAFT | DRIVER)", ok)
            self._cut_both(s, len(seat.tokens), ok)
            self.seats[s] = Seat((*seat.tokens, last, *drafts[:k]))
            replayed.append(s)
        if not again or not replayed:
            return
        if len(step.batches) > 1:
            self.decode(step.batches[1], step.rc if step.done else None, rows)
            for s in replayed:
                self.say(f"common_speculative_accept({self.name}.spec, {s}, {taken[s]});")

    def _taken(self, op: Verify, step: Step, mine: dict[int, list[Row]]) -> dict[int, int]:
        """How many drafts each sequence takes; of a step that never returned the trace has the asked numbers only."""
        if not op.accept:
            return {}
        if len(step.args) == len(mine):
            return dict(zip(mine, step.args, strict=True))
        asked = dict(zip(op.seqs, op.accept, strict=False))
        found: dict[int, int] = {}
        number = step.batches[0].first
        logits = self.trace.logit_rows()
        for s, batch in mine.items():
            k = min(asked[s], len(batch) - 1)
            if k < 0:
                greedy = [int(np.argmax(row)) for row in logits[number : number + len(batch)]] if number >= 0 else []
                k = next((j for j, (r, g) in enumerate(zip(batch[1:], greedy, strict=False)) if r.token != g), 0)
            found[s] = k
            number += len(batch)
        return found

    def _settle(self, seq: int, tokens: Sequence[int], p: Proposal, k: int, ok: int | None) -> None:
        self.say(f"common_speculative_accept({self.name}.spec, {seq}, {k});")
        after = (*tokens, p.last, *p.drafts[:k])
        self.seats[seq] = Seat(after)
        if k < len(p.drafts):
            self._cut_both(seq, len(after), ok)

    def _cut_both(self, seq: int, at: int, ok: int | None) -> None:
        self._cut("tgt", seq, at, ok)
        if self._drafts:
            self._cut("dft", seq, at, ok)

    def _cut(self, which: str, seq: int, at: int, ok: int | None) -> None:
        self.helpers.add("cut")
        self.must("the removal", f"cut({self.name}.{which}, {seq}, {at})", ok)

    @property
    def _drafts(self) -> bool:
        """There is a draft context."""
        return self.scenario.driver is not None and self.scenario.driver.kind.startswith("draft-")

    def _accept(self, op: Accept, step: Step) -> None:
        seat = self.seats[op.seq]
        assert seat.proposal is not None
        k = step.args[1]
        self._settle(op.seq, seat.tokens, seat.proposal, k, 1 if step.value and step.done else None)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _checkpoint(self, op: Checkpoint, step: Step) -> None:
        self.helpers.add("checkpoint")
        self.slots.add(op.slot)
        self.kept[op.slot] = self.seats[op.seq]
        self.say(f"slot{op.slot} = save({self.name}, {op.seq}, {op.flags});")

    def rewind(self, op: Rewind, step: Step) -> None:
        """A restore of some parts, and the removals that follow."""
        self.helpers.add("restore")
        parts = " | ".join(p.upper() for p in op.parts) or "0"
        self.must(
            "the restore", f"restore({self.name}, {op.seq}, slot{op.slot}, {parts})", step.rc if step.done else None
        )
        if "target" in op.parts:
            self.seats[op.seq] = self.kept[op.slot]
        seat = self.seats[op.seq]
        at = len(seat.tokens)
        if seat.proposal is not None and seat.proposal.at >= 0:
            at += 1 + len(seat.proposal.drafts)
        ok = 1 if step.value and step.done else None
        if "target" in op.parts:
            self._cut("tgt", op.seq, at, ok)
        if self._drafts and {"target", "draft"} & set(op.parts):
            self._cut("dft", op.seq, at, ok)

    def _remove(self, op: SeqRm, step: Step) -> None:
        at = step.args[1]
        self._cut_both(op.seq, at, 1 if step.rc and step.done else None)
        if step.rc:
            self.seats[op.seq] = Seat(self.seats[op.seq].tokens[:at])

    def _query(self, op: Ask) -> str:
        ctx = f"{self.name}.tgt"
        return {
            "positions": f"llama_memory_seq_pos_max(llama_get_memory({ctx}), {op.seq});",
            "size": f"llama_state_seq_get_size_ext({ctx}, {op.seq}, {op.flags});",
            "size_all": f"llama_state_get_size({ctx});",
            "can_shift": f"llama_memory_can_shift(llama_get_memory({ctx}));",
        }[op.what]
