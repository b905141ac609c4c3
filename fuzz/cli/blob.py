"""Saved states of llama.cpp for people: what a blob holds, what is odd about it, and how two of them differ.

redraft blob show slot.bin                   positions, sequences, layers, types, sizes, hashes; what is odd
redraft blob show slot.bin --fields          every field with its offset, its value, and its name in edits of scenarios
redraft blob diff before.bin after.bin       the first byte, then which part of the state, from which position, how far
redraft blob diff slot.bin all.bin --seq 2   a sequence against the same of a whole context

FILE is what llama_state_seq_get_data, llama_state_get_data or their _ext forms gave, a session file, or a sequence's
file such as a slot of llama-server. Layers are counted within their part: a blob does not name the model's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from fuzz.blobs import diff, look
from fuzz.cli.common import Usage, add_json

HELP = "what a saved state holds, and how two of them differ"


def add(p: argparse.ArgumentParser) -> None:
    """Options."""
    sub = p.add_subparsers(dest="what", metavar="{show,diff}", required=True)
    show = sub.add_parser(
        "show",
        help="a tree of one blob, and what is odd",
        description="Shows a blob, also one that is malformed: as far as it can be read, and what is wrong there.",
        epilog=(
            "Exit codes: 0 it can be read to its end, 1 it is malformed or has more bytes behind its end, 2 usage."
        ),
    )
    show.add_argument("file", metavar="FILE", type=Path)
    more = show.add_mutually_exclusive_group()
    more.add_argument("--cells", action="store_true", help="a line for every cell")
    more.add_argument("--fields", action="store_true", help="every field: offset, size, name, which of it, value")
    compare = sub.add_parser(
        "diff",
        help="how two blobs differ",
        description=(
            "Names the first byte that differs, then compares what the blobs mean: by sequence, part, layer and "
            "position, whatever the order of the cells. Of a partial state (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) and a "
            "whole one what both hold is compared, and of blobs with bytes behind their ends what is before them."
        ),
        epilog="Exit codes: 0 equal state, 1 different, 2 usage, or a blob that cannot be read to its end.",
    )
    compare.add_argument("a", metavar="A", type=Path)
    compare.add_argument("b", metavar="B", type=Path)
    compare.add_argument(
        "--seq",
        metavar="N",
        type=int,
        help="of a whole context this sequence (default: all; against the blob of one, the one that it names)",
    )
    for one in (show, compare):
        one.add_argument(
            "--as", dest="kind", choices=look.KINDS, help="a driver's state, which nothing in its bytes tells"
        )
        add_json(one)


def run(args: argparse.Namespace) -> int:
    """Show or compare."""
    return _show(args) if args.what == "show" else _diff(args)


def _read(path: Path, kind: str | None) -> look.Blob:
    try:
        return look.read(path.read_bytes(), kind)
    except OSError as e:
        raise Usage(f"{path}: {e.strerror}") from None


def _print(thing: Any, lines: list[str], json: bool) -> None:
    if json:
        lines = [msgspec.json.format(msgspec.json.encode(thing), indent=2).decode()]
    sys.stdout.write("\n".join(lines) + "\n")


def _show(args: argparse.Namespace) -> int:
    blob = _read(args.file, args.kind)
    if args.fields:
        found = look.fields(blob)
        lines = look.fields_text(found)
        if blob.fault is not None:
            lines.append(f"then {blob.fault.field} at {blob.fault.offset}: {blob.fault.words}")
        _print({"fields": found, "fault": blob.fault}, lines, args.json)
    else:
        seen = look.look(blob)
        _print(seen, look.text(seen, args.file.name, cells=args.cells), args.json)
    return 0 if blob.fault is None else 1


def _diff(args: argparse.Namespace) -> int:
    a, b = _read(args.a, args.kind), _read(args.b, args.kind)
    try:
        found = diff.diff(a, b, args.seq)
    except diff.NoPair as e:
        raise Usage(str(e)) from None
    _print(found, diff.text(found, str(args.a), str(args.b)), args.json)
    if found.faults:
        return 2
    return 0 if found.equal else 1
