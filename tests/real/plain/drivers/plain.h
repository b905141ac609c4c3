// What the programs of this folder share: models, contexts as the server makes them, and the calls that every one of them needs.
//
// A program is called as `NAME TARGET.gguf [DRAFT.gguf] [control]`. It prints one line and exits with 0 (right), 1 (wrong)
// or 2 (it says neither); a fault that kills the process dies by its signal. With `control` it makes the same calls without
// the trigger. Nothing of redraft is used; its generated models are where the figures were taken:
//     python -c "from subjects import recipes; recipes.get('qwen35').write('qwen35.gguf', seed=0)"
//
// Compile against the headers and libraries of one llama.cpp, C++17:
//     g++ -std=c++17 NAME.cpp -I <llama.cpp>/common -I <llama.cpp>/include -I <llama.cpp>/ggml/include -I <llama.cpp>/vendor
//         -L <build>/bin -Wl,-rpath,<build>/bin -lllama-common -lllama -lggml -lggml-base -o NAME
#pragma once

#include "common.h"
#include "llama.h"
#include "speculative.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// honest differences between runs of one history stay below 1e-4 on these models; a wrong row made 0.015 and more
static const float BAND = 1e-3f;

static void must(bool ok, const char * what) {
    if (!ok) {
        printf("unclear: %s\n", what);
        exit(2);
    }
}

// the first tokens of a text; texts of different streams differ nearly everywhere
static inline llama_tokens text(int n, int stream = 0) {
    llama_tokens t;
    for (int i = 0; i < n; ++i) {
        t.push_back((11*i*i + 7*i + 5 + stream*(17 + 3*i)) % 64);
    }
    return t;
}

static inline llama_tokens part(const llama_tokens & t, int from, int to) { return { t.begin() + from, t.begin() + to }; }

struct options {
    common_speculative_type kind;
    bool backend_sampling = false; // with it there are no logits to read
    bool kv_unified       = false;
    bool flash_attn       = false;
    int  n_max            = 3;
};

struct drafted {
    llama_tokens       tokens;
    std::vector<float> logits; // of the last token, where sampling is the CPU's
};

static llama_model * g_target = nullptr;
static llama_model * g_draft  = nullptr; // the target's own file where there is no other

// Target, draft and the driver between them, for two sequences.
struct speculation {
    llama_context             * tgt  = nullptr;
    llama_context             * dft  = nullptr;
    common_speculative        * spec = nullptr;
    common_params_speculative   params;

    speculation(const options & o) {
        const bool drafts = o.kind == COMMON_SPECULATIVE_TYPE_DRAFT_MTP || o.kind == COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3;

        llama_context_params p = llama_context_default_params();
        p.n_ctx     = 256;
        p.n_batch   = 64;
        p.n_ubatch  = 32;
        p.n_seq_max = 2;
        p.n_rs_seq  = drafts ? o.n_max : 0;
        p.n_threads = p.n_threads_batch = 1;
        p.type_k    = p.type_v = GGML_TYPE_F32;
        p.kv_unified            = o.kv_unified;
        p.flash_attn_type       = o.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        p.n_outputs_max         = p.n_seq_max*(1 + o.n_max);
        p.n_outputs_max_per_seq = 1 + o.n_max;
        tgt = llama_init_from_model(g_target, p);
        must(tgt != nullptr, "no target context");

        if (drafts) {
            p.n_rs_seq              = 0;
            p.n_outputs_max         = p.n_seq_max;
            p.n_outputs_max_per_seq = 1;
            p.ctx_type  = o.kind == COMMON_SPECULATIVE_TYPE_DRAFT_MTP ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
            p.ctx_other = tgt;
            dft = llama_init_from_model(g_draft, p);
            must(dft != nullptr, "no draft context");
        }

        params.types = { o.kind };
        params.draft.ctx_tgt          = tgt;
        params.draft.ctx_dft          = dft;
        params.draft.n_max            = o.n_max;
        params.draft.p_min            = 0.0f;
        params.draft.backend_sampling = o.backend_sampling;
        params.ngram_map_k.size_n     = 4;
        params.ngram_map_k.size_m     = 4;
        spec = common_speculative_init(params, p.n_seq_max);
        must(spec != nullptr, "no driver");
    }

    ~speculation() {
        common_speculative_free(spec);
        llama_free(dft);
        llama_free(tgt);
    }

    // tokens of one sequence: through the target, then through the driver; verification wants every row's output.
    // Gives the target's last logits.
    std::vector<float> decode(llama_seq_id seq, llama_pos pos, const llama_tokens & tokens, bool verify = false) {
        common_batch b(tgt);
        for (size_t i = 0; i < tokens.size(); ++i) {
            b.add(tokens[i], pos + (llama_pos) i, seq, verify || i + 1 == tokens.size());
        }
        must(llama_process(tgt, LLAMA_PROCESS_TYPE_DECODE, b.get()) == 0, "the target does not decode");
        const float * l = llama_get_logits_ith(tgt, -1);
        const std::vector<float> logits(l, l + llama_vocab_n_tokens(llama_model_get_vocab(g_target)));
        must(common_speculative_process(spec, b), "the driver does not process");
        return logits;
    }

