"""Prints a finding of a program with a speculative driver as a stand-alone C++ program over llama.h and
common/speculative.h.

What a driver keeps is private, so a wrong hidden row is shown by what is drafted from it: the tokens, and the logits of
the last one, against those of a clean target, draft and driver in the same program.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuzz.repro import commands
from fuzz.repro import driver_pieces as pieces
from fuzz.repro.cpp import head, params_cpp
from fuzz.repro.driver_calls import INDENT, Calls
from fuzz.repro.python import HANG_SECONDS
from fuzz.repro.words import sentence
from oracles.band import SAFETY, least_share
from subjects.driving import Seat
from subjects.scenario import ContextParams, ModelRef, Propose, Reopen, Rewind, Verify
from subjects.trace import Batch, Row, Step, Trace

if TYPE_CHECKING:
    from fuzz.finding import Finding

_COMPARED = ("row", "tokens", "logits")
_PIECE = {
    "must": pieces.MUST,
    "cut": pieces.CUT,
    "checkpoint": pieces.CHECKPOINT,
    "restore": pieces.RESTORE,
    "draft_row": pieces.DRAFT_ROW,
    "difference": pieces.DIFFERENCE,
    "show": pieces.SHOW,
}


def write_line(model: ModelRef, path: str) -> str:
    """How the model of a recipe is written."""
    return f"redraft models write {model.recipe} {path}" + (f" --seed {model.seed}" if model.seed else "")


def repro_cpp(finding: Finding, trace: Trace, reference: Trace | None) -> str:
    """The program: 1 as exit code (or a signal) where the finding is there, 0 where it is not."""
    return _Program(finding, trace, reference).text()


@dataclass(frozen=True)
class _Ask:
    """The draft that is compared: `i` of those of the last statement. row: number of its logits from the end, 0 for
    none. tokens: what the clean one stands behind, where that is not what the reference decodes."""

    pos: int
    last: int
    n_max: int
    i: int = 0
    row: int = -1
    tokens: tuple[int, ...] = ()


class _Program:
    def __init__(self, finding: Finding, trace: Trace, reference: Trace | None):
        self.finding, self.check, self.scenario = finding, finding.check, finding.scenario
        self.trace, self.reference = trace, reference
        assert self.scenario.driver is not None
        self.driver = self.scenario.driver
        self.names: dict[ContextParams, str] = {}
        self.notes: list[str] = []
        self.target_rows = self.removed = False
        drafts = self.driver.kind.startswith("draft-")
        compared = self.check.kind == "draft" and self.check.what in _COMPARED
        # the tokens are sampled where they were; logits can be read only where the backend does not sample
        self.sampling = self.driver.backend_sampling and (not compared or self.check.what == "tokens")
        self.rows = compared and drafts and (not self.sampling or self.driver.kind == "draft-simple")
        self._name(self.scenario.params)
        for op in self.scenario.ops:
            if isinstance(op, Reopen) and op.params is not None:
                self._name(op.params)
        self.late_clean = False if self.driver.late else None
        self.calls = Calls("s", self.scenario, trace, self.names, True if self.driver.late else None)
        self.helpers: set[str] = set()

    def _name(self, p: ContextParams) -> str:
        return self.names.setdefault(p, f"params_{len(self.names) + 1}" if self.names else "params")

    def _step(self) -> Step | None:
        return next((s for s in self.trace.steps if s.op == self.check.step and not s.skipped), None)

    # --- the program --------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """All of it."""
        calls, step = self.calls, self._step()
        calls.until(self.check.step)
        if step is None:
            verdict = self._survived()
        elif self.check.kind == "draft" and self.check.what in _COMPARED:
            verdict = self._draft(step)
        elif self.check.kind == "draft" and self.check.what == "target":
            verdict = self._target(step)
        elif self.check.kind == "draft" and self.check.what == "positions":
            verdict = self._positions(step)
        elif self.check.kind == "draft" and self.check.what == "two drivers":
            verdict = self._two(step)
        elif self.check.kind == "draft":
            verdict = self._state(step)
        else:
            verdict = self._alive(step)
        return self._assemble(calls.lines, textwrap.indent(verdict, INDENT))

    def _assemble(self, lines: list[str], verdict: str) -> str:
        helpers = self.helpers | self.calls.helpers
        body = "\n".join(lines)
        declared = "".join(f"{INDENT}checkpoint slot{n};\n" for n in sorted(self.calls.slots))
        if self.finding.hang:
            declared = f"{INDENT}alarm({HANG_SECONDS}); // it hung when it was found\n{declared}"
        text = [self._head(), '\n#include "common.h"\n', '#include "log.h"\n' if "log" in helpers else ""]
        text += ['#include "speculative.h"\n\n', *(f"#include <{name}>\n" for name in pieces.INCLUDES)]
        text += ["\n#include <unistd.h>\n" if self.finding.hang else "", pieces.SIDE]
        for p, name in self.names.items():
            if f", {name}()" not in body:
                continue
            text.append(
                f"\nstatic llama_context_params {name}() {{\n"
                f"    llama_context_params params = llama_context_default_params();\n{params_cpp(p)}\n"
                "    return params;\n}\n"
            )
        text.append(pieces.setup(self.driver, sampling=self.sampling))
        if self.target_rows or "draft_row" in helpers:
            text.append(pieces.N_VOCAB)
        if "decode(" in body:
            text.append(self._decode())
        if " draft(" in body:
            removed, ok, flag = "", "", ""
            if self.removed:
                removed, ok = ", bool * removed = nullptr", "const bool ok = "
                flag = " " * 12 + "if (removed && !ok) {\n" + " " * 16 + "*removed = false;\n" + " " * 12 + "}\n"
            piece = pieces.DRAFT.replace("@REMOVED_ARG@", removed).replace("@OK@", ok)
            text.append(piece.replace("@REMOVED@", flag))
        offered = pieces.OFFERED if self.driver.state else pieces.LEFT_OUT
        text += [piece.replace("@OFFERED@", offered) for name, piece in _PIECE.items() if name in helpers]
        text += [pieces.load(self.driver, self.scenario.model.n_gpu_layers), f"{INDENT}side s;\n", declared]
        return "".join([*text, body, "\n\n", verdict, "\n}\n"])

    def _decode(self) -> str:
        row, arg, read = (pieces.ROW, ", std::vector<row> * rows = nullptr", pieces.READ)
        if not self.target_rows:
            row = arg = read = ""
        return pieces.DECODE.replace("@ROW@", row).replace("@ROWS_ARG@", arg).replace("@READ@", read)

    def _head(self) -> str:
        d, model = self.driver, self.scenario.model
        notes = commands.places(self.finding)
        for ref, path in ((model, "model.gguf"), (d.draft, "draft.gguf")):
            if ref is None:
                continue
            if ref.recipe is not None:
                notes.append(f"{path} is written by: {write_line(ref, path)}")
            else:
                notes.append(commands.given(ref))
        if d.impl != "native":
            notes.append("It was seen with redraft's own driver in Python; here llama.cpp's makes the same calls.")
        if self.driver.backend_sampling and not self.sampling:
            notes.append("It was seen with backend sampling, which is off here, so that logits can be read.")
        return head(self.finding, commands.compile_line(self.finding), [*notes, *self.notes])

    # --- a wrong draft ------------------------------------------------------------------------------------------------

    def _draft(self, step: Step) -> str:
        op = self.scenario.ops[step.op]
        if isinstance(op, Propose):
            ask = self._proposed(op, step)
        else:
            ask = self._behind(step) if self.driver.kind == "draft-eagle3" else self._in_place(step)
        calls = self.calls
        got = f"drafts[{ask.i}]"
        self.helpers.add("show")
        rows, alone = self.rows, self.rows and ask.row == 0
        if alone:
            calls.note("once more for this sequence alone, whose last row is found then")
            more = f"{{ {self.check.seq}, {ask.pos}, {ask.last}, {ask.n_max} }}"
            calls.say(f"const std::vector<llama_tokens> alone = draft(s, {{ {more} }});")
        if rows:
            self.helpers |= {"draft_row", "difference"}
            calls.say(f"const std::vector<float> row = draft_row(s, {ask.row or -1});")
        calls.say("teardown(s);")
        clean = self._clean(ask)
        if clean is None:
            calls.say(f"const llama_tokens expected = {{ {', '.join(map(str, self.check.expected))} }};")
            rows = False
        else:
            calls.lines += clean.lines
            self.helpers |= clean.helpers
            self.calls.slots |= clean.slots
        want = "expected" if clean is None else "clean_drafts[0]"
        if rows:
            calls.say("const std::vector<float> clean_row = draft_row(clean, -1);")
        if clean is not None:
            calls.say("teardown(clean);")
        said = f'printf("drafts%s; a clean context drafts%s", show({got}).c_str(), show({want}).c_str());'
        if not rows:
            return (
                f"const bool wrong = {got} != {want};\n{said}\n"
                'printf(": %s\\n", wrong ? "WRONG DRAFT" : "not reproduced");\nreturn wrong;'
            )
        band = self._band()
        return f"""\
