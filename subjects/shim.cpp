// The flat C interface between redraft and a llama.cpp under test.
//
// llama.h's structs and signatures change from week to week; this file is compiled against the headers of the build under test,
// so that everything above it sees integers, pointers and nothing else. No structs cross it, nothing is caught in it: an
// exception or an abort of the library must look here exactly as it looks to any other caller.
//
// What a newer llama.h renamed shows up as a compile error in this file; subjects/builds.py turns that into a message.

#include "llama.h"

#include "shim_params.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#define RD_API extern "C" __attribute__((visibility("default")))

namespace {

// warnings and errors of the library since the last rd_take_log; everything else is dropped at the source
std::string g_log;
ggml_log_level g_level = GGML_LOG_LEVEL_NONE;

void on_log(ggml_log_level level, const char * text, void *) {
    if (level != GGML_LOG_LEVEL_CONT) {
        g_level = level;
    }
    if ((g_level == GGML_LOG_LEVEL_WARN || g_level == GGML_LOG_LEVEL_ERROR) && g_log.size() < 16384) {
        g_log += text;
    }
}

// calls of the abort callback that are still to return false; negative: never abort
int64_t g_abort_after = -1;

bool on_abort(void *) {
    if (g_abort_after < 0) {
        return false;
    }
    return g_abort_after-- == 0;
}

llama_context * C(void * p) { return static_cast<llama_context *>(p); }
llama_model   * M(void * p) { return static_cast<llama_model   *>(p); }
llama_memory_t  K(void * p) { return llama_get_memory(C(p)); }

} // namespace

// Version of this interface. Raise it with every change below, shim.py refuses another one.
RD_API int32_t rd_version(void) { return 3; }

RD_API void rd_init(void) {
    llama_log_set(on_log, nullptr);
    llama_backend_init();
}

RD_API const char * rd_system_info(void) { return llama_print_system_info(); }

// Copies what was logged since the last call (at most n - 1 bytes) and forgets it; returns the length.
RD_API int32_t rd_take_log(char * dst, int32_t n) {
    int32_t len = (int32_t) g_log.size() < n - 1 ? (int32_t) g_log.size() : n - 1;
    memcpy(dst, g_log.data(), len);
    dst[len] = 0;
    g_log.clear();
    return len;
}

RD_API void * rd_model_load(const char * path, int32_t n_gpu_layers) {
    llama_model_params p = llama_model_default_params();
    p.n_gpu_layers = n_gpu_layers;
    return llama_model_load_from_file(path, p);
}

RD_API void rd_model_free(void * model) { llama_model_free(M(model)); }

// out: n_vocab, n_embd, recurrent, hybrid, n_swa, n_layer
RD_API void rd_model_facts(void * model, int32_t * out) {
    const llama_model * m = M(model);
    out[0] = llama_vocab_n_tokens(llama_model_get_vocab(m));
    out[1] = llama_model_n_embd(m);
    out[2] = llama_model_is_recurrent(m);
    out[3] = llama_model_is_hybrid(m);
    out[4] = llama_model_n_swa(m);
    out[5] = llama_model_n_layer(m);
}

// in: see shim_params.h; returns null where the library refuses
RD_API void * rd_ctx_new(void * model, const int32_t * in) {
    return llama_init_from_model(M(model), rd_context_params(in, on_abort));
}

RD_API void rd_ctx_free(void * ctx) { llama_free(C(ctx)); }

// out: n_ctx, n_ctx_seq, n_batch, n_ubatch, n_seq_max, n_rs_seq, can_shift
RD_API void rd_ctx_facts(void * ctx, int32_t * out) {
    out[0] = (int32_t) llama_n_ctx(C(ctx));
    out[1] = (int32_t) llama_n_ctx_seq(C(ctx));
    out[2] = (int32_t) llama_n_batch(C(ctx));
    out[3] = (int32_t) llama_n_ubatch(C(ctx));
    out[4] = (int32_t) llama_n_seq_max(C(ctx));
    out[5] = (int32_t) llama_n_rs_seq(C(ctx));
    out[6] = llama_memory_can_shift(K(ctx));
}

