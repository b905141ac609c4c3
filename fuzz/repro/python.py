"""Prints a finding as a stand-alone Python program: llama-cpp-python and numpy, nothing of redraft."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fuzz.repro import commands, plain, writer
from fuzz.repro.plain import AskFor, Call, CorruptSlot, DecodeRows, Memory, NewContext, RestoreState, SaveState
from fuzz.repro.text import WIDTH
from oracles.verdict import Check
from subjects import recipes
from subjects.runner import FILE_TOKENS
from subjects.scenario import GGML_TYPE, ContextParams, ModelRef

if TYPE_CHECKING:
    from fuzz.finding import Finding

HANG_SECONDS = 30

_HEAD = '''\
#!/usr/bin/env python3
"""{doc}
"""
'''

_MAIN = """\
# --- the program ------------------------------------------------------------------------------------------------------

import argparse
import ctypes
import itertools
import signal
import sys

parser = argparse.ArgumentParser(description={title!r})
parser.add_argument("--model", help="run on this GGUF file{instead}"{required})
"""

_WRITE_OPTION = """\
parser.add_argument("--write-model", metavar="PATH", help="write the model there and do nothing else")
args = parser.parse_args()
if args.write_model:
    write_model(args.write_model, METADATA, TENSORS, seed={seed})
    sys.exit()
"""

_LOAD = """\
os.environ["GGML_NO_BACKTRACE"] = "1"
import llama_cpp.llama_cpp as L  # noqa: E402


@L.llama_log_callback
def log(level, text, _):
    if level == 4:  # errors
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def fail(text):
    print(text, file=sys.stderr)
    sys.exit(2)


L.llama_log_set(log, None)
L.llama_backend_init()
model_params = L.llama_model_default_params()
model_params.n_gpu_layers = {n_gpu_layers}
"""

_LOAD_WRITTEN = """\
with tempfile.TemporaryDirectory() as folder:
    path = args.model or os.path.join(folder, "model.gguf")
    if not args.model:
        write_model(path, METADATA, TENSORS, seed={seed})
    model = L.llama_model_load_from_file(path.encode(), model_params)
"""

_LOAD_PATH = """\
model = L.llama_model_load_from_file(args.model.encode(), model_params)
"""

_FACTS = """\
if not model:
    fail("cannot load the model")
width = {width}
NONE, LAST, ALL = range(3)  # which rows of a run give output
"""

_HELPERS = {
    "must": '''
def must(what, got, recorded):
    """End where a call answers otherwise than when this was found: from there on it is another program."""
    if got != recorded:
        print(f"not reproduced: {what} now answers {got}, not {recorded}")
        sys.exit(0)
''',
    "new_context": """
def new_context(params):
    p = L.llama_context_default_params()
    for name, value in params.items():
        setattr(p, name, value)
    return L.llama_init_from_model(model, p) or fail("the context was refused")
""",
    "decode": '''
def decode(ctx, *runs, rc=0):
    """llama_decode of runs (sequence, first position, tokens, outputs): return code and output rows."""
    rows = [(s, p + i, t, out == ALL or (out == LAST and t_last)) for s, p, tokens, out in runs
            for i, t in enumerate(tokens) for t_last in [i == len(tokens) - 1]]
    batch = L.llama_batch_init(max(len(rows), 1), 0, 1)
    batch.n_tokens = len(rows)
    for i, (seq, pos, token, out) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, pos, 1, seq, out
    got = L.llama_decode(ctx, batch)
    read = [L.@GET@(ctx, i) for i, row in enumerate(rows) if row[3]] if got == 0 else []
    L.llama_batch_free(batch)
    if rc is not None:
        must("llama_decode", got, rc)
    return got, [np.ctypeslib.as_array(row, (width,)).copy() for row in read if row]
''',
    "abort": '''
def decode_abort(after, ctx, *runs, rc=0):
    """The same with an abort callback that returns true once, after `after` calls that return false."""
    calls = itertools.count()
    callback = L.ggml_abort_callback(lambda _: next(calls) == after)
    L.llama_set_abort_callback(ctx, callback, None)
    result = decode(ctx, *runs, rc=rc)
    L.llama_set_abort_callback(ctx, L.ggml_abort_callback(), None)
    return result
''',
    "save": """
