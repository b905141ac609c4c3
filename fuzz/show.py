"""What people see of a campaign: live progress on a terminal, a line now and then elsewhere, and the table at the "
"end."""

from __future__ import annotations

import shlex
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fuzz.campaign import Result, Status
from fuzz.found import size_of
from fuzz.repro.phrases import count
from subjects.driver_contracts import DRIVER_CONTRACTS
from subjects.scenario import OP_NAMES
from subjects.server.scenario import REQUEST_NAMES

PLAIN_EVERY = 10.0
_PAST = 2.0
"""Seconds past the end that are told of."""
MEMORIES = ("dense", "window", "recurrent", "hybrid")
_COLUMNS = 4
"""Headings of drivers that fit beside each other."""
DRIVER_OPS = frozenset(c.op for c in DRIVER_CONTRACTS)
# what llama-server did, in words; in the order in which they are told of
DEEDS = {
    "kept": "prompts that went on",
    "checkpoint": "checkpoints made",
    "restored": "restored",
    "erased": "erased",
    "reset": "prompts begun anew",
    "cached": "prompts cached",
    "loaded": "loaded",
    "cleared": "slots cleared",
    "round": "rounds of drafting",
    "replay": "replayed",
    "refused": "refusals",
}


class Progress:
    """Listener of a campaign. On a terminal a live display, otherwise plain lines on the same stream."""

    def __init__(self, console: Console, *, quiet: bool = False):
        self.console = console
        self.quiet = quiet
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal and not quiet else None
        )
        self._last = time.monotonic()
        self._noted: set[str] = set()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, status: Status, event: dict[str, Any] | None) -> None:
        """Take an event (None: time has passed)."""
        if self.quiet:
            return
        if event and event["event"] == "finding":
            self.console.print(
                Text.assemble(("found  ", "bold red" if event["known"] is None else "yellow"), finding_line(event))
            )
        if event and event["event"] == "trouble":
            self.console.print(Text(event["text"], style="red"))
        if event and event["event"] == "note" and event["text"] not in self._noted:
            self._noted.add(event["text"])  # each job tells
            self.console.print(Text(event["text"], style="dim"))
        if event and event["event"] == "doing" and not self._live:
            self.console.print(Text(f"job {event['job']}: {event['text']}", style="dim"))
        if self._live:
            self._live.update(live(status))
        elif time.monotonic() - self._last > PLAIN_EVERY:
            self._last = time.monotonic()
            self.console.print(headline(status))


def finding_line(f: dict[str, Any]) -> str:
    """A finding in one line."""
    n, m = f["reproduced"]
    state = f"known: {f['known']}" if f["known"] else "new"
    size = count(*size_of(f))
    return f"{f['signature']}  ({state}; {size}; {n} of {m})"


def headline(s: Status) -> str:
    """Progress in one line."""
    left = s.left
    time_left = "" if left is None else f", {int(left) // 60}:{int(left) % 60:02d} left"
    new = sum(f["known"] is None for f in s.findings)
    if targets := s.targets():
        # targets reach the same code, so their edges do not add up
        edges = max(t.edges for t in targets.values())
        corpus, crashes = (sum(getattr(t, x) for t in targets.values()) for x in ("corpus", "crashes"))
        return (
            f"{s.total('executions'):,} executions, {s.total('rate')}/s, {edges} edges, corpus {corpus}, "
            f"{crashes} went wrong, findings: {new} new, {len(s.findings) - new} known{time_left}"
        )
    cells = len(s.coverage())
    if s.subject == "server":
        return (
            f"{s.total('scenarios')} programs, {s.total('requests')} requests, {s.requests_per_second:.0f}/s, "
            f"{s.total('unjudged')} unknown, {cells} request x memory cells, findings: {new} new, "
            f"{len(s.findings) - new} known{time_left}"
        )
    return (
        f"{s.total('scenarios')} scenarios, {s.per_second:.0f}/s, {s.total('unjudged')} unknown, {cells} operation x "
        f"memory cells, "
        f"findings: {new} new, {len(s.findings) - new} known{time_left}"
    )


def live(s: Status) -> RenderableType:
    """The live display."""
    lines: list[RenderableType] = [Text(headline(s), style="bold")]
    lines += [Text(f"  job {j}: {what[:99]}", style="dim") for j, what in sorted(s.doing.items())]
    lines.append(_table(s))
    if deeds := deeds_line(s.deeds()):
        lines.append(Text(deeds, style="dim"))
    return Group(*lines)


def _table(s: Status) -> Table:
    """What was run, as a table."""
    if s.targets():
        return target_table(s)
    return coverage_table(s.coverage(), REQUEST_NAMES) if s.subject == "server" else coverage_table(s.coverage())


def deeds_line(deeds: dict[str, int]) -> str:
    """What llama-server did, in a line; empty where it did nothing."""
    parts = [f"{deeds[name]:,} {words}" for name, words in DEEDS.items() if name in deeds]
    return f"The server: {', '.join(parts)}." if parts else ""


