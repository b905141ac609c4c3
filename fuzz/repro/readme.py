"""A finding as text: README.md for a bug report, and the same without markup for the terminal."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from fuzz.repro import commands, driver_readme, plain, words
from fuzz.repro.phrases import count
from fuzz.repro.text import WIDTH, bullets, fill, number, numbered, scrub
from oracles.verdict import Check
from subjects.scenario import ModelRef
from subjects.trace import Trace

if TYPE_CHECKING:
    from fuzz.finding import Finding

LOG_LINES = 3
# of the environment, in this order, and only what a reader of a bug report asks for; all of it is in environment.json
_SHOWN = ("build", "llama_cpp", "fingerprint", "drivers", "system_info", "cpu", "platform", "compiler")


def readme(finding: Finding, trace: Trace, reference: Trace | None = None) -> str:
    """README.md: first the rule, then what happens, the program, the argument, the sizes, and how to see it oneself."""
    blocks = [
        finding.rule,
        f"## {finding.title}",
        _because(finding),
        "### Smallest program",
        _model(finding),
        numbered(words.program(finding.scenario, trace)),
    ]
    if finding.culprit is not None and finding.culprit < len(finding.scenario.ops):
        why = (
            "the first one after which continuing is wrong"
            if finding.check.kind == "rows"
            else "its answer, or what it leaves, is wrong"
        )
        blocks.append(f"Operation {finding.culprit} is to blame: {why}.")
    blocks += ["### What was seen", bullets(_observed(finding, trace, reference))]
    clean = _clean(finding, reference)
    if clean:
        blocks += ["### What a clean run shows", *clean]
    if finding.end:
        blocks += ["### How it ended", f"```\n{scrub(finding.end).strip()}\n```"]
    if finding.attached:
        blocks += ["### Other oracles said of the same run", bullets([scrub(a) for a in finding.attached])]
    blocks += ["### How to see it", *_ways(finding), "### Environment", bullets(_environment(finding))]
    return "\n\n".join(blocks) + "\n"


def explain(finding: Finding, trace: Trace, reference: Trace | None = None) -> str:
    """Plain text of the same content, with the positions of every sequence after every operation."""
    blocks = [
        fill(finding.rule),
        fill(finding.title),
        fill(_because(finding)),
        fill(_model(finding).replace("`", "")),
        "Program",
    ]
    blocks[-1] += "\n" + "\n".join(_steps(finding, trace))
    blocks.append("Seen\n" + "\n".join(fill(line, "  ") for line in _observed(finding, trace, reference)))
    clean = _clean(finding, reference)
    if clean:
        blocks.append("A clean run\n" + "\n".join(textwrap.indent(block, "  ") for block in clean))
    if finding.end:
        blocks.append("End\n" + textwrap.indent(scrub(finding.end).strip(), "  "))
    if finding.attached:
        blocks.append("Other oracles said\n" + "\n".join(fill(scrub(a), "  ") for a in finding.attached))
    blocks.append(
        "Environment\n"
        + "\n".join(fill(line.replace("**", "").replace("`", ""), "  ") for line in _environment(finding))
    )
    return "\n\n".join(blocks).replace("**never returns**", "never returns") + "\n"


# --- parts ------------------------------------------------------------------------------------------------------------


def _because(finding: Finding) -> str:
    if finding.violation is None:
        return "The process that makes these calls does not live to see the last one return."
    because, what = finding.violation.because, finding.check.what
    # what tells crashes apart has no numbers of the run
    return because.replace(what, scrub(finding.end).strip()) if finding.end and what else because


def _model(finding: Finding) -> str:
    ref, params = finding.scenario.model, words.params_text(finding.scenario.params)
    if finding.scenario.driver is None:
        return f"Model: {_model_name(ref, 'repro.py')}; {finding.memory} memory. Context: {params}."
    (_, ref), *drafts = driver_readme.models(finding)
    model = f"Model: {_model_name(ref, '`redraft models write`')}; {finding.memory} memory."
    more = "".join(f" {what}: {_model_name(m, '`redraft models write`')}." for what, m in drafts)
    return f"{model}{more} Context: {params}. {driver_readme.setup(finding)}"


def _model_name(ref: ModelRef, writer: str) -> str:
    if ref.recipe is not None:
        return f"generated, `{ref.recipe}` version {ref.version}, seed {ref.seed} ({writer} writes it)"
    return f"the given file `{ref.label()}`" + (f" (SHA-256 {ref.sha256})" if ref.sha256 else "")


def _steps(finding: Finding, trace: Trace) -> list[str]:
    lines: list[str] = []
    ops = finding.scenario.ops
    for step, text in zip(trace.steps, words.program(finding.scenario, trace), strict=True):
        mark = ">" if step.op == finding.culprit else " "
        lines.append(textwrap.fill(text, WIDTH, initial_indent=f"{mark} {step.op:2}. ", subsequent_indent=" " * 8))
        if step.pos:
            lines.append(f"        afterwards {words.positions(step)}")
        lines += [fill(f"log: {scrub(line).strip()}", " " * 8) for line in step.log[-LOG_LINES:]]
        if len(step.log) > LOG_LINES:
            lines.append(f"        ({count(len(step.log) - LOG_LINES, 'line')} of the log before that: see stderr.txt)")
    reached = len(trace.steps)
    lines += [f"  {i:2}. ({op.__struct_config__.tag}: not reached)" for i, op in enumerate(ops) if i >= reached]
    return lines


def _observed(finding: Finding, trace: Trace, reference: Trace | None) -> list[str]:
    check, v = finding.check, finding.violation
    lines: list[str] = []
    if check.kind == "rows":
        lines += _rows(finding, trace, reference)
    elif check.kind == "state":
        lines += _state(finding)
    elif check.kind == "positions" and check.step < len(trace.steps):
        step = trace.steps[check.step]
        got = step.pos[check.seq] if 0 <= check.seq < len(step.pos) else None
        lines.append(
            f"after operation {check.step} sequence {check.seq} has (pos_min, pos_max) {got}, not {check.expected}"
        )
    elif check.kind == "answer" and check.step < len(trace.steps):
        step = trace.steps[check.step]
        wanted = " or ".join(map(str, check.expected))
        lines.append(
            f"operation {check.step} answered {step.rc if step.rc is not None else step.value}, expected {wanted}"
        )
    elif check.kind == "blob" and check.step < len(trace.steps):
        lines.append(_blobs(check, trace))
    elif check.kind == "draft":
        lines += driver_readme.observed(finding, trace)
    elif check.kind == "alive":
        verb = "never returned and was killed" if finding.hang else f"ended the process{_how(trace)}"
        lines.append(f"operation {check.step} {verb}; the process must survive it")
    n, m = finding.reproduced
    lines.append(f"reproduced in {n} of {count(m, 'run')}, each in fresh contexts")
    if v is not None and v.suspects and finding.culprit is None:
        lines.append("suspected operations: " + ", ".join(str(s) for s in v.suspects))
    if finding.known:
        lines.append(f"known: {finding.known}")
    return lines


def _rows(finding: Finding, trace: Trace, reference: Trace | None) -> list[str]:
    check, v = finding.check, finding.violation
    _, _, row = plain.find_row(plain.lower(finding.scenario, trace), check.row)
    what = "hidden rows" if check.hidden else "logits"
    lines = [f"first divergent row: sequence {row.seq}, position {row.pos} ({what})"]
    if v is not None:
        band = v.band or check.band
        ratio = f", {number(v.error / band)} times the band" if band > 0 and v.error < sys.float_info.max else ""
        error = f"{v.error:.4g}" if v.error < sys.float_info.max else "not finite"
        lines.append(
            f"max abs difference {error} against a band of {band:.2g} (honest differences measured here){ratio}"
        )
        if v.nmse > 0:
            lines.append(f"NMSE {v.nmse:.2g}")
        lines += [rung for rung in v.rungs if not rung.startswith("band")]
    if reference is not None and not check.hidden and 0 <= check.ref_row < len(reference.logit_rows()):
        ours, clean = trace.logit_rows()[check.row], reference.logit_rows()[check.ref_row]
        a, b = int(ours.argmax()), int(clean.argmax())
        lines.append(
            f"greedy token there: {a}" + (", the same in a clean context" if a == b else f", in a clean context {b}")
        )
    return lines


def _state(finding: Finding) -> list[str]:
    check, v = finding.check, finding.violation
    lines = [f"first part that differs in the state of sequence {check.seq}: {check.what}"]
    if v is not None and v.band > 0:
        lines.append(
            f"max abs difference {v.error:.4g} against a band of {v.band:.2g} (honest differences of that tensor "
            f"measured here), {number(v.error / v.band)} times the band"
        )
    return lines


def _blobs(check: Check, trace: Trace) -> str:
    if check.what == "neighbour":
        a, b = (trace.steps[i].blobs[-1] for i in check.expected)
    else:
        a, b = (trace.steps[check.step].blobs[i] for i in check.expected[:2])
    if check.what == "size":
        return f"operation {check.step}: {count(a.size, 'byte')} promised or given, {b.moved} moved"
    left = f"{count(a.size, 'byte')} (SHA-256 {a.sha}…)"
    return f"operation {check.step}: blob of {left} against {b.size} ({b.sha}…)"


def _how(trace: Trace) -> str:
    names = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
    if trace.end.how == "signal":
        return f" by {names.get(trace.end.code, f'signal {trace.end.code}')}"
    return f" with exit code {trace.end.code}" if trace.end.how == "exit" else ""


def _clean(finding: Finding, reference: Trace | None) -> list[str]:
    program = finding.check.reference
    if program is None or reference is None:
        return []
    if program.driver is not None:
        told = numbered(driver_readme.clean(finding, reference))
        last = "The draft at its end is what the program above must make."
        return ["With a target, a draft and a driver of its own:", told, last]
    blocks = ["In a clean context of its own:", numbered(words.program(program, reference))]
    if finding.check.kind == "state":
        told = f"What it saves is what the program above must have in operation {finding.check.step}."
        return [*blocks, told]
    try:
        _, _, row = plain.find_row(plain.lower(program, reference), finding.check.ref_row)
    except LookupError:
        return blocks
    return [*blocks, f"Its row at sequence {row.seq}, position {row.pos} is what the program above must give."]


def _ways(finding: Finding) -> list[str]:
    verdict = "the process dies there" if finding.check.kind == "alive" else "exit code 1: reproduced, 0: not"
    model = "writes the model too; needs llama-cpp-python and numpy"
    make = "python repro.py --write-model model.gguf\n"
    run = "python repro.py"
    if finding.scenario.model.recipe is None:
        file = commands.model_file(finding.scenario.model)
        model, make, run = "needs llama-cpp-python and numpy", "", f"python repro.py --model {file}"
    ours = f"With redraft, in the folder of this finding{_options(finding)}:\n\n```\n{commands.replay(finding)}\n```"
    compiled = commands.compile_line(finding)
    places = f"`S` and `L` are the headers and the libraries that `{commands.doctor(finding)}` prints"
    if finding.scenario.driver is not None:
        lines = "\n".join([*driver_readme.programs(finding), compiled])
        return [ours, f"With llama.h and common/speculative.h ({verdict}); {places}:\n\n```\n{lines}\n```"]
    return [
        ours,
        f"With Python ({model}; {verdict}):\n\n```\n{run}\n```",
        f"With llama.h; {places}:\n\n```\n{make}{compiled}\n```",
    ]


def _options(finding: Finding) -> str:
    told = commands.told(finding)
    return f" ({'; '.join(told)})" if told else ""


def _environment(finding: Finding) -> list[str]:
    env = {"build": finding.build, **finding.environment}
    lines = [f"**{name.replace('_', ' ')}**: {env[name]}" for name in _SHOWN if name in env]
    if finding.seed is not None:
        lines.append(
            f"**found by**: redraft fuzz{finding.found_by}, seed {finding.seed}"
            + (f", job {finding.job}" if finding.job is not None else "")
        )
    return [*lines, f"**signature**: `{finding.signature}`"]
