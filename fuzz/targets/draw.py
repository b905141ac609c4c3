"""From a fuzzer's bytes to what is tried: a model, a setting (the program that leads up to a malformed state), edits.

libFuzzer's own mutations work on the bytes; the structure is here, in what they are read as, because a custom mutator
is not called under the preloaded runtime. Bytes that are missing count as 0, the simplest choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from fuzz.damage import draw_edits
from fuzz.models import Model
from fuzz.traits import Traits
from subjects.scenario import (
    ON_DEVICE,
    PARTIAL,
    AnyOp,
    BlobEdit,
    ContextParams,
    Corrupt,
    Decode,
    Edge,
    Medium,
    Part,
    Reopen,
    Restore,
    RestoreAll,
    Save,
    SaveAll,
    Scenario,
    SeqRm,
)

VICTIM, NEIGHBOUR, EMPTY = 0, 1, 2
"""Sequences: the one that is restored into, one with other content that must not notice, one that holds nothing."""
BAD, DONOR, GOOD, NEWER, ELSEWHERE = range(5)
"""Slots: the state that is changed, one that stretches are taken from, one that is restored last, a later state, and
one that stretches are taken from which is on the device where the first is not, and the other way round."""
SAVED, MORE, OTHER = 20, 2, 7
"""Tokens that the victim holds when it is saved, that it decodes after that, and that the neighbour holds."""

Kind = Literal["whole", "partial", "device", "device-partial", "device-older", "device-foreign", "other-params"]
SEQ_KINDS: tuple[Kind, ...] = (
    "whole", "partial", "other-params", "device", "device-partial", "device-older", "device-foreign",
)  # fmt: skip
FILE_KINDS: tuple[Kind, ...] = ("whole", "other-params")


class Bytes:
    """Numbers from a fuzzer's bytes."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def below(self, n: int) -> int:
        """A number from 0 up to, but without, n."""
        if n <= 1:
            return 0
        size = 1 if n <= 256 else 4
        part = self.data[self.at : self.at + size]
        self.at += size
        return int.from_bytes(part, "little") % n


@dataclass(frozen=True)
class Setting:
    """What leads up to the malformed state. whole: a whole context's."""

    params: ContextParams
    kind: Kind = "whole"
    medium: Medium = "buffer"
    whole: bool = False

    @property
    def flags(self) -> int:
        """Of the save that is changed."""
        return {"partial": PARTIAL, "device-partial": ON_DEVICE | PARTIAL}.get(
            self.kind, ON_DEVICE if self.kind.startswith("device") else 0
        )


@cache
def variants(traits: Traits) -> tuple[ContextParams, ...]:
    """The context parameters that are tried."""
    found = [ContextParams(n_seq_max=3), ContextParams(n_seq_max=3, kv_unified=True)]
    if traits.memory != "recurrent":
        found += [
            ContextParams(n_seq_max=3, flash_attn=True),
            ContextParams(n_seq_max=3, type_k="f16", type_v="f16"),
            ContextParams(n_seq_max=4),
        ]
    if traits.rollback:
        found.append(ContextParams(n_seq_max=3, n_rs_seq=2))
    if traits.window:
        found.append(ContextParams(n_seq_max=3, swa_full=True))
    return tuple(found)


def other_than(params: ContextParams, traits: Traits) -> ContextParams:
    """Parameters whose blobs do not fit."""
    all_of = variants(traits)
    return all_of[(all_of.index(params) + 1) % len(all_of)]


def _feed(seq: int, n: int, stream: int = 0) -> Decode:
    return Decode(parts=(Part(seq=seq, n=n, stream=stream),))


def _save(s: Setting, seq: int, slot: int) -> AnyOp:
    if s.whole:
        return SaveAll(slot=slot, medium=s.medium)
    return Save(seq=seq, slot=slot, flags=s.flags, medium=s.medium)


def donors_of(s: Setting) -> tuple[int, ...]:
    """The slots that stretches may be taken from. A second save on the device would make the changed handle another."""
    if s.kind in ("device-older", "device-foreign"):
        return ()
    if s.whole or s.medium == "file":
        return (DONOR,)
    return (ELSEWHERE,) if s.flags & ON_DEVICE else (DONOR, ELSEWHERE)


def lead_up(s: Setting, traits: Traits) -> tuple[ContextParams, tuple[AnyOp, ...]]:
    """The first context's parameters and the program up to the change of slot BAD: victim and neighbour decoded, all
    slots saved, the victim two tokens further."""
    feeds: list[AnyOp] = [_feed(VICTIM, SAVED), _feed(NEIGHBOUR, OTHER, 1)]
    good: AnyOp = SaveAll(slot=GOOD) if s.whole else Save(seq=VICTIM, slot=GOOD)
    donors = [_save(s, NEIGHBOUR, DONOR)] if DONOR in donors_of(s) else []
    if ELSEWHERE in donors_of(s):
        donors.append(Save(seq=NEIGHBOUR, slot=ELSEWHERE, flags=s.flags ^ ON_DEVICE))
    bad = _save(s, VICTIM, BAD)
    first, more = s.params, _feed(VICTIM, MORE, 2)
    if s.kind == "device-older":
        ops = [*feeds, bad, more, Save(seq=VICTIM, slot=NEWER, flags=s.flags), good]
    elif s.kind in ("device-foreign", "other-params"):
        if s.kind == "other-params":
            first = other_than(s.params, traits)
        ops = [*feeds, bad, Reopen(params=s.params), *feeds, *donors, good, more]
    else:
        ops = [*feeds, *donors, bad, good, more]
    return first, tuple(ops)


def program(model: Model, s: Setting, edits: tuple[BlobEdit, ...]) -> Scenario:
    """The whole program: the change, its restore, and a good restore after it."""
    params, ops = lead_up(s, model.traits)
    change: list[AnyOp] = [Corrupt(slot=BAD, edits=edits)] if edits else []
    # saved in between, where what a refusal left can be seen part by part
    left = Save(seq=VICTIM, slot=NEWER)
    if s.whole:
        tail: list[AnyOp] = [RestoreAll(slot=BAD), left, RestoreAll(slot=GOOD)]
    else:
        # a partial state goes onto its own prefix; what lies behind is the caller's to cut
        cut = [SeqRm(seq=VICTIM, lo=Edge(at="start", d=SAVED))] if s.flags & PARTIAL and model.traits.parts else []
        tail = [Restore(seq=VICTIM, slot=BAD), *cut, left, Restore(seq=VICTIM, slot=GOOD)]
    return Scenario(model=model.ref, params=params, ops=(*ops, *change, *tail))


@dataclass(frozen=True)
class Drawn:
    """What an input stands for."""

    model: Model
    setting: Setting
    edits: tuple[BlobEdit, ...]

    def scenario(self) -> Scenario:
        """As an ordinary program."""
        return program(self.model, self.setting, self.edits)


def draw(data: bytes, models: list[Model], *, whole: bool, medium: Medium) -> Drawn:
    """What the bytes of an input stand for."""
    b = Bytes(data)
    model = models[b.below(len(models))]
    traits = model.traits
    params = variants(traits)[b.below(len(variants(traits)))]
    kinds = SEQ_KINDS if medium == "buffer" and not whole else FILE_KINDS
    kind = kinds[b.below(len(kinds))]
    setting = Setting(params, kind, medium, whole)
    # an older handle, or one of another context, is malformed as it is
    plain = kind in ("device-older", "device-foreign", "other-params") and b.below(2) == 0
    others = donors_of(setting)
    edits = () if plain else draw_edits(b.below, traits, whole=whole, medium=medium, others=others)
    return Drawn(model, setting, edits)
