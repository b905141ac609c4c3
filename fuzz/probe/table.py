"""Has the runs made in children, one for each route, and puts together what the tables show.

A child that ends before its time costs the run that it was at: another one goes on with the next. After the second
such end the rest of its route is left out.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from fuzz.probe.measure import (
    AFTER,
    BASELINE,
    HOW,
    Arm,
    Compared,
    How,
    Noise,
    Order,
    Plan,
    Run,
    Said,
    compare,
    largest,
    noise,
    run_file,
)
from oracles.crash import crash_text
from subjects.shimcache import child_env
from subjects.trace import End

ROOT = Path(__file__).resolve().parents[2]
VERSION = 1
COMMAND = [sys.executable, "-m", "fuzz.probe.child"]
_DEATHS = 2
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}

Outcome = Literal["ok", "failed", "crashed", "hung", "left out"]
Listen = Callable[[str, int], None]
"""What is being done, and how many runs have ended since the last call."""


class ProbeError(Exception):
    """Nothing can be measured; the message says why."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A route at a position, with the driver's state left out or restored. save_ms and restore_ms are medians."""

    route: str
    position: int
    state: Arm
    outcome: Outcome = "ok"
    why: str = ""
    how: How = ""
    compared: Compared | None = None
    target_bytes: int | None = None
    draft_bytes: int | None = None
    driver_bytes: int | None = None
    save_ms: float | None = None
    restore_ms: float | None = None


class Report(msgspec.Struct, kw_only=True):
    """Everything that was measured. `about` says of what, without paths of this machine. stopped: before its end."""

    version: int = VERSION
    about: dict[str, Any]
    facts: dict[str, int]
    cells: list[Cell]
    unfit: dict[str, str]
    positions: list[int]
    noise: dict[str, Noise]
    notes: list[str]
    log: list[str]
    stopped: bool = False

    @property
    def routes(self) -> list[str]:
        """Routes with cells, in order."""
        return list(dict.fromkeys(c.route for c in self.cells))

    @property
    def driven(self) -> bool:
        """Whether there is a driver."""
        return self.about["driver"] is not None

    def cell(self, route: str, position: int, state: str) -> Cell | None:
        """One cell, None where there is none."""
        return next((c for c in self.cells if (c.route, c.position, c.state) == (route, position, state)), None)


def arms(plan: Plan) -> tuple[Arm, ...]:
    """The runs of a route at a position."""
    return AFTER if plan.driver else ("only",)


def count(plan: Plan, positions: Sequence[int], routes: Sequence[str]) -> int:
    """Runs of a whole probe."""
    return len(positions) * (len(BASELINE) + len(routes) * len(arms(plan)))


def probe(
    plan: Plan,
    positions: Sequence[int],
    routes: Sequence[str],
    about: dict[str, Any],
    listen: Listen,
    patience: float = 600.0,
) -> Report:
    """Measure everything; a child that says nothing for `patience` seconds is killed.

    Raises:
        ProbeError: the runs that others are compared with fail.
        KeyboardInterrupt: it was stopped before any route had a run; later, the report has what there is.
    """
    with tempfile.TemporaryDirectory(prefix="redraft-probe-") as tmp:
        hub = _Hub(plan, Path(tmp), listen, patience)
        hub.run("", [(p, arm) for p in positions for arm in BASELINE])
        base = hub.results
        for p in positions:
            for arm in BASELINE:
                if ("", p, arm) not in base:
                    what = hub.ends.get(("", p, arm)) or hub.ends.get(("", -1, "")) or ("failed", "it was not run")
                    raise ProbeError(f"the run that the others are compared with {what[0]}: {what[1]}")
        straight = {p: base["", p, "straight"] for p in positions}
        # A route may end in other cells. A rollback cuts its batches in other places too.
        cells_too = largest([noise(straight[p], [base["", p, "cells"]]) for p in positions])
        split_too = largest([noise(straight[p], [base["", p, a] for a in ("cells", "split")]) for p in positions])
        hub.texts = {p: straight[p].text for p in positions}
        stopped = False
        try:
            for route in routes:
                hub.run(route, [(p, arm) for p in positions for arm in arms(plan)])
        except KeyboardInterrupt:
            if not any(route for route, _, _ in hub.results):
                raise
            stopped = True
            hub.rest = ("left out", "the probe was stopped")
        missed = [r for r in routes if stopped and r not in hub.heard_of]
        cells = [
            _cell(hub, route, p, arm, base["", p, "split"], split_too)
            if route == "rollback"
            else _cell(hub, route, p, arm, straight[p], cells_too)
            for route in routes
            if route not in hub.unfit and route not in missed
            for p in positions
            for arm in arms(plan)
        ]
        log = list(dict.fromkeys(line for r in hub.results.values() for line in r.log))
        said = list(dict.fromkeys(x for r in hub.results.values() for x in r.notes))
    width = max((len(r.hidden) for r in straight.values()), default=0)
    notes = _notes(plan, cells, width, [d for r in straight.values() for d in r.drafts])
    if missed:
        notes.append(f"the probe was stopped with nothing measured yet by {', '.join(missed)}")
    return Report(
        about=about,
        facts=hub.facts,
        cells=cells,
        unfit=hub.unfit,
        positions=list(positions),
        noise={"cells": cells_too, "split": split_too},
        notes=[*notes, *said],
        log=log,
        stopped=stopped,
    )


