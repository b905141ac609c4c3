"""A stage: a context that a setting's program has led up to, in which malformed states are tried one after the other.

After each of them: the neighbour is the same to the bit and goes on as before; the victim of a refusal is what it was
or empty, the same in every part; a good restore gives exactly the good state. These checks are quick and coarse. What
they complain of is handed to the ordinary oracles as an ordinary program; no verdict rests on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fuzz.harm import Target, half_reached, streams_of
from fuzz.targets.draw import BAD, DONOR, EMPTY, GOOD, NEIGHBOUR, OTHER, Drawn, Setting, lead_up
from fuzz.traits import Traits
from subjects.runner import Runner
from subjects.scenario import ON_DEVICE, PARTIAL, ContextParams, ModelRef, Scenario, token
from subjects.shim import Shim
from subjects.state.canon import Reader, Sequence, differences
from subjects.state.edits import OWN, Source, assemble, pieces_of
from subjects.state.follow import Plan, Reached, follow
from subjects.state.parse import BadBlob
from subjects.trace import Facts, Floats, Row, Step

HEADER = 8
"""Bytes of a sequence's blob that name it: magic and id."""
STEPPED_ROUND = (
    "device-corrupt",
    "device-foreign",
    "device-older",
    "half-restore",
    "recurrent-cells",
    "stuck-cell",
    "file-cut",
)
"""The known faults (fuzz/avoid.py) that a stage knows how to step round."""
CLOSE = 1e-2
"""Logits may differ by so much: honest ones do by 4e-5 at most, wrong states by 1 and more (design.md)."""


class Quiet:
    """A sink for what leads up to a stage."""

    def facts(self, facts: Facts, params: ContextParams) -> None:
        """See subjects.runner.Sink."""

    def begin(self, op: int, args: list[int]) -> None:
        """See subjects.runner.Sink."""

    def batch(self, rows: list[Row]) -> None:
        """See subjects.runner.Sink."""

    def code(self, rc: int, first: int) -> None:
        """See subjects.runner.Sink."""

    def row(self, logits: bytes, hidden: bytes) -> None:
        """See subjects.runner.Sink."""

    def state(self, data: bytes) -> None:
        """See subjects.runner.Sink."""

    def end(self, step: Step) -> None:
        """See subjects.runner.Sink."""


class Complaint(Exception):
    """A check failed; `symptom` is without numbers."""

    def __init__(self, symptom: str, text: str):
        super().__init__(text)
        self.symptom = symptom


