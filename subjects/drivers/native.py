"""The real C++ drivers, through subjects/driver.cpp. Only children load it."""

from __future__ import annotations

import ctypes as ct
from array import array
from collections.abc import Sequence
from pathlib import Path

from subjects.drivers import DraftAsk, Tap, TapRow
from subjects.scenario import ContextParams, DriverParams
from subjects.shim import bound, params_array
from subjects.trace import Row

INTERFACE = 1
# of one draft; the longest that any driver makes by default is 64
_CAP = 256
# what was logged is read into it
_TEXT = ct.create_string_buffer(1 << 15)

_P, _I, _L = ct.c_void_p, ct.c_int32, ct.c_int64
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "rd_spec_version": (_I, []),
    "rd_spec_take_log": (_I, [ct.c_char_p, _I]),
    "rd_spec_model_load": (_P, [ct.c_char_p, _I]),
    "rd_spec_ctx_new": (_P, [_P, _P, _P, _I]),
    "rd_spec_shares": (_I, [_P, _P]),
    "rd_spec_new": (_P, [ct.c_char_p, _P, _P, _P, ct.c_float]),
    "rd_spec_free": (None, [_P]),
    "rd_spec_n_max": (_I, [_P]),
    "rd_spec_process": (_I, [_P, _I, _P, _P, _P, ct.c_char_p]),
    "rd_spec_draft": (None, [_P, _I, _P, _P, _P, _P, _P, _P, _I, _P, _P]),
    "rd_spec_accept": (None, [_P, _I, _I]),
    "rd_spec_begin": (None, [_P, _I, _P, _I]),
    "rd_spec_get": (_L, [_P, _I, ct.c_char_p, _L]),
    "rd_spec_set": (None, [_P, _I, ct.c_char_p, _L]),
    "rd_spec_take": (_L, [_P, _L, _P, _L, ct.POINTER(_L)]),
}


def _ints(values: Sequence[int]) -> tuple[array[int], int]:
    """An array and its address; the array must stay alive while the address is used."""
    a = array("i", values)
    return a, a.buffer_info()[0]


class DriverLib:
    """The compiled driver library, loaded into this process; the shim must be loaded already.

    Raises WrongShim when the library speaks another version of the interface.
    """

    def __init__(self, path: Path):
        self.lib = bound(path, _SIGNATURES, "rd_spec_version", INTERFACE)

    def load_model(self, path: Path, n_gpu_layers: int = 0) -> int | None:
        """Handle of a model with its NextN layers, None when the library refuses the file."""
        handle = self.lib.rd_spec_model_load(str(path).encode(), n_gpu_layers)
        return None if handle is None else int(handle)

    def new_draft_context(self, model: int, p: ContextParams, target: int, *, mtp: bool) -> int | None:
        """Handle of a draft context with the target's parameters, None when the library refuses."""
        handle = self.lib.rd_spec_ctx_new(model, params_array(p), target, mtp)
        return None if handle is None else int(handle)

    def shares_memory(self, draft: int, target: int) -> bool:
        """Whether a draft context has no memory of its own and looks into the target's (not so for draft-simple and
        eagle3, which only borrow weights)."""
        return bool(draft) and bool(self.lib.rd_spec_shares(draft, target))