def save(ctx, seq, flags):
    size = L.llama_state_seq_get_size_ext(ctx, seq, flags)
    data = (ctypes.c_uint8 * max(size, 1))()
    moved = L.llama_state_seq_get_data_ext(ctx, data, size, seq, flags)
    data = bytearray(data)[: min(moved, size)]
    blobs.append((size, moved, bytes(data)))
    return moved, data
""",
    "row": '''
def row(data, dtype, start, pieces, size, apart):
    """A row of a saved state, whose pieces lie `apart` bytes from one another, as numbers."""
    raw = b"".join(data[at : at + size] for at in range(start, start + pieces * apart, apart))
    values = np.frombuffer(raw, dtype)
    return (values.astype("<u4") << 16).view("<f4") if dtype == "<u2" else values.astype("<f4")
''',
    "cells": '''
def cells(data, at, ext, least, seq):
    """Position (x, y, token) of the cells of a saved state from position `least` on, in order; their number is at
    offset `at`. seq: those of that sequence alone, -1: all."""
    found = []
    try:
        (n,) = struct.unpack_from("<I", data, at)
        at += 4
        for _ in range(n):
            pos, k = struct.unpack_from("<iI", data, at)
            more = struct.unpack_from("<3i", data, at + 8) if ext else ()
            seqs = struct.unpack_from(f"<{k}i", data, at + 8 + 4 * len(more))
            at += 8 + 4 * len(more) + 4 * k
            if pos >= least and (seq < 0 or seq in seqs):
                found.append((pos, *more))
    except struct.error:
        print("not reproduced: the saved state is of another form")
        sys.exit(0)
    return sorted(found)
''',
    "save_all": """
def save_all(ctx):
    size = L.llama_state_get_size(ctx)
    data = (ctypes.c_uint8 * max(size, 1))()
    moved = L.llama_state_get_data(ctx, data, size)
    data = bytearray(data)[: min(moved, size)]
    blobs.append((size, moved, bytes(data)))
    return moved, data
""",
    "restore": """
def restore(ctx, seq, data, flags):
    copy = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    moved = L.llama_state_seq_set_data_ext(ctx, copy, len(data), seq, flags)
    blobs.append((len(data), moved, bytes(data)))
    return moved
""",
    "restore_all": """
def restore_all(ctx, data):
    copy = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    moved = L.llama_state_set_data(ctx, copy, len(data))
    blobs.append((len(data), moved, bytes(data)))
    return moved
""",
    "save_file": f'''
def save_file(ctx, seq, path):
    """llama_state_seq_save_file, or llama_state_save_file where seq is None."""
    tokens = (L.llama_token * {len(FILE_TOKENS)})({", ".join(map(str, FILE_TOKENS))})
    if seq is None:
        moved = L.llama_state_save_file(ctx, path, tokens, len(tokens)) and os.path.getsize(path)
    else:
        moved = L.llama_state_seq_save_file(ctx, path, seq, tokens, len(tokens))
    data = Path(os.fsdecode(path)).read_bytes()
    blobs.append((len(data), moved, data))
    return moved
''',
    "restore_file": '''
def restore_file(ctx, seq, path):
    """llama_state_seq_load_file, or llama_state_load_file where seq is None."""
    tokens, n = (L.llama_token * 64)(), ctypes.c_size_t()
    if seq is None:
        moved = L.llama_state_load_file(ctx, path, tokens, 64, ctypes.byref(n)) and os.path.getsize(path)
    else:
        moved = L.llama_state_seq_load_file(ctx, path, seq, tokens, 64, ctypes.byref(n))
    data = Path(os.fsdecode(path)).read_bytes()
    blobs.append((len(data), moved, data))
    return moved
''',
}

_ROWS_VERDICT = """\
if len(subject) <= {i} or len(reference) <= {j}:
    print("not reproduced: a decode gave no output row")
    sys.exit(0)
