"""Oracles of drivers: each reports the fault that it is meant for, and all are silent on a driver without faults."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from driver_fakes import DriverTape, IdealDriver, driver_judge, run
from fakes import MODEL, Ideal

from fuzz.drivers.gen import programs
from fuzz.drivers.state import valid
from fuzz.job import title_of
from fuzz.strategies import generate
from fuzz.traits import Traits
from fuzz.triage import Triaged
from oracles.account import Account
from oracles.drive import Driven, Held
from oracles.driving import DraftOracle, alone_since, owner, rungs, seen, what, where
from oracles.judge import Judge, Judgement
from oracles.ledger import Ledger, Moment, cut
from oracles.lines import DraftClaim, Drive, Given, Line
from oracles.registry import ORACLES, by_name, for_program
from oracles.verdict import Violation
from subjects.driving import aim, mangled
from subjects.scenario import (
    PARTIAL,
    Accept,
    AnyOp,
    Begin,
    Checkpoint,
    ContextParams,
    Decode,
    DriverParams,
    Edge,
    Mangle,
    Mangling,
    Part,
    Propose,
    Rewind,
    Route,
    Scenario,
    SeqRm,
    Verify,
)
from subjects.trace import Facts, Row, Step, Trace, from_bytes, to_bytes

DENSE, HYBRID = Traits(memory="dense"), Traits(memory="hybrid", rollback=True)
DRAFT = tuple(o for o in ORACLES if isinstance(o, DraftOracle))
MTP = DriverParams(kind="draft-mtp")


def feed(n: int, seq: int = 0, stream: int = 0) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n, stream=stream),))


def ask(*seqs: int, stream: int = 5) -> Propose:
    return Propose(seqs=seqs or (0,), stream=stream)


def program(*ops: AnyOp, kind: str = "draft-mtp", **params: Any) -> Scenario:
    driver = DriverParams(kind=kind)  # type: ignore[arg-type]
    return Scenario(model=MODEL, params=ContextParams(**params), driver=driver, ops=ops)


# --- which of them judge ----------------------------------------------------------------------------------------------


def test_programs_are_judged_by_the_oracles_for_their_kind() -> None:
    plain = {o.name for o in for_program(Scenario(model=MODEL, ops=()))}
    driven = {o.name for o in for_program(program())}
    assert plain & driven == {"liveness"}
    assert plain | driven == {o.name for o in ORACLES}
    assert driven == {
        "liveness",
        "agreement",
        "driver_contract",
        "driver_isolation",
        "driver_state",
        "drafting",
        "greedy",
        "pending_row",
        "redraft",
        "round_drafts",
        "two_drivers",
        "verify_rows",
    }


@pytest.mark.parametrize("oracle", [o for o in ORACLES if o.driver], ids=lambda o: o.name)
def test_without_a_driver_there_is_nothing_to_say(oracle: Any) -> None:
    plain = Scenario(model=MODEL, ops=())
    verdict = oracle.judge(Account(Ledger(plain, Trace([], [], run(program()).end))))
    assert verdict.value == "unknown"
    assert verdict.unknown


# --- silence ----------------------------------------------------------------------------------------------------------

SOUND = [
    ("draft-mtp", DENSE, False, ()),
    ("draft-mtp", HYBRID, False, ()),
    ("draft-mtp", DENSE, True, ()),
    ("draft-eagle3", DENSE, False, ()),
    ("draft-eagle3", HYBRID, False, ()),
    ("draft-simple", DENSE, False, ()),
    ("ngram-simple", DENSE, False, ()),
    # what begins anew or was cut looks, to a driver that is only told the tokens, like the conversation before
    ("ngram-map-k", DENSE, False, ("driver-fresh", "driver-cut")),
    ("ngram-cache", DENSE, False, ("driver-fresh", "driver-cut")),
]


@pytest.mark.parametrize(("kind", "traits", "shares", "avoid"), SOUND)
def test_an_ideal_driver_is_silent(kind: str, traits: Traits, shares: bool, avoid: tuple[str, ...]) -> None:
    judge = driver_judge(traits.memory, shares=shares)
    n_rs = 3 if traits.rollback else 0
    base = DriverParams(kind=kind)  # type: ignore[arg-type]
    compared: dict[str, int] = {}
    reasons: list[str] = []
    made = generate(programs(MODEL, base, traits, n_rs, avoid), 5, 24)
    for s in made:
        judgement = judge.judge(s, variants=False)
        assert judgement.account.ledger.trace.end.how == "ok"
        assert judgement.violations == [], (judgement.violations[0].because, s.ops)
        assert judgement.judged
        for v in judgement.verdicts:
            compared[v.oracle] = compared.get(v.oracle, 0) + v.compared
        reasons += [r for r in judgement.unknown if r != "the other driver was not run"]
    assert compared["drafting"] > 2 * len(made)
    carries = kind in ("draft-mtp", "draft-eagle3")
    assert all(compared[o] > 5 for o in ("agreement", "greedy", "redraft", "round_drafts", "verify_rows"))
    assert (compared["pending_row"] > 10) == carries
    if not kind.endswith("simple"):
        assert compared["driver_state"] > 0
    assert len(reasons) < 0.4 * compared["drafting"], reasons[:5]
    assert "between noise and error" not in reasons


# --- planted faults ---------------------------------------------------------------------------------------------------


class Neighbour(IdealDriver):
    """Puts one sequence back into another too."""

    def restore(self, seq: int, blob: bytes) -> None:
        super().restore(seq, blob)
        self.rows[(seq + 1) % len(self.rows)] = {p: b"!" * 32 for p in range(100)}


class Stale(IdealDriver):
    """The first token is paired with the row that the last conversation has left."""

    def before(self, seq: int, pos: int) -> bytes:
        return super().before(seq, pos) if pos or not self.rows[seq] else self.rows[seq][max(self.rows[seq])]


class OffByOne(IdealDriver):
    """accept(k) takes the row of another token."""

    def accept(self, seq: int, n: int) -> None:
        at = self.began[seq] + n
        self.rows[seq][at] = self.rows[seq][at - 1]


class Untold(IdealDriver):
    """Goes on with its last row, wherever the sequence stands."""

    def accept(self, seq: int, n: int) -> None:
        super().accept(seq, n)
        self.rows[seq] = {p: h for p, h in self.rows[seq].items() if p <= self.began[seq] + n}

    def before(self, seq: int, pos: int) -> bytes:
        rows = self.rows[seq]
        return rows[max(rows)] if pos and pos - 1 in rows else super().before(seq, pos)

    def paired(self, seq: int, pos: int, start: bool) -> bytes:
        return self.before(seq, pos) if start else super().before(seq, pos)


class Keeps(Untold):
    """The same, and offers nothing."""

    offers = False


class Ignores(Untold):
    """The same, and does not put its state back."""

    def restore(self, seq: int, blob: bytes) -> None:
        pass


class Warns(Untold):
    """The same, and says so."""

    def draft(self, asks: Sequence[Any]) -> list[list[int]]:
        if any(a.pos0 - 1 != max(self.rows[a.seq]) for a in asks):
            self.said.append("the row that waits is another position's")
        return super().draft(asks)


class Split(IdealDriver):
    """Only the first token of a batch is paired with the row before it."""

    def paired(self, seq: int, pos: int, start: bool) -> bytes:
        return super().paired(seq, pos, start) if start or pos % 4 else b"x" * 32


class Gullible(IdealDriver):
    """Takes any state."""

    def restore(self, seq: int, blob: bytes) -> None:
        try:
            super().restore(seq, blob)
        except (ValueError, IndexError):
            pass
        if self.said:
            self.rows[seq] = {}
            self.said.clear()


class Mute(IdealDriver):
    """Refuses without a word."""

    def restore(self, seq: int, blob: bytes) -> None:
        super().restore(seq, blob)
        self.said.clear()


class Fails(IdealDriver):
    """process() fails."""

    def process(self, rows: Sequence[Row]) -> bool:
        return False


class WrongMemory(Ideal):
    """A memory that comes back with another token in it."""

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        rc = super().seq_set(ctx, seq, flags, blob)
        self.seqs[seq] = [(p, t ^ 1) for p, t in self.seqs[seq]]
        return rc


class Sticky(Ideal):
    """A memory that says yes to a removal and does not do it."""

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        return 1


class Refuses(Ideal):
    """A memory that removes nothing."""

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        return 0


CP, RW = Checkpoint(seq=0, slot=0), Rewind(seq=0, slot=0)
TAIL = Edge(at="end", d=-2)
TRIP = (feed(8), Checkpoint(seq=0, slot=0), feed(4), Rewind(seq=0, slot=0))
ROUND = (feed(8), ask(), Verify(seqs=(0,), accept=(1,)))
PLANTED: list[tuple[str, dict[str, Any], Scenario]] = [
    ("driver_contract:draft-mtp:unoffered", {"driver": Keeps}, program(*TRIP, ask())),
    ("driver_contract:draft-mtp:unoffered", {"driver": Keeps}, program(*TRIP, feed(3, stream=2))),
    (
        "driver_contract:draft-eagle3:unoffered",
        {"driver": Keeps},
        program(*TRIP, ask(), kind="draft-eagle3"),
    ),
    (
        "driver_contract:ngram-map-k:unoffered",
        {"driver": Keeps},
        program(feed(8), CP, ask(), ask(stream=6), RW, ask(stream=7), kind="ngram-map-k"),
    ),
    ("pending_row", {"driver": Ignores}, program(*TRIP, ask())),
    ("pending_row", {"driver": Ignores}, program(*TRIP, feed(3, stream=2))),
    ("redraft:tokens", {"draft": WrongMemory}, program(*TRIP, ask())),
    ("redraft:tokens", {"draft": WrongMemory}, program(*TRIP, ask(), kind="draft-simple")),
    (
        "driver_isolation:row",
        {"driver": Neighbour},
        program(feed(8), feed(6, 1), ask(1), Checkpoint(seq=0, slot=0), Rewind(seq=0, slot=0), ask(1)),
    ),
    (
        "driver_isolation:row",
        {"driver": Neighbour},
        program(feed(8), feed(6, 1), Checkpoint(seq=0, slot=0), Rewind(seq=0, slot=0), ask(1)),
    ),
    ("driver_isolation:fresh", {"driver": Stale}, program(feed(8), SeqRm(seq=0), feed(3, stream=2), ask())),
    ("round_drafts:cut:row", {"driver": OffByOne}, program(*ROUND, ask())),
    (
        "round_drafts:host:tokens",
        {"draft": WrongMemory},
        program(feed(8), ask(), Verify(seqs=(0,), accept=(1,), route="host"), ask(stream=6)),
    ),
    (
        "verify_rows",
        {"driver": OffByOne},
        program(
            feed(8),
            ask(),
            Verify(seqs=(0,)),
            Checkpoint(seq=0, slot=0),
            Rewind(seq=0, slot=0),
            Accept(seq=0, n=1),
            ask(),
        ),
    ),
    (
        "round_drafts:cut:row",
        {"driver": OffByOne},
        program(feed(8), ask(), Verify(seqs=(0,)), Accept(seq=0, n=1), ask()),
    ),
    ("driver_contract:draft-mtp:cut", {"driver": Untold}, program(feed(8), SeqRm(seq=0, lo=TAIL), ask())),
    ("driver_contract:draft-mtp:cut", {"driver": Untold}, program(feed(8), SeqRm(seq=0, lo=TAIL), feed(3, stream=2))),
    ("drafting:tokens", {"driver": Split}, program(feed(8), ask())),
    (
        "driver_state:draft-mtp:taken",
        {"driver": Gullible},
        program(
            feed(8),
            Checkpoint(seq=0, slot=0),
            Mangle(slot=0, how="magic"),
            Rewind(seq=0, slot=0, parts=("driver",)),
            ask(),
        ),
    ),
    (
        "driver_state:draft-mtp:mute",
        {"driver": Mute},
        program(
            feed(8),
            Checkpoint(seq=0, slot=0),
            Mangle(slot=0, how="long"),
            Rewind(seq=0, slot=0, parts=("driver",)),
            ask(),
        ),
    ),
    ("greedy:rewind", {"target": WrongMemory}, program(*TRIP, feed(2))),
    ("greedy:host", {"target": WrongMemory}, program(feed(8), ask(), Verify(seqs=(0,), accept=(0,), route="host"))),
    ("agreement:target", {"target": Sticky}, program(*ROUND)),
    ("agreement:draft", {"draft": Sticky}, program(*ROUND)),
    ("agreement:refused", {"draft": Refuses}, program(feed(8), ask())),
]


@functools.cache
def sound(memory: str) -> Judge:
    return driver_judge(memory)


@pytest.mark.parametrize(("key", "planted", "scenario"), PLANTED, ids=lambda x: x if isinstance(x, str) else "")
def test_each_fault_is_reported_by_the_oracle_meant_for_it(
    key: str, planted: dict[str, Any], scenario: Scenario
) -> None:
    assert valid(scenario, DENSE) == []
    clean = sound("dense").judge(scenario, variants=False)
    assert clean.violations == []
    found = driver_judge("dense", **planted).judge(scenario, fault="x", variants=False)
    assert found.violations, found.unknown
    first = found.violations[0]
    assert first.key == key
    oracle = by_name(first.oracle)
    assert oracle.recheck(first, found.account)
    assert not oracle.recheck(first, clean.account)
    assert oracle.explain(first).startswith(first.rule)
    owned_once(found)
    for v in found.violations:
        if v.oracle != "greedy" and v.oracle in {o.name for o in DRAFT}:
            assert v.check.kind == "draft"
            assert v.check.what in ("row", "tokens", "logits")


def owned_once(judgement: Judgement) -> None:
    """Exactly one oracle reports each wrong claim, and it is one that speaks of it."""
    account = judgement.account
    assert account.driven is not None
    for h in account.driven.held:
        if h.wrong:
            mine = owner(account, h)
            assert by_name(mine).mine(account, h), (mine, where(account, h))  # type: ignore[attr-defined]
            reporting = [
                o.name
                for o in DRAFT
                for v in o.judge(account).violations
                if (v.check.step, v.check.seq, v.because) == (h.claim.step, h.claim.seq, o.violated(account, h).because)
            ]
            assert reporting == [mine]
    wrong = sum(h.wrong for h in account.driven.held)
    assert sum(len(o.judge(account).violations) for o in DRAFT) == wrong


def test_every_oracle_of_drivers_has_a_planted_fault() -> None:
    shown = {key.partition(":")[0] for key, _, _ in PLANTED}
    assert shown | {"two_drivers", "liveness"} == {o.name for o in for_program(program())}


@pytest.mark.parametrize("planted", [{"driver": Keeps}, {"driver": OffByOne}, {"draft": WrongMemory}], ids=str)
def test_in_any_program_each_wrong_claim_has_one_owner(planted: dict[str, Any]) -> None:
    judge = driver_judge("hybrid", **planted)
    wrong = 0
    for s in generate(programs(MODEL, MTP, HYBRID, 3), 8, 12):
        found = judge.judge(s, fault="x", variants=False)
        owned_once(found)
        wrong += len(found.violations)
    assert wrong > 3


def test_a_driver_that_says_that_it_is_not_right_after_a_cut_is_no_finding() -> None:
    s = program(feed(8), SeqRm(seq=0, lo=TAIL), ask())
    assert driver_judge("dense", driver=Untold).judge(s, fault="x").violations
    quiet = driver_judge("dense", driver=Warns).judge(s, fault="x")
    assert quiet.violations == []
    assert "the driver carries a row of other tokens" in quiet.unknown


def test_a_driver_that_fails_says_nothing_of_drafts() -> None:
    found = driver_judge("dense", driver=Fails).judge(program(feed(8), ask()), fault="x")
    assert [v.key for v in found.violations] == ["agreement:failed"]
    assert "a decode failed" in found.unknown


# --- malformed states -------------------------------------------------------------------------------------------------


MADE = {"RDMT": b"RDMT", "SPCS": b"SPCS", "of no known format": b"\1\2\3\4"}


@pytest.mark.parametrize("at", [0, 3, 7, 9])
@pytest.mark.parametrize("how", get_args(Mangling))
@pytest.mark.parametrize("begins", MADE)
def test_each_mangling_is_a_state_that_get_state_never_gave(begins: str, how: Mangling, at: int) -> None:
    blob = MADE[begins] + bytes(range(5, 101))
    headed = begins.isupper()
    bad = mangled(blob, how, at)
    assert bad != blob
    sizes = {"empty": 0, "short": 99, "long": 104, "width": 48, "model": 100 if headed else 196}
    assert len(bad) == sizes.get(how, 100)
    changed = {i // 4 for i, (a, b) in enumerate(zip(blob, bad, strict=False)) if a != b}
    word = aim(blob, how, at)
    if how in ("magic", "negative", "huge"):
        assert changed == {word} == {at % 8 if headed else 0}
        was, now = (int.from_bytes(x[4 * word : 4 * word + 4], "little", signed=True) for x in (blob, bad))
        assert now == {"magic": was - 2**31, "negative": -2, "huge": 2**31 - 1}[how]
    elif how == "other":
        assert (changed, word, bad[:4]) == ({0}, 0, b"RDRF")
    elif how == "model" and headed:
        assert changed == {word} == {3}
    else:
        assert (changed, word) == (set(), -1)


@pytest.mark.parametrize("how", get_args(Mangling))
def test_what_is_too_short_for_a_header_can_be_mangled(how: Mangling) -> None:
    for blob in (b"", b"R", b"RDMT", b"RDMT\1\0"):
        assert mangled(blob, how, 7) == mangled(blob, how, 7)


@pytest.mark.parametrize("how", get_args(Mangling))
def test_a_driver_that_refuses_a_malformed_state_is_right(how: Mangling) -> None:
    found = driver_judge("dense").judge(
        program(
            feed(8), Checkpoint(seq=0, slot=0), Mangle(slot=0, how=how), Rewind(seq=0, slot=0, parts=("driver",)), ask()
        )
    )
    assert found.violations == []
    assert next(v for v in found.verdicts if v.oracle == "driver_state").compared == 1


def test_a_malformed_state_stays_the_one_that_it_is() -> None:
    """Flipped twice it would be right again."""
    flip = Mangle(slot=0, how="magic")
    trace = run(program(feed(8), Checkpoint(seq=0, slot=0), flip, flip, Checkpoint(seq=0, slot=0), flip))
    assert [bool(s.skipped) for s in trace.steps] == [False, False, False, True, False, False]


def test_what_goes_wrong_later_is_not_the_malformed_states_fault() -> None:
    """A new conversation is paired with an old row: whatever was handed over before has nothing to do with it."""
    s = program(
        feed(8),
        Checkpoint(seq=0, slot=0),
        Mangle(slot=0, how="long"),
        Rewind(seq=0, slot=0, parts=("driver",)),
        ask(),
        SeqRm(seq=0),
        feed(3, stream=2),
        ask(),
    )
    found = driver_judge("dense", driver=Stale).judge(s, fault="x")
    assert found.violations[0].key == "driver_isolation:fresh"
    assert not [v for v in found.violations if v.oracle == "driver_state"]


# --- owners, by hand --------------------------------------------------------------------------------------------------

FACTS = run(program()).facts[0]


def by_hand(
    *ops: AnyOp,
    shaped: Sequence[int] = (),
    n: int = 4,
    row: float = 0.0,
    touched: str = "",
    at: Mapping[int, int] | None = None,
    **line: Any,
) -> tuple[Account, Held]:
    """A wrong claim of the last operation on sequence 0. `touched`: whose sequence each operation worked on, - for
    nobody's. `at`: lengths behind operations, n for those left out."""
    s = program(*ops)
    tape = DriverTape().decode((0, tuple(range(n)))) if n else DriverTape()
    history = tape.line().history if n else Line().history
    ledger = Ledger(s, Trace([], [FACTS], run(program()).end))
    who = touched or "0" * len(ops)
    for i, op in enumerate(ops):
        changed = frozenset() if who[i] == "-" else frozenset({int(who[i])})
        then = cut(history, (at or {}).get(i, n))
        ledger.moments.append(Moment(Step(op=i, done=True), op, FACTS, s.params, {}, {0: then}, changed))
    claim = DraftClaim(
        len(ops) - 1, 0, Line(history=history, shaped=tuple(shaped), **line), 7, -1, (1,),
        Given(np.zeros(8, np.float32), np.zeros((1, 64), np.float32)), n, n,
    )  # fmt: skip
    h = Held(claim, row, 0.1, 9.0, 0.1, 1.0, 0, 50.0, (2,), False, 1)
    return Account(ledger, driven=Driven(Drive(), MTP, True, [h])), h


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (by_hand(feed(4), ask()), "drafting"),
        (by_hand(feed(4), ask(), n=0), "driver_isolation"),
        (by_hand(CP, RW, ask(), shaped=(1,)), "redraft"),
        (by_hand(CP, RW, ask(), shaped=(1,), row=99.0), "pending_row"),
        (by_hand(CP, RW, ask(), shaped=(1,), row=99.0, unoffered=True), "driver_contract"),
        (by_hand(Verify(seqs=(0,), accept=(1,)), ask(), shaped=(0,)), "round_drafts"),
        (by_hand(Verify(seqs=(0,), accept=(1,), route="host"), ask(), shaped=(0,), unoffered=True), "driver_contract"),
        (by_hand(Accept(seq=0, n=1), ask(), shaped=(0,)), "round_drafts"),
        (by_hand(RW, Accept(seq=0, n=1), ask(), shaped=(0, 1)), "verify_rows"),
        # the checkpoint is from before the verification
        (by_hand(RW, Verify(seqs=(0,)), Accept(seq=0, n=1), ask(), shaped=(0, 2), opened=1), "round_drafts"),
        # what was processed since is none of the checkpoint's
        (by_hand(CP, RW, feed(2), ask(), shaped=(1,), row=99.0, at={1: 2}), "drafting"),
        (by_hand(CP, RW, feed(2), ask(), shaped=(1,), at={1: 2}), "redraft"),
        (by_hand(SeqRm(seq=0, lo=TAIL), ask(), shaped=(0,)), "driver_contract"),
        (by_hand(SeqRm(seq=0), ask(), shaped=(0,)), "drafting"),
        # the last thing that shaped it counts
        (by_hand(RW, Verify(seqs=(0,), accept=(1,)), ask(), shaped=(0, 1)), "round_drafts"),
        (by_hand(Verify(seqs=(0,), accept=(1,)), RW, ask(), shaped=(0, 1)), "redraft"),
    ],
)
def test_the_most_specific_thing_that_can_be_said(made: tuple[Account, Held], name: str) -> None:
    account, h = made
    assert owner(account, h) == name
    assert [o.name for o in DRAFT if o.judge(account).violations] == [name]
    v = by_name(name).judge(account).violations[0]
    assert v.oracle == name
    assert v.check.kind == "draft"
    assert v.check.expected == (2,)
    assert v.key.startswith(name)
    assert v.kind == ("contract" if name in ("driver_contract", "verify_rows") or v.key.endswith(":fresh") else "fault")


