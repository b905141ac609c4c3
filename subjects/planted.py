"""Faults planted on purpose in the shim's answers or calls, to prove that each oracle sees what it is for.

Each is one named switch with a stated trigger; the switch off is the control. Triggers depend on calls only, never on
what is under test: whatever llama.cpp that is, the planted fault must be found (`ci/nightly` uses `CANARY`).

Reached, triggered and detected are three things (Magma): a fault is *reached* when the call that it sits in is made,
and *triggered* when its condition holds and an answer or a state is made wrong. Both are told through the log, which
is in the trace; `counts` reads them back. Whether it is detected is the oracles' business.

A new fault is a subclass of `Planted` with a `name`; its docstring says what it does, then its trigger.
"""

from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from subjects.scenario import ON_DEVICE, PARTIAL
from subjects.shim import Shim
from subjects.state.parse import BadBlob, parse
from subjects.trace import Trace

CANARY = "draft-greedy"
"""The fault that `ci/nightly` must find, or the pipeline is broken: it needs no layout of blobs, a dense model shows it
within a few programs, and only rows that are compared with a reference show it."""

REACHED, TRIGGERED = "planted fault: reached", "planted fault: triggered"


class Counts(NamedTuple):
    """How often a planted fault was reached and triggered."""

    reached: int
    triggered: int


def counts(trace: Trace) -> Counts:
    """What a trace tells of its planted fault."""
    lines = [line for step in trace.steps for line in step.log] + trace.stderr.splitlines()
    return Counts(lines.count(REACHED), lines.count(TRIGGERED))


def plant(shim: Shim, name: str) -> Shim:
    """The shim with the named fault in it; the shim itself for the empty name. Raises KeyError for an unknown name."""
    return shim if not name else FAULTS[name](shim)


class Planted(Shim):
    """A shim that shares the library of another one, and in which one thing is wrong. One instance is one run."""

    name: ClassVar[str] = ""

    def __init__(self, shim: Shim):
        self.__dict__.update(shim.__dict__)  # Shim.__init__ would load the library again
        self.n_seq = 1
        self.marks: list[str] = []
        self.setup()

    def setup(self) -> None:
        """Forget everything: at the start, and when a new context takes the place of the old one."""

    def reached(self) -> None:
        """The faulty call was made."""
        self.marks.append(REACHED)

    def triggered(self) -> None:
        """Something was made wrong."""
        self.marks.append(TRIGGERED)

    def last_words(self) -> None:
        """Tell the marks on stderr, where the process does not live to give its log."""
        os.write(2, "".join(f"{m}\n" for m in self.marks).encode())

    def take_log(self) -> list[str]:
        """The library's lines, and the marks."""
        lines, self.marks = super().take_log() + self.marks, []
        return lines

    def context_facts(self, ctx: int) -> dict[str, int]:
        """Asked for every context that is opened, which tells how many sequences there are."""
        facts = super().context_facts(ctx)
        self.n_seq = facts["n_seq_max"]
        return facts

    def free_context(self, ctx: int) -> None:
        """A reopen."""
        super().free_context(ctx)
        self.setup()

    def decode(
        self,
        ctx: int,
        token: Sequence[int],
        pos: Sequence[int],
        seq: Sequence[int],
        out: Sequence[int],
        abort_after: int | None = None,
    ) -> int:
        """Every decode, followed by `decoded`."""
        rc = super().decode(ctx, token, pos, seq, out, abort_after)
        return self.decoded(ctx, pos, seq, abort_after is not None, rc)

    def decoded(self, ctx: int, pos: Sequence[int], seq: Sequence[int], aborting: bool, rc: int) -> int:
        """A decode returned `rc`; the answer is what is told."""
        return rc

    # --- honest calls that faults are made of; none of them goes through what a subclass overrides

    def span(self, ctx: int, seq: int) -> tuple[int, int]:
        """True (pos_min, pos_max) of a sequence."""
        return Shim.positions(self, ctx, self.n_seq)[seq] if 0 <= seq < self.n_seq else (-1, -1)

    def live(self, ctx: int) -> list[int]:
        """Sequences that hold something."""
        return [s for s, (_, hi) in enumerate(Shim.positions(self, ctx, self.n_seq)) if hi >= 0]

    def state(self, ctx: int, seq: int) -> bytes:
        """True state of a sequence."""
        return Shim.seq_get(self, ctx, seq, 0, Shim.seq_size(self, ctx, seq, 0))[1]

    def set_mauled(self, ctx: int, seq: int, flags: int, blob: bytes, part: int = 32) -> int:
        """Restore with values missing; where that is refused (they were no values), an honest restore."""
        bad = mauled(blob, part)
        rc = Shim.seq_set(self, ctx, seq, flags, bad)
        if rc and bad != blob:
            self.triggered()
        return rc or Shim.seq_set(self, ctx, seq, flags, blob)

    def drop_last(self, ctx: int, seq: int) -> bool:
        """Take the last position off a sequence of two or more tokens; False where that cannot be done."""
        lo, hi = self.span(ctx, seq)
        return hi > 0 and Shim.seq_rm(self, ctx, seq, hi, -1) == 1 and self.span(ctx, seq) != (lo, hi)