error = float(np.abs(subject[{i}] - reference[{j}]).max())
wrong = not error <= {band!r}
verdict = "WRONG STATE" if wrong else "not reproduced"
print(f"max abs difference {{error:.4g}} (honest differences here: {band:.2g}): {{verdict}}")
sys.exit(int(wrong))
"""

_EXPECT_VERDICT = """\
wrong = got not in {expected!r}
print(f"{what} {{got}}, expected {wanted}: {{'WRONG' if wrong else 'not reproduced'}}")
sys.exit(int(wrong))
"""

_STATE_VERDICT = """\
error = float(np.abs({left} - {right}).max())
wrong = not error <= {band!r}
verdict = "WRONG STATE" if wrong else "not reproduced"
print(f"{what}: max abs difference {{error:.4g}} (honest differences here: {band:.2g}): {{verdict}}")
sys.exit(int(wrong))
"""

_CELLS_VERDICT = """\
wrong = {left} != {right}
verdict = "WRONG STATE" if wrong else "not reproduced"
print(f"cells of the saved state and of what it should be: {{verdict}}")
sys.exit(int(wrong))
"""

_SIZES_VERDICT = """\
wrong = len(subject) != len(reference)
verdict = "WRONG STATE" if wrong else "not reproduced"
print(f"sizes of the states: {{len(subject)}} and in a clean context {{len(reference)}} bytes: {{verdict}}")
sys.exit(int(wrong))
"""

_BYTES_VERDICT = """\
wrong = {left} != {right}
print(f"{what}: {{'THEY DIFFER' if wrong else 'equal: not reproduced'}}")
sys.exit(int(wrong))
"""

_ALIVE_VERDICT = """\
print("it survived: not reproduced")
"""


def context_fields(p: ContextParams) -> dict[str, str]:
    """Fields of llama_context_params as the shim sets them, values as Python writes them."""
    return {
        "n_ctx": str(p.n_ctx),
        "n_batch": str(p.n_batch),
        "n_ubatch": str(p.n_ubatch),
        "n_seq_max": str(p.n_seq_max),
        "n_rs_seq": str(p.n_rs_seq),
        "kv_unified": str(p.kv_unified),
        "type_k": str(GGML_TYPE[p.type_k]),
        "type_v": str(GGML_TYPE[p.type_v]),
        "flash_attn_type": str(int(p.flash_attn)),
        "swa_full": str(p.swa_full),
        "offload_kqv": str(p.offload_kqv),
        "op_offload": str(p.offload_kqv),
        "n_threads": str(p.n_threads),
        "n_threads_batch": str(p.n_threads),
        "embeddings": str(p.embeddings),
    }


def wrap(text: str, indent: str = "    ") -> str:
    """Break long lines at spaces."""
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in text.splitlines() for part in wrapper.wrap(line))


def comment(text: str, mark: str = "# ", indent: str = "") -> str:
    """A comment of as many lines as it takes."""
    return "\n".join(textwrap.wrap(text, WIDTH, initial_indent=indent + mark, subsequent_indent=indent + mark + "  "))


def params_names(*lists: Sequence[Call]) -> dict[ContextParams, str]:
    """A constant's name for each set of context parameters in use."""
    seen = dict.fromkeys(c.params for calls in lists for c in calls if isinstance(c, NewContext))
    return {p: f"PARAMS_{i + 1}" if i else "PARAMS" for i, p in enumerate(seen)}


def model_source(model: ModelRef) -> str:
    """The writer and the recipe as Python source. Raises ValueError for a recipe that is no longer of that version."""
    assert model.recipe is not None
    data = recipes.get(model.recipe).data()
    if data["version"] != model.version:
        raise ValueError(
            f"recipe {model.recipe} is of version {data['version']} now, the scenario needs version {model.version}"
        )
    return f"""\
# --- writer of the model, numpy only ----------------------------------------------------------------------------------

{writer.source()}


# --- the model: {model.recipe}, version {model.version}, random weights of seed {model.seed} ---

METADATA = {writer.literal(data["metadata"])}
TENSORS = {writer.literal(data["tensors"])}

"""


_MEM = "mem = L.llama_get_memory(ctx)"


