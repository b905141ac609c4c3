"""The child side of the sandbox: a zygote that loads library and models, and workers forked from it that run scenarios.

The zygote never decodes, because a process that has decoded must not fork (OpenMP threads hang in the copy). When a
worker dies, however it dies, the zygote tells the parent and forks the next one in a few milliseconds.

With a model that uses a GPU the zygote loads nothing at all, because its driver does not survive a fork: each worker
loads for itself.

Wire format, all little endian: a frame is `u32 length, payload`. Requests (parent to worker, on `requests`) are msgpack
arrays of Job or Replay. Answers go, frame by frame, into a memory file that parent and child share (a frame there is
`u32 length, u8 kind, payload`), so that everything up to a crash survives it; then the request's number goes through
`replies`. Control frames (to the parent) say that a worker began or how it ended.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from subjects.drivers import Driver
from subjects.drivers.native import DriverLib, Native
from subjects.driving import DriverRunner
from subjects.planted import FAULTS, plant
from subjects.processes import end_with_parent
from subjects.runner import Refused, Runner
from subjects.scenario import ContextParams, DriverParams, Scenario
from subjects.shim import Shim
from subjects.trace import Facts, Row, Step

# kinds of frames in the shared memory file
RUN, FACTS, BEGIN, BATCH, CODE, STEP, LOGITS, HIDDEN, REFUSED, END, STATE = range(11)
# The answers of one request: a sparse file, of which only what is written takes memory. It begins with the number of
# bytes that are good.
ANSWERS_BYTES = 1 << 28
HEADER = struct.Struct("<Q")
# Behind it the number of the request that the answers are for, and the process that answers: a worker may die before it
# takes the next request, and its successor may have taken it before the parent hears of that death.
NUMBER = struct.Struct("<Q")
TAKER = struct.Struct("<QQ")
START = HEADER.size + TAKER.size
FRAME = struct.Struct("<IB")
RESULT = struct.Struct("<ii")
SECONDS = struct.Struct("<d")
# After more than this was written, the file's memory is given back.
_KEEP_BYTES = 1 << 24


class Job(msgspec.Struct, array_like=True, tag="job"):
    """One scenario to run. `fresh`: in contexts that no other program has used. `fault`: name of a planted fault, or
    empty; with the reference driver, of the part that it leaves out. `draft`: path of the draft's model.
    """

    scenario: Scenario
    model: str
    fresh: bool
    fault: str = ""
    draft: str = ""


class Replay(msgspec.Struct, array_like=True, tag="replay"):
    """One history to decode in a context of its own (see rd_replay in the shim), with `rows` output rows. states: how
    often its state is saved on the way; the trace has them one behind the other, each with its length in front."""

    params: ContextParams
    words: bytes
    rows: int
    model: str
    n_gpu_layers: int
    states: int = 0


class Control(msgspec.Struct, array_like=True):
    """What the zygote tells the parent: a worker began (`pid`), or ended (`status` as from waitpid)."""

    what: str
    pid: int = 0
    status: int = 0
    max_rss_kb: int = 0
    text: str = ""


class Setup(msgspec.Struct):
    """First frame of the parent: what to load, where to answer, and the limits of workers. driver: the compiled
    driver library, empty for none."""

    shim: str
    models: list[tuple[str, int]]
    memory_mb: int
    driver: str = ""


REQUESTS = msgspec.msgpack.Decoder(tuple[int, list[Job | Replay]], strict=True)
_ENCODE = msgspec.msgpack.Encoder().encode
_POOLED_KINDS = 6


class _Pipe:
    """Frames over a file descriptor."""

    def __init__(self, fd: int):
        self.fd = fd

    def read(self) -> bytes | None:
        """Next frame, None at the end of the stream."""
        head = self._exactly(4)
        return None if head is None else self._exactly(struct.unpack("<I", head)[0])

    def _exactly(self, n: int) -> bytes | None:
        parts: list[bytes] = []
        while n > 0:
            data = os.read(self.fd, n)
            if not data:
                return None
            parts.append(data)
            n -= len(data)
        return b"".join(parts)

    def drain(self) -> None:
        """Throw away what a reader that died has left, perhaps the half of a frame."""
        while select.select([self.fd], [], [], 0)[0] and os.read(self.fd, 1 << 16):
            pass

    def write(self, payload: bytes) -> None:
        """Write one frame."""
        data = struct.pack("<I", len(payload)) + payload
        while data:
            data = data[os.write(self.fd, data) :]


class Recorder:
    """Sink that appends to the shared memory file. The header is written last, so a frame is there whole or not at all.

    Raises ValueError when a request's answers do not fit.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.map = mmap.mmap(fd, ANSWERS_BYTES)
        self.at = START

    def clear(self, number: int = 0) -> None:
        """Forget the answers of the last request."""
        if self.at > _KEEP_BYTES:
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, ANSWERS_BYTES)
        self.at = START
        HEADER.pack_into(self.map, 0, self.at)
        TAKER.pack_into(self.map, HEADER.size, number, os.getpid())

    def frame(self, kind: int, payload: bytes) -> None:
        """Append one frame."""
        n, at = len(payload), self.at
        end = at + FRAME.size + n
        if end > ANSWERS_BYTES:
            raise ValueError(f"more than {ANSWERS_BYTES >> 20} MB of answers to one request; ask for fewer output rows")
        FRAME.pack_into(self.map, at, n, kind)
        self.map[at + FRAME.size : end] = payload
        self.at = end
        HEADER.pack_into(self.map, 0, end)

    def facts(self, facts: Facts, params: ContextParams) -> None:
        """See subjects.runner.Sink."""
        self.frame(FACTS, _ENCODE((facts, params)))

    def begin(self, op: int, args: list[int]) -> None:
        """See subjects.runner.Sink."""
        self.frame(BEGIN, _ENCODE((op, args)))

    def batch(self, rows: list[Row]) -> None:
        """See subjects.runner.Sink."""
        self.frame(BATCH, _ENCODE(rows))

    def code(self, rc: int, first: int) -> None:
        """See subjects.runner.Sink."""
        self.frame(CODE, RESULT.pack(rc, first))

    def row(self, logits: bytes, hidden: bytes) -> None:
        """See subjects.runner.Sink."""
        self.frame(LOGITS, logits)
        if hidden:
            self.frame(HIDDEN, hidden)

    def state(self, data: bytes) -> None:
        """See subjects.runner.Sink."""
        self.frame(STATE, data)

    def end(self, step: Step) -> None:
        """See subjects.runner.Sink."""
        self.frame(STEP, _ENCODE(step))


