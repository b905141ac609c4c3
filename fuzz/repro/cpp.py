"""Prints a finding as a stand-alone C++ program of plain llama.h, in the manner of a small upstream test."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fuzz.repro import commands, plain
from fuzz.repro.plain import AskFor, Call, CorruptSlot, DecodeRows, Memory, NewContext, RestoreState, SaveState
from fuzz.repro.python import HANG_SECONDS, comment, context_fields, params_names, wrap
from fuzz.repro.text import WIDTH
from oracles.verdict import Check
from subjects.runner import FILE_TOKENS
from subjects.scenario import ContextParams

if TYPE_CHECKING:
    from fuzz.finding import Finding

_FILES = "fstream", "iterator", "string"
_INCLUDES = "algorithm", "cmath", "cstdint", "cstdio", "cstdlib", "cstring", *_FILES, "vector"

_FIXED = """
static int32_t n_row = 0; // floats in an output row

enum outputs { NONE, LAST, ALL };

struct run {
    llama_seq_id             seq;
    llama_pos                pos; // of the first token
    std::vector<llama_token> tokens;
    outputs                  out;
};

typedef std::vector<std::vector<float>> rows_t;
"""

_HELPERS = {
    "must": """
// end where a call answers otherwise than when this was found: from there on it is another program
static void must(const char * what, int64_t got, int64_t recorded) {
    if (got != recorded) {
        printf("not reproduced: %s now answers %lld, not %lld\\n", what, (long long) got, (long long) recorded);
        exit(0);
    }
}
""",
    "decode": """
static int32_t decode(llama_context * ctx, const std::vector<run> & runs, rows_t * rows = nullptr) {
    int32_t n = 0;
    for (const run & r : runs) {
        n += (int32_t) r.tokens.size();
    }
    llama_batch batch = llama_batch_init(std::max(n, 1), 0, 1);
    for (const run & r : runs) {
        for (size_t k = 0; k < r.tokens.size(); ++k) {
            const int32_t i = batch.n_tokens++;
            batch.token   [i]    = r.tokens[k];
            batch.pos     [i]    = r.pos + (llama_pos) k;
            batch.n_seq_id[i]    = 1;
            batch.seq_id  [i][0] = r.seq;
            batch.logits  [i]    = r.out == ALL || (r.out == LAST && k + 1 == r.tokens.size());
        }
    }
    const int32_t rc = llama_decode(ctx, batch);
    for (int32_t i = 0; rc == 0 && i < batch.n_tokens; ++i) {
        const float * row = batch.logits[i] ? @GET@(ctx, i) : nullptr;
        if (row && rows) {
            rows->emplace_back(row, row + n_row);
        }
    }
    llama_batch_free(batch);
    return rc;
}
""",
    "abort": """
static int64_t abort_after = -1; // calls of the abort callback that are still to return false

static bool on_abort(void *) {
    return abort_after >= 0 && abort_after-- == 0;
}

static int32_t decode_abort(int64_t n, llama_context * ctx, const std::vector<run> & runs, rows_t * rows = nullptr) {
    abort_after = n;
    llama_set_abort_callback(ctx, on_abort, nullptr);
    const int32_t rc = decode(ctx, runs, rows);
    llama_set_abort_callback(ctx, nullptr, nullptr);
    return rc;
}
""",
    "blobs": """
struct blob {
    size_t               size;  // promised by the size query, or given
    size_t               moved; // as returned
    std::vector<uint8_t> data;
};

static std::vector<blob> blobs; // of each save and restore
""",
    "save": """
static size_t save(llama_context * ctx, llama_seq_id seq, llama_state_seq_flags flags, std::vector<uint8_t> & data) {
    const size_t size = llama_state_seq_get_size_ext(ctx, seq, flags);
    data.assign(std::max<size_t>(size, 1), 0);
    const size_t moved = llama_state_seq_get_data_ext(ctx, data.data(), size, seq, flags);
    data.resize(std::min(moved, size));
    @BLOB@
    return moved;
}
""",
    "row": """
