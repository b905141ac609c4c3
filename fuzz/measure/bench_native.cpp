// The measure of ci/bench: makes a recorded list of library calls with nothing around them.
//
//     bench_native MODEL CALLS WARM
//
// CALLS is what bench_calls.py wrote: blocks, each one program, subject or reference. A block is run in a context of its own
// unless it says that it takes one from the pool. The first WARM blocks are run once before the clock starts. One line of JSON.

#include "llama.h"

#include "shim_params.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

// as in bench_calls.py
enum Code {
    BEGIN, OPEN, END, DECODE, RM, CP, KEEP, ADD, DIV, CLEAR, SAVE, RESTORE, CORRUPT, POSITIONS, SIZE, SIZE_ALL, CAN_SHIFT,
};

static const int32_t MAGIC     = 0x72644231;
static const size_t  POOL_SIZE = 6; // subjects/child.py: _POOLED_KINDS

static const llama_token FILE_TOKENS[] = { 7, 11, 13 };

struct Slot {
    std::vector<uint8_t> data;
    int                  fd = -1;
};

typedef std::vector<int32_t> Params;

struct Counts {
    long long programs = 0, contexts = 0, decodes = 0, rows = 0, outputs = 0, saves = 0, restores = 0, differs = 0;
};

static Counts  g;
static double  g_sum; // uses what is read, so that no compiler drops the reading
static int64_t g_abort_after = -1;

static void on_log(ggml_log_level, const char *, void *) {}

static bool on_abort(void *) {
    if (g_abort_after < 0) {
        return false;
    }
    return g_abort_after-- == 0;
}