def test_only_others_were_worked_on_since_it_was_right() -> None:
    def since(*ops: AnyOp, touched: str, right_at: int = 1, row: float = 0.0) -> int | None:
        account, h = by_hand(*ops, touched=touched, row=row)
        assert account.driven is not None
        if right_at >= 0:
            c = h.claim
            right = DraftClaim(right_at, 0, c.line, 7, -1, (1,), c.given, c.pos, c.want_pos)
            account.driven.held.insert(0, Held(right, 0.0, 0.1, 0.0, 0.1, 0.0, -1, 0.0, (1,), False, 0))
        return alone_since(account, h)

    assert since(feed(4), ask(), feed(4, 1), ask(), touched="0010") == 1
    assert since(feed(4), ask(), feed(4, 0), ask(), touched="0000") is None, "it was worked on itself"
    assert since(feed(4), ask(), CP, ask(), touched="00-0") is None, "nobody did anything"
    assert since(feed(4), ask(), feed(1, 1), feed(1), ask(), touched="00100") is None
    # without an earlier draft: another sequence was put back, and its own last work was a decode
    put_back = Rewind(seq=1, slot=0)
    assert since(feed(4), CP, put_back, ask(), touched="0-10", right_at=-1, row=99.0) == 0
    assert since(feed(4), CP, put_back, ask(), touched="0-10", right_at=-1) is None, "its row is right"
    assert since(feed(4), CP, feed(1, 1), ask(), touched="0-10", right_at=-1, row=99.0) is None