class Stage:
    """See the module. Raises Refused (subjects.runner) where llama.cpp refuses the parameters."""

    def __init__(self, shim: Shim, handle: int, traits: Traits, setting: Setting):
        self.shim, self.setting, self.traits = shim, setting, traits
        params, ops = lead_up(setting, traits)
        self.runner = Runner(shim, handle, Quiet(), lambda p: shim.new_context(handle, p))
        self.runner.run(Scenario(model=ModelRef(), params=params, ops=ops))
        self.ctx, self.n_seq = self.runner.ctx, self.runner.n_seq
        self.n_vocab = self.runner.facts.n_vocab
        self.source = Source(self.runner.slots[BAD].blob)
        self._sources: dict[int, Source] = {}
        donor = self.runner.slots.get(DONOR)
        # what a good blob of this kind looks like in this very context
        like = Source(donor.blob) if setting.kind == "other-params" and donor else self.source
        self._plan = Plan(like.tree) if like.tree is not None else None
        self.good = self.runner.slots[GOOD].blob
        self._room = 2 * len(self.good)
        self._next = [token(1, OTHER, self.n_vocab)], [OTHER], [NEIGHBOUR], [1]
        self._reader = Reader()
        self._fd = os.memfd_create("redraft-state") if setting.medium == "file" else -1
        self._empty = self._get(EMPTY)[HEADER:]
        self.good_states: list[bytes] = []

    def settle(self) -> None:
        """See what is right in this context, from now on. Raises Complaint where good states do not even come back."""
        # The first restore may put cells elsewhere; from then on everything comes back to the same places.
        self._good_again()
        self.good_states = [self._get(s) for s in range(self.n_seq)]
        self._see_saved()
        self._row = self._next_row()
        self._put_neighbour_back()
        # a decode may have pushed cells out of a window
        self._good_again()
        self._see_good("good-differs", "a good restore does not give the same twice")
        self._row = self._next_row()
        self._put_neighbour_back()

    def close(self) -> None:
        """Free the context."""
        self.shim.free_context(self.ctx)
        if self._fd >= 0:
            os.close(self._fd)

    def _get(self, seq: int) -> bytes:
        # asking for the size takes as long as saving; a state for which there is no room is 0 bytes
        n, data = self.shim.seq_get(self.ctx, seq, 0, self._room)
        return data if n else self.shim.seq_get(self.ctx, seq, 0, self.shim.seq_size(self.ctx, seq, 0))[1]

    def source_of(self, slot: int) -> Source | None:
        """The blob in a slot, with its grammar."""
        if slot not in self.runner.slots:
            return None
        if slot not in self._sources:
            self._sources[slot] = Source(self.runner.slots[slot].blob)
        return self._sources[slot]

    def changed(self, drawn: Drawn) -> bytes:
        """The malformed state."""
        pieces = pieces_of(self.source, drawn.edits, self.source_of)
        return assemble(pieces, lambda n: self.source.data if n == OWN else self.runner.slots[n].blob)

    def reached(self, data: bytes) -> Reached:
        """How far it would be read."""
        return follow(data, self._plan) if self._plan is not None else Reached()

    def half_known(self, data: bytes) -> bool:
        """Whether a refusal of it leaves the target half restored, as is known."""
        s = self.setting
        partial, streams = bool(s.flags & PARTIAL), streams_of(s.params) > 1
        return half_reached(self.reached(data), Target(self.traits, s.whole, partial, s.medium, streams))

    # --- trying -------------------------------------------------------------------------------------------------------

    def attempt(self, data: bytes, *, tolerate_half: Callable[[], bool]) -> bool:
        """Restore a malformed state and look at what it did; whether it was taken. Raises Complaint.

        tolerate_half: asked only where a refusal has left the target neither as it was nor empty.
        """
        whole = self.setting.whole
        before = [self._get(s) for s in range(self.n_seq)] if whole else self.good_states[:1]
        taken = self._restore(data)
        after = [self._get(s) for s in range(len(before))]
        if not taken and not self._kept_or_emptied(before, after) and not tolerate_half():
            raise Complaint("half", "a refused restore left its target neither as it was nor empty")
        if not whole:
            if self._get(NEIGHBOUR) != self.good_states[NEIGHBOUR]:
                raise Complaint("neighbour-bytes", "the state of another sequence is not what it was")
            self._goes_on()
        self._good_again()
        self._see_good("good-differs", "a good restore afterwards does not give the good state")
        if whole:
            self._goes_on()
        return taken > 0

    def _goes_on(self) -> None:
        row = self._next_row()
        self._put_neighbour_back()
        if not np.abs(row - self._row).max() <= CLOSE:
            raise Complaint("neighbour-row", "another sequence does not go on as before")

    def _see_saved(self) -> None:
        """See that the good state holds what is in it; of a window and of compressed rows not all comes back. Raises
        Complaint."""
        saved = self._reader.canonical(self.good)
        if self.traits.window or self.traits.any_rollback:
            return
        for seq in range(self.n_seq) if self.setting.whole else (0,):
            now, good = self._reader.canonical(self.good_states[seq])[0], saved.get(seq, Sequence())
            if differences(now, good) and (now.rows or good.rows):
                raise Complaint("good-differs", "a good restore does not give what was saved")

    def _see_good(self, symptom: str, text: str) -> None:
        """See that the victim, or of a whole context every sequence, is what is right. Raises Complaint."""
        for seq in range(self.n_seq if self.setting.whole else 1):
            now, good = self._get(seq), self.good_states[seq]
            if now != good and not self._same(now, good):
                raise Complaint(symptom, text)

    def _restore(self, data: bytes) -> int:
        s = self.setting
        if s.medium == "buffer":
            if s.whole:
                return self.shim.all_set(self.ctx, data)
            return self.shim.seq_set(self.ctx, 0, s.flags, data)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)
        path = Path(f"/proc/self/fd/{self._fd}")
        if s.whole:
            return self.shim.all_load_file(self.ctx, path, 64)[0]
        return self.shim.seq_load_file(self.ctx, path, 0, 64)[0]

    def _kept_or_emptied(self, before: list[bytes], after: list[bytes]) -> bool:
        """Whether all sequences are as they were, or all empty."""
        return all(a == b or self._same(a, b) for a, b in zip(after, before, strict=True)) or all(
            a[HEADER:] == self._empty or self._blank(a) for a in after
        )

    def _blank(self, data: bytes) -> bool:
        return self._same(data, bytes(data[:HEADER]) + self._empty)

    def _same(self, a: bytes, b: bytes) -> bool:
        """Equal states, whatever the order of cells."""
        try:
            one, other = self._reader.canonical(a)[0], self._reader.canonical(b)[0]
        except BadBlob:
            return False
        return not differences(one, other)

    def _next_row(self) -> Floats:
        """The neighbour's next row."""
        self.shim.decode(self.ctx, *self._next)
        row = self.shim.logits(self.ctx, 0, self.n_vocab)
        if row is None:
            raise Complaint("neighbour-row", "another sequence does not go on")
        return np.frombuffer(row, np.float32)

    def _put_neighbour_back(self) -> None:
        good = self.good_states[NEIGHBOUR]
        if self.shim.seq_set(self.ctx, NEIGHBOUR, 0, good) != len(good):
            raise Complaint("neighbour-row", "another sequence does not come back")

    def _good_again(self) -> None:
        if self.setting.whole:
            taken = self.shim.all_set(self.ctx, self.good)
        else:
            taken = self.shim.seq_set(self.ctx, 0, 0, self.good)
        if taken != len(self.good):
            raise Complaint("good-refused", "a good restore afterwards is refused")


def never_tried(avoid: frozenset[str], setting: Setting) -> bool:
    """Whether a known fault is in the way of all states of a setting."""
    return setting.kind in ("device-older", "device-foreign") and setting.kind in avoid


def steps_round(avoid: frozenset[str], stage: Stage, data: bytes) -> bool:
    """Whether a known fault is in the way of a malformed state, by what would be read of it."""
    s, changed = stage.setting, data != stage.source.data
    if s.flags & ON_DEVICE and changed and "device-corrupt" in avoid:
        return True
    reached = stage.reached(data)
    # a whole context's state may well have several
    if "recurrent-cells" in avoid and 1 < reached.recurrent <= stage.n_seq and not s.whole:
        return True
    if "stuck-cell" in avoid and reached.stuck:
        return True
    return s.medium == "file" and changed and "file-cut" in avoid and (
        reached.ended or len(data) < len(stage.source.data)
    )  # fmt: skip
