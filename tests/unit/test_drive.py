"""Claims on drafts against their references: the driver's limits, noise and near ties, and what a reference is."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from driver_fakes import DriverTape, IdealDriver, driver_judge, run
from fakes import MODEL

from oracles.band import FAR
from oracles.drive import (
    Bands,
    Clean,
    DriverBands,
    DriverReferences,
    Held,
    Key,
    clean,
    hold,
    key_of,
    limited,
    plain_driver,
    program,
)
from oracles.lines import DraftClaim, Event, Given, Line
from subjects.scenario import Begin, ContextParams, Decode, DriverKind, DriverParams, Propose, Scenario, Verify
from subjects.trace import Batch, End, Floats, Trace

P = ContextParams()
MTP = DriverParams(kind="draft-mtp")
BAND = 0.1


def rows(*best: tuple[int, float]) -> Floats:
    """A row of draft logits for each (token, by how much it is preferred to all others)."""
    table = np.zeros((len(best), 64), np.float32)
    for row, (token, gap) in zip(table, best, strict=True):
        row[token] = gap
    return table


def ref(*best: tuple[int, float], hidden: float = 0.0) -> Clean:
    return Clean(tuple(t for t, _ in best), Given(np.full(8, hidden, np.float32), rows(*best)))


# --- limits -----------------------------------------------------------------------------------------------------------

SLACK = 0.005  # what logits may be off by: probabilities of 1 in 10 by a thousandth
SURE, EVEN = 20.0, 0.0  # probabilities of 1 and of 1 in 10
LONG = ref((1, SURE), (2, SURE), (3, EVEN), (4, SURE))


@pytest.mark.parametrize(
    ("driver", "n_max", "drafts"),
    [
        ({}, -1, (1, 2, 3, 4)),
        ({}, 0, (1, 2, 3, 4)),
        ({}, 3, (1, 2, 3)),
        ({}, 9, (1, 2, 3, 4)),
        ({"p_min": 0.05}, -1, (1, 2, 3, 4)),
        ({"p_min": 0.5}, -1, (1, 2)),  # nothing behind a token that was not sure
        ({"p_min": 0.5}, 1, (1,)),
        ({"n_min": 4}, -1, (1, 2, 3, 4)),
        ({"n_min": 5}, -1, ()),
        ({"n_min": 3, "p_min": 0.5}, -1, ()),
        ({"n_min": 2, "p_min": 0.5}, -1, (1, 2)),
        # most kinds draft on and are cut behind that; draft-simple stops there, and what it has may be too short
        ({"n_min": 3}, 2, (1, 2)),
        ({"n_min": 3, "kind": "draft-simple"}, 2, ()),
        ({"n_min": 2, "kind": "draft-simple"}, 2, (1, 2)),
        ({"kind": "draft-simple"}, -1, (1, 2, 3, 4)),
    ],
)
def test_a_reference_is_held_to_the_limits_of_the_subject(
    driver: dict[str, object], n_max: int, drafts: tuple[int, ...]
) -> None:
    d = DriverParams(**{"kind": "draft-mtp", **driver})  # type: ignore[arg-type]
    assert limited(LONG, d, n_max, 0.0) == (drafts, False)


def test_the_probability_is_that_among_the_ten_best() -> None:
    row = np.zeros((1, 64), np.float32)
    row[0, :20] = 5.0
    row[0, 3] = 6.0
    among_ten = float(1 / (1 + 9 * np.exp(-1.0)))
    at = Clean((3,), Given(None, row))
    assert limited(at, DriverParams(kind="draft-mtp", p_min=among_ten - 0.01), -1, SLACK) == ((3,), False)
    assert limited(at, DriverParams(kind="draft-mtp", p_min=among_ten + 0.01), -1, SLACK) == ((), False)
    # near it nobody can say how long the draft is, and how near follows from what logits may be off by
    assert limited(at, DriverParams(kind="draft-mtp", p_min=among_ten + 0.0005), -1, SLACK)[1]
    assert limited(at, DriverParams(kind="draft-mtp", p_min=among_ten - 0.0005), -1, SLACK)[1]
    assert not limited(at, DriverParams(kind="draft-mtp", p_min=among_ten - 0.0005), -1, SLACK / 10)[1]


def test_a_probability_behind_the_end_of_a_draft_is_no_doubt() -> None:
    unsure = 0.1 + 0.0005
    d = DriverParams(kind="draft-mtp", p_min=unsure)
    assert limited(LONG, d, -1, SLACK) == ((1, 2), True)
    assert limited(ref((1, SURE), (2, SURE)), d, -1, SLACK) == ((1, 2), False)


def test_without_logits_there_is_no_limit_by_probability() -> None:
    hidden = Clean((1, 2), Given(None, np.empty((0, 64), np.float32)))
    assert limited(hidden, DriverParams(kind="ngram-mod", p_min=0.9), -1, SLACK) == ((1, 2), False)


# --- what is wrong ----------------------------------------------------------------------------------------------------

CLAIM = DraftClaim(3, 0, Line(), 7, -1, (1, 2), Given(None, rows()), 8, 8)


def held(**what: object) -> Held:
    values: dict[str, object] = {
        "claim": CLAIM,
        "row_error": 0.0,
        "row_band": BAND,
        "error": 0.0,
        "band": BAND,
        "nmse": 0.0,
        "at": -1,
        "gap": float("nan"),
        "expected": (1, 2),
        "unsure": False,
        "changed": 0,
    }
    return Held(**{**values, **what})  # type: ignore[arg-type]


NAN, INF = float("nan"), float("inf")
OUT = BAND * FAR * 1.001


@pytest.mark.parametrize(
    ("what", "row", "tokens", "drafts", "ambiguous"),
    [
        ({}, False, False, False, False),
        ({"row_error": BAND}, False, False, False, False),
        ({"row_error": BAND * 1.01}, False, False, False, True),
        ({"row_error": OUT}, True, False, False, False),
        ({"row_error": INF}, True, False, False, False),
        ({"row_error": NAN}, False, False, False, False),  # it cannot be seen
        ({"error": BAND * 1.01}, False, False, False, True),
        ({"error": OUT}, False, False, True, False),
        ({"error": INF}, False, False, True, False),
        # another token: a near tie as long as the reference hardly prefers its own
        ({"at": 1, "gap": 0.0}, False, False, False, True),
        ({"at": 1, "gap": 2 * BAND * FAR}, False, False, False, True),
        ({"at": 1, "gap": 2 * BAND * FAR * 1.001}, False, True, True, False),
        ({"at": 1, "gap": NAN}, False, True, True, False),  # where nobody knows by how much
        ({"at": 1, "gap": NAN, "unsure": True}, False, False, False, True),
        ({"at": 1, "gap": 9.0, "unsure": True, "error": OUT}, False, False, True, False),
        ({"row_error": OUT, "at": 0, "gap": 9.0, "error": OUT}, True, True, True, False),
        # made from a row that is in doubt, a draft is in doubt
        ({"row_error": BAND * 1.01, "error": OUT}, False, False, False, True),
        ({"row_error": BAND * 1.01, "at": 1, "gap": 9.0}, False, True, False, True),
    ],
)
def test_noise_doubt_and_error(what: dict[str, object], row: bool, tokens: bool, drafts: bool, ambiguous: bool) -> None:
    h = held(**what)
    assert (h.row_wrong, h.tokens_wrong, h.drafts_wrong, h.ambiguous) == (row, tokens, drafts, ambiguous)
    assert h.wrong == (row or drafts)
    assert not (h.wrong and h.ambiguous)


def test_a_row_at_another_place_is_wrong_whatever_it_is() -> None:
    c = DraftClaim(3, 0, Line(), 7, -1, (1, 2), Given(None, rows()), 7, 8)
    assert held(claim=c).misplaced
    assert held(claim=c).row_wrong
    assert not held(claim=c, row_error=NAN).misplaced, "a driver without rows"
    assert not held().misplaced


class Unsteady(IdealDriver):
    """A token is paired with what its batch began with."""

    def before(self, seq: int, pos: int) -> bytes:
        return self.rows[seq].get(self.began[seq], bytes(4 * 8))


# --- claims against references ----------------------------------------------------------------------------------------


def judged(
    subject: Clean,
    reference: Clean | None,
    *,
    n_max: int = -1,
    last: int = 7,
    band: float = BAND,
    noise: float = 0.0,
    **driver: object,
) -> Held | str:
    """One claim of what `subject` shows, held against a reference."""
    d = DriverParams(**{"kind": "draft-mtp", **driver})  # type: ignore[arg-type]
    tape = DriverTape(str(d.kind)).decode((0, (5, 6, 7)))
    account = tape.account()
    assert account.driven is not None
    account.driven.driver = d
    (line,) = (account.driven.drive.lines[-1][0],)
    claim = DraftClaim(0, 0, line, last, n_max, subject.drafts, subject.given, 3, 3)
    account.driven.drive.claims[:] = [claim]

    class References(DriverReferences):
        def get(self, keys: object) -> dict[Key, Clean | None]:
            return {k: reference for k in keys}  # type: ignore[attr-defined]

    class Measured(DriverBands):
        def band(self, params: ContextParams, driver: DriverParams, *, apart: bool) -> Bands | None:
            return Bands(band, band) if band else None

    scenario = msgspec.structs.replace(tape.scenario, driver=d)
    hold(
        account.driven,
        scenario,
        [P],
        References(MODEL, lambda _: []),
        Measured(MODEL, lambda _: [], 64, "b", None),
        lambda _, __: noise,
    )
    if account.driven.unjudged:
        assert not account.driven.held
        return account.driven.unjudged[0]
    (found,) = account.driven.held
    return found


def right(h: Held | str) -> bool:
    assert isinstance(h, Held)
    return not h.wrong and not h.ambiguous


def test_equal_drafts_are_right() -> None:
    clean_ = ref((1, 5.0), (2, 5.0), hidden=3.0)
    assert right(judged(clean_, clean_))


def test_every_number_of_rows_and_logits_is_compared() -> None:
    clean_ = ref((1, 5.0), (2, 5.0))
    for i in (0, 7):
        other = ref((1, 5.0), (2, 5.0))
        assert other.given.hidden is not None
        other.given.hidden[i] = 4.0
        h = judged(other, clean_)
        assert isinstance(h, Held)
        assert (h.row_error, h.row_wrong, h.drafts_wrong) == (4.0, True, False)
    for row, col in itertools.product((0, 1), (0, 33, 63)):
        other = ref((1, 5.0), (2, 5.0))
        other.given.logits[row, col] -= 4.0
        h = judged(other, clean_)
        assert isinstance(h, Held)
        assert (h.error, h.changed, h.drafts_wrong, h.row_wrong) == (4.0, 1, True, False)
        assert h.nmse == pytest.approx(16.0 / 50.0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_no_number_is_wrong(bad: float) -> None:
    clean_, other = ref((1, 5.0), hidden=1.0), ref((1, 5.0), hidden=1.0)
    other.given.logits[0, 9] = bad
    h = judged(other, clean_)
    assert isinstance(h, Held)
    assert h.drafts_wrong
    row = ref((1, 5.0), hidden=bad)
    h = judged(row, clean_)
    assert isinstance(h, Held)
    assert h.row_wrong


def test_a_row_of_another_width_is_wrong() -> None:
    narrow = Clean((1,), Given(np.zeros(4, np.float32), rows((1, 5.0))))
    h = judged(narrow, ref((1, 5.0)))
    assert isinstance(h, Held)
    assert h.row_error == INF


def test_logits_behind_another_token_say_nothing() -> None:
    clean_ = ref((1, 9.0), (2, 9.0), (3, 9.0))
    other = ref((1, 9.0), (9, 9.0), (40, 99.0))
    h = judged(other, clean_)
    assert isinstance(h, Held)
    assert (h.at, h.gap, h.error) == (1, 9.0, 9.0)
    assert h.tokens_wrong


def test_a_near_tie_is_no_other_draft() -> None:
    clean_ = ref((1, 5.0), (2, 0.05))
    other = Clean((1, 9), Given(clean_.given.hidden, clean_.given.logits.copy()))
    h = judged(other, clean_)
    assert isinstance(h, Held)
    assert (h.at, h.gap) == (1, pytest.approx(0.05))
    assert not h.wrong
    assert h.ambiguous
    clear = ref((1, 9.0), (2, 9.0))
    h = judged(Clean((1, 9), clear.given), clear)
    assert isinstance(h, Held)
    assert h.tokens_wrong


def test_a_draft_of_another_length_is_wrong_unless_its_probability_hangs() -> None:
    clean_ = ref((1, SURE), (2, EVEN))
    short = Clean((1,), Given(clean_.given.hidden, clean_.given.logits[:1]))
    h = judged(short, clean_)
    assert isinstance(h, Held)
    assert (h.at, h.tokens_wrong) == (1, True)
    assert right(judged(short, clean_, p_min=0.5))
    h = judged(short, clean_, p_min=0.0996)
    assert isinstance(h, Held)
    assert h.unsure
    assert not h.wrong
    assert right(judged(short, clean_, n_max=1))
    longer = judged(clean_, clean_, n_max=1)
    assert isinstance(longer, Held)
    assert longer.tokens_wrong, "the asked length is a limit"


def test_what_the_target_itself_may_differ_by_is_honest() -> None:
    """Seen with gemma4: a row is the target's, and in a shared cache its rows moved further than a solo's."""
    clean_, other = ref((1, 90.0), hidden=3.0), ref((1, 90.0), hidden=3.0 + 0.3 * FAR)
    h = judged(other, clean_)
    assert isinstance(h, Held)
    assert h.row_wrong
    h = judged(other, clean_, noise=0.11)
    assert isinstance(h, Held)
    assert (h.row_wrong, h.row_band, h.band) == (False, pytest.approx(0.33), pytest.approx(9.9))


def test_drivers_that_differ_from_themselves_give_no_band() -> None:
    """A band as wide as what is shown would call every fault honest."""

    def many(programs: object) -> list[Trace]:
        return [run(s, driver=Unsteady) for s in programs]  # type: ignore[attr-defined]

    assert DriverBands(MODEL, many, 64, "b", None).band(P, MTP, apart=True) is None


def test_only_the_row_is_held_where_nothing_was_drafted() -> None:
    h = judged(ref((9, 5.0)), ref((1, 5.0)), last=-1)
    assert isinstance(h, Held)
    assert (h.at, h.error, h.expected) == (-1, 0.0, ())
    assert right(h)


def test_a_row_that_cannot_be_seen_is_not_held() -> None:
    unseen = Clean((1,), Given(None, rows((1, 5.0))))
    h = judged(unseen, ref((1, 5.0), hidden=5.0))
    assert isinstance(h, Held)
    assert np.isnan(h.row_error)
    assert right(h)


def test_what_cannot_be_judged_says_why() -> None:
    assert judged(ref((1, 5.0)), None) == "the reference did not run"
    assert judged(ref((1, 5.0)), ref((1, 5.0)), band=0.0) == "no band could be measured"


def test_the_first_row_of_all_is_zeros_and_needs_no_reference() -> None:
    def first(hidden: bytes) -> Held:
        account = DriverTape().decode((0, (5, 6))).account()
        assert account.driven is not None
        (claim,) = account.driven.drive.claims
        assert not claim.line.history.length
        row = np.frombuffer(hidden, np.float32)
        account.driven.drive.claims[:] = [
            DraftClaim(claim.step, 0, claim.line, -1, -1, (), Given(row, rows()), claim.pos, claim.want_pos)
        ]
        hold(
            account.driven,
            account.ledger.scenario,
            [P],
            DriverReferences(MODEL, lambda _: pytest.fail("a reference was run")),
            DriverBands(MODEL, lambda _: pytest.fail("a band was measured"), 64, "b", None),
            lambda _, __: pytest.fail("nothing of the target is in it"),
        )
        (found,) = account.driven.held
        return found

    assert not first(bytes(32)).wrong
    assert first(np.full(8, 1e-3, np.float32).tobytes()).row_wrong


# --- references -------------------------------------------------------------------------------------------------------


def claims_of(tape: DriverTape) -> list[DraftClaim]:
    return tape.read()[1].claims


def test_one_reference_serves_all_ways_to_the_same_tokens() -> None:
    a = DriverTape(offers=True).decode((0, (5, 6, 7, 8))).checkpoint(0).decode((0, (1,))).rewind(0)
    a.propose((0, 3, (4,)))
    b = DriverTape(params=ContextParams(n_seq_max=3, kv_unified=True, n_batch=32, n_threads=2))
    b.decode((1, (5,))).decode((1, (6, 7))).decode((1, (8,))).propose((1, 3, (4,)), n_max=1)
    keys = [key_of(claims_of(t)[-1], t.scenario, t.params) for t in (a, b)]
    assert keys[0] == keys[1]
    assert keys[0].events == (Event("decode", (5, 6, 7, 8)),)
    assert keys[0].last == 3


@pytest.mark.parametrize(
    "change", [{"n_ubatch": 16}, {"flash_attn": True}, {"type_k": "f16"}, {"n_rs_seq": 1}, {"swa_full": True}]
)
def test_what_may_change_a_row_is_part_of_the_key(change: dict[str, object]) -> None:
    claim = claims_of(DriverTape().decode((0, (5,))).propose((0, 3, (4,))))[-1]
    s = DriverTape().scenario
    assert key_of(claim, s, P) != key_of(claim, s, ContextParams(**change))  # type: ignore[arg-type]


def test_the_reference_is_the_real_driver_and_hides_nothing() -> None:
    d = DriverParams(
        kind="draft-mtp", impl="reference", backend_sampling=True, late=True, n_min=2, p_min=0.5, n_max=2, state=False
    )
    plain = DriverParams(kind="draft-mtp", n_max=2, state=False)
    assert plain_driver(d) == plain
    claim = claims_of(DriverTape().decode((0, (5,))).propose((0, 3, (4,))))[-1]
    assert key_of(claim, Scenario(model=MODEL, ops=(), driver=d), P).driver == plain
    # of a claim on a row alone the token behind does not matter
    first = claims_of(DriverTape().decode((0, (5,))).decode((0, (6,))))[-1]
    assert key_of(first, Scenario(model=MODEL, ops=(), driver=d), P).last == 0


def test_a_kind_that_learns_repeats_its_calls() -> None:
    tape = DriverTape("ngram-map-k", p_min=0.0).decode((0, (5, 6))).begin(0).propose((0, 3, (4, 5)), n_max=2)
    tape.verify((0, 1)).propose((0, 9, (1,)))
    key = key_of(claims_of(tape)[-1], tape.scenario, P)
    assert [e.what for e in key.events] == ["decode", "begin", "propose", "verify"]
    made = program(MODEL, key)
    assert [type(op) for op in made.ops] == [Decode, Begin, Propose, Verify, Propose]
    assert made.ops[2] == Propose(seqs=(0,), last=(3,), n_max=2)
    assert made.ops[3] == Verify(seqs=(0,), accept=(1,))
    assert made.ops[4] == Propose(seqs=(0,), last=(9,))


def test_an_open_verification_is_repeated_as_one_round() -> None:
    """The rows that were decoded for it are those that the reference's own verification decodes."""
    tape = DriverTape("ngram-cache").decode((0, (5, 6))).propose((0, 3, (4, 5))).verify((0, 0), open_=True)
    tape.accept(0, 1).propose((0, 9, (1,)))
    made = program(MODEL, key_of(claims_of(tape)[-1], tape.scenario, P))
    assert [type(op) for op in made.ops] == [Decode, Propose, Verify, Propose]
    trace = run(made)
    assert trace.end.how == "ok"
    assert not any(s.skipped for s in trace.steps)