# --- what is said -----------------------------------------------------------------------------------------------------


def test_what_is_seen_in_words() -> None:
    account, h = by_hand(CP, RW, ask(), shaped=(1,))
    assert what(h) == "tokens"
    assert seen(h) == "it drafts 1, a clean context drafts 2 and prefers its own token by 50"
    assert where(account, h) == "sequence 0 drafts behind 4 tokens in operation 2 after operation 1 (rewind)"
    assert [line.partition(":")[0] for line in rungs(h)] == ["paired row", "draft logits", "draft tokens"]
    _, row = by_hand(ask(), row=99.0)
    assert what(row) == "row"
    assert seen(row) == (
        "the token at position 4 is paired with a hidden row that is off by 99 (honest differences here stay below 0.1)"
    )
    logits = Held(h.claim, 0.0, 0.1, 9.0, 0.1, 1.0, -1, 0.0, (), False, 1)
    assert what(logits) == "logits"
    assert seen(logits).startswith("1 of 1 draft logit rows differ, by 9 at most")
    c = h.claim
    lost = DraftClaim(c.step, 0, c.line, -1, -1, (), c.given, -1, 4)
    assert seen(Held(lost, 9.0, 0.1, 0.0, 0.1, 0.0, -1, 0.0, (), False, 0)) == (
        "the draft's memory must get a row at position 4 first, but it gets none"
    )