class _Printer:
    """Collects the lines of one program; `helpers` is what they call."""

    def __init__(self, check: Check, names: dict[ContextParams, str]):
        self.check, self.names = check, names
        self.lines: list[str] = []
        self.helpers: set[str] = {"must", "new_context"}
        if plain.places(check) is not None:
            self.helpers.add("row")
        if plain.cells_places(check) is not None:
            self.helpers.add("cells")

    def calls(self, calls: Sequence[Call], *, reference: bool = False) -> None:
        """One line a call; those of the checked step give `got` or `blobs`, the last one gives its rows."""
        last = len(calls) - 1
        begin = (
            len(calls)
            if reference or self.check.kind == "rows"
            else plain.first_of(calls, plain.collect_from(self.check))
        )
        for i, call in enumerate(calls):
            if call.why:
                self.lines.append(comment(call.why))
            if i == begin and self.check.kind in ("blob", "state"):
                self.lines.append("blobs.clear()")
            if i == begin and self.check.kind == "alive":
                self.lines.append(f'print("about to {call.why}; the process should survive it", flush=True)')
            capture = ""
            if i == last and self.check.kind == "rows":
                capture = "reference" if reference else "subject"
            elif i >= begin and self.check.kind == "answer":
                capture = "got"
            self.lines.append(wrap(self._line(call, capture, free=i > 0)))
            if isinstance(call, NewContext):
                self.lines.append(_MEM)

    def subject(self) -> None:
        """The state to be compared, after the subject's calls."""
        if self.check.expected:
            self.lines.append(f"subject = blobs[{self.check.row}][2]")
            return
        self.helpers.add("save")
        self.lines.append(comment(f"{self.check.what}: so the whole state of the sequence is of another size"))
        self.lines.append(f"subject = bytes(save(ctx, {self.check.seq}, 0)[1])")

    def _line(self, call: Call, capture: str, free: bool) -> str:
        match call:
            case NewContext():
                return f"{'L.llama_free(ctx)' + chr(10) if free else ''}ctx = new_context({self.names[call.params]})"
            case DecodeRows():
                return self._decode(call, capture)
            case Memory():
                return self._memory(call, capture)
            case SaveState():
                return self._save(call, capture)
            case RestoreState():
                return self._restore(call, capture)
            case CorruptSlot():
                return self._corrupt(call)
            case AskFor():
                return (f"{capture} = " if capture else "") + _query(call)
            case _:
                raise TypeError(call)

    def _decode(self, call: DecodeRows, capture: str) -> str:
        self.helpers.add("decode")
        parts = [f"({r.seq}, {r.pos}, {list(r.tokens)}, {r.out})" for r in plain.runs(call.rows)]
        name = "decode(ctx"
        if call.abort_after is not None:
            self.helpers.add("abort")
            name = f"decode_abort({call.abort_after}, ctx"
        rc = ["rc=None"] if capture == "got" or call.rc is None else [f"rc={call.rc}"] if call.rc else []
        text = ", ".join([name, *parts, *rc]) + ")"
        return {"": text, "got": f"got, _ = {text}"}.get(capture, f"_, {capture} = {text}")

    def _memory(self, call: Memory, capture: str) -> str:
        args = "".join(f", {a}" for a in call.args) if call.name != "clear" else f", {bool(call.args[0])}"
        text = f"L.llama_memory_{call.name}(mem{args})"
        if capture:
            return f"{capture} = int({text})"
        return text if call.rc is None else f'must("llama_memory_{call.name}", {text}, {bool(call.rc)})'

    def _save(self, call: SaveState, capture: str) -> str:
        if call.medium == "file":
            self.helpers.add("save_file")
            text = f"save_file(ctx, {call.seq}, slot{call.slot})"
            made = f'slot{call.slot} = os.fsencode(os.path.join(scratch.name, "slot{call.slot}.bin"))\n'
        else:
            self.helpers.add("save_all" if call.seq is None else "save")
            text = "save_all(ctx)" if call.seq is None else f"save(ctx, {call.seq}, {call.flags})"
            made = ""
            if call.keep:
                return f"{capture or 'moved'}, slot{call.slot} = {text}" + self._must(
                    "save", "moved > 0", call.ok, capture
                )
            text += "[0]"
        if capture and call.keep:
            return f"{made}{capture} = {text}"
        return made + text if call.ok is None or not call.keep else f'{made}must("the save", {text} > 0, {call.ok})'

    def _restore(self, call: RestoreState, capture: str) -> str:
        if call.medium == "file":
            self.helpers.add("restore_file")
            text = f"restore_file(ctx, {call.seq}, slot{call.slot})"
        elif call.seq is None:
            self.helpers.add("restore_all")
            text = f"restore_all(ctx, slot{call.slot})"
        else:
            self.helpers.add("restore")
            text = f"restore(ctx, {call.seq}, slot{call.slot}, {call.flags})"
        if capture:
            return f"{capture} = {text}"
        return text if call.ok is None else f'must("the restore", {text} > 0, {call.ok})'

    def _must(self, what: str, got: str, recorded: bool | None, capture: str) -> str:
        return "" if capture or recorded is None else f'\nmust("the {what}", {got}, {recorded})'

    def _corrupt(self, call: CorruptSlot) -> str:
        def data(slot: int) -> str:
            name = f"slot{slot}"
            return name if call.media[slot] == "buffer" else f"Path(os.fsdecode({name})).read_bytes()"

        parts = [
            f"bytes.fromhex({p.data.hex()!r})" if p.slot == -1 else f"{data(p.slot)}[{p.start}:{p.end}]"
            for p in call.pieces
        ]
        text = " + ".join(parts) or "b''"
        if call.media[call.slot] == "buffer":
            return f"slot{call.slot} = bytearray({text})"
        return f"Path(os.fsdecode(slot{call.slot})).write_bytes({text})"