def mauled(blob: bytes, part: int = 32) -> bytes:
    """The blob with its last part zeroed. Tables and most layers come first, so this is values of the last layer."""
    n = len(blob) // part
    return blob[: len(blob) - n] + bytes(n)


def is_tail(p0: int, p1: int, hi: int) -> bool:
    """Whether [p0, p1) is a proper tail of a sequence that ends at `hi`."""
    return 0 < p0 <= hi and (p1 < 0 or p1 > hi)


# --- how the process ends ---------------------------------------------------------------------------------------------


class CrashOnRestore(Planted):
    """The process aborts in a restore. Trigger: the second restore of a sequence in a context."""

    name = "crash-on-restore"

    def setup(self) -> None:
        self.restores = 0

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        self.restores += 1
        if self.restores == 2:
            self.triggered()
            self.last_words()
            os.abort()
        return super().seq_set(ctx, seq, flags, blob)


class HangOnSave(Planted):
    """A save never returns. Trigger: the second save of a sequence into memory."""

    name = "hang-on-save"

    def setup(self) -> None:
        self.saves = 0

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        self.reached()
        self.saves += 1
        if self.saves == 2:
            self.triggered()
            self.last_words()
            while True:
                time.sleep(3600)
        return super().seq_get(ctx, seq, flags, room)


# --- decoding ---------------------------------------------------------------------------------------------------------


class AfterRestore(Planted):
    """Base of faults that wait for an accepted restore of one sequence that then holds something, by buffer or file."""

    def setup(self) -> None:
        self.fresh: set[int] = set()

    def restored(self, ctx: int, seq: int) -> None:
        """A restore was accepted."""
        self.reached()
        self.fresh.add(seq)

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        rc = super().seq_set(ctx, seq, flags, blob)
        if rc and self.span(ctx, seq)[1] >= 0:
            self.restored(ctx, seq)
        return rc

    def seq_load_file(self, ctx: int, path: Path, seq: int, room: int) -> tuple[int, list[int]]:
        answer = super().seq_load_file(ctx, path, seq, room)
        if answer[0] and self.span(ctx, seq)[1] >= 0:
            self.restored(ctx, seq)
        return answer


class DecodeRc(AfterRestore):
    """A decode that worked returns 1 (no room). Trigger: the first decode of a sequence after its restore."""

    name = "decode-rc"

    def decoded(self, ctx: int, pos: Sequence[int], seq: Sequence[int], aborting: bool, rc: int) -> int:
        hit = self.fresh & set(seq)
        self.fresh -= hit
        if hit and rc == 0:
            self.triggered()
            return 1
        return rc


class AbortEats(Planted):
    """An aborted decode takes a token with it that was there before. Trigger: a decode returns 2, and its first
    sequence held two tokens or more."""

    name = "abort-eats"

    def decoded(self, ctx: int, pos: Sequence[int], seq: Sequence[int], aborting: bool, rc: int) -> int:
        if aborting:
            self.reached()
        if rc == 2 and pos[0] > 1 and Shim.seq_rm(self, ctx, seq[0], pos[0] - 1, -1):
            self.triggered()
        return rc