def test_a_reference_decodes_in_batches_that_fit() -> None:
    tape = DriverTape().decode((0, range(60))).decode((0, range(60))).propose((0, 3, (4,)))
    key = key_of(claims_of(tape)[-1], tape.scenario, ContextParams(n_batch=16, n_ubatch=16))
    made = program(MODEL, key)
    assert [len(op.parts[0].tokens or ()) for op in made.ops if isinstance(op, Decode)] == [64, 56]
    assert made.params.n_ubatch == 16
    assert (made.params.n_batch, made.params.n_seq_max) == (64, 1)


def test_what_a_reference_shows() -> None:
    made = Scenario(model=MODEL, driver=MTP, ops=(Decode(parts=()),))
    ops = (
        Decode(parts=DriverTape().decode((0, (5, 6))).ops[0].parts),  # type: ignore[union-attr]
        Propose(seqs=(0,), last=(7,)),
    )
    trace = run(msgspec.structs.replace(made, ops=ops))
    got = clean(trace, carries=True)
    assert got is not None
    assert len(got.drafts) == 3
    assert got.given.logits.shape == (3, 64)
    assert got.given.hidden is not None
    without = clean(trace, carries=False)
    assert without is not None
    assert without.given.hidden is None
    trace.end = End("signal", 6)
    assert clean(trace, carries=True) is None
    trace.end = End("ok")
    trace.steps[0].batches[0] = Batch(trace.steps[0].batches[0].rows, 1)
    assert clean(trace, carries=True) is None
    assert clean(Trace([], [], End("ok")), carries=True) is None


