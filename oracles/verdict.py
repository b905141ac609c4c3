"""Verdicts: what an oracle says about a trace, and the check that a reproducer must make to see it too.

A verdict has three values. `unknown` always has a reason; a run in which nothing was compared is unknown, never ok.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from subjects.scenario import Scenario


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one comparison that shows a violation, in terms of the trace, so that a plain program can repeat it.

    rows: output row `row` of the subject must equal row `ref_row` of `reference` (a program for a clean context)
    within `band`, the
    largest allowed absolute difference; `hidden` compares embedding rows instead of logits.
    positions: after step `step` sequence `seq` must have (pos_min, pos_max) = `expected`.
    answer: step `step` must return one of `expected` (bool as 0/1; for saves and restores: the byte count, 0 means
    refused).
    blob: in step `step`, numbers `expected` = [a, b]: blobs a and b must have the same bytes (`what` "bytes"), or
    blob a's size must
    equal what was moved (`what` "size"); "neighbour" compares the last blobs of steps a and b; "places" what differs
    first in a and b, whose places follow (below), bit for bit.
    state: blob `row` of step `step` must hold for `seq` the state that `reference` saves at its end. `expected` are the
    places of what differs first in both blobs, `what` is that in words: a row, within `band` (type, start, pieces,
    size, apart; twice), or cells (offset of their number, whether they have an extension, the least position that
    counts, the sequence or -1 for all; twice, -1 as the second offset where no cells must be there). Without places the
    sizes of both are compared.
    draft: in step `step` a driver must draft `expected` for sequence `seq`, as `reference` does at its end;
    `what` says what differs (row, tokens, logits, target, positions, two drivers, or how a state was mangled).
    alive: the program must end by itself; it dies (or hangs) in step `step`.
    reply: of llama-server, the answer to part `seq` of request `step`: its token `row` must be `expected`[1] but is
    `expected`[0] (`what` "tokens"), has another probability ("logprob"), it ends behind expected[0] tokens instead of
    expected[1] ("length"), has no good status ("status": expected[0]), fewer drafts are accepted ("acceptance":
    expected[0] are, expected[1] must be), depends on other conversations ("history") or on drafting ("drafting"), or a
    slot action was answered wrongly ("slot").
    """

    kind: Literal["rows", "positions", "answer", "blob", "alive", "draft", "state", "reply"]
    step: int
    seq: int = -1
    row: int = -1
    ref_row: int = -1
    band: float = 0.0
    hidden: bool = False
    expected: tuple[int, ...] = ()
    what: str = ""
    reference: Scenario | None = None


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One broken expectation.

    key: what two violations share when they are the same fault seen by the same oracle, apart from memory kind and
    culprit.
    rule: first line of a report, "llama.h says ..." or "llama.h is silent; ...". because: the argument ("X must equal
    Y because ...;
    but ..."). error / band: measured sizes where rows were compared (0 otherwise). rungs: what the verdict stands on,
    a line each (twin, band, near tie). suspects: scenario operations that
    may have
    broken it, latest first.
    """

    oracle: str
    key: str
    rule: str
    because: str
    check: Check
    kind: Literal["fault", "contract", "crash", "misuse"] = "fault"
    error: float = 0.0
    band: float = 0.0
    nmse: float = 0.0
    suspects: tuple[int, ...] = ()
    rungs: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one oracle says about one run. `compared` counts judged comparisons; `unknown` counts those that could
    not be judged.
    """

    oracle: str
    violations: tuple[Violation, ...] = ()
    compared: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def value(self) -> Literal["ok", "violated", "unknown"]:
        """Three-valued outcome."""
        if self.violations:
            return "violated"
        return "ok" if self.compared else "unknown"
