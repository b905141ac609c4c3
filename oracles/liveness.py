"""Liveness: no program of valid calls ends the process, throws through the C interface or hangs; nor does any blob."""

from __future__ import annotations

import re
import signal
from typing import Literal

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.rows import NAME_OF
from oracles.verdict import Check, Verdict, Violation
from subjects.trace import End

RULE = (
    "llama.h is silent on calls that end the process; none of its return values says so, and the caller "
    "cannot protect itself"
)


_FILE = r"(?:[^:]*/)?([\w.+-]+\.(?:cpp|cc|c|h|hpp|cu|cuh)):\d+(?::\d+)?"
# "file:line: message", with the program's name before it (libc's assert) or a column (UBSan)
_PLACE = re.compile(rf"^(?:[\w.+-]+: )?{_FILE}: (.+)$")
_SUMMARY = re.compile(rf"^SUMMARY: \w+Sanitizer: ([\w-]+) {_FILE}")


class LivenessFailure(OracleFailure):
    """The process ended or hung."""


def crash_text(end: End, stderr: str) -> str:
    """What identifies a crash: the assertion with its file (no line number, lines move), the exception, or the signal.

    `GGML_ABORT` prints "file:line: message" straight to stderr; an uncaught exception prints libstdc++'s terminate
    lines.
    """
    if end.how == "hang":
        return "hang"
    lines = stderr.strip().splitlines()
    for line in lines:
        if found := _SUMMARY.match(line):
            return f"{found[2]}: {found[1]}"
        if found := _PLACE.match(line):
            return f"{found[1]}: {_without_numbers(found[2].strip())}"
    for i, line in enumerate(lines):
        if line.startswith("terminate called"):
            what = next((x.split("what():")[1].strip() for x in lines[i:] if "what():" in x), "")
            kind = re.search(r"instance of '([^']+)'", line)
            return f"uncaught {kind[1] if kind else 'exception'}: {what}"
    if end.how == "signal":
        try:
            return signal.Signals(end.code).name
        except ValueError:
            return f"signal {end.code}"
    return f"exit {end.code}"


def _without_numbers(text: str) -> str:
    """A message that was formatted, without the numbers of this run; those of assertions and of sanitizers say what it
    is."""
    return text if text.startswith(("GGML_ASSERT", "runtime error")) else re.sub(r"\b\d+\b", "N", text)


class Liveness(Oracle):
    """How the child ended."""

    name = "liveness"
    title = "liveness"
    failure = LivenessFailure
    rank = 0

    def judge(self, account: Account) -> Verdict:
        """Judge the end of the run."""
        trace = account.ledger.trace
        if trace.end.how == "error":
            return Verdict(oracle=self.name, unknown=(f"not started: {trace.end.text}",))
        if trace.end.how == "exit" and "Traceback" in trace.stderr:
            return Verdict(
                oracle=self.name, unknown=(f"redraft's own child failed: {trace.stderr.strip().splitlines()[-1]}",)
            )
        if trace.end.how == "ok":
            return Verdict(oracle=self.name, compared=1)
        moments = account.ledger.moments
        step = moments[-1].step.op if moments else 0
        name = NAME_OF[type(moments[-1].op)] if moments else "start"
        text = crash_text(trace.end, trace.stderr)
        how = "did not return" if trace.end.how == "hang" else "ended the process"
        misuse = account.ledger.scenario.misuse
        header = "speculative.h" if account.ledger.scenario.driver is not None else "llama.h"
        because = (
            f"Operation {step} ({name}) keeps what {header} asks of a caller, so it must return; but it {how}: {text}"
        )
        if misuse:
            because = (
                f"Operation {step} ({name}) breaks a duty of the caller (see `redraft contracts`), which a library may "
                f"answer with an error; but it {how}: {text}"
            )
        check = Check(kind="alive", step=step, what=text)
        kind: Literal["misuse", "crash"] = "misuse" if misuse else "crash"
        found = Violation(
            oracle=self.name,
            key=f"liveness:{text}",
            rule=RULE.replace("llama.h", header),
            because=because,
            check=check,
            kind=kind,
            suspects=(step,),
        )
        return Verdict(oracle=self.name, violations=(found,), compared=1)
