"""The server lives: after every request, cancel, refused restore and malformed file."""

from __future__ import annotations

import msgspec

from oracles.crash import crash_text
from oracles.server.account import ServerAccount
from oracles.server.base import ServerOracle
from oracles.verdict import Check, Verdict, Violation
from subjects.server.trace import ended

RULE = "llama-server's README is silent; a request with valid arguments must be answered, and the next one too."
_HOW = {"hang": "was given no answer", "broken": "lost its connection, while the server lives"}


class Alive(ServerOracle):
    """The server ended or hung, or a request broke the connection."""

    name = "server-alive"
    title = "alive"
    rank = 0

    def judge(self, account: ServerAccount) -> Verdict:
        """Judge the end of the run."""
        trace, program = account.trace, account.program
        end, log, whose = trace.end, trace.log, ""
        if end.how == "ok" and account.fallen is not None and account.fallen[1].how in ("signal", "exit"):
            reply, fell, log = account.fallen
            end = msgspec.structs.replace(fell, request=reply.request)
            whose = ", asked of a server that keeps nothing,"
        if end.how == "ok":
            return Verdict(oracle=self.name, compared=1)
        if end.how == "error" or (end.how == "start" and end.number >= 0):  # it refused flags or model, or is slow
            return Verdict(oracle=self.name, unknown=(f"not started: {end.text}",))
        text = end.text if end.how == "broken" else crash_text(ended(end), log)
        step = max(end.request, 0)
        name = str(program.requests[step].__struct_config__.tag) if end.request >= 0 else "the start"
        how = _HOW.get(end.how, "ended the server")
        check = Check(kind="alive", step=step, what=text)
        found = Violation(
            oracle=self.name,
            key=f"server-alive:{text}",
            rule=RULE,
            because=f"Request {step} ({name}){whose} must be answered; but it {how}: {text}",
            check=check,
            kind="crash",
            suspects=(step,),
        )
        return Verdict(oracle=self.name, violations=(found,), compared=1)
