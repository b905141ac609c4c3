"""The writer of generated models as text, to be pasted into programs for somebody without redraft."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from fuzz.repro.text import WIDTH
from subjects import ggufwriter


def source() -> str:
    """The writer: Python, numpy only. It has imports of its own, but for json."""
    text = Path(ggufwriter.__file__).read_text("utf-8")
    # its docstring speaks of redraft
    first = ast.parse(text).body[0]
    return "".join(text.splitlines(keepends=True)[first.end_lineno :]).strip()


def literal(entries: list[Any]) -> str:
    """A list of plain data as a Python expression, of as few lines as fit."""
    lines = [""]
    for i, entry in enumerate(entries):
        text = json.dumps(entry, separators=(",", ":")) + ("," if i + 1 < len(entries) else "")
        if lines[-1] and len(lines[-1]) + len(text) >= WIDTH:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + text
    return 'json.loads(r"""[\n' + "\n".join(lines) + '\n]""")'