// n rows, one sequence each. abort_after < 0: the abort callback never fires.
RD_API int32_t rd_decode(void * ctx, int32_t n, const int32_t * token, const int32_t * pos, const int32_t * seq, const int8_t * out,
                         int64_t abort_after) {
    std::vector<int32_t>        n_seq(n, 1);
    std::vector<llama_seq_id *> ids(n);
    for (int32_t i = 0; i < n; ++i) {
        ids[i] = const_cast<llama_seq_id *>(seq + i);
    }
    llama_batch b = {};
    b.n_tokens = n;
    b.token    = const_cast<llama_token *>(token);
    b.pos      = const_cast<llama_pos *>(pos);
    b.n_seq_id = n_seq.data();
    b.seq_id   = ids.data();
    b.logits   = const_cast<int8_t *>(out);
    g_abort_after = abort_after;
    const int32_t rc = llama_decode(C(ctx), b);
    g_abort_after = -1;
    return rc;
}

// Output row of batch row i as n floats; 0 where the library gives none.
RD_API int32_t rd_logits(void * ctx, int32_t i, float * dst, int32_t n) {
    const float * src = llama_get_logits_ith(C(ctx), i);
    if (!src) {
        return 0;
    }
    memcpy(dst, src, sizeof(float) * n);
    return 1;
}

RD_API int32_t rd_hidden(void * ctx, int32_t i, float * dst, int32_t n) {
    const float * src = llama_get_embeddings_ith(C(ctx), i);
    if (!src) {
        return 0;
    }
    memcpy(dst, src, sizeof(float) * n);
    return 1;
}

RD_API int32_t rd_seq_rm (void * ctx, int32_t s, int32_t p0, int32_t p1) { return llama_memory_seq_rm(K(ctx), s, p0, p1); }
RD_API void    rd_seq_cp (void * ctx, int32_t a, int32_t b, int32_t p0, int32_t p1) { llama_memory_seq_cp(K(ctx), a, b, p0, p1); }
RD_API void    rd_seq_keep(void * ctx, int32_t s) { llama_memory_seq_keep(K(ctx), s); }
RD_API void    rd_seq_add(void * ctx, int32_t s, int32_t p0, int32_t p1, int32_t d) { llama_memory_seq_add(K(ctx), s, p0, p1, d); }
RD_API void    rd_seq_div(void * ctx, int32_t s, int32_t p0, int32_t p1, int32_t d) { llama_memory_seq_div(K(ctx), s, p0, p1, d); }
RD_API void    rd_clear(void * ctx, int32_t data) { llama_memory_clear(K(ctx), data != 0); }

// out: (pos_min, pos_max) of sequences 0 .. n - 1
RD_API void rd_positions(void * ctx, int32_t n, int32_t * out) {
    for (int32_t s = 0; s < n; ++s) {
        out[2*s]     = llama_memory_seq_pos_min(K(ctx), s);
        out[2*s + 1] = llama_memory_seq_pos_max(K(ctx), s);
    }
}

RD_API uint64_t rd_seq_size(void * ctx, int32_t s, uint32_t flags) { return llama_state_seq_get_size_ext(C(ctx), s, flags); }
RD_API uint64_t rd_seq_get (void * ctx, uint8_t * dst, uint64_t n, int32_t s, uint32_t flags) {
    return llama_state_seq_get_data_ext(C(ctx), dst, n, s, flags);
}
RD_API uint64_t rd_seq_set(void * ctx, const uint8_t * src, uint64_t n, int32_t s, uint32_t flags) {
    return llama_state_seq_set_data_ext(C(ctx), src, n, s, flags);
}
RD_API uint64_t rd_all_size(void * ctx) { return llama_state_get_size(C(ctx)); }
RD_API uint64_t rd_all_get(void * ctx, uint8_t * dst, uint64_t n) { return llama_state_get_data(C(ctx), dst, n); }
RD_API uint64_t rd_all_set(void * ctx, const uint8_t * src, uint64_t n) { return llama_state_set_data(C(ctx), src, n); }

