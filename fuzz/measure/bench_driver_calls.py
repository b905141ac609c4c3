"""The library calls of programs with a driver as a flat binary list, for bench_driver.cpp, and that program compiled.

They are noted where they are made: in a process of its own (bench_child) the worker runs with the classes below in
place of the shim, the driver library and the drivers. The list is little endian 32-bit words: a magic number, then
calls, each a code and its arguments, with what was answered.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum, auto
from pathlib import Path
from typing import get_args

from fuzz.measure.bench_calls import _params, _signed
from subjects.builds import BadBuild, Build, _library_in, driver_sources
from subjects.drivers import DraftAsk, Driver, Tap
from subjects.drivers.native import DriverLib
from subjects.scenario import ContextParams, DriverKind, DriverParams
from subjects.shim import Shim
from subjects.shimcache import Ours
from subjects.trace import Row

SOURCE = Path(__file__).with_name("bench_driver.cpp")
MAGIC = 0x72644432
KINDS = get_args(DriverKind)


class Code(IntEnum):
    """Calls, as in bench_driver.cpp."""

    BEGIN = 0
    CONTEXT = auto()
    DRAFT_CONTEXT = auto()
    FREE = auto()
    FACTS = auto()
    DECODE = auto()
    LOGITS = auto()
    HIDDEN = auto()
    RM = auto()
    ADD = auto()
    DIV = auto()
    CLEAR = auto()
    POSITIONS = auto()
    SIZE = auto()
    GET = auto()
    SET = auto()
    DRIVER = auto()
    DRIVER_FREE = auto()
    PROCESS = auto()
    DRAFT = auto()
    ACCEPT = auto()
    START = auto()
    STATE = auto()
    LITERAL = auto()
    RESTORE = auto()


class Calls:
    """Collects calls as words. models: what was loaded, in order, as arguments of bench_driver."""

    def __init__(self) -> None:
        self.words = array("i", [MAGIC])
        self.models: list[str] = []
        self.blocks = 0
        self._model_of: dict[int, int] = {}
        self._contexts: dict[int, int] = {}
        self._slots: dict[int, tuple[int, bytes]] = {}

    def begin(self) -> None:
        """A program or reference begins."""
        self.blocks += 1
        self._contexts.clear()
        self._slots.clear()
        self.add(Code.BEGIN)

    def add(self, code: Code, *args: int) -> None:
        """Append a call."""
        self.words.append(code)
        self.words.extend(map(_signed, args))

    def loaded(self, kind: str, path: Path, handle: int | None) -> None:
        """A model was loaded."""
        if handle is not None:
            self._model_of[handle] = len(self.models)
            self.models.append(f"{kind}:{path}")

    def model(self, handle: int) -> int:
        """Number of a model."""
        return self._model_of[handle]

    def made(self, handle: int) -> int:
        """Number of a new context: the lowest that is free."""
        used = set(self._contexts.values())
        self._contexts[handle] = next(i for i in range(len(used) + 1) if i not in used)
        return self._contexts[handle]

    def context(self, handle: int) -> int:
        """Number of a context, -1 for none."""
        return self._contexts[handle] if handle else -1

    def freed(self, handle: int) -> None:
        """A context was freed."""
        self.add(Code.FREE, self._contexts.pop(handle))

    def kept(self, blob: bytes) -> int:
        """The slot of a blob that the library gave just now."""
        return self._slots.setdefault(id(blob), (len(self._slots), blob))[0]

    def slot(self, blob: bytes) -> int:
        """The slot of a blob; one that the library did not give is written into one."""
        if id(blob) not in self._slots:
            number = self.kept(blob)
            self.add(Code.LITERAL, number, len(blob))
            self.words.frombytes(blob + bytes(-len(blob) % 4))
        return self._slots[id(blob)][0]

    def rows(self, columns: Iterable[Sequence[int]]) -> None:
        """Append the columns of a batch."""
        for column in columns:
            self.words.extend(int(x) for x in column)

    def write(self, path: Path) -> Path:
        """Write the list to a file."""
        words = self.words
        if sys.byteorder != "little":
            words = words[:]
            words.byteswap()
        with path.open("wb") as f:
            words.tofile(f)
        return path


class NotingShim(Shim):
    """A shim that notes its calls."""

    def __init__(self, path: Path, calls: Calls):
        super().__init__(path)
        self.calls = calls

    def load_model(self, path: Path, n_gpu_layers: int = 0) -> int | None:
        """See Shim."""
        handle = super().load_model(path, n_gpu_layers)
        self.calls.loaded("plain", path, handle)
        return handle

    def new_context(self, model: int, p: ContextParams) -> int | None:
        """See Shim."""
        handle = super().new_context(model, p)
        if handle is not None:
            self.calls.add(Code.CONTEXT, self.calls.made(handle), self.calls.model(model), *_params(p))
        return handle

    def free_context(self, ctx: int) -> None:
        """See Shim."""
        self.calls.freed(ctx)
        super().free_context(ctx)

    def context_facts(self, ctx: int) -> dict[str, int]:
        """See Shim."""
        self.calls.add(Code.FACTS, self.calls.context(ctx))
        return super().context_facts(ctx)

    def decode(
        self,
        ctx: int,
        token: Sequence[int],
        pos: Sequence[int],
        seq: Sequence[int],
        out: Sequence[int],
        abort_after: int | None = None,
    ) -> int:
        """See Shim."""
        rc = super().decode(ctx, token, pos, seq, out, abort_after)
        self.calls.add(Code.DECODE, self.calls.context(ctx), rc, len(token))
        self.calls.rows((token, pos, seq, out))
        return rc

    def logits(self, ctx: int, i: int, n_vocab: int) -> bytes | None:
        """See Shim."""
        self.calls.add(Code.LOGITS, self.calls.context(ctx), i, n_vocab)
        return super().logits(ctx, i, n_vocab)

    def hidden(self, ctx: int, i: int, n_embd: int) -> bytes | None:
        """See Shim."""
        self.calls.add(Code.HIDDEN, self.calls.context(ctx), i, n_embd)
        return super().hidden(ctx, i, n_embd)

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        """See Shim."""
        rc = super().seq_rm(ctx, seq, p0, p1)
        self.calls.add(Code.RM, self.calls.context(ctx), seq, p0, p1, rc)
        return rc

    def clear(self, ctx: int, data: bool) -> None:
        """See Shim."""
        self.calls.add(Code.CLEAR, self.calls.context(ctx), data)
        super().clear(ctx, data)

    def positions(self, ctx: int, n_seq: int) -> list[tuple[int, int]]:
        """See Shim."""
        self.calls.add(Code.POSITIONS, self.calls.context(ctx), n_seq)
        return super().positions(ctx, n_seq)

    def seq_size(self, ctx: int, seq: int, flags: int) -> int:
        """See Shim."""
        size = super().seq_size(ctx, seq, flags)
        self.calls.add(Code.SIZE, self.calls.context(ctx), seq, flags, size)
        return size

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        """See Shim."""
        n, blob = super().seq_get(ctx, seq, flags, room)
        self.calls.add(Code.GET, self.calls.context(ctx), seq, flags, self.calls.kept(blob), n)
        return n, blob

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        """See Shim."""
        slot = self.calls.slot(blob)
        n = super().seq_set(ctx, seq, flags, blob)
        self.calls.add(Code.SET, self.calls.context(ctx), seq, flags, slot, n)
        return n

    def replay(
        self, model: int, p: ContextParams, words: bytes, rows: int, n_vocab: int, n_embd: int, states: int = 0
    ) -> tuple[int, bytes, bytes, bytes]:
        """See Shim: the calls that rd_replay makes."""
        calls, items = self.calls, array("i", words)
        calls.add(Code.CONTEXT, 0, calls.model(model), *_params(p))
        i = 0
        while i < len(items):
            code, a = items[i], items[i + 2 : i + 2 + items[i + 1]]
            i += 2 + items[i + 1]
            if code == 0:
                n = len(a) - 3
                out = [int(a[2] == 2)] * (n - 1) + [int(a[2] != 0)]
                calls.add(Code.DECODE, 0, 0, n)
                calls.rows((a[3:], range(a[1], a[1] + n), [a[0]] * n, out))
                for row in (k for k, o in enumerate(out) if o):
                    calls.add(Code.LOGITS, 0, row, n_vocab)
                    if p.embeddings:
                        calls.add(Code.HIDDEN, 0, row, n_embd)
            elif code == 1:
                calls.add(Code.RM, 0, *a, 1)
            elif code in (2, 3):  # with a driver no reference saves its state
                calls.add(Code.ADD if code == 2 else Code.DIV, 0, *a)
        calls.add(Code.FREE, 0)
        return super().replay(model, p, words, rows, n_vocab, n_embd, states)


class NotingLib(DriverLib):
    """A driver library that notes its calls."""

    def __init__(self, path: Path, calls: Calls):
        super().__init__(path)
        self.calls = calls

    def load_model(self, path: Path, n_gpu_layers: int = 0) -> int | None:
        """See DriverLib."""
        handle = super().load_model(path, n_gpu_layers)
        self.calls.loaded("whole", path, handle)
        return handle

    def new_draft_context(self, model: int, p: ContextParams, target: int, *, mtp: bool) -> int | None:
        """See DriverLib."""
        handle = super().new_draft_context(model, p, target, mtp=mtp)
        if handle is not None:
            calls = self.calls
            args = calls.made(handle), calls.model(model), calls.context(target), mtp
            calls.add(Code.DRAFT_CONTEXT, *args, *_params(p))
        return handle


class NotingDriver:
    """A driver that notes its calls as those of llama.cpp's own. `ours`: it is the one in Python, which offers states
    that llama.cpp's does not."""

    def __init__(
        self,
        calls: Calls,
        driver: Driver,
        p: DriverParams,
        target: int,
        draft: int,
        n_seq: int,
        *,
        ours: bool = False,
    ):
        self.calls, self._driver, self._ours = calls, driver, ours
        self.n_max = driver.n_max
        # a call of which it is not known yet what can be read of the draft's decodes
        self._waits: tuple[Code, array[int]] | None = None
        (p_min,) = struct.unpack("<i", struct.pack("<f", p.p_min))
        kind = KINDS.index(p.kind)
        n = p.n_max, p.n_min, p.backend_sampling, p.ngram_n, p.ngram_m, p.ngram_hits
        calls.add(Code.DRIVER, calls.context(target), calls.context(draft), kind, n_seq, *n, p_min)

    def process(self, rows: Sequence[Row]) -> bool:
        """See subjects.drivers.Driver."""
        ok = self._driver.process(rows)
        words = array("i", [ok, len(rows)])
        for column in zip(*((r.token, r.pos, r.seq, int(r.out)) for r in rows), strict=True):
            words.extend(column)
        self._waits = (Code.PROCESS, words)
        return ok

    def draft(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See subjects.drivers.Driver."""
        drafts = self._driver.draft(asks)
        words = array("i", [len(asks)])
        for a, d in zip(asks, drafts, strict=True):
            words.extend((a.seq, a.pos0, a.last, a.n_max, len(d), *d, len(a.prompt), *a.prompt))
        self._waits = (Code.DRAFT, words)
        return drafts

    def take(self) -> list[Tap]:
        """See subjects.drivers.Driver."""
        taps = self._driver.take()
        if self._waits is not None:
            code, words = self._waits
            read: list[int] = []
            for tap in taps:
                outs = [i for i, r in enumerate(tap.rows) if r.out] if tap.logits else []
                read += (len(outs), *outs)
            self.calls.add(code, len(read), *read)
            self.calls.words.extend(words)
        self._waits = None
        return taps

    def accept(self, seq: int, n: int) -> None:
        """See subjects.drivers.Driver."""
        self.calls.add(Code.ACCEPT, seq, n)
        self._driver.accept(seq, n)

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """See subjects.drivers.Driver."""
        self.calls.add(Code.START, seq, len(prompt), *prompt)
        self._driver.begin(seq, prompt)

    def state(self, seq: int) -> bytes | None:
        """See subjects.drivers.Driver."""
        blob = self._driver.state(seq)
        size = -1 if blob is None or self._ours else len(blob)
        self.calls.add(Code.STATE, seq, self.calls.kept(blob or b""), size)
        return blob

    def restore(self, seq: int, blob: bytes) -> None:
        """See subjects.drivers.Driver."""
        if not self._ours:
            self.calls.add(Code.RESTORE, seq, self.calls.slot(blob))
        self._driver.restore(seq, blob)

    def log(self) -> list[str]:
        """See subjects.drivers.Driver."""
        return self._driver.log()

    def close(self) -> None:
        """See subjects.drivers.Driver."""
        self.calls.add(Code.DRIVER_FREE)
        self._driver.close()


def compile_native(build: Build, llama_src: Path | None, to: Path) -> Path:
    """Compile bench_driver.cpp against a build, as optimised as the driver library is.

    Raises:
        BadBuild: it does not compile, or something is missing; the message says what to do.
    """
    common = _library_in([*build.libdirs, build.libllama.parents[2] / "lib"], "libllama-common")
    if common is None:
        raise BadBuild(f"{build.name} has no libllama-common, which holds the speculative drivers")
    root = driver_sources(build, llama_src)
    include = (root / "common", *build.include, root / "vendor")
    ours = Ours("", include, (common, *build.linked()), SOURCE, (), "bench_driver")
    command = [x for x in ours.command(to) if x not in ("-shared", "-fPIC")]
    done = subprocess.run([*command, "-ldl"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadBuild(
            f"{SOURCE.name} does not compile against {build.name}: adapt it to that common/ as subjects/driver.cpp "
            f"was, or take the default build\n{done.stderr.strip()[:2000]}"
        )
    return to
