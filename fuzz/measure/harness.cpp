// A libFuzzer harness as one would write it in C++: malformed states are restored into a context and what they did is looked at.
//
// It is what fuzz/targets/ is measured against (fuzz/measure/targets.py): the same models, settings, lead-up and checks, the same
// known faults stepped round; but it knows nothing of how a state is built, so its states are changed by plain edits of bytes, and
// cells that came back in another order are told from wrong ones by a sum over their bytes.
//
// REDRAFT_HARNESS names a file with a word and its arguments a line:
//   target seq_state|context_state|session_file
//   warm N            executions that are not counted: contexts are made in them
//   seconds S         of processor time after that, then it ends
//   counts PATH       where to count, see Counts
//   model RECURRENT PATH
//   params N ...      a set of parameters of the model before (shim_params.h), any number of them

#include "llama.h"

#include "shim_params.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace {

typedef std::vector<uint8_t> Bytes;
typedef std::array<int32_t, RD_N_PARAMS> Params;

// --- what is counted, in the order of fuzz.measure.targets.Counts -----------------------------------------------------------------

const int MOST_MODELS = 16;

enum Outcome { SKIPPED, REFUSED, TAKEN, N_OUTCOMES };

struct Counts {
    int64_t executions;          // all of them, those that warm up too
    int64_t wall_from, wall_to;  // nanoseconds: the end of warming up, the end of the newest execution
    int64_t complaints;
    int64_t warm;                // nanoseconds of processor time until the end of warming up
    int64_t number[MOST_MODELS][N_OUTCOMES];
    int64_t cpu   [MOST_MODELS][N_OUTCOMES];  // nanoseconds of this process' processor time
};

int64_t now(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// --- settings, as fuzz/targets/draw.py draws them ---------------------------------------------------------------------------------

enum Target { SEQ_STATE, CONTEXT_STATE, SESSION_FILE };
enum Kind   { WHOLE, PARTIAL, OTHER_PARAMS, DEVICE, DEVICE_PARTIAL, DEVICE_OLDER, DEVICE_FOREIGN };

const Kind SEQ_KINDS[]  = { WHOLE, PARTIAL, OTHER_PARAMS, DEVICE, DEVICE_PARTIAL, DEVICE_OLDER, DEVICE_FOREIGN };
const Kind FILE_KINDS[] = { WHOLE, OTHER_PARAMS };

const int         VICTIM = 0, NEIGHBOUR = 1, EMPTY = 2;
const int         SAVED = 20, MORE = 2, OTHER = 7;
const size_t      HEADER = 8;  // magic and id of a sequence's state
const float       CLOSE  = 1e-2f;
const llama_token FILE_TOKENS[] = { 7, 11, 13 };

struct Model {
    bool                recurrent;
    std::string         path;
    std::vector<Params> params;
    llama_model *       loaded = nullptr;
};

struct Config {
    Target             target  = SEQ_STATE;
    int64_t            warm    = 0;
    double             seconds = 0;
    Counts *           counts  = nullptr;
    std::vector<Model> models;
};

[[noreturn]] void die(const std::string & why) {
    fprintf(stderr, "harness: %s\n", why.c_str());
    exit(2);
}

Counts * counts_at(const std::string & path) {
    const int fd = open(path.c_str(), O_RDWR);
    void * at = fd < 0 ? MAP_FAILED : mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        die("no counts at " + path);
    }
    return static_cast<Counts *>(at);
}

Config read_config() {
    const char * path = getenv("REDRAFT_HARNESS");
    std::ifstream in(path ? path : "");
    Config c;
    for (std::string line; std::getline(in, line);) {
        std::istringstream words(line);
        std::string word, rest;
        words >> word;
        if (word == "target") {
            words >> rest;
            c.target = rest == "seq_state" ? SEQ_STATE : rest == "context_state" ? CONTEXT_STATE : SESSION_FILE;
        } else if (word == "warm") {
            words >> c.warm;
        } else if (word == "seconds") {
            words >> c.seconds;
        } else if (word == "counts") {
            std::getline(words >> std::ws, rest);
            c.counts = counts_at(rest);
        } else if (word == "model") {
            Model m;
            words >> m.recurrent;
            std::getline(words >> std::ws, m.path);
            c.models.push_back(m);
        } else if (word == "params") {
            Params p;
            for (int32_t & x : p) {
                words >> x;
            }
            c.models.back().params.push_back(p);
        }
    }
    if (!c.counts || c.models.empty() || c.models.size() > MOST_MODELS) {
        die("REDRAFT_HARNESS names no settings");
    }
    return c;
}

