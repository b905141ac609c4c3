"""Slot files: what was saved is restored, what cannot be restored is answered as an error."""

from __future__ import annotations

from oracles.server.account import ServerAccount
from oracles.server.base import ServerOracle
from oracles.verdict import Check, Verdict, Violation
from subjects.server.scenario import DamageFile, EraseSlot, RestoreSlot, SaveSlot
from subjects.server.trace import Reply

RULE = (
    "llama-server's README says that a slot's prompt cache is saved to a file and restored from it; what cannot be "
    "restored must be answered as an error."
)


class SlotFiles(ServerOracle):
    """Save, restore and erase are answered with what they did."""

    # Every number of a slot is one that there is: the server counts round.

    name = "server-slot"
    title = "slot files"
    rank = 1

    def judge(self, account: ServerAccount) -> Verdict:
        """Follow the files of a run."""
        program, found, compared = account.program, [], 0
        unknown: list[str] = []
        saved: dict[int, int] = {}
        """tokens in each good file"""
        damaged: set[int] = set()
        for reply in account.trace.replies:
            request = program.requests[reply.request]
            if reply.status == 0:
                break  # the server ended, which another oracle judges
            match request:
                case SaveSlot():
                    damaged.discard(request.file)
                    if reply.request in account.tainted:
                        damaged.add(request.file)
                    saved.pop(request.file, None)
                    if reply.status == 200:
                        saved[request.file] = reply.n
                    compared += 1
                    if reply.status != 200:
                        found.append(_wrong(reply, "save", "saved"))
                case RestoreSlot():
                    if request.file in damaged:
                        unknown.append("a changed slot file may be taken or refused")
                        continue
                    n = saved.get(request.file)
                    if n is not None and program.flags.shared_cache and reply.status != 200:
                        unknown.append("slots share a cache that may be full")
                        continue
                    compared += 1
                    if n is None:
                        if reply.status == 200:
                            found.append(_wrong(reply, "restore", "refused: there is no such file"))
                    elif reply.status != 200:
                        found.append(_wrong(reply, "restore", f"restored, with the {n} tokens that were saved"))
                    elif reply.n != n:
                        found.append(_wrong(reply, "count", f"{n} tokens restored, as were saved"))
                case EraseSlot():
                    compared += 1
                    if reply.status != 200:
                        found.append(_wrong(reply, "erase", "erased"))
                case DamageFile():
                    if reply.n:
                        damaged.add(request.file)
                case _:
                    pass
        return Verdict(oracle=self.name, violations=tuple(found), compared=compared, unknown=tuple(unknown))


def _wrong(reply: Reply, key: str, must: str) -> Violation:
    got = f"status {reply.status}" + (f": {reply.error}" if reply.error else f", {reply.n} tokens")
    check = Check(kind="reply", step=reply.request, what="slot", expected=(reply.status, reply.n))
    because = f"Request {reply.request} must be {must}; but the answer is {got}."
    return Violation(oracle=SlotFiles.name, key=f"slot-{key}", rule=RULE, because=because, check=check)