// a row of a saved state, whose pieces lie `apart` bytes from one another, as numbers; GGML_TYPE_I8 for its bytes
static std::vector<float> row(const std::vector<uint8_t> & data, ggml_type type, size_t start, size_t pieces,
                              size_t size, size_t apart) {
    std::vector<float> values;
    for (size_t i = 0; i < pieces; ++i) {
        const uint8_t * piece = &data.at(start + i*apart);
        const size_t width = type == GGML_TYPE_F32 ? 4 : type == GGML_TYPE_I8 ? 1 : 2;
        for (size_t k = 0; k < size; k += width) {
            float    value = piece[k];
            uint16_t half  = 0;
            if (width == 4) {
                memcpy(&value, piece + k, 4);
            } else if (width == 2) {
                memcpy(&half, piece + k, 2);
                const uint32_t bits = (uint32_t) half << 16;
                memcpy(&value, &bits, 4);
                if (type == GGML_TYPE_F16) {
                    const int exponent = (half >> 10) & 31;
                    value = std::ldexp((float) ((half & 1023) | (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
                    value = half >> 15 ? -value : value;
                }
            }
            values.push_back(value);
        }
    }
    return values;
}
""",
    "cells": """
// position (x, y, token) of the cells of a saved state from position `least` on, in order; their number is at offset
// `at`; seq: those of that sequence alone, -1: all
static std::vector<std::vector<int32_t>> cells(const std::vector<uint8_t> & data, size_t at, bool ext, int32_t least,
                                               int32_t seq) {
    const auto number = [&]() {
        if (at + 4 > data.size()) {
            puts("not reproduced: the saved state is of another form");
            exit(0);
        }
        int32_t value;
        memcpy(&value, &data[at], 4);
        at += 4;
        return value;
    };
    std::vector<std::vector<int32_t>> found;
    const int32_t n = number();
    for (int32_t i = 0; i < n; ++i) {
        std::vector<int32_t> cell = { number() };
        const int32_t n_seq = number();
        for (int32_t k = 0; ext && k < 3; ++k) {
            cell.push_back(number());
        }
        bool own = seq < 0;
        for (int32_t k = 0; k < n_seq; ++k) {
            own = number() == seq || own;
        }
        if (own && cell[0] >= least) {
            found.push_back(cell);
        }
    }
    std::sort(found.begin(), found.end());
    return found;
}
""",
    "save_all": """
static size_t save_all(llama_context * ctx, std::vector<uint8_t> & data) {
    const size_t size = llama_state_get_size(ctx);
    data.assign(std::max<size_t>(size, 1), 0);
    const size_t moved = llama_state_get_data(ctx, data.data(), size);
    data.resize(std::min(moved, size));
    @BLOB@
    return moved;
}
""",
    "restore": """
static size_t restore(llama_context * ctx, llama_seq_id seq, llama_state_seq_flags flags,
                      const std::vector<uint8_t> & data) {
    const size_t size  = data.size();
    const size_t moved = llama_state_seq_set_data_ext(ctx, data.data(), size, seq, flags);
    @BLOB@
    return moved;
}
""",
    "restore_all": """
static size_t restore_all(llama_context * ctx, const std::vector<uint8_t> & data) {
    const size_t size  = data.size();
    const size_t moved = llama_state_set_data(ctx, data.data(), size);
    @BLOB@
    return moved;
}
""",
    "read_file": """
static std::vector<uint8_t> read_file(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    return std::vector<uint8_t>(std::istreambuf_iterator<char>(file), {});
}
""",
    "write_file": """
static void write_file(const std::string & path, const std::vector<uint8_t> & data) {
    std::ofstream(path, std::ios::binary).write((const char *) data.data(), (std::streamsize) data.size());
}
""",
    "save_file": f"""
static size_t save_file(llama_context * ctx, llama_seq_id seq, const std::string & path) {{
    const llama_token tokens[] = {{ {", ".join(map(str, FILE_TOKENS))} }};
    const size_t moved = llama_state_seq_save_file(ctx, path.c_str(), seq, tokens, {len(FILE_TOKENS)});
    @FILE@
    return moved;
}}
""",
    "save_all_file": f"""
static size_t save_all_file(llama_context * ctx, const std::string & path) {{
    const llama_token tokens[] = {{ {", ".join(map(str, FILE_TOKENS))} }};
    const bool ok = llama_state_save_file(ctx, path.c_str(), tokens, {len(FILE_TOKENS)});
    const std::vector<uint8_t> data = read_file(path);
    const size_t size  = data.size();
    const size_t moved = ok ? size : 0;
    @BLOB@
    return moved;
}}
""",
    "restore_file": """
static size_t restore_file(llama_context * ctx, llama_seq_id seq, const std::string & path) {
    llama_token tokens[64];
    size_t      n_tokens = 0;
    const size_t moved = llama_state_seq_load_file(ctx, path.c_str(), seq, tokens, 64, &n_tokens);
    @FILE@
    return moved;
}
""",
    "restore_all_file": """
static size_t restore_all_file(llama_context * ctx, const std::string & path) {
    llama_token tokens[64];
    size_t      n_tokens = 0;
    const bool ok = llama_state_load_file(ctx, path.c_str(), tokens, 64, &n_tokens);
    const std::vector<uint8_t> data = read_file(path);
    const size_t size  = data.size();
    const size_t moved = ok ? size : 0;
    @BLOB@
    return moved;
}
""",
}

_MAIN = """
int main(int argc, char ** argv) {{
    if (argc != 2) {{
        fprintf(stderr, "usage: %s model.gguf\\n", argv[0]);
        return 2;
    }}
    setenv("GGML_NO_BACKTRACE", "1", 1);
    llama_log_set([](ggml_log_level level, const char * text, void *) {{
        if (level == GGML_LOG_LEVEL_ERROR) {{
            fputs(text, stderr);
        }}
    }}, nullptr);
    llama_backend_init();

    llama_model_params mparams = llama_model_default_params();
    mparams.n_gpu_layers = {n_gpu_layers};
    llama_model * model = llama_model_load_from_file(argv[1], mparams);
    if (!model) {{
        fprintf(stderr, "cannot load %s\\n", argv[1]);
        return 2;
    }}
    n_row = {width};

"""

_FLOATS = ("F32", "F16", "BF16")
_INDENT = "    "
_MEM = "mem = llama_get_memory(ctx);"


class _Printer:
    """Collects the statements of one program; `helpers` is what they call."""

    def __init__(self, check: Check, names: dict[ContextParams, str]):
        self.check, self.names = check, names
        self.lines: list[str] = []
        self.helpers: set[str] = {"blobs"} if check.kind in ("blob", "state") else set()
        if plain.places(check) is not None:
            self.helpers.add("row")
        if plain.cells_places(check) is not None:
            self.helpers.add("cells")
        self.slots: dict[int, str] = {}

    def say(self, text: str) -> None:
        """Statements, one a line, broken where they are long."""
        for line in text.splitlines():
            self.lines.append(wrap(_INDENT + line, _INDENT * 2) if line else "")

    def calls(self, calls: Sequence[Call], *, reference: bool = False) -> None:
        """One statement a call; those of the checked step give `got` or `blobs`, the last one gives its rows."""
        last = len(calls) - 1
        begin = (
            len(calls)
            if reference or self.check.kind == "rows"
            else plain.first_of(calls, plain.collect_from(self.check))
        )
        for i, call in enumerate(calls):
            if call.why:
                self.lines.append(comment(call.why, "// ", _INDENT))
            if i == begin and self.check.kind in ("blob", "state"):
                self.say("blobs.clear();")
            if i == begin and self.check.kind == "alive":
                self.lines.append(f'{_INDENT}puts("about to {call.why}; the process should survive it");')
                self.say("fflush(stdout);")
            capture = ""
            if i == last and self.check.kind == "rows":
                capture = "reference" if reference else "subject"
            elif i >= begin and self.check.kind == "answer":
                capture = "got"
            self._call(call, capture, again=i > 0)

    def subject(self) -> None:
        """The state to be compared, after the subject's calls."""
        if self.check.expected:
            self.say(f"const std::vector<uint8_t> subject = blobs.at({self.check.row}).data;")
            return
        self.helpers.add("save")
        self.lines.append(
            comment(f"{self.check.what}: so the whole state of the sequence is of another size", "// ", _INDENT)
        )
        self.say(f"std::vector<uint8_t> subject;\nsave(ctx, {self.check.seq}, 0, subject);")

    def _call(self, call: Call, capture: str, again: bool) -> None:
        match call:
            case NewContext():
                name = f"new_context_{self.names[call.params].lower()}"
                self.say(("llama_free(ctx);\n" if again else "") + f"ctx = {name}(model);\n{_MEM}")
            case DecodeRows():
                self._decode(call, capture)
            case Memory():
                self._memory(call, capture)
            case SaveState():
                self._save(call, capture)
            case RestoreState():
                self._restore(call, capture)
            case CorruptSlot():
                self._corrupt(call)
            case AskFor():
                self.say((f"{capture} = (int64_t) " if capture else "") + _query(call))
            case _:
                raise TypeError(call)

    def _answer(self, what: str, expression: str, recorded: int | None, capture: str) -> None:
        if capture == "got":
            self.say(f"got = (int64_t) {expression};")
        elif recorded is None:
            self.say(f"{expression};")
        else:
            self.helpers.add("must")
            self.say(f'must("{what}", {expression}, {recorded});')

    def _decode(self, call: DecodeRows, capture: str) -> None:
        self.helpers.add("decode")
        runs = [
            f"{{ {r.seq}, {r.pos}, {{ {', '.join(map(str, r.tokens))} }}, {r.out} }}" for r in plain.runs(call.rows)
        ]
        rows = f", &{capture}" if capture in ("subject", "reference") else ""
        name = "decode(ctx"
        if call.abort_after is not None:
            self.helpers.add("abort")
            name = f"decode_abort({call.abort_after}, ctx"
        self._answer("llama_decode", f"{name}, {{ {', '.join(runs)} }}{rows})", call.rc, capture)

    def _memory(self, call: Memory, capture: str) -> None:
        args = (
            "".join(f", {a}" for a in call.args) if call.name != "clear" else f", {'true' if call.args[0] else 'false'}"
        )
        self._answer(f"llama_memory_{call.name}", f"llama_memory_{call.name}(mem{args})", call.rc, capture)

    def _slot(self, number: int, medium: str) -> str:
        name = f"slot{number}" if medium == "buffer" else f"path{number}"
        if medium == "buffer":
            self.slots[2 * number] = f"std::vector<uint8_t> {name};"
        else:
            self.slots[2 * number + 1] = f'const std::string {name} = std::string(argv[1]) + ".slot{number}.bin";'
        return name

    def _save(self, call: SaveState, capture: str) -> None:
        whole, file = call.seq is None, call.medium == "file"
        helper = f"save{'_all' if whole else ''}{'_file' if file else ''}"
        self.helpers |= {helper, *(("read_file",) if file else ())}
        slot = self._slot(call.slot, call.medium)
        if not call.keep:
            slot = "again"
            self.slots[-1] = "std::vector<uint8_t> again;"
        args = ["ctx", *([] if whole else [str(call.seq)]), *([] if whole or file else [str(call.flags)]), slot]
        text = f"{helper}({', '.join(args)})"
        if capture and not call.keep:
            capture = ""
        self._ok("the save", text, call.ok if call.keep else None, capture)

    def _restore(self, call: RestoreState, capture: str) -> None:
        whole, file = call.seq is None, call.medium == "file"
        helper = f"restore{'_all' if whole else ''}{'_file' if file else ''}"
        self.helpers |= {helper, *(("read_file",) if file else ())}
        slot = self._slot(call.slot, call.medium)
        args = ["ctx", *([] if whole else [str(call.seq)]), *([] if whole or file else [str(call.flags)]), slot]
        self._ok("the restore", f"{helper}({', '.join(args)})", call.ok, capture)

    def _ok(self, what: str, text: str, ok: bool | None, capture: str) -> None:
        self._answer(what, text if capture or ok is None else f"{text} > 0", None if ok is None else int(ok), capture)

    def _corrupt(self, call: CorruptSlot) -> None:
        self.say("{")
        self.say("    std::vector<uint8_t> data;")
        for p in call.pieces:
            if p.slot == -1:
                self.say(f"    for (int byte : {{ {', '.join(map(str, p.data))} }}) {{ data.push_back(byte); }}")
                continue
            name = self._slot(p.slot, call.media[p.slot])
            if call.media[p.slot] == "file":
                self.helpers.add("read_file")
                name = f"read_file({name})"
            self.say(
                f"    {{ const auto from = {name}; "
                f"data.insert(data.end(), from.begin() + {p.start}, from.begin() + {p.end}); }}"
            )
        slot = self._slot(call.slot, call.media[call.slot])
        if call.media[call.slot] == "file":
            self.helpers.add("write_file")
            self.say(f"    write_file({slot}, data);\n}}")
        else:
            self.say(f"    {slot} = data;\n}}")


def _query(call: AskFor) -> str:
    return {
        "positions": f"llama_memory_seq_pos_max(mem, {call.seq});",
        "size": f"llama_state_seq_get_size_ext(ctx, {call.seq}, {call.flags});",
        "size_all": "llama_state_get_size(ctx);",
        "can_shift": "llama_memory_can_shift(mem);",
    }[call.what]


def _verdict(check: Check, calls: Sequence[Call], reference: Sequence[Call]) -> str:
    if check.kind == "rows":
        i, j = plain.find_row(calls, check.row)[1], plain.find_row(reference, check.ref_row)[1]
        return f"""\
if (subject.size() < {i + 1} || reference.size() < {j + 1}) {{
    printf("not reproduced: a decode gave no output row\\n");
    return 0;
}}
float error = 0.0f;
for (int32_t i = 0; i < n_row; ++i) {{
    const float diff = std::fabs(subject[{i}][i] - reference[{j}][i]);
    error = std::isnan(error) || diff <= error ? error : diff;
}}
const bool wrong = !(error <= {check.band!r});
printf("max abs difference %.4g (honest differences here: {check.band:.2g}): %s\\n", error,
    wrong ? "WRONG STATE" : "not reproduced");
return wrong;"""
    if check.kind == "positions":
        lo, hi = check.expected
        return f"""\
const llama_pos lo = llama_memory_seq_pos_min(mem, {check.seq});
const llama_pos hi = llama_memory_seq_pos_max(mem, {check.seq});
const bool wrong = lo != {lo} || hi != {hi};
printf("sequence {check.seq} has (pos_min, pos_max) (%d, %d), expected ({lo}, {hi}): %s\\n", lo, hi,
    wrong ? "WRONG" : "not reproduced");
return wrong;"""
    if check.kind == "answer":
        test = " && ".join(f"got != {e}" for e in check.expected)
        wanted = " or ".join(map(str, check.expected))
        return f"""\
const bool wrong = {test};
printf("the call returned %lld, expected {wanted}: %s\\n", (long long) got, wrong ? "WRONG" : "not reproduced");
return wrong;"""
    if check.kind == "state":
        return _state_verdict(check)
    if check.kind == "blob":
        a, b = plain.blob_pair(check)
        right = "blobs.back()" if b < 0 else f"blobs.at({b})"
        if check.what == "size":
            return f"""\
const bool wrong = blobs.at({a}).size != {right}.moved;
printf("size promised or given, and bytes moved: %s\\n", wrong ? "THEY DIFFER" : "equal: not reproduced");
return wrong;"""
        left, right, what = f"blobs.at({a}).data", f"{right}.data", "both blobs"
        if (rows := plain.places(check)) is not None:
            left, right = (_row(n, "I8", p) for n, p in zip((left, right), rows, strict=True))
            what = "a row in both blobs"
        elif (cells := plain.cells_places(check)) is not None:
            left, right = (_cells(n, p) for n, p in zip((left, right), cells, strict=True))
            what = "cells in both blobs"
        return f"""\
const bool wrong = {left} !=
    {right};
printf("{what}: %s\\n", wrong ? "THEY DIFFER" : "equal: not reproduced");
return wrong;"""
    return 'printf("it survived: not reproduced\\n");\nreturn 0;'


def _row(data: str, kind: str, p: plain.RowPlace) -> str:
    return f"row({data}, GGML_TYPE_{kind}, {p.start}, {p.pieces}, {p.size}, {p.apart})"


def _cells(data: str, p: plain.CellsPlace) -> str:
    least = "INT32_MIN" if p.least == -(1 << 31) else str(p.least)
    return f"cells({data}, {p.at}, {str(bool(p.ext)).lower()}, {least}, {p.seq})"


def _state_verdict(check: Check) -> str:
    rows, cells = plain.places(check), plain.cells_places(check)
    if cells is not None:
        mine, theirs = _cells("subject", cells[0]), _cells("reference", cells[1])
        wrong = f"{mine} !=\n    {theirs}" if cells[1].at >= 0 else f"!{mine}.empty()"
        return f"""\
const bool wrong = {wrong};
printf("cells of the saved state and of what it should be: %s\\n", wrong ? "WRONG STATE" : "not reproduced");
return wrong;"""
    if rows is None:
        return """\
const bool wrong = subject.size() != reference.size();
printf("sizes of the states: %zu and in a clean context %zu bytes: %s\\n", subject.size(), reference.size(),
    wrong ? "WRONG STATE" : "not reproduced");
return wrong;"""
    left, right = (
        _row(name, p.type if p.type in _FLOATS else "I8", p)
        for name, p in zip(("subject", "reference"), rows, strict=True)
    )
    band = check.band if rows[0].type in _FLOATS else 0.0
    return f"""\
const std::vector<float> mine  = {left};
const std::vector<float> clean = {right};
float error = 0.0f;
for (size_t i = 0; i < mine.size(); ++i) {{
    const float diff = std::fabs(mine[i] - clean.at(i));
    error = std::isnan(error) || diff <= error ? error : diff;
}}
const bool wrong = !(error <= {band!r});
printf("{check.what}: max abs difference %.4g (honest differences here: {band:.2g}): %s\\n", error,
    wrong ? "WRONG STATE" : "not reproduced");
return wrong;"""


def params_cpp(p: ContextParams) -> str:
    """Statements that set the fields of a llama_context_params called `params`."""

    def cpp(field: str, value: str) -> str:
        if field in ("type_k", "type_v"):
            return f"(ggml_type) {value}"
        if field == "flash_attn_type":
            return f"LLAMA_FLASH_ATTN_TYPE_{'ENABLED' if value == '1' else 'DISABLED'}"
        return value.lower()

    fields = context_fields(p)
    width = max(map(len, fields))
    return "\n".join(f"    params.{k:<{width}} = {cpp(k, v)};" for k, v in fields.items())


def _new_context(name: str, p: ContextParams) -> str:
    return f"""
static llama_context * new_context_{name.lower()}(llama_model * model) {{
    llama_context_params params = llama_context_default_params();
{params_cpp(p)}
    llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {{
        fprintf(stderr, "the context was refused\\n");
        exit(2);
    }}
    return ctx;
}}
"""


def repro_cpp(finding: Finding, calls: Sequence[Call], reference_calls: Sequence[Call] = ()) -> str:
    """The program: 1 as exit code (or a signal) where the finding is there, 0 where it is not."""
    check, model = finding.check, finding.scenario.model
    calls = plain.needed(calls, check)
    compared = check.kind in plain.REFERENCE_KINDS
    reference_calls = plain.needed(reference_calls, check, reference=True) if compared else []
    names = params_names(calls, reference_calls)
    printer = _Printer(check, names)
    printer.calls(calls)
    if check.kind == "state":
        printer.subject()
    if reference_calls:
        printer.lines += ["", _INDENT + "// what must come out: the same history in a clean context"]
        printer.say("llama_free(ctx);")
        printer.calls(reference_calls, reference=True)
    if check.kind == "state":
        printer.say("const std::vector<uint8_t> reference = blobs.back().data;")
    verdict = textwrap.indent(_verdict(check, calls, reference_calls), _INDENT)
    uses_mem = any("(mem" in text for text in (*printer.lines, verdict))
    program = "\n".join(line for line in printer.lines if uses_mem or line.strip() != _MEM)

    printer.lines = []
    if finding.hang:
        printer.say(f"alarm({HANG_SECONDS}); // it hung when it was found")
    printer.say("llama_context * ctx = nullptr;" + ("\nllama_memory_t  mem = nullptr;" if uses_mem else ""))
    printer.say({"rows": "rows_t subject;\nrows_t reference;", "answer": "int64_t got = 0;"}.get(check.kind, ""))
    printer.say("\n".join(text for _, text in sorted(printer.slots.items())))
    declared = "\n".join(printer.lines)

    blob, file = (
        "    blobs.push_back({ size, moved, data });\n",
        "    blobs.push_back({ read_file(path).size(), moved, read_file(path) });\n",
    )
    get, width = "llama_get_logits_ith", "llama_vocab_n_tokens(llama_model_get_vocab(model))"
    if check.hidden:
        get, width = "llama_get_embeddings_ith", "llama_model_n_embd(model)"
    helpers = "".join(text for name, text in _HELPERS.items() if name in printer.helpers)
    helpers = helpers.replace("@GET@", get)
    files, values = "std::string" in declared, bool(printer.helpers & {"row", "cells"})
    includes = [n for n in _INCLUDES if (n not in _FILES or files) and (n != "cstring" or values)]
    for mark, line in (("    @BLOB@\n", blob), ("    @FILE@\n", file)):
        helpers = helpers.replace(mark, line if "blobs" in printer.helpers else "")
    return (
        _head(finding)
        + '\n#include "llama.h"\n\n'
        + "".join(f"#include <{name}>\n" for name in includes)
        + ("\n#include <unistd.h>\n" if finding.hang else "")
        + _FIXED
        + helpers
        + "".join(_new_context(name, p) for p, name in names.items())
        + _MAIN.format(n_gpu_layers=model.n_gpu_layers, width=width)
        + f"{declared}\n\n{program}\n\n{verdict}\n}}\n"
    )


def _head(finding: Finding) -> str:
    model = finding.scenario.model
    if model.recipe is not None:
        source = "model.gguf is written by: python repro.py --write-model model.gguf"
    else:
        source = commands.given(model)
    return head(finding, commands.compile_line(finding), [*commands.places(finding), source])


def head(finding: Finding, compile: str, notes: Sequence[str]) -> str:
    """The comment that a program begins with: what is wrong, how to compile it, notes (a line each)."""
    ends = "Exit code: 0 not reproduced, 1 reproduced; where it is a crash, the process dies."
    seen = f"{finding.title}. Seen with {commands.seen_with(finding)}."
    lines = [finding.rule, "", seen, "", compile, "", *notes, ends]
    wrapped = [
        part
        for line in lines
        for part in ([compile] if line == compile else textwrap.wrap(line, WIDTH - 3, break_on_hyphens=False) or [""])
    ]
    return "\n".join(("// " + line).rstrip().rstrip("\\") for line in wrapped) + "\n"
