// The speculative drivers of a llama.cpp under test behind a flat C interface, beside subjects/shim.cpp.
//
// Compiled against that version's own common/ headers and linked with its libllama-common; with a checkout, speculative.cpp itself
// is compiled in. A library of its own, so that a build whose drivers cannot be reached loses only them.
//
// The driver returns tokens only. What it computes with is read at the border: libllama-common calls llama_process and the
// llama_batch_ext_* functions of libllama, and because this library is loaded first in its search order, it calls those below, which
// note what goes into the draft context (the hidden row that each sequence's first token is paired with) and what comes out (logits).

#include "common.h"
#include "log.h"
#include "speculative.h"

#include "shim_params.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#define RD_API extern "C" __attribute__((visibility("default")))
#define RD_OVER extern "C" __attribute__((visibility("default")))

// src/llama-ext.h is not installed; it has C++ linkage
LLAMA_API llama_context * llama_get_ctx_other(struct llama_context * ctx);

namespace {

std::string g_log;

struct row {
    llama_token id;
    llama_pos   pos;
    int32_t     seq;
    bool        output;
    std::vector<float> embd;
};

std::unordered_map<const llama_batch_ext *, std::vector<row>> g_rows;

// one llama_process on a tapped context: its rows, and what it gave
struct call {
    int32_t rc;
    std::vector<row> rows;
    std::vector<float> logits; // of the output rows
};

llama_context * g_tapped = nullptr;
bool            g_logits = false; // read logits back (not there when sampling is the backend's)
int32_t         g_vocab  = 0;
std::vector<call> g_calls;

template <typename F> F next(const char * name, F) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }
#define NEXT(f) static const auto real = next(#f, &f)

struct spec {
    common_params_speculative params;
    common_speculative * impl = nullptr;
    std::vector<llama_tokens> prompts; // what draft() was given, alive while it runs
};

spec * S(void * p) { return static_cast<spec *>(p); }

} // namespace

// --- at the border ----------------------------------------------------------------------------------------------------

RD_OVER void llama_batch_ext_clear(llama_batch_ext * b) {
    NEXT(llama_batch_ext_clear);
    g_rows[b].clear();
    real(b);
}

RD_OVER void llama_batch_ext_free(llama_batch_ext * b) {
    NEXT(llama_batch_ext_free);
    g_rows.erase(b);
    real(b);
}

RD_OVER int32_t llama_batch_ext_add_token(llama_batch_ext * b, llama_seq_id seq, llama_token id) {
    NEXT(llama_batch_ext_add_token);
    const int32_t i = real(b, seq, id);
    if (i >= 0) {
        g_rows[b].push_back({ id, -1, seq, false, {} });
    }
    return i;
}

RD_OVER int32_t llama_batch_ext_add_embd(llama_batch_ext * b, llama_seq_id seq, llama_embd e) {
    NEXT(llama_batch_ext_add_embd);
    const int32_t i = real(b, seq, e);
    if (i >= 0) {
        g_rows[b].push_back({ -1, -1, seq, false, {} });
    }
    return i;
}

RD_OVER bool llama_batch_ext_set_pos(llama_batch_ext * b, int32_t i, const llama_pos * pos) {
    NEXT(llama_batch_ext_set_pos);
    auto & rows = g_rows[b];
    if (i >= 0 && i < (int32_t) rows.size()) {
        rows[i].pos = pos[0];
    }
    return real(b, i, pos);
}

RD_OVER bool llama_batch_ext_set_embd_token(llama_batch_ext * b, int32_t i, llama_embd e) {
    NEXT(llama_batch_ext_set_embd_token);
    auto & rows = g_rows[b];
    // only the first row of each sequence comes out of the driver's own state, the rest is what the target just gave
    if (i >= 0 && i < (int32_t) rows.size() && e.data && (i == 0 || rows[i - 1].seq != rows[i].seq)) {
        rows[i].embd.assign(e.data, e.data + e.n_rows * e.n_embd);
    }
    return real(b, i, e);
}

RD_OVER bool llama_batch_ext_set_output_logits(llama_batch_ext * b, int32_t i, bool value) {
    NEXT(llama_batch_ext_set_output_logits);
    auto & rows = g_rows[b];
    if (i >= 0 && i < (int32_t) rows.size()) {
        rows[i].output = value;
    }
    return real(b, i, value);
}

