"""A job over llama-server with a judge that is none: what is counted, followed up, stepped round, kept and told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from server_fakes import FakeJudge, Wrong, model, violation

from fuzz import journal, loop
from fuzz.models import Model
from fuzz.server import avoid
from fuzz.server import finding as findings
from fuzz.server import job as jobs
from fuzz.server import triage as triages
from fuzz.server.flags import FLAG_SETS
from oracles.verdict import Violation
from subjects.scenario import DriverParams, ModelRef
from subjects.server.scenario import (
    Cut,
    EraseSlot,
    Flags,
    RestoreSlot,
    SaveSlot,
    ServerScenario,
    Together,
    Turn,
    asked,
)
from subjects.server.trace import Event

MTP = DriverParams(kind="draft-mtp")
ABORT = "server-alive:llama-batch.cpp: GGML_ASSERT(n_ubatch > n_keep_tail) failed"
BEGIN, ON = Turn(conv=0, keep=Cut("start"), n=9), Turn(conv=0, n=3)


def program(*requests: Any, **fields: Any) -> ServerScenario:
    return ServerScenario(model=ModelRef(recipe="llama"), requests=requests, **fields)


def goes_on(p: ServerScenario) -> Violation | None:
    """Wrong wherever a conversation goes on."""
    at = next((i for i, a in asked(p) if isinstance(a, Turn) and a.keep.at != "start" and a.base is None), None)
    return None if at is None else violation(at)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> type[FakeJudge]:
    class Fresh(FakeJudge):
        asked: ClassVar[list[tuple[ServerScenario, dict[str, Any]]]] = []
        closed = 0

    monkeypatch.setattr(jobs, "ServerJudge", Fresh)
    return Fresh


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(loop.signal, "signal", lambda *_: None)
    for module in (jobs, loop):
        monkeypatch.setattr(module, "emit", lambda event, **fields: said.append({"event": event, **fields}))
    return said


def job(
    out: Path, *models: Model, scenarios: int | None = 12, requests: int | None = None, flags: tuple[str, ...] = (),
    **asked: Any,
) -> jobs.ServerJob:  # fmt: skip
    part = loop.ServerPart(path="llama-server", fingerprint="f", name="n", flags=[*flags], requests=requests)
    config = loop.JobConfig(
        models=[*models] or [model()], shim="", build="f", cache=str(out / "cache"), out=str(out), seed=1, job=0,
        jobs=1, scenarios=scenarios, server=part, **asked,
    )  # fmt: skip
    return jobs.ServerJob(config, part)


def wrong(judge: type[FakeJudge], how: Wrong) -> None:
    judge.wrong = staticmethod(how)  # type: ignore[method-assign]


def found(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert not [e["text"] for e in told if e["event"] == "trouble"]
    return [e for e in told if e["event"] == "finding"]


def test_what_is_run_is_counted(tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]) -> None:
    judge.events = (Event("restored", 0, 36), Event("kept", 0, 4))
    made = job(tmp_path, model("llama"), model("qwen35"), scenarios=jobs.SLICE + 5)
    made.run()
    p = made.progress
    programs = [s for s, _ in judge.asked]
    assert (p.scenarios, p.unjudged, p.violating) == (jobs.SLICE + 5, 0, 0)
    assert p.requests == sum(len(asked(s)) for s in programs)
    assert p.deeds == {"restored": p.requests, "kept": p.requests}
    assert p.coverage["turn/dense"] == sum(
        isinstance(r, Turn) for s in programs if s.model.recipe == "llama" for r in s.requests
    )
    assert any(key.endswith("/hybrid") for key in p.coverage)
    assert p.max_rss_kb == 1000
    assert judge.closed == 3, "those of the first model when the second one's turn comes, and both at the end"
    assert told[-1]["event"] == "done"
    assert not found(told)


def test_it_ends_when_the_requests_are_checked(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    made = job(tmp_path, scenarios=None, requests=60)
    made.run()
    last = len(asked(judge.asked[-1][0]))
    assert 60 <= made.progress.requests < 60 + last
    assert told[-1]["event"] == "done"


def test_a_seed_fixes_what_is_made_up_and_flags_are_those_named(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    for name in ("a", "b"):
        job(tmp_path / name).run()
    one, two = judge.asked[:12], judge.asked[12:]
    assert one == two
    job(tmp_path / "c", flags=("ram-cache", "unified")).run()
    assert {s.flags for s, _ in judge.asked[24:]} == {FLAG_SETS["ram-cache"], FLAG_SETS["unified"]}


def test_a_violation_becomes_a_finding_confirmed_and_small(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    wrong(judge, goes_on)
    judge.events = (Event("loaded", 0), Event("restored", 0, 36))
    made = job(tmp_path)
    made.run()
    (event,) = found(told)
    assert (event["signature"], event["known"], event["reproduced"]) == (
        "server-answer/dense/cache+checkpoint", None, [3, 3],
    )  # fmt: skip
    folder = Path(event["path"])
    kept = findings.load(folder)
    assert len(kept.scenario.requests) <= 2
    assert goes_on(kept.scenario)
    assert len(kept.original.requests) >= len(kept.scenario.requests)
    assert "prompt cache" in kept.title and "checkpoint" in kept.title
    assert (kept.seed, kept.job, kept.build, kept.found_by) == (1, 0, "f", " --subject server")
    assert findings.load_trace(folder)[0].replies
    fresh = [how for _, how in judge.asked if how.get("fresh")]
    assert len(fresh) >= 2 * triages.RERUNS
    assert not any(how["variants"] for how in fresh), "one run shows it"
    assert [*(tmp_path / "findings").iterdir()] == [folder], "one signature, one folder"
    assert made.progress.symptoms == {"server-answer|tokens|dense": loop.TRIAGES}
    assert not [*(tmp_path / "state").glob("pending-*")]


def test_what_does_not_reproduce_is_counted_and_not_reported(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    def once(p: ServerScenario) -> Violation | None:
        return None if judge.asked[-1][1].get("fresh") else goes_on(p)

    wrong(judge, once)
    made = job(tmp_path)
    made.run()
    assert not found(told)
    assert made.progress.unreproduced == loop.TRIAGES
    assert not (tmp_path / "findings").exists()


def test_of_what_shows_now_and_then_only_the_end_is_cut(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    """Requests at the same time are served in one order or the other."""
    runs = 0

    def flaky(p: ServerScenario) -> Violation | None:
        nonlocal runs
        if not judge.asked[-1][1].get("fresh"):
            return goes_on(p)
        runs += 1
        return goes_on(p) if runs % 3 else None

    wrong(judge, flaky)
    made = job(tmp_path)
    made.run()
    (event,) = found(told)
    assert event["reproduced"] == [2, 3]
    kept = findings.load(Path(event["path"]))
    blamed = kept.violation.check.step if kept.violation else -1
    assert kept.scenario.requests == kept.original.requests[: blamed + 1]


def dying(judge: type[FakeJudge], ways: Sequence[str]) -> None:
    """The server ends where a conversation goes on, on fresh servers with one assertion after the other."""
    runs = itertools.count()

    def ends(p: ServerScenario) -> Violation | None:
        found = goes_on(p)
        fresh = judge.asked[-1][1].get("fresh")
        if found is None:
            return None
        return violation(found.check.step, "server-alive", ways[next(runs) % len(ways) if fresh else 0])

    wrong(judge, ends)


def test_a_server_that_ends_in_one_way_or_another_is_one_finding(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    dying(judge, ("server-alive:a", "server-alive:b", "server-alive:b"))
    job(tmp_path).run()
    first, *_ = found(told)
    assert (first["signature"], first["reproduced"]) == ("server-alive:b", [3, 3])
    assert first["requests"] <= 2


def test_an_end_in_one_way_is_not_reduced_to_another(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    def ends(p: ServerScenario) -> Violation | None:
        found = goes_on(p)
        if found is None:
            return violation(0, "server-alive", "server-alive:other") if len(p.requests) < 2 else None
        return violation(found.check.step, "server-alive", "server-alive:own")

    wrong(judge, ends)
    job(tmp_path).run()
    (event,) = [e for e in found(told) if e["signature"] == "server-alive:own"]
    assert goes_on(findings.load(Path(event["path"])).scenario)


def test_a_known_fault_is_found_once_and_then_stepped_round(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    def aborts(p: ServerScenario) -> Violation | None:
        at = avoid.triggered("server-ubatch", p)
        return None if at is None else violation(at, "server-alive", ABORT)

    wrong(judge, aborts)
    made = job(tmp_path, model("qwen35", MTP), flags=("small-batch",), scenarios=20)
    made.run()
    (event,) = found(told)
    assert (event["known"], event["signature"], event["requests"]) == ("server-ubatch", ABORT, 1)
    assert made.progress.avoiding == ["server-ubatch"]
    first = next(i for i, (p, _) in enumerate(judge.asked) if avoid.triggered("server-ubatch", p) is not None)
    plain = [p for p, how in judge.asked[first + 1 :] if not how.get("fresh")]
    assert len(plain) > 5
    assert not [p for p in plain if avoid.triggered("server-ubatch", p) is not None]
    assert findings.load(Path(event["path"])).title.startswith("the first request aborts")

    # from the start, it is not met at all
    judge.asked.clear()
    job(tmp_path / "always", model("qwen35", MTP), flags=("small-batch",), avoid="always").run()
    assert not [p for p, _ in judge.asked if avoid.triggered("server-ubatch", p) is not None]
    assert len(found(told)) == 1


def test_what_is_stepped_round_is_not_taken_for_what_is_behind_it(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    """Unless it is told of the known fault, the judge sees that first, with the same symptom."""

    def behind(p: ServerScenario) -> Violation | None:
        return goes_on(p) if "server-checkpoint" in judge.asked[-1][1]["avoid"] else violation(0)

    wrong(judge, behind)
    made = job(tmp_path, avoid="always")
    made.run()
    (event,) = found(told)
    assert event["known"] is None
    assert goes_on(findings.load(Path(event["path"])).scenario)
    assert {tuple(how["avoid"]) for _, how in judge.asked} == {tuple(made.progress.avoiding)}


def test_the_same_end_without_its_trigger_is_new(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    wrong(judge, lambda p: violation(0, "server-alive", ABORT))
    job(tmp_path, scenarios=1).run()
    (event,) = found(told)
    assert event["known"] is None
    assert findings.load(Path(event["path"])).end


def test_other_histories_give_way_to_the_program_that_a_cold_server_contradicts(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    """Of two runs that must agree one is wrong: that one is reported, as what it is."""

    def leaks(p: ServerScenario) -> Violation | None:
        how = judge.asked[-1][1]
        other = any(isinstance(a, Turn) and a.stream >= 5000 for _, a in asked(p))
        if other:
            last = max((i for i, a in asked(p) if isinstance(a, Turn)), default=0)
            return violation(last)
        return violation(1, "server-history", "history") if how.get("variants") is not False else None

    wrong(judge, leaks)
    judge.events = (Event("restored", 0, 4),)
    made = job(tmp_path, scenarios=0)
    base = program(Turn(conv=1, keep=Cut("start"), n=9, stream=2), BEGIN)
    made._examine(base, made.config.models[0])
    (event,) = found(told)
    assert event["signature"] == "server-answer/dense/checkpoint"
    made.journal.close()


def test_a_program_that_was_left_is_tried_first_with_its_variants(
    tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]
) -> None:
    left = program(BEGIN, ON, note="left")
    before = journal.Journal(tmp_path, 0)
    before.in_flight(left)
    before.pending(program(BEGIN, note="pending"))
    job(tmp_path, scenarios=3).run()
    assert [(p.requests, how["variants"]) for p, how in judge.asked[:2]] == [((BEGIN,), True), ((BEGIN, ON), True)]
    assert journal.Journal(tmp_path, 0).left_over == []
    # of another model, or of another subject: not ours
    other = tmp_path / "other"
    before = journal.Journal(other, 0)
    before.pending(program(BEGIN, driver=MTP))
    judge.asked.clear()
    job(other, scenarios=0).run()
    assert judge.asked == []


def test_a_fault_of_ours_costs_one_program(tmp_path: Path, judge: type[FakeJudge], told: list[dict[str, Any]]) -> None:
    def breaks(p: ServerScenario) -> Violation | None:
        raise KeyError("ours")

    wrong(judge, breaks)
    made = job(tmp_path, scenarios=2)
    made.run()
    assert (made.progress.scenarios, made.progress.unjudged) == (2, 2)
    assert len([e for e in told if e["event"] == "trouble" and "KeyError: 'ours'" in e["text"]]) == 2
    assert len([*(tmp_path / "state").glob("trouble-*.json")]) == 2


@pytest.mark.parametrize(
    ("deeds", "before", "route"),
    [
        ((), (), ""),
        (("kept",), (), "kept"),
        (("kept", "reset"), (), "reset"),
        (("restored", "kept", "replay"), (), "checkpoint"),
        (("replay", "kept"), (), "replay"),
        (("loaded", "restored"), (), "cache+checkpoint"),
        (("kept",), (RestoreSlot(0, 0),), "file"),
        (("restored",), (SaveSlot(0, 0), RestoreSlot(0, 0)), "file+checkpoint"),
        (("kept",), (RestoreSlot(0, 0), EraseSlot(0)), "kept"),
    ],
)
def test_the_route_is_what_the_server_did_before(
    deeds: tuple[Any, ...], before: tuple[Any, ...], route: str, judge: type[FakeJudge]
) -> None:
    p = program(BEGIN, *before, ON)
    judge.events = tuple(Event(d) for d in deeds)
    made = judge(None, p.model, Path(), None, None, "dense").judge(p)
    v = violation(len(p.requests) - 1)
    assert triages.route_of(made, v) == route
    assert triages.sign(v, p, "dense", route) == "/".join(x for x in ("server-answer", "dense", route) if x)


def test_signatures_name_the_driver_the_slot_action_and_the_end(judge: type[FakeJudge]) -> None:
    p = program(BEGIN, SaveSlot(0, 0), Together((ON,)), driver=MTP)
    made = judge(None, p.model, Path(), None, None, "hybrid").judge(p)
    slot = violation(1, "server-slot", "slot-count")
    assert triages.route_of(made, slot) == "save_slot"
    assert triages.sign(slot, p, "hybrid", "save_slot") == "server-slot/hybrid/draft-mtp/save_slot"
    assert triages.sign(violation(0, "server-alive", ABORT), p, "hybrid", "x") == ABORT
    assert triages.route_of(made, violation(9)) == ""


@pytest.mark.parametrize(
    ("flags", "n_max", "kind", "recipe", "at"),
    [
        (Flags(ubatch=4, batch=4), 3, "draft-mtp", "qwen35", 1),
        (Flags(ubatch=5, batch=8), 3, "draft-mtp", "qwen35", None),
        (Flags(ubatch=2, batch=8), 1, "draft-eagle3", "qwen35", 1),
        (Flags(ubatch=4, batch=4), 3, "draft-simple", "qwen35", None),
        (Flags(ubatch=4, batch=4), 3, "draft-mtp", "step35", None),
        (Flags(ubatch=4, batch=4), 3, None, "qwen35", None),
    ],
)
def test_a_small_ubatch_sets_it_off_with_rollback_only(
    flags: Flags, n_max: int, kind: Any, recipe: str, at: int | None
) -> None:
    driver = DriverParams(kind=kind, n_max=n_max) if kind else None
    p = ServerScenario(model=ModelRef(recipe=recipe), requests=(EraseSlot(0), BEGIN), flags=flags, driver=driver)
    assert avoid.triggered("server-ubatch", p) == at
    repaired = avoid.repaired(avoid.SERVER_AVOIDANCES, p)
    assert avoid.triggered("server-ubatch", repaired) is None
    assert (repaired == p) == (at is None)
