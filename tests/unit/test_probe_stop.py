"""A probe that is stopped, or is long: what is kept, what is left behind, and what is said on the way."""

from __future__ import annotations

import io
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fuzz.probe import table
from fuzz.probe.measure import Plan
from fuzz.probe.progress import progress
from fuzz.probe.stopping import stoppable
from fuzz.probe.table import probe
from fuzz.probe.writers import troubles
from subjects.scenario import ContextParams

# takes the place of fuzz.probe.child: runs that are all alike, with a word on the way at every hundredth token
CHILD = """
import sys
import msgspec
from pathlib import Path
from fuzz.probe.measure import Order, Run, Said, run_file
order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
def say(*a, **k):
    print(msgspec.json.encode(Said(*a, **k)).decode(), flush=True)
for position, arm in order.todo:
    say("begin", position, arm)
    for n in range(100, position + 300, 100):
        say("at", position, arm, tokens=n)
    run = Run(text=[1], target=[b"\\0" * 12])
    (Path(order.folder) / run_file(order.route, position, arm)).write_bytes(msgspec.msgpack.encode(run))
    say("run", position, arm)
"""
POSITIONS = [34, 35]


@pytest.fixture(autouse=True)
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "child.py"
    path.write_text(CHILD, "utf-8")
    monkeypatch.setattr(table, "COMMAND", [sys.executable, str(path)])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def measure(listen: Callable[[str, int], None], positions: list[int]) -> table.Report:
    plan = Plan(shim="", model="", params=ContextParams(), prompt=[], other=[], rounds=1, depth=1, repeat=1)
    return probe(plan, positions, ["host", "replay", "file"], {"driver": None}, listen)


def stop_at(begun: str, number: signal.Signals) -> Callable[[str, int], None]:
    def listen(what: str, done: int) -> None:
        if what == begun:
            signal.raise_signal(number)

    return listen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_before_a_stop_is_kept(number: signal.Signals, tmp_path: Path) -> None:
    with stoppable():
        found = measure(stop_at("replay: position 35, only", number), POSITIONS)
    assert found.stopped
    assert [(c.route, c.position, c.outcome) for c in found.cells] == [
        ("host", 34, "ok"),
        ("host", 35, "ok"),
        ("replay", 34, "ok"),
        ("replay", 35, "left out"),
    ]
    assert troubles(found) == ["replay; position 35: not run: the probe was stopped"]
    assert found.notes == ["the probe was stopped with nothing measured yet by file"]
    assert not list(tmp_path.glob("redraft-probe-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("begun", ["baseline: position 35, cells", "host: position 34, only"])
def test_a_stop_before_any_run_by_a_route_keeps_nothing(begun: str, number: signal.Signals, tmp_path: Path) -> None:
    with stoppable(), pytest.raises(KeyboardInterrupt):
        measure(stop_at(begun, number), POSITIONS)
    assert not list(tmp_path.glob("redraft-probe-*"))


def test_a_second_signal_does_not_disturb_and_handlers_are_put_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with stoppable() as ignore:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    with stoppable() as ignore:
        ignore()
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_long_run_is_told_of_by_tokens() -> None:
    told: list[str] = []
    measure(lambda what, done: told.append(what), [4000])
    first = [x for x in told if x.startswith("baseline: position 4000, straight")]
    assert first == ["baseline: position 4000, straight"] + [
        f"baseline: position 4000, straight, {n} of 4000 tokens" for n in range(400, 4001, 400)
    ]


@pytest.mark.parametrize(
    ("longest", "lines"),
    [(76, []), (4000, ["6 runs, the longest of 4000 tokens and a few more", "0/6 runs; x", "1/6 runs; y"])],
)
def test_a_pipe_gets_lines_where_runs_are_long(longest: int, lines: list[str]) -> None:
    out = io.StringIO()
    with progress(Console(file=out, width=120), 6, longest) as listen:
        listen("x", 0)
        listen("", 1)
        listen("y", 0)
    assert out.getvalue().splitlines() == lines