static void fail(const std::string & what) {
    fprintf(stderr, "bench_native: %s\n", what.c_str());
    exit(1);
}

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
    llama_model * model;
    int           n_vocab;
    int           n_embd;

    llama_context * ctx = nullptr;
    Params          params;
    bool            pooled = false;

    std::vector<float>                             row, hidden;
    std::vector<int8_t>                            flags;
    std::vector<int32_t>                           n_seq_id;
    std::vector<llama_seq_id *>                    seq_id;
    std::map<int32_t, Slot>                        slots;
    std::deque<std::pair<Params, llama_context *>> pool;

    llama_context * make(const Params & in) {
        g.contexts++;
        llama_context * made = llama_init_from_model(model, rd_context_params(in.data(), on_abort));
        if (!made) {
            fail("the library refuses a context that it gave before");
        }
        return made;
    }

    void open(const int32_t * in) {
        if (ctx) {
            llama_free(ctx);
        }
        params.assign(in, in + RD_N_PARAMS);
        ctx = nullptr;
        for (auto it = pool.begin(); pooled && it != pool.end(); ++it) {
            if (it->first == params) {
                ctx = it->second;
                pool.erase(it);
                llama_memory_clear(llama_get_memory(ctx), false);
                break;
            }
        }
        if (!ctx) {
            ctx = make(params);
        }
        g_sum += llama_n_ctx(ctx) + llama_n_ctx_seq(ctx) + llama_n_batch(ctx) + llama_n_ubatch(ctx) + llama_n_seq_max(ctx) +
                 llama_n_rs_seq(ctx) + llama_memory_can_shift(llama_get_memory(ctx));
    }

    void end(bool reusable) {
        bool there = false;
        for (const auto & kept : pool) {
            there = there || kept.first == params;
        }
        if (pooled && reusable && !there) {
            pool.emplace_back(params, ctx);
            if (pool.size() > POOL_SIZE) {
                llama_free(pool.front().second);
                pool.pop_front();
            }
        } else {
            llama_free(ctx);
        }
        ctx = nullptr;
        for (auto & s : slots) {
            if (s.second.fd >= 0) {
                close(s.second.fd);
            }
        }
        slots.clear();
    }

    void expect(long long got, long long wanted) { g.differs += got != wanted; }

    // n, abort_after, rc, then n tokens, n positions, n sequences, n output flags
    const int32_t * decode(const int32_t * w) {
        const int32_t n = w[0], wanted = w[2];
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
        g_abort_after = w[1];
        const int32_t rc = llama_decode(ctx, b);
        g_abort_after = -1;
        expect(rc, wanted);
        g.decodes++;
        g.rows += n;
        for (int32_t i = 0; rc == 0 && i < n; ++i) {
            if (out[i]) {
                read(row, llama_get_logits_ith(ctx, i), n_vocab);
                if (params[12]) {
                    read(hidden, llama_get_embeddings_ith(ctx, i), n_embd);
                }
                g.outputs++;
            }
        }
        return out + n;
    }

    void read(std::vector<float> & to, const float * from, int n) {
        if (!from) {
            g.differs++;
            return;
        }
        to.assign(from, from + n);
        g_sum += to[0] + to[n - 1];
    }

    std::string file(Slot & s) {
        if (s.fd < 0) {
            s.fd = memfd_create("bench-state", 0);
        }
        return "/proc/self/fd/" + std::to_string(s.fd);
    }

    // slot, seq, whole, flags, file, keep, moved
    void save(const int32_t * w) {
        Slot scratch;
        Slot & s = w[5] ? slots[w[0]] : scratch;
        const bool whole = w[2];
        g.saves++;
        if (w[4]) {
            const std::string path = file(s);
            const long long moved = whole ? (long long) llama_state_save_file(ctx, path.c_str(), FILE_TOKENS, 3)
                                          : (long long) llama_state_seq_save_file(ctx, path.c_str(), w[1], FILE_TOKENS, 3);
            expect(whole ? moved != 0 : moved, whole ? w[6] != 0 : w[6]);
            return;
        }
        if (s.fd >= 0) {
            close(s.fd);
            s.fd = -1;
        }
        s.data.resize(whole ? llama_state_get_size(ctx) : llama_state_seq_get_size_ext(ctx, w[1], w[3]));
        const size_t moved = whole ? llama_state_get_data(ctx, s.data.data(), s.data.size())
                                   : llama_state_seq_get_data_ext(ctx, s.data.data(), s.data.size(), w[1], w[3]);
        expect((long long) moved, w[6]);
    }

    // slot, seq, whole, flags, moved
    void restore(const int32_t * w) {
        Slot & s = slots[w[0]];
        const bool whole = w[2];
        g.restores++;
        if (s.fd >= 0) {
            llama_token tokens[64];
            size_t n = 0;
            const std::string path = file(s);
            const long long moved = whole ? (long long) llama_state_load_file(ctx, path.c_str(), tokens, 64, &n)
                                          : (long long) llama_state_seq_load_file(ctx, path.c_str(), w[1], tokens, 64, &n);
            expect(whole ? moved != 0 : moved, whole ? w[4] != 0 : w[4]);
            return;
        }
        const size_t moved = whole ? llama_state_set_data(ctx, s.data.data(), s.data.size())
                                   : llama_state_seq_set_data_ext(ctx, s.data.data(), s.data.size(), w[1], w[3]);
        expect((long long) moved, w[4]);
    }

    std::vector<uint8_t> bytes_of(Slot & s) {
        if (s.fd < 0) {
            return s.data;
        }
        struct stat st;
        fstat(s.fd, &st);
        std::vector<uint8_t> d((size_t) st.st_size);
        if (pread(s.fd, d.data(), d.size(), 0) != (ssize_t) d.size()) {
            fail("a session file cannot be read back");
        }
        return d;
    }

    // slot, number of pieces; of each its slot (-1: bytes of its own), start, end, number of bytes, bytes. Returns how
    // many words that was.
    size_t corrupt(const int32_t * w) {
        std::vector<uint8_t> d;
        const int32_t * p = w + 2;
        for (int32_t i = 0; i < w[1]; ++i, p += 4 + p[3]) {
            if (p[0] < 0) {
                d.insert(d.end(), p + 4, p + 4 + p[3]);
            } else {
                const std::vector<uint8_t> from = bytes_of(slots[p[0]]);
                d.insert(d.end(), from.begin() + p[1], from.begin() + p[2]);
            }
        }
        Slot & s = slots[w[0]];
        if (s.fd >= 0) {
            if (ftruncate(s.fd, 0) || pwrite(s.fd, d.data(), d.size(), 0) != (ssize_t) d.size()) {
                fail("a session file cannot be changed");
            }
        } else {
            s.data = d;
        }
        return p - w;
    }

    // Runs blocks from `w` up to `stop` or to the `limit`th.
    void run(const int32_t * w, const int32_t * stop, long long limit) {
        while (w < stop) {
            const int32_t code = *w++;
            llama_memory_t mem = ctx ? llama_get_memory(ctx) : nullptr;
            switch (code) {
                case BEGIN:     pooled = w[0]; w += 1; g.programs++; break;
                case OPEN:      open(w); w += RD_N_PARAMS; break;
                case END:       end(w[0]); w += 1; if (--limit == 0) { return; } break;
                case DECODE:    w = decode(w); break;
                case RM:        expect(llama_memory_seq_rm(mem, w[0], w[1], w[2]), w[3]); w += 4; break;
                case CP:        llama_memory_seq_cp(mem, w[0], w[1], w[2], w[3]); w += 4; break;
                case KEEP:      llama_memory_seq_keep(mem, w[0]); w += 1; break;
                case ADD:       llama_memory_seq_add(mem, w[0], w[1], w[2], w[3]); w += 4; break;
                case DIV:       llama_memory_seq_div(mem, w[0], w[1], w[2], w[3]); w += 4; break;
                case CLEAR:     llama_memory_clear(mem, w[0] != 0); w += 1; break;
                case SAVE:      save(w); w += 7; break;
                case RESTORE:   restore(w); w += 5; break;
                case CORRUPT:   w += corrupt(w); break;
                case SIZE:      g_sum += (double) llama_state_seq_get_size_ext(ctx, w[0], w[1]); w += 2; break;
                case SIZE_ALL:  g_sum += (double) llama_state_get_size(ctx); break;
                case CAN_SHIFT: g_sum += llama_memory_can_shift(mem); break;
                case POSITIONS:
                    for (int32_t s = 0; s < w[0]; ++s) {
                        g_sum += llama_memory_seq_pos_min(mem, s) + llama_memory_seq_pos_max(mem, s);
                    }
                    w += 1;
                    break;
                default: fail("unknown call in the list");
            }
        }
    }
};

