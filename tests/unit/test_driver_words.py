"""Operations of programs with a driver in words, with what they resolved to."""

from __future__ import annotations

from typing import get_args

import blob_builder as built
import pytest

from fuzz.repro import words
from fuzz.repro.driver_pieces import mangle
from fuzz.repro.driver_words import driver_text
from fuzz.repro.phrases import count, listed, ordinal
from oracles.driver_state import HOW
from subjects.scenario import (
    OP_TYPES,
    Accept,
    Begin,
    BlobEdit,
    Checkpoint,
    Corrupt,
    Decode,
    DriverParams,
    Edge,
    Mangle,
    Mangling,
    ModelRef,
    Op,
    Part,
    Propose,
    Rewind,
    Scenario,
    SeqRm,
    Verify,
)
from subjects.state.edits import Source, assemble, pieces_of
from subjects.trace import Batch, Blob, End, Row, Step, Trace

TARGET, DRAFT, OFFERED, NOTHING = Blob(640, 640), Blob(196, 196), Blob(132, 132), Blob(-1, 0)


@pytest.mark.parametrize(("value", "said"), [(-3, "0 bytes"), (1, "1 byte"), (9999, "4096 bytes")])
def test_an_insertion_names_what_is_inserted(value: int, said: str) -> None:
    assert words.edit_words(BlobEdit(how="insert", where="seq", value=value)) == f"put {said} 0x5a behind seq"
    source = Source(built.HYBRID)
    pieces = pieces_of(source, [BlobEdit(how="insert", where="seq", value=value)], lambda _: None)
    data = assemble(pieces, lambda _: source.data)
    assert said.startswith(f"{len(data) - len(built.HYBRID)} ")


@pytest.mark.parametrize(("value", "nothing"), [(0, True), (1, False), (None, False)])
def test_a_change_that_changed_nothing_says_so(value: int | None, nothing: bool) -> None:
    op = Corrupt(slot=2, edits=(BlobEdit(how="drop", where="recurrent.cell"),))
    text = words.describe(op, Step(op=0, value=value, done=True))
    assert text.startswith("change slot 2: drop recurrent.cell")
    assert ("nothing changed" in text) == nothing


@pytest.mark.parametrize("how", get_args(Mangling))
def test_the_oracle_of_driver_states_has_words_for_every_change(how: Mangling) -> None:
    assert HOW[how]


def told(op: Op, step: Step) -> str:
    """The sentence with its answer."""
    scenario = Scenario(model=ModelRef(recipe="qwen35"), driver=DriverParams(kind="draft-mtp"), ops=(op,))  # type: ignore[arg-type]
    return words.program(scenario, Trace(steps=[step], facts=[], end=End("ok")))[0]


def step(**fields: object) -> Step:
    return Step(op=0, done=True, **{"pos": [(19, 19), (5, 5)], **fields})  # type: ignore[arg-type]


def rows(seq: int, pos: int, *tokens: int) -> list[Row]:
    return [Row(seq, pos + i, t, True) for i, t in enumerate(tokens)]


@pytest.mark.parametrize(
    ("op", "seen", "text"),
    [
        (
            Propose(seqs=(0,)),
            step(args=[58], rc=1, drafts=[[37, 60, 47]]),
            "draft for sequence 0 (at position 20, token 58) → 37 60 47",
        ),
        (
            Propose(seqs=(1, 0), n_max=2),
            step(args=[5, 58], rc=0, drafts=[[], [37, 60]]),
            "draft for sequence 1 (at position 6, token 5) and sequence 0 (at position 20, token 58) in one call, "
            "at most 2 tokens → sequence 1: no draft; sequence 0: 37 60 (removing them from the draft's memory is "
            "refused)",
        ),
        (
            Propose(seqs=(0,)),
            Step(op=0, args=[58]),
            "draft for sequence 0 (token 58) → **never returns**",
        ),
        (
            Verify(seqs=(0, 1), accept=(1, -1)),
            step(args=[1, 2], rc=0, value=1, batches=[Batch([*rows(0, 18, 1, 2, 3), *rows(1, 3, 4, 5, 6)], 0, 0)]),
            "verify 3 tokens of sequence 0 (positions 18..20, taking 1 of 2 drafts) and 3 tokens of sequence 1 "
            "(positions 3..5, taking 2 of 2 drafts) in one batch, and cut the rest from both memories",
        ),
        (
            Verify(seqs=(0,), accept=(1,), route="host"),
            step(
                args=[0],
                rc=0,
                value=0,
                batches=[Batch(rows(0, 18, 1, 2), 0, 0), Batch(rows(0, 18, 1), 0, 2)],
                blobs=[TARGET, DRAFT, NOTHING],
            ),
            "verify 2 tokens of sequence 0 (positions 18..19, taking 0 of 1 draft); go back to what was saved before "
            "it by the route `host` (PARTIAL_ONLY, nothing of the driver), and process 1 token again "
            "→ a restore or removal is refused",
        ),
        (
            Verify(seqs=(0,)),
            step(rc=-100, value=1, batches=[Batch(rows(0, 18, 1, 2), 0, 0)]),
            "verify 2 tokens of sequence 0 (positions 18..19), and leave the answer open "
            "→ the driver does not process it",
        ),
        (
            Accept(seq=0, n=5),
            step(args=[0, 2], value=1),
            "take 2 drafts of the open verification of sequence 0, cut the rest (it ends at position 19)",
        ),
        (
            Checkpoint(seq=0, slot=3, flags=1),
            step(args=[3, 0, 1], blobs=[TARGET, DRAFT, OFFERED]),
            "save sequence 0 with PARTIAL_ONLY into slot 3: target 640 bytes, draft 196 bytes and driver 132 bytes",
        ),
        (
            Checkpoint(seq=0, slot=3),
            step(args=[3, 0, 0], blobs=[TARGET, NOTHING]),
            "save sequence 0 into slot 3: target 640 bytes and nothing of the driver",
        ),
        (
            Rewind(seq=0, slot=3),
            step(args=[3, 0, 1], rc=1, value=1, blobs=[TARGET, DRAFT, OFFERED]),
            "put target, draft and driver of slot 3 back into sequence 0 with PARTIAL_ONLY; cut what is behind "
            "position 19",
        ),
        (
            Rewind(seq=0, slot=3),
            step(args=[3, 0, 0], rc=1, value=0, blobs=[TARGET, DRAFT, NOTHING]),
            "put target and draft of slot 3 back into sequence 0, nothing of the driver is there; cut what is behind "
            "position 19 → the removal is refused",
        ),
        (
            Rewind(seq=1, slot=3, parts=("driver",)),
            step(args=[3, 1, 0], rc=1, value=1, blobs=[OFFERED]),
            "put driver of slot 3 back into sequence 1",
        ),
        (
            Mangle(slot=3, how="width"),
            step(args=[3], blobs=[OFFERED]),
            "cut the driver's part of slot 3 in half",
        ),
        (Begin(seq=1), step(args=[1]), "begin a new generation in sequence 1 (common_speculative_begin)"),
        (
            Decode(parts=(Part(seq=1, n=2),)),
            step(rc=0, batches=[Batch(rows(1, 4, 7, 8), 0, 0)]),
            "decode 2 tokens into sequence 1 (positions 4..5), processed by the driver",
        ),
        (
            SeqRm(seq=0, lo=Edge(at="end", d=-2)),
            step(args=[0, 20, -1], rc=1),
            "remove positions 20 and up of sequence 0: llama_memory_seq_rm(0, 20, -1) on target and draft → true",
        ),
    ],
)
def test_operations(op: Op, seen: Step, text: str) -> None:
    assert told(op, seen) == text


