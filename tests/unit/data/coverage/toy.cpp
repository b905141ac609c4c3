// What tests/unit/test_coverage.py reads: toy.json is llvm-cov 19's export of it, after toy(1, 2) and toy(7, 2).
void fail();
#define GGML_ASSERT(x) if (!(x)) fail()
#define LLAMA_LOG_DEBUG(...) fail()

struct cells {
    int n = 0;
    bool has(int i) const {
        GGML_ASSERT(i >= 0 && "no cell");
        return i < n;
    }
};

static int debug = 0;

template <typename T> static T larger(T a, T b) {
    return a > b ? a : b;
}

int toy(int a, int b) {
    GGML_ASSERT(a > 0);
    GGML_ASSERT(a < 9 && b < 9);
    GGML_ASSERT(a == 1 || b == 2);
    if (debug > 0) {
        LLAMA_LOG_DEBUG("a");
    }
    const auto odd = [](int x) {
        return x % 2 ? 1 : 0;
    };
    while (true) {
        if (a > 5 && b > 5) {
            return 0;
        }
        break;
    }
    return odd(a) + (int) larger(2.0, 1.0) + larger(1, 2) + cells().has(a);
}

int never(int a) {
    return a ? 1 : 2;
}
