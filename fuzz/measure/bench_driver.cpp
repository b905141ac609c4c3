// The measure of ci/bench --driver: makes a recorded list of library calls with nothing around them.
//
//     bench_driver CALLS WARM MODEL...
//
// CALLS is what bench_driver_calls.py wrote: blocks, each one program, subject or reference, in contexts of its own. A MODEL is
// `plain:PATH`, or `whole:PATH` where NextN layers are loaded too. The first WARM blocks are run once before the clock starts. One
// line of JSON.

#include "common.h"
#include "log.h"
#include "speculative.h"

#include "shim_params.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

// as in bench_driver_calls.py
enum Code {
    BEGIN, CONTEXT, DRAFT_CONTEXT, FREE, FACTS, DECODE, LOGITS, HIDDEN, RM, ADD, DIV, CLEAR, POSITIONS, SIZE, GET, SET, DRIVER,
    DRIVER_FREE, PROCESS, DRAFT, ACCEPT, START, STATE, LITERAL, RESTORE,
};

// subjects/scenario.py: DriverKind
static const char * const KINDS[] = {
    "draft-mtp", "draft-eagle3", "draft-simple", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache",
};

static const int32_t MAGIC    = 0x72644432;
static const int     N_DRIVER = 11;

struct Counts {
    long long blocks = 0, contexts = 0, drivers = 0, decodes = 0, rows = 0, outputs = 0, processed = 0, drafts = 0, draft_decodes = 0,
              draft_outputs = 0, saves = 0, restores = 0, differs = 0;
};

static Counts g;
static double g_sum; // uses what is read, so that no compiler drops the reading

// Decodes of the draft context within the call that runs: per decode the number of its output rows, and they.
static llama_context * g_tapped = nullptr;
static const int32_t * g_taps   = nullptr;
static const int32_t * g_stop   = nullptr;
static std::vector<float> g_row;

static void fail(const std::string & what) {
    fprintf(stderr, "bench_driver: %s\n", what.c_str());
    exit(1);
}

static void expect(long long got, long long wanted) { g.differs += got != wanted; }

static void read(const float * from, int n) {
    if (!from) {
        g.differs++;
        return;
    }
    g_row.assign(from, from + n);
    g_sum += g_row[0] + g_row[n - 1];
}

// libllama-common calls this one, as it does in the driver library (subjects/driver.cpp): draft logits can be read nowhere else
extern "C" __attribute__((visibility("default"))) int32_t llama_process(llama_context * ctx, llama_process_type type, llama_batch_ext * b) {
    static const auto real = reinterpret_cast<decltype(&llama_process)>(dlsym(RTLD_NEXT, "llama_process"));
    const int32_t rc = real(ctx, type, b);
    if (ctx != g_tapped || type != LLAMA_PROCESS_TYPE_DECODE) {
        return rc;
    }
    g.draft_decodes++;
    if (g_taps == g_stop) {
        g.differs++;
        return rc;
    }
    const int n = *g_taps++;
    for (int i = 0; i < n; ++i) {
        read(llama_get_logits_ith(ctx, *g_taps++), llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))));
        g.draft_outputs++;
    }
    return rc;
}

// no thread that prints
__attribute__((visibility("default"))) struct common_log * common_log_main() { return nullptr; }
__attribute__((visibility("default"))) void common_log_add(struct common_log *, enum ggml_log_level, const char *, ...) {}

static void on_log(ggml_log_level, const char *, void *) {}

static std::vector<int32_t> load(const char * path) {
    std::ifstream f(path, std::ios::binary | std::ios::ate);
    if (!f) {
        fail(std::string("cannot read ") + path);
    }
    std::vector<int32_t> words((size_t) f.tellg() / 4);
    f.seekg(0);
    f.read((char *) words.data(), (std::streamsize) (words.size() * 4));
    if (words.empty() || words[0] != MAGIC) {
        fail(std::string(path) + " is no list of calls of this version");
    }
    return words;
}

