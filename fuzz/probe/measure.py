"""What the probe measures, as data, and how two runs of one position are compared.

A run goes to a checkpoint (or past it and back) and then a few tokens further on, along the same text in every run, so
that row is compared with row. Its numbers are judged against the run that went straight on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from oracles.band import FLOOR_ULPS, SAFETY
from subjects.scenario import ContextParams, DriverParams

Floats = npt.NDArray[np.float64]

Route = Literal["host", "host-partial", "device", "device-partial", "rollback", "replay", "file"]
ROUTES: tuple[Route, ...] = ("host", "host-partial", "device", "device-partial", "rollback", "replay", "file")
ABOUT: dict[str, str] = {
    "host": "whole sequence to host memory (flags 0); another prompt in its place; restored",
    "host-partial": "PARTIAL_ONLY to host memory (flags 1); the sequence goes on; restored, its tail cut",
    "device": "ON_DEVICE (flags 2), otherwise as host",
    "device-partial": "PARTIAL_ONLY and ON_DEVICE (flags 3), otherwise as host-partial",
    "rollback": "a verify batch goes past the position; seq_rm back to it, nothing saved",
    "replay": "nothing saved; another prompt in its place; cleared and processed again",
    "file": "session files (llama_state_seq_save_file), otherwise as host",
}
FLAGS: dict[str, int] = {"host": 0, "host-partial": 1, "device": 2, "device-partial": 3, "file": 0}

Arm = Literal["straight", "cells", "split", "left out", "restored", "only"]
"""straight: from a clean context on to the position and further. cells, split: the same behind the cells of another
sequence, and with the last token in a batch of its own; what they differ by from `straight` is honest. left out,
restored: by a route, with the driver's state not put back and put back. only: by a route, without a driver."""
BASELINE: tuple[Arm, ...] = ("straight", "cells", "split")
AFTER: tuple[Arm, ...] = ("left out", "restored")

How = Literal["native", "kept", "accept(0)", "new driver", ""]
HOW: dict[str, str] = {
    "native": "the driver's own get_state and set_state",
    "kept": "the driver offers no state, so it was kept from the other work, which went through a second driver on the "
    "same contexts: what a driver that saves all its state would give",
    "accept(0)": "accept(seq, 0) of the driver, as after a verification that took no draft",
    "new driver": "a driver made anew before the prompt is processed again",
}


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a child needs to know of the subject. other: the polluting prompt. depth: tokens that a rollback undoes."""

    shim: str
    drivers: str = ""
    model: str
    draft: str = ""
    n_gpu_layers: int = 0
    params: ContextParams
    driver: DriverParams | None = None
    prompt: list[int]
    other: list[int]
    rounds: int
    depth: int
    repeat: int


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """What one child is to run: (position, arm) after (position, arm); route "" is the baseline. texts: the text that a
    position goes on with. Runs are written into `folder`."""

    plan: Plan
    route: str
    todo: list[tuple[int, Arm]]
    texts: dict[int, list[int]]
    folder: str


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a child. at: the run goes on, with so many tokens decoded."""

    what: Literal["facts", "begin", "at", "run", "unfit", "failed"]
    position: int = -1
    arm: str = ""
    text: str = ""
    facts: dict[str, int] = {}
    tokens: int = 0


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """What a run gave.

    hidden: the row that the first drafted token is paired with. vectors: logits of the draft context's output rows, for
    each round. drafts: the tokens of each round. target: the target's logits along the text. sizes: bytes of a
    checkpoint (target, draft, driver; -1: the driver offers none). how: by what the driver's state was put back.
    trouble: what ended the drafting. log: warnings and errors of the library.
    """

    text: list[int] = []
    hidden: bytes = b""
    vectors: list[list[bytes]] = []
    drafts: list[list[int]] = []
    target: list[bytes] = []
    sizes: tuple[int, int, int] = (0, 0, 0)
    save_ms: list[float] = []
    restore_ms: list[float] = []
    how: How = ""
    trouble: str = ""
    notes: list[str] = []
    log: list[str] = []


def run_file(route: str, position: int, arm: str) -> str:
    """Name of the file that a child leaves a run in."""
    return f"{route or 'baseline'}-{position}-{arm.replace(' ', '-')}.run"


class Error(msgspec.Struct, frozen=True):
    """Distance of rows: largest absolute difference, and squared difference over squared size."""

    max_abs: float
    nmse: float


class Compared(msgspec.Struct, frozen=True):
    """A run against the one that went straight on. None: there is nothing of the kind.

    changed, top1: draft-logit vectors outside the band, and those with another top token, of `vectors`. accepted,
    before: drafted tokens that the target confirms in this run and in the straight one, of `drafted`. target_changed,
    target_top1: rows of the target outside the band, and those with another top token, of `rows`.
    """

    hidden: Error | None
    vectors: int
    changed: int
    top1: int
    before: int
    accepted: int
    drafted: int
    target: Error
    target_changed: int
    target_top1: int
    rows: int


