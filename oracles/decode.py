"""Decode's return codes: what llama_decode promises for each of them."""

from __future__ import annotations

from oracles.account import Account, Compared
from oracles.base import Oracle, OracleFailure
from oracles.ledger import HalfRestored, History, Moment, Undefined
from oracles.rows import clear_of_doubt, row_violation, where
from oracles.verdict import Check, Verdict, Violation
from subjects.contracts import rule
from subjects.scenario import Decode, Draft
from subjects.trace import Batch

RULE_ROLLBACK = rule("decode.full")
RULE_CODE = f"{rule('decode.success')}; this batch was valid and there was room for it"
RULE_ROWS = rule("decode.outputs")


def _abort_rule(rc: int | None) -> str:
    return rule("decode.fatal" if (rc or 0) < -1 else "decode.aborted")


class DecodeFailure(OracleFailure):
    """A return code of decode is not honest."""


class DecodeCodes(Oracle):
    """Return codes, memory after the codes that promise no change, and the state that an aborted decode leaves."""

    name = "decode"
    title = "decode's return codes"
    failure = DecodeFailure
    rank = 1

    def judge(self, account: Account) -> Verdict:
        """Judge every llama_decode of the program."""
        bad: list[Violation] = []
        compared = 0
        for m in account.ledger.moments:
            if not isinstance(m.op, Decode | Draft) or not m.step.done:
                continue
            for batch in m.step.batches:
                compared += 1
                found = self._batch(m, batch)
                if found:
                    bad.append(found)
                    break
        judged: list[Compared] = []
        for r in account.compared:
            shaper = account.shaper(r.claim)
            if shaper is None or not isinstance(shaper[0], Decode | Draft):
                continue
            judged.append(r)
            if r.wrong:
                because = (
                    f"Operation {shaper[1].step.op} (llama_decode) returned {shaper[1].step.rc} and its positions "
                    f"name the tokens that remain, so "
                    f"{where(account, r)} must be what a clean context gives for those; but its logits are off by up "
                    f"to {r.error:.3g}."
                )
                bad.append(
                    row_violation(
                        self.name,
                        account,
                        r,
                        key="decode:abort-state",
                        rule=_abort_rule(shaper[1].step.rc),
                        because=because,
                    )
                )
        n, unknown = clear_of_doubt(judged)
        return Verdict(oracle=self.name, violations=tuple(bad), compared=compared + n, unknown=unknown)

    def _violation(self, m: Moment, key: str, rule: str, because: str, expected: tuple[int, ...]) -> Violation:
        return Violation(
            oracle=self.name,
            key=f"decode:{key}",
            rule=rule,
            because=because,
            check=Check(kind="answer", step=m.step.op, expected=expected),
        )

    def _batch(self, m: Moment, batch: Batch) -> Violation | None:
        rc = batch.rc
        seqs = sorted({r.seq for r in batch.rows if 0 <= r.seq < m.params.n_seq_max})
        known = all(isinstance(m.before.get(s), History) for s in seqs)
        aborting = isinstance(m.op, Decode) and m.op.abort_after is not None
        if rc == 0:
            if batch.first < 0 and any(r.out for r in batch.rows):
                return self._violation(
                    m, "no-rows", RULE_ROWS, "llama_decode returned 0, but the output row cannot be read.", (0,)
                )
            return None
        if rc in (1, -1):
            for s in seqs:
                if m.step.pos[s] != m.pos_before[s] and isinstance(m.op, Decode):
                    because = (
                        f"llama_decode returned {rc}, so sequence {s} must keep positions {m.pos_before[s]}; but it "
                        f"has "
                        f"{m.step.pos[s]}."
                    )
                    check = Check(kind="positions", step=m.step.op, seq=s, expected=m.pos_before[s])
                    return Violation(
                        oracle=self.name, key=f"decode:changed:{rc}", rule=RULE_ROLLBACK, because=because, check=check
                    )
            if known and m.room and not any(isinstance(m.before.get(s), HalfRestored | Undefined) for s in m.before):
                because = (
                    f"The batch continues {_list(seqs)} at the next positions, with valid ids and room for "
                    f"{len(batch.rows)} rows, so llama_decode must "
                    f"return 0; but it returned {rc}."
                )
                return self._violation(m, f"refused:{rc}", RULE_CODE, because, (0,))
            return None
        if rc == 2 and not aborting:
            return self._violation(
                m, "aborted", RULE_CODE, "llama_decode returned 2 (aborted), but no abort callback fired.", (0,)
            )
        if rc is not None and rc < -1 and not aborting:
            return self._violation(m, f"fatal:{rc}", RULE_CODE, f"llama_decode returned {rc} for a valid batch.", (0,))
        for s in seqs:
            after = m.after.get(s)
            if isinstance(m.before.get(s), History) and isinstance(after, Undefined):
                before = m.before[s]
                assert isinstance(before, History)
                n = sum(r.seq == s for r in batch.rows)
                because = (
                    f"llama_decode returned {rc}; sequence {s} held {before.length} tokens and {n} were sent, so its "
                    f"last position must be one of {before.length - 1}..{before.length - 1 + n}; but its positions "
                    f"are {tuple(m.step.pos[s])}."
                )
                check = Check(kind="positions", step=m.step.op, seq=s, expected=m.pos_before[s])
                return Violation(
                    oracle=self.name, key="decode:abort-positions", rule=_abort_rule(rc), because=because, check=check
                )
        return None


def _list(seqs: list[int]) -> str:
    return "sequence " + ", ".join(map(str, seqs))