RD_OVER int32_t llama_process(llama_context * ctx, llama_process_type type, llama_batch_ext * b) {
    NEXT(llama_process);
    const int32_t rc = real(ctx, type, b);
    if (ctx == g_tapped && type == LLAMA_PROCESS_TYPE_DECODE) {
        call c = { rc, g_rows[b], {} };
        for (int32_t i = 0; g_logits && rc == 0 && i < (int32_t) c.rows.size(); ++i) {
            if (!c.rows[i].output) {
                continue;
            }
            if (const float * l = llama_get_logits_ith(ctx, i)) {
                c.logits.insert(c.logits.end(), l, l + g_vocab);
            }
        }
        g_calls.push_back(std::move(c));
    }
    return rc;
}

// common's log has a thread of its own, which prints later than what it speaks of; here it is text at once
__attribute__((visibility("default"))) struct common_log * common_log_main() { return nullptr; }

__attribute__((visibility("default"))) void common_log_add(struct common_log *, enum ggml_log_level level, const char * fmt, ...) {
    if ((level != GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_ERROR) || g_log.size() > 16384) {
        return;
    }
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    g_log += text;
}

// --- the interface ----------------------------------------------------------------------------------------------------

// Version of this interface. Raise it with every change below, subjects/drivers/native.py refuses another one.
RD_API int32_t rd_spec_version(void) { return 1; }

RD_API int32_t rd_spec_take_log(char * dst, int32_t n) {
    const int32_t len = std::min((int32_t) g_log.size(), n - 1);
    memcpy(dst, g_log.data(), len);
    dst[len] = 0;
    g_log.clear();
    return len;
}

// A model whose NextN layers are loaded too: an MTP context needs them.
RD_API void * rd_spec_model_load(const char * path, int32_t n_gpu_layers) {
    llama_model_params p = llama_model_default_params();
    p.n_gpu_layers = n_gpu_layers;
    p.load_mtp     = true;
    return llama_model_load_from_file(path, p);
}

// A draft context as the server makes it: the target's parameters, no rollback of its own, the target as the other context.
RD_API void * rd_spec_ctx_new(void * model, const int32_t * in, void * target, int32_t mtp) {
    llama_context_params p = rd_context_params(in, nullptr);
    p.n_rs_seq  = 0;
    p.n_outputs_max         = p.n_seq_max;
    p.n_outputs_max_per_seq = 1;
    p.ctx_type  = mtp ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
    p.ctx_other = static_cast<llama_context *>(target);
    return llama_init_from_model(static_cast<llama_model *>(model), p);
}

// Whether the draft context has no memory of its own and looks into the target's.
RD_API int32_t rd_spec_shares(void * draft, void * target) {
    return draft && llama_get_ctx_other(static_cast<llama_context *>(draft)) == target;
}

// in: n_seq, n_max, n_min, backend_sampling, ngram size_n, size_m, min_hits; null where the driver refuses.
// The draft context is tapped from now on.
RD_API void * rd_spec_new(const char * kind, void * target, void * draft, const int32_t * in, float p_min) {
    spec * s = new spec;
    const auto type = common_speculative_type_from_name(kind);
    s->params.types = { type };
    s->params.draft.ctx_tgt          = static_cast<llama_context *>(target);
    s->params.draft.ctx_dft          = static_cast<llama_context *>(draft);
    s->params.draft.n_max            = in[1];
    s->params.draft.n_min            = in[2];
    s->params.draft.p_min            = p_min;
    s->params.draft.backend_sampling = in[3] != 0;
    s->params.ngram_mod.n_match      = in[4];
    s->params.ngram_mod.n_max        = in[5];
    s->params.ngram_mod.n_min        = in[2];
    for (auto * m : { &s->params.ngram_simple, &s->params.ngram_map_k, &s->params.ngram_map_k4v }) {
        m->size_n   = in[4];
        m->size_m   = in[5];
        m->min_hits = in[6];
    }
    s->prompts.resize(in[0]);
    g_calls.clear();
    g_tapped = static_cast<llama_context *>(draft);
    g_logits = draft != nullptr && (!in[3] || type == COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE);
    g_vocab  = draft ? llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(g_tapped))) : 0;
    s->impl  = common_speculative_init(s->params, in[0]);
    if (!s->impl) {
        delete s;
        return nullptr;
    }
    return s;
}

RD_API void rd_spec_free(void * p) {
    g_tapped = nullptr;
    g_calls.clear();
    common_speculative_free(S(p)->impl);
    delete S(p);
}

