"""What a finding of a program with a driver says of its check, beside what all findings say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuzz.repro import words
from fuzz.repro.driver_cpp import write_line
from fuzz.repro.driver_words import driver_text
from subjects.scenario import ModelRef, Propose
from subjects.trace import Step, Trace

if TYPE_CHECKING:
    from fuzz.finding import Finding

_NAMES = {"row": "the hidden row that it begins with", "tokens": "its tokens", "logits": "its logits"}


def setup(finding: Finding) -> str:
    """The driver in a line."""
    d = finding.scenario.driver
    return f"Driver: {driver_text(d)}." if d is not None else ""


def observed(finding: Finding, trace: Trace) -> list[str]:
    """What the check saw, and the rungs that the verdict stands on."""
    check, v = finding.check, finding.violation
    step = next((s for s in trace.steps if s.op == check.step), None)
    lines: list[str] = []
    if step is not None and check.what in _NAMES:
        lines.append(_divergent(finding, step))
        seqs = getattr(finding.scenario.ops[step.op], "seqs", ())
        if check.seq in seqs[: len(step.drafts)]:
            drafts = step.drafts[seqs.index(check.seq)]
            same = ", as a clean target, draft and driver do" if tuple(drafts) == check.expected else (
                f"; a clean target, draft and driver draft {_tokens(check.expected)}")  # fmt: skip
            lines.append(f"it drafts {_tokens(drafts)}{same}")
    elif step is not None:
        who = f" of sequence {check.seq}" if check.seq >= 0 else ""
        what = {"target": "rows of the target", "positions": "positions", "two drivers": "drafts"}.get(
            check.what, f"driver state (made {check.what})"
        )
        lines.append(f"first wrong in operation {check.step}: {what}{who}")
        if check.what == "positions" and step.pos:
            lines.append(f"positions there: {words.positions(step)}")
    return [*lines, *(v.rungs if v is not None else ())]


def clean(finding: Finding, reference: Trace | None) -> list[str]:
    """The reference in words, with what it drafts at its end; for the numbered list of a README."""
    program = finding.check.reference
    return words.program(program, reference) if program is not None and reference is not None else []


def programs(finding: Finding) -> list[str]:
    """Commands that write the models."""
    d = finding.scenario.driver
    assert d is not None
    made = [(finding.scenario.model, "model.gguf"), *([(d.draft, "draft.gguf")] if d.draft is not None else [])]
    return [write_line(m, path) for m, path in made if m.recipe is not None]


def models(finding: Finding) -> list[tuple[str, ModelRef]]:
    """What has to be at hand, by what it is for."""
    d = finding.scenario.driver
    return [("Model", finding.scenario.model), *([("Draft", d.draft)] if d is not None and d.draft is not None else [])]


def _divergent(finding: Finding, step: Step) -> str:
    seq = finding.check.seq
    if isinstance(finding.scenario.ops[step.op], Propose):
        pos = step.pos[seq][1] + 1 if seq < len(step.pos) else -1
        return (
            f"first divergent draft: operation {step.op}, sequence {seq}, position {pos} ({_NAMES[finding.check.what]})"
        )
    rows = [r.pos for b in step.batches for r in b.rows if r.seq == seq]
    at = f", position {rows[0]}" if rows else ""
    return (
        f"first divergent row: operation {step.op}, sequence {seq}{at} (the hidden row that the driver pairs it with)"
    )


def _tokens(tokens: list[int] | tuple[int, ...]) -> str:
    return " ".join(map(str, tokens)) if tokens else "nothing"
