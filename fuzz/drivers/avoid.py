"""Known faults of drivers: what sets each off in a program, and the program without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fuzz.drivers.state import Rounds, Seq, broken
from fuzz.traits import Traits
from subjects.scenario import AnyOp, Begin, Decode, Mangle, Propose, Rewind, Scenario, SeqRm, Verify

KEEPS = ("draft-mtp", "draft-eagle3", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


@dataclass(frozen=True)
class DriverAvoidance:
    """One known fault: `hit` says that an operation sets it off in a state; `instead` gives what does not, None to
    leave the operation out."""

    name: str
    about: str
    hit: Callable[[Rounds, AnyOp], bool]
    instead: Callable[[Rounds, AnyOp], AnyOp | None] = lambda _, __: None


def _offers(state: Rounds) -> bool:
    return state.driver.kind == "draft-eagle3" and state.traits.recurrent


def _unoffered(state: Rounds, op: AnyOp) -> bool:
    """A restore of memory under a driver that keeps state and offers none."""
    if state.driver.kind not in KEEPS or _offers(state):
        return False
    if isinstance(op, Rewind):
        return bool({"target", "draft"} & set(op.parts))
    return isinstance(op, Verify) and bool(op.accept) and op.route != "cut"


def _take_all(state: Rounds, op: AnyOp) -> AnyOp | None:
    """A verification that takes everything restores nothing."""
    if isinstance(op, Verify):
        return msgspec.structs.replace(op, accept=tuple(state.driver.n_max for _ in op.accept), route="cut")
    return None


def _cut(state: Rounds, op: AnyOp) -> bool:
    """A tail is cut, of which no call tells the driver."""
    return isinstance(op, SeqRm) and op.lo.at != "open" and state.driver.kind in KEEPS


def _fresh(state: Rounds, op: AnyOp) -> bool:
    """A sequence is emptied and will begin anew."""
    return isinstance(op, SeqRm) and op.lo.at == "open" and state.driver.kind in KEEPS


def _mangled(_: Rounds, op: AnyOp) -> bool:
    """A malformed state is handed over."""
    return isinstance(op, Mangle)


def _undrafted_rows(state: Rounds, op: AnyOp) -> list[Seq]:
    """eagle3: sequences whose tokens are processed behind others without a draft in between, as the draft's memory
    stands: it may have been put back behind a draft."""
    if state.driver.kind != "draft-eagle3" or not isinstance(op, Decode | Verify):
        return []
    seqs = [p.seq for p in op.parts] if isinstance(op, Decode) else op.seqs
    return [s for s in (state.seqs[i] for i in seqs) if s.lo and not s.seeded and not s.open]


def _bridge(state: Rounds, op: AnyOp) -> bool:
    """eagle3: a row waits for the tokens that are processed."""
    return any(not s.partial for s in _undrafted_rows(state, op))


def _undrafted(state: Rounds, op: AnyOp) -> bool:
    """eagle3: tokens are processed behind a partial acceptance without a draft in between."""
    return any(s.partial for s in _undrafted_rows(state, op))


def _backend(state: Rounds, op: AnyOp) -> bool:
    """eagle3 with backend sampling: several sequences draft in one call."""
    d = state.driver
    return d.kind == "draft-eagle3" and d.backend_sampling and isinstance(op, Propose) and len(op.seqs) > 1


def _one_by_one(_: Rounds, op: AnyOp) -> AnyOp | None:
    """The first of the sequences drafts alone."""
    if not isinstance(op, Propose):
        return None
    return msgspec.structs.replace(op, seqs=op.seqs[:1], last=op.last[:1] if op.last else None)


def _unbegun(state: Rounds, op: AnyOp) -> bool:
    """ngram-map: a draft behind fewer tokens than the last one, and begin() was not called."""
    return (
        state.driver.kind in ("ngram-map-k", "ngram-map-k4v")
        and isinstance(op, Propose)
        and any(state.seqs[s].shrunk for s in op.seqs)
    )


def _begun(state: Rounds, op: AnyOp) -> AnyOp | None:
    """begin() in place of the draft."""
    assert isinstance(op, Propose)
    return Begin(seq=next(s for s in op.seqs if state.seqs[s].shrunk))


def _open_rows(state: Rounds, op: AnyOp) -> bool:
    """eagle3: a verification is restored while its answer is open; its rows are no part of the state."""
    return (
        state.driver.kind == "draft-eagle3"
        and isinstance(op, Rewind)
        and op.slot in state.slots
        and state.slots[op.slot].state.open
    )


def _purge(state: Rounds, op: AnyOp) -> bool:
    """window-purge of fuzz.avoid in a program with a driver: a batch of several micro-batches that goes over a window.
    Where holes are is not known here, and chained heads make some themselves.
    """
    if not state.traits.window or not isinstance(op, Decode | Verify):
        return False
    n = {p.seq: p.n for p in op.parts} if isinstance(op, Decode) else dict.fromkeys(op.seqs, 1 + state.driver.n_max)
    unequal = not state.params.kv_unified and len(set(n.values())) > 1  # such a batch is split by sequence
    if sum(n.values()) <= state.params.n_ubatch and not unequal:
        return False
    return any(state.seqs[s].hi and state.seqs[s].hi + k > state.traits.window for s, k in n.items())


def _one_ubatch(state: Rounds, op: AnyOp) -> AnyOp | None:
    """The first sequence's tokens alone, as many as a micro-batch takes."""
    if not isinstance(op, Decode):
        return None
    first = op.parts[0]
    n = min(first.n, state.params.n_ubatch)
    return msgspec.structs.replace(op, parts=(msgspec.structs.replace(first, n=n),))


