"""What a GGUF file says of its model, read in a fraction of a second.

The gguf package's reader builds an array for each token, which takes a quarter of a minute for a large vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SHORT = 4096
"""Longer arrays are not kept, only counted."""

Scalar = int | float | bool | str


class BadHeader(ValueError):
    """Not a GGUF file, or one that ends too early."""


class Many(NamedTuple):
    """An array: how many values, and which, where there are few and they are numbers."""

    n: int
    values: tuple[Scalar, ...]


Value = Scalar | Many


def read(path: Path) -> dict[str, Value]:
    """The metadata of a file. Raises BadHeader, OSError."""
    with path.open("rb") as f:
        try:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise BadHeader("it is empty") from None
        with data:
            return _Header(data).metadata()


class _Header:
    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def metadata(self) -> dict[str, Value]:
        if self.data[:4] != b"GGUF":
            raise BadHeader("it does not begin with GGUF")
        self.at = 4
        version, _, n = self._take("<IQQ")
        if not 2 <= version <= 3:
            raise BadHeader(f"it has version {version} of the format")
        found: dict[str, Value] = {}
        for _ in range(n):
            key = self._string()
            found[key] = self._value(self._take("<I")[0])
        return found

    def _take(self, form: str) -> tuple[int, ...]:
        try:
            values = struct.unpack_from(form, self.data, self.at)
        except struct.error:
            raise BadHeader("it ends within its metadata") from None
        self.at += struct.calcsize(form)
        return values

    def _bytes(self) -> bytes:
        (n,) = self._take("<Q")
        if n > len(self.data) - self.at:
            raise BadHeader("it ends within its metadata")
        self.at += n
        return self.data[self.at - n : self.at]

    def _string(self) -> str:
        return self._bytes().decode("utf-8", "replace")

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._take("<" + _SCALARS[kind])[0]
        if kind != _ARRAY:
            raise BadHeader(f"it has a value of unknown type {kind}")
        inner, n = self._take("<IQ")
        if inner == _STRING:
            for _ in range(n):
                self._bytes()
            return Many(n, ())
        if inner not in _SCALARS:
            raise BadHeader(f"it has an array of type {inner}")
        form = "<" + _SCALARS[inner]
        if n <= _SHORT:
            return Many(n, tuple(self._take(form)[0] for _ in range(n)))
        self.at += n * struct.calcsize(form)
        return Many(n, ())
