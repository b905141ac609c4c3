"""The judge and its oracles: void expectations, what counts as compared, blame, and who says a rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import GONE, MODEL, Ideal, Tape, ideal_judge, run

from oracles import blob, decode, isolation, liveness, positions, purity, refusal, removal, rows
from oracles.account import Account, Compared, compare_rows
from oracles.band import Bands
from oracles.expect import position_error
from oracles.ledger import History, RowClaim
from oracles.reference import References, key_of
from oracles.registry import by_name
from oracles.verdict import Verdict
from subjects.contracts import CLAUSES, VERDICT, rule
from subjects.scenario import (
    BlobEdit,
    ContextParams,
    Corrupt,
    Decode,
    Part,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    Scenario,
    SeqCp,
    SeqRm,
)
from subjects.trace import End, Trace

A, B = (1, 2, 3, 4), (7, 8, 9)


def two(memory: str = "dense") -> Tape:
    return Tape(memory).decode((0, A)).decode((1, B))


def judged(name: str, tape: Tape, *compared: Compared) -> Verdict:
    return by_name(name).judge(Account(tape.ledger(), list(compared)))


def row(claim: RowClaim, error: float) -> Compared:
    return Compared(claim, error, 1.0, 0.0, 1, 1, 0.0)


def test_after_a_broken_duty_only_the_end_is_judged() -> None:
    ops = (Decode(parts=(Part(seq=0, n=5),)), Save(seq=0, slot=0))
    judgement = ideal_judge().judge(Scenario(model=MODEL, ops=ops, misuse=True), variants=True)
    assert judgement.executed.ops == ops  # nothing is added behind it
    assert {v.oracle for v in judgement.verdicts if v.compared} == {"liveness"}
    assert set(judgement.unknown) == {"the caller broke a duty"}
    tape = two().step(SeqRm(seq=9), 9, -1, -1, done=False)
    scenario = Scenario(model=MODEL, ops=tuple(tape.ops), misuse=True)
    (found,) = ideal_judge().assess(scenario, tape.trace(End("signal", 11))).violations
    assert (found.kind, found.oracle) == ("misuse", "liveness")
    assert "breaks a duty of the caller (see `redraft contracts`)" in found.because
    assert "keeps what" not in found.because


def test_undefined_states_are_not_compared() -> None:
    undefined = two().step(SeqCp(src=0, dst=1), 0, 1, -1, -1)
    assert judged("positions", undefined).compared == judged("positions", two()).compared
    before = judged("isolation", undefined).compared
    assert judged("isolation", undefined.step(Save(seq=0, slot=0), 0, 0, 0, rc=9)).compared == before + 1
    assert judged("removal", undefined.step(SeqRm(seq=1), 1, 1, -1, rc=1)).compared == 0
    assert judged("removal", two().step(SeqRm(seq=1), 1, 1, -1, rc=1, pos={1: (0, 0)})).compared == 1


def test_an_accepted_restore_is_compared_only_where_it_had_to_be_taken() -> None:
    tape = two().step(Save(seq=0, slot=0), 0, 0, 0, rc=9)
    assert judged("refusal", tape.step(Restore(seq=0, slot=0), 0, 0, 0, rc=9, blobs=[(9, 9)])).compared == 1
    tape.step(Corrupt(slot=0, edits=(BlobEdit(how="flip"),)), 0, value=1)
    assert judged("refusal", tape.step(Restore(seq=0, slot=0), 0, 0, 0, rc=9, blobs=[(9, 9)])).compared == 1


@pytest.mark.parametrize("name", ["removal", "first-token", "logits"])
def test_an_ambiguous_row_is_unknown(name: str) -> None:
    tape = two().step(SeqRm(seq=0), 0, 2, -1, rc=1, pos={0: (0, 1)}).decode((0, (5,)))
    claim = tape.ledger().rows[-1]
    ok, doubtful = judged(name, tape, row(claim, 0.5)), judged(name, tape, row(claim, 5.0))
    assert doubtful.compared == ok.compared - 1
    assert doubtful.unknown == ("between noise and error",)


def test_hidden_rows_between_noise_and_error_or_missing_are_unknown() -> None:
    claim = two().ledger().rows[-1]
    sure = replace(row(claim, 0.0), hidden_band=1.0)
    assert judged("hidden", two(), sure).compared == 1
    for doubtful in (replace(sure, hidden_error=5.0), replace(sure, hidden_unjudged="the hidden row is missing")):
        verdict = judged("hidden", two(), doubtful)
        assert (verdict.value, len(verdict.unknown)) == ("unknown", 1)


@pytest.mark.parametrize(("mine", "reference"), [(b"", 1.0), (None, float("nan"))])
def test_a_hidden_row_that_is_missing_or_whose_reference_is_no_number_is_unjudged(
    mine: bytes | None, reference: float
) -> None:
    params = ContextParams(embeddings=True)
    tape = Tape(params=params).decode((0, (1,)))
    ledger = tape.ledger()
    ledger.trace.hidden = np.ones((1, 8), np.float32).tobytes() if mine is None else mine
    refs = References()
    logits = np.zeros((1, 64), np.float32).tobytes()
    hidden = np.full((1, 8), reference, np.float32).tobytes()
    refs.put(key_of(ledger.rows[0]), Trace([], [], End("ok"), logits=logits, hidden=hidden), 64, 8)
    bands = Bands(lambda programs: [run(s, Ideal()) for s in programs], MODEL, "b", None)
    (c,) = compare_rows(ledger, refs, bands).compared
    assert c.hidden_unjudged
    assert by_name("hidden").judge(Account(ledger, [c])).value == "unknown"


def test_a_save_that_moves_another_sequence_is_seen() -> None:
    tape = two().step(Save(seq=0, slot=0), 0, 0, 0, rc=9, pos={1: (0, 1)})
    (v,) = judged("isolation", tape).violations
    assert v.key == "isolation:positions:save"
    assert "works on no sequence" in v.because
    assert v.rule.startswith(rule("save.pure"))


def test_a_head_removal_that_removed_nothing_shows_in_a_window() -> None:
    facts = Tape("window").facts[0]
    left = History(positions=(2, 3, 4), length=5, items=two().ledger().rows[0].chain)
    assert position_error(left, facts, (0, 4)) is not None
    assert position_error(left, facts, (2, 4)) is None


def test_a_half_emptied_context_is_checked_by_a_sequence_that_was_emptied() -> None:
    tape = two().step(SaveAll(slot=0), 0, rc=9).step(Corrupt(slot=0, edits=(BlobEdit(how="flip"),)), 0, value=1)
    tape.step(RestoreAll(slot=0), 0, rc=0, blobs=[(9, 0)], pos={1: GONE})
    (v,) = judged("refusal", tape).violations
    assert (v.key, v.check.seq, v.check.expected) == ("refusal:half:restore_all", 1, (0, 2))
    assert "or empty (and all sequences alike); but" in v.because


def test_a_half_restored_sequence_is_not_held_against_the_others() -> None:
    tape = (
        two().step(Save(seq=0, slot=0), 0, 0, 0, rc=9).step(Corrupt(slot=0, edits=(BlobEdit(how="flip"),)), 0, value=1)
    )
    tape.step(Restore(slot=0, seq=1), 1, 0, 0, rc=0, blobs=[(9, 0)], pos={1: (0, 0)})
    (v,) = judged("refusal", tape).violations
    assert v.key == "refusal:half:restore"
    assert "or empty; but it has positions (0, 0)" in v.because


def test_an_aborted_decode_says_which_positions_are_right() -> None:
    tape = two().decode((0, (5, 6)), rc=2, pos={0: (0, 2)}, op=Decode(parts=(Part(seq=0, n=2),), abort_after=0))
    (v,) = judged("decode", tape).violations
    assert "one of 3..5; but its positions are (0, 2)" in v.because


def test_a_refused_removal_answers_for_the_rows_after_it() -> None:
    tape = two("recurrent").step(SeqRm(seq=0), 0, 2, -1, rc=0).decode((0, (5,)))
    (v,) = judged("removal", tape, row(tape.ledger().rows[-1], 99.0)).violations
    assert v.key == "removal:false:state"
    assert v.rule.startswith(rule("seq_rm.refused-clean"))


def test_a_sequence_that_was_right_since_its_cut_is_broken_by_others() -> None:
    tape = two().step(SeqRm(seq=0), 0, 2, -1, rc=1, pos={0: (0, 1)}).decode((0, (5,)))
    alone = Account(tape.decode((0, (6,))).ledger())
    *_, right, wrong = alone.ledger.rows
    alone.compared = [row(right, 0.5), row(wrong, 99.0)]
    shaper = alone.shaper(wrong)
    assert shaper is not None
    assert shaper[1].step.op == 2

    other = Account(tape.step(SeqRm(seq=1), 1, -1, -1, rc=1, pos={1: GONE}).decode((0, (7,))).ledger())
    *_, right, _, wrong = other.ledger.rows
    other.compared = [row(right, 0.5), row(wrong, 99.0)]
    assert other.shaper(right) is not None
    assert other.shaper(wrong) is None
    (v,) = by_name("isolation").judge(other).violations
    assert v.key == "isolation:continuation:seq_rm"
    assert not by_name("removal").judge(other).violations


# --- who says it ------------------------------------------------------------------------------------------------------


def test_a_rule_says_who_says_it() -> None:
    assert rule("seq_rm.whole") == 'llama.h says of seq_rm: "Removing a whole sequence never fails"'
    assert rule("ask.pure").startswith("llama.h is silent; ")
    for clause in CLAUSES.values():
        text = rule(clause.id)
        assert text.startswith(VERDICT[clause.says])
        # no verdict's phrase is the beginning of another's
        assert sum(text.startswith(phrase) for phrase in VERDICT.values()) == 1


def test_the_rules_of_all_oracles_are_of_the_table() -> None:
    found = [positions.RULE, purity.RULE, removal.RULE_TRUE, removal.RULE_WHOLE, removal.RULE_FALSE]
    found += [removal.RULE_PART, removal.RULE_KEEP, decode.RULE_ROLLBACK, decode.RULE_CODE, decode.RULE_ROWS]
    found += [decode._abort_rule(rc) for rc in (2, -2)]
    found += [refusal._half(name) for name in ("restore", "restore_all")] + [rule(c) for c in refusal.TAKEN.values()]
    neighbours = ("decode", "draft", "save", "save_all", "restore", "corrupt", "ask")
    edits = ("seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div", "clear", "reopen", "restore_all")
    found += [isolation._rule(name) for name in (*neighbours, *edits)]
    found += [blob._rule(name, what) for name in ("save", "save_all") for what in ("promised", "twice")]
    back = ("read", "tokens", "again", "restored-twice")
    found += [blob._rule(name, what) for name in ("restore", "restore_all") for what in back]
    found += [rule(clause) for clause in (*rows._STATE.values(), *rows._REFUSED.values(), "draft.same")]
    table = [rule(clause) for clause in CLAUSES]
    assert all(any(text.startswith(line) for line in table) for text in found)
    # the one that no clause fits, because it is of all operations
    assert liveness.RULE.startswith(VERDICT["silent"])