// Numbers from a fuzzer's bytes; those that are missing are 0.
struct Numbers {
    const uint8_t * data;
    size_t          size, at = 0;

    uint32_t below(uint32_t n) {
        if (n <= 1) {
            return 0;
        }
        uint32_t value = 0;
        for (int i = 0; i < (n <= 256 ? 1 : 4); ++i, ++at) {
            value |= (at < size ? (uint32_t) data[at] : 0) << (8 * i);
        }
        return value % n;
    }
};

struct Setting {
    int  model, params;
    Kind kind;
    bool whole, file;

    bool device() const { return kind == DEVICE || kind == DEVICE_PARTIAL; }

    uint32_t flags() const {
        return (device() ? LLAMA_STATE_SEQ_FLAGS_ON_DEVICE : 0) |
               (kind == PARTIAL || kind == DEVICE_PARTIAL ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : 0);
    }

    bool operator<(const Setting & o) const {
        return std::tie(model, params, kind, whole) < std::tie(o.model, o.params, o.kind, o.whole);
    }
};

// --- a stage: a context in which malformed states are tried one after the other -----------------------------------------------------

llama_token token(uint64_t stream, uint64_t pos, int32_t n_vocab) {
    uint64_t x = stream * 0x9E3779B97F4A7C15ULL + (pos + 1) * 0xBF58476D1CE4E5B9ULL;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBULL;
    return (llama_token) ((x >> 32) % n_vocab);
}

// Equal for states that differ in the order of their cells.
uint64_t sum_of(const uint8_t * data, size_t size) {
    uint64_t sum = size;
    for (size_t i = 0; i + 1 < size; i += 2) {
        uint64_t x = (uint64_t) (data[i] | data[i + 1] << 8) * 0x9E3779B97F4A7C15ULL;
        sum += (x ^ x >> 29) * 0xBF58476D1CE4E5B9ULL;
    }
    return sum;
}

bool same(const Bytes & a, const Bytes & b, size_t from = 0) {
    if (a.size() != b.size()) {
        return false;
    }
    return std::equal(a.begin() + from, a.end(), b.begin() + from) ||
           sum_of(a.data() + from, a.size() - from) == sum_of(b.data() + from, b.size() - from);
}

struct Complaint {
    const char * what;
};

struct Stage {
    llama_context * ctx = nullptr;
    Setting         s;
    int             n_seq, n_vocab, fd = -1;
    size_t          room = 0;
    size_t          recurrent = SIZE_MAX;  // where the base says how many recurrent cells it has
    std::vector<size_t> positions;         // where it says those of its cells
    Bytes           base, good, empty, victim, neighbour;
    std::vector<Bytes> all; // the good state of every sequence
    std::vector<float> row;

    Stage(const Model & m, const Setting & s) : s(s), n_vocab(llama_vocab_n_tokens(llama_model_get_vocab(m.loaded))) {
        const Params & own = m.params[s.params];
        const bool elsewhere = s.kind == OTHER_PARAMS;
        fd = s.file ? memfd_create("redraft-harness", 0) : -1;
        start(m, elsewhere ? m.params[(s.params + 1) % m.params.size()] : own);
        save_base();
        if (m.recurrent && !s.whole) {
            // a partial state is a header and the recurrent part, which comes last in whole ones
            const size_t part = llama_state_seq_get_size_ext(ctx, VICTIM, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) - HEADER;
            recurrent = base.size() < part ? SIZE_MAX : base.size() - part;
        }
        find_positions();
        if (elsewhere) {
            llama_free(ctx);
            start(m, own);
        }
        n_seq = own[3];
        if (s.whole) {
            good.resize(llama_state_get_size(ctx));
            llama_state_get_data(ctx, good.data(), good.size());
        } else {
            good.resize(llama_state_seq_get_size_ext(ctx, VICTIM, 0));
            llama_state_seq_get_data_ext(ctx, good.data(), good.size(), VICTIM, 0);
        }
        room = 2 * good.size();
        feed(VICTIM, SAVED, MORE, 2);
        empty = get(EMPTY);
        good_again();
        victim    = get(VICTIM);
        neighbour = get(NEIGHBOUR);
        for (int i = 0; i < n_seq; ++i) {
            all.push_back(get(i));
        }
        row = next_row();
        row = next_row();
    }