    // drafts of several sequences in one call, behind `last[i]` at `pos0[i]`; prompts: what is before
    std::vector<drafted> draft_all(const std::vector<llama_seq_id> & seqs, const std::vector<llama_pos> & pos0,
                                   const llama_tokens & last, const std::vector<llama_tokens> & prompts) {
        std::vector<drafted> out(seqs.size());
        for (size_t i = 0; i < seqs.size(); ++i) {
            common_speculative_get_draft_params(spec, seqs[i]) =
                { true, -1, pos0[i], last[i], &prompts[i], &out[i].tokens };
        }
        common_speculative_draft(spec);
        if (dft && !params.draft.backend_sampling && seqs.size() == 1 && !out[0].tokens.empty()) {
            const float * l = llama_get_logits_ith(dft, -1);
            must(l != nullptr, "no draft logits");
            out[0].logits.assign(l, l + llama_vocab_n_tokens(llama_model_get_vocab(g_draft)));
        }
        return out;
    }

    drafted draft(llama_seq_id seq, llama_pos pos0, llama_token last, const llama_tokens & prompt = {}) {
        return draft_all({ seq }, { pos0 }, { last }, { prompt })[0];
    }

    // what a server does after a draft or a rejection
    void cut_draft (llama_seq_id seq, llama_pos from) { cut(dft, seq, from); }
    void cut_target(llama_seq_id seq, llama_pos from) { cut(tgt, seq, from); }
    void cut_both  (llama_seq_id seq, llama_pos from) { cut(tgt, seq, from); cut(dft, seq, from); }

private:
    static void cut(llama_context * ctx, llama_seq_id seq, llama_pos from) {
        must(llama_memory_seq_rm(llama_get_memory(ctx), seq, from, -1), "a tail is not removed");
    }
};

static inline std::vector<uint8_t> save(llama_context * ctx, llama_seq_id seq) {
    std::vector<uint8_t> data(llama_state_seq_get_size_ext(ctx, seq, 0));
    must(llama_state_seq_get_data_ext(ctx, data.data(), data.size(), seq, 0) == data.size(), "not saved");
    return data;
}

static inline void restore(llama_context * ctx, llama_seq_id seq, const std::vector<uint8_t> & data) {
    must(llama_state_seq_set_data_ext(ctx, data.data(), data.size(), seq, 0) == data.size(), "not restored");
}

// max abs difference; infinite where there is nothing to compare
static inline float error(const std::vector<float> & a, const std::vector<float> & b) {
    if (a.empty() || a.size() != b.size()) {
        return INFINITY;
    }
    float e = 0.0f;
    for (size_t i = 0; i < a.size(); ++i) {
        const float d = std::fabs(a[i] - b[i]);
        e = std::isnan(e) || d <= e ? e : d;
    }
    return e;
}

// what the driver is fed with must be right, or the fault is not its own
static inline void must_agree(const std::vector<float> & a, const std::vector<float> & b) {
    must(error(a, b) <= BAND, "the target's own logits differ");
}

static inline std::string str(const llama_tokens & tokens) {
    std::string s;
    for (llama_token t : tokens) {
        s += (s.empty() ? "" : " ") + std::to_string(t);
    }
    return "[" + s + "]";
}

// the program's line: two drafts that must be the same
static inline int judge(const char * got, const drafted & a, const char * want, const drafted & b, const std::string & note = "") {
    const float e = error(a.logits, b.logits);
    const bool wrong = !(e <= BAND) || a.tokens != b.tokens;
    printf("%s: drafted %s %s, %s %s; max abs error of the draft logits %.2g%s\n", wrong ? "WRONG" : "right",
        str(a.tokens).c_str(), got, str(b.tokens).c_str(), want, e, note.c_str());
    return wrong;
}

static inline int run(int argc, char ** argv, int (*program)(bool control)) {
    const bool control = argc > 1 && strcmp(argv[argc - 1], "control") == 0;
    argc -= control;
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: %s target.gguf [draft.gguf] [control]\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * line, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(line, stderr);
        }
    }, nullptr);
    llama_backend_init();
    llama_model_params p = llama_model_default_params();
    p.n_gpu_layers = 0;
    p.load_mtp     = true;
    g_target = llama_model_load_from_file(argv[1], p);
    g_draft  = argc == 3 ? llama_model_load_from_file(argv[2], p) : g_target;
    must(g_target && g_draft, "a model is refused");
    return program(control);
}
