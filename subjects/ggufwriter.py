"""Write tiny GGUF models with pseudo-random weights, byte for byte the same on every machine.

The text of this file is pasted into stand-alone reproducer scripts, so it needs only numpy and the standard library and
must stay free of imports from this project (and of `from __future__`, which is legal only on a script's first line).

Why not `numpy.random` and why not the `gguf` package's writer: a model is named by (recipe, version, seed) and checked
by its hash, and neither library promises the same bytes in its next release. The numbers come from a counter based
integer generator (splitmix64 keyed by SHA-256 of seed and tensor name); a normal deviate is a sum of twelve uniform
integers (exact in int64), scaled in float64 and rounded once to float32. Only +, -, *, / and sqrt are used, which
IEEE 754 defines to the last bit; log, cos and exp differ between maths libraries and would not do. The container is
GGUF version 3, little endian, which is small enough to write by hand.
"""

import hashlib
import math
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Type number in the file and struct format of each metadata type; "TYPEs" is an array of TYPE.
_GGUF_TYPES = {
    "u32": (4, "<I"),
    "i32": (5, "<i"),
    "f32": (6, "<f"),
    "bool": (7, "<?"),
    "str": (8, ""),
    "u64": (10, "<Q"),
}
_GGUF_ARRAY = 9
_GGML_F32 = 0
_ALIGNMENT = 32  # GGUF's default; the loader maps tensor data at multiples of it