    ~Stage() {
        llama_free(ctx);
        if (fd >= 0) {
            close(fd);
        }
    }

    Stage(const Stage &) = delete;

    void start(const Model & m, const Params & p) {
        ctx = llama_init_from_model(m.loaded, rd_context_params(p.data(), nullptr));
        if (!ctx) {
            throw Complaint{ "no context" };
        }
        feed(VICTIM, 0, SAVED, 0);
        feed(NEIGHBOUR, 0, OTHER, 1);
    }

    void feed(int32_t seq, int32_t from, int32_t n, uint64_t stream) {
        llama_batch b = llama_batch_init(n, 0, 1);
        for (int32_t i = 0; i < n; ++i) {
            b.token[i]     = token(stream, from + i, n_vocab);
            b.pos[i]       = from + i;
            b.n_seq_id[i]  = 1;
            b.seq_id[i][0] = seq;
            b.logits[i]    = i + 1 == n;
        }
        b.n_tokens = n;
        const int32_t rc = llama_decode(ctx, b);
        llama_batch_free(b);
        if (rc != 0) {
            throw Complaint{ "a decode failed" };
        }
    }

    std::string path() const { return "/proc/self/fd/" + std::to_string(fd); }

    void save_base() {
        if (s.file) {
            if (s.whole) {
                llama_state_save_file(ctx, path().c_str(), FILE_TOKENS, 3);
            } else {
                llama_state_seq_save_file(ctx, path().c_str(), VICTIM, FILE_TOKENS, 3);
            }
            base.resize(lseek(fd, 0, SEEK_END));
            if (pread(fd, base.data(), base.size(), 0) != (ssize_t) base.size()) {
                throw Complaint{ "a file was not written" };
            }
        } else if (s.whole) {
            base.resize(llama_state_get_size(ctx));
            llama_state_get_data(ctx, base.data(), base.size());
        } else {
            base.resize(llama_state_seq_get_size_ext(ctx, VICTIM, s.flags()));
            llama_state_seq_get_data_ext(ctx, base.data(), base.size(), VICTIM, s.flags());
        }
    }

    static uint32_t number(const Bytes & data, size_t at) {
        uint32_t value;
        memcpy(&value, data.data() + at, sizeof(value));
        return value;
    }

    // Positions are the numbers that follow each other at equal distances: cells are 8 bytes, or 12 with an id.
    void find_positions() {
        for (size_t at = 0; at + 4 <= base.size(); at += 4) {
            for (const size_t size : { 8, 12 }) {
                uint32_t n = 1;
                while (at + n * size + 4 <= base.size() && number(base, at + n * size) == number(base, at) + n) {
                    ++n;
                }
                for (uint32_t i = 0; i < n && n >= 6; ++i) {
                    positions.push_back(at + i * size);
                }
            }
        }
        std::sort(positions.begin(), positions.end());
        positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
    }

    // The state of a sequence. Asking for its size takes as long as saving, so that is done only where there is no room.
    Bytes get(int32_t seq) {
        static Bytes buffer;
        buffer.resize(std::max(buffer.size(), room));
        size_t n = llama_state_seq_get_data_ext(ctx, buffer.data(), room, seq, 0);
        if (!n) {
            const size_t size = llama_state_seq_get_size_ext(ctx, seq, 0);
            buffer.resize(std::max(buffer.size(), size));
            n = llama_state_seq_get_data_ext(ctx, buffer.data(), size, seq, 0);
        }
        return Bytes(buffer.begin(), buffer.begin() + n);
    }

    size_t restore(const Bytes & data) {
        if (!s.file) {
            return s.whole ? llama_state_set_data(ctx, data.data(), data.size())
                           : llama_state_seq_set_data_ext(ctx, data.data(), data.size(), VICTIM, s.flags());
        }
        llama_token tokens[64];
        size_t n = 0;
        if (ftruncate(fd, 0) != 0 || pwrite(fd, data.data(), data.size(), 0) != (ssize_t) data.size()) {
            die("no room for a file");
        }
        return s.whole ? llama_state_load_file(ctx, path().c_str(), tokens, 64, &n)
                       : llama_state_seq_load_file(ctx, path().c_str(), VICTIM, tokens, 64, &n);
    }