def test_a_violation_carries_what_a_reproducer_needs() -> None:
    s = program(*TRIP, ask())
    (v,) = driver_judge("dense", driver=Ignores).judge(s, fault="x", variants=False).violations
    assert (v.check.step, v.check.seq, v.check.what) == (4, 0, "row")
    assert v.error > v.band > 0
    assert v.suspects == (3,)
    reference = v.check.reference
    assert reference is not None
    assert reference.driver is not None
    assert reference.driver.impl == "native"
    trace = run(reference)
    assert tuple(trace.steps[-1].drafts[0]) == v.check.expected
    assert msgspec.json.decode(msgspec.json.encode(v), type=Violation) == v
    # of a row at the beginning, which must be zeros, there is none
    fresh = program(feed(8), SeqRm(seq=0), feed(3, stream=2))
    (v,) = driver_judge("dense", driver=Stale).judge(fresh, fault="x", variants=False).violations
    assert v.check.reference is None


# --- agreement --------------------------------------------------------------------------------------------------------


def agreement(tape: DriverTape) -> list[str]:
    return [v.key for v in by_name("agreement").judge(tape.account()).violations]


def fed(kind: str = "draft-mtp", **more: Any) -> DriverTape:
    return DriverTape(kind, **more).decode((0, (5, 6, 7)))


