"""The logical state of a program with a driver, and the preconditions that an operation would break in it.

Only bounds are known of a sequence's length: how many drafts greedy decoding confirms is seen when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fuzz.traits import Traits
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    Accept,
    AnyOp,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    Mangle,
    Propose,
    Reopen,
    Rewind,
    Scenario,
    SeqRm,
    Verify,
)

LONGEST = 100


@dataclass(frozen=True)
class Seq:
    """One sequence: at least `lo` and at most `hi` tokens; what it proposed and whether the answer is open.

    seeded: it was drafted from as it stands. partial: a part of its last draft was rejected and cut. shrunk: it became
    shorter or another, and begin() was not called since.
    fresh_open: nothing was done since its verification was left open. saves: slots whose tokens it still begins with.
    """

    lo: int = 0
    hi: int = 0
    proposed: bool = False
    open: bool = False
    seeded: bool = False
    partial: bool = False
    shrunk: bool = False
    fresh_open: bool = False
    saves: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slot:
    """A checkpoint."""

    seq: int
    state: Seq
    flags: int
    epoch: int
    mangled: bool = False


@dataclass
class Rounds:
    """The state that a program has come to. `batch` and `params`: of the context in force."""

    traits: Traits
    params: ContextParams
    driver: DriverParams
    seqs: list[Seq] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    on_device: set[int] = field(default_factory=set)
    epoch: int = 0

    def __post_init__(self) -> None:
        self.seqs = [Seq()] * self.params.n_seq_max

    @property
    def rolls_back(self) -> bool:
        """A tail of a draft can be cut: everywhere but in recurrent memory without earlier states."""
        return not self.traits.recurrent or (self.traits.rollback and self.params.n_rs_seq >= self.driver.n_max)

    def live(self) -> list[int]:
        """Sequences that hold something and can be worked on."""
        return [i for i, s in enumerate(self.seqs) if s.lo and not s.open]

    def apply(self, op: AnyOp) -> None:
        """The state after an operation that broke nothing."""
        n = self.driver.n_max
        match op:
            case Decode():
                for p in op.parts:
                    s, k = self.seqs[p.seq], len(p.tokens) if p.tokens else p.n
                    s = replace(s, lo=s.lo + k, hi=s.hi + k, proposed=False, seeded=False, partial=False)
                    self._touch(p.seq, s)
            case Propose():
                for i in op.seqs:
                    self.seqs[i] = replace(self.seqs[i], proposed=True, seeded=True, partial=False)
            case Verify():
                if op.route == "device" and op.accept:
                    self.on_device |= set(op.seqs)
                for j, i in enumerate(op.seqs):
                    s = self.seqs[i]
                    if not s.proposed or s.open:
                        continue
                    if not op.accept:
                        self._touch(i, replace(s, open=True, seeded=False))
                        self.seqs[i] = replace(self.seqs[i], fresh_open=True)
                        continue
                    k = min(op.accept[j], n)
                    lo, hi = (0, n) if k < 0 else (0 if self.driver.p_min or self.driver.n_min else k, k)
                    partial = op.route == "cut" and not 0 <= n <= k
                    s = replace(s, lo=s.lo + 1 + lo, hi=s.hi + 1 + hi, proposed=False, seeded=False, partial=partial)
                    self._touch(i, s)
            case Accept():
                s, k = self.seqs[op.seq], min(op.n, n)
                self.seqs[op.seq] = replace(s, lo=s.lo + 1, hi=s.hi + 1 + k, proposed=False, open=False, partial=k < n)
            case Checkpoint():
                s = self.seqs[op.seq]
                self.seqs[op.seq] = replace(s, saves=(*(x for x in s.saves if x != op.slot), op.slot))
                self.slots[op.slot] = Slot(op.seq, self.seqs[op.seq], op.flags, self.epoch)
                for i, other in enumerate(self.seqs):
                    if i != op.seq:
                        self.seqs[i] = replace(other, saves=tuple(x for x in other.saves if x != op.slot))
                if op.flags & ON_DEVICE:
                    self.on_device.add(op.seq)
            case Rewind():
                slot = self.slots[op.slot]
                here = (slot.seq, slot.epoch) == (op.seq, self.epoch)
                moved = replace(slot.state, shrunk=True, proposed=slot.state.proposed and here)
                was = self.seqs[op.seq]
                s = moved if "target" in op.parts else was
                memory = slot.state if "draft" in op.parts else was
                s = replace(s, seeded=memory.seeded, partial=memory.partial)
                self._touch(op.seq, s)
            case Mangle():
                self.slots[op.slot] = replace(self.slots[op.slot], mangled=True)
            case SeqRm():
                if op.lo.at == "open":
                    self._touch(op.seq, Seq(shrunk=True))
                else:
                    s = self.seqs[op.seq]
                    lo, hi = max(s.lo + op.lo.d, 0), max(s.hi + op.lo.d, 0)
                    keep = tuple(x for x in s.saves if self.slots[x].state.hi <= lo)
                    self._touch(op.seq, replace(s, lo=lo, hi=hi, proposed=False, seeded=False, shrunk=True, saves=keep))
            case Begin():
                self.seqs[op.seq] = replace(self.seqs[op.seq], shrunk=False)
            case Reopen():
                self.params = op.params or self.params
                self.seqs = [Seq()] * self.params.n_seq_max
                self.epoch += 1
                self.on_device.clear()
            case _:
                pass

    def _touch(self, seq: int, state: Seq) -> None:
        """A sequence changes; an open verification of another one is not the newest thing in its memory any more."""
        self.seqs[seq] = state
        self.seqs = [replace(s, fresh_open=False) for s in self.seqs]

    def slot_fits(self, number: int, seq: int) -> bool:
        """Whether a checkpoint may be put back into a sequence."""
        slot = self.slots[number]
        if slot.flags & ON_DEVICE and (slot.epoch != self.epoch or slot.seq != seq):
            return False
        return not (slot.flags & PARTIAL and self.traits.parts) or number in self.seqs[seq].saves


def params_broken(p: ContextParams, d: DriverParams, traits: Traits) -> list[str]:
    """Preconditions that the parameters break: a draft of one sequence must fit into a batch, and on recurrent memory
    into a micro-batch that is large enough for the earlier states."""
    rows = 1 + d.n_max
    if p.n_ubatch > p.n_batch or rows > p.n_batch or p.n_seq_max < 1:
        return ["verify.rows"]
    if traits.recurrent and (rows > p.n_ubatch or p.n_ubatch <= p.n_rs_seq + 1):
        return ["verify.rows"]
    return []


def broken(state: Rounds, op: AnyOp) -> list[str]:
    """Ids of the preconditions (`subjects.driver_contracts`) that an operation would break."""
    n = len(state.seqs)

    def out(*seqs: int) -> bool:
        return any(not 0 <= s < n for s in seqs)

    match op:
        case Decode():
            return _decode_broken(state, op)
        case Propose():
            if out(*op.seqs):
                return ["propose.ids"]
            if len(set(op.seqs)) != len(op.seqs) or not op.seqs or any(not state.seqs[s].lo for s in op.seqs):
                return ["propose.once"]
            if len(op.seqs) * (1 + state.driver.n_max) > state.params.n_batch:
                return ["propose.rows"]
            return ["propose.answered"] if any(state.seqs[s].open for s in op.seqs) else []
        case Verify():
            return _verify_broken(state, op)
        case Accept():
            if out(op.seq) or not state.seqs[op.seq].open or op.n < 0:
                return ["accept.open"]
            s = state.seqs[op.seq]
            late = state.traits.recurrent and not s.fresh_open and op.n < state.driver.n_max
            return ["verify.route"] if late or (op.n < state.driver.n_max and not state.rolls_back) else []
        case Checkpoint():
            if out(op.seq) or not state.seqs[op.seq].lo or not 0 <= op.flags <= PARTIAL | ON_DEVICE:
                return ["checkpoint.ids"]
            return ["checkpoint.device"] if op.flags & ON_DEVICE and op.seq in state.on_device else []
        case Rewind():
            if out(op.seq):
                return ["rewind.ids"]
            if op.slot not in state.slots or (state.slots[op.slot].mangled and op.parts != ("driver",)):
                return ["rewind.slot"]
            slot = state.slots[op.slot]
            # accept() belongs to the driver that drafted: a new one, or a sequence that never drafted, aborts
            here = slot.epoch == state.epoch and slot.seq == op.seq
            if slot.state.open and (op.parts != ("target", "draft", "driver") or not here):
                return ["rewind.slot"]
            if state.slots[op.slot].flags & ON_DEVICE and not state.slot_fits(op.slot, op.seq):
                return ["rewind.slot"]
            return [] if state.slot_fits(op.slot, op.seq) or op.parts == ("driver",) else ["rewind.prefix"]
        case Mangle():
            return [] if op.slot in state.slots else ["mangle.slot"]
        case Begin():
            return ["begin.ids"] if out(op.seq) else []
        case SeqRm():
            if out(op.seq) or state.seqs[op.seq].open or op.hi.at != "open":
                return ["seq_rm.ids"]  # with a driver a tail goes, or all
            return [] if op.lo.at == "open" or not state.traits.recurrent else ["verify.route"]
        case Reopen():
            return params_broken(op.params or state.params, state.driver, state.traits)
        case _:
            return ["no operation of a program with a driver"]


def _decode_broken(state: Rounds, op: Decode) -> list[str]:
    seqs = [p.seq for p in op.parts]
    sizes = [len(p.tokens) if p.tokens else p.n for p in op.parts]
    if any(not 0 <= s < len(state.seqs) for s in seqs):
        return ["decode.ids"]
    if not sizes or min(sizes) < 1 or len(set(seqs)) < len(seqs) or op.abort_after is not None or op.interleave:
        return ["decode.not-empty"]
    if sum(sizes) > state.params.n_batch:
        return ["decode.rows"]
    if any(state.seqs[s].open for s in seqs):
        return ["propose.answered"]
    return [] if all(state.seqs[s].hi + k <= LONGEST for s, k in zip(seqs, sizes, strict=True)) else ["decode.rows"]


def _verify_broken(state: Rounds, op: Verify) -> list[str]:
    n = len(state.seqs)
    if any(not 0 <= s < n for s in op.seqs):
        return ["verify.ids"]
    mine = [s for s in op.seqs if state.seqs[s].proposed and not state.seqs[s].open]
    rows = len(mine) * (1 + state.driver.n_max)
    most = state.params.n_ubatch if state.traits.recurrent else state.params.n_batch
    if not mine or rows > most or len(set(op.seqs)) != len(op.seqs):
        return ["verify.rows"]
    if any(state.seqs[s].hi + 1 + state.driver.n_max > LONGEST for s in mine):
        return ["verify.rows"]
    if op.accept and len(op.accept) != len(op.seqs):
        return ["verify.count"]
    all_taken = op.accept and all(a >= state.driver.n_max for a in op.accept)
    if op.route == "cut" and op.accept and not all_taken and not state.rolls_back:
        return ["verify.route"]
    if op.route == "device" and op.accept and set(mine) & state.on_device:
        return ["checkpoint.device"]
    return []


def valid(scenario: Scenario, traits: Traits) -> list[str]:
    """Ids of the preconditions that the first operation to break any breaks."""
    assert scenario.driver is not None
    found = params_broken(scenario.params, scenario.driver, traits)
    if found:
        return found
    state = Rounds(traits, scenario.params, scenario.driver)
    for op in scenario.ops:
        if found := broken(state, op):
            return found  # what follows has no ground
        state.apply(op)
    return []
