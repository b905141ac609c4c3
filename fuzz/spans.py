"""Sets of positions, histories, and how llama.cpp cuts a batch into micro-batches: pure functions on small tuples."""

from __future__ import annotations

from collections.abc import Sequence

Spans = tuple[tuple[int, int], ...]
"""Positions as half-open ranges, sorted and apart."""
History = tuple[tuple[int, int], ...]
"""Where content comes from: (stream, end) segments; a negative stream is content that nothing else has."""


def spans_cut(spans: Spans, a: int, b: int) -> Spans:
    """Without the positions in [a, b)."""
    out = []
    for lo, hi in spans:
        if lo < min(hi, a):
            out.append((lo, min(hi, a)))
        if max(lo, b) < hi:
            out.append((max(lo, b), hi))
    return tuple(out)


def spans_in(spans: Spans, a: int, b: int) -> Spans:
    """Only the positions in [a, b)."""
    return tuple((max(lo, a), min(hi, b)) for lo, hi in spans if max(lo, a) < min(hi, b))


def spans_join(spans: Sequence[tuple[int, int]]) -> Spans:
    """Sorted, with touching spans merged."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(hi, out[-1][1]))
        else:
            out.append((lo, hi))
    return tuple(out)


def spans_size(spans: Spans) -> int:
    """How many positions."""
    return sum(hi - lo for lo, hi in spans)


# --- how a batch is split ---------------------------------------------------------------------------------------------


def last_ubatch(
    rows: Sequence[int], n_ubatch: int, *, sequential: bool, keep_tail: int, by_seq: bool
) -> dict[int, int]:
    """Tokens of every sequence in its last micro-batch; `rows` are the sequence ids of a batch in order.

    src/llama-batch.cpp, split_equal() and (`by_seq`, when all rows are outputs because of embeddings) split_seq().
    """
    index: dict[int, list[int]] = {}
    for i, s in enumerate(rows):
        index.setdefault(s, []).append(i)
    done = dict.fromkeys(index, 0)
    last: dict[int, int] = {}
    if by_seq:
        return {s: (len(ix) - 1) % n_ubatch + 1 for s, ix in index.items()}
    while any(done[s] < len(ix) for s, ix in index.items()):
        cur: list[int] = []
        for i, s in enumerate(rows):
            if s in cur or i < index[s][min(done[s], len(index[s]) - 1)] or done[s] >= len(index[s]):
                continue
            if sequential and cur and s != cur[-1] + 1:
                continue
            cur.append(s)
            if len(cur) > n_ubatch:
                break
        n = min(len(index[s]) - done[s] for s in cur)
        n = max(1, min(n, n_ubatch // len(cur)))
        took = dict.fromkeys(cur, n)
        if keep_tail > 0:
            kept = 0
            for s in cur:
                if 0 < len(index[s]) - done[s] - n < keep_tail:
                    break
                kept += 1
            if kept == 0:
                left = len(index[cur[0]]) - done[cur[0]]
                took[cur[0]] = left if left <= n_ubatch else max(1, min(n, left - keep_tail))
                kept = 1
            took = {s: took[s] for s in cur[:kept]}
        for s, k in took.items():
            done[s] += k
            last[s] = k
    return last


def history_cut(history: History, n: int) -> History:
    """The part of a history below position n."""
    out: list[tuple[int, int]] = []
    for stream, end in history:
        out.append((stream, min(end, n)))
        if end >= n:
            break
    return tuple(out) if n > 0 else ()
