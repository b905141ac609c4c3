"""The judge: runs a scenario with its observations, computes the references it needs, and asks every oracle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from oracles import ledger as ledgers
from oracles import lines
from oracles.account import Account, compare_rows
from oracles.band import Bands
from oracles.drive import Driven, DriverBands, DriverReferences, hold
from oracles.lines import CARRIES, Drive
from oracles.observe import observe
from oracles.reference import References, StateReferences, key_of, replay, row_at, twin
from oracles.registry import OBSERVATIONS, ORACLES, for_program
from oracles.states import compare_states
from oracles.verdict import Verdict, Violation
from subjects.sandbox import Sandbox
from subjects.scenario import ModelRef, Scenario
from subjects.state.canon import Reader
from subjects.trace import Trace

# Of how many scenarios one is run a second time as the variant of an oracle that needs two runs.
VARIANT_EVERY = 8
# Ambiguous rows of one program that are held against a twin.
TWINS = 4


@dataclass(slots=True)
class Judgement:
    """All verdicts on one scenario. `executed` is the program with its observations, which the traces and
    violations speak of.
    """

    executed: Scenario
    account: Account
    verdicts: list[Verdict] = field(default_factory=list)
    variant: Account | None = None

    @property
    def violations(self) -> list[Violation]:
        """All violations, the one to report first: the earliest step, and of these the most specific oracle."""
        rank = {o.name: o.rank for o in ORACLES}
        found = [v for verdict in self.verdicts for v in verdict.violations]
        return sorted(found, key=lambda v: (v.check.step, rank[v.oracle]))

    @property
    def judged(self) -> bool:
        """Whether anything was compared that says more than "it did not crash"."""
        return bool(self.violations) or any(v.compared for v in self.verdicts if v.oracle not in ("liveness", "decode"))

    @property
    def unknown(self) -> list[str]:
        """Reasons why something could not be judged."""
        return [reason for v in self.verdicts for reason in v.unknown]


class Judge:
    """Judges scenarios of one model on one build.

    sandbox runs the subject and the references (references always in fresh contexts). cache: folder for measured
    bands, None for none.
    """

    def __init__(self, sandbox: Sandbox, model: ModelRef, path: Path, build: str, cache: Path | None = None):
        self.sandbox, self.model, self.path = sandbox, model, path
        self.references, self.state_references = References(), StateReferences()
        self.reader = Reader()
        self._many = lambda programs: sandbox.run_many(programs, path, fresh=True)
        self._build, self._cache = f"{build}|{sandbox.driver.name if sandbox.driver else ''}", cache
        self.driver_references = DriverReferences(model, self._many)
        self.driver_bands: DriverBands | None = None
        self.bands = Bands(lambda programs: sandbox.run_many(programs, path, fresh=True), model, build, cache)

    def judge(
        self,
        scenario: Scenario,
        *,
        fresh: bool = False,
        fault: str = "",
        variants: bool | None = None,
        observed: bool = True,
    ) -> Judgement:
        """Run and judge one scenario. `variants` None runs them for one scenario in VARIANT_EVERY, chosen by its
        key.
        """
        number = int(scenario.key(), 16)
        # what comes after a broken duty says nothing, so nothing is added behind it
        observed = observed and not scenario.misuse and scenario.driver is None
        program = observe(scenario, OBSERVATIONS, variety=number) if observed else scenario
        trace = self.sandbox.run(program, self.path, fresh=fresh, fault=fault)
        result = self.assess(program, trace)
        if not scenario.misuse and (variants or (variants is None and number % VARIANT_EVERY == 0)):
            for oracle in for_program(program):
                first, other = oracle.base(program), oracle.variant(program)
                if first is not None and other is not None and trace.end.how == "ok":
                    # both runs in fresh contexts: the comparison is bit for bit, and a pooled context has a past
                    base = trace
                    pooled = not fresh and program.driver is None  # with a driver contexts are always of its own
                    if pooled or first.key() != program.key():
                        base = self.sandbox.run(first, self.path, fresh=True, fault=fault)
                    second = self.sandbox.run(other, self.path, fresh=True, fault=fault or oracle.variant_fault(base))
                    result.variant = Account(ledgers.Ledger(other, second))
                    account = Account(self._read(first, base))
                    result.verdicts.append(oracle.compare(account, result.variant))
        return result

    def _read(self, program: Scenario, trace: Trace) -> ledgers.Ledger:
        """The ledger of a run for a comparison with another run."""
        return ledgers.Ledger(program, trace) if program.driver else ledgers.read(program, trace)

    def assess(self, program: Scenario, trace: Trace) -> Judgement:
        """Judge a trace, new or stored. Of a program that breaks a duty only how it ended is judged."""
        drive: Drive | None = None
        if not trace.facts:
            ledger = ledgers.Ledger(program, trace)
        elif program.driver is None:
            ledger = ledgers.read(program, trace)
        else:
            ledger, drive = lines.read(program, trace)
        oracles = for_program(program)
        if program.misuse:
            account = Account(ledger)
            void = ("the caller broke a duty",)
            verdicts = [
                oracle.judge(account) if oracle.name == "liveness" else Verdict(oracle=oracle.name, unknown=void)
                for oracle in oracles
            ]
            return Judgement(program, account, verdicts)
        wanted = [key_of(c) for c in ledger.rows]
        missing = self.references.missing(wanted)
        states = self.state_references.missing(key_of(c) for c in ledger.states if c.chain)
        if missing or states:
            facts = trace.facts[0]
            histories = [replay(self.model, self.path, key) for key in missing]
            histories += [replay(self.model, self.path, key, saves) for key, saves in states]
            traces = self.sandbox.replay_many(histories)
            for key, done in zip(missing, traces[: len(missing)], strict=True):
                self.references.put(key, done, facts.n_vocab, facts.n_embd)
            for (key, saves), done in zip(states, traces[len(missing) :], strict=True):
                self.state_references.put(key, saves, done)
        account = compare_rows(ledger, self.references, self.bands)
        account.states = compare_states(ledger, self.state_references, self.bands, self.reader)
        self.references.evict()
        self.state_references.evict()
        if program.driver is None:
            self._settle(account)
        elif drive is not None:
            self._hold(account, drive)
        return Judgement(program, account, [oracle.judge(account) for oracle in oracles])

    def _hold(self, account: Account, drive: Drive) -> None:
        """Compare what was drafted with what clean targets, drafts and drivers draft."""
        ledger = account.ledger
        assert ledger.scenario.driver is not None
        if self.driver_bands is None:
            self.driver_bands = DriverBands(
                self.model,
                self._many,
                ledger.trace.facts[0].n_vocab,
                self._build,
                self._cache,
            )
        apart = ledger.scenario.driver.kind in CARRIES and not ledger.trace.facts[0].draft_shares
        account.driven = Driven(drive, ledger.scenario.driver, apart)
        params = [ledger.moments[c.step].params for c in drive.claims]
        hold(account.driven, ledger.scenario, params, self.driver_references, self.driver_bands, self.bands.share)

    def _settle(self, account: Account) -> None:
        """Hold ambiguous rows against their twins: with equal batches an honest library differs by next to nothing."""
        rows = [i for i, c in enumerate(account.compared) if c.ambiguous][:TWINS]
        for i in rows:
            difference = self.twin_error(account, account.compared[i].claim)
            account.compared[i] = replace(account.compared[i], twin=difference)

    def twin_error(self, account: Account, claim: ledgers.RowClaim) -> float | None:
        """Largest difference of a row from its twin, None where there is no twin (see oracles.reference)."""
        program = twin(account.ledger, claim)
        if program is None:
            return None
        trace = self.sandbox.run(program, self.path, fresh=True)
        row = row_at(trace, claim.seq, claim.pos) if trace.end.how == "ok" else -1
        if row < 0:
            return None
        return float(np.abs(account.ledger.trace.logit_rows()[claim.row] - trace.logit_rows()[row]).max())
