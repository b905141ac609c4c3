"""One llama-server: its command line, how it is started on a free loopback port, and how it is ended.

It is a child of ours in every way: it dies with this process (also by kill -9), its log has no name in any folder, and
the folder of its saved slots goes with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from subjects.processes import end_with_parent, peak_kb
from subjects.scenario import DriverParams
from subjects.server.scenario import Flags
from subjects.server.trace import End

START_SECONDS = 60.0
STOP_SECONDS = 2.0
"""that it has for its last words: its handler of SIGTERM takes a lock which the thread that it interrupts may hold, and
then it never leaves"""
_POLL = 0.002
_FILE_BYTES = 1 << 26
"""of its log and of each saved slot, or so many as the model has: one that writes more is ended by the system"""
_SLOW = 64 << 20
"""bytes of a model for which everything may take a second longer"""
_LOG_BYTES = 1 << 21
"""of a log's beginning, and of its end, that are read: a server that does one thing for ever has no more to tell"""
_HOMES = "redraft-server-"
_LISTENS = re.compile(rb"listening on http://127\.0\.0\.1:(\d+)")
_LEAVES = b"cleaning up before exit"


class ServerError(RuntimeError):
    """A server that did not start; `end` and `log` say how, the message what it said."""

    def __init__(self, text: str, end: End, log: str):
        super().__init__(text)
        self.end, self.log = end, log