// the largest draft, after the driver's own limits
RD_API int32_t rd_spec_n_max(void * p) { return common_speculative_n_max(S(p)->impl); }

// The batch that the target has just decoded.
RD_API int32_t rd_spec_process(void * p, int32_t n, const int32_t * token, const int32_t * pos, const int32_t * seq, const int8_t * out) {
    common_batch b;
    for (int32_t i = 0; i < n; ++i) {
        b.add(token[i], pos[i], seq[i], out[i] != 0);
    }
    return common_speculative_process(S(p)->impl, b);
}

// Drafts for n sequences in one call. prompts: the tokens of each one after the other, `len` of them.
// out: n times `cap` tokens, n_out how many of each.
RD_API void rd_spec_draft(void * p, int32_t n, const int32_t * seq, const int32_t * pos0, const int32_t * id_last, const int32_t * n_max,
                          const int32_t * len, const int32_t * prompts, int32_t cap, int32_t * out, int32_t * n_out) {
    std::vector<llama_tokens> results(n);
    for (int32_t i = 0; i < n; ++i) {
        auto & prompt = S(p)->prompts[seq[i]];
        prompt.assign(prompts, prompts + len[i]);
        prompts += len[i];
        common_speculative_get_draft_params(S(p)->impl, seq[i]) = { true, n_max[i], pos0[i], id_last[i], &prompt, &results[i] };
    }
    common_speculative_draft(S(p)->impl);
    for (int32_t i = 0; i < n; ++i) {
        common_speculative_get_draft_params(S(p)->impl, seq[i]).result = nullptr;
        n_out[i] = std::min(cap, (int32_t) results[i].size());
        std::copy_n(results[i].begin(), n_out[i], out + (size_t) i * cap);
    }
}

RD_API void rd_spec_accept(void * p, int32_t seq, int32_t n) { common_speculative_accept(S(p)->impl, seq, (uint16_t) n); }

RD_API void rd_spec_begin(void * p, int32_t seq, const int32_t * tokens, int32_t n) {
    common_speculative_begin(S(p)->impl, seq, llama_tokens(tokens, tokens + n));
}

// Bytes of a sequence's state, -1 where the driver offers none; copied where they fit.
RD_API int64_t rd_spec_get(void * p, int32_t seq, uint8_t * dst, int64_t room) {
    std::vector<uint8_t> data;
    if (!common_speculative_get_state(S(p)->impl, seq, data)) {
        return -1;
    }
    memcpy(dst, data.data(), std::min<int64_t>(room, (int64_t) data.size()));
    return (int64_t) data.size();
}

RD_API void rd_spec_set(void * p, int32_t seq, const uint8_t * src, int64_t n) {
    common_speculative_set_state(S(p)->impl, seq, std::vector<uint8_t>(src, src + n));
}

// What went through the draft context since the last call: per call (rc, rows, width of hidden rows, floats of logits), then per row
// (token, position, sequence, output, has a hidden row); the floats are hidden rows and logits in the same order.
// Returns the integers needed; nothing is forgotten while they, or the floats, do not fit.
RD_API int64_t rd_spec_take(int32_t * ints, int64_t n_ints, float * floats, int64_t n_floats, int64_t * floats_needed) {
    int64_t ni = 0, nf = 0;
    for (const auto & c : g_calls) {
        ni += 4 + 5 * (int64_t) c.rows.size();
        nf += (int64_t) c.logits.size();
        for (const auto & r : c.rows) {
            nf += (int64_t) r.embd.size();
        }
    }
    *floats_needed = nf;
    if (ni > n_ints || nf > n_floats) {
        return ni;
    }
    for (const auto & c : g_calls) {
        size_t width = 0;
        for (const auto & r : c.rows) {
            width = std::max(width, r.embd.size());
        }
        *ints++ = c.rc;
        *ints++ = (int32_t) c.rows.size();
        *ints++ = (int32_t) width;
        *ints++ = (int32_t) c.logits.size();
        for (const auto & r : c.rows) {
            const int32_t it[5] = { r.id, r.pos, r.seq, r.output, r.embd.empty() ? 0 : 1 };
            ints   = std::copy(it, it + 5, ints);
            floats = std::copy(r.embd.begin(), r.embd.end(), floats);
        }
        floats = std::copy(c.logits.begin(), c.logits.end(), floats);
    }
    g_calls.clear();
    return ni;
}