const bool  same  = {got} == {want}{f" && alone[0] == {want}" if alone else ""};
const float error = difference(row, clean_row);
const bool  wrong = !same || !(error <= {band:.2g});
{said}
if (same) {{
    printf(", the logits of the last one differ by up to %.4g (honest differences here: {band:.2g})", error);
}}
printf(": %s\\n", wrong ? "WRONG DRAFT" : "not reproduced");
return wrong;"""

    def _proposed(self, op: Propose, step: Step) -> _Ask:
        """The proposal itself, where the row of its sequence can be told; otherwise that sequence once more."""
        calls, seq = self.calls, self.check.seq
        i = op.seqs.index(seq) if seq in op.seqs else 0
        ask = _Ask(len(calls.seats[op.seqs[i]].tokens), step.args[i], op.n_max, i)
        # sequences leave the last decode where p_min stops them; a draft has its rows in the order of sequences
        mixed = len(op.seqs) > 1
        told = not mixed or (self.driver.p_min <= 0 and self.driver.kind != "draft-eagle3")
        row = sorted(op.seqs).index(op.seqs[i]) - len(op.seqs)
        calls.note(sentence(self.scenario, step))
        calls.propose(op, step, into="drafts")
        return replace(ask, row=row if told else 0)

    def _in_place(self, step: Step) -> _Ask:
        """The row was seen in a batch that the driver processed: in its place a draft that begins with the same token,
        which is made from the same row."""
        calls, op, seq = self.calls, self.scenario.ops[step.op], self.check.seq
        v = self.finding.violation
        again = isinstance(op, Verify) and v is not None and v.suspects[:1] == (step.op,) and len(step.batches) > 1
        if again:
            assert isinstance(op, Verify)
            calls.note(sentence(self.scenario, step))
            calls.verify(op, step, again=False)
        batch = step.batches[1 if again else 0]
        first = next(r for r in batch.rows if r.seq == seq)
        calls.note(
            f"here the driver processed token {first.token} at position {first.pos} of sequence {seq} with a wrong "
            "hidden row; a draft that begins with this token is made from that row"
        )
        calls.say(
            f"const std::vector<llama_tokens> drafts = draft(s, {{ {{ {seq}, {first.pos}, {first.token}, -1 }} }});"
        )
        return _Ask(first.pos, first.token, -1)

    def _behind(self, step: Step) -> _Ask:
        """The same of a driver that pairs rows in another way when it drafts: the batch, and a draft behind it."""
        calls, seq = self.calls, self.check.seq
        calls.step(step)
        seat = calls.seats[seq]
        if seat.proposal is not None and seat.proposal.at >= 0:  # left open: all of it is taken
            p = seat.proposal
            calls.say(f"common_speculative_accept(s.spec, {seq}, {len(p.drafts)});")
            calls.seats[seq] = seat = Seat((*seat.tokens, p.last, *p.drafts))
        first = next(r for b in step.batches for r in b.rows if r.seq == seq)
        calls.note(
            f"here the driver processed token {first.token} at position {first.pos} of sequence {seq} with a wrong "
            "hidden row; a draft behind it sees what came of that"
        )
        last = self.check.reference.ops[-1] if self.check.reference is not None else None
        token = last.last[0] if isinstance(last, Propose) and last.last else 0
        at = len(seat.tokens)
        calls.say(f"const std::vector<llama_tokens> drafts = draft(s, {{ {{ {seq}, {at}, {token}, -1 }} }});")
        return _Ask(at, token, -1, tokens=seat.tokens)

    def _clean(self, ask: _Ask) -> Calls | None:
        """The reference in the same program; None where nothing is known of it."""
        program, trace = self.check.reference, self.reference
        if ask.pos == 0 or ask.tokens:
            params = program.params if program is not None else self._params()
            program = msgspec.structs.replace(self.scenario, params=params, ops=())
            trace = Trace([], [], self.trace.end)
        if program is None or trace is None:
            return None
        self._name(program.params)
        clean = Calls("clean", program, trace, self.names, self.late_clean)
        clean.lines = ["", f"{INDENT}// what must come out: the same tokens in a clean target, draft and driver",
                       f"{INDENT}side clean;", *clean.lines]  # fmt: skip
        clean.until(len(program.ops) - 1)
        n = program.params.n_batch
        for i in range(0, len(ask.tokens), n):
            piece = ask.tokens[i : i + n]
            clean.decode(Batch([Row(0, i + j, t, j + 1 == len(piece)) for j, t in enumerate(piece)]), 0)
        clean.say(
            f"const std::vector<llama_tokens> clean_drafts = draft(clean, {{ {{ 0, {ask.pos}, {ask.last}, "
            f"{ask.n_max} }} }});"
        )
        return clean

    def _params(self) -> ContextParams:
        """Parameters in force at the checked operation."""
        p = self.scenario.params
        for op in self.scenario.ops[: self.check.step]:
            if isinstance(op, Reopen) and op.params is not None:
                p = op.params
        return p

    def _band(self) -> float:
        """The band of the last draft's logits. That of hidden rows is carried over by their sizes; a row that must be
        zeros has none, and its draft gets the least that any band has."""
        if self.check.band <= 0:
            p = self._params()
            least = least_share(p.type_k, p.type_v)
            return SAFETY * least * (_largest([t.logits for s in self.trace.steps for t in s.taps]) or 1.0)
        if self.check.what != "row" or self.reference is None:
            return self.check.band
        taps = [t for s in self.reference.steps[-1:] for t in s.taps]
        rows = _largest([r.hidden for t in taps for r in t.rows])
        return self.check.band * max(_largest([t.logits for t in taps]) / rows, 1.0) if rows > 0 else self.check.band

    # --- everything else ----------------------------------------------------------------------------------------------

    def _target(self, step: Step) -> str:
        """Rows of the target against plain decoding."""
        calls, seq = self.calls, self.check.seq
        self.target_rows = True
        before = calls.seats[seq].tokens
        calls.say("std::vector<row> rows;")
        calls.step(step, rows="rows")
        calls.say("teardown(s);")
        tokens = (*before, *(r.token for r in step.batches[0].rows if r.seq == seq))
        params = _plain_params(self._params())
        self._name(params)
        calls.lines += ["", f"{INDENT}// what must come out: the same tokens, decoded one batch after the other"]
        calls.say("std::vector<row> plain;\nside clean;")
        clean = Calls(
            "clean",
            msgspec.structs.replace(self.scenario, params=params, ops=()),
            Trace([], [], self.trace.end),
            self.names,
            self.late_clean,
        )
        n = min(params.n_batch, params.n_ubatch)
        cuts = [*range(0, len(before), n), len(before), len(tokens)]
        for a, b in pairwise(cuts):
            if b > a:
                clean.decode(Batch([Row(0, p, tokens[p], True) for p in range(a, b)]), 0, "plain")
        calls.lines += clean.lines
        self.helpers |= {"difference", *clean.helpers}
        return f"""\