static double cpu() {
    rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double) (u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double) (u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

// Largest resident size. Not ru_maxrss, which begins with that of the process that started this one.
static long peak_kb() {
    std::ifstream f("/proc/self/status");
    for (std::string line; std::getline(f, line);) {
        if (line.rfind("VmHWM:", 0) == 0) {
            return atol(line.c_str() + 6);
        }
    }
    return 0;
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fail("usage: bench_native MODEL CALLS WARM");
    }
    llama_log_set(on_log, nullptr);
    llama_backend_init();
    llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) {
        fail(std::string("the library does not load ") + argv[1]);
    }
    const std::vector<int32_t> calls = load(argv[2]);
    const int32_t * begin = calls.data() + 1;
    const int32_t * stop  = calls.data() + calls.size();

    Bench bench = {};
    bench.model   = model;
    bench.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    bench.n_embd  = llama_model_n_embd(model);
    if (const long long warm = atoll(argv[3]); warm > 0) {
        bench.run(begin, stop, warm);
    }
    g = Counts();

    const double cpu0 = cpu();
    const auto   t0   = std::chrono::steady_clock::now();
    bench.run(begin, stop, -1);
    const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
    const double used = cpu() - cpu0;

    printf("{\"wall\": %.6f, \"cpu\": %.6f, \"programs\": %lld, \"contexts\": %lld, \"decodes\": %lld, \"rows\": %lld, "
           "\"outputs\": %lld, \"saves\": %lld, \"restores\": %lld, \"differs\": %lld, \"rss_kb\": %ld, \"sum\": \"%.9g\"}\n",
           wall, used, g.programs, g.contexts, g.decodes, g.rows, g.outputs, g.saves, g.restores, g.differs, peak_kb(), g_sum);
    return 0;
}
