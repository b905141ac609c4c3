"""The fixed parts of a driver's reproducer in C++: set-up, decoding, drafting, checkpoints, comparison."""

from __future__ import annotations

from subjects.scenario import DriverParams, Mangling

INCLUDES = "algorithm", "cmath", "cstdint", "cstdio", "cstdlib", "string", "vector"

SIDE = """
static llama_model * model_tgt = nullptr;
static llama_model * model_dft = nullptr;

// a target, its draft, and the driver between them
struct side {
    llama_context           * tgt  = nullptr;
    llama_context           * dft  = nullptr; // the n-gram drivers have none
    common_speculative      * spec = nullptr;
    common_params_speculative params;
    std::vector<llama_tokens> text; // of each sequence, as a server keeps it
};
"""

_SETUP = """
static void setup(side & s, llama_context_params params{late_arg}) {{
    s.text.assign(params.n_seq_max, {{}});
    s.tgt = llama_init_from_model(model_tgt, params);
{late}{draft}    s.params.types = {{ common_speculative_type_from_name("{kind}") }};
    s.params.draft.ctx_tgt = s.tgt;
    s.params.draft.ctx_dft = s.dft;
{fields}
    s.spec = s.tgt{dft} ? common_speculative_init(s.params, params.n_seq_max) : nullptr;
    if (!s.spec) {{
        fprintf(stderr, "a context or the driver was refused\\n");
        exit(2);
    }}
}}

static void teardown(side & s) {{
    common_speculative_free(s.spec);
    llama_free(s.dft);
    llama_free(s.tgt);
    s = {{}};
}}
"""

_DRAFT_CONTEXT = """\
    params.n_rs_seq  = 0;
{mtp}    params.ctx_other = s.tgt;
    s.dft = llama_init_from_model(model_dft, params);
"""

_LATE = """\
    if (late) { // the draft context is made after the target's first decode
        llama_token two[] = { 0, 0 };
        llama_decode(s.tgt, llama_batch_get_one(two, 2));
        llama_memory_clear(llama_get_memory(s.tgt), true);
    }
"""

MUST = """
// end where a call answers otherwise than when this was found: from there on it is another program
static void must(const char * what, int64_t got, int64_t recorded) {
    if (got != recorded) {
        printf("not reproduced: %s now answers %lld, not %lld\\n", what, (long long) got, (long long) recorded);
        exit(0);
    }
}
"""

DECODE = """
enum outputs { NONE, LAST, ALL };

struct run {
    llama_seq_id seq;
    llama_pos    pos; // of the first token
    llama_tokens tokens;
    outputs      out;
};
@ROW@
// llama_decode on the target, then let the driver process what was decoded; -100 where the driver fails
static int32_t decode(side & s, const std::vector<run> & runs@ROWS_ARG@) {
    int32_t n = 0;
    for (const run & r : runs) {
        n += (int32_t) r.tokens.size();
    }
    llama_batch  batch = llama_batch_init(std::max(n, 1), 0, 1);
    common_batch same;
    for (const run & r : runs) {
        llama_tokens & text = s.text[r.seq];
        for (size_t k = 0; k < r.tokens.size(); ++k) {
            const llama_pos pos = r.pos + (llama_pos) k;
            const bool      out = r.out == ALL || (r.out == LAST && k + 1 == r.tokens.size());
            const int32_t   i   = batch.n_tokens++;
            batch.token   [i]    = r.tokens[k];
            batch.pos     [i]    = pos;
            batch.n_seq_id[i]    = 1;
            batch.seq_id  [i][0] = r.seq;
            batch.logits  [i]    = out;
            same.add(r.tokens[k], pos, r.seq, out);
            text.resize(pos);
            text.push_back(r.tokens[k]);
        }
    }
    const int32_t rc = llama_decode(s.tgt, batch);
@READ@    llama_batch_free(batch);
    return rc == 0 && !common_speculative_process(s.spec, same) ? -100 : rc;
}
"""

ROW = """
// one output row of the target
struct row {
    llama_seq_id       seq;
    llama_pos          pos;
    std::vector<float> logits;
};
"""