def foreign(**more: Any) -> DriverTape:
    """A partial state put onto a sequence that does not hold what it leaves out."""
    return fed().checkpoint(0, flags=PARTIAL).rewind(1, **more)


def test_both_memories_name_the_same_positions() -> None:
    assert agreement(fed().propose((0, 1, (2,))).verify((0, 1))) == []
    assert agreement(fed().decode((0, (1,)), pos={0: (0, 2)})) == ["agreement:target"]
    assert agreement(fed().decode((0, (1,)), draft_pos={0: (0, 2)})) == ["agreement:draft"]
    assert agreement(fed().decode((0, (1,)), draft_pos={0: (-1, -1)})) == ["agreement:draft"]
    # eagle3 is one behind until it drafts
    for last, key in ((3, []), (2, []), (1, ["agreement:draft"])):
        assert agreement(fed("draft-eagle3").decode((0, (1,)), draft_pos={0: (0, last)})) == key
    # a shared memory is the target's; kinds without a draft context have none
    assert agreement(fed("draft-mtp", shares=True).decode((0, (1,)))) == []
    assert agreement(fed("ngram-mod").decode((0, (1,)))) == []
    # nothing is asked of what is undefined, nor of a draft memory that was not put back
    assert agreement(foreign(pos={1: (0, 9)})) == []
    assert agreement(fed().checkpoint(0).rewind(1, parts=("target", "driver"), draft_pos={1: (-1, -1)})) == []


