"""The answer does not depend on what other conversations said before."""

from __future__ import annotations

from oracles.server.account import ServerAccount
from oracles.server.answer import violation
from oracles.server.base import ServerOracle
from oracles.server.words import did, difference, place, tokens
from oracles.verdict import Verdict

RULE = "llama-server's README is silent; an answer must not depend on what the server was asked in other conversations."


class History(ServerOracle):
    """The same last request after different unrelated histories is answered alike."""

    name = "server-history"
    title = "independence from other conversations"
    rank = 2

    def judge(self, account: ServerAccount) -> Verdict:
        """Judge the run beside one in which the other conversations said something else."""
        others = [o for o in account.others if o.what == "history"]
        found = [
            violation(
                self.name,
                o.held,
                RULE,
                "history",
                f"The answer to {place(o.reply)} must be the same whatever other conversations said before, because "
                f"its own prompt of {tokens(o.reply.length)} is the same; but it is not the one that is given when the "
                f"others say something else: {difference(o.held)}, after {did(o.reply)}.",
            )
            for o in others
            if o.held.wrong
        ]
        return Verdict(oracle=self.name, violations=tuple(found), compared=len(others))
