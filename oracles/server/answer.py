"""The answer is the cold server's: that of one without cache, checkpoints and drafting to the same request."""

from __future__ import annotations

from oracles.server.account import Held, ServerAccount
from oracles.server.base import ServerOracle
from oracles.server.words import did, difference, place, tokens
from oracles.verdict import Check, Verdict, Violation

RULE = (
    "llama-server's README says of cache_prompt that only the suffix that differs is processed again, and that the "
    "logits may differ by rounding; what is restored must therefore be what processing the whole prompt gives."
)


class Answer(ServerOracle):
    """The tokens of an answer, and their probabilities within the band, are those of a cold server; a near tie is
    one."""

    name = "server-answer"
    title = "answers"
    rank = 4

    def judge(self, account: ServerAccount) -> Verdict:
        """Judge every answer that was held against the cold one."""
        found = [violation(self.name, h) for h in account.held if h.wrong]
        for reply, cold in account.unanswered:
            clean = f"{len(cold.tokens)} tokens" if cold.status == 200 else f"status {cold.status}: {cold.error}"
            because = (
                f"{place(reply).capitalize()} must be answered, since its prompt fits into a slot; but the answer is "
                f"status {reply.status}: {reply.error} (a cold server's: {clean})"
            )
            check = Check(kind="reply", step=reply.request, seq=reply.part, what="status", expected=(reply.status, 200))
            found.append(Violation(oracle=self.name, key="status", rule=RULE, because=because, check=check))
        unknown = [*account.unjudged]
        unknown += ["a difference between noise and error" for h in account.held if h.ambiguous]
        return Verdict(
            oracle=self.name,
            violations=tuple(found),
            compared=account.refused + sum(h.compared > 0 and not h.ambiguous for h in account.held),
            unknown=tuple(unknown),
        )


def violation(oracle: str, h: Held, rule: str = RULE, what: str = "", because: str = "") -> Violation:
    """What is said of a wrong answer."""
    own = "length" if h.ends_elsewhere else "tokens" if h.parted else "logprob"
    lengths = (len(h.reply.tokens), len(h.cold.tokens))
    check = Check(
        kind="reply",
        step=h.reply.request,
        seq=h.reply.part,
        row=min(lengths) if own == "length" else h.row,
        band=h.band,
        expected=lengths if own == "length" else (h.token, h.expected),
        what=own if own == "length" else what or own,
    )
    argument = because or (
        f"The answer to {place(h.reply)} must equal the cold server's, because both continue the same "
        f"{tokens(h.reply.length)}; but {difference(h)}, after {did(h.reply)}."
    )
    if h.near_tie:
        tie = "near tie: yes, but the probabilities are far off"
    elif h.parted:
        tie = "near tie: no, the cold server is decided"
    else:
        tie = "tokens: the same, so no tie is in question"
    rungs = (f"{tokens(h.compared)} compared, {h.probable} of them with probabilities", tie)
    return Violation(
        oracle=oracle,
        key=what or own,
        rule=rule,
        because=argument,
        check=check,
        error=max(h.error, h.gap),
        band=h.band,
        rungs=rungs,
    )