def test_a_refused_removal_behind_a_draft() -> None:
    assert agreement(fed().propose((0, 1, (2,)), rc=0)) == ["agreement:refused"]
    assert agreement(foreign().propose((1, 1, (2,)), rc=0)) == []


def test_what_must_be_taken_and_is_not() -> None:
    assert agreement(fed().decode((0, (1,)), rc=1)) == ["agreement:failed"]
    assert agreement(fed().checkpoint(0).rewind(0, rc=0)) == ["agreement:refused"]
    assert agreement(fed().rm(0, rc=0)) == ["agreement:refused"]
    assert agreement(fed().propose((0, 1, (2, 3))).verify((0, 0), value=0)) == ["agreement:refused"]
    assert agreement(foreign(rc=0)) == [], "nobody promises that it fits"


def test_each_round_makes_progress() -> None:
    assert agreement(fed().propose((0, 1, (2, 3))).verify((0, 0))) == []
    assert agreement(fed().propose((0, 1, (2, 3))).verify((0, 0), pos={0: (0, 2)})) == ["agreement:progress"]


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["cut", "host", "device", "whole"])
def test_the_route_that_diverges_first_is_part_of_the_verdict(route: Route) -> None:
    class Off(Ideal):
        """Every row behind position 8 is another one."""

        def logits(self, ctx: int, i: int, n_vocab: int) -> bytes:
            return self._row(self.seen[i], n_vocab, "off" if max(self.seen[i])[0] >= 10 else "logits")

    s = program(feed(8), ask(), Verify(seqs=(0,), accept=(1,), route=route), feed(1, stream=2))
    found = driver_judge("dense", target=Off).judge(s, fault="x", variants=False)
    mine = [v for v in found.violations if v.oracle == "greedy"]
    assert len(mine) == 1, "the first row that diverges says it all"
    assert mine[0].key in (f"greedy:{route}", "greedy:decode")
    assert mine[0].check.what == "target"
    tail = program(feed(9), SeqRm(seq=0, lo=TAIL), feed(4, stream=2))
    (v,) = [v for v in driver_judge("dense", target=Off).judge(tail, fault="x").violations if v.oracle == "greedy"]
    assert v.key == "greedy:cut"


