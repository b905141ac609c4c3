"""The account of one run: its ledger, and every output row held against its reference. All that an oracle may look "
"at."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from oracles.band import FAR, Bands
from oracles.drive import Driven
from oracles.ledger import Ledger, Moment, RowClaim
from oracles.reference import References, Rows, key_of
from oracles.states import HeldState, States
from subjects.scenario import Op
from subjects.trace import Floats


@dataclass(frozen=True, slots=True)
class Compared:
    """One output row against its reference.

    error: largest absolute difference of the logits. band: largest honest one. token / expected: arg max of both.
    gap: by how much the reference prefers its first token to the subject's. twin: largest difference from the twin,
    where it was run. hidden_error / hidden_band: the same for embedding rows (0 without them); hidden_unjudged: why
    the embedding row could not be compared.
    """

    claim: RowClaim
    error: float
    band: float
    nmse: float
    token: int
    expected: int
    gap: float
    hidden_error: float = 0.0
    hidden_band: float = 0.0
    twin: float | None = None
    hidden_unjudged: str = ""

    @property
    def wrong(self) -> bool:
        """Far outside the band: a state error."""
        return not self.error <= self.band * FAR

    @property
    def ambiguous(self) -> bool:
        """Between noise and error, and the twin does not settle it."""
        settled = self.twin is not None and self.twin <= self.band
        return not self.wrong and self.error > self.band and not settled

    @property
    def right(self) -> bool:
        """Within the band."""
        return self.error <= self.band

    @property
    def other_token(self) -> bool:
        """A different greedy token that is no near tie: the reference prefers its own by more than the band."""
        return self.token != self.expected and self.gap > 2 * self.band

    @property
    def hidden_wrong(self) -> bool:
        """The embedding row is far outside its band."""
        return not self.hidden_error <= self.hidden_band * FAR

    @property
    def hidden_ambiguous(self) -> bool:
        """The embedding row is between noise and error."""
        return not self.hidden_wrong and self.hidden_error > self.hidden_band


@dataclass(slots=True)
class Account:
    """Everything known of one run. `unjudged`: reasons why rows could not be compared. `driven`: the driver's side.
    `states`: its saved states.
    """

    ledger: Ledger
    compared: list[Compared] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    build: str = ""
    driven: Driven | None = None
    states: States = field(default_factory=lambda: States([], {}))
    _since: dict[int, int] | None = field(default=None, init=False, repr=False)

    @property
    def memory(self) -> str:
        """Memory kind of the model."""
        facts = self.ledger.trace.facts
        driver = self.ledger.scenario.driver
        return (facts[0].memory if facts else "?") + (f"-{driver.kind}" if driver else "")

    def shaper(self, claim: RowClaim) -> tuple[Op, Moment] | None:
        """The operation to blame first for a claim: the last one other than a decode that its history went through,
        with its moment.

        None where there is none, and for a wrong row whose sequence gave right rows since, before operations on other
        sequences: then these come first.
        """
        if not claim.shaped or self.right_since(claim) is not None:
            return None
        m = self.ledger.moments[claim.shaped[-1]]  # one moment an operation, in order
        return m.op, m

    def right_since(self, claim: RowClaim) -> int | None:
        """For a wrong row: the step in which its sequence, through the same operations, gave a row that was right, if
        operations on other sequences came in between."""
        if self._since is None:
            self._since = self._find_right()
        return self._since.get(claim.row)

    def state_rung(self, seq: int, step: int) -> str:
        """What the last judged state of a sequence says, saved in a step or before it; empty where there is none."""
        seen: HeldState | None = None
        for h in self.states.held:
            if h.claim.seq == seq and h.claim.step <= step and not h.unjudged:
                seen = h
        if seen is None:
            return ""
        what = "" if not seen.wrong and not seen.ambiguous else "first part that differs: "
        return f"state of sequence {seq} saved in operation {seen.claim.step}: {what}{seen.told}"

    def worked(self) -> list[tuple[int, frozenset[int], Op]]:
        """Operations other than decodes that changed something: number, sequences worked on, operation."""
        return [
            (m.step.op, m.touched, m.op)
            for m in self.ledger.moments
            if m.touched and not m.step.batches and not m.step.skipped
        ]

    def _find_right(self) -> dict[int, int]:
        found: dict[int, int] = {}
        if not any(r.wrong and r.claim.shaped for r in self.compared):
            return found
        worked = self.worked()
        last: dict[tuple[int, tuple[int, ...]], int] = {}
        for r in self.compared:
            c = r.claim
            if c.shaped and r.right:
                last[c.seq, c.shaped] = c.step
            elif r.wrong:
                right = last.get((c.seq, c.shaped))
                if right is not None and any(right < i < c.step and c.seq not in seqs for i, seqs, _ in worked):
                    found[c.row] = right
        return found


def compare_rows(ledger: Ledger, references: References, bands: Bands) -> Account:
    """Hold every row claim of a ledger against its reference; references must have been computed
    (References.missing).
    """
    account = Account(ledger)
    account.unjudged.extend(reason for _, reason in ledger.undefined_rows)
    if not ledger.rows:
        return account
    subject = ledger.trace.logit_rows()
    hidden = ledger.trace.hidden_rows()
    usable: list[tuple[RowClaim, Rows]] = []
    for claim in ledger.rows:
        rows = references.get(key_of(claim))
        if rows is None or claim.ref_row >= len(rows.logits):
            account.unjudged.append("the reference program did not run")
        elif claim.row >= len(subject):
            account.unjudged.append("the output row is missing")
        else:
            usable.append((claim, rows))
    if not usable:
        return account
    mine: Floats = subject[[c.row for c, _ in usable]]
    theirs: Floats = np.stack([r.logits[c.ref_row] for c, r in usable])
    difference = np.abs(mine - theirs)
    error = np.where(np.isfinite(difference).all(axis=1), difference.max(axis=1), np.inf)
    error = np.where(np.isfinite(theirs).all(axis=1), error, np.nan)
    with np.errstate(all="ignore"):
        nmse = (difference**2).sum(axis=1) / np.maximum((theirs**2).sum(axis=1), 1e-30)
    token, expected = mine.argmax(axis=1), theirs.argmax(axis=1)
    at = np.arange(len(usable))
    gap = theirs[at, expected] - theirs[at, token]
    bands_of: dict[tuple[object, frozenset[str]], tuple[float, float] | None] = {}
    for i, (claim, rows) in enumerate(usable):
        if np.isnan(error[i]):
            account.unjudged.append("the reference itself is not finite")
            continue
        params = claim.params
        which = (params, claim.kinds)
        if which not in bands_of:
            bands_of[which] = (
                (
                    bands.band(params, claim.kinds),
                    bands.band(params, claim.kinds, hidden=True) if params.embeddings else 0.0,
                )
                if bands.known(params)
                else None
            )
        both = bands_of[which]
        if both is None:
            account.unjudged.append("no band could be measured")
            continue
        band, hidden_band = both
        hidden_error, hidden_unjudged = 0.0, ""
        if params.embeddings:
            if claim.row >= len(hidden):
                hidden_unjudged = "the hidden row is missing"
            elif claim.ref_row >= len(rows.hidden) or not np.isfinite(rows.hidden[claim.ref_row]).all():
                hidden_unjudged = "the reference's hidden row is missing or not finite"
            else:
                hidden_error = float(np.abs(hidden[claim.row] - rows.hidden[claim.ref_row]).max())
        account.compared.append(
            Compared(
                claim,
                float(error[i]),
                band,
                float(nmse[i]),
                int(token[i]),
                int(expected[i]),
                float(gap[i]),
                hidden_error,
                hidden_band,
                hidden_unjudged=hidden_unjudged,
            )
        )
    return account