float     error = 0.0f;
llama_pos where = -1;
for (const row & r : rows) {{
    for (const row & p : plain) {{
        const float diff = r.seq == {seq} && r.pos == p.pos ? difference(r.logits, p.logits) : 0.0f;
        if (!(diff <= error)) {{
            error = diff;
            where = r.pos;
        }}
    }}
}}
const bool wrong = !(error <= {self.check.band!r});
printf("the target's logits differ from plain decoding by up to %.4g at position %d (honest differences here: "
    "{self.check.band:.2g}): %s\\n", error, where, wrong ? "WRONG STATE" : "not reproduced");
return wrong;"""

    def _positions(self, step: Step) -> str:
        """Last positions in both memories, and whether what a draft leaves could be removed."""
        calls, op, seq = self.calls, self.scenario.ops[step.op], self.check.seq
        if seq < 0 and isinstance(op, Propose):
            self.removed = True
            calls.note(sentence(self.scenario, step))
            calls.say("bool removed = true;")
            calls.propose(op, step, removed="&removed")
            calls.say("teardown(s);")
            return (
                'printf("what the draft left in its memory %s\\n", removed ? "was removed: not reproduced" : '
                '"WAS NOT REMOVED");\nreturn !removed;'
            )
        calls.step(step)
        self.notes.append("Where the sequence only became no longer, look at the positions that are printed.")
        seat = calls.seats[seq]
        last = len(seat.tokens) - 1
        if seat.proposal is not None and seat.proposal.at >= 0:
            last += 1 + len(seat.proposal.drafts)
        wrong = f"tgt != {last}"
        calls.say(f"const llama_pos tgt = llama_memory_seq_pos_max(llama_get_memory(s.tgt), {seq});")
        draft = self.driver.kind.startswith("draft-")
        if draft:
            calls.say(f"const llama_pos dft = llama_memory_seq_pos_max(llama_get_memory(s.dft), {seq});")
            # eagle3 is one behind until the next draft
            wrong += f" || (dft != {last} && dft != {last - 1})" if self.driver.kind == "draft-eagle3" else (
                f" || dft != {last}")  # fmt: skip
        calls.say("teardown(s);")
        told, args = (", the draft's at %d", ", dft") if draft else ("", "")
        return (
            f"const bool wrong = {wrong};\n"
            f'printf("sequence {seq} ends at %d in the target\'s memory{told}, expected {last}: %s\\n", tgt{args}, '
            'wrong ? "WRONG" : "not reproduced");\nreturn wrong;'
        )

    def _two(self, step: Step) -> str:
        """The drafts that the driver in Python disagrees with."""
        calls, op = self.calls, self.scenario.ops[step.op]
        assert isinstance(op, Propose)
        calls.note(sentence(self.scenario, step))
        calls.propose(op, step, into="drafts")
        calls.say("teardown(s);")
        self.helpers.add("show")
        self.notes.append("The same algorithm in Python drafts something else (see explanation.txt); this only shows "
                          "that llama.cpp still drafts what it did.")  # fmt: skip
        rows = ", ".join(f"{{ {', '.join(map(str, d))} }}" for d in step.drafts)
        return f"""\