# --- two drivers ------------------------------------------------------------------------------------------------------


class Other(IdealDriver):
    """The implementation in Python drafts something else."""

    def draft(self, asks: Sequence[Any]) -> list[list[int]]:
        found = super().draft(asks)
        return [[t ^ (self.p.impl == "reference") for t in drafts] for drafts in found]


def test_both_implementations_run_one_program_without_saved_states() -> None:
    oracle = by_name("two_drivers")
    s = program(*TRIP, ask())
    base, other = oracle.base(s), oracle.variant(s)
    assert base is not None
    assert other is not None
    assert base.driver == msgspec.structs.replace(MTP, state=False)
    assert other.driver == msgspec.structs.replace(MTP, state=False, impl="reference")
    assert base.ops == other.ops == s.ops
    for kind in ("draft-eagle3", "draft-simple", "ngram-mod"):
        assert oracle.base(program(kind=kind)) is None
        assert oracle.variant(program(kind=kind)) is None
    assert oracle.variant(other) is None, "it is the other one already"
    assert oracle.variant(Scenario(model=MODEL, ops=())) is None


def test_a_mended_driver_may_do_better_behind_a_restore() -> None:
    s = program(*TRIP, ask())
    judged = driver_judge("dense", driver=Other).judge(s, variants=True, fault="x")
    assert not [v for v in judged.violations if v.oracle == "two_drivers"]


