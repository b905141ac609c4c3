"""Triage: from a violation to a finding: confirmed, reduced, blamed on one operation, given a signature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fuzz.reduce import Reduction, reduce
from fuzz.state import Traits, valid
from oracles.driving import DraftOracle
from oracles.judge import Judge, Judgement
from oracles.ledger import HalfRestored
from oracles.registry import ORACLES
from oracles.rows import NAME_OF, twin_rung
from oracles.verdict import Violation
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    AnyOp,
    ContextParams,
    Decode,
    Draft,
    Mangle,
    Part,
    Propose,
    Reopen,
    Restore,
    RestoreAll,
    Rewind,
    Save,
    SaveAll,
    Scenario,
    SeqCp,
    SeqKeep,
    SeqRm,
    Verify,
)

RERUNS = 3
STANDARD_DRAFT = 6
# a slot that no program uses
PROBE_SLOT = 900
# oracles that need a second run
VARIANTS = frozenset({"purity", "two_drivers"})
# oracles whose violations are wrong claims on drafts, and the key of those that show only once a sequence goes on
CLAIMS = frozenset(o.name for o in ORACLES if isinstance(o, DraftOracle))
FRESH = frozenset({"driver_isolation:fresh"})


@dataclass(frozen=True)
class Symptom:
    """What must stay the same while a program is reduced: the oracle and its key."""

    oracle: str
    key: str

    @classmethod
    def of(cls, v: Violation) -> Symptom:
        """The symptom of a violation."""
        return cls(v.oracle, v.key)


@dataclass
class Triaged:
    """A confirmed and reduced violation.

    judgement: the run of the reduced program. reproduced: (n, m), n of m re-runs in fresh contexts showed it.
    culprit: index in the reduced
    program's operations. complete: the reducer came to an end by itself.
    """

    judgement: Judgement
    violation: Violation
    scenario: Scenario
    original: Scenario
    reproduced: tuple[int, int]
    culprit: int
    route: str
    signature: str
    complete: bool
    tried: int


class Shown(Protocol):
    """A run of any subject that was judged."""

    @property
    def violations(self) -> list[Violation]:
        """What is wrong, the one to report first."""


def find(judgement: Shown, symptom: Symptom) -> Violation | None:
    """The violation with this symptom, provided that it is the first that the run shows (a later one may follow
    from the first).
    """
    violations = judgement.violations
    if not violations:
        return None
    first = violations[0]
    return first if Symptom.of(first) == symptom else None


def triage(
    judge: Judge,
    judgement: Judgement,
    traits: Traits,
    *,
    fault: str = "",
    seconds: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
) -> Triaged | tuple[int, int]:
    """Confirm, reduce and blame the first violation of a run; (n, m) alone when it does not reproduce in fresh
    contexts.
    """
    first = judgement.violations[0]
    symptom = Symptom.of(first)
    variants = symptom.oracle in VARIANTS
    program = judgement.executed

    def run(s: Scenario) -> Judgement:
        return judge.judge(s, fresh=True, fault=fault, observed=False, variants=variants)

    shown = sum(find(run(program), symptom) is not None for _ in range(RERUNS))
    if shown == 0:
        return (0, RERUNS)
    if shown < RERUNS:  # it depends on something that is not in the program: reduction would chase noise
        result, complete, tried = program, False, 0
    else:
        # a program that breaks a caller's precondition shows nothing, so the reducer never goes there
        lawful = not valid(program, traits)

        def smaller(start: Scenario, wanted: Symptom) -> Reduction:
            def holds(s: Scenario) -> bool:
                return not (lawful and valid(s, traits)) and find(run(s), wanted) is not None

            return reduce(start, holds, seconds=seconds, stop=stop)

        reduction = smaller(program, symptom)
        result, complete, tried = reduction.scenario, reduction.complete, reduction.tried
        plain = standard(judge, result, find(run(result), symptom), fault=fault)
        if plain is not None:
            symptom = plain[1]
            reduction = smaller(plain[0], symptom)
            result, complete, tried = reduction.scenario, reduction.complete and complete, tried + reduction.tried
    # how often the program that is reported shows it, not the one that it came from
    finals = [run(result) for _ in range(RERUNS)]
    hits = [(f, v) for f in finals if (v := find(f, symptom)) is not None]
    if not hits:
        return (0, RERUNS)
    final, violation = hits[0]
    culprit, _ = blame(judge, result, violation, fault=fault)
    violation = with_twin(judge, final, violation)
    memory = final.account.memory
    route = route_of(result, culprit)
    signature = sign(violation, result, culprit, memory, route)
    return Triaged(
        final, violation, result, judgement.executed, (len(hits), RERUNS), culprit, route, signature, complete, tried
    )


def with_twin(judge: Judge, run: Judgement, violation: Violation) -> Violation:
    """The violation with the rung of the twin, where it is one of rows."""
    row = next((r for r in run.account.compared if r.claim.row == violation.check.row), None)
    if violation.check.kind != "rows" or violation.check.hidden or violation.oracle == "purity" or row is None:
        return violation
    rung = twin_rung(judge.twin_error(run.account, row.claim), row.band)
    return msgspec.structs.replace(violation, rungs=(rung, *violation.rungs))


def standard(
    judge: Judge, scenario: Scenario, violation: Violation | None, *, fault: str
) -> tuple[Scenario, Symptom] | None:
    """The same fault shown in the standard way: the program up to the operation to blame, then a greedy draft of the
    sequence.

    Whatever a program did after the fault decides by chance which oracle sees it first; a standard continuation makes
    equal faults equal findings. None where the violation is not one of rows, or does not show like that.
    """
    if violation is None or violation.check.kind != "rows" or violation.check.seq < 0 or violation.oracle == "purity":
        return None
    culprit, seq = blame(judge, scenario, violation, fault=fault)
    k = culprit + 1
    owed = _owed_cut(scenario, culprit)
    draft = Draft(seq=seq, n=STANDARD_DRAFT, stream=77)
    for params in (msgspec.structs.replace(scenario.params, embeddings=False), scenario.params):
        program = msgspec.structs.replace(scenario, ops=(*scenario.ops[:k], *owed, draft), params=params)
        found = judge.judge(program, fresh=True, fault=fault, observed=False, variants=False).violations
        if found and found[0].check.kind == "rows" and found[0].check.step == k + len(owed):
            return program, Symptom.of(found[0])
    return None


def _owed_cut(scenario: Scenario, i: int) -> tuple[AnyOp, ...]:
    """The removal that a partial restore at `i` owes, as the program has it right behind; nothing for other
    operations.
    """
    op = scenario.ops[i]
    after = scenario.ops[i + 1 : i + 2]
    if isinstance(op, Restore) and after and isinstance(after[0], SeqRm) and after[0].seq == op.seq:
        return after
    return ()


def blame(judge: Judge, scenario: Scenario, violation: Violation, *, fault: str = "") -> tuple[int, int]:
    """The operation that broke it, and the sequence: the first one after which continuing a sequence is wrong.

    Running the program's beginnings, each with one more token of the sequence, is the neutral twin of all that follows.
    Where the check is not one of rows, it names the step itself.
    """
    check = violation.check
    if check.kind == "draft" and violation.oracle in CLAIMS and violation.key not in FRESH:
        return blame_draft(judge, scenario, violation, fault=fault), check.seq
    if check.kind == "state":
        return blame_state(judge, scenario, violation, fault=fault)
    if check.kind != "rows" or check.seq < 0 or violation.oracle == "purity":
        # suspects: where an oracle knows the operation itself, and the check is made by one that follows it
        k = violation.suspects[0] if violation.suspects else check.step
        return min(k, len(scenario.ops) - 1), check.seq
    for k in range(1, check.step + 1):
        n_seq = params_at(scenario, k).n_seq_max
        # the sequence itself first; where it is still right, another may be wrong already that it is copied from later
        order = [check.seq, *(s for s in range(n_seq) if s != check.seq)]
        # one-row and many-row batches run through other kernels
        probes = [
            op
            for s in order
            for op in (Draft(seq=s, n=2, stream=77), Decode(parts=(Part(seq=s, n=4, stream=77, out="all"),)))
        ]
        part = msgspec.structs.replace(scenario, ops=(*scenario.ops[:k], *probes))
        run = judge.judge(part, fresh=True, fault=fault, observed=False, variants=False)
        wrong = {r.claim.seq for r in run.account.compared if (r.wrong or r.hidden_wrong) and r.claim.step >= k}
        if wrong:
            seq = next(s for s in order if s in wrong)
            before = run.account.ledger.moments[k - 1].before.get(seq)
            # the cut that a partial restore owes only makes it judgeable: the restore is to blame
            return (before.saved.shaped[-1] if isinstance(before, HalfRestored) else k - 1), seq
        if run.account.ledger.trace.end.how != "ok":
            break
    return min(check.step, len(scenario.ops) - 1), check.seq


def blame_state(judge: Judge, scenario: Scenario, violation: Violation, *, fault: str = "") -> tuple[int, int]:
    """The same for a wrong state: the first operation after which a sequence goes on with a wrong one.

    One token is decoded before each probe saves, so that what only waits for a decode is not taken for wrong; where
    that makes every state right, the saving itself is to blame.
    """
    check = violation.check
    for k in range(1, min(check.step, len(scenario.ops)) + 1):
        n_seq = params_at(scenario, k).n_seq_max
        order = [check.seq, *(s for s in range(n_seq) if s != check.seq)]
        probes = [op for s in order for op in (Draft(seq=s, n=1, stream=77), Save(seq=s, slot=PROBE_SLOT))]
        part = msgspec.structs.replace(scenario, ops=(*scenario.ops[:k], *probes))
        run = judge.judge(part, fresh=True, fault=fault, observed=False, variants=False)
        wrong = {h.claim.seq for h in run.account.states.held if h.wrong and h.claim.step >= k}
        if wrong:
            return k - 1, next(s for s in order if s in wrong)
        if run.account.ledger.trace.end.how != "ok":
            break
    return min(check.step, len(scenario.ops) - 1), check.seq


def blame_draft(judge: Judge, scenario: Scenario, violation: Violation, *, fault: str = "") -> int:
    """The same for a wrong draft: the first operation after which the sequence alone drafts wrongly."""
    check = violation.check
    for k in range(1, min(check.step, len(scenario.ops)) + 1):
        probe = Propose(seqs=(check.seq,), stream=77)
        part = msgspec.structs.replace(scenario, ops=(*scenario.ops[:k], probe))
        run = judge.judge(part, fresh=True, fault=fault, observed=False, variants=False)
        driven = run.account.driven
        if driven is None or run.account.ledger.trace.end.how != "ok":
            break
        if any(h.wrong and h.claim.step == k and h.claim.seq == check.seq for h in driven.held):
            return k - 1
    return min(check.step, len(scenario.ops) - 1)


def params_at(scenario: Scenario, i: int) -> ContextParams:
    """The context parameters in force at operation `i`."""
    p = scenario.params
    for op in scenario.ops[:i]:
        if isinstance(op, Reopen) and op.params is not None:
            p = op.params
    return p


def route_of(scenario: Scenario, i: int) -> str:
    """By which route the culprit moved state: how it was saved, what was removed, which cache layout was copied."""
    op: AnyOp = scenario.ops[i]
    layout = "unified" if params_at(scenario, i).kv_unified else "split"
    match op:
        case Restore() | RestoreAll():
            for before in reversed(scenario.ops[:i]):
                if isinstance(before, Save | SaveAll) and before.slot == op.slot:
                    return _saved(before)
            return "unknown"
        case Save() | SaveAll():
            return _saved(op)
        case SeqRm():
            whole = op.lo.at != "end" and op.lo.d == 0 and op.hi.at == "open"
            which = (
                "whole" if whole else "tail" if op.hi.at == "open" or (op.hi.at == "end" and op.hi.d >= 0) else "middle"
            )
            return which + ("-any" if op.seq < 0 else "")
        case SeqCp() | SeqKeep():
            return layout
        case Rewind():
            return "+".join(op.parts)
        case Verify():
            return op.route
        case Mangle():
            return op.how
        case Decode() | Draft():
            return "abort" if isinstance(op, Decode) and op.abort_after is not None else ""
        case _:
            return ""


def _saved(op: Save | SaveAll) -> str:
    if isinstance(op, SaveAll):
        return f"context-{op.medium}"
    where = "device" if op.flags & ON_DEVICE else op.medium
    return where + ("-partial" if op.flags & PARTIAL else "-whole")


def sign(v: Violation, scenario: Scenario, culprit: int, memory: str, route: str) -> str:
    """Identity of a finding: oracle, operation, memory kind and route; for crashes what the process said when it
    ended.
    """
    if v.oracle == "liveness":
        return v.key
    if scenario.driver is not None:
        # the key says what of the driver's it is
        return "/".join(x for x in (v.key, NAME_OF[type(scenario.ops[culprit])], memory, route) if x)
    return "/".join(x for x in (v.oracle, NAME_OF[type(scenario.ops[culprit])], memory, route) if x)