struct Bench {
    std::vector<llama_model *>   models;
    std::vector<llama_context *> ctxs;
    common_params_speculative    params;
    common_speculative *         spec = nullptr;
    std::vector<llama_tokens>    prompts;

    std::vector<std::vector<uint8_t>> slots;
    std::vector<int8_t>               flags;
    std::vector<int32_t>              n_seq_id;
    std::vector<llama_seq_id *>       seq_id;

    void keep(size_t number, llama_context * made) {
        if (!made) {
            fail("the library refuses a context that it gave before");
        }
        g.contexts++;
        ctxs.resize(std::max(ctxs.size(), number + 1));
        ctxs[number] = made;
    }

    std::vector<uint8_t> & slot(size_t number) {
        slots.resize(std::max(slots.size(), number + 1));
        return slots[number];
    }

    // number, model, parameters
    void context(const int32_t * w) { keep(w[0], llama_init_from_model(models[w[1]], rd_context_params(w + 2, nullptr))); }

    // number, model, target, mtp, parameters
    void draft_context(const int32_t * w) {
        llama_context_params p = rd_context_params(w + 4, nullptr);
        p.n_rs_seq  = 0;
        p.ctx_type  = w[3] ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
        p.ctx_other = ctxs[w[2]];
        keep(w[0], llama_init_from_model(models[w[1]], p));
    }

    void facts(llama_context * ctx) {
        g_sum += llama_n_ctx(ctx) + llama_n_ctx_seq(ctx) + llama_n_batch(ctx) + llama_n_ubatch(ctx) + llama_n_seq_max(ctx) +
                 llama_n_rs_seq(ctx) + llama_memory_can_shift(llama_get_memory(ctx));
    }

    // context, rc, n, then n tokens, n positions, n sequences, n output flags
    const int32_t * decode(const int32_t * w) {
        const int32_t n = w[2];
        int32_t * token = const_cast<int32_t *>(w + 3);
        const int32_t * out = token + 3*n;
        flags.assign(out, out + n);
        n_seq_id.assign(n, 1);
        seq_id.resize(n);
        for (int32_t i = 0; i < n; ++i) {
            seq_id[i] = token + 2*n + i;
        }
        llama_batch b = {};
        b.n_tokens = n;
        b.token    = token;
        b.pos      = token + n;
        b.n_seq_id = n_seq_id.data();
        b.seq_id   = seq_id.data();
        b.logits   = flags.data();
        expect(llama_decode(ctxs[w[0]], b), w[1]);
        g.decodes++;
        g.rows += n;
        return out + n;
    }

    // context, sequence, flags, slot, bytes
    void get(const int32_t * w) {
        std::vector<uint8_t> & s = slot(w[3]);
        s.resize(w[4]);
        expect((long long) llama_state_seq_get_data_ext(ctxs[w[0]], s.data(), s.size(), w[1], w[2]), w[4]);
        g.saves++;
    }

    // context, sequence, flags, slot, what it answered
    void set(const int32_t * w) {
        const std::vector<uint8_t> & s = slot(w[3]);
        expect((long long) llama_state_seq_set_data_ext(ctxs[w[0]], s.data(), s.size(), w[1], w[2]), w[4]);
        g.restores++;
    }

    // target, draft (-1 none), kind, n_seq, n_max, n_min, backend_sampling, ngram n, m, hits, p_min as bits
    void driver(const int32_t * w) {
        float p_min;
        memcpy(&p_min, w + N_DRIVER - 1, sizeof(p_min));
        params = common_params_speculative();
        params.types = { common_speculative_type_from_name(KINDS[w[2]]) };
        params.draft.ctx_tgt          = ctxs[w[0]];
        params.draft.ctx_dft          = w[1] < 0 ? nullptr : ctxs[w[1]];
        params.draft.n_max            = w[4];
        params.draft.n_min            = w[5];
        params.draft.p_min            = p_min;
        params.draft.backend_sampling = w[6] != 0;
        params.ngram_mod.n_match      = w[7];
        params.ngram_mod.n_max        = w[8];
        params.ngram_mod.n_min        = w[5];
        for (auto * m : { &params.ngram_simple, &params.ngram_map_k, &params.ngram_map_k4v }) {
            m->size_n   = w[7];
            m->size_m   = w[8];
            m->min_hits = w[9];
        }
        prompts.assign(w[3], {});
        g_tapped = params.draft.ctx_dft;
        spec = common_speculative_init(params, w[3]);
        if (!spec) {
            fail("common_speculative_init gives no driver that it gave before");
        }
        g.drivers++;
    }

