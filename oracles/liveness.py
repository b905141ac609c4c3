"""Liveness: no program of valid calls ends the process, throws through the C interface or hangs; nor does any blob."""

from __future__ import annotations

from typing import Literal

from oracles.account import Account
from oracles.base import Oracle, OracleFailure
from oracles.crash import crash_text
from oracles.rows import NAME_OF
from oracles.verdict import Check, Verdict, Violation

RULE = (
    "llama.h is silent on calls that end the process; none of its return values says so, and the caller "
    "cannot protect itself"
)


class LivenessFailure(OracleFailure):
    """The process ended or hung."""


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