class _Hub:
    """Runs that were made, and how the others ended."""

    def __init__(self, plan: Plan, folder: Path, listen: Listen, patience: float):
        self.plan, self.folder, self.listen, self.patience = plan, folder, listen, patience
        self.texts: dict[int, list[int]] = {}
        self.results: dict[tuple[str, int, str], Run] = {}
        self.ends: dict[tuple[str, int, str], tuple[Outcome, str]] = {}
        self.unfit: dict[str, str] = {}
        self.told = 0
        self.facts: dict[str, int] = {}
        self.rest: tuple[Outcome, str] = ("failed", "it was not run")

    @property
    def heard_of(self) -> set[str]:
        """Routes that something is known of."""
        return {route for route, _, _ in [*self.results, *self.ends]} | set(self.unfit)

    def run(self, route: str, todo: list[tuple[int, Arm]]) -> None:
        """All runs of a route, in as many children as it takes."""
        deaths = 0
        while todo:
            self.listen(f"{route or 'baseline'}: loading", 0)
            said, end, stderr = self._child(Order(self.plan, route, todo, self.texts, str(self.folder)))
            if end.how == "ok":
                if route in self.unfit or (said and said[-1].what == "failed" and said[-1].position < 0):
                    self.listen("", len(todo))
                    for p, arm in todo:
                        self.ends[route, p, arm] = ("failed", said[-1].text)
                return
            deaths += 1
            begun = [(s.position, s.arm) for s in said if s.what == "begin"]
            outcome: Outcome = "hung" if end.how == "hang" else "crashed"
            text = end.text or crash_text(end, stderr)
            if "Traceback" in stderr:
                text = f"redraft's own child failed: {stderr.strip().splitlines()[-1]}"
            if begun:
                self.ends[(route, *begun[-1])] = (outcome, text)
            todo = [t for t in todo if t not in begun]
            self.listen("", 1)
            if deaths == _DEATHS or not begun:
                for p, arm in todo:
                    self.ends[route, p, arm] = (outcome, text) if not begun else ("left out", "two children had ended")
                self.listen("", len(todo))
                return

    def _keep(self, route: str, s: Said) -> None:
        """Take in what a child says, at once: the probe may be stopped before the child ends."""
        if s.what == "facts":
            self.facts = s.facts
        elif s.what == "unfit":
            self.unfit[route] = s.text
        elif s.what == "failed":
            self.ends[route, s.position, s.arm] = ("failed", s.text)
        elif s.what == "run":
            self.results[route, s.position, s.arm] = self._read(route, s)

    def _tell(self, route: str, s: Said) -> None:
        what = f"{route or 'baseline'}: position {s.position}, {s.arm}"
        if s.what == "begin":
            self.told = 0
            self.listen(what, 0)
        elif s.what == "at":
            # ten times a run are enough
            if self.told + s.position / 10 <= s.tokens <= s.position:
                self.told = s.tokens
                self.listen(f"{what}, {s.tokens} of {s.position} tokens", 0)
        elif s.position >= 0:
            self.listen("", 1)

    def _read(self, route: str, s: Said) -> Run:
        # written beside native code that may write anywhere
        try:
            data = (self.folder / run_file(route, s.position, s.arm)).read_bytes()
            return msgspec.msgpack.decode(data, type=Run)
        except (OSError, msgspec.DecodeError) as e:
            raise ProbeError(f"a child has left no run that can be read: {e}") from None

    def _child(self, order: Order) -> tuple[list[Said], End, str]:
        with (self.folder / "stderr").open("w+b") as err:
            process = subprocess.Popen(
                COMMAND,
                cwd=self.folder,
                env={**child_env(), **({} if order.plan.n_gpu_layers else _NO_GPU), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
            )
            said: list[Said] = []
            hung = False
            try:
                assert process.stdin is not None and process.stdout is not None
                try:
                    process.stdin.write(msgspec.json.encode(order))
                    process.stdin.close()
                except BrokenPipeError:
                    pass
                for line in _lines(process.stdout.fileno(), self.patience):
                    if line is None:
                        hung = True
                        break
                    s = msgspec.json.decode(line, type=Said)
                    if s.what != "at":
                        said.append(s)
                    self._keep(order.route, s)
                    self._tell(order.route, s)
            except msgspec.DecodeError as e:
                raise ProbeError(f"a child says what cannot be read: {e}") from None
            finally:
                if hung or sys.exc_info()[0] is not None:
                    process.kill()
                code = process.wait()
                if process.stdout:
                    process.stdout.close()
            err.seek(0)
            text = err.read()[-(1 << 16) :].decode("utf-8", "replace")
        if hung:
            return said, End("hang", text=f"nothing was heard of it for {self.patience:.0f} s"), text
        if code < 0:
            return said, End("signal", -code), text
        return said, End("exit", code) if code else End("ok"), text


def _lines(fd: int, patience: float) -> Any:
    """Lines from a descriptor as they come; None once nothing has come for so long."""
    rest = b""
    with selectors.DefaultSelector() as sel:
        sel.register(fd, selectors.EVENT_READ)
        last = time.monotonic()
        while True:
            if not sel.select(max(0.0, last + patience - time.monotonic())):
                yield None
                return
            data = os.read(fd, 1 << 16)
            if not data:
                return
            last = time.monotonic()
            *whole, rest = (rest + data).split(b"\n")
            yield from whole


def _cell(hub: _Hub, route: str, position: int, arm: Arm, straight: Run, honest: Noise) -> Cell:
    run = hub.results.get((route, position, arm))
    if run is None:
        outcome, why = hub.ends.get((route, position, arm), hub.rest)
        return Cell(route=route, position=position, state=arm, outcome=outcome, why=why)
    saved = bool(run.save_ms)
    return Cell(
        route=route,
        position=position,
        state=arm,
        why=run.trouble,
        how=run.how,
        compared=compare(run, straight, honest),
        target_bytes=run.sizes[0] if saved else None,
        draft_bytes=run.sizes[1] if saved else None,
        driver_bytes=max(run.sizes[2], 0) if saved else None,
        save_ms=_median(run.save_ms),
        restore_ms=_median(run.restore_ms),
    )


def _median(values: Sequence[float]) -> float | None:
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _notes(plan: Plan, cells: Sequence[Cell], width: int, drafts: list[list[int]]) -> list[str]:
    notes = []
    if plan.driver:
        for how in dict.fromkeys(c.how for c in cells if c.how):
            where = ", ".join(dict.fromkeys(c.route for c in cells if c.how == how))
            notes.append(f"driver state restored ({where}): {HOW[how]}")
        if width and any(c.how == "kept" for c in cells):
            notes.append(f"the driver offers no state; the pending row alone would be {width} bytes of each checkpoint")
        old = [c.compared for c in cells if c.route == "replay" and c.state == "left out" and c.compared]
        if any(x.changed and x.hidden and x.hidden.max_abs == 0 for x in old):
            notes.append(
                "replay with the driver's state left out: the row at the position is right, and draft logits have "
                "changed all the same, since the token at position 0 was paired with a row of the other work"
            )
        if not any(drafts):
            notes.append(
                "the driver drafts nothing here (ngram kinds need a prompt that repeats itself: --prompt-tokens)"
            )
    if any(c.route.startswith("device") and c.compared for c in cells):
        notes.append("device: what the host holds is counted, the state itself stays on the device")
    return notes
