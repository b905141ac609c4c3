"""Which driver goes with which models, by what their files say: a driver that does not fit ends the process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from fuzz.probe.header import BadHeader, Many, Value, read
from subjects.scenario import (
    Accept,
    Begin,
    Checkpoint,
    Decode,
    DriverKind,
    DriverParams,
    Mangle,
    Propose,
    Rewind,
    Scenario,
    Verify,
)

_CACHE = 8  # what ngram-cache drafts, whatever is asked
_NGRAM = range(1, 1025)  # what llama.cpp's own --spec-ngram-size-n and -m take
_NEEDS_DRIVER = (Propose, Verify, Accept, Checkpoint, Rewind, Mangle, Begin)


class Misfit(ValueError):
    """A file that is no model, or a driver that cannot work with these models; the message says what to do."""


class Gguf(NamedTuple):
    """What is read from a model's file before anything loads it."""

    path: Path
    label: str
    architecture: str
    n_vocab: int
    nextn: int
    vocabulary: str
    width: int
    takes: int
    """as a draft: how wide the target's hidden rows must be"""


def look(path: Path, label: str = "") -> Gguf:
    """What a file says of its model. Raises Misfit."""
    try:
        said = read(path)
    except (BadHeader, OSError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise Misfit(f"{path.name} cannot be read as a GGUF file: {why}") from None
    arch = str(said.get("general.architecture", "?"))
    texts = said.get("tokenizer.ggml.tokens")
    n_vocab = texts.n if isinstance(texts, Many) else _whole(said, f"{arch}.vocab_size")
    nextn = _whole(said, f"{arch}.nextn_predict_layers")
    vocabulary = str(said.get("tokenizer.ggml.model", "no_vocab"))
    width = _whole(said, f"{arch}.embedding_length")
    takes = _whole(said, f"{arch}.target_hidden_size") or _whole(said, f"{arch}.embedding_length_out") or width
    return Gguf(path, label or path.name, arch, n_vocab, nextn, vocabulary, width, takes)


def _whole(said: dict[str, Value], key: str) -> int:
    value = said.get(key, 0)
    # a number for each layer, or one for all
    numbers = value.values if isinstance(value, Many) else (value,)
    return max((int(x) for x in numbers if not isinstance(x, str)), default=0)


def check(kind: DriverKind, model: Gguf, draft: Gguf | None) -> None:
    """Raises Misfit where a driver of this kind cannot work with these models."""
    if kind.startswith("ngram"):
        if draft:
            raise Misfit(f"{kind} drafts from the text alone and has no use for a --draft; leave it out")
        return
    if kind == "draft-mtp":
        drafts = draft or model
        if not drafts.nextn:
            raise Misfit(
                f"{drafts.label} has no NextN layers ({drafts.architecture}.nextn_predict_layers), and draft-mtp "
                "drafts with those; name a --draft that has some, or another --driver"
            )
        of = drafts.architecture.removesuffix("-assistant")
        if of not in (drafts.architecture, model.architecture):
            raise Misfit(f"{drafts.label} looks into the memory of a {of} model, and {model.label} is none")
        _widths(kind, model, drafts)
        return
    if draft is None:
        raise Misfit(f"{kind} needs the draft's model: add --draft (a program: driver.draft)")
    if kind == "draft-eagle3" and draft.architecture != "eagle3":
        raise Misfit(f"{draft.label} is {draft.architecture}, draft-eagle3 needs an eagle3 model")
    if kind == "draft-eagle3":
        _widths(kind, model, draft)
    if kind == "draft-simple":
        bare = list(dict.fromkeys(g.label for g in (model, draft) if g.vocabulary == "no_vocab"))
        if bare:
            names = f"{' and '.join(bare)} {'has' if len(bare) == 1 else 'have'}"
            raise Misfit(f"draft-simple compares the texts of tokens, and {names} none (no_vocab)")


def _widths(kind: str, model: Gguf, draft: Gguf) -> None:
    if model.width and draft.takes and model.width != draft.takes:
        raise Misfit(
            f"{kind} hands hidden rows of the target to the draft: {draft.label} takes {draft.takes} numbers a row, "
            f"{model.label} gives {model.width}"
        )


def check_program(program: Scenario, model: Path, draft: Path | None) -> None:
    """Raises Misfit where a stored program cannot say anything of llama.cpp, whatever its operations do: its driver
    does not fit its models, or a number is none that a caller could have got from them."""
    d = program.driver
    if d is None:
        i, needs = next(((i, op) for i, op in enumerate(program.ops) if isinstance(op, _NEEDS_DRIVER)), (0, None))
        if needs is not None:
            raise Misfit(f"operation {i} ({needs.__struct_config__.tag}) needs a driver, and the program names none")
        return
    if d.impl == "reference" and d.kind != "draft-mtp":
        raise Misfit(f"the driver in Python is draft-mtp, not {d.kind}")
    if d.kind == "draft-mtp" and program.params.embeddings:
        raise Misfit("draft-mtp asks for the hidden rows itself and cannot work with params.embeddings; leave it out")
    for name, n in (("ngram_n", d.ngram_n), ("ngram_m", d.ngram_m)):
        if d.kind.startswith("ngram") and n not in _NGRAM:
            raise Misfit(f"driver.{name} is {n}; llama.cpp takes {_NGRAM[0]} to {_NGRAM[-1]}")
    target = look(model, program.model.label())
    check(d.kind, target, look(draft, d.draft.label() if d.draft else "") if draft else None)
    if not program.misuse:
        _check_tokens(program, target)


def _check_tokens(program: Scenario, model: Gguf) -> None:
    for i, op in enumerate(program.ops):
        tokens: tuple[int, ...] = ()
        if isinstance(op, Propose) and op.last is not None:
            if len(op.last) != len(op.seqs):
                raise Misfit(f"operation {i} (propose): last has {len(op.last)} tokens for {len(op.seqs)} sequences")
            tokens = tuple(op.last)
        elif isinstance(op, Decode):
            tokens = tuple(t for part in op.parts for t in part.tokens or ())
        bad = next((t for t in tokens if not 0 <= t < model.n_vocab), None)
        if bad is not None and model.n_vocab:
            raise Misfit(
                f"operation {i} ({op.__struct_config__.tag}): token {bad} is not in the vocabulary of {model.label} "
                f"(0 to {model.n_vocab - 1})"
            )


def sized(p: DriverParams) -> DriverParams:
    """A driver whose n_max is what it drafts at most: the ngram kinds do not look at n_max."""
    if p.kind == "ngram-cache":
        return msgspec.structs.replace(p, n_max=_CACHE)
    return msgspec.structs.replace(p, ngram_m=p.n_max) if p.kind.startswith("ngram") else p