def _query(call: AskFor) -> str:
    return {
        "positions": f"L.llama_memory_seq_pos_max(mem, {call.seq})",
        "size": f"L.llama_state_seq_get_size_ext(ctx, {call.seq}, {call.flags})",
        "size_all": "L.llama_state_get_size(ctx)",
        "can_shift": "int(L.llama_memory_can_shift(mem))",
    }[call.what]


def _verdict(check: Check, calls: Sequence[Call], reference: Sequence[Call]) -> str:
    if check.kind == "rows":
        i, j = plain.find_row(calls, check.row)[1], plain.find_row(reference, check.ref_row)[1]
        return _ROWS_VERDICT.format(i=i, j=j, band=check.band)
    if check.kind == "positions":
        pair = f"(L.llama_memory_seq_pos_min(mem, {check.seq}), L.llama_memory_seq_pos_max(mem, {check.seq}))"
        what = f"sequence {check.seq} has (pos_min, pos_max)"
        return f"got = {pair}\n" + _EXPECT_VERDICT.format(expected=[check.expected], what=what, wanted=check.expected)
    if check.kind == "answer":
        wanted = " or ".join(map(str, check.expected))
        return _EXPECT_VERDICT.format(expected=list(check.expected), what="the call returned", wanted=wanted)
    if check.kind == "state":
        rows, cells = plain.places(check), plain.cells_places(check)
        if cells is not None:
            left, right = _cells("subject", cells[0]), _cells("reference", cells[1])
            return _CELLS_VERDICT.format(left=left, right=right)
        if rows is None:
            return _SIZES_VERDICT.format()
        # rows of quantised K or V are held together byte by byte
        dtypes = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
        left, right = (
            _row(name, dtypes.get(p.type, "u1"), p) for name, p in zip(("subject", "reference"), rows, strict=True)
        )
        band = check.band if rows[0].type in dtypes else 0.0
        return _STATE_VERDICT.format(left=left, right=right, band=band, what=check.what)
    if check.kind == "blob":
        a, b = plain.blob_pair(check)
        if check.what == "size":
            return _BYTES_VERDICT.format(
                left=f"blobs[{a}][0]", right=f"blobs[{b}][1]", what="size promised or given, and bytes moved"
            )
        left, right, what = f"blobs[{a}][2]", f"blobs[{b}][2]", "blobs"
        if (rows := plain.places(check)) is not None:
            left, right = (f"list({_row(n, 'u1', p)})" for n, p in zip((left, right), rows, strict=True))
            what = "a row in blobs"
        elif (cells := plain.cells_places(check)) is not None:
            left, right = (_cells(n, p) for n, p in zip((left, right), cells, strict=True))
            what = "cells in blobs"
        return _BYTES_VERDICT.format(left=left, right=right, what=f"{what} {a} and {b} since then")
    return _ALIVE_VERDICT


