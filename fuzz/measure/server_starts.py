"""What starting and killing llama-server leaves behind: for `ci/robustness --starts`.

Each start is ended in one of these ways, at a random moment, and then no process of it may live, no port of it may be
listened on, and nothing of it may be open here:

  server         SIGKILL of the server in the middle of a request; the process that started it goes on
  starting       SIGKILL of the server wherever its process is with it, loading a model mostly
  process        SIGKILL of the process that started it
  group          SIGKILL of both at once
  ctrl-c         SIGINT to both, as from a terminal
  campaign ...   the same to a whole `redraft fuzz --subject server`, with all the servers that it has

A process that is killed cannot take its folder of saved slots away: the next one that starts a server does. After the
last start none may be left.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from fuzz.measure.server_starts_child import program
from fuzz.models import Model, from_recipe
from fuzz.server.models import SERVED
from subjects.recipes import get
from subjects.server.build import ServerBuild
from subjects.server.client import Client, NoAnswer
from subjects.server.process import Server, argv

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "qwen35"
GONE_WITHIN = 5.0
"""seconds that what was killed may take to be gone"""
END_WITHIN = 10.0
"""seconds from Ctrl-C to the end of a process"""
AGAIN = 3
START_WITHIN = 60.0
"""seconds from when a process is ready to its first server"""
ROUND = (
    *("server",) * 8,
    *("starting",) * 3,
    *("process",) * 3,
    *("group",) * 2,
    *("ctrl-c",) * 3,
    "campaign",
)
"""the ways, in the order in which they come"""
CAMPAIGNS = ("ctrl-c", "process", "group")


@dataclass
class _Seen:
    """What was seen of one start."""

    way: str
    ports: set[int] = field(default_factory=set)
    servers: set[int] = field(default_factory=set)
    """process ids"""
    gone_after: float = 0.0
    again: int = 0
    """times that Ctrl-C had to be pressed again"""
    problems: list[str] = field(default_factory=list)


class _Field:
    """Where servers are started and killed: everything of ours there is known by its folder for temporary files."""

    def __init__(self, server: ServerBuild, model: Model, scratch: Path, seed: int):
        self.server, self.model, self.scratch = server, model, scratch
        self.tmp = Path(tempfile.gettempdir())
        self.cwd = scratch / "cwd"
        self.cwd.mkdir()
        self.mark = f"TMPDIR={self.tmp}".encode()
        self.random = random.Random(seed)

    def processes(self) -> list[psutil.Process]:
        """All that run with our folder for temporary files, but for this one."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                # of one that has ended, and that nobody has asked how, it is empty
                if self.mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(psutil.Process(int(entry.name)))
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def look(self, seen: _Seen) -> list[int]:
        """The servers that there are now, by process id; they and their ports are noted."""
        servers = [p for p in self.processes() if _is_server(p, self.server.path)]
        for p in servers:
            try:
                seen.ports |= {c.laddr.port for c in p.net_connections() if c.status == psutil.CONN_LISTEN}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        pids = [p.pid for p in servers]
        seen.servers.update(pids)
        return pids

    def wait(self, p: subprocess.Popen[str], seconds: float, seen: _Seen) -> None:
        """Let it run for so long from its first server on."""
        until = time.monotonic() + START_WITHIN
        while not self.look(seen) and p.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        if not seen.servers:
            seen.problems.append(f"{seen.way}: no server after {START_WITHIN:.0f} s, or the process ended")
        time.sleep(seconds)

    def gone(self, seen: _Seen) -> None:
        """Wait until nothing of it is left; what is, is a problem, and is ended."""
        began, ports = time.monotonic(), set[int]()
        # of a process that is being ended the sockets go last
        while (left := self.processes()) or (ports := seen.ports & listening()):
            if time.monotonic() - began > GONE_WITHIN:
                break
            time.sleep(0.01)
        seen.gone_after = time.monotonic() - began
        for p in left:
            seen.problems.append(f"process {p.pid} lives on {GONE_WITHIN:.0f} s after the kill")
            p.kill()
        seen.problems += [f"port {port} is listened on {GONE_WITHIN:.0f} s after the kill" for port in sorted(ports)]

    # --- the ways -----------------------------------------------------------------------------------------------------

    def own(self, seen: _Seen) -> None:
        """A server of this process, killed while it answers."""
        asked, ref = program(self.model.ref), Path(self.model.path)
        server = Server(lambda saves: argv(self.server.path, ref, asked.flags, None, None, saves), ref, saves=True)
        try:
            self.look(seen)
            client = Client(server.port)
            timer = threading.Timer(self.random.uniform(0, 0.05), os.kill, (server.process.pid, signal.SIGKILL))
            timer.start()
            body = {"prompt": list(range(1, 41)), "n_predict": 32, "temperature": 0.0, "cache_prompt": False}
            try:
                while True:
                    client.post("/completion", body)
            except NoAnswer:
                pass
            finally:
                timer.join()
                client.close()
            if server.ended(GONE_WITHIN) is None:
                seen.problems.append("a killed server was taken for alive")
        finally:
            server.close()

    def start(self, command: Sequence[str], ready: Callable[[str], bool]) -> subprocess.Popen[str]:
        """A process of ours in a group of its own, once it has said that it is ready."""
        p = subprocess.Popen(
            command,
            cwd=self.cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert p.stdout is not None
        said = ""
        for line in p.stdout:
            said += line
            if ready(line):
                # what comes later must not fill the pipe
                threading.Thread(target=p.stdout.read, daemon=True).start()
                return p
        raise RuntimeError(f"{Path(command[0]).name} ended with {p.wait()}: {said[-300:]}")

    def child(self) -> subprocess.Popen[str]:
        """One that runs programs, a server after the other."""
        module = [sys.executable, "-m", "fuzz.measure.server_starts_child"]
        return self.start(
            [*module, str(self.server.path), self.model.path, RECIPE], lambda line: line.startswith("ready")
        )

    def campaign(self, out: Path) -> subprocess.Popen[str]:
        """A whole campaign."""
        redraft = [str(Path(sys.executable).with_name("redraft")), "fuzz", "--subject", "server"]
        more = ["--server-bin", str(self.server.path), "--jobs", "2", "--minutes", "5", "--out", str(out)]
        return self.start([*redraft, *more], lambda line: line.startswith("Testing"))

    def strike(self, p: subprocess.Popen[str], way: str, seen: _Seen) -> None:
        """Disturb a process that has servers, and see it end."""
        servers = self.look(seen)
        match way:
            case "starting":
                for pid in servers:
                    _kill(pid, signal.SIGKILL)
                time.sleep(0.05)
                if p.poll() is not None:
                    seen.problems.append(f"the process ended with its server: {p.returncode}")
                _kill(-p.pid, signal.SIGINT)
            case "process":
                _kill(p.pid, signal.SIGKILL)
            case "group":
                _kill(-p.pid, signal.SIGKILL)
            case _:
                _kill(-p.pid, signal.SIGINT)
        while not _ends(p):
            # Python loses one that comes while it tidies up an object of its own
            if seen.again == AGAIN:
                seen.problems.append(f"{way}: the process does not end")
                _kill(-p.pid, signal.SIGKILL)
                p.wait()
            else:
                seen.again += 1
                _kill(-p.pid, signal.SIGINT)

    def once(self, number: int) -> _Seen:
        """Start number `number`, ended in the way whose turn it is."""
        way = ROUND[number % len(ROUND)]
        if way == "server":
            seen = _Seen(way)
            self.own(seen)
        elif way == "campaign":
            how = CAMPAIGNS[number // len(ROUND) % len(CAMPAIGNS)]
            seen = _Seen(f"campaign {how}")
            p = self.campaign(self.scratch / f"campaign-{number}")
            self.wait(p, self.random.uniform(0.0, 4.0), seen)
            self.strike(p, how, seen)
        else:
            seen = _Seen(way)
            p = self.child()
            # a program takes about 0.1 s, of which the server's start is a third
            self.wait(p, self.random.uniform(0.0, 0.2), seen)
            self.strike(p, way, seen)
        self.gone(seen)
        return seen


def starts(count: int, seed: int, scratch: Path, server: ServerBuild, console: Console) -> dict[str, Any]:
    """Start and kill `count` times. tempfile's folder must be in `scratch`, empty, and in the environment as TMPDIR."""
    model = from_recipe(get(RECIPE), scratch / "models", form=SERVED)
    place = _Field(server, model, scratch, seed)
    fds = _fds()
    began = told = time.monotonic()
    all_: list[_Seen] = []
    problems: list[str] = []
    most = 0
    for number in range(count):
        seen = place.once(number)
        all_.append(seen)
        problems += [f"start {number + 1} ({seen.way}): {p}" for p in seen.problems]
        most = max(most, len(list(place.tmp.iterdir())))
        if time.monotonic() - told > 10:
            told = time.monotonic()
            console.print(f"{number + 1} of {count} starts, {len(problems)} problems", style="dim")
    # takes away what killed ones had to leave
    last = _Seen("server")
    place.own(last)
    place.gone(last)
    problems += [f"the last start: {p}" for p in last.problems]
    leaked = {
        "processes": len(place.processes()),
        "descriptors": max(0, _fds() - fds),
        "files": sorted(str(p.relative_to(scratch)) for d in (place.tmp, place.cwd) for p in d.rglob("*")),
    }
    problems += [f"leaked {name}: {what}" for name, what in leaked.items() if what]
    return {
        "starts": count,
        "ways": dict(Counter(s.way for s in all_)),
        "servers_seen": sum(len(s.servers) for s in all_),
        "ports_seen": len(set[int]().union(*(s.ports for s in all_))),
        "latest_end": round(max((s.gone_after for s in all_), default=0.0), 2),
        "folders_waiting": most,
        "pressed_again": sum(s.again for s in all_),
        "seconds": round(time.monotonic() - began, 1),
        "leaked": leaked,
        "problems": problems,
    }


def listening() -> set[int]:
    """Ports of this machine that somebody listens on, over IPv4 and IPv6."""
    found: set[int] = set()
    for name in ("tcp", "tcp6"):
        try:
            text = Path("/proc/net", name).read_text()
        except OSError:
            continue
        found |= {int(x, 16) for x in re.findall(r"^ *\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:0000 0A ", text, re.M)}
    return found


def show_starts(s: dict[str, Any], console: Console) -> None:
    """A table."""
    table = Table(title=f"{s['starts']} server starts and kills", title_justify="left", show_header=False)
    for way, n in s["ways"].items():
        table.add_row(way, str(n))
    table.add_row("servers seen, ports seen", f"{s['servers_seen']}, {s['ports_seen']}")
    table.add_row("last process gone after", f"{s['latest_end']} s")
    table.add_row("folders that waited for the next start", str(s["folders_waiting"]))
    table.add_row("Ctrl-C pressed again", str(s["pressed_again"]))
    table.add_row("left: processes, files", f"{s['leaked']['processes']}, {len(s['leaked']['files'])}")
    table.add_row("problems", str(len(s["problems"])))
    console.print(table)


def _is_server(process: psutil.Process, program: Path) -> bool:
    try:
        return Path(process.exe()).name == program.resolve().name
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _ends(process: subprocess.Popen[str]) -> bool:
    try:
        process.wait(END_WITHIN)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(pid: int, number: int) -> None:
    """A process, or a group where it is negative."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))