READ = """\
    for (int32_t i = 0; rows && rc == 0 && i < batch.n_tokens; ++i) {
        const float * l = batch.logits[i] ? llama_get_logits_ith(s.tgt, i) : nullptr;
        if (l) {
            rows->push_back({ batch.seq_id[i][0], batch.pos[i], std::vector<float>(l, l + n_vocab(model_tgt)) });
        }
    }
"""

N_VOCAB = """
static int32_t n_vocab(const llama_model * model) {
    return llama_vocab_n_tokens(llama_model_get_vocab(model));
}
"""

DRAFT = """
struct ask {
    llama_seq_id seq;
    llama_pos    pos;     // where the sequence goes on
    llama_token  id_last; // with this token
    int32_t      n_max;   // -1: as the driver was set up
};

// one draft for all that ask; what it leaves in the draft's memory is removed
static std::vector<llama_tokens> draft(side & s, const std::vector<ask> & asks@REMOVED_ARG@) {
    std::vector<llama_tokens> drafts(asks.size());
    std::vector<llama_tokens> prompts(asks.size());
    for (size_t i = 0; i < asks.size(); ++i) {
        const ask & a = asks[i];
        prompts[i] = s.text[a.seq];
        prompts[i].resize(a.pos);
        common_speculative_draft_params & params = common_speculative_get_draft_params(s.spec, a.seq);
        params = { true, a.n_max, a.pos, a.id_last, &prompts[i], &drafts[i] };
    }
    common_speculative_draft(s.spec);
    for (const ask & a : asks) {
        common_speculative_get_draft_params(s.spec, a.seq).result = nullptr;
        if (s.dft) {
            @OK@llama_memory_seq_rm(llama_get_memory(s.dft), a.seq, a.pos, -1);
@REMOVED@        }
    }
    return drafts;
}
"""

DRAFT_ROW = """
// the logits that the last token of a draft was taken from: output row i of the last decode, -1 the last one
static std::vector<float> draft_row(side & s, int32_t i) {
    const float * l = llama_get_logits_ith(s.dft, i);
    return l ? std::vector<float>(l, l + n_vocab(llama_get_model(s.dft))) : std::vector<float>();
}
"""

DIFFERENCE = """
static float difference(const std::vector<float> & a, const std::vector<float> & b) {
    float most = a.size() == b.size() ? 0.0f : NAN;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        const float diff = std::fabs(a[i] - b[i]);
        most = std::isnan(most) || diff <= most ? most : diff;
    }
    return most;
}
"""

SHOW = """
static std::string show(const llama_tokens & tokens) {
    std::string text;
    for (llama_token t : tokens) {
        text += " " + std::to_string(t);
    }
    return tokens.empty() ? " nothing" : text;
}
"""

CUT = """
static bool cut(llama_context * ctx, llama_seq_id seq, llama_pos pos) {
    return llama_memory_seq_rm(llama_get_memory(ctx), seq, pos, -1);
}
"""

CHECKPOINT = """
struct checkpoint {
    llama_state_seq_flags flags;
    std::vector<uint8_t>  tgt, dft, spec;
    bool                  offered; // the driver gave a state
    llama_tokens          text;
};

static std::vector<uint8_t> get(llama_context * ctx, llama_seq_id seq, llama_state_seq_flags flags) {
    std::vector<uint8_t> data(llama_state_seq_get_size_ext(ctx, seq, flags));
    data.resize(llama_state_seq_get_data_ext(ctx, data.data(), data.size(), seq, flags));
    return data;
}

static checkpoint save(side & s, llama_seq_id seq, llama_state_seq_flags flags) {
    checkpoint c = { flags, get(s.tgt, seq, flags), {}, {}, false, s.text[seq] };
    if (s.dft) {
        c.dft = get(s.dft, seq, flags);
    }
    @OFFERED@
    return c;
}
"""