    // The neighbour's next row; it is put back afterwards.
    std::vector<float> next_row() {
        feed(NEIGHBOUR, OTHER, 1, 1);
        const float * logits = llama_get_logits_ith(ctx, 0);
        if (!logits) {
            throw Complaint{ "the neighbour does not go on" };
        }
        std::vector<float> out(logits, logits + n_vocab);
        if (llama_state_seq_set_data_ext(ctx, neighbour.data(), neighbour.size(), NEIGHBOUR, 0) != neighbour.size()) {
            throw Complaint{ "the neighbour does not come back" };
        }
        return out;
    }

    void good_again() {
        const size_t n = s.whole ? llama_state_set_data(ctx, good.data(), good.size())
                                 : llama_state_seq_set_data_ext(ctx, good.data(), good.size(), VICTIM, 0);
        if (n != good.size()) {
            throw Complaint{ "a good restore afterwards is refused" };
        }
    }

    bool attempt(const Bytes & data) {
        std::vector<Bytes> before, after;
        const int n = s.whole ? n_seq : 1;
        for (int i = 0; i < n; ++i) {
            before.push_back(s.whole ? get(i) : victim);
        }
        const bool taken = restore(data) != 0;
        bool kept = true, emptied = true;
        for (int i = 0; i < n; ++i) {
            after.push_back(get(i));
        }
        for (int i = 0; i < n && !taken && kept; ++i) {
            kept = same(after[i], before[i]);
        }
        for (int i = 0; i < n && !taken && !kept && emptied; ++i) {
            emptied = same(after[i], empty, HEADER);
        }
        // Neither is a known fault (half-restore), which this cannot tell from another one; but where the first number of the
        // state is malformed nothing may have been touched.
        if (!kept && !emptied && memcmp(data.data(), base.data(), std::min<size_t>({ data.size(), base.size(), 4 })) != 0) {
            throw Complaint{ "a malformed header changed something" };
        }
        if (!s.whole) {
            if (get(NEIGHBOUR) != neighbour) {
                throw Complaint{ "the state of another sequence is not what it was" };
            }
            goes_on();
        }
        good_again();
        for (int i = 0; i < n; ++i) {
            if (!same(get(i), all[i])) {
                throw Complaint{ "a good restore afterwards does not give the good state" };
            }
        }
        if (s.whole) {
            goes_on();
        }
        return taken;
    }

    void goes_on() {
        const std::vector<float> again = next_row();
        float worst = 0;
        for (int i = 0; i < n_vocab; ++i) {
            worst = std::isnan(again[i]) ? INFINITY : std::max(worst, std::fabs(again[i] - row[i]));
        }
        if (!(worst <= CLOSE)) {
            throw Complaint{ "another sequence does not go on as before" };
        }
    }
};

// --- malformed states: plain edits of bytes -------------------------------------------------------------------------------------------

const uint32_t VALUES[] = { 0, 1, 2, 3, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 255, 256, 257, 64, 0x7FC00000 };

struct Changed {
    Bytes  data;
    size_t moved = SIZE_MAX;  // from here on bytes are at another offset than they were
};

size_t place(Numbers & b, size_t size) {
    // a third of the edits is where the counts and types of small states are
    return b.below(3) ? b.below((uint32_t) size) : b.below((uint32_t) std::min<size_t>(size, 256));
}

void change(Numbers & b, Changed & c) {
    Bytes & d = c.data;
    if (d.size() < 8) {
        return;
    }
    const uint32_t how = b.below(8);
    size_t at = place(b, d.size() - 4);
    const size_t n = std::min<size_t>(4 * (1 + b.below(64)), d.size() - at);
    switch (how) {
        case 0: case 1: case 2: case 3: {
            at &= ~(size_t) 3;
            uint32_t value = VALUES[b.below(12)];
            if (how == 3) {
                uint32_t was;
                memcpy(&was, d.data() + at, 4);
                value = was + (b.below(2) ? 1 : -1);
            }
            memcpy(d.data() + at, &value, 4);
            break;
        }
        case 4:
            d.resize(at);
            break;
        case 5:
            d.erase(d.begin() + at, d.begin() + at + n);
            c.moved = std::min(c.moved, at);
            break;
        case 6: {
            const Bytes copy(d.begin() + at, d.begin() + at + n);
            d.insert(d.begin() + at, copy.begin(), copy.end());
            c.moved = std::min(c.moved, at);
            break;
        }
        case 7:
            d.insert(d.end(), n, 0x5a);
            break;
    }
}

