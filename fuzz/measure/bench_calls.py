"""Recorded runs as a flat binary list of library calls, for bench_native.cpp, and that program compiled.

The list is little endian 32-bit words: a magic number, then calls, each a code and its arguments. What a call answered
when it was recorded goes along, so that the C++ program can say whether it was answered alike.
"""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Iterable
from enum import IntEnum, auto
from pathlib import Path

from subjects.builds import BadBuild, Build
from subjects.child import Replay
from subjects.scenario import (
    GGML_TYPE,
    ON_DEVICE,
    Ask,
    Clear,
    ContextParams,
    Corrupt,
    Decode,
    Draft,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    Scenario,
    SeqAdd,
    SeqCp,
    SeqDiv,
    SeqKeep,
    SeqRm,
)
from subjects.shimcache import PARAMS, compiler
from subjects.trace import Batch, Step, Trace

SOURCE = Path(__file__).with_name("bench_native.cpp")
MAGIC = 0x72644231


class Code(IntEnum):
    """Calls, as in bench_native.cpp."""

    BEGIN = 0
    OPEN = auto()
    END = auto()
    DECODE = auto()
    RM = auto()
    CP = auto()
    KEEP = auto()
    ADD = auto()
    DIV = auto()
    CLEAR = auto()
    SAVE = auto()
    RESTORE = auto()
    CORRUPT = auto()
    POSITIONS = auto()
    SIZE = auto()
    SIZE_ALL = auto()
    CAN_SHIFT = auto()


_MOVES = {
    SeqRm: Code.RM,
    SeqCp: Code.CP,
    SeqKeep: Code.KEEP,
    SeqAdd: Code.ADD,
    SeqDiv: Code.DIV,
    Clear: Code.CLEAR,
}


