"""Faults planted between the client and a real server, by which it is proved that the oracles see them: what the server
gets, or what is read of its answer, is changed as a server with the fault would behave.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import msgspec

from subjects.server.scenario import shared
from subjects.server.trace import Reply


class Plant:
    """One fault, for one run of a program. `request` changes what is sent, `answer` what came back."""

    pid = 0
    """of the server"""
    drafts = False
    """whether it drafts"""

    def __init__(self) -> None:
        self.before: list[tuple[int, ...]] = []
        """prompts that were sent"""

    def request(self, body: dict[str, Any], asked: Reply, n_vocab: int) -> dict[str, Any]:
        """What is sent in place of `body`."""
        known = max((shared(p, asked.prompt) for p in self.before), default=0)
        changed = self.changed(body, known, n_vocab)
        self.before.append(asked.prompt)
        return changed

    def changed(self, body: dict[str, Any], known: int, n_vocab: int) -> dict[str, Any]:
        """The same, where `known` tokens of the prompt were sent before."""
        return body

    def answer(self, reply: Reply) -> Reply:
        """What is read in place of `reply`."""
        return reply


class Stale(Plant):
    """A prompt whose beginning was sent before is answered as if another token stood there: a cache of something
    else."""

    def changed(self, body: dict[str, Any], known: int, n_vocab: int) -> dict[str, Any]:
        if "prompt" not in body or known < 8:
            return body
        prompt = list(body["prompt"])
        prompt[known // 2] = (prompt[known // 2] + 1) % n_vocab
        return {**body, "prompt": prompt}


class Leak(Plant):
    """A prompt that has nothing in common with the one before is answered as if that one's first token stood in it."""

    def changed(self, body: dict[str, Any], known: int, n_vocab: int) -> dict[str, Any]:
        if "prompt" not in body or not self.before or not self.before[-1] or shared(self.before[-1], body["prompt"]):
            return body
        return {**body, "prompt": [self.before[-1][0], *body["prompt"][1:]]}


class Forget(Plant):
    """Where a prompt goes on from what the server holds, drafts are accepted less often."""

    def answer(self, reply: Reply) -> Reply:
        if not reply.cached:
            return reply
        reply.accepted = reply.accepted // 2
        return reply


class Unverified(Plant):
    """With drafting the second token of an answer is its first again: a draft that the model did not verify."""

    def answer(self, reply: Reply) -> Reply:
        if not self.drafts or len(reply.tokens) < 2:
            return reply
        return msgspec.structs.replace(reply, tokens=(reply.tokens[0], reply.tokens[0], *reply.tokens[2:]))


class Accept(Plant):
    """A slot action that is refused is answered as if it were done."""

    def answer(self, reply: Reply) -> Reply:
        slot_action = not reply.prompt and not reply.messages
        return msgspec.structs.replace(reply, status=200, error="") if slot_action and reply.status >= 400 else reply


class Die(Plant):
    """The server ends when a prompt comes whose beginning was sent before."""

    def changed(self, body: dict[str, Any], known: int, n_vocab: int) -> dict[str, Any]:
        if known >= 8:
            os.kill(self.pid, signal.SIGSEGV)
        return body


PLANTED: dict[str, type[Plant]] = {
    "server-stale": Stale,
    "server-leak": Leak,
    "server-forget": Forget,
    "server-unverified": Unverified,
    "server-accept": Accept,
    "server-die": Die,
}
CANARY = "server-stale"
