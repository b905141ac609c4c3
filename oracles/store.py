"""What was measured once, kept beside the cache: a JSON file for a build and a model."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from subjects.scenario import ModelRef

T = TypeVar("T")


def name_of(what: object) -> str:
    """The name under which a measurement for these parameters is kept."""
    return msgspec.json.encode(what, order="deterministic").decode()


class Store(Generic[T]):
    """Measurements by name, in memory and in a file in `folder` (None: memory only).

    version: of the way of measuring and of the file; another one is another file. kind: type of a measurement, as
    msgspec reads it. A file that cannot be read as that is measured anew.
    """

    def __init__(self, folder: Path | None, build: str, model: ModelRef, version: str, kind: Any):
        name = hashlib.sha256(f"{build}|{model.sha256}|{model.n_gpu_layers}|{version}".encode()).hexdigest()[:16]
        self._file = folder / "bands" / f"{name}.json" if folder else None
        self._stored: dict[str, T] = {}
        if self._file and self._file.exists():
            try:
                self._stored = msgspec.json.decode(self._file.read_bytes(), type=dict[str, kind])
            except msgspec.DecodeError:
                self._stored = {}  # written by another version

    def get(self, name: str) -> T | None:
        """What is known, None for nothing."""
        return self._stored.get(name)

    def put(self, name: str, measured: T) -> None:
        """Keep a measurement; the file is replaced whole, since other processes read it."""
        self._stored[name] = measured
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        fd, tmp = tempfile.mkstemp(dir=self._file.parent)
        with os.fdopen(fd, "wb") as f:
            f.write(msgspec.json.encode(self._stored, order="sorted"))
        Path(tmp).replace(self._file)