class RowsLost(AfterRestore):
    """A decode that returned 0 gives no logits. Trigger: the first output row read after a restore."""

    name = "rows-lost"

    def logits(self, ctx: int, i: int, n_vocab: int) -> bytes | None:
        if self.fresh:
            self.fresh.clear()
            self.triggered()
            return None
        return super().logits(ctx, i, n_vocab)


# --- refusal ----------------------------------------------------------------------------------------------------------


class FalseRefusal(Planted):
    """A restore that was done is reported as refused. Trigger: an accepted restore from memory."""

    name = "false-refusal"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        if super().seq_set(ctx, seq, flags, blob):
            self.triggered()
        return 0


class DeviceDead(Planted):
    """A snapshot on the device is not taken back, nor anything done. Trigger: a restore with ON_DEVICE."""

    name = "device-dead"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        if flags & ON_DEVICE:
            self.triggered()
            return 0
        return super().seq_set(ctx, seq, flags, blob)


class Refusing(Planted, ABC):
    """Base of faults in what a refused restore leaves."""

    @abstractmethod
    def spoil(self, ctx: int, seq: int, own: bytes) -> bool:
        """Make the target wrong, whose state was `own`; False where that cannot be done."""

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        own = self.state(ctx, seq) if self.span(ctx, seq)[1] > 0 else b""
        rc = super().seq_set(ctx, seq, flags, blob)
        if rc == 0:
            self.reached()
            if own and not flags & ON_DEVICE and self.spoil(ctx, seq, own):
                self.triggered()
        return rc


class HalfRefusal(Refusing):
    """A refused restore cuts the last token off its target. Trigger: a refused host restore onto two tokens or more."""

    name = "half-refusal"

    def spoil(self, ctx: int, seq: int, own: bytes) -> bool:
        return Shim.seq_set(self, ctx, seq, 0, own) > 0 and self.drop_last(ctx, seq)


class RefusalScrambles(Refusing):
    """A refused restore leaves its target's positions as they were, and other values behind them. Trigger: as
    half-refusal."""

    name = "refusal-scrambles"

    def spoil(self, ctx: int, seq: int, own: bytes) -> bool:
        return Shim.seq_set(self, ctx, seq, 0, mauled(own)) > 0


# --- removal ----------------------------------------------------------------------------------------------------------


class RollbackOffByOne(Planted):
    """A rollback keeps one token too many. Trigger: seq_rm of a proper tail."""

    name = "rollback-off-by-one"

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        self.reached()
        if is_tail(p0, p1, self.span(ctx, seq)[1]):
            self.triggered()
            return super().seq_rm(ctx, seq, p0 + 1, p1)
        return super().seq_rm(ctx, seq, p0, p1)


class RollbackLies(Planted):
    """A rollback says true and does nothing. Trigger: seq_rm of a proper tail."""

    name = "rollback-lies"

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        self.reached()
        if is_tail(p0, p1, self.span(ctx, seq)[1]):
            self.triggered()
            return 1
        return super().seq_rm(ctx, seq, p0, p1)


class RollbackStale(Planted):
    """A rollback shows the right positions over the wrong values. Trigger: seq_rm of a proper tail that is done."""

    name = "rollback-stale"

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        self.reached()
        tail = is_tail(p0, p1, self.span(ctx, seq)[1])
        rc = super().seq_rm(ctx, seq, p0, p1)
        if tail and rc and Shim.seq_set(self, ctx, seq, 0, mauled(self.state(ctx, seq))):
            self.triggered()
        return rc


class RefusedRollbackScrambles(Planted):
    """A refused removal leaves the positions as they were, and other values behind them. Trigger: seq_rm of one
    sequence that holds something returns false."""

    name = "refused-rollback-scrambles"

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        self.reached()
        rc = super().seq_rm(ctx, seq, p0, p1)
        if rc == 0 and self.span(ctx, seq)[1] >= 0:
            own = self.state(ctx, seq)
            bad = mauled(own, 8)
            if bad != own and Shim.seq_set(self, ctx, seq, 0, bad):
                self.triggered()
        return rc


