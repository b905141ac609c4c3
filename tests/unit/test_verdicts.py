"""Verdicts have three values; rows are held against band and near tie; the most specific violation comes first."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import MODEL, Ideal, Tape, ideal_judge, run

from oracles.account import Account, Compared, compare_rows
from oracles.band import FAR, Bands
from oracles.base import OracleFailure
from oracles.judge import Judgement
from oracles.ledger import Ledger, RowClaim, Seg
from oracles.reference import References, Rows, key_of
from oracles.registry import OBSERVATIONS, ORACLES, by_name
from oracles.rows import twin_rung
from oracles.verdict import Check, Verdict, Violation
from subjects.scenario import ContextParams, Decode, Draft, Part, Restore, Save, Scenario
from subjects.trace import End, Floats, Trace

CLAIM = RowClaim(0, 0, 0, (Seg(0, (1,), "all"),), 0, frozenset(), (), False, False, 0, ContextParams())


def compared(error: float = 0.0, band: float = 1.0, **more: float) -> Compared:
    values: dict[str, float] = {"nmse": 0.0, "token": 1, "expected": 1, "gap": 0.0, **more}
    return Compared(CLAIM, error, band, **values)  # type: ignore[arg-type]


def violation(oracle: str, step: int, key: str = "k") -> Violation:
    return Violation(oracle=oracle, key=key, rule="r", because="b", check=Check(kind="alive", step=step))


@pytest.mark.parametrize(
    ("verdict", "value"),
    [
        (Verdict(oracle="x"), "unknown"),
        (Verdict(oracle="x", unknown=("a reason",)), "unknown"),
        (Verdict(oracle="x", compared=1), "ok"),
        (Verdict(oracle="x", compared=1, unknown=("a reason",)), "ok"),
        (Verdict(oracle="x", violations=(violation("x", 0),)), "violated"),
        (Verdict(oracle="x", violations=(violation("x", 0),), compared=9), "violated"),
    ],
)
def test_three_values(verdict: Verdict, value: str) -> None:
    assert verdict.value == value


@pytest.mark.parametrize(
    ("error", "wrong", "ambiguous"),
    [
        (0.0, False, False),
        (1.0, False, False),
        (1.001, False, True),
        (FAR, False, True),
        (FAR * 1.001, True, False),
        (float("inf"), True, False),
        (float("nan"), True, False),
    ],
)
def test_noise_ambiguous_and_error(error: float, wrong: bool, ambiguous: bool) -> None:
    c = compared(error)
    assert (c.wrong, c.ambiguous) == (wrong, ambiguous)


@pytest.mark.parametrize(
    ("token", "gap", "other"), [(1, 0.0, False), (2, 0.5, False), (2, 2.0, False), (2, 2.01, True), (1, 9.0, False)]
)
def test_a_near_tie_is_no_other_token(token: int, gap: float, other: bool) -> None:
    assert compared(token=token, gap=gap).other_token is other


def test_hidden_rows_are_judged_by_their_own_band() -> None:
    assert not compared(hidden_error=1.0, hidden_band=0.1).hidden_wrong
    assert compared(hidden_error=3.1, hidden_band=0.1).hidden_wrong
    assert compared(hidden_error=float("nan"), hidden_band=0.1).hidden_wrong
    assert compared(hidden_error=1.0, hidden_band=0.1).hidden_ambiguous
    assert not compared(hidden_error=0.05, hidden_band=0.1).hidden_ambiguous


def test_only_a_twin_within_the_band_settles() -> None:
    assert not compared(2.0, twin=0.5).ambiguous
    assert compared(2.0, twin=1.5).ambiguous
    assert compared(2.0, twin=float("nan")).ambiguous
    assert "a state error" in twin_rung(float("nan"), 1.0)
    assert "the decodes are at fault" in twin_rung(0.5, 1.0)


def account(rows: Floats, reference: Floats | None, bands: Bands | None = None) -> Account:
    """Row 0 of a one-token history against a reference."""
    tape = Tape().decode((0, (1,)))
    ledger = tape.ledger()
    ledger.trace.logits = rows.astype(np.float32).tobytes()
    refs = References()
    if reference is not None:
        t = Trace([], [], End("ok"), logits=reference.astype(np.float32).tobytes())
        refs.put(key_of(ledger.rows[0]), t, 64, 8)
    return compare_rows(
        ledger, refs, bands or Bands(lambda programs: [run(s, Ideal()) for s in programs], MODEL, "b", None)
    )


def ramp(**at: float) -> Floats:
    row = np.linspace(0, 1, 64, dtype=np.float32)[None].copy()
    for i, x in at.items():
        row[0, int(i[1:])] = x
    return row


def test_rows_are_compared_in_full() -> None:
    same = account(ramp(), ramp())
    assert [(c.error, c.wrong, c.token, c.expected) for c in same.compared] == [(0.0, False, 63, 63)]
    # one number of 64 is enough, wherever it is
    for i in (0, 31, 63):
        (c,) = account(ramp(**{f"_{i}": 5.0}), ramp()).compared
        assert c.wrong
        assert c.error == pytest.approx(5.0 - i / 63, rel=1e-5)
        assert c.nmse > 0
        assert c.token == i
    (c,) = account(ramp(_3=5.0), ramp()).compared
    assert c.gap == pytest.approx(1.0 - 3 / 63, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_is_wrong_and_such_a_reference_judges_nothing(bad: float) -> None:
    (c,) = account(ramp(_9=bad), ramp()).compared
    assert c.wrong
    assert c.error == float("inf")
    no_reference = account(ramp(), ramp(_9=bad))
    assert no_reference.compared == []
    assert no_reference.unjudged == ["the reference itself is not finite"]


def test_what_cannot_be_compared_says_why() -> None:
    assert account(ramp(), None).unjudged == ["the reference program did not run"]
    assert account(np.zeros((0, 64), np.float32), ramp()).unjudged == ["the output row is missing"]
    assert account(ramp(), np.zeros((0, 64), np.float32)).unjudged == ["the reference program did not run"]
    dead = Bands(lambda programs: [Trace([], [], End("error")) for _ in programs], MODEL, "b", None)
    no_band = account(ramp(), ramp(), dead)
    assert no_band.compared == []
    assert no_band.unjudged == ["no band could be measured"]
    assert Rows(ramp(), ramp()).logits.shape == (1, 64)


# --- the judge --------------------------------------------------------------------------------------------------------

SAVED = (Decode(parts=(Part(seq=0, n=5),)), Save(seq=0, slot=0), Draft(seq=0, n=2), Restore(seq=0, slot=0))


def scenario(*ops: Save | Decode | Draft | Restore) -> Scenario:
    return Scenario(model=MODEL, ops=ops)


def test_nothing_compared_is_unknown_and_not_judged() -> None:
    judgement = ideal_judge().judge(Scenario(model=MODEL, ops=()), observed=False)
    assert not judgement.judged
    assert judgement.violations == []
    assert {v.oracle: v.value for v in judgement.verdicts if v.value != "unknown"} == {"liveness": "ok"}


def test_a_sound_program_is_ok_by_every_oracle_that_looks() -> None:
    judgement = ideal_judge().judge(scenario(*SAVED), variants=True)
    values = {v.oracle: v.value for v in judgement.verdicts if v.compared}
    assert set(values.values()) == {"ok"}
    assert {"liveness", "decode", "refusal", "blob", "positions", "logits", "draft", "first-token", "purity"} <= set(
        values
    )
    assert judgement.judged


def test_a_context_that_was_refused_is_unknown() -> None:
    class None_(Ideal):
        def new_context(self, p: ContextParams) -> int:
            return None  # type: ignore[return-value]

    judgement = ideal_judge("dense", None_).judge(scenario(*SAVED), fault="x")
    assert not judgement.judged
    assert judgement.violations == []
    assert any("not started" in reason for reason in judgement.unknown)


def test_the_earliest_step_and_then_the_most_specific_oracle_come_first() -> None:
    assert [o.rank for o in ORACLES] == sorted(o.rank for o in ORACLES)
    late = Verdict(oracle="liveness", violations=(violation("liveness", 7),))
    wide = Verdict(oracle="logits", violations=(violation("logits", 3),))
    narrow = Verdict(oracle="removal", violations=(violation("removal", 9), violation("removal", 3)))
    s = scenario()
    j = Judgement(s, Account(Ledger(s, Trace([], [], End("ok")))), [late, wide, narrow])
    found = [(v.oracle, v.check.step) for v in j.violations]
    assert found == [("removal", 3), ("logits", 3), ("liveness", 7), ("removal", 9)]


def test_a_crash_is_told_by_the_step_that_never_returned() -> None:
    class Dead(Ideal):
        def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
            raise KeyboardInterrupt

    judge = ideal_judge()
    s = scenario(*SAVED)
    with pytest.raises(KeyboardInterrupt):
        ideal_judge("dense", Dead).judge(s, fault="x")
    tape = Tape().decode((0, (1, 2))).step(Save(seq=0, slot=0), 0, 0, 0, rc=9, blobs=[(9, 9)])
    tape.step(Restore(seq=0, slot=0), 0, 0, 0, done=False)
    trace = tape.trace(End("signal", 11))
    found = judge.assess(tape.scenario, trace).violations
    assert [(v.oracle, v.check.step, v.kind, v.key) for v in found if v.oracle == "liveness"] == [
        ("liveness", 2, "crash", "liveness:SIGSEGV")
    ]


def test_every_oracle_is_a_class_of_its_own() -> None:
    assert len({o.name for o in ORACLES}) == len({o.failure for o in ORACLES}) == len({type(o) for o in ORACLES}) == 24
    assert sum(o.driver for o in ORACLES) == 11
    assert len({o.rank for o in ORACLES if o.driver}) == 11
    for o in ORACLES:
        assert by_name(o.name) is o
        assert issubclass(o.failure, OracleFailure)
        assert o.failure is not OracleFailure
        assert o.failure.__subclasses__() == []
        v = violation(o.name, 0)
        assert o.failure(v).violation is v
        assert o.explain(v).startswith("r\n\nb")
    with pytest.raises(KeyError, match="removal"):
        by_name("no such oracle")
    assert {"continue", "save-again", "resave", "neighbour-blobs"} == set(OBSERVATIONS)


def test_an_explanation_says_how_far_outside_it_is() -> None:
    v = Violation(
        oracle="logits", key="k", rule="r", because="b", check=Check(kind="rows", step=1), error=5.0, band=0.01
    )
    assert "500 x outside" in by_name("logits").explain(v)


def test_a_violation_is_checked_again_by_its_key() -> None:
    class Off(Ideal):
        def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
            rc = super().seq_set(ctx, seq, flags, blob)
            self.seqs[seq] = [(p, t ^ 1) for p, t in self.seqs[seq]]
            return rc

    judge = ideal_judge("dense", Off)
    bad = judge.judge(scenario(*SAVED), fault="x")
    good = judge.judge(scenario(*SAVED))
    assert good.violations == []
    assert bad.violations
    for v in bad.violations:
        assert by_name(v.oracle).recheck(v, bad.account)
        assert not by_name(v.oracle).recheck(v, good.account)