def test_what_was_skipped() -> None:
    seen = step(skipped="no sequence has a draft")
    assert told(Verify(seqs=(0,)), seen) == "(skipped: no sequence has a draft)"
    assert told(Decode(parts=()), seen) == "(skipped: no sequence has a draft)"


def test_every_operation_has_words() -> None:
    for how in get_args(Mangling):
        assert words.describe(Mangle(slot=4, how=how), Step(op=0)).find("slot 4") > 0
        for word in range(-1, 8):
            assert "slot4.spec" in mangle(how, word, "slot4.spec")
    said = words.describe(Mangle(slot=4, how="negative", at=15), step(args=[4, 7]))
    assert said == "set 32-bit number 7 in the driver's part of slot 4 to -2", "which one it became"
    assert mangle("negative", 7, "x") == "x.at(28) = 0xfe;\nstd::fill_n(x.begin() + 28 + 1, 3, 0xff);"
    assert mangle("magic", 2, "x") == "x.at(11) ^= 0x80;"
    assert mangle("model", 3, "x") == "x.at(12) ^= 1;"
    assert "the model's" in words.describe(Mangle(slot=4, how="model"), step(args=[4, 3]))
    assert "twice as wide" in words.describe(Mangle(slot=4, how="model"), step(args=[4, -1]))
    made: dict[str, Op] = {
        "Propose": Propose(seqs=(0,)),
        "Verify": Verify(seqs=(0,)),
        "Accept": Accept(seq=0, n=1),
        "Checkpoint": Checkpoint(seq=0, slot=0),
        "Rewind": Rewind(seq=0, slot=0),
        "Mangle": Mangle(slot=0, how="huge"),
        "Begin": Begin(seq=0),
    }
    names = [t.__name__ for t in OP_TYPES]
    assert names[names.index("Propose") :] == list(made)
    for op in made.values():  # a call that never returned has answered nothing
        assert words.describe(op, Step(op=0))


def test_positions_of_both_memories() -> None:
    both = step(draft_pos=[(0, 19), (-1, -1)])
    assert words.positions(both) == "0: 19..19, 1: 5..5; in the draft's memory 0: 0..19, 1: empty"
    assert words.positions(step()) == "0: 19..19, 1: 5..5"


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        (DriverParams(kind="draft-mtp"), "draft-mtp, n_max 3, n_min 0, p_min 0, backend sampling off"),
        (
            DriverParams(
                kind="draft-eagle3",
                draft=ModelRef(recipe="eagle3-qwen35", version=2, seed=7),
                p_min=0.25,
                backend_sampling=True,
                state=False,
                late=True,
            ),
            "draft-eagle3, draft model eagle3-qwen35 version 2, seed 7, n_max 3, n_min 0, p_min 0.25, backend sampling "
            "on, its state left out of checkpoints, draft context made after the target's first decode",
        ),
        (DriverParams(kind="ngram-mod"), "ngram-mod, n-grams of 4, drafts of 4, min_hits 1, n_min 0"),
        (
            DriverParams(kind="draft-mtp", impl="reference"),
            "draft-mtp (redraft's own in Python), n_max 3, n_min 0, p_min 0, backend sampling off",
        ),
    ],
)
def test_drivers(driver: DriverParams, text: str) -> None:
    assert driver_text(driver) == text


def test_pieces_of_sentences() -> None:
    assert [listed(x) for x in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert [count(1, "token"), count(0, "token")] == ["1 token", "0 tokens"]
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 21)] == ["1st", "2nd", "3rd", "4th", "11th", "21st"]