class WholeRemovalRefused(Planted):
    """A whole sequence is not removed, and seq_rm says so. Trigger: seq_rm of all of a sequence that is not empty."""

    name = "whole-removal-refused"

    def seq_rm(self, ctx: int, seq: int, p0: int, p1: int) -> int:
        self.reached()
        if p0 <= 0 and p1 < 0 and self.span(ctx, seq)[1] >= 0:
            self.triggered()
            return 0
        return super().seq_rm(ctx, seq, p0, p1)


class KeepForgets(Planted):
    """seq_keep removes nothing. Trigger: seq_keep while another sequence holds something."""

    name = "keep-forgets"

    def seq_keep(self, ctx: int, seq: int) -> None:
        self.reached()
        if set(self.live(ctx)) - {seq}:
            self.triggered()
        else:
            super().seq_keep(ctx, seq)


# --- isolation --------------------------------------------------------------------------------------------------------


class RestoreWrongSequence(Planted):
    """A restore goes into the next sequence. Trigger: a restore from memory while there are several sequences."""

    name = "restore-wrong-sequence"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        if self.n_seq > 1 and 0 <= seq < self.n_seq:
            self.triggered()
            seq = (seq + 1) % self.n_seq
        return super().seq_set(ctx, seq, flags, blob)


class Neighbour(AfterRestore, ABC):
    """Base of faults in a sequence that a restore does not name."""

    @abstractmethod
    def harm(self, ctx: int, seq: int) -> bool:
        """Make the neighbour wrong; False where that cannot be done."""

    def restored(self, ctx: int, seq: int) -> None:
        self.reached()
        others = [s for s in self.live(ctx) if s != seq]
        if others and self.harm(ctx, others[0]):
            self.triggered()


class TouchedNeighbour(Neighbour):
    """A restore cuts the last token off another sequence. Trigger: a restore while another holds two tokens or more."""

    name = "touched-neighbour"

    def harm(self, ctx: int, seq: int) -> bool:
        return self.drop_last(ctx, seq)


class NeighbourBytes(Neighbour):
    """A restore changes values of another sequence, whose positions stay. Trigger: a restore while another is live."""

    name = "neighbour-bytes"

    def harm(self, ctx: int, seq: int) -> bool:
        return Shim.seq_set(self, ctx, seq, 0, mauled(self.state(ctx, seq))) > 0


class SaveMoves(Planted):
    """A save cuts the last token off another sequence. Trigger: a save into memory while another holds two tokens or
    more."""

    name = "save-moves"

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        self.reached()
        answer = super().seq_get(ctx, seq, flags, room)
        others = [s for s in self.live(ctx) if s != seq]
        if others and self.drop_last(ctx, others[0]):
            self.triggered()
        return answer


class SwappedPositions(Planted):
    """The positions of two sequences are told the wrong way round. Trigger: both are live, and differ."""

    name = "swapped-positions"

    def positions(self, ctx: int, n_seq: int) -> list[tuple[int, int]]:
        self.reached()
        told = super().positions(ctx, n_seq)
        if n_seq > 1 and told[0] != told[1] and told[0][1] >= 0 and told[1][1] >= 0:
            self.triggered()
            told[0], told[1] = told[1], told[0]
        return told


# --- blobs ------------------------------------------------------------------------------------------------------------


class SizeLies(Planted):
    """The size query promises 8 bytes too many. Trigger: the size of a sequence that is not empty, for the host."""

    name = "size-lies"

    def seq_size(self, ctx: int, seq: int, flags: int) -> int:
        self.reached()
        size = super().seq_size(ctx, seq, flags)
        if not flags & ON_DEVICE and self.span(ctx, seq)[1] >= 0:
            self.triggered()
            return size + 8
        return size


class WrittenLies(Planted):
    """A save says that it wrote 4 bytes less than it did. Trigger: a save into memory."""

    name = "written-lies"

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        self.reached()
        n, blob = super().seq_get(ctx, seq, flags, room)
        if n > 4:
            self.triggered()
            n -= 4
        return n, blob


class ReadLies(Planted):
    """A restore says that it read 4 bytes less than it did. Trigger: an accepted restore from memory."""

    name = "read-lies"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        n = super().seq_set(ctx, seq, flags, blob)
        if n > 4:
            self.triggered()
            n -= 4
        return n


