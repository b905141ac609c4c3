"""The parent side of the sandbox: hands scenarios to a child and gets traces back, whatever the child does.

One Sandbox is one zygote with one live worker. A worker that aborts, throws, hangs or runs out of memory costs the
scenario that it ran and nothing else; the zygote forks the next one in milliseconds. Everything that the child said up
to its end is in the trace.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from subjects import child
from subjects.child import Control, Job, Replay, Setup
from subjects.processes import peak_kb
from subjects.scenario import ContextParams, ModelRef, Scenario
from subjects.trace import Batch, End, Facts, Row, Step, Trace

ROOT = Path(__file__).resolve().parent.parent

# Before anything was measured a run may take this long; afterwards the limit follows what runs really take.
FIRST_LIMIT = 20.0
# A hang is a run that takes this many times the slowest honest run so far (and never less than two seconds).
HANG_FACTOR = 50.0
HANG_FLOOR = 2.0
WARM_RUNS = 20
# A run that took longer than its limit is tried once more with this many times the limit before it is called a hang.
CONFIRM = 10.0

# The answers lie in memory that native code can write to: whatever is wrong with them may show as one of these.
GARBLED = "garbled answers: "
_GARBLED = (msgspec.DecodeError, struct.error, IndexError, ValueError)

_CONTROL = msgspec.msgpack.Decoder(Control, strict=True)
_STEP = msgspec.msgpack.Decoder(Step, strict=True)
_FACTS = msgspec.msgpack.Decoder(tuple[Facts, ContextParams], strict=True)
_ROWS = msgspec.msgpack.Decoder(list[Row], strict=True)
_BEGIN = msgspec.msgpack.Decoder(tuple[int, list[int]], strict=True)
_ENCODE = msgspec.msgpack.Encoder().encode

# Contexts come and go thousands of times a second: without these glibc hands their memory back and takes it again,
# page fault by page fault (a tenth of a child's time).
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": "67108864", "MALLOC_MMAP_THRESHOLD_": "67108864", "MALLOC_TOP_PAD_": "16777216"}
# A process in which a GPU's driver was started must not fork, so models for the CPU are run without any GPU in sight.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


class SandboxError(RuntimeError):
    """The subject cannot be started at all; the message says why."""


@dataclass
class Limits:
    """What a child may use. `memory_mb` is address space, 0 for none; `hang` fixes the time limit instead of
    measuring it.
    """

    memory_mb: int = 4096
    hang: float | None = None


@dataclass
class Stats:
    """Counters of one sandbox."""

    runs: int = 0
    deaths: int = 0
    hangs: int = 0
    max_rss_kb: int = 0
    restart: list[float] = field(default_factory=list)


@dataclass
class Pace:
    """How long honest runs take, for one model and kind of request."""

    runs: int = 0
    slowest: float = 0.0

    @property
    def limit(self) -> float:
        """Seconds after which a run is tried again, more patiently."""
        return FIRST_LIMIT if self.runs < WARM_RUNS else max(HANG_FLOOR, HANG_FACTOR * self.slowest)


class Sandbox:
    """A place where scenarios run.

    shim: compiled shim (subjects.builds). models: (path, n_gpu_layers) to load: before the first fork or, with one that
    uses a GPU, in each worker. driver: the compiled driver library for programs with a driver. drafts: where the models
    of drafts are.

    Raises SandboxError when the library or a model cannot be loaded.
    """

    def __init__(
        self,
        shim: Path,
        models: Sequence[tuple[Path, int]] = (),
        *,
        driver: Path | None = None,
        drafts: Mapping[ModelRef, Path] | None = None,
        limits: Limits | None = None,
        env: dict[str, str] | None = None,
    ):
        self.shim, self.models = shim, list(models)
        self.driver, self.drafts = driver, dict(drafts or {})
        self.limits = limits or Limits()
        self.stats = Stats()
        self._paces: dict[tuple[str, type], Pace] = {}
        self._env = {
            **_MALLOC,
            **os.environ,
            **({} if any(n for _, n in self.models) else _NO_GPU),
            "GGML_NO_BACKTRACE": "1",
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": str(ROOT),
            **(env or {}),
        }
        self._start()

    # --- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        req_r, self._requests = os.pipe()
        self._replies, rep_w = os.pipe()
        self._control, ctl_w = os.pipe()
        self._answers = os.memfd_create("redraft-answers")
        os.ftruncate(self._answers, child.ANSWERS_BYTES)
        self._map = mmap.mmap(self._answers, child.ANSWERS_BYTES, prot=mmap.PROT_READ)
        self._stderr = os.memfd_create("redraft-stderr", 0)
        passed = (req_r, rep_w, ctl_w, self._answers)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "subjects.child", *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            env=self._env,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C in the terminal must not reach children: the campaign ends them
        )
        for fd in (req_r, rep_w, ctl_w):
            os.close(fd)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._worker = 0
        self._dead = 0
        self._number = 0
        models = [(str(p), n) for p, n in self.models]
        driver = str(self.driver) if self.driver else ""
        self._send(_ENCODE(Setup(str(self.shim), models, self.limits.memory_mb, driver)))
        self._await_worker()

    def close(self) -> None:
        """End the children and free everything; safe to call twice."""
        if self._process.returncode is not None and self._requests < 0:
            return
        for fd in (self._requests, self._replies, self._control, self._answers, self._stderr):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._requests = -1
        self._map.close()
        self._selector.close()
        self._kill()
        self._process.kill()
        self._process.wait()

    def _kill(self) -> None:
        if self._worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._worker, signal.SIGKILL)

    def _send(self, payload: bytes) -> None:
        data = struct.pack("<I", len(payload)) + payload
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._requests, view) :]
        except OSError:
            raise SandboxError("the sandbox's zygote died: " + self._stderr_text()[-2000:]) from None

    def _read_control(self) -> Control | None:
        head = os.read(self._control, 4)
        if len(head) < 4:
            return None
        size = struct.unpack("<I", head)[0]
        body = b""
        while len(body) < size:
            part = os.read(self._control, size - len(body))
            if not part:
                return None
            body += part
        return _CONTROL.decode(body)

    def _await_worker(self) -> None:
        control = self._read_control()
        if control is None or control.what != "began":
            text = (control and control.text) or self._stderr_text()[-2000:]
            self.close()
            raise SandboxError(text or "the child ended before it began; `redraft doctor` says more")
        self._worker = control.pid

    def peak_kb(self) -> int:
        """Largest resident size of any worker so far, the live one included (0 where the system does not tell)."""
        self.stats.max_rss_kb = max(self.stats.max_rss_kb, peak_kb(self._worker))
        return self.stats.max_rss_kb

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, scenario: Scenario, model: Path, *, fresh: bool = True, fault: str = "") -> Trace:
        """Run one scenario and return its trace; never raises for anything that the library does."""
        return self.run_many([scenario], model, fresh=fresh, fault=fault)[0]

    def run_many(
        self, scenarios: Sequence[Scenario], model: Path, *, fresh: bool = True, fault: str = ""
    ) -> list[Trace]:
        """Run several scenarios in one round trip. Where one ends the worker, the rest runs in the next worker."""
        return self._run([Job(s, str(model), fresh, fault, self._draft_of(s)) for s in scenarios])

    def _draft_of(self, scenario: Scenario) -> str:
        """Path of the draft's model; a model that is not there is refused by the child, as its own file would be."""
        ref = scenario.driver.draft if scenario.driver else None
        return "" if ref is None else str(self.drafts.get(ref, ref.label()))

    def replay_many(self, histories: Sequence[Replay]) -> list[Trace]:
        """Decode histories, each in a context of its own; the traces hold rows and the end, no steps and no facts."""
        return self._run(histories)

    def _run(self, requests: Sequence[Job | Replay]) -> list[Trace]:
        traces: list[Trace] = []
        together = len(requests)
        while len(traces) < len(requests):
            rest = requests[len(traces) :][:together]
            got = self._attempt(rest)
            if got[-1].end.how == "hang" and self.limits.hang is None:
                got[-1:] = self._attempt(rest[len(got) - 1 : len(got)], CONFIRM)
            end = got[-1].end
            if end.how == "error" and end.text.startswith(GARBLED) and len(rest) > 1:
                together = 1  # nobody can say whose fault it was: one by one
                continue
            traces.extend(got)
            self.stats.hangs += end.how == "hang"
            self.stats.runs += len(got)
        return traces

    def _attempt(self, requests: Sequence[Job | Replay], patience: float = 1.0) -> list[Trace]:
        """Traces of the first requests, of all of them unless one ends the worker."""
        self._take_stderr()  # what an honest run said is no part of a later crash
        end = self._ask(requests, patience)
        try:
            got = self._collect(end, len(requests))
            if end is None and len(got) < len(requests):
                raise ValueError(f"{len(got)} traces for {len(requests)} requests")
        except _GARBLED as e:
            how = f" (the worker's end: {end.how} {end.code})" if end else ""
            if end is None:
                self._kill()  # nothing that it does from now on can be trusted
                self._ended(hung=False)
            return [Trace([], [], End("error", 0, f"{GARBLED}{type(e).__name__}: {e}{how}"))]
        for i, seconds in self._seconds.items():
            pace = self._pace(requests[i])
            pace.runs += 1
            pace.slowest = max(pace.slowest, seconds)
        return got

    def _pace(self, request: Job | Replay) -> Pace:
        return self._paces.setdefault((request.model, type(request)), Pace())

    def _limit(self, requests: Sequence[Job | Replay]) -> float:
        if self.limits.hang is not None:
            return self.limits.hang * len(requests)
        return sum(self._pace(r).limit for r in requests)

    def _ask(self, requests: Sequence[Job | Replay], patience: float = 1.0) -> End | None:
        """Send requests and wait for the reply; None when it came, otherwise how the worker ended (a new one is there).

        Every attempt has a number, which the answers and the reply repeat: a worker that dies between two requests
        (killed for memory, say) has not taken the next one, which is sent again, and nothing of another attempt is
        ever taken for an answer.
        """
        self._number += 1
        self._send(_ENCODE((self._number, requests)))
        attempts = 1
        limit = self._limit(requests) * patience
        while True:
            ready = self._selector.select(limit)
            hung = not ready
            if hung:
                self._kill()
            elif any(key.fd == self._replies for key, _ in ready):
                reply = os.read(self._replies, child.NUMBER.size)
                if reply == child.NUMBER.pack(self._number):
                    return None
                if reply:
                    continue
            end = self._ended(hung)
            number, pid = child.TAKER.unpack_from(self._map, child.HEADER.size)
            taken = number == self._number
            if (taken and pid == self._dead) or end.how == "hang" or attempts == 3:
                return end
            if taken:
                continue  # by the next worker already
            attempts += 1
            self._number += 1
            self._send(_ENCODE((self._number, requests)))

    def _ended(self, hung: bool) -> End:
        """How the worker ended; the next one is there."""
        control = self._read_control()
        if control is None:
            raise SandboxError("the sandbox's zygote died: " + self._stderr_text()[-2000:])
        began = time.monotonic()
        self._dead = control.pid
        self.stats.deaths += 1
        self.stats.max_rss_kb = max(self.stats.max_rss_kb, control.max_rss_kb)
        self._await_worker()
        self.stats.restart.append(time.monotonic() - began)
        del self.stats.restart[:-1000]
        if hung:
            return End("hang")
        if os.WIFSIGNALED(control.status):
            return End("signal", os.WTERMSIG(control.status))
        return End("exit", os.WEXITSTATUS(control.status))

    def _stderr_text(self) -> str:
        size = os.fstat(self._stderr).st_size
        return os.pread(self._stderr, 1 << 16, max(0, size - (1 << 16))).decode("utf-8", "replace")

    def _take_stderr(self) -> str:
        text = self._stderr_text()
        if text:
            os.ftruncate(self._stderr, 0)
            os.lseek(self._stderr, 0, os.SEEK_SET)
        return text

    def _collect(self, end: End | None, most: int = 1 << 30) -> list[Trace]:
        """Traces of what is in the answers file: all of them complete, but the last one if the worker ended.

        Raises what _GARBLED names where it is not what a worker writes.
        """
        good = child.HEADER.unpack_from(self._map, 0)[0]
        if good > child.ANSWERS_BYTES:
            raise ValueError("more answers than there is room for")
        mine = child.NUMBER.unpack_from(self._map, child.HEADER.size)[0] == self._number
        data = self._map[child.START : good] if mine else b""
        traces: list[Trace] = []
        logits: list[bytes] = []
        hidden: list[bytes] = []
        states: list[bytes] = []
        at = 0
        self._seconds: dict[int, float] = {}  # how long the honest ones took

        def finish(how: End) -> None:
            traces[-1].end = how
            traces[-1].logits, traces[-1].hidden = b"".join(logits), b"".join(hidden)
            traces[-1].states = b"".join(states)
            if traces[-1].facts and len(traces[-1].logits) % (4 * traces[-1].facts[0].n_vocab):
                raise ValueError("the half of a row")
            logits.clear()
            hidden.clear()
            states.clear()

        while at < len(data):
            length, kind = child.FRAME.unpack_from(data, at)
            at += child.FRAME.size
            body = data[at : at + length]
            at += length
            if at > len(data):
                raise ValueError("a frame that does not end")
            if kind == child.LOGITS:
                logits.append(body)
            elif kind == child.HIDDEN:
                hidden.append(body)
            elif kind == child.STATE:
                states.append(body)
            elif kind == child.BATCH:
                traces[-1].steps[-1].batches.append(Batch(_ROWS.decode(body)))
            elif kind == child.CODE:
                batch = traces[-1].steps[-1].batches[-1]
                batch.rc, batch.first = child.RESULT.unpack(body)
            elif kind == child.BEGIN:
                op, args = _BEGIN.decode(body)
                traces[-1].steps.append(Step(op=op, args=args))
            elif kind == child.STEP:
                step = _STEP.decode(body)
                steps = traces[-1].steps
                if steps and steps[-1].op == step.op:
                    step.batches = steps[-1].batches
                    steps[-1] = step
                else:
                    steps.append(step)
            elif kind == child.RUN:
                if len(traces) == most:
                    raise ValueError(f"more than {most} traces")
                traces.append(Trace([], [], End("ok")))
            elif kind == child.FACTS:
                facts, params = _FACTS.decode(body)
                traces[-1].facts.append(facts)
                traces[-1].params.append(params)
            elif kind == child.REFUSED:
                finish(End("error", 0, body.decode("utf-8", "replace")))
            elif kind == child.END:
                finish(End("ok"))
                self._seconds[len(traces) - 1] = child.SECONDS.unpack(body)[0]
            else:
                raise ValueError(f"a frame of kind {kind}")
        if end is not None:
            if not traces:
                traces.append(Trace([], [], End("ok")))
            finish(end)
            traces[-1].stderr = self._take_stderr()
        return traces