class Native:
    """A `common_speculative` (see subjects.drivers.Driver). `draft` is 0 for the kinds without a draft context.

    Raises ValueError when common_speculative_init gives none.
    """

    def __init__(self, lib: DriverLib, p: DriverParams, target: int, draft: int, n_seq: int):
        self._lib = lib.lib
        _keep, at = _ints((n_seq, p.n_max, p.n_min, p.backend_sampling, p.ngram_n, p.ngram_m, p.ngram_hits))
        handle = self._lib.rd_spec_new(p.kind.encode(), target, draft or None, at, p.p_min)
        if handle is None:
            raise ValueError(f"common_speculative_init gives no {p.kind}")
        self._h = handle
        self.n_max = int(self._lib.rd_spec_n_max(handle))
        self._ints = array("i", bytes(4 * 4096))
        self._floats = array("f", bytes(4 * 16384))
        self._needed = _L()

    def process(self, rows: Sequence[Row]) -> bool:
        """See subjects.drivers.Driver."""
        _t, tp = _ints([r.token for r in rows])
        _p, pp = _ints([r.pos for r in rows])
        _s, sp = _ints([r.seq for r in rows])
        return bool(self._lib.rd_spec_process(self._h, len(rows), tp, pp, sp, bytes(r.out for r in rows)))

    def draft(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See subjects.drivers.Driver."""
        n = len(asks)
        keep = [
            _ints(x)
            for x in (
                [a.seq for a in asks],
                [a.pos0 for a in asks],
                [a.last for a in asks],
                [a.n_max for a in asks],
                [len(a.prompt) for a in asks],
                [t for a in asks for t in a.prompt],
                [0] * (n * _CAP),
                [0] * n,
            )
        ]
        at = [address for _, address in keep]
        self._lib.rd_spec_draft(self._h, n, *at[:6], _CAP, *at[6:])
        out, counts = keep[6][0], keep[7][0]
        return [list(out[i * _CAP : i * _CAP + counts[i]]) for i in range(n)]

    def accept(self, seq: int, n: int) -> None:
        """See subjects.drivers.Driver."""
        self._lib.rd_spec_accept(self._h, seq, n)

    def begin(self, seq: int, prompt: Sequence[int]) -> None:
        """See subjects.drivers.Driver."""
        _keep, at = _ints(prompt)
        self._lib.rd_spec_begin(self._h, seq, at, len(prompt))

    def state(self, seq: int) -> bytes | None:
        """See subjects.drivers.Driver."""
        room = 1 << 16
        while True:
            buf = ct.create_string_buffer(room)
            n = int(self._lib.rd_spec_get(self._h, seq, buf, room))
            if n < 0:
                return None
            if n <= room:
                return buf.raw[:n]
            room = n

    def restore(self, seq: int, blob: bytes) -> None:
        """See subjects.drivers.Driver."""
        self._lib.rd_spec_set(self._h, seq, blob, len(blob))

    def take(self) -> list[Tap]:
        """See subjects.drivers.Driver."""
        while True:
            ints, floats = self._ints, self._floats
            n = self._lib.rd_spec_take(
                ints.buffer_info()[0], len(ints), floats.buffer_info()[0], len(floats), ct.byref(self._needed)
            )
            if n <= len(ints) and self._needed.value <= len(floats):
                return _taps(ints[:n], floats[: self._needed.value].tobytes())
            self._ints = array("i", bytes(4 * max(2 * n, len(ints))))
            self._floats = array("f", bytes(4 * max(2 * self._needed.value, len(floats))))

    def log(self) -> list[str]:
        """See subjects.drivers.Driver."""
        n = self._lib.rd_spec_take_log(_TEXT, len(_TEXT))
        return _TEXT.raw[:n].decode("utf-8", "replace").splitlines() if n else []

    def close(self) -> None:
        """See subjects.drivers.Driver."""
        self._lib.rd_spec_free(self._h)


def _taps(ints: Sequence[int], floats: bytes) -> list[Tap]:
    taps: list[Tap] = []
    i = at = 0
    while i < len(ints):
        rc, n, width, logits = ints[i : i + 4]
        i += 4
        rows: list[TapRow] = []
        for _ in range(n):
            token, pos, seq, out, has = ints[i : i + 5]
            i += 5
            hidden = floats[at : at + 4 * width] if has else b""
            at += len(hidden)
            rows.append(TapRow(token, pos, seq, bool(out), hidden))
        taps.append(Tap(rc, rows, floats[at : at + 4 * logits]))
        at += 4 * logits
    return taps
