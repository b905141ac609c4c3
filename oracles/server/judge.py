"""The judge of llama-server: runs a program, asks cold servers for the answers that it must get, and every oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from oracles.lines import CARRIES
from oracles.server import variants as other
from oracles.server.account import Clean, Held, Other, ServerAccount, hold
from oracles.server.band import ServerBands, cold_flags
from oracles.server.cold import Cold
from oracles.server.registry import ORACLES
from oracles.server.spoilt import misdrafted, spoilt
from oracles.verdict import Verdict, Violation
from subjects.sandbox import SandboxError
from subjects.scenario import ModelRef
from subjects.server.build import ServerBuild
from subjects.server.process import ServerError
from subjects.server.runner import run
from subjects.server.scenario import DamageFile, Restart, RestoreSlot, SaveSlot, ServerScenario
from subjects.server.trace import Reply, ServerTrace

# Of how many programs one is run a second time with other histories.
VARIANT_EVERY = 8
_FULL = "Context size has been exceeded"
"""how the server answers where its cache has no room left"""
# Servers that do not start one after the other, after which there is no use in trying.
_STARTS = 5
# Drivers whose drafts come of a state that is restored; the others search the text that was said before.
KEEP_STATE = frozenset({*CARRIES, "draft-simple"})


@dataclass(slots=True)
class ServerJudgement:
    """All verdicts on one program. cold: the cold server's answers by (request, part); where drafts were lost those of
    one that drafts."""

    program: ServerScenario
    account: ServerAccount
    verdicts: list[Verdict] = field(default_factory=list)
    cold: dict[tuple[int, int], Reply] = field(default_factory=dict)

    @property
    def trace(self) -> ServerTrace:
        """The run."""
        return self.account.trace

    @property
    def violations(self) -> list[Violation]:
        """All violations, the one to report first: the earliest request, and of these the most specific oracle."""
        rank = {o.name: o.rank for o in ORACLES}
        found = [v for verdict in self.verdicts for v in verdict.violations]
        return sorted(found, key=lambda v: (v.check.step, rank[v.oracle]))

    @property
    def checked(self) -> int:
        """Requests that were judged: completions held against the cold server, and slot actions."""
        return sum(v.compared for v in self.verdicts if v.oracle in ("server-answer", "server-slot"))

    @property
    def judged(self) -> bool:
        """Whether anything was compared that says more than "it lives"."""
        return bool(self.violations) or self.checked > 0

    @property
    def unknown(self) -> list[str]:
        """Reasons why something could not be judged."""
        return [reason for v in self.verdicts for reason in v.unknown]


class NoServer(SandboxError):
    """No server starts; the message is what it said."""


class ServerJudge:
    """Judges programs of one model on one llama-server; a context manager, which ends the cold servers.

    cache: folder for measured bands, None for none.
    """

    def __init__(
        self, build: ServerBuild, model: ModelRef, path: Path, draft: Path | None, cache: Path | None, memory: str = "?"
    ):
        self._build, self._path, self._draft, self._memory = build, path, draft, memory
        self._cold = Cold(build.path, path, draft)
        self._bands = ServerBands(self._plain, build.fingerprint, model, cache)
        self.max_rss_kb = 0
        self._refused = 0
        """servers that did not start, one after the other"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the cold servers."""
        self._cold.close()

    def _plain(self, program: ServerScenario) -> ServerTrace:
        return run(program, self._build.path, self._path)

    def judge(
        self,
        program: ServerScenario,
        *,
        fresh: bool = False,
        fault: str = "",
        variants: bool | None = None,
        avoid: Iterable[str] = (),
    ) -> ServerJudgement:
        """Run and judge a program. fresh: with cold servers of its own. variants: run it with other histories too;
        None does so for one program in VARIANT_EVERY, and wherever an answer is wrong. avoid: known faults that may
        have spoilt answers, which are not judged then (see `oracles.server.spoilt`)."""
        if fresh:
            self._cold.forget()
        trace = run(program, self._build.path, self._path, self._draft, fault=fault)
        self.max_rss_kb = max(self.max_rss_kb, trace.max_rss_kb)
        self._started(trace)
        avoid = tuple(avoid)
        account = ServerAccount(
            program,
            trace,
            self._memory,
            spoilt=spoilt(avoid, program, trace),
            misdrafted=misdrafted(avoid, program, trace),
            tainted=tainted(program, trace),
        )
        result = ServerJudgement(program, account)
        try:
            self._hold(account, result, fresh)
            wrong = self._compare(account, fault, variants)
            if wrong is not None:
                return self.judge(wrong, fresh=fresh, fault=fault, variants=True, avoid=avoid)
        except ServerError:
            # a server that cannot answer cold says nothing of the one under test
            account.unjudged.append("a cold server did not answer")
        result.cold |= {(c.reply.request, c.reply.part): c.clean for c in account.clean if c.wrong}
        result.verdicts = [oracle.judge(account) for oracle in ORACLES]
        return result

    def _started(self, trace: ServerTrace) -> None:
        """Raises NoServer where servers do not start, or not in time."""
        end = trace.end
        refused = end.request < 0 and (end.how == "error" or (end.how == "start" and end.number >= 0))
        self._refused = self._refused + 1 if refused else 0
        if self._refused >= _STARTS or (refused and end.how == "start" and end.number == 0):
            raise NoServer(end.text)

    # --- against the cold server --------------------------------------------------------------------------------------

    def _hold(self, account: ServerAccount, result: ServerJudgement, fresh: bool) -> None:
        program = account.program
        band = self._bands.band(program.flags)
        flags = cold_flags(program.flags)
        for reply in account.trace.replies:
            if not (reply.prompt or reply.messages) or reply.status == 0:
                continue
            if reply.request in account.spoilt:
                account.unjudged.append(f"the known fault {account.spoilt[reply.request]} may have spoilt it")
                continue
            if reply.request in account.tainted:
                account.unjudged.append("a changed slot file was taken before")
                continue
            try:
                cold = self._cold.reply(reply, flags)
            except ServerError as e:
                account.fallen = (reply, e.end, e.log)
                raise
            result.cold[reply.request, reply.part] = cold
            if _too_long(reply) and _too_long(cold):
                account.refused += 1
            elif reply.status != 200 and program.flags.shared_cache and reply.error.startswith(_FULL):
                account.unjudged.append("slots share a cache that may be full")
            elif reply.status != 200:
                account.unanswered.append((reply, cold))
            elif cold.status != 200:
                account.unjudged.append("the cold server refuses it")
            elif band is None:
                account.unjudged.append("no band could be measured")
            else:
                held = hold(reply, cold, band)
                if held.wrong and fresh:  # a reference is never a context that was used before
                    cold = self._cold.reply(reply, flags, alone=True)
                    result.cold[reply.request, reply.part] = cold
                    held = hold(reply, cold, band)
                account.held.append(held)

    # --- against runs that differ in what must not matter -------------------------------------------------------------

    def _compare(self, account: ServerAccount, fault: str, variants: bool | None) -> ServerScenario | None:
        """Run what must not matter to an answer: to the first wrong one, or now and then to the last. The program with
        another history, where that is the one that is answered wrongly."""
        program = account.program
        wrong = next((h for h in account.held if h.wrong), None)
        regular = variants or (variants is None and int(program.key(), 16) % VARIANT_EVERY == 0)
        last = next((h for h in reversed(account.held) if h.reply.answered), None)
        target = wrong or (last if regular else None)
        if target is not None and variants is not False and account.trace.end.how == "ok":
            changed = other.other_histories(program, target.reply)
            again = self._again(changed, target.reply, fault)
            if again is not None:
                right = not hold(again, target.cold, target.band).wrong
                if not right and not target.wrong:
                    return changed
                # against the cold one, which says how sure it is of each token; that the other is right says the rest
                held = target if right else hold(target.reply, again, target.band)
                account.others.append(Other("history", target.reply, held))
        if wrong is not None and program.driver is not None and variants is not False:
            self._without_drafting(account, wrong, fault)
        if program.driver is not None and program.driver.kind in KEEP_STATE:
            self._acceptance(account, fault)
        return None

    def _again(self, program: ServerScenario | None, reply: Reply, fault: str) -> Reply | None:
        """The same reply of another program; None where it does not come to it, or to another prompt."""
        if program is None:
            return None
        trace = run(program, self._build.path, self._path, self._draft if program.driver else None, fault=fault)
        found = trace.reply(reply.request, reply.part)
        same = found is not None and (found.prompt, found.messages) == (reply.prompt, reply.messages)
        return found if same and found is not None and found.status == 200 else None

    def _without_drafting(self, account: ServerAccount, wrong: Held, fault: str) -> None:
        again = self._again(other.without_drafting(account.program, wrong.reply), wrong.reply, fault)
        if again is not None and not hold(again, wrong.cold, wrong.band).wrong:
            account.others.append(Other("drafting", wrong.reply, hold(wrong.reply, again, wrong.band)))

    def _acceptance(self, account: ServerAccount, fault: str) -> None:
        program = account.program
        clean_flags = cold_flags(program.flags)
        for h in account.held:
            if not (h.reply.answered and h.reply.cached and h.reply.drafted) or h.token != h.expected or h.wrong:
                continue
            # a pooled server may have lost drafts in the same way as the one under test
            restored = any(e.what in ("restored", "loaded") for e in h.reply.events)
            clean = self._cold.reply(h.reply, clean_flags, program.driver, alone=restored)
            if not restored and clean.accepted > h.reply.accepted:
                clean = self._cold.reply(h.reply, clean_flags, program.driver, alone=True)
            if clean.status != 200 or clean.tokens != h.reply.tokens:
                continue
            coarse = h.reply.request in account.misdrafted
            found = Clean(h.reply, clean, coarse=coarse)
            if found.drop > 0:
                found = Clean(h.reply, clean, self._probes(program, h.reply, fault), coarse)
            account.clean.append(found)
            if found.wrong:
                return

    def _probes(self, program: ServerScenario, reply: Reply, fault: str) -> tuple[tuple[int, int], ...]:
        assert program.driver is not None
        out = []
        flags = cold_flags(program.flags)
        for probe in other.continuations(program, reply):
            trace = run(probe, self._build.path, self._path, self._draft, fault=fault)
            mine = trace.reply(reply.request, reply.part)
            if mine is None or not mine.answered:
                continue
            clean = self._cold.reply(mine, flags, program.driver, alone=True)
            if clean.status == 200 and clean.tokens == mine.tokens:
                out.append((mine.accepted, clean.accepted))
        return tuple(out)


def _too_long(reply: Reply) -> bool:
    """Whether a prompt is refused because a slot has no room for it."""
    return reply.status == 400 and "exceeds the available context size" in reply.error


def tainted(program: ServerScenario, trace: ServerTrace) -> frozenset[int]:
    """The requests before which a server has taken a slot file that was changed, or saved by a server that had."""
    bad_files: set[int] = set()
    found: set[int] = set()
    bad = False
    for reply in trace.replies:
        if bad:
            found.add(reply.request)
        match program.requests[reply.request]:
            case DamageFile(file=file) if reply.n:
                bad_files.add(file)
            case SaveSlot(file=file) if reply.status == 200:
                bad_files.discard(file)
                if bad:
                    bad_files.add(file)
            case RestoreSlot(file=file) if file in bad_files and reply.status == 200:
                bad = True
            case Restart():
                bad = False
            case _:
                pass
    return frozenset(found)