    // answer, n, tokens, positions, sequences, output flags
    const int32_t * process(const int32_t * w) {
        const int32_t n = w[1];
        const int32_t * token = w + 2;
        common_batch b;
        for (int32_t i = 0; i < n; ++i) {
            b.add(token[i], token[n + i], token[2*n + i], token[3*n + i] != 0);
        }
        expect(common_speculative_process(spec, b), w[0]);
        g.processed++;
        return token + 4*n;
    }

    // n, then for each: sequence, pos0, last token, n_max, number of drafts, drafts, length of the prompt, prompt
    const int32_t * draft(const int32_t * w) {
        const int32_t n = *w++;
        std::vector<llama_tokens> results(n), wanted(n);
        std::vector<int32_t> seqs(n);
        for (int32_t i = 0; i < n; ++i) {
            const int32_t * a = w;
            wanted[i].assign(a + 5, a + 5 + a[4]);
            w = a + 5 + a[4];
            seqs[i] = a[0];
            prompts[a[0]].assign(w + 1, w + 1 + w[0]);
            w += 1 + w[0];
            common_speculative_get_draft_params(spec, a[0]) = { true, a[3], a[1], a[2], &prompts[a[0]], &results[i] };
        }
        common_speculative_draft(spec);
        for (int32_t i = 0; i < n; ++i) {
            common_speculative_get_draft_params(spec, seqs[i]).result = nullptr;
            g.differs += results[i] != wanted[i];
        }
        g.drafts++;
        return w;
    }

    // sequence, slot, bytes (-1 none)
    void state(const int32_t * w) {
        std::vector<uint8_t> data;
        const bool given = common_speculative_get_state(spec, w[0], data);
        expect(given ? (long long) data.size() : -1, w[2]);
        slot(w[1]) = std::move(data);
    }

    // After PROCESS and DRAFT: number of words, then what is to be read of the draft's decodes. They stand before the call.
    const int32_t * taps(const int32_t * w) {
        g_taps = w + 1;
        g_stop = g_taps + w[0];
        return g_stop;
    }

    void untapped() {
        g.differs += g_taps != g_stop;
        g_taps = g_stop = nullptr;
    }

