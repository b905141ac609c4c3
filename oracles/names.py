"""Names of functions, as demanglers and stacks write them, brought to one form."""

from __future__ import annotations

import re

# What an operator is called has brackets that are none.
_OPERATOR = re.compile(r"\boperator(?:\(\)|\[\]|<=>|<<=?|>>=?|<=?|>=?|->\*?)")
_HIDDEN = {ord(c): 0xE000 + i for i, c in enumerate("()[]<>")}
_SHOWN = {hidden: shown for shown, hidden in _HIDDEN.items()}
_QUALIFIERS = frozenset({"const", "volatile", "&", "&&", "noexcept"})


def plain(demangled: str) -> str:
    """A demangled name without parameters, template arguments and return type; empty where there is none.

    >>> plain("llama_kv_cache::seq_rm(int, int, int)")
    'llama_kv_cache::seq_rm'
    >>> plain("bool llama_kv_cells::operator<(int) const")
    'llama_kv_cells::operator<'
    """
    text = demangled.replace("(anonymous namespace)", "{anonymous}")
    text = re.sub(r"\)(?: (?:const|volatile|&&?))+(?=::)", ")", text)  # around a lambda
    text = _OPERATOR.sub(lambda found: found[0].translate(_HIDDEN), text)
    out: list[str] = []
    depth = 0
    for at, c in enumerate(text):
        if c in "(<[":
            depth += 1
        elif c in ")>]" and not (c == ">" and text[at - 1 : at] == "-"):
            depth = max(0, depth - 1)
        elif depth == 0:
            out.append(c)
    words = [w for w in "".join(out).split() if w not in _QUALIFIERS]
    # of "operator bool" and "operator new" the name goes on behind the space
    last = next((i for i, w in enumerate(words) if w.endswith("operator")), len(words) - 1)
    return " ".join(words[last:]).translate(_SHOWN)