class Noise(msgspec.Struct, frozen=True):
    """Largest absolute differences of honest runs, and the sizes of the rows themselves."""

    hidden: float = 0.0
    draft: float = 0.0
    target: float = 0.0
    draft_scale: float = 0.0
    target_scale: float = 0.0

    @property
    def draft_band(self) -> float:
        """A draft-logit vector that is farther off has changed."""
        return max(SAFETY * self.draft, FLOOR_ULPS * float(np.finfo(np.float32).eps) * self.draft_scale)

    @property
    def target_band(self) -> float:
        """A row of the target that is farther off has changed."""
        return max(SAFETY * self.target, FLOOR_ULPS * float(np.finfo(np.float32).eps) * self.target_scale)


def floats(data: bytes) -> Floats:
    """Stored float32 as numbers to count with."""
    return np.frombuffer(data, np.float32).astype(np.float64)


def error(got: Sequence[bytes], wanted: Sequence[bytes]) -> Error | None:
    """Distance of rows from those that they should be, None where there are none to compare. Rows that are missing, of
    another width or not finite are infinitely far."""
    if not any(wanted):
        return None
    if [len(x) for x in got] != [len(x) for x in wanted]:
        return Error(float("inf"), float("inf"))
    a, b = floats(b"".join(got)), floats(b"".join(wanted))
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        return Error(float("inf"), float("inf"))
    size = float(np.square(b).sum())
    off = float(np.square(a - b).sum())
    return Error(float(np.abs(a - b).max()), off / size if size else (float("inf") if off else 0.0))


def top(row: bytes) -> int:
    """The greedy token of a row of logits."""
    return int(floats(row).argmax())


def accepted(run: Run) -> int:
    """Drafted tokens that greedy decoding of the run's own target confirms, over all rounds."""
    greedy = [top(r) for r in run.target]
    n = 0
    for i, draft in enumerate(run.drafts):
        for j, token in enumerate(draft):
            if i + j >= len(greedy) or token != greedy[i + j]:
                break
            n += 1
            # the next row was computed behind the text, which may be another token where this target has gone wrong
            if i + j + 1 >= len(run.text) or run.text[i + j + 1] != token:
                break
    return n


def compare(run: Run, straight: Run, noise: Noise) -> Compared:
    """Judge a run by the one that went straight on."""
    pairs = [p for a, b in zip(run.vectors, straight.vectors, strict=True) for p in zip(a, b, strict=False)]
    vectors = sum(map(len, straight.vectors))
    missing = vectors - len(pairs)
    rows = list(zip(run.target, straight.target, strict=True))
    target = error(run.target, straight.target)
    assert target is not None  # every run decodes at least one token
    return Compared(
        hidden=error([run.hidden], [straight.hidden]),
        vectors=vectors,
        changed=missing + sum(_off(a, b) > noise.draft_band for a, b in pairs),
        top1=missing + sum(top(a) != top(b) for a, b in pairs),
        before=accepted(straight),
        accepted=accepted(run),
        drafted=sum(map(len, straight.drafts)),
        target=target,
        target_changed=sum(_off(a, b) > noise.target_band for a, b in rows),
        target_top1=sum(top(a) != top(b) for a, b in rows),
        rows=len(rows),
    )


def _off(a: bytes, b: bytes) -> float:
    found = error([a], [b])
    return found.max_abs if found else 0.0


def noise(straight: Run, others: Sequence[Run]) -> Noise:
    """What honest runs of a position differ by. In each round draft logits count as long as they come from the same
    tokens."""
    hidden = draft = target = 0.0
    for other in others:
        hidden = max(hidden, _off(other.hidden, straight.hidden))
        target = max([target, *(_off(a, b) for a, b in zip(other.target, straight.target, strict=True))])
        for i, (a, b) in enumerate(zip(other.vectors, straight.vectors, strict=True)):
            for j, (x, y) in enumerate(zip(a, b, strict=False)):
                if other.drafts[i][:j] == straight.drafts[i][:j]:
                    draft = max(draft, _off(x, y))
    return Noise(hidden, draft, target, _scale([v for r in straight.vectors for v in r]), _scale(straight.target))


def _scale(rows: Sequence[bytes]) -> float:
    return max((float(np.abs(floats(r)).max()) for r in rows), default=0.0)


def largest(found: Sequence[Noise]) -> Noise:
    """The noise of several positions, which is one: a run or two at a position seldom show the most that there is."""
    return Noise(*(max(getattr(n, f) for n in found) for f in Noise.__struct_fields__))