    // Runs blocks from `w` up to `stop` or to the `limit`th.
    void run(const int32_t * w, const int32_t * stop, long long limit) {
        while (w < stop) {
            switch (const int32_t code = *w++) {
                case BEGIN:         if (limit-- == 0) { return; } g.blocks++; break;
                case CONTEXT:       context(w); w += 2 + RD_N_PARAMS; break;
                case DRAFT_CONTEXT: draft_context(w); w += 4 + RD_N_PARAMS; break;
                case FREE:          llama_free(ctxs[w[0]]); ctxs[w[0]] = nullptr; w += 1; break;
                case FACTS:         facts(ctxs[w[0]]); w += 1; break;
                case DECODE:        w = decode(w); break;
                case LOGITS:        read(llama_get_logits_ith(ctxs[w[0]], w[1]), w[2]); g.outputs++; w += 3; break;
                case HIDDEN:        read(llama_get_embeddings_ith(ctxs[w[0]], w[1]), w[2]); w += 3; break;
                case RM:            expect(llama_memory_seq_rm(llama_get_memory(ctxs[w[0]]), w[1], w[2], w[3]), w[4]); w += 5; break;
                case ADD:           llama_memory_seq_add(llama_get_memory(ctxs[w[0]]), w[1], w[2], w[3], w[4]); w += 5; break;
                case DIV:           llama_memory_seq_div(llama_get_memory(ctxs[w[0]]), w[1], w[2], w[3], w[4]); w += 5; break;
                case CLEAR:         llama_memory_clear(llama_get_memory(ctxs[w[0]]), w[1] != 0); w += 2; break;
                case POSITIONS:
                    for (int32_t s = 0; s < w[1]; ++s) {
                        llama_memory_t mem = llama_get_memory(ctxs[w[0]]);
                        g_sum += llama_memory_seq_pos_min(mem, s) + llama_memory_seq_pos_max(mem, s);
                    }
                    w += 2;
                    break;
                case SIZE:          expect((long long) llama_state_seq_get_size_ext(ctxs[w[0]], w[1], w[2]), w[3]); w += 4; break;
                case GET:           get(w); w += 5; break;
                case SET:           set(w); w += 5; break;
                case DRIVER:        driver(w); w += N_DRIVER; break;
                case DRIVER_FREE:   common_speculative_free(spec); spec = nullptr; g_tapped = nullptr; break;
                case PROCESS:       w = process(taps(w)); untapped(); break;
                case DRAFT:         w = draft(taps(w)); untapped(); break;
                case ACCEPT:        common_speculative_accept(spec, w[0], (uint16_t) w[1]); w += 2; break;
                case START:         common_speculative_begin(spec, w[0], llama_tokens(w + 2, w + 2 + w[1])); w += 2 + w[1]; break;
                case STATE:         state(w); w += 3; break;
                case LITERAL:       slot(w[0]).assign((const uint8_t *) (w + 2), (const uint8_t *) (w + 2) + w[1]);
                                    w += 2 + (w[1] + 3) / 4;
                                    break;
                case RESTORE:       common_speculative_set_state(spec, w[0], slot(w[1])); w += 2; break;
                default:            fail("unknown call " + std::to_string(code) + " in the list");
            }
        }
    }
};

static double cpu() {
    rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double) (u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double) (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

int main(int argc, char ** argv) {
    if (argc < 4) {
        fail("usage: bench_driver CALLS WARM MODEL...");
    }
    llama_log_set(on_log, nullptr);
    llama_backend_init();
    Bench bench;
    for (int i = 3; i < argc; ++i) {
        const std::string what = argv[i];
        llama_model_params mp = llama_model_default_params();
        mp.n_gpu_layers = 0;
        mp.load_mtp     = what.rfind("whole:", 0) == 0;
        bench.models.push_back(llama_model_load_from_file(what.substr(6).c_str(), mp));
        if (!bench.models.back()) {
            fail("the library does not load " + what.substr(6));
        }
    }
    const std::vector<int32_t> calls = load(argv[1]);
    const int32_t * begin = calls.data() + 1;
    const int32_t * stop  = calls.data() + calls.size();

    if (const long long warm = atoll(argv[2]); warm > 0) {
        bench.run(begin, stop, warm);
    }
    g = Counts();

    const double cpu0 = cpu();
    const auto   t0   = std::chrono::steady_clock::now();
    bench.run(begin, stop, -1);
    const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
    const double used = cpu() - cpu0;

    printf("{\"wall\": %.6f, \"cpu\": %.6f, \"blocks\": %lld, \"contexts\": %lld, \"drivers\": %lld, \"decodes\": %lld, \"rows\": %lld, "
           "\"outputs\": %lld, \"processed\": %lld, \"drafts\": %lld, \"draft_decodes\": %lld, \"draft_outputs\": %lld, \"saves\": %lld, "
           "\"restores\": %lld, \"differs\": %lld, \"sum\": \"%.9g\"}\n",
           wall, used, g.blocks, g.contexts, g.drivers, g.decodes, g.rows, g.outputs, g.processed, g.drafts, g.draft_decodes,
           g.draft_outputs, g.saves, g.restores, g.differs, g_sum);
    return 0;
}
