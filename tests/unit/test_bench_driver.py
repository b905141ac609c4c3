"""How calls of drivers are noted: numbers, slots, and the words that bench_driver.cpp reads."""

import re

from fuzz.measure.bench_driver_calls import KINDS, MAGIC, SOURCE, Calls, Code, NotingDriver
from subjects.drivers import DraftAsk, Tap, TapRow
from subjects.scenario import DriverParams
from subjects.trace import Row


class Driver:
    """Drafts two tokens, in two decodes of the draft."""

    n_max = 3

    def __init__(self) -> None:
        self.taps: list[Tap] = []

    def process(self, rows: list[Row]) -> bool:
        self.taps = [Tap(0, [TapRow(r.token, r.pos, r.seq, False, b"") for r in rows], b"")]
        return True

    def draft(self, asks: list[DraftAsk]) -> list[list[int]]:
        self.taps = [Tap(0, [TapRow(1, 0, 0, False, b""), TapRow(1, 1, 0, True, b"")], bytes(8))] * 2
        return [[5, 6] for _ in asks]

    def state(self, seq: int) -> bytes:
        return b"state"

    def restore(self, seq: int, blob: bytes) -> None:
        pass

    def take(self) -> list[Tap]:
        taps, self.taps = self.taps, []
        return taps


def driver(calls: Calls, *, ours: bool = False) -> NotingDriver:
    calls.begin()
    target, draft = 1000, 2000
    calls.made(target)
    calls.made(draft)
    made = NotingDriver(calls, Driver(), DriverParams(kind="draft-mtp"), target, draft, 2, ours=ours)  # type: ignore[arg-type]
    del calls.words[:]
    return made


def test_codes_and_kinds_are_those_of_the_program() -> None:
    source = SOURCE.read_text()
    names = re.search(r"enum Code \{(.*?)\}", source, re.DOTALL)
    kinds = re.search(r"KINDS\[\] = \{(.*?)\}", source, re.DOTALL)
    assert names and kinds
    assert [x.strip() for x in names[1].split(",") if x.strip()] == [c.name for c in Code]
    assert tuple(re.findall(r'"([\w-]+)"', kinds[1])) == KINDS
    assert f"{MAGIC:#x}" in source


def test_contexts_take_the_lowest_free_number() -> None:
    calls = Calls()
    calls.begin()
    assert [calls.made(h) for h in (10, 20, 30)] == [0, 1, 2]
    calls.freed(20)
    assert calls.made(40) == 1
    assert calls.context(0) == -1
    calls.begin()
    assert calls.made(50) == 0


def test_a_blob_that_the_library_did_not_give_is_written_down() -> None:
    calls = Calls()
    calls.begin()
    given, ours = b"given by it", b"mangled"
    assert calls.slot(given) == 0  # not given yet: written down
    before = len(calls.words)
    assert calls.slot(given) == 0 and len(calls.words) == before
    calls.kept(ours)
    assert calls.slot(ours) == 1 and len(calls.words) == before
    at = calls.words.index(Code.LITERAL, 1)
    assert calls.words[at + 1 : at + 3].tolist() == [0, len(given)]
    assert calls.words[at + 3 :].tobytes() == given + b"\0"


def test_taps_stand_before_the_call_that_they_belong_to() -> None:
    calls = Calls()
    d = driver(calls)
    d.process([Row(0, 3, 7, False), Row(1, 4, 8, True)])
    assert not calls.words
    d.take()
    assert calls.words.tolist() == [Code.PROCESS, 1, 0, 1, 2, 7, 8, 3, 4, 0, 1, 0, 1]
    del calls.words[:]
    d.draft([DraftAsk(1, 2, 9, -1, (3, 4))])
    d.take()
    assert calls.words.tolist() == [Code.DRAFT, 4, 1, 1, 1, 1, 1, 1, 2, 9, -1, 2, 5, 6, 2, 3, 4]


def test_states_of_our_driver_are_not_expected_of_theirs() -> None:
    calls = Calls()
    d = driver(calls)
    blob = d.state(1)
    assert blob is not None
    d.restore(0, blob)
    assert calls.words.tolist() == [Code.STATE, 1, 0, 5, Code.RESTORE, 0, 0]
    d = driver(calls, ours=True)
    blob = d.state(1)
    assert blob is not None
    d.restore(0, blob)
    assert calls.words.tolist() == [Code.STATE, 1, 0, -1]