def test_references_are_run_once_and_the_unused_ones_forgotten() -> None:
    ran: list[list[Scenario]] = []

    def many(programs: object) -> list[Trace]:
        ran.append(list(programs))  # type: ignore[call-overload]
        return [run(s) for s in ran[-1]]

    refs = DriverReferences(MODEL, many, limit=2)
    keys = [Key(P, MTP, (Event("decode", (i, 6, 7)),), 3) for i in range(3)]
    first = refs.get([keys[0], keys[1], keys[0]])
    assert [len(r) for r in ran] == [2]
    assert set(first) == {keys[0], keys[1]}
    assert refs.get([keys[0]]) == {keys[0]: first[keys[0]]}
    assert len(ran) == 1
    refs.get([keys[2]])  # keys[1] was longest unused
    refs.get([keys[0], keys[2]])
    assert len(ran) == 2
    refs.get([keys[1]])
    assert len(ran) == 3


@pytest.mark.parametrize("kind", ["draft-mtp", "draft-eagle3", "draft-simple"])
def test_honest_runs_give_a_band(kind: DriverKind) -> None:
    asked: list[Scenario] = []

    def many(programs: object) -> list[Trace]:
        asked.extend(programs)  # type: ignore[call-overload]
        return [run(s) for s in programs]  # type: ignore[attr-defined]

    d = DriverParams(kind=kind)
    bands = DriverBands(MODEL, many, 64, "b", None)
    band = bands.band(P, d, apart=True)
    assert band is not None
    # an ideal driver has no noise: what is left is what float arithmetic may do to values of that size
    assert 0 <= band.row < 1e-3
    assert 0 < band.logits < 1e-3
    n = len(asked)
    assert bands.band(msgspec.structs.replace(P, n_seq_max=3, n_batch=16, n_ubatch=8), d, apart=True) == band
    assert len(asked) == n, "measured once for what may matter"
    assert bands.band(msgspec.structs.replace(P, type_k="f16"), d, apart=True) != band
    dead = DriverBands(MODEL, lambda p: [Trace([], [], End("error")) for _ in p], 64, "b", None)
    assert dead.band(P, d, apart=True) is None


def test_bands_are_remembered_for_a_build(tmp_path: Path) -> None:
    def measured(build: str) -> tuple[Bands | None, int]:
        asked: list[Scenario] = []

        def many(programs: object) -> list[Trace]:
            asked.extend(programs)  # type: ignore[call-overload]
            return [run(s) for s in programs]  # type: ignore[attr-defined]

        return DriverBands(MODEL, many, 64, build, tmp_path).band(P, MTP, apart=True), len(asked)

    first, n = measured("one")
    assert n > 0
    assert measured("one") == (first, 0)
    assert measured("two")[1] == n
    for path in (tmp_path / "bands").iterdir():
        path.write_text("{")
    assert measured("one") == (first, n), "a spoilt file is measured again"


def test_a_reference_that_cannot_run_judges_nothing() -> None:
    judge = driver_judge()
    judge.driver_references = DriverReferences(MODEL, lambda p: [Trace([], [], End("error")) for _ in p])
    tape = DriverTape().decode((0, (5, 6, 7))).propose((0, 3, (4,)))
    found = judge.assess(tape.scenario, run(tape.scenario))
    drafting = next(v for v in found.verdicts if v.oracle == "drafting")
    assert "the reference did not run" in drafting.unknown