class Worker:
    """Runs jobs until the parent hangs up or the library takes the process down."""

    def __init__(
        self,
        shim: Shim,
        models: dict[tuple[str, int], int],
        driver: DriverLib | None,
        answers: Recorder,
        memory_mb: int = 0,
    ):
        self.shim, self.models, self.driver = shim, models, driver
        self.answers, self.memory_mb = answers, memory_mb
        # models with their NextN layers, which plain programs are run without
        self.whole_models: dict[tuple[str, int], int] = {}
        self.pool: dict[tuple[int, ContextParams], int] = {}

    def run(self, job: Job) -> None:
        """Run one job and record it."""
        began = time.monotonic()
        self.answers.frame(RUN, b"")
        if job.scenario.driver is not None:
            if self._drive(job, job.scenario.driver):
                self.answers.frame(END, SECONDS.pack(time.monotonic() - began))
            return
        try:
            shim = plant(self.shim, job.fault)
            model = self._model(job.model, job.scenario.model.n_gpu_layers)
            runner = Runner(shim, model, self.answers, lambda p: self._take(model, p, job.fresh))
            done = runner.run(job.scenario)
        except Refused as e:
            self.answers.frame(REFUSED, str(e).encode())
            return
        key = (model, done.params)
        if done.reusable and not job.fresh and not job.fault and key not in self.pool:
            self.pool[key] = done.ctx
            if len(self.pool) > _POOLED_KINDS:
                self.shim.free_context(self.pool.pop(next(iter(self.pool))))
        else:
            self.shim.free_context(done.ctx)
        self.answers.frame(END, SECONDS.pack(time.monotonic() - began))

    def _drive(self, job: Job, p: DriverParams) -> bool:
        """Run a program with a driver, in contexts of its own; False where it was refused."""
        lib, layers = self.driver, job.scenario.model.n_gpu_layers
        planted = job.fault in FAULTS
        shim = plant(self.shim, job.fault) if planted else self.shim
        try:
            if lib is None:
                raise Refused("there is no driver library for this build; `redraft doctor` says why")
            model = self._whole_model(lib, job.model, layers)
            draft_model = self._whole_model(lib, job.draft, layers) if job.draft else model
            mtp = p.kind == "draft-mtp"

            def draft_context(params: ContextParams, target: int) -> int | None:
                return 0 if p.kind.startswith("ngram") else lib.new_draft_context(draft_model, params, target, mtp=mtp)

            def make(target: int, draft: int, n_seq: int) -> Driver:
                if p.impl == "native":
                    return Native(lib, p, target, draft, n_seq)
                from subjects.drivers.reference import Reference, WrongBinding

                try:
                    return Reference(p, target, draft, n_seq, leave_out="" if planted else job.fault)
                except WrongBinding as e:
                    raise Refused(f"the driver in Python: {e}") from None

            DriverRunner(
                shim,
                model,
                self.answers,
                lambda params: self.shim.new_context(model, params),
                draft_context=draft_context,
                make=make,
                shares=lib.shares_memory,
            ).run_driver(job.scenario)
        except Refused as e:
            self.answers.frame(REFUSED, str(e).encode())
            return False
        return True

    def _whole_model(self, lib: DriverLib, path: str, n_gpu_layers: int) -> int:
        return self._loaded(self.whole_models, lib.load_model, path, n_gpu_layers)

    def replay(self, request: Replay) -> None:
        """Decode a reference's history and record its rows."""
        began = time.monotonic()
        self.answers.frame(RUN, b"")
        try:
            model = self._model(request.model, request.n_gpu_layers)
        except Refused as e:
            self.answers.frame(REFUSED, str(e).encode())
            return
        facts = self.shim.model_facts(model)
        code, logits, hidden, states = self.shim.replay(
            model, request.params, request.words, request.rows, facts["n_vocab"], facts["n_embd"], request.states
        )
        if code < 0:
            why = "; ".join(self.shim.take_log()[-3:])
            self.answers.frame(REFUSED, f"the reference ended with {code}: {why}".encode())
            return
        self.answers.frame(LOGITS, logits)
        if hidden:
            self.answers.frame(HIDDEN, hidden)
        if states:
            self.answers.frame(STATE, states)
        self.answers.frame(END, SECONDS.pack(time.monotonic() - began))

    def _model(self, path: str, n_gpu_layers: int) -> int:
        return self._loaded(self.models, self.shim.load_model, path, n_gpu_layers)

    def _loaded(
        self,
        models: dict[tuple[str, int], int],
        load: Callable[[Path, int], int | None],
        path: str,
        n_gpu_layers: int,
    ) -> int:
        key = (path, n_gpu_layers)
        if key not in models:
            cap_memory(0)
            handle = load(Path(path), n_gpu_layers)
            cap_memory(self.memory_mb)
            if handle is None:
                raise Refused("the library does not load the model: " + "; ".join(self.shim.take_log()[-3:]))
            models[key] = handle
        return models[key]

    def _take(self, model: int, params: ContextParams, fresh: bool) -> int | None:
        ctx = None if fresh else self.pool.pop((model, params), None)
        if ctx is None:
            return self.shim.new_context(model, params)
        self.shim.clear(ctx, False)  # data stays: a dirty subject is the better one
        return ctx


