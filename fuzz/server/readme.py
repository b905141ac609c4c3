"""A finding on llama-server as text: README.md for a bug report, and the same without markup for the terminal."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from fuzz.repro.phrases import count
from fuzz.repro.text import WIDTH, bullets, fill, number, numbered, scrub
from fuzz.server import words
from subjects.scenario import ModelRef
from subjects.server.scenario import Together
from subjects.server.trace import Reply, ServerTrace

if TYPE_CHECKING:
    from fuzz.server.finding import Cold, ServerFinding

LOG_LINES = 12
TOPS = 3
_DYING = re.compile(r"GGML_ASSERT|GGML_ABORT|terminate called|fatal error")
# of the environment, in this order, and only what a reader of a bug report asks for; all of it is in environment.json
_SHOWN = ("system_info", "cpu", "platform", "compiler")


def readme(finding: ServerFinding, trace: ServerTrace, cold: Cold) -> str:
    """README.md: first the rule, then what happens, the requests, the argument, what was seen, and how to see it."""
    blocks = [
        finding.rule,
        f"## {finding.title}",
        _because(finding),
        f"### {_heading(finding)}",
        _model(finding),
        numbered(words.program(finding.scenario, trace)),
        "### What was seen",
        bullets(_observed(finding, trace, cold)),
    ]
    clean = _clean(finding, cold)
    if clean:
        blocks += ["### What a cold server answers", clean]
    if finding.end:
        blocks += ["### How it ended", f"```\n{scrub(finding.end).strip()}\n```"]
    if finding.attached:
        blocks += ["### Other oracles said of the same run", bullets(scrub(a) for a in finding.attached)]
    blocks += ["### How to see it", *_ways(finding), "### Environment", bullets(_environment(finding))]
    return "\n\n".join(blocks) + "\n"


def explain(finding: ServerFinding, trace: ServerTrace, cold: Cold) -> str:
    """Plain text of the same content, with the tokens of every prompt and answer."""
    blocks = [
        fill(finding.rule),
        fill(finding.title),
        fill(_because(finding)),
        fill(_model(finding).replace("`", "")),
        f"{_heading(finding)}\n" + "\n".join(_steps(finding, trace)),
        "Seen\n" + "\n".join(fill(line, "  ") for line in _observed(finding, trace, cold)),
    ]
    clean = _clean(finding, cold)
    if clean:
        blocks.append("A cold server\n" + fill(clean.replace("`", ""), "  "))
    if finding.end:
        blocks.append("End\n" + textwrap.indent(scrub(finding.end).strip(), "  "))
    if finding.check.kind == "alive" and trace.log:
        blocks.append("Of the log (all of it is in server.log)\n" + textwrap.indent("\n".join(_last(trace.log)), "  "))
    if finding.attached:
        blocks.append("Other oracles said\n" + "\n".join(fill(scrub(a), "  ") for a in finding.attached))
    blocks.append(
        "Environment\n"
        + "\n".join(fill(line.replace("**", "").replace("`", ""), "  ") for line in _environment(finding))
    )
    return "\n\n".join(blocks).replace("**", "") + "\n"


# --- parts ------------------------------------------------------------------------------------------------------------


def _because(finding: ServerFinding) -> str:
    if finding.violation is None:
        return "The server must answer the next request because no request may end it; but it does not live to do so."
    because, what = finding.violation.because, finding.check.what
    # what tells crashes apart has no numbers of the run
    return scrub(because.replace(what, finding.end.strip()) if finding.end and what else because)


def _heading(finding: ServerFinding) -> str:
    n, m = finding.reproduced
    if n == m:
        return "Smallest program"
    # what does not show every time is not reduced, but for what comes behind the request that is blamed
    program, original = finding.scenario, finding.original
    whole = msgspec.structs.replace(original, requests=original.requests[: len(program.requests)]).key()
    reduced = "not reduced: " if program.key() == whole else ""
    return f"{'Program' if reduced else 'Smallest program'} ({reduced}it shows in {n} of {count(m, 'run')})"


def _model(finding: ServerFinding) -> str:
    p = finding.scenario
    text = f"Model: {_model_name(p.model)}; {finding.memory} memory."
    if p.driver is not None and p.driver.draft is not None:
        text += f" Draft: {_model_name(p.driver.draft)}."
    flags = words.flags_text(p.flags, p.driver)
    slots = f"{count(p.flags.parallel, 'slot')} of {count(p.flags.slot_ctx, 'token')}"
    return f"{text} Server: {slots}; flags: " + (f"`{flags}`." if flags else "redraft's usual ones, see repro.sh.")


def _model_name(ref: ModelRef) -> str:
    if ref.recipe is not None:
        return f"generated, `{ref.recipe}` version {ref.version}, seed {ref.seed} (model.py writes it)"
    return f"the given file `{ref.label()}`" + (f" (SHA-256 {ref.sha256})" if ref.sha256 else "")


def _steps(finding: ServerFinding, trace: ServerTrace) -> list[str]:
    lines: list[str] = []
    requests = finding.scenario.requests
    told = words.program(finding.scenario, trace)
    for i, text in enumerate(told):
        mark = ">" if i == finding.check.step else " "
        lines.append(textwrap.fill(text, WIDTH, initial_indent=f"{mark} {i:2}. ", subsequent_indent=" " * 8))
        together = isinstance(requests[i], Together)
        for r in (r for r in trace.replies if r.request == i):
            who = f"({r.part}) " if together else ""
            if r.prompt:
                lines.append(fill(f"{who}prompt: {_tokens(r.prompt)}", " " * 8))
            lines += [fill(f"{who}{role}: {text}", " " * 8) for role, text in r.messages]
            if r.tokens:
                lines.append(fill(f"{who}answer: {_tokens(r.tokens)}", " " * 8))
    lines += [f"  {i:2}. ({requests[i].__struct_config__.tag}: not reached)" for i in range(len(told), len(requests))]
    return lines


def _last(log: str) -> list[str]:
    """The last lines up to an assertion; what follows is where the process was."""
    lines = scrub(log).strip().splitlines()
    end = next((i + 1 for i, line in enumerate(lines) if _DYING.search(line)), len(lines))
    return lines[max(end - LOG_LINES, 0) : end]


def _tokens(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))


def _observed(finding: ServerFinding, trace: ServerTrace, cold: Cold) -> list[str]:
    check = finding.check
    part = max(check.seq, 0)
    reply, clean = trace.reply(check.step, part), cold.get((check.step, part))
    lines: list[str] = []
    if check.kind == "alive":
        lines.append(f"request {check.step} {_end(finding, trace)}; it must live and answer")
    elif reply is not None:
        lines += _differs(finding, reply, clean)
        if did := words.deeds(reply):
            lines.append(f"what the server did for request {check.step}: {', '.join(did)}")
        if reply.drafted:
            rounds = ", ".join(f"{n}/{of}" for n, of in reply.rounds())
            told = f" (round by round {rounds})" if rounds else ""
            lines.append(f"drafting: {reply.accepted} of {count(reply.drafted, 'token')} accepted{told}")
    n, m = finding.reproduced
    lines.append(f"reproduced in {n} of {count(m, 'run')}, each on a server of its own")
    if finding.known:
        lines.append(f"known: {finding.known}")
    return lines


def _differs(finding: ServerFinding, reply: Reply, clean: Reply | None) -> list[str]:
    check, v = finding.check, finding.violation
    where = f"request {check.step}" + (f", part {check.seq}" if _together(finding) else "")
    got, wanted = check.expected if len(check.expected) == 2 else (None, None)
    if check.what == "slot":
        return [f"{where} answered {words.refusal(reply) if reply.status != 200 else count(reply.n, 'token')}"]
    if check.what == "acceptance":
        return [f"{where}: {got} of {count(reply.drafted, 'drafted token')} accepted, at least {wanted} must be"]
    if check.what == "status":
        told = f", where a cold server answers {count(len(clean.tokens), 'token')}" if clean is not None else ""
        return [f"{where} answered {words.refusal(reply)}{told}"]
    if check.what == "length":
        return [f"{where} is answered with {count(got or 0, 'token')}, not {wanted}: `{_tokens(reply.tokens)}`"]
    lines: list[str] = []
    if got is not None and got != wanted:
        lines.append(f"first divergent token: {where}, token {check.row} of the answer is {got}, not {wanted}")
    elif check.row >= 0:
        lines.append(f"first divergent probability: {where}, token {check.row} of the answer")
    if v is not None and v.error > 0:
        band = v.band or check.band
        error = f"{v.error:.4g}" if v.error < sys.float_info.max else "not finite"
        ratio = f", {number(v.error / band)} times the band" if band > 0 and v.error < sys.float_info.max else ""
        lines.append(
            f"log-probabilities differ by up to {error} against a band of {band:.2g} (honest differences measured "
            f"here){ratio}"
        )
    if clean is not None and (got == wanted or check.what == "logprob"):
        lines += words.worst(reply, clean, v.band if v is not None else check.band)
    if v is not None:
        lines += [rung for rung in v.rungs if not rung.startswith("band")]
    lines.append(f"answered: `{_tokens(reply.tokens)}`")
    return lines


def _together(finding: ServerFinding) -> bool:
    i = finding.check.step
    return i < len(finding.scenario.requests) and isinstance(finding.scenario.requests[i], Together)


def _end(finding: ServerFinding, trace: ServerTrace) -> str:
    if finding.hang:
        return "was never answered, and the server was killed"
    if trace.end.how == "broken":
        return "was not answered: the connection broke, and the server lived on"
    return f"ended the server{_how(trace)}"


def _how(trace: ServerTrace) -> str:
    names = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV"}
    if trace.end.how == "signal":
        return f" by {names.get(trace.end.number, f'signal {trace.end.number}')}"
    if trace.end.how == "exit":
        return f" with exit code {trace.end.number}"
    return " before it took one" if trace.end.how == "start" else ""


def _clean(finding: ServerFinding, cold: Mapping[tuple[int, int], Reply]) -> str:
    clean = cold.get((finding.check.step, max(finding.check.seq, 0)))
    if clean is None or finding.check.kind != "reply":
        return ""
    if finding.check.what == "acceptance":
        n = finding.check.expected[-1]
        # cold.json may have the answer of one that does not draft
        accepted = f"{n} of {count(clean.drafted, 'drafted token')}" if clean.drafted else count(n, "drafted token")
        return (
            "To the same request a server that has answered nothing before, with the same drafting, but no cache and "
            f"no checkpoints, gives the same answer, and accepts {accepted}."
        )
    text = f"To the same request a server that has answered nothing before, with no cache, no checkpoints and no \
drafting, answers `{_tokens(clean.tokens)}`."
    row = finding.check.row
    if 0 <= row < len(clean.tops) and clean.tops[row]:
        best = ", ".join(f"{t} ({p:.4g})" for t, p in clean.tops[row][:TOPS])
        text += f" Its most probable tokens at token {row}, with logarithms of probability: {best}."
    return text


def _ways(finding: ServerFinding) -> list[str]:
    d = finding.scenario.driver
    given = [m for m in (finding.scenario.model, d.draft if d else None) if m is not None and m.recipe is None]
    files = "".join(f" {shlex.quote(ref.label())}" for ref in given)
    numpy = "" if len(given) == 1 + (d is not None and d.draft is not None) else "; writes the model, with numpy"
    return [
        f"With curl and python3 (exit code 1: reproduced, 0: not{numpy}){_several(finding)}:\n\n```\n./repro.sh{files} "
        "path/to/llama-server\n```",
        "With redraft, in the folder of this finding (`--server-bin PATH` takes another server than `redraft build "
        f"--server` made):\n\n```\nredraft replay .{finding.options}\n```",
    ]


def _several(finding: ServerFinding) -> str:
    n, m = finding.reproduced
    return "" if n == m else f"; it shows in {n} of {count(m, 'run')}, so it may take several"


def _environment(finding: ServerFinding) -> list[str]:
    env = finding.environment
    lines = [f"**server**: {words.seen_with(finding.build, env)}"]
    lines += [f"**{name.replace('_', ' ')}**: {env[name]}" for name in _SHOWN if name in env]
    if finding.seed is not None:
        job = f", job {finding.job}" if finding.job is not None else ""
        lines.append(f"**found by**: redraft fuzz{finding.found_by}, seed {finding.seed}{job}")
    return [*lines, f"**signature**: `{finding.signature}`"]