def _row(data: str, dtype: str, p: plain.RowPlace) -> str:
    return f"row({data}, {dtype!r}, {p.start}, {p.pieces}, {p.size}, {p.apart})"


def _cells(data: str, p: plain.CellsPlace) -> str:
    return "[]" if p.at < 0 else f"cells({data}, {p.at}, {bool(p.ext)}, {p.least}, {p.seq})"


def repro_py(finding: Finding, calls: Sequence[Call], reference_calls: Sequence[Call] = ()) -> str:
    """The program: 1 as exit code (or a signal) where the finding is there, 0 where it is not."""
    check, model = finding.check, finding.scenario.model
    calls = plain.needed(calls, check)
    compared = check.kind in plain.REFERENCE_KINDS
    reference_calls = plain.needed(reference_calls, check, reference=True) if compared else []
    names = params_names(calls, reference_calls)
    printer = _Printer(check, names)
    if finding.hang:
        printer.lines.append(f"signal.alarm({HANG_SECONDS})  # it hung when it was found")
    printer.calls(calls)
    if check.kind == "state":
        printer.subject()
    if reference_calls:
        printer.lines += ["", "# What must come out: the same history in a clean context.", "L.llama_free(ctx)"]
        printer.calls(reference_calls, reference=True)
    if check.kind == "state":
        printer.lines.append("reference = blobs[-1][2]")
    verdict = _verdict(check, calls, reference_calls)
    uses_mem = any("(mem" in text for text in (*printer.lines, verdict))
    body = "\n".join(line for line in printer.lines if uses_mem or line != _MEM)
    get, width = "llama_get_logits_ith", "L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))"
    if check.hidden:
        get, width = "llama_get_embeddings_ith", "L.llama_model_n_embd(model)"
    helpers = "\n".join(text for name, text in _HELPERS.items() if name in printer.helpers).replace("@GET@", get)
    if check.kind not in ("blob", "state"):
        helpers = "".join(line for line in helpers.splitlines(keepends=True) if "blobs.append" not in line)
    constants = "".join(
        wrap(f"{name} = dict(" + ", ".join(f"{k}={v}" for k, v in context_fields(p).items()) + ")") + "\n"
        for p, name in names.items()
    )
    if "blobs" in body + helpers:
        constants += "blobs = []  # (size promised or given, bytes moved, bytes) of each save and restore\n"
    if "scratch" in body:
        constants += "scratch = tempfile.TemporaryDirectory()\n"
    written = model.recipe is not None
    load = _LOAD.format(n_gpu_layers=model.n_gpu_layers) + (
        _LOAD_WRITTEN.format(seed=model.seed) if written else _LOAD_PATH
    )
    main = _MAIN.format(
        title=finding.title,
        instead=" in place of the generated one" if written else "",
        required="" if written else ", required=True",
    )
    main += _WRITE_OPTION.format(seed=model.seed) if written else "args = parser.parse_args()\n"
    for name in ("ctypes", "itertools", "signal"):
        if f"{name}." not in body + helpers:
            main = main.replace(f"import {name}\n", "")
    imports = (
        "import json\n\n"
        if written
        else "import os\nimport struct\nimport tempfile\nfrom pathlib import Path\n\nimport numpy as np\n\n"
    )
    return (
        _HEAD.format(doc=_doc(finding))
        + (imports + model_source(model) if written else imports)
        + main
        + "\n"
        + load
        + _FACTS.format(width=width)
        + constants
        + f"\n{helpers}\n\n{body}\n\n{verdict}"
    )


def _doc(finding: Finding) -> str:
    seen = f"{finding.title}. Seen with {commands.seen_with(finding)}; needs llama-cpp-python and numpy."
    lines = [finding.rule, "", seen]
    model = finding.scenario.model
    if model.recipe is None and model.sha256:
        lines.append(f"Seen with {model.label()}, SHA-256 {model.sha256}.")
    lines += ["", "Exit code: 0 not reproduced, 1 reproduced; where it is a crash, the process dies."]
    text = "\n".join("\n".join(textwrap.wrap(line, WIDTH)) for line in lines)
    return text.replace("\\", "\\\\").replace('"""', "'''")
