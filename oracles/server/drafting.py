"""Drafting on and off agree, and what is restored does not cost accepted drafts."""

from __future__ import annotations

from oracles.server.account import ServerAccount
from oracles.server.answer import violation
from oracles.server.base import ServerOracle
from oracles.server.words import did, difference, place
from oracles.verdict import Check, Verdict, Violation

RULE = (
    "llama-server's documentation says of speculative decoding that drafts are verified by the model; greedy answers "
    "must therefore be the same with and without it."
)
ACCEPTANCE = (
    "llama-server's README is silent; a restored state must draft like the state that was saved, or drafts are "
    "silently worse."
)


class Drafting(ServerOracle):
    """With drafting off, the same program gets the answer that it must get."""

    name = "server-drafting"
    title = "drafting on and off agree"
    rank = 3

    def judge(self, account: ServerAccount) -> Verdict:
        """Judge wrong answers by whether they are right without drafting."""
        if account.program.driver is None:
            return Verdict(oracle=self.name)
        without = [o for o in account.others if o.what == "drafting"]
        found = [
            violation(
                self.name,
                o.held,
                RULE,
                "drafting",
                f"The answer to {place(o.reply)} must be the same with drafting on and off; but {difference(o.held)}, "
                f"after {did(o.reply)}. With drafting off the same requests are answered as the cold server does.",
            )
            for o in without
            if o.held.wrong
        ]
        return Verdict(oracle=self.name, violations=tuple(found), compared=sum(not h.ambiguous for h in account.held))


class Acceptance(ServerOracle):
    """The drafts that are accepted after something was restored are as many as a server accepts that keeps nothing."""

    name = "server-acceptance"
    title = "acceptance after a restore"
    rank = 5

    def judge(self, account: ServerAccount) -> Verdict:
        """Judge answers that went on from what the server held."""
        found = []
        for c in account.clean:
            if not c.wrong:
                continue
            mine, theirs = sum(a for a, _ in c.probes), sum(b for _, b in c.probes)
            because = (
                f"The answer to {place(c.reply)} is the clean server's, so as many drafts must be accepted, because "
                f"both draft behind the same tokens; but {c.reply.accepted} of {c.reply.drafted} are, after "
                f"{did(c.reply)}, where a server that keeps nothing accepts {c.clean.accepted} of {c.clean.drafted}."
            )
            check = Check(
                kind="reply",
                step=c.reply.request,
                seq=c.reply.part,
                expected=(c.reply.accepted, c.clean.accepted),
                what="acceptance",
            )
            found.append(
                Violation(
                    oracle=self.name,
                    key="acceptance",
                    rule=ACCEPTANCE,
                    because=because,
                    check=check,
                    rungs=(
                        f"{len(c.probes)} other continuations of the same state: {mine} drafts accepted, {theirs} by a "
                        "server that keeps nothing (a near tie of the draft would show with one of them only)",
                    ),
                )
            )
        return Verdict(oracle=self.name, violations=tuple(found), compared=len(account.clean))
