"""Which driver goes with which models, by what their files say: a driver that does not fit ends the process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from fuzz.probe.header import BadHeader, Many, Value, read
from subjects.scenario import DriverKind, DriverParams

_CACHE = 8  # what ngram-cache drafts, whatever is asked


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


def look(path: Path, label: str = "") -> Gguf:
    """What a file says of its model. Raises Misfit."""
    try:
        said = read(path)
    except (BadHeader, OSError) as e:
        raise Misfit(f"{path.name} cannot be read as a GGUF file: {e}") from None
    arch = str(said.get("general.architecture", "?"))
    texts = said.get("tokenizer.ggml.tokens")
    n_vocab = texts.n if isinstance(texts, Many) else _whole(said, f"{arch}.vocab_size")
    nextn = _whole(said, f"{arch}.nextn_predict_layers")
    vocabulary = str(said.get("tokenizer.ggml.model", "no_vocab"))
    return Gguf(path, label or path.name, arch, n_vocab, nextn, vocabulary)


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
        return
    if draft is None:
        raise Misfit(f"{kind} needs the draft's model: add --draft")
    if kind == "draft-eagle3" and draft.architecture != "eagle3":
        raise Misfit(f"{draft.label} is {draft.architecture}, draft-eagle3 needs an eagle3 model")
    if kind == "draft-simple":
        bare = [g.label for g in (model, draft) if g.vocabulary == "no_vocab"]
        if bare:
            raise Misfit(f"draft-simple compares the texts of tokens, and {' and '.join(bare)} has none (no_vocab)")


def sized(p: DriverParams) -> DriverParams:
    """A driver whose n_max is what it drafts at most: the ngram kinds do not look at n_max."""
    if p.kind == "ngram-cache":
        return msgspec.structs.replace(p, n_max=_CACHE)
    return msgspec.structs.replace(p, ngram_m=p.n_max) if p.kind.startswith("ngram") else p
