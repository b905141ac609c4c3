"""One process of a target: started, listened to, and ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fuzz.engine.libfuzzer import Stat, final, status
from subjects.processes import end_with_parent

# How often a process is looked after, and how long it may take to end when it is told to, in seconds.
POLL = 0.25
GRACE = 5.0
# Of what it says so much is kept, the newest.
TAIL_BYTES = 1 << 16
# Of a report of undefined behaviour, behind which it goes on, so many lines; and so many reports.
REPORT_LINES = 24
REPORTS = 50
_UNDEFINED = ": runtime error: "
_GOES_ON = re.compile(r"^    #|: note: ")


@dataclass
class Ended:
    """How a process ended. code: exit status, negative for a signal. log: the newest of what it said, without its
    lines of progress. figures: libFuzzer's at the end. undefined: reports of UBSan. late: it was ended because its
    time was over; stopped: because everything was told to stop."""

    code: int
    log: str
    seconds: float
    last: Stat | None = None
    figures: dict[str, int] = field(default_factory=dict)
    undefined: list[str] = field(default_factory=list)
    late: bool = False
    stopped: bool = False

    @property
    def executions(self) -> int:
        """How many inputs ran."""
        return max(self.figures.get("number_of_executed_units", 0), self.last.executions if self.last else 0)


class Listener:
    """Takes apart what a target says, as it says it."""

    def __init__(self, listen: Callable[[Stat], None]):
        self.listen = listen
        self.last: Stat | None = None
        self.figures: dict[str, int] = {}
        self.undefined: list[list[str]] = []
        self._reporting = False
        self._tail: deque[str] = deque()
        self._bytes = 0
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Some bytes, the end of a line perhaps missing."""
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        # a line without end would take all memory
        self._rest = rest[-TAIL_BYTES:]
        for line in whole.decode("utf-8", "replace").split("\n") if newline else []:
            self._line(line.rstrip("\r"))

    def close(self) -> None:
        """The end of the stream ends a line too."""
        if self._rest:
            self.take(b"\n")

    @property
    def log(self) -> str:
        """The newest of it."""
        return "\n".join([*self._tail, ""])

    def _line(self, line: str) -> None:
        stat = status(line)
        if stat is not None:
            self.last = stat
            self.listen(stat)
            return
        if (figure := final(line)) is not None:
            self.figures[figure[0]] = figure[1]
            return
        if _UNDEFINED in line and len(self.undefined) < REPORTS:
            self.undefined.append([line])
            self._reporting = True
        elif self._reporting and _GOES_ON.search(line) and len(self.undefined[-1]) < REPORT_LINES:
            self.undefined[-1].append(line)
        else:
            self._reporting = False
        self._tail.append(line)
        self._bytes += len(line) + 1
        while self._bytes > TAIL_BYTES and len(self._tail) > 1:
            self._bytes -= len(self._tail.popleft()) + 1


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    seconds: float,
    listen: Callable[[Stat], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a target to its end, which comes after `seconds` at the latest, or soon after `stop` says so.

    Nothing of it is left when this returns, nor for long where this process is killed.
    """
    began = time.monotonic()
    heard = Listener(listen)
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(env),
        start_new_session=True,
        preexec_fn=_tied(os.getpid(), seconds),  # noqa: PLW1509 - a job has no threads
    )
    assert process.stdout is not None
    told: float | None = None
    late = stopped = False
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(POLL):
                    data = os.read(process.stdout.fileno(), 1 << 16)
                    if not data:
                        break
                    heard.take(data)
                elif process.poll() is not None:
                    break  # what it started may hold the pipe
                now = time.monotonic()
                if told is None and (stop() or now - began > seconds):
                    stopped = stop()
                    late = not stopped
                    told = now
                    _signal(process, signal.SIGINT)  # libFuzzer ends well
                elif told is not None and now - told > GRACE:
                    break
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if told is None:
                process.wait(POLL)  # it has closed its output, and ends
        _signal(process, signal.SIGKILL)  # the whole group: the symbolizer, a merge's own child
        process.wait()
        process.stdout.close()
    heard.close()
    return Ended(
        process.returncode,
        heard.log,
        time.monotonic() - began,
        heard.last,
        heard.figures,
        ["\n".join(lines) for lines in heard.undefined],
        late,
        stopped,
    )


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _tied(parent: int, seconds: float) -> Callable[[], None]:
    """What the new process does first: it dies with its parent, leaves no core, and what it starts in turn ends by
    itself after some time, should nobody be there any more."""

    most = round(4 * seconds) + 120

    def before() -> None:
        end_with_parent(parent=parent)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))

    return before