RD_API uint64_t rd_seq_save_file(void * ctx, const char * path, int32_t s, const int32_t * tok, uint64_t n) {
    return llama_state_seq_save_file(C(ctx), path, s, tok, n);
}
RD_API uint64_t rd_seq_load_file(void * ctx, const char * path, int32_t s, int32_t * tok, uint64_t cap, uint64_t * n) {
    size_t count = 0;
    const size_t rc = llama_state_seq_load_file(C(ctx), path, s, tok, cap, &count);
    *n = count;
    return rc;
}
RD_API int32_t rd_all_save_file(void * ctx, const char * path, const int32_t * tok, uint64_t n) {
    return llama_state_save_file(C(ctx), path, tok, n);
}
RD_API int32_t rd_all_load_file(void * ctx, const char * path, int32_t * tok, uint64_t cap, uint64_t * n) {
    size_t count = 0;
    const bool ok = llama_state_load_file(C(ctx), path, tok, cap, &count);
    *n = count;
    return ok;
}

// A whole reference in one call: a context of its own, the history in `words`, its output rows into `logits` (and `hidden`, when the
// context gives embeddings). References are three quarters of all runs and nothing but decodes, so they are worth one call each.
//
// words: per item a call number, its length in words, and its arguments:
//   0 decode: seq, first position, outputs (0 none, 1 last row, 2 all rows), tokens ...
//   1 seq_rm: seq, p0, p1    2 seq_add: seq, p0, p1, delta    3 seq_div: seq, p0, p1, d
//   4 save: seq              its state, behind those before into `states`, its length (u64) in front; length 0 where it is too long
// n_states: in, the longest state that `states` has room for, as often as there are saves; out, the bytes written there.
// Returns the number of rows written; -1 no context, -2 no room for a row, -3 no row to read, -1000 + rc where a decode did not return 0.
RD_API int32_t rd_replay(void * model, const int32_t * params, const int32_t * words, int32_t n_words, float * logits, float * hidden,
                         int32_t max_rows, uint8_t * states, uint64_t * n_states) {
    const uint64_t longest = *n_states;
    *n_states = 0;
    void * ctx = rd_ctx_new(model, params);
    if (!ctx) {
        return -1;
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(M(model)));
    const int32_t n_embd  = llama_model_n_embd(M(model));
    const bool    embd    = params[12] != 0;
    std::vector<int32_t> pos, seq;
    std::vector<int8_t>  out;
    int32_t rows = 0;
    int32_t rc   = 0;
    for (int32_t i = 0; i + 1 < n_words && rc == 0; i += 2 + words[i + 1]) {
        const int32_t * a = words + i + 2;
        if (words[i] == 1) {
            rd_seq_rm(ctx, a[0], a[1], a[2]);
        } else if (words[i] == 2) {
            rd_seq_add(ctx, a[0], a[1], a[2], a[3]);
        } else if (words[i] == 3) {
            rd_seq_div(ctx, a[0], a[1], a[2], a[3]);
        } else if (words[i] == 4) {
            uint64_t size = rd_seq_size(ctx, a[0], 0);
            uint8_t * dst = states + *n_states;
            if (size > longest || rd_seq_get(ctx, dst + sizeof(size), size, a[0], 0) != size) {
                size = 0;
            }
            memcpy(dst, &size, sizeof(size));
            *n_states += sizeof(size) + size;
        } else {
            const int32_t n = words[i + 1] - 3;
            pos.resize(n);
            seq.assign(n, a[0]);
            out.assign(n, a[2] == 2);
            for (int32_t j = 0; j < n; ++j) {
                pos[j] = a[1] + j;
            }
            out[n - 1] = a[2] != 0;
            const int32_t code = rd_decode(ctx, n, a + 3, pos.data(), seq.data(), out.data(), -1);
            if (code != 0) {
                rc = -1000 + code;
                break;
            }
            for (int32_t j = 0; j < n && rc == 0; ++j) {
                if (!out[j]) {
                    continue;
                }
                if (rows == max_rows) {
                    rc = -2;
                } else if (!rd_logits(ctx, j, logits + (size_t) rows * n_vocab, n_vocab) ||
                           (embd && !rd_hidden(ctx, j, hidden + (size_t) rows * n_embd, n_embd))) {
                    rc = -3;
                } else {
                    ++rows;
                }
            }
        }
    }
    rd_ctx_free(ctx);
    return rc < 0 ? rc : rows;
}