def target_table(s: Status) -> Table:
    """What each target of the coverage-guided engine did. Executions a second are those of one process. What went wrong
    are inputs that ended the target or broke one of its checks."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("target", no_wrap=True)
    for name in ("executions", "exec/s", "edges", "features", "corpus", "went wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, t in s.targets().items():
        rate = f"{t.executions / t.seconds:.0f}" if t.seconds else "-"
        edges = "-" if t.first is None else f"{t.first} → {t.edges}"
        table.add_row(name, f"{t.executions:,}", rate, edges, str(t.features), str(t.corpus), str(t.crashes))
    return table


def coverage_table(coverage: dict[str, int], ops: tuple[str, ...] = OP_NAMES) -> Table:
    """How often each operation, or request, ran on each memory kind, or with each driver: a column, a row where they
    are many."""
    seen = list(dict.fromkeys(key.partition("/")[2] for key in coverage))
    drivers = sorted(m for m in seen if m not in MEMORIES)
    plain = not drivers or any(m in MEMORIES for m in seen)
    memories = (*(MEMORIES if plain else ()), *drivers)
    names = [
        name for name in ops if any(f"{name}/{m}" in coverage for m in memories) or (plain and name not in DRIVER_OPS)
    ]
    many = not plain and len(drivers) > _COLUMNS
    rows, columns = (memories, names) if many else (names, memories)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("driver" if many else "operation" if ops == OP_NAMES else "request", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        keys = [f"{column}/{row}" if many else f"{row}/{column}" for column in columns]
        table.add_row(row, *(str(coverage.get(key, "-")) for key in keys))
    return table


def final(result: Result, console: Console) -> None:
    """The table at the end."""
    s = result.status
    targets = s.targets()
    console.print(_table(s))
    if deeds := deeds_line(s.deeds()):
        console.print(deeds, highlight=False)
    console.print()
    if s.findings:
        table = Table(title="Findings", title_justify="left", show_lines=False)
        for name in ("", "signature", "kind", "requests" if s.subject == "server" else "ops", "seen"):
            table.add_column(name, overflow="fold", no_wrap=name != "signature")
        for f in sorted(s.findings, key=lambda f: (f["known"] is not None, f["signature"])):
            state = Text(f"known: {f['known']}", style="yellow") if f["known"] else Text("NEW", style="bold red")
            seen = "{}/{}".format(*f["reproduced"])
            # an assertion's text may look like markup
            size, _ = size_of(f)
            table.add_row(state, Text(f["signature"]), f["kind"], str(size), seen)
        console.print(table)
        console.print(
            f"Folders are in {s.out / 'findings'}; each README.md there can be pasted into a bug report.", markup=False
        )
    elif not result.gave_up:
        console.print("Nothing was found.")
    if targets:
        _engine(result, console)
    else:
        _scenarios(s, console)
    if s.total("unwritten"):
        unwritten = count(s.total("unwritten"), "finding")
        console.print(f"[bold red]{unwritten} could not be written; see the lines above[/]")
    if result.gave_up:
        console.print(f"[bold red]no target runs any more in {_jobs(result.gave_up)}; what they said is above[/]")
    if result.unsaved:
        console.print(
            f"[bold red]{_jobs(result.unsaved)} could not write everything; see the lines above. --resume may begin "
            "earlier[/]"
        )
    if result.died:
        console.print(f"[bold red]{_jobs(result.died)} ended before the time; --resume goes on[/]")
    if result.interrupted:
        console.print("Interrupted; everything found so far is kept. --resume with the same --out goes on.")


def _engine(result: Result, console: Console) -> None:
    """What is to be said of a coverage-guided run beside its tables."""
    s, document = result.status, result.document()
    crashes, undefined = document["crashes"], document["undefined"]
    n, inputs, lost = sum(crashes.values()), s.total("inputs"), s.total("lost")
    console.print(
        f"{count(s.total('executions'), 'execution', ',')} in {s.seconds:.0f} s, {document['tried']:,} of them not "
        f"skipped; {count(n, 'input')} ended a target or broke one of its checks (went wrong), in "
        f"{count(len(crashes), 'way')}."
    )
    if inputs:
        tried = "was tried as a program" if inputs == 1 else "were tried as programs"
        console.print(f"{inputs} of these, the first few of each way, {tried}.")
    if lost:
        showed = "showed nowhere else and is no finding" if lost == 1 else "showed nowhere else and are no findings"
        kept = s.out / "crashes"
        again = shlex.join(["redraft", "replay", str(kept), "--build", s.instrumented])
        console.print(
            f"{lost} of the inputs tried {showed}. Inputs, programs and logs are in {kept}, one of each way. This runs "
            "them where they were met, and without --build on the installed library:",
            markup=False,
        )
        console.print(f"  {again}", markup=False, highlight=False, soft_wrap=True)
    for text, times in undefined.items():
        console.print(f"undefined behaviour, {count(times, 'time')}: {text}", markup=False, highlight=False)
    if (picture := s.out / "coverage.png").exists():
        console.print(f"Coverage over time is in {picture}", markup=False)


def _jobs(numbers: list[int]) -> str:
    return f"job{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _scenarios(s: Status, console: Console) -> None:
    """What is to be said of a run of made up programs beside its tables."""
    n, lost = s.total("scenarios"), s.total("unreproduced")
    rate = 100 * s.total("unjudged") / n if n else 0.0
    ran = f"{count(n, 'scenario')} in {s.seconds:.0f} s ({s.per_second:.0f}/s)"
    if s.subject == "server":
        requests = count(s.total("requests"), "checked request", ",")
        ran = f"{count(n, 'program')}, {requests} in {s.seconds:.0f} s ({s.requests_per_second:.0f}/s)"
    fresh = f"fresh {'server' if s.subject == 'server' else 'context'}"
    console.print(
        f"{ran}; {s.total('unjudged')} without a judged comparison ({rate:.1f} %); {count(lost, 'violation')} did not "
        f"reproduce in a {fresh} and {'is' if lost == 1 else 'are'} not reported."
    )
    if s.past >= _PAST:
        console.print(f"{s.past:.0f} s of it were past the end: what was met before was still reduced.")
    if s.subject == "server" and not s.total("requests"):
        console.print("[bold red]no request was checked: this says nothing of the server[/]")
