"""Triage for llama-server: from a violation to a finding: confirmed on fresh servers, reduced, given a signature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from fuzz.server.fit import valid
from fuzz.server.reduce import reduce
from fuzz.triage import RERUNS, Symptom, find
from oracles.server.judge import ServerJudge, ServerJudgement
from oracles.server.variants import other_histories
from oracles.verdict import Violation
from subjects.server.scenario import DamageFile, EraseSlot, RestoreSlot, SaveSlot, ServerScenario
from subjects.server.trace import Deed, Reply

ALIVE = "server-alive"
# oracles that need more runs than the one of the program
VARIANTS = frozenset({"server-history", "server-drafting"})
ROUTES: dict[str, tuple[Deed | None, str]] = {
    "file": (None, "after a slot was restored from a file"),
    "cache": ("loaded", "after a prompt came out of the prompt cache"),
    "checkpoint": ("restored", "after a context checkpoint was restored"),
    "replay": ("replay", "after a draft was accepted in part and replayed"),
    "reset": ("reset", "after all of the prompt was processed again"),
    "kept": ("kept", "behind tokens that the slot kept"),
}
"""what the server may have done before a wrong answer, the most telling first: as signatures name it, how it is seen,
and as titles say it"""
# a prompt comes out of the cache, and goes on from a checkpoint there
_TOGETHER = ("file", "cache", "checkpoint")


Hit = tuple[ServerJudgement, Violation]
"""a run that shows what is looked for, and as what"""


@dataclass
class ServerTriaged:
    """A confirmed and reduced violation.

    judgement: the run of the reduced program. reproduced: (n, m), n of m re-runs with fresh servers showed it. culprit:
    the request that was answered wrongly. route: what the server did before that (see `route_of`). complete: the
    reducer came to an end by itself.
    """

    judgement: ServerJudgement
    violation: Violation
    program: ServerScenario
    original: ServerScenario
    reproduced: tuple[int, int]
    culprit: int
    route: str
    signature: str
    complete: bool
    tried: int


def triage(
    judge: ServerJudge,
    judgement: ServerJudgement,
    memory: str,
    *,
    fault: str = "",
    avoid: Collection[str] = (),
    seconds: float = 30.0,
    stop: Callable[[], bool] = lambda: False,
) -> ServerTriaged | tuple[int, int]:
    """Confirm and reduce the first violation of a run; (n, m) alone when it does not reproduce with fresh servers.
    avoid: known faults, as the run was judged: what they may have spoilt is not taken for the violation.

    Memory that is broken ends a server here or there: where one program ends it in different ways, each is taken for
    the violation, and the most frequent one gives the signature.
    """

    def run(program: ServerScenario) -> ServerJudgement:
        return judge.judge(program, fresh=True, fault=fault, variants=symptom.oracle in VARIANTS, avoid=avoid)

    original, symptom = judgement.program, Symptom.of(judgement.violations[0])
    if symptom.oracle == "server-history":
        original, symptom = plainer(judge, judgement, fault=fault, avoid=avoid) or (original, symptom)
    deadly = symptom.oracle == ALIVE and died(judgement)

    def shows(found: ServerJudgement, any_end: bool) -> Violation | None:
        return find(found, symptom) or (found.violations[0] if any_end and died(found) else None)

    def hits_of(program: ServerScenario) -> list[Hit]:
        runs = [run(program) for _ in range(RERUNS)]
        return [(j, v) for j in runs if (v := shows(j, deadly)) is not None]

    hits = hits_of(original)
    if not hits:
        return (0, RERUNS)
    # where it ends in one way, reduction must not come upon another fault
    varied = deadly and any(Symptom.of(v) != symptom for _, v in hits)
    program, complete, tried = original, False, 0
    if len(hits) == RERUNS:
        found = reduce(original, lambda p: shows(run(p), varied) is not None, seconds=seconds, stop=stop)
        program, complete, tried = found.scenario, found.complete, found.tried
        # how often the program that is reported shows it, not the one that it came from
        hits = hits_of(program)
    elif (shorter := _cut(original, hits)) is not None and not stop():
        # by the order of what is done at the same time: reduction would chase that
        fewer, tried = hits_of(shorter), RERUNS
        if len(fewer) >= len(hits):
            program, hits = shorter, fewer
    if not hits:
        return (0, RERUNS)
    final, violation = _usual(hits)
    route = route_of(final, violation)
    return ServerTriaged(
        final,
        violation,
        program,
        original,
        (len(hits), RERUNS),
        max(violation.check.step, 0),
        route,
        sign(violation, program, memory, route),
        complete,
        tried,
    )


def died(judgement: ServerJudgement) -> bool:
    """Whether what a run shows first is that the server ended, in whatever way, and by itself."""
    first = next(iter(judgement.violations), None)
    return first is not None and first.oracle == ALIVE and judgement.trace.end.how not in ("broken", "hang")


def _usual(hits: Sequence[Hit]) -> Hit:
    """The first of those with the key that most of them have."""
    key, _ = Counter(v.key for _, v in hits).most_common(1)[0]
    return next(hit for hit in hits if hit[1].key == key)


def _cut(program: ServerScenario, hits: Sequence[Hit]) -> ServerScenario | None:
    """Without what follows the last request that was wrong in any of the runs; None where nothing does."""
    last = max(v.check.step for _, v in hits)
    shorter = msgspec.structs.replace(program, requests=program.requests[: last + 1])
    return shorter if 0 <= last < len(program.requests) - 1 and not valid(shorter) else None


def plainer(
    judge: ServerJudge, judgement: ServerJudgement, *, fault: str, avoid: Collection[str] = ()
) -> tuple[ServerScenario, Symptom] | None:
    """Of two programs whose answers must agree the one whose answer a cold server contradicts: it shows
    the fault alone. None where the two are needed to see it."""
    check = judgement.violations[0].check
    reply = judgement.trace.reply(check.step, check.seq)
    other = other_histories(judgement.program, reply) if reply else None
    for program in (judgement.program, other):
        if program is None:
            continue
        found = judge.judge(program, fresh=True, fault=fault, variants=False, avoid=avoid).violations
        if found and found[0].check.step == check.step:
            return program, Symptom.of(found[0])
    return None


def route_of(judgement: ServerJudgement, violation: Violation) -> str:
    """What the server did before the wrong reply, as ROUTES has it; for a slot action, which. Empty for none of
    these."""
    program, check = judgement.program, violation.check
    request = program.requests[check.step] if 0 <= check.step < len(program.requests) else None
    if isinstance(request, SaveSlot | RestoreSlot | EraseSlot | DamageFile):
        return str(request.__struct_config__.tag)
    reply = judgement.trace.reply(check.step, max(check.seq, 0))
    if reply is None:
        return ""
    done: set[Deed | None] = {e.what for e in reply.events}
    if _from_file(judgement, reply):
        done.add(None)
    ways = [name for name, (deed, _) in ROUTES.items() if deed in done]
    return "+".join(w for w in ways if w in _TOGETHER) or next(iter(ways), "")


def _from_file(judgement: ServerJudgement, reply: Reply) -> bool:
    """Whether the last thing done to the reply's slot was to restore it."""
    before = [r for r in judgement.trace.replies if r.request < reply.request and r.slot == reply.slot]
    return bool(before) and isinstance(judgement.program.requests[before[-1].request], RestoreSlot)


def sign(violation: Violation, program: ServerScenario, memory: str, route: str) -> str:
    """Identity of a finding: oracle, memory kind, driver and route; for an end of the server what it said then."""
    if violation.oracle == "server-alive":
        key = violation.key
        return key if key.startswith("server-alive") else f"server-alive:{key}"
    kind = program.driver.kind if program.driver else ""
    return "/".join(x for x in (violation.oracle, memory, kind, route) if x)