class SaveWavers(Planted):
    """A save differs from the one before it, with nothing in between. Trigger: a sequence is saved twice in a row."""

    name = "save-wavers"

    def setup(self) -> None:
        self.last: tuple[int, int, bytes] | None = None

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        self.reached()
        n, blob = super().seq_get(ctx, seq, flags, room)
        if not flags & ON_DEVICE and self.last == (seq, flags, blob):
            self.triggered()
            blob = blob[:-1] + bytes([blob[-1] ^ 1])
        self.last = (seq, flags, blob)
        return n, blob


class DoubleRestore(Planted):
    """Restoring twice is not restoring once. Trigger: the same host blob goes into the same sequence twice in a row."""

    name = "double-restore"

    def setup(self) -> None:
        self.last: tuple[int, int, bytes] | None = None

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        if not flags & ON_DEVICE and self.last == (seq, flags, blob):
            self.last = None
            return self.set_mauled(ctx, seq, flags, blob)
        self.last = (seq, flags, blob)
        return super().seq_set(ctx, seq, flags, blob)

    def decoded(self, ctx: int, pos: Sequence[int], seq: Sequence[int], aborting: bool, rc: int) -> int:
        self.last = None
        return rc


class WholeLosesSequence(Planted):
    """A restore of the whole context leaves one sequence empty. Trigger: it has two sequences or more."""

    name = "whole-loses-sequence"

    def all_set(self, ctx: int, blob: bytes) -> int:
        self.reached()
        rc = super().all_set(ctx, blob)
        live = self.live(ctx)
        if rc and len(live) > 1:
            self.triggered()
            Shim.seq_rm(self, ctx, live[-1], -1, -1)
        return rc


class TokensLost(Planted):
    """A session file does not give its tokens back. Trigger: a sequence is loaded from a file."""

    name = "tokens-lost"

    def seq_load_file(self, ctx: int, path: Path, seq: int, room: int) -> tuple[int, list[int]]:
        self.reached()
        rc, tokens = super().seq_load_file(ctx, path, seq, room)
        if rc and tokens:
            self.triggered()
            tokens = tokens[:-1]
        return rc, tokens


class FileTruncated(Planted):
    """A session file lacks its last 16 bytes. Trigger: a sequence is saved to a file."""

    name = "file-truncated"

    def seq_save_file(self, ctx: int, path: Path, seq: int, tokens: Sequence[int]) -> int:
        self.reached()
        n = super().seq_save_file(ctx, path, seq, tokens)
        if n > 16:
            self.triggered()
            os.truncate(path, n - 16)
        return n


# --- values -----------------------------------------------------------------------------------------------------------


def nudged(blob: bytes, by: float) -> bytes:
    """The blob with `by` added to one of its last float32, a value of the last layer; streams without cells may follow
    it."""
    at = len(blob) - 64
    (value,) = struct.unpack_from("<f", blob, at)
    return blob[:at] + struct.pack("<f", value + by) + blob[at + 4 :]


class SaveAltersValue(Planted):
    """A save writes one value wrong, and the restore of it puts the right one back, so that nothing but the saved state
    itself shows it. Trigger: a save into memory of a sequence that holds something, with F32 K/V."""

    name = "save-alters-value"

    def setup(self) -> None:
        self.right: dict[bytes, bytes] = {}

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        self.reached()
        n, blob = super().seq_get(ctx, seq, flags, room)
        if flags & ON_DEVICE or self.span(ctx, seq)[1] < 0:
            return n, blob
        self.triggered()
        bad = nudged(blob, 1.0)
        self.right[bad] = blob
        return n, bad

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        return super().seq_set(ctx, seq, flags, self.right.get(blob, blob))


class ExtensionLost(Planted):
    """A restore puts cells back without what they have besides their position, y and token of M-RoPE and n-gram models:
    rows and logits stay. Trigger: a restore from memory of cells that have them."""

    name = "extension-lost"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        bad = without_extensions(blob)
        if bad != blob and not flags & ON_DEVICE:
            self.triggered()
            blob = bad
        return super().seq_set(ctx, seq, flags, blob)