class CallList:
    """Collects runs as words."""

    def __init__(self) -> None:
        self.words = array("i", [MAGIC])
        self.blocks = 0

    def add(self, program: Scenario, trace: Trace, *, pooled: bool) -> None:
        """Append one run that ended well. `pooled`: its contexts come from the pool and go back there."""
        self.blocks += 1
        params = program.params
        self._call(Code.BEGIN, pooled)
        self._call(Code.OPEN, *_params(params))
        clean = True
        media: dict[int, bool] = {}
        for step in trace.steps:
            op = program.ops[step.op]
            if step.skipped:
                continue
            match op:
                case Decode() | Draft():
                    for batch in step.batches:
                        self._decode(batch, op.abort_after if isinstance(op, Decode) else None)
                case SeqRm():
                    self._call(Code.RM, *step.args, step.rc or 0)
                    clean = clean and bool(step.rc)
                case SeqCp() | SeqKeep() | SeqAdd() | SeqDiv() | Clear():
                    self._call(_MOVES[type(op)], *step.args)
                case Save() | SaveAll():
                    media[op.slot] = op.medium == "file"
                    clean = clean and not step.args[2] & ON_DEVICE
                    for blob in step.blobs:
                        self._save(step, media[op.slot], True, blob.moved)
                case Restore() | RestoreAll():
                    whole = isinstance(op, RestoreAll)
                    for blob in step.blobs[: op.times]:
                        self._call(Code.RESTORE, step.args[0], step.args[1], whole, step.args[2], blob.moved)
                    for blob in step.blobs[op.times :]:
                        self._save(step, False, False, blob.moved)
                    clean = clean and bool(step.rc)
                case Corrupt():
                    clean = False
                    self._call(Code.CORRUPT, op.slot, len(step.pieces))
                    for piece in step.pieces:
                        self.words.extend((piece.slot, piece.start, piece.end, len(piece.data), *piece.data))
                case Reopen():
                    clean = False
                    params = op.params or params
                    self._call(Code.OPEN, *_params(params))
                case Ask():
                    self._ask(op, params)
                case _:
                    raise TypeError(op)
            self._call(Code.POSITIONS, params.n_seq_max)
        last = next((op for op in reversed(program.ops) if not isinstance(op, Ask)), None)
        self._call(Code.END, clean and isinstance(last, Decode | Draft))

    def add_replay(self, history: Replay) -> None:
        """Append one reference: a context of its own, its decodes and edits (see rd_replay in the shim)."""
        self.blocks += 1
        self._call(Code.BEGIN, False)
        self._call(Code.OPEN, *_params(history.params))
        words = array("i")
        words.frombytes(history.words)
        i = 0
        while i < len(words):
            code, a = words[i], words[i + 2 : i + 2 + words[i + 1]]
            i += 2 + words[i + 1]
            if code == 0:
                n = len(a) - 3
                self._call(Code.DECODE, n, -1, 0)
                self.words.extend(a[3:])
                self.words.extend(range(a[1], a[1] + n))
                self.words.extend([a[0]] * n)
                self.words.extend([int(a[2] == 2)] * (n - 1) + [int(a[2] != 0)])
            elif code == 1:
                self._call(Code.RM, *a, 1)
            else:
                self._call(Code.ADD if code == 2 else Code.DIV, *a)
        self._call(Code.END, False)

    def write(self, path: Path) -> Path:
        """Write the list to a file."""
        words = self.words
        if sys.byteorder != "little":
            words = words[:]
            words.byteswap()
        with path.open("wb") as f:
            words.tofile(f)
        return path

    def _call(self, code: Code, *args: int) -> None:
        self.words.append(code)
        self.words.extend(map(_signed, args))

    def _decode(self, batch: Batch, abort_after: int | None) -> None:
        rows = batch.rows
        self._call(Code.DECODE, len(rows), -1 if abort_after is None else abort_after, batch.rc or 0)
        self.words.extend(r.token for r in rows)
        self.words.extend(r.pos for r in rows)
        self.words.extend(r.seq for r in rows)
        self.words.extend(int(r.out) for r in rows)

    def _save(self, step: Step, file: bool, keep: bool, moved: int) -> None:
        slot, seq, flags = step.args
        self._call(Code.SAVE, slot, seq, seq < 0, flags, file, keep, moved)

    def _ask(self, op: Ask, params: ContextParams) -> None:
        match op.what:
            case "size":
                self._call(Code.SIZE, op.seq, op.flags)
            case "size_all":
                self._call(Code.SIZE_ALL)
            case "can_shift":
                self._call(Code.CAN_SHIFT)
            case "positions":
                self._call(Code.POSITIONS, params.n_seq_max)


def _signed(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


def _params(p: ContextParams) -> Iterable[int]:
    # as Shim.new_context has them
    return (
        p.n_ctx,
        p.n_batch,
        p.n_ubatch,
        p.n_seq_max,
        p.n_rs_seq,
        p.kv_unified,
        GGML_TYPE[p.type_k],
        GGML_TYPE[p.type_v],
        p.flash_attn,
        p.swa_full,
        p.offload_kqv,
        p.n_threads,
        p.embeddings,
    )


def compile_native(build: Build, to: Path) -> Path:
    """Compile bench_native.cpp against a build, as optimised as the shim is. Raises BadBuild with what to do."""
    dirs = [*build.include, PARAMS.parent]
    command = [*compiler(), "-std=c++17", "-O2", *(f"-I{p}" for p in dirs), str(SOURCE), "-o", str(to)]
    if sys.platform == "linux":
        command += ["-Wl,--disable-new-dtags"]
    command += map(str, build.linked())
    for folder in dict.fromkeys(p.parent.absolute() for p in build.linked()):
        command += ["-Xlinker", "-rpath", "-Xlinker", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadBuild(
            f"{SOURCE.name} does not compile against {build.name}: adapt it to that llama.h as subjects/shim.cpp was, "
            f"or take the default build\n{done.stderr.strip()[:2000]}"
        )
    return to
