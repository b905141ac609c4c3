"""State: what is saved of a sequence is what a clean context holds after the same history, by part, layer and position.

The first rung of the ladder: a restore that moves no bit of state is right whatever the logits do.
"""

from __future__ import annotations

import math

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.ledger import Moment, StateClaim
from oracles.reference import key_of, solo
from oracles.rows import DOUBT, NAME_OF, promised
from oracles.states import HeldState
from oracles.verdict import Check, Verdict, Violation
from subjects.scenario import Restore, RestoreAll, Save, SaveAll, Scenario


class StateFailure(OracleFailure):
    """A saved state is another one than that of a clean context."""


class State(Oracle):
    """Every host save, and every restore that was saved again, in canonical form against the same history in a clean
    context, within the bands of each tensor.
    """

    name = "state"
    title = "saved state of the same history"
    failure = StateFailure
    rank = 2
    observations = frozenset({"resave"})

    def judge(self, account: Account) -> Verdict:
        """Judge all claimed states; of equal violations in one sequence the first counts."""
        bad: list[Violation] = []
        unknown: list[str] = []
        seen: set[tuple[int, str, tuple[int, ...]]] = set()
        for h in account.states.held:
            if h.unjudged:
                unknown.append(h.unjudged)
            elif h.ambiguous:
                unknown.append(DOUBT)
            elif h.wrong:
                found = self._violation(account, h)
                if (which := (h.claim.seq, found.key, _shapers(h.claim))) not in seen:
                    seen.add(which)
                    bad.append(found)
        return Verdict(
            oracle=self.name,
            violations=tuple(bad),
            compared=len(account.states.held) - len(unknown),
            unknown=tuple(unknown),
        )

    def _violation(self, account: Account, h: HeldState) -> Violation:
        c, first = h.claim, h.found[0]
        moment = account.ledger.moments[c.step]
        shapers = _shapers(c)
        shaper = account.ledger.moments[shapers[-1]] if shapers else None
        name = NAME_OF[type((shaper or moment).op)]
        what = f"{first.key.part}.{first.key.tensor}"
        size = ""
        if math.isfinite(first.error):
            size = f" differs by {first.error:.3g} (honest differences here stay below {h.band:.2g})"
        rest = h.told.removeprefix(first.text)
        because = f"{_argument(account, h, moment)}; but {first.text}{size}{rest}."
        params, seq, chain = key_of(c)
        # without places sizes are compared, which depend on how many sequences there could be
        clean = solo(account.ledger.scenario.model, params if h.places else c.params, seq, chain)
        reference = Scenario(
            model=clean.model, params=clean.params, ops=(*clean.ops, Save(seq=0, slot=0)), note="reference: state"
        )
        check = Check(
            kind="state",
            step=c.step,
            seq=c.seq,
            row=c.blob,
            band=h.band,
            expected=h.places,
            what=first.text,
            reference=reference,
        )
        error = first.error if math.isfinite(first.error) else 0.0
        return Violation(
            oracle=self.name,
            key=f"state:{name}:{what}",
            rule=f"{promised(shaper, moment)}; the saved state is another",
            because=because,
            check=check,
            error=error,
            band=h.band if error else 0.0,
            suspects=tuple(reversed(shapers)) or (c.step,),
        )


def _shapers(claim: StateClaim) -> tuple[int, ...]:
    """The operations that a state is from, latest last: of an empty one that which emptied it. What was called on it
    since had nothing to change.
    """
    if claim.chain:
        return claim.shaped
    return (claim.emptied_by,) if claim.emptied_by >= 0 else ()


def _argument(account: Account, h: HeldState, moment: Moment) -> str:
    c = h.claim
    whose = f"sequence {c.seq}"
    if not c.chain:
        if isinstance(moment.op, Restore | RestoreAll):
            return f"Operation {c.step} restored a state in which {whose} is empty, so nothing of it must be left"
        emptied = f"was emptied by operation {c.emptied_by}" if c.emptied_by >= 0 else "never held anything"
        return f"{whose.capitalize()} {emptied}, so nothing of it must be in what operation {c.step} saves"
    must = "must be what a clean context holds after the same tokens"
    if isinstance(moment.op, Restore | RestoreAll):
        saves = [
            m.step.op
            for m in account.ledger.moments[: c.step]
            if isinstance(m.op, Save | SaveAll) and m.op.slot == moment.op.slot
        ]
        return (
            f"Operation {c.step} restored what operation {saves[-1]} saved, and nothing else happened to {whose}, so "
            f"its state {must}"
        )
    past = "was only ever decoded into"
    if c.shaped:
        ops = [f"{i} ({NAME_OF[type(account.ledger.moments[i].op)]})" for i in c.shaped[-4:]]
        past = f"went through operation {', '.join(ops)}"
    return f"{whose.capitalize()} {past}, so what operation {c.step} saves of it {must}"
