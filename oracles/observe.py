"""Observations: what oracles ask to be added to a program, as a transformation of the scenario. What is executed is "
"what is recorded."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from oracles.ledger import OBSERVED_SLOTS
from subjects.scenario import (
    ON_DEVICE,
    ContextParams,
    Decode,
    Draft,
    Op,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqRm,
)

# Slots of our own, above any that a generated program uses.
NEIGHBOUR_SLOT = OBSERVED_SLOTS
# Stream of the final continuation; the same for all sequences, so that equal histories have equal references.
CONTINUATION_STREAM = 90
CONTINUATION = 2


def observe(scenario: Scenario, wanted: Iterable[str], *, variety: int = 0) -> Scenario:
    """The program with the wanted observations in it.

    continue: every sequence goes on for a few greedy tokens at the end. save-again: host saves are made twice.
    resave: restored
    sequences are saved again (for some `variety` numbers also restored twice). neighbour-blobs: a sequence that the
    operation does not name is saved before and after it.
    """
    want = frozenset(wanted)
    ops: list[Op] = []
    params = scenario.params
    for i, op in enumerate(scenario.ops):
        if isinstance(op, Reopen) and op.params is not None:
            params = op.params
        seen = _seen(op, want, twice=(variety + i) % 5 == 0)
        neighbour = _neighbour(scenario.ops[:i], seen, params) if "neighbour-blobs" in want else None
        if neighbour is None:
            ops.append(seen)
        else:
            ops += [Save(seq=neighbour, slot=NEIGHBOUR_SLOT), seen, Save(seq=neighbour, slot=NEIGHBOUR_SLOT + 1)]
    if "continue" in want:
        ops += [Draft(seq=s, n=CONTINUATION, stream=CONTINUATION_STREAM) for s in range(params.n_seq_max)]
    return msgspec.structs.replace(scenario, ops=tuple(ops))


def _seen(op: Op, want: frozenset[str], *, twice: bool) -> Op:
    if isinstance(op, Save | SaveAll) and "save-again" in want and not getattr(op, "flags", 0) & ON_DEVICE:
        return msgspec.structs.replace(op, again=True)
    if isinstance(op, Restore | RestoreAll) and "resave" in want:
        return msgspec.structs.replace(op, resave=True, times=2 if twice else op.times)
    return op


def _neighbour(before: tuple[Op, ...], op: Op, params: ContextParams) -> int | None:
    """A sequence with tokens in it that `op` does not name, None when there is none or the operation names all."""
    named: set[int]
    match op:
        case SeqRm() | SeqAdd() | SeqDiv() | Restore():
            named = {op.seq}
        case SeqCp():
            named = {op.src, op.dst}
        case _:
            return None
    if -1 in named:
        return None
    filled = {p.seq for o in before if isinstance(o, Decode) for p in o.parts} | {
        o.seq for o in before if isinstance(o, Draft)
    }
    rest = sorted(s for s in filled - named if 0 <= s < params.n_seq_max)
    return rest[0] if rest else None