const std::vector<llama_tokens> then = {{ {rows} }};
for (const llama_tokens & d : drafts) {{
    printf("drafts%s\\n", show(d).c_str());
}}
printf("%s\\n", drafts == then ? "AS WHEN IT WAS FOUND" : "not reproduced");
return drafts == then;"""

    def _state(self, step: Step) -> str:
        """A malformed state of the driver: what the driver offers before and after, and what it says."""
        calls, op = self.calls, self.scenario.ops[step.op]
        assert isinstance(op, Rewind)
        calls.say("std::vector<uint8_t> before, after;")
        calls.say(f"common_speculative_get_state(s.spec, {op.seq}, before);")
        v = self.finding.violation
        mute = v is not None and v.key.endswith(":mute")
        if mute:
            self.helpers.add("log")
            calls.say('const std::string log = std::string(argv[1]) + ".log";')
            calls.say("common_log_set_file(common_log_main(), log.c_str());")
        calls.step(step)
        calls.say(f"common_speculative_get_state(s.spec, {op.seq}, after);\nteardown(s);")
        if not mute:
            self.notes.append("The driver offers its state, so that taking a malformed one is seen there.")
            return (
                "const bool wrong = before != after;\n"
                'printf("a malformed state %s\\n", wrong ? "WAS TAKEN" : "changed nothing: not reproduced");\n'
                "return wrong;"
            )
        self.notes.append("A refusal has no return value, so a line of the log must tell of it.")
        return """\
common_log_flush(common_log_main());
FILE * file = fopen(log.c_str(), "r");
const bool told = file && fgetc(file) != EOF;
printf("the driver's state is %s, and the refusal %s\\n", before == after ? "unchanged" : "ANOTHER",
    told ? "was logged: not reproduced" : "WAS NOT TOLD");
return !told;"""

    def _alive(self, step: Step) -> str:
        calls = self.calls
        about = f"about to {sentence(self.scenario, step)}; the process should survive it"
        calls.lines.append(f'{INDENT}puts("{about}");')
        calls.say("fflush(stdout);")
        calls.step(step)
        return self._survived()

    @staticmethod
    def _survived() -> str:
        return 'teardown(s);\nprintf("it survived: not reproduced\\n");\nreturn 0;'


def _largest(floats: Sequence[bytes]) -> float:
    """The largest absolute value."""
    return max((float(np.abs(np.frombuffer(x, np.float32)).max()) for x in floats if x), default=0.0)


def _plain_params(p: ContextParams) -> ContextParams:
    """Parameters of plain decoding: one sequence, no rollback."""
    return msgspec.structs.replace(p, n_seq_max=1, n_rs_seq=0, kv_unified=False)
