"""The account of one run: its ledger, and every output row held against its reference. All that an oracle may look "
"at."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from oracles.band import FAR, Bands
from oracles.ledger import Ledger, Moment, RowClaim
from oracles.reference import References, Rows, key_of
from subjects.scenario import Op
from subjects.trace import Floats


@dataclass(frozen=True, slots=True)
class Compared:
    """One output row against its reference.

    error: largest absolute difference of the logits. band: largest honest one. token / expected: arg max of both.
    gap: by how much
    the reference prefers its first token to the subject's. twin: largest difference from the twin, where it was run.
    hidden_error / hidden_band: the same for embedding rows (0
    without them).
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

    @property
    def wrong(self) -> bool:
        """Far outside the band: a state error."""
        return not self.error <= self.band * FAR

    @property
    def ambiguous(self) -> bool:
        """Between noise and error, and the twin does not settle it."""
        return not self.wrong and self.error > self.band and (self.twin is None or self.twin > self.band)

    @property
    def other_token(self) -> bool:
        """A different greedy token that is no near tie: the reference prefers its own by more than the band."""
        return self.token != self.expected and self.gap > 2 * self.band

    @property
    def hidden_wrong(self) -> bool:
        """The embedding row is far outside its band."""
        return not self.hidden_error <= self.hidden_band * FAR


@dataclass(slots=True)
class Account:
    """Everything known of one run. `unjudged`: reasons why rows could not be compared."""

    ledger: Ledger
    compared: list[Compared] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    build: str = ""

    @property
    def memory(self) -> str:
        """Memory kind of the model."""
        facts = self.ledger.trace.facts
        return facts[0].memory if facts else "?"

    def shaper(self, claim: RowClaim) -> tuple[Op, Moment] | None:
        """The last operation other than a decode that the claim's history went through, with its moment."""
        if not claim.shaped:
            return None
        m = self.ledger.moments[claim.shaped[-1]]  # one moment an operation, in order
        return m.op, m


def compare_rows(ledger: Ledger, references: References, bands: Bands) -> Account:
    """Hold every row claim of a ledger against its reference; references must have been computed "
    "(References.missing)."""
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
    bands_of: dict[tuple[object, frozenset[str]], tuple[float, float]] = {}
    for i, (claim, rows) in enumerate(usable):
        if np.isnan(error[i]):
            account.unjudged.append("the reference itself is not finite")
            continue
        params = claim.params
        which = (params, claim.kinds)
        if which not in bands_of:
            bands_of[which] = (
                bands.band(params, claim.kinds),
                bands.band(params, claim.kinds, hidden=True) if params.embeddings else 0.0,
            )
        band, hidden_band = bands_of[which]
        hidden_error = 0.0
        if params.embeddings and claim.row < len(hidden) and claim.ref_row < len(rows.hidden):
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
            )
        )
    return account