RESTORE = """
enum parts { TARGET = 1, DRAFT = 2, DRIVER = 4 };

static bool set(llama_context * ctx, llama_seq_id seq, llama_state_seq_flags flags, const std::vector<uint8_t> & data) {
    return llama_state_seq_set_data_ext(ctx, data.data(), data.size(), seq, flags) > 0;
}

static bool restore(side & s, llama_seq_id seq, const checkpoint & c, int parts) {
    bool ok = true;
    if (parts & TARGET) {
        ok = set(s.tgt, seq, c.flags, c.tgt);
        s.text[seq] = c.text;
    }
    if (s.dft && (parts & DRAFT)) {
        ok = set(s.dft, seq, c.flags, c.dft) && ok;
    }
    if (c.offered && (parts & DRIVER)) {
        common_speculative_set_state(s.spec, seq, c.spec);
    }
    return ok;
}
"""

_LOAD = """
int main(int argc, char ** argv) {{
    if (argc != {argc}) {{
        fprintf(stderr, "usage: %s model.gguf{usage}\\n", argv[0]);
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
    mparams.load_mtp     = true;
    model_tgt = llama_model_load_from_file(argv[1], mparams);
    model_dft = {draft};
    if (!model_tgt || !model_dft) {{
        fprintf(stderr, "cannot load the model\\n");
        return 2;
    }}

"""

OFFERED = "c.offered = common_speculative_get_state(s.spec, seq, c.spec);"
LEFT_OUT = "c.offered = false; // what the driver offers is left out"

MANGLE: dict[Mangling, str] = {
    "empty": "{s}.clear();",
    "short": "{s}.pop_back();",
    "long": "{s}.insert({s}.end(), 4, 0);",
    "magic": "{s}.at({last}) ^= 0x80;",
    "width": "{s}.resize({s}.size() / 2 / 4 * 4);",
    "negative": "{s}.at({first}) = 0xfe;\nstd::fill_n({s}.begin() + {first} + 1, 3, 0xff);",
    "huge": "std::fill_n({s}.begin() + {first}, 3, 0xff);\n{s}.at({last}) = 0x7f;",
    "model": "{{\n    const std::vector<uint8_t> rows({s}.begin() + 4, {s}.end());\n"
    "    {s}.insert({s}.end(), rows.begin(), rows.end());\n}}",
    "other": 'std::copy_n("RDRF", 4, {s}.begin());',
}
OTHER_MODEL = "{s}.at({first}) ^= 1;"


def mangle(how: Mangling, word: int, part: str) -> str:
    """What Mangle does to the driver's `part` of a checkpoint: with its 32-bit number `word`, -1 with its length."""
    text = OTHER_MODEL if how == "model" and word >= 0 else MANGLE[how]
    return text.format(s=part, first=4 * word, last=4 * word + 3)


def setup(d: DriverParams, *, sampling: bool) -> str:
    """Functions that make and free a side; `sampling`: the backend samples the draft's tokens."""
    drafts = d.kind.startswith("draft-")
    fields = {
        "draft.n_max": str(d.n_max),
        "draft.n_min": str(d.n_min),
        "draft.p_min": f"{d.p_min!r}f",
        "draft.backend_sampling": str(sampling).lower(),
    }
    if not drafts:
        fields = {"ngram_mod.n_match": str(d.ngram_n), "ngram_mod.n_max": str(d.ngram_m)}
        fields["ngram_mod.n_min"] = str(d.n_min)
        if d.kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v"):
            name = d.kind.replace("-", "_")
            sizes = {"size_n": d.ngram_n, "size_m": d.ngram_m, "min_hits": d.ngram_hits}
            fields = {f"{name}.{field}": str(n) for field, n in sizes.items()}
    mtp = "    params.ctx_type  = LLAMA_CONTEXT_TYPE_MTP;\n" if d.kind == "draft-mtp" else ""
    return _SETUP.format(
        late_arg=", bool late" if d.late else "",
        late=_LATE if d.late else "",
        draft=_DRAFT_CONTEXT.format(mtp=mtp) if drafts else "",
        kind=d.kind,
        fields="\n".join(f"    s.params.{k} = {v};" for k, v in fields.items()),
        dft=" && s.dft" if drafts else "",
    )


def load(d: DriverParams, n_gpu_layers: int) -> str:
    """The beginning of main: the models are loaded."""
    own = d.draft is not None
    return _LOAD.format(
        argc=3 if own else 2,
        usage=" draft.gguf" if own else "",
        n_gpu_layers=n_gpu_layers,
        draft="llama_model_load_from_file(argv[2], mparams)" if own else "model_tgt",
    )