def uniform_ints(key: str, count: int) -> npt.NDArray[np.int64]:
    """Return `count` integers, uniform in [0, 2**32), that depend on `key` and on nothing else."""
    start = np.uint64(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    counter = np.arange(1, (count + 1) // 2 + 1, dtype=np.uint64)
    z = counter * np.uint64(0x9E3779B97F4A7C15) + start  # unsigned arrays wrap modulo 2**64, as splitmix64 wants
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    halves = np.stack([z & np.uint64(0xFFFFFFFF), z >> np.uint64(32)], axis=1)
    return halves.reshape(-1)[:count].astype(np.int64)


def _normals(key: str, count: int) -> npt.NDArray[np.float64]:
    """Return `count` deviates of mean 0 and variance 1: sums of twelve uniforms, so within 6, multiples of 2**-32."""
    total = uniform_ints(key, 12 * count).reshape(count, 12).sum(axis=1)
    deviates: npt.NDArray[np.float64] = (total - 6 * (2**32 - 1)).astype(np.float64) * 2.0**-32
    return deviates


def tensor_values(
    init: Sequence[Any],
    shape: Sequence[int],
    key: str,
    inits: Mapping[str, tuple[Sequence[int], Sequence[Any]]],
    seed: int,
) -> npt.NDArray[np.float64]:
    """Return the values of one tensor, float64 of numpy shape `shape`.

    `key` names the random stream; `inits` maps tensor names to (shape, init), for the form that refers to another
    tensor. The forms of `init` are::

        ["const", v]                    every element v
        ["normal", std]                 normal, mean 0
        ["fan_in", gain]                normal, std = gain / sqrt(length of the last numpy axis)
        ["around_one", std]             1 + normal
        ["uniform", lo, hi]             uniform in [lo, hi)
        ["negative_abs", m, std, lo]    -(|m + normal| + lo)
        ["eye", a, b, ...]              (n, k*n) matrix [a*I | b*I | ...]
        ["cycle", other, m, c, scale]   row (m*i + c) mod rows = scale * row i of tensor `other` (of the same shape)
        ["sum", init, init, ...]        sum of independent parts

    Raises ValueError for an unknown form and for one that does not fill the shape.
    """
    form, args = init[0], init[1:]
    count = math.prod(shape)
    stream = f"{seed}/{key}"
    values: npt.NDArray[np.float64] = np.zeros(count)
    if form == "const":
        values += args[0]
    elif form == "normal":
        values = _normals(stream, count) * args[0]
    elif form == "fan_in":
        values = _normals(stream, count) * (args[0] / math.sqrt(shape[-1]))
    elif form == "around_one":
        values = _normals(stream, count) * args[0] + 1.0
    elif form == "uniform":
        lo, hi = args
        values = uniform_ints(stream, count) * ((hi - lo) * 2.0**-32) + lo
    elif form == "negative_abs":
        mean, std, floor = args
        values = -(np.abs(_normals(stream, count) * std + mean) + floor)
    elif form == "eye":
        values = np.concatenate([np.eye(shape[0]) * scale for scale in args], axis=1)
    elif form == "cycle":
        other, multiplier, offset, scale = args
        other_shape, other_init = inits[other]
        rows = tensor_values(other_init, other_shape, other, inits, seed)
        values = values.reshape(shape)
        values[(multiplier * np.arange(shape[0]) + offset) % shape[0]] = rows * scale
    elif form == "sum":
        values = values.reshape(shape)
        for i, part in enumerate(args):
            values = values + tensor_values(part, shape, f"{key}/{i}", inits, seed)
    else:
        raise ValueError(f"unknown init form {form!r} of tensor {key!r}")
    if values.size != count:
        raise ValueError(f"init {form!r} of tensor {key!r} gives {values.size} values for shape {list(shape)}")
    return values.reshape(shape)


def _pack_str(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pack_value(key: str, kind: str, value: Any) -> bytes:
    """Return type number and value of one metadata entry. Raises ValueError for an unknown type name."""
    is_array = kind not in _GGUF_TYPES and kind.endswith("s")
    element = kind[:-1] if is_array else kind
    if element not in _GGUF_TYPES:
        raise ValueError(f"unknown metadata type {kind!r} of key {key!r}")
    number, fmt = _GGUF_TYPES[element]
    items = value if is_array else [value]
    head = struct.pack("<IIQ", _GGUF_ARRAY, number, len(items)) if is_array else struct.pack("<I", number)
    return head + b"".join(struct.pack(fmt, item) if fmt else _pack_str(item) for item in items)


def model_bytes(metadata: Sequence[Sequence[Any]], tensors: Sequence[Sequence[Any]], seed: int) -> bytes:
    """Return the whole GGUF file as bytes; arguments and errors as in `write_model`."""
    inits = {name: (shape, init) for name, shape, init in tensors}
    if len(inits) != len(tensors):
        raise ValueError("two tensors have the same name")
    if len({key for key, _, _ in metadata}) != len(metadata):
        raise ValueError("two metadata entries have the same key")
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_pack_str(key) + _pack_value(key, kind, value) for key, kind, value in metadata]
    body = []
    offset = 0
    for name, shape, init in tensors:
        data = tensor_values(init, shape, name, inits, seed).astype("<f4").tobytes()
        # ggml counts dimensions from the fastest one, so the shape is written backwards.
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head.append(_pack_str(name) + dims + struct.pack("<IQ", _GGML_F32, offset))
        padded = data + bytes(-len(data) % _ALIGNMENT)
        body.append(padded)
        offset += len(padded)
    front = b"".join(head)
    return front + bytes(-len(front) % _ALIGNMENT) + b"".join(body)


def write_model(
    path: str | os.PathLike[str], metadata: Sequence[Sequence[Any]], tensors: Sequence[Sequence[Any]], seed: int
) -> None:
    """Write a GGUF model to `path`, atomically: readers see the old file, the new one or none, never a part.

    Both lists are plain JSON data. `metadata`: [key, type, value] with type "str", "u32", "i32", "u64", "f32", "bool"
    or the array of one of them ("strs", "u32s", ...). `tensors`: [name, numpy shape, init], see `tensor_values`; all
    are written as F32. Equal arguments give equal bytes.

    Raises ValueError for an unknown type or init form, a repeated name, or an init that does not fill its shape;
    struct.error for a value that its metadata type cannot hold; OSError if the file cannot be written.
    """
    target = Path(path)
    data = model_bytes(metadata, tensors, seed)
    handle, temporary = tempfile.mkstemp(prefix=target.name + ".", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes it for its owner alone
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