def cap_memory(more_mb: int) -> None:
    """Let this process take so much address space in addition to what it has (a mapped model counts too); 0 for any."""
    cap = resource.RLIM_INFINITY
    if more_mb:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        cap = pages * resource.getpagesize() + (more_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (cap, resource.RLIM_INFINITY))


def _serve(worker: Worker, requests: _Pipe, replies: int, answers: Recorder) -> None:
    while (request := requests.read()) is not None:
        number, items = REQUESTS.decode(request)
        answers.clear(number)
        for item in items:
            if isinstance(item, Job):
                worker.run(item)
            else:
                worker.replay(item)
        os.write(replies, NUMBER.pack(number))


def _load(setup: Setup, control: _Pipe) -> tuple[Shim, dict[tuple[str, int], int], DriverLib | None] | None:
    """The library with its models, and the drivers where asked; None when the parent was told why not."""
    try:
        shim = Shim(Path(setup.shim))
        driver = DriverLib(Path(setup.driver)) if setup.driver else None
        models: dict[tuple[str, int], int] = {}
        for path, layers in setup.models:
            handle = shim.load_model(Path(path), layers)
            if handle is None:
                why = "; ".join(shim.take_log()[-3:])
                control.write(_ENCODE(Control("failed", text=f"the library does not load {path}: {why}")))
                return None
            models[path, layers] = handle
    except Exception as e:
        control.write(_ENCODE(Control("failed", text=f"{type(e).__name__}: {e}")))
        return None
    return shim, models, driver


def main(argv: list[str]) -> None:
    """Entry of the zygote: file descriptors requests, replies, control, answers as arguments."""
    fds = [int(a) for a in argv]
    requests, replies, control, answers = _Pipe(fds[0]), fds[1], _Pipe(fds[2]), Recorder(fds[3])
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    first = requests.read()
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    # a GPU's driver does not survive a fork, and reserves more address space than any machine has memory
    on_gpu = any(layers for _, layers in setup.models)
    memory_mb = 0 if on_gpu else setup.memory_mb
    loaded = None if on_gpu else _load(setup, control)
    if loaded is None and not on_gpu:
        return
    while True:
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if on_gpu:
                loaded = _load(setup, control)
                if loaded is not None:
                    control.write(_ENCODE(Control("began", os.getpid())))
            if loaded is not None:
                if memory_mb:
                    cap_memory(memory_mb)
                _serve(Worker(*loaded, answers, memory_mb), requests, replies, answers)
            os._exit(0)
        if not on_gpu:
            control.write(_ENCODE(Control("began", pid)))
        _, status, usage = os.wait4(pid, 0)
        requests.drain()
        control.write(_ENCODE(Control("ended", pid, status, usage.ru_maxrss)))
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