// Whether a whole context's state has a long text at its beginning: the library makes room before it looks for the bytes, which
// takes seconds and is not drawn by fuzz/damage.py either.
bool makes_room(const Bytes & data, bool file) {
    uint32_t n = 0;
    if (file && data.size() >= 12) {
        memcpy(&n, data.data() + 8, 4);
    }
    const size_t at = file ? 12 + 4 * (size_t) n : 0;  // behind magic, version and tokens
    if (data.size() < at + 4) {
        return false;
    }
    memcpy(&n, data.data() + at, 4);
    return n > 1 << 16;
}

// Whether a known fault is in the way: fuzz/avoid.py has their names. This steps round more than fuzz/targets/stage.py,
// which reads the state.
bool steps_round(const Stage & stage, const Changed & c) {
    const Bytes & base = stage.base;
    if (c.data == base && stage.s.kind != OTHER_PARAMS) {
        return false;
    }
    if (stage.s.device()) {
        return true;  // device-corrupt
    }
    if (stage.s.whole && makes_room(c.data, stage.s.file)) {
        return true;
    }
    if (stage.recurrent != SIZE_MAX) {  // recurrent-cells
        const bool there = c.data.size() >= stage.recurrent + 4;
        if (c.moved < stage.recurrent + 4 || (there && stage.number(c.data, stage.recurrent) > 1)) {
            return true;
        }
    }
    for (const size_t at : stage.positions) {  // stuck-cell
        // below 0, or the largest
        if (c.data.size() >= at + 4 && (uint32_t) stage.number(c.data, at) >= INT32_MAX) {
            return true;
        }
    }
    return stage.s.file && c.data.size() < base.size();  // file-cut
}

Config g_config;
std::map<Setting, std::unique_ptr<Stage>> g_stages;

Outcome one(const Setting & s, Numbers & b) {
    if (s.kind == DEVICE_OLDER || s.kind == DEVICE_FOREIGN) {
        return SKIPPED;  // known faults
    }
    auto found = g_stages.find(s);
    try {
        if (found == g_stages.end()) {
            found = g_stages.emplace(s, nullptr).first;
            Model & m = g_config.models[s.model];
            found->second.reset(new Stage(m, s));
        }
        if (!found->second) {
            return SKIPPED;  // parameters that this model cannot have
        }
        Changed c{ found->second->base };
        static const int N_EDITS[] = { 1, 1, 1, 2, 1, 2, 3, 1 };
        if (s.kind != OTHER_PARAMS || b.below(2) != 0) {
            for (int n = N_EDITS[b.below(8)]; n > 0; --n) {
                change(b, c);
            }
        }
        if (steps_round(*found->second, c)) {
            return SKIPPED;
        }
        return found->second->attempt(c.data) ? TAKEN : REFUSED;
    } catch (const Complaint & c) {
        if (found->second) {
            fprintf(stderr, "complaint: %s\n", c.what);
            ++g_config.counts->complaints;
            g_stages.erase(found);
        }
        return REFUSED;
    }
}

} // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    g_config = read_config();
    for (Model & m : g_config.models) {
        llama_model_params p = llama_model_default_params();
        p.n_gpu_layers = 0;
        m.loaded = llama_model_load_from_file(m.path.c_str(), p);
        if (!m.loaded) {
            die(m.path + " cannot be loaded");
        }
    }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    static int64_t last = 0;
    Counts & counts = *g_config.counts;
    Numbers b{ data, size };
    Setting s{};
    s.file  = g_config.target == SESSION_FILE;
    s.whole = g_config.target == CONTEXT_STATE || (s.file && size && (data[0] & 1));
    b.at    = s.file;
    s.model  = (int) b.below((uint32_t) g_config.models.size());
    s.params = (int) b.below((uint32_t) g_config.models[s.model].params.size());
    s.kind   = s.file || s.whole ? FILE_KINDS[b.below(2)] : SEQ_KINDS[b.below(7)];
    const Outcome outcome = one(s, b);
    const int64_t cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    counts.wall_to = now(CLOCK_MONOTONIC);
    if (++counts.executions > g_config.warm) {
        ++counts.number[s.model][outcome];
        counts.cpu[s.model][outcome] += cpu - last;  // with what libFuzzer did since the execution before
        if (cpu - counts.warm >= 1e9 * g_config.seconds) {
            _exit(0);
        }
    } else {
        counts.wall_from = counts.wall_to;
        counts.warm      = cpu;
    }
    last = cpu;
    return 0;
}