def without_extensions(blob: bytes) -> bytes:
    """The blob with y and token of every cell as they are in one that was never used; as it is where it has none."""
    try:
        tree, _ = parse(blob)
    except BadBlob:
        return blob
    out = bytearray(blob)
    for cell in (n for n in tree.walk() if n.last == "cell"):
        for node in cell.children:
            if node.last in ("y", "token"):
                struct.pack_into("<i", out, node.start, 0 if node.last == "y" else -1)
    return bytes(out)


class RecurrentNudged(Planted):
    """A restore puts one value of a recurrent state wrong, by less than logits show. Trigger: a restore from memory of
    a recurrent model's state."""

    name = "recurrent-nudged"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        if flags & ON_DEVICE or len(blob) < 64:
            return super().seq_set(ctx, seq, flags, blob)
        self.triggered()
        return super().seq_set(ctx, seq, flags, nudged(blob, 0.02))


# --- positions --------------------------------------------------------------------------------------------------------


class PositionsBackwards(Planted):
    """pos_min and pos_max are told the wrong way round. Trigger: they differ."""

    name = "positions-backwards"

    def positions(self, ctx: int, n_seq: int) -> list[tuple[int, int]]:
        self.reached()
        told = super().positions(ctx, n_seq)
        if any(lo != hi for lo, hi in told):
            self.triggered()
        return [(hi, lo) for lo, hi in told]


class DropLastCell(AfterRestore):
    """A restore loses the last position. Trigger: an accepted restore of two tokens or more."""

    name = "drop-last-cell"

    def restored(self, ctx: int, seq: int) -> None:
        self.reached()
        if self.drop_last(ctx, seq):
            self.triggered()


class SwallowedError(Planted):
    """A refused restore is reported as accepted. Trigger: a restore from memory is refused."""

    name = "swallowed-error"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        rc = super().seq_set(ctx, seq, flags, blob)
        if rc == 0:
            self.triggered()
            return len(blob)
        return rc


class CopyTruncated(Planted):
    """A copy lacks its last token. Trigger: seq_cp into another sequence gives two tokens or more."""

    name = "copy-truncated"

    def seq_cp(self, ctx: int, src: int, dst: int, p0: int, p1: int) -> None:
        self.reached()
        super().seq_cp(ctx, src, dst, p0, p1)
        if src != dst and self.drop_last(ctx, dst):
            self.triggered()


class ShiftLost(Planted):
    """seq_add moves nothing. Trigger: a shift by another number than 0 of a sequence that is not empty."""

    name = "shift-lost"

    def seq_add(self, ctx: int, seq: int, p0: int, p1: int, delta: int) -> None:
        self.reached()
        if delta and self.span(ctx, seq)[1] >= 0:
            self.triggered()
        else:
            super().seq_add(ctx, seq, p0, p1, delta)


class ClearKeeps(Planted):
    """Clearing clears nothing. Trigger: a clear while some sequence holds something."""

    name = "clear-keeps"

    def clear(self, ctx: int, data: bool) -> None:
        self.reached()
        if self.live(ctx):
            self.triggered()
        else:
            super().clear(ctx, data)


# --- purity -----------------------------------------------------------------------------------------------------------


class ImpureQuery(Planted):
    """Asking for a size changes the next output row by one bit, the least that there is. Trigger: an output row after
    the size of the whole context was asked for."""

    name = "impure-query"

    def setup(self) -> None:
        self.asked = False

    def all_size(self, ctx: int) -> int:
        self.reached()
        self.asked = True
        return super().all_size(ctx)

    def logits(self, ctx: int, i: int, n_vocab: int) -> bytes | None:
        row = super().logits(ctx, i, n_vocab)
        if row is not None and self.asked:
            self.asked = False
            self.triggered()
            row = bytes([row[0] ^ 1]) + row[1:]
        return row


# --- rows -------------------------------------------------------------------------------------------------------------


class Rows(AfterRestore):
    """Base of faults in the output rows of a sequence that was restored. `age` counts its rows since then."""

    def setup(self) -> None:
        super().setup()
        self.row_seq: list[int] = []
        self.age: dict[int, int] = {}

    def restored(self, ctx: int, seq: int) -> None:
        super().restored(ctx, seq)
        self.age[seq] = 0

    def decoded(self, ctx: int, pos: Sequence[int], seq: Sequence[int], aborting: bool, rc: int) -> int:
        self.row_seq = list(seq)
        return rc

    def logits(self, ctx: int, i: int, n_vocab: int) -> bytes | None:
        row = super().logits(ctx, i, n_vocab)
        seq = self.row_seq[i]
        if row is None or seq not in self.fresh:
            return row
        self.age[seq] += 1
        return self.changed(row, self.age[seq])

    def changed(self, row: bytes, age: int) -> bytes:
        """The row as it is told; `age` is 1 for the first after the restore."""
        return row