def test_drafts_that_differ_are_reported_once() -> None:
    s = program(TRIP[0], ask(), ask(stream=7))
    same = driver_judge("dense").judge(s, variants=True)
    (verdict,) = [v for v in same.verdicts if v.oracle == "two_drivers" and v.compared]
    assert (verdict.value, verdict.compared) == ("ok", 2)
    found = driver_judge("dense", driver=Other).judge(s, variants=True, fault="x")
    (v,) = [v for v in found.violations if v.oracle == "two_drivers"]
    assert (v.check.step, v.check.what, v.suspects) == (1, "two drivers", (1,))
    # a new conversation is where llama.cpp's goes on with the old row, which is a finding of its own
    wiped = driver_judge("dense", driver=Other).judge(
        program(feed(8), SeqRm(seq=0), feed(3), ask()), variants=True, fault="x"
    )
    assert not [v for v in wiped.violations if v.oracle == "two_drivers"]


# --- the runner -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_saved_states_offers_nothing() -> None:
    s = program(*TRIP, ask())
    assert s.driver is not None
    offered = run(s).steps[1].blobs[-1].size
    assert offered > 0
    without = msgspec.structs.replace(s, driver=msgspec.structs.replace(s.driver, state=False))
    assert run(without).steps[1].blobs[-1].size == -1


def test_operations_without_ground_are_skipped() -> None:
    trace = run(
        program(
            feed(4),
            Verify(seqs=(0,), accept=(1,)),
            Accept(seq=0, n=1),
            RW,
            CP,
            Mangle(slot=1, how="long"),
            Begin(seq=0),
        )
    )
    assert [bool(s.skipped) for s in trace.steps] == [False, True, True, True, False, True, False]
    assert trace.end.how == "ok"


def test_greedy_acceptance_takes_what_the_target_confirms() -> None:
    for seed in range(6):
        trace = run(program(feed(8, stream=seed), ask(stream=-1), Verify(seqs=(0,), accept=(-1,)), ask(stream=-1)))
        rows = trace.logit_rows()
        drafts, batch = trace.steps[1].drafts[0], trace.steps[2].batches[0]
        confirmed = [int(rows[batch.first + j].argmax()) for j in range(len(drafts) + 1)]
        k = next((j for j, t in enumerate(drafts) if t != confirmed[j]), len(drafts))
        assert trace.steps[2].args == [k]
        assert trace.steps[3].args == [confirmed[k]], "the next token is the greedy one behind what was taken"
        assert trace.steps[2].pos[0] == trace.steps[2].draft_pos[0] == (0, 8 + k)


def test_facts_say_how_the_draft_is_made() -> None:
    facts: Facts = run(program(feed(1))).facts[0]
    assert facts.n_draft_max == 3
    assert not facts.draft_shares
    assert run(program(feed(1)), shares=True).facts[0].draft_shares


def test_traces_are_judged_again_from_their_text() -> None:
    s = program(*TRIP, ask())
    trace = run(s)
    assert driver_judge(measured=True).assess(s, from_bytes(to_bytes(trace))).violations == []
    trace.steps[-1].drafts[0][1] ^= 1
    stored = from_bytes(to_bytes(trace))
    assert [v.key for v in driver_judge(measured=True).assess(s, stored).violations] == ["redraft:tokens"]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("row", "the next token is paired with another hidden row"),
        ("tokens", "other tokens are drafted"),
        ("logits", "drafts are made from another state"),
        ("target", "the target diverges from plain decoding"),
        ("positions", "target and draft disagree on positions"),
        ("two drivers", "llama.cpp's driver and the one in Python draft different tokens"),
        ("huge", "a malformed driver state is not refused"),
    ],
)
def test_titles(what: str, says: str) -> None:
    s = program(*TRIP, ask())
    found = driver_judge("dense", driver=Ignores).judge(s, fault="x", variants=False)
    v = found.violations[0]
    v = msgspec.structs.replace(v, check=msgspec.structs.replace(v.check, what=what))
    t = Triaged(found, v, s, s, (3, 3), 3, "target+draft+driver", "signature", True, 1)
    assert title_of(t) == f"rewind (target+draft+driver): {says}"