DRIVER_AVOIDANCES: dict[str, DriverAvoidance] = {
    a.name: a
    for a in (
        DriverAvoidance("ngram-begin", "ngram-map drafts behind fewer tokens, without begin()", _unbegun, _begun),
        DriverAvoidance("driver-unoffered", "restore under a driver that offers no state", _unoffered, _take_all),
        DriverAvoidance("driver-cut", "a tail is cut, of which no call tells the driver", _cut),
        DriverAvoidance("driver-fresh", "a new conversation is paired with the old one's row", _fresh),
        DriverAvoidance(
            "eagle3-backend", "several sequences draft in one call, sampled by the backend", _backend, _one_by_one
        ),
        DriverAvoidance("eagle3-bridge", "tokens behind a row that waits for them, without a draft", _bridge),
        DriverAvoidance(
            "eagle3-undrafted", "tokens behind a partial acceptance, without a draft in between", _undrafted
        ),
        DriverAvoidance("eagle3-open", "an open verification is restored without its rows", _open_rows),
        DriverAvoidance("driver-purge", "a batch of several micro-batches goes over a window", _purge, _one_ubatch),
        DriverAvoidance("driver-mangled", "a malformed driver state is taken, or refused without a word", _mangled),
    )
}


def triggered(name: str, scenario: Scenario, traits: Traits) -> int | None:
    """The first operation that sets off the fault called `name`, None when none does."""
    assert scenario.driver is not None
    state = Rounds(traits, scenario.params, scenario.driver)
    for i, op in enumerate(scenario.ops):
        if DRIVER_AVOIDANCES[name].hit(state, op):
            return i
        if not broken(state, op):
            state.apply(op)
    return None


def repair(scenario: Scenario, traits: Traits, names: tuple[str, ...]) -> Scenario:
    """The program without what sets off the faults, and without operations that lost their ground by that."""
    assert scenario.driver is not None
    chosen = [DRIVER_AVOIDANCES[n] for n in names if n in DRIVER_AVOIDANCES]
    if not chosen:
        return scenario
    state = Rounds(traits, scenario.params, scenario.driver)
    ops: list[AnyOp] = []
    for op in scenario.ops:
        kept: AnyOp | None = op
        for a in chosen:
            if kept is not None and a.hit(state, kept):
                kept = a.instead(state, kept)
        if isinstance(kept, Propose):  # some of its sequences may be empty now
            left = [i for i, s in enumerate(kept.seqs) if not broken(state, Propose(seqs=(s,)))]
            last = tuple(kept.last[i] for i in left) if kept.last else None
            seqs = tuple(kept.seqs[i] for i in left)
            kept = msgspec.structs.replace(kept, seqs=seqs, last=last) if left else None
        if kept is None or broken(state, kept):
            continue
        state.apply(kept)
        ops.append(kept)
    return msgspec.structs.replace(scenario, ops=tuple(ops))