def _swap_best(row: bytes) -> bytes:
    x = array("f", row)
    best = x.index(max(x))
    second = max((v, j) for j, v in enumerate(x) if j != best)[1]
    x[best], x[second] = x[second], x[best]
    return x.tobytes()


class HiddenDrift(Rows):
    """Embedding rows are off in one entry. Trigger: an embedding row of a sequence after its restore."""

    name = "hidden-drift"

    def hidden(self, ctx: int, i: int, n_embd: int) -> bytes | None:
        row = super().hidden(ctx, i, n_embd)
        if row is None or self.row_seq[i] not in self.fresh:
            return row
        self.triggered()
        x = array("f", row)
        x[0] += 0.5
        return x.tobytes()


class DraftGreedy(Rows):
    """The two best tokens are told the wrong way round. Trigger: a row of a restored sequence, the first one after the
    restore excepted."""

    name = "draft-greedy"

    def changed(self, row: bytes, age: int) -> bytes:
        if age == 1:
            return row
        self.triggered()
        return _swap_best(row)


class FirstSwapped(Rows):
    """The two best tokens are told the wrong way round. Trigger: the first row after a restore."""

    name = "first-swapped"

    def changed(self, row: bytes, age: int) -> bytes:
        if age > 1:
            return row
        self.triggered()
        return _swap_best(row)


class LogitsDrift(Rows):
    """The worst logit is 0.5 too large, which changes no token. Trigger: a row of a sequence after its restore."""

    name = "logits-drift"

    def changed(self, row: bytes, age: int) -> bytes:
        self.triggered()
        x = array("f", row)
        x[x.index(min(x))] += 0.5
        return x.tobytes()


class StaleSnapshot(Planted):
    """A save gives the blob of the first save of its sequence. Trigger: a later save of another state, as long."""

    name = "stale-snapshot"

    def setup(self) -> None:
        self.first: dict[tuple[int, int], bytes] = {}

    def seq_get(self, ctx: int, seq: int, flags: int, room: int) -> tuple[int, bytes]:
        self.reached()
        n, blob = super().seq_get(ctx, seq, flags, room)
        if not flags & ON_DEVICE:
            old = self.first.setdefault((seq, flags), blob)
            if len(old) == len(blob) and old != blob:
                self.triggered()
                blob = old
        return n, blob


class RestoredValues(Planted):
    """A restore gives the positions back but not all values. Trigger: a host restore of a blob with a whole sequence
    in it."""

    name = "restored-values"

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        if not flags & (ON_DEVICE | PARTIAL):
            return self.set_mauled(ctx, seq, flags, blob)
        return super().seq_set(ctx, seq, flags, blob)


class SkipRecurrentLayer(Planted):
    """A restore leaves the recurrent state of the last layer zero. Trigger: a host restore on a recurrent or hybrid
    memory, whose blob ends with recurrent states."""

    name = "skip-recurrent-layer"

    recurrent = False

    def model_facts(self, model: int) -> dict[str, int]:
        facts = super().model_facts(model)
        self.recurrent = bool(facts["recurrent"] or facts["hybrid"])
        return facts

    def seq_set(self, ctx: int, seq: int, flags: int, blob: bytes) -> int:
        self.reached()
        if self.recurrent and not flags & ON_DEVICE:
            return self.set_mauled(ctx, seq, flags, blob, 8)
        return super().seq_set(ctx, seq, flags, blob)


def _faults(base: type[Planted]) -> Iterator[type[Planted]]:
    for cls in base.__subclasses__():
        if cls.name:
            yield cls
        yield from _faults(cls)


FAULTS: dict[str, type[Planted]] = {cls.name: cls for cls in _faults(Planted)}
"""All planted faults by name."""