def argv(
    binary: Path, model: Path, flags: Flags, driver: DriverParams | None, draft: Path | None, saves: Path | None
) -> list[str]:
    """The command line of a program's server. saves: the folder of saved slots, None for none."""
    f = flags
    command = [str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", "0"]
    # one thread, nothing fitted to the machine, no run of the model before the first request
    command += ["--threads", "1", "--threads-batch", "1", "--fit", "off", "--no-warmup", "--no-slots"]
    # what it does is told from the fourth level on
    command += ["--verbosity", "4", "--log-colors", "off"]
    command += ["--ctx-size", str(f.ctx), "--parallel", str(f.parallel)]
    command += ["--batch-size", str(f.batch), "--ubatch-size", str(f.ubatch)]
    command += ["--ctx-checkpoints", str(f.checkpoints), "--checkpoint-min-step", str(f.spacing)]
    command += ["--cache-ram", str(f.cache_ram)]
    command += ["--cache-idle-slots" if f.idle_slots else "--no-cache-idle-slots"]
    command += ["--slot-prompt-similarity", f"{f.similarity / 100:.2f}"]
    command += ["--kv-unified" if f.kv_unified else "--no-kv-unified"]
    command += ["--flash-attn", "on" if f.flash_attn else "off"]
    command += ["--cache-type-k", f.type_k, "--cache-type-v", f.type_v]
    command += ["--swa-full"] if f.swa_full else []
    command += ["--slot-save-path", f"{saves}/"] if saves else []
    return command + (_drafting(driver, draft, f) if driver else [])


def _drafting(d: DriverParams, draft: Path | None, f: Flags) -> list[str]:
    command = ["--spec-type", d.kind]
    if d.kind.startswith("ngram-"):
        if d.kind == "ngram-mod":
            return [*command, "--spec-ngram-mod-n-match", str(d.ngram_n), "--spec-ngram-mod-n-max", str(d.ngram_m)]
        if d.kind == "ngram-cache":
            return command
        return [
            *command,
            *(f"--spec-{d.kind}-size-n", str(d.ngram_n)),
            *(f"--spec-{d.kind}-size-m", str(d.ngram_m)),
            *(f"--spec-{d.kind}-min-hits", str(d.ngram_hits)),
        ]
    command += ["--spec-draft-n-max", str(d.n_max), "--spec-draft-n-min", str(d.n_min)]
    command += ["--spec-draft-p-min", str(d.p_min)]
    command += ["--spec-draft-backend-sampling" if d.backend_sampling else "--no-spec-draft-backend-sampling"]
    command += ["--spec-draft-threads", "1", "--spec-draft-threads-batch", "1"]
    command += ["--spec-draft-type-k", f.type_k, "--spec-draft-type-v", f.type_v]
    return command + (["--spec-draft-model", str(draft)] if draft else [])


class Server:
    """A running llama-server.

    command: makes the command line, given the folder of saved slots. model: what it loads; how much it may write and
    how long it may take follow from its size. saves: whether there is a folder, which outlives `restart`. fell: how it
    was found to have ended when it was to be ended.

    Raises:
        ServerError: it ended, or said nothing of a port in time.
    """

    def __init__(self, command: Callable[[Path | None], list[str]], model: Path, *, saves: bool = False):
        size = model.stat().st_size if model.is_file() else 0
        self.patience = size / _SLOW
        """seconds that everything may take longer than with a small model"""
        self._most = max(_FILE_BYTES, size)
        self.fell: End | None = None
        self.saves = _home() if saves else None
        self._command = command(self.saves)
        self._logs: list[bytes] = []
        """of those that were ended"""
        self.max_rss_kb = 0
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `restart` or `close`)
        # Blocked: a Ctrl-C that comes right after the fork would be lost in hooks of Python's own.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                # no thread of ours runs while a server starts
                preexec_fn=partial(_as_child, os.getpid(), held, self._most),  # noqa: PLW1509
                env=_environment(),
                start_new_session=True,  # a wrapper's children end with it, and Ctrl-C is for us, who end it
            )
        except OSError as e:
            raise ServerError(f"{self._command[0]}: {e.strerror}", End(how="error", text=str(e)), "") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        deadline = time.monotonic() + START_SECONDS + self.patience
        while (found := _LISTENS.search(self._bytes())) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                end, log = self.ended() or End(how="hang"), self._bytes().decode("utf-8", "replace")
                last = " ".join(log.strip().splitlines()[-3:])
                raise ServerError(f"llama-server did not start: {last}", end, log)
            time.sleep(_POLL)
        self.port = int(found[1])

    def _bytes(self) -> bytes:
        size = os.fstat(self._log.fileno()).st_size
        if size <= 2 * _LOG_BYTES:
            return os.pread(self._log.fileno(), size, 0)
        first, last = (os.pread(self._log.fileno(), _LOG_BYTES, at) for at in (0, size - _LOG_BYTES))
        return first + f"\n... {size - 2 * _LOG_BYTES} bytes ...\n".encode() + last

    def _last(self) -> bytes:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 4096, max(size - 4096, 0))

    def log(self) -> str:
        """What it has said since it was started."""
        return self._bytes().decode("utf-8", "replace")

    def ended(self, wait: float = 0.0) -> End | None:
        """How it ended by itself, None while it lives; waits so many seconds for an end that is under way."""
        try:
            code = self.process.wait(wait) if wait else self.process.poll()
        except subprocess.TimeoutExpired:
            return None
        if code is None:
            return None
        if code == -signal.SIGXFSZ:  # by our own limit
            if os.fstat(self._log.fileno()).st_size >= self._most:
                return End(how="hang", text=f"it wrote {self._most >> 20} MiB of log")
            return End(how="error", text=f"a file of more than {self._most >> 20} MiB was to be written")
        return End(how="signal", number=-code) if code < 0 else End(how="exit", number=code)

    def _end(self) -> None:
        """End it, with all that it has to say in the log: it says when it leaves, and what follows takes long."""
        self.fell = self.ended() or self._told_to_end()
        if self.process.poll() is None:
            self.max_rss_kb = max(self.max_rss_kb, peak_kb(self.process.pid))
        self._kill()
        self._logs.append(self._bytes())

    def _told_to_end(self) -> End | None:
        """Ask it to end and wait for its last words; how it ended where that was not what it was asked for."""
        self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while _LEAVES not in self._last() and time.monotonic() < deadline:
            end = self.ended()
            if end is not None:
                return None if end.number == signal.SIGTERM or _LEAVES in self._last() else end
            time.sleep(_POLL)
        return None

    def restart(self) -> None:
        """End it and start it anew, with the same command line and saved slots. Raises ServerError."""
        self._end()
        self._log.close()
        self._start()

    def stop(self) -> list[str]:
        """End it; what it said, to its last word, and those before each restart. The folder of saved slots stays until
        `close`."""
        self._end()
        return [log.decode("utf-8", "replace") for log in self._logs]

    def _kill(self) -> None:
        """End it and what it has started, any number of times."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Leave nothing behind; any number of times."""
        if hasattr(self, "process"):
            self._kill()
        self._log.close()
        if self.saves:
            shutil.rmtree(self.saves, ignore_errors=True)


def _home() -> Path:
    """A folder for saved slots, with our number in its name; those of processes that were killed go."""
    for left in Path(tempfile.gettempdir()).glob(f"{_HOMES}*-*"):
        pid = left.name[len(_HOMES) :].split("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_HOMES}{os.getpid()}-"))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _as_child(parent: int, mask: set[int | signal.Signals], most: int) -> None:
    """In the child, before it is llama-server. parent: who started it; mask: the signals that are blocked there; most:
    bytes of each file that it may write."""
    end_with_parent(parent=parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _environment() -> dict[str, str]:
    """Ours without what would change the server's flags, with a line for every round of drafting, and without a
    debugger at every abort."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")}
    return kept | {"LLAMA_TRACE": "1", "GGML_NO_BACKTRACE": "1"}
