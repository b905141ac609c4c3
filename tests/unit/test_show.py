"""What people see: one line of progress, one line a finding, the coverage table, exit codes and the JSON document."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fuzz import show
from fuzz.campaign import FailOn, Result, Status
from fuzz.journal import Progress
from subjects.scenario import OP_NAMES


def finding(signature: str = "logits/restore/hybrid/buffer-whole", known: str | None = None) -> dict[str, Any]:
    return {
        "signature": signature,
        "title": "a title",
        "kind": "fault",
        "oracle": signature.partition("/")[0],
        "memory": "hybrid",
        "known": known,
        "reproduced": [2, 3],
        "operations": 4,
        "path": "/somewhere/findings/a-folder",
    }


def status(*found: dict[str, Any], minutes: float | None = None, scenarios: int | None = None) -> Status:
    jobs = {
        0: Progress(
            scenarios=300, unjudged=6, unreproduced=1, seconds=20.0, coverage={"decode/dense": 3, "save/hybrid": 1}
        ),
        1: Progress(scenarios=100, unjudged=2, seconds=10.0, coverage={"decode/dense": 4, "draft/window": 0}),
    }
    return Status(Path("out/x"), minutes, scenarios, jobs=jobs, findings=list(found))


def test_a_line_of_progress() -> None:
    assert show.headline(status(finding(), finding("a", "stale-rollback"), finding("b", "device-older"))) == (
        "400 scenarios, 20/s, 8 unknown, 3 operation x memory cells, findings: 1 new, 2 known"
    )
    assert show.headline(Status(Path("x"), None, None)) == (
        "0 scenarios, 0/s, 0 unknown, 0 operation x memory cells, findings: 0 new, 0 known"
    )


@pytest.mark.parametrize(
    ("minutes", "scenarios", "left"),
    [
        (None, None, None),
        (2.0, None, "1:40"),
        (None, 1000, "0:30"),
        (2.0, 1000, "0:30"),
        (0.5, 1000, "0:10"),
        (0.1, None, "0:00"),
        (None, 400, "0:00"),
    ],
)
def test_time_left_is_what_comes_first(minutes: float | None, scenarios: int | None, left: str | None) -> None:
    line = show.headline(status(minutes=minutes, scenarios=scenarios))
    assert line.endswith("known" if left is None else f", {left} left")


def test_a_line_a_finding() -> None:
    assert show.finding_line(finding()) == "logits/restore/hybrid/buffer-whole  (new; 4 operations; 2 of 3)"
    assert show.finding_line(finding("x", "device-older")) == "x  (known: device-older; 4 operations; 2 of 3)"


def printed(status_: Status, *events: dict[str, Any] | None, quiet: bool = False) -> str:
    out = io.StringIO()
    with show.Progress(Console(file=out, width=200), quiet=quiet) as listen:
        for event in events:
            listen(status_, event)
    return out.getvalue()


def test_findings_and_troubles_are_told_as_they_come() -> None:
    found = {"event": "finding", **finding("liveness:x.cpp: GGML_ASSERT(a[i] == [/b]) failed")}
    text = printed(status(), found, {"event": "trouble", "text": "cannot write [x]"}, None)
    assert text.splitlines() == [
        "found  liveness:x.cpp: GGML_ASSERT(a[i] == [/b]) failed  (new; 4 operations; 2 of 3)",
        "cannot write [x]",
    ]
    assert printed(status(), found, None, quiet=True) == ""


def test_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 100.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now

    monkeypatch.setattr(show, "time", Clock)
    out = io.StringIO()
    listen = show.Progress(Console(file=out, width=200))
    listen(status(), None)
    assert out.getvalue() == ""
    Clock.now += show.PLAIN_EVERY + 1
    listen(status(), None)
    listen(status(), None)
    assert out.getvalue() == show.headline(status()) + "\n"


def test_coverage_has_a_row_an_operation() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(show.coverage_table(status().coverage()))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[0] == ["operation", "dense", "window", "recurrent", "hybrid"]
    assert [line[0] for line in lines[1:]] == [n for n in OP_NAMES if n not in show.DRIVER_OPS]
    rows = {line[0]: line[1:] for line in lines[1:]}
    assert rows["decode"] == ["7", "-", "-", "-"]
    assert rows["save"] == ["-", "-", "-", "1"]
    assert rows["draft"] == ["-", "0", "-", "-"]


def test_coverage_of_drivers_has_the_operations_that_they_ran_and_a_column_a_driver() -> None:
    ran = {"decode/hybrid-draft-mtp": 5, "propose/hybrid-draft-mtp": 4, "rewind/dense-ngram-mod": 2}

    def table(coverage: dict[str, int]) -> dict[str, list[str]]:
        out = io.StringIO()
        Console(file=out, width=200).print(show.coverage_table(coverage))
        return {line.split()[0]: line.split()[1:] for line in out.getvalue().splitlines()}

    assert table(ran) == {
        "operation": ["dense-ngram-mod", "hybrid-draft-mtp"],
        "decode": ["-", "5"],
        "propose": ["-", "4"],
        "rewind": ["2", "-"],
    }
    # beside plain programs: their whole table, and below it what drivers ran
    both = table({**ran, "save/dense": 1})
    assert both["operation"] == ["dense", "window", "recurrent", "hybrid", "dense-ngram-mod", "hybrid-draft-mtp"]
    assert list(both)[1:] == [n for n in OP_NAMES if n not in show.DRIVER_OPS or n in ("propose", "rewind")]
    assert both["propose"] == ["-", "-", "-", "-", "-", "4"]


def test_coverage_of_many_drivers_has_a_row_a_driver() -> None:
    drivers = [f"{memory}-draft-{kind}" for memory in show.MEMORIES for kind in ("mtp", "eagle3")]
    ran = {f"{op}/{d}": i for i, d in enumerate(drivers) for op in show.DRIVER_OPS}
    out = io.StringIO()
    Console(file=out, width=120).print(show.coverage_table(ran))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[0] == ["driver", *(n for n in OP_NAMES if n in show.DRIVER_OPS)]
    assert {line[0]: set(line[1:]) for line in lines[1:]} == {d: {str(i)} for i, d in enumerate(drivers)}


def test_the_live_display_can_be_drawn() -> None:
    s = status(finding())
    s.doing = {1: "reducing draft:x"}
    out = io.StringIO()
    Console(file=out, width=100).print(show.live(s))
    assert "job 1: reducing draft:x" in out.getvalue()


NEW, OLD = finding(), finding("x", "stale-rollback")


@pytest.mark.parametrize(
    ("found", "fail_on", "code"),
    [
        ([], "new", 0),
        ([OLD], "new", 0),
        ([OLD, NEW], "new", 1),
        ([OLD], "any", 1),
        ([], "any", 0),
        ([OLD, NEW], "never", 0),
    ],
)
def test_exit_codes(found: list[dict[str, Any]], fail_on: FailOn, code: int) -> None:
    assert Result(status(*found), False, []).exit_code(fail_on) == code
    assert Result(status(*found), True, []).exit_code(fail_on) == 130
    assert Result(status(*found), False, [1]).exit_code(fail_on) == (code or 2)


def test_nothing_judged_is_3_and_2_when_jobs_died() -> None:
    nothing = Status(Path("x"), None, None)
    unjudged = Status(Path("x"), None, None, jobs={0: Progress(scenarios=5, unjudged=5)})
    for s in (nothing, unjudged):
        assert Result(s, False, []).exit_code("new") == 3
        assert Result(s, False, [0]).exit_code("new") == 2
    almost = Status(Path("x"), None, None, jobs={0: Progress(scenarios=5, unjudged=4)})
    assert Result(almost, False, []).exit_code("new") == 0


def test_the_document() -> None:
    s = status(NEW, OLD)
    s.jobs[0].unknown, s.jobs[1].unknown = {"a": 1, "b": 5}, {"a": 2}
    s.jobs[1].max_rss_kb, s.own_rss_kb = 77, {0: 3, 1: 9}
    d = Result(s, False, []).document()
    assert (d["scenarios"], d["per_second"], d["seconds"]) == (400, 20.0, 20.0)
    assert (d["unknown"], d["unreproduced"], d["interrupted"]) == (8, 1, False)
    assert list(d["reasons"].items()) == [("b", 5), ("a", 3)]
    assert d["coverage"] == {"decode/dense": 7, "save/hybrid": 1, "draft/window": 0}
    assert d["memory_kb"] == {"children": 77, "jobs": 9}
    assert d["findings"] == [NEW, OLD]
    assert Result(s, False, []).new == [NEW]
