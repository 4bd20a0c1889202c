/* test_shim.cpp - tests of the emulated GPU (shim.h): its operations compute what a GPU's do, it
 * rejects what a GPU does not allow, and it exposes bugs of kernels.
 *
 * Each kernel with a bug (seeded.h) runs in another process, because a sanitizer that detects the
 * bug ends the process. That process is this program, with the bug's name as its argument. */
#include <sys/wait.h>

#include <algorithm>
#include <cfloat>
#include <cstdio>
#include <vector>

#include "seeded.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1 /* as gcc defines it */
#endif
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#if __has_feature(memory_sanitizer)
#define MEMORY_SANITIZER 1
#endif
#endif

enum { PLAIN, ADDRESS, THREAD, MEMORY };
static const char *const sanitizers[] = {"nothing", "AddressSanitizer", "ThreadSanitizer",
                                         "MemorySanitizer"};
#if defined(__SANITIZE_ADDRESS__)
static const int sanitizer = ADDRESS;
#elif defined(__SANITIZE_THREAD__)
static const int sanitizer = THREAD;
#elif defined(MEMORY_SANITIZER)
static const int sanitizer = MEMORY;
#else
static const int sanitizer = PLAIN;
#endif

static void check(bool holds, const char *what = "", int line = __builtin_LINE()) {
    if (holds) return;
    fprintf(stderr, "%s:%d: failed %s; the shim says: %s\n", __FILE__, line, what, shim_error());
    exit(1);
}

struct shape {
    unsigned grid[3], block, shared;
};

template <typename PARAMS>
static int launch(const char *name, const PARAMS &params, const shape &s, char *workspace) {
    return shim_launch(name, &params, sizeof params, workspace, s.grid, s.block, s.shared);
}

/* ---- Each operation ------------------------------------------------------ */

/* A value for each lane, with arbitrary bits. */
template <typename T> DEVICE T value_of(unsigned thread) {
    const uint64_t bits = (thread + 1) * 0x9e3779b97f4a7c15u;
    T x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

template <typename T> DEVICE bool same(T a, T b) { return memcmp(&a, &b, sizeof a) == 0; }

template <typename T> DEVICE bool exchanges(void) {
    const unsigned i = threadIdx.x, first = i / 32 * 32;
    const T word = value_of<T>(i);
    bool right = true;
    for (int mask = 1; mask < 32; mask++) {
        right &= same(shfl_xor(word, mask), value_of<T>(i ^ (unsigned)mask));
    }
    for (int lane = 0; lane < 32; lane++) {
        right &= same(shfl(word, lane), value_of<T>(first + (unsigned)lane));
    }
    right &= same(shfl(word, (int)(i * 7 % 32)), value_of<T>(first + i * 7 % 32));
    right &= same(shfl(word, 32 + 5), value_of<T>(first + 5)); /* modulo 32 */
    return right;
}

typedef struct {
    int what;
    uint32_t *out, *counter;
    char *bytes;
} probe_params;

KERNEL(probe_warp, probe_params) {
    const unsigned i = threadIdx.x, lane = i % 32;
    bool right = exchanges<float>() && exchanges<double>();
    right &= exchanges<int32_t>() && exchanges<uint32_t>();
    right &= exchanges<int64_t>() && exchanges<uint64_t>();
    right &=
        warp_ballot(lane % 3 == 0) == 0x49249249u && warp_ballot(i < 32) == (i < 32 ? ~0u : 0u);
    right &= warp_all(true) && !warp_all(lane != 17) && warp_all(i < 32) == (i < 32);
    right &= popcount(0) == 0 && popcount(0x80000001u) == 2 && popcount(~0u) == 32;
    for (unsigned warp = 0; warp <= i / 32; warp++) sync_warp(); /* calls differ by warp */
    params.out[i] = right;
}

/* Shared memory: 33 bytes of 0xff. Barriers have a predicate. */
KERNEL(probe_block, probe_params) {
    unsigned char *const shared = dynamic_shared;
    const unsigned i = threadIdx.x, threads = blockDim.x;
    bool right = (uintptr_t)shared % 16 == 0;
    if (params.what == 0 && i < 33) right &= shared[i] == 0xff;
    sync_block();
    if (i == 0) shared[0] = (unsigned char)blockIdx.x;
    right &= !block_any(false) && block_any(true);
    for (unsigned t = 0; t < threads; t++) right &= block_any(i == t);
    right &= !block_any(false) && shared[0] == (unsigned char)blockIdx.x;
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    params.out[block * threads + i] += right;
}

KERNEL(probe_vectors, probe_params) {
    unsigned char *const shared = dynamic_shared;
    const unsigned i = threadIdx.x;
    store16(shared + 16 * i, load16(params.bytes + 16 * i));
    sync_block();
    const vec16 x = load16(shared + 16 * (blockDim.x - 1 - i));
    for (int w = 0; w < 4; w++) params.out[4 * i + w] = x.w[w];
}

/* Shared memory: two 16 x 16 matrices, with elements and products that both formats hold
 * exactly. */
template <typename WIDEN, typename MULTIPLY>
DEVICE bool multiplies(uint16_t *a, uint16_t *b, uint16_t (*narrow)(float), WIDEN widen,
                       MULTIPLY multiply) {
    const unsigned lane = threadIdx.x, group = lane / 4, pair = 2 * (lane % 4);
    const auto two = [](const uint16_t *m, unsigned at, unsigned step) {
        return m[at] | (uint32_t)m[at + step] << 16;
    };
    sync_warp();
    for (unsigned i = lane; i < 256; i += 32) {
        a[i] = narrow((float)(int)(i * 29 % 64) - 31.5f);
        b[i] = narrow((float)(int)(i * i % 61) - 17.0f);
    }
    sync_warp();
    uint32_t left[4], right[4];
    load_matrices(left, a + lane % 16 * 16 + lane / 16 * 8);
    load_transposed(right, b + lane % 16 * 16 + lane / 16 * 8);
    bool good = left[0] == two(a, group * 16 + pair, 1);
    good &= left[1] == two(a, (group + 8) * 16 + pair, 1);
    good &= left[2] == two(a, group * 16 + pair + 8, 1);
    good &= left[3] == two(a, (group + 8) * 16 + pair + 8, 1);
    for (unsigned half = 0; half < 2; half++) { /* half of b's columns */
        float c[4] = {1.0f, 20.0f, -300.0f, 4000.0f};
        good &= right[2 * half] == two(b, pair * 16 + half * 8 + group, 16);
        good &= right[2 * half + 1] == two(b, (pair + 8) * 16 + half * 8 + group, 16);
        multiply(c, left, right + 2 * half);
        for (unsigned e = 0; e < 4; e++) {
            const unsigned row = group + e / 2 * 8, column = half * 8 + pair + e % 2;
            float sum = e == 0 ? 1.0f : e == 1 ? 20.0f : e == 2 ? -300.0f : 4000.0f;
            for (unsigned k = 0; k < 16; k++) {
                sum += widen(a[row * 16 + k]) * widen(b[k * 16 + column]);
            }
            good &= c[e] == sum; /* all exact */
        }
    }
    return good;
}

KERNEL(probe_matrices, probe_params) {
    unsigned char *const shared = dynamic_shared;
    uint16_t *const a = (uint16_t *)shared, *const b = a + 256;
    const auto bf16 = [](float *c, const uint32_t *l, const uint32_t *r) {
        multiply_bf16(c, l, r);
    };
    const auto f16 = [](float *c, const uint32_t *l, const uint32_t *r) { multiply_f16(c, l, r); };
    const auto halves = [](float *c, const uint32_t *l, const uint32_t *r) {
        multiply_half_f16(c, l, r[0]);
        multiply_half_f16(c, l + 2, r[1]);
    };
    bool right = multiplies(a, b, float_to_bf16, float_from_bf16, bf16);
    right &= multiplies(a, b, f16_from_float, float_from_f16, halves);
    right &= multiplies(a, b, f16_from_float, float_from_f16, f16);
    params.out[threadIdx.x] = right;
}

/* Shared memory: for each thread the targets of a copy of 16 bytes and of a copy of 4 bytes, which
 * other threads read after a barrier. The last batch need not have arrived. The seed determines
 * which copies have. */
KERNEL(probe_copies, probe_params) {
    unsigned char *const shared = dynamic_shared;
    const unsigned i = threadIdx.x, threads = blockDim.x, other = threads - 1 - i;
    uint32_t *const words = (uint32_t *)(shared + 16 * threads);
    copy_async<16>(shared + 16 * i, params.bytes + 16 * other);
    close_copies();
    copy_async<4>(words + i, params.bytes + 4 * i);
    close_copies();
    wait_copies<1>();
    bool right = memcmp(shared + 16 * i, params.bytes + 16 * other, 16) == 0;
    const bool late = words[i] == 0xffffffffu;
    sync_block();
    right &= memcmp(shared + 16 * other, params.bytes + 16 * i, 16) == 0;
    wait_copies<0>();
    right &= memcmp(words + i, params.bytes + 4 * i, 4) == 0;
    params.out[i] = right;
    params.out[threads + i] = late;
}

/* Exactly one block finishes last, and its threads see what all blocks have written. */
KERNEL(probe_last, probe_params) {
    const unsigned i = threadIdx.x, threads = blockDim.x, blocks = gridDim.x;
    uint32_t *const written = (uint32_t *)workspace;
    written[blockIdx.x * threads + i] = blockIdx.x + i;
    const bool last = arrive_last(params.counter, blocks);
    for (unsigned b = 0; last && b < blocks; b++) {
        const unsigned other = (i + 1) % threads;
        params.out[i] += written[b * threads + other] == b + other;
    }
}

/* Records the order in which threads and blocks run. */
KERNEL(probe_order, probe_params) {
    sync_block();
    params.out[count_release(params.counter)] = blockIdx.x * blockDim.x + threadIdx.x;
}

/* Each thread has a deep stack of its own. */
KERNEL(probe_stack, probe_params) {
    volatile uint32_t frame[4096];
    for (unsigned i = 0; i < 4096; i++) frame[i] = i ^ threadIdx.x;
    sync_block();
    bool right = true;
    for (unsigned i = 0; i < 4096; i++) right &= frame[i] == (i ^ threadIdx.x);
    params.out[threadIdx.x] = right;
}

/* Whether all numbers are x. */
static bool all_are(const std::vector<uint32_t> &out, uint32_t x) {
    return std::all_of(out.begin(), out.end(), [x](uint32_t o) { return o == x; });
}

static void test_operations(void) {
    for (uint64_t seed = 0; seed < 3; seed++) {
        shim_seed(seed);
        std::vector<uint32_t> out(96), blocks(2 * 3 * 2 * 64), vectors(4 * 32), last(64);
        check(launch("probe_warp", probe_params{0, out.data()}, {{1, 1, 1}, 96, 0}, nullptr) == 0);
        check(all_are(out, 1), "an operation of a warp");
        check(launch("probe_block", probe_params{sanitizer == MEMORY, blocks.data()},
                     {{2, 3, 2}, 64, 33}, nullptr) == 0);
        check(all_are(blocks, 1), "every thread of every block once");
        alignas(16) char bytes[16 * 32];
        for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)(i * 37);
        check(launch("probe_vectors", probe_params{0, vectors.data(), nullptr, bytes},
                     {{1, 1, 1}, 32, 512}, nullptr) == 0);
        for (int i = 0; i < 32; i++) {
            check(memcmp(&vectors[(size_t)i * 4], bytes + 16 * (31 - i), 16) == 0);
        }
        std::vector<uint32_t> copies(2 * 32);
        if (sanitizer != MEMORY) { /* which would report the read of bytes that have not arrived */
            check(launch("probe_copies", probe_params{0, copies.data(), nullptr, bytes},
                         {{1, 1, 1}, 32, 20 * 32}, nullptr) == 0);
            const auto half = copies.begin() + 32;
            check(std::count(copies.begin(), half, 1u) == 32, "copies");
            const auto late = std::count(half, copies.end(), 1u);
            check(seed == 0 ? late == 32 : late > 4 && late < 28, "some arrive late");
        }
        std::vector<uint32_t> written(5 * 64);
        uint32_t counter = 0;
        check(launch("probe_last", probe_params{0, last.data(), &counter}, {{5, 1, 1}, 64, 0},
                     (char *)written.data()) == 0);
        check(all_are(last, 5) && counter == 5, "one block is last, and sees all");
        std::vector<uint32_t> deep(64), products(32);
        check(launch("probe_stack", probe_params{0, deep.data()}, {{1, 1, 1}, 64, 0}, nullptr) ==
              0);
        check(all_are(deep, 1), "stacks");
        check(launch("probe_matrices", probe_params{0, products.data()}, {{1, 1, 1}, 32, 1024},
                     nullptr) == 0);
        check(all_are(products, 1), "matrices");
    }
}

static std::vector<uint32_t> order_of(uint64_t seed) {
    std::vector<uint32_t> out(3 * 64);
    uint32_t counter = 0;
    shim_seed(seed);
    check(launch("probe_order", probe_params{0, out.data(), &counter}, {{3, 1, 1}, 64, 0},
                 nullptr) == 0);
    std::vector<uint32_t> sorted = out;
    std::sort(sorted.begin(), sorted.end());
    for (uint32_t i = 0; i < 3 * 64; i++) check(sorted[i] == i, "each runs once");
    return out;
}

static void test_orders(void) {
    check(order_of(1) == order_of(1), "a seed is an order");
    check(order_of(1) != order_of(2) && order_of(0) != order_of(1), "each another");
    check(order_of(1)[0] / 64 != order_of(2)[0] / 64, "and begins with another block");
}

/* ---- Numbers ------------------------------------------------------------- */

static double f16_value(uint32_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double size =
        exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return h & 0x8000 ? -size : size;
}

static double bf16_value(uint32_t h) {
    const int exponent = h >> 7 & 255, fraction = h & 127;
    const double size =
        exponent == 0 ? ldexp(fraction, -133) : ldexp(128 + fraction, exponent - 134);
    return h & 0x8000 ? -size : size;
}

/* Each finite number converts to itself. A number halfway between two rounds to the even one, any
 * other to the nearest. */
static void test_format(double (*value)(uint32_t), float (*to)(uint16_t), uint16_t (*from)(float),
                        uint32_t infinity) {
    for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000) {
        for (uint32_t h = 0; h < infinity; h++) {
            const float x = to((uint16_t)(sign | h)), next = (float)value(sign | (h + 1));
            const float half = (float)((value(sign | h) + value(sign | (h + 1))) / 2);
            check(x == (float)value(sign | h) && signbit(x) == (sign != 0), "16 bits to float");
            check(from(x) == (sign | h), "and back");
            if (h + 1 == infinity && isinf(next)) break; /* the next float is infinite */
            check(from(half) == (sign | (h + (h & 1))), "halfway: even");
            check(from(nextafterf(half, x)) == (sign | h), "below half");
            check(from(nextafterf(half, next)) == (sign | (h + 1)), "above half");
        }
        check(isinf(to((uint16_t)(sign | infinity))));
        check(from(sign ? -INFINITY : INFINITY) == (sign | infinity));
        check(from(sign ? -FLT_MAX : FLT_MAX) == (sign | infinity), "too high");
        for (uint32_t h = infinity + 1; h < 0x8000; h++) {
            check(isnan(to((uint16_t)(sign | h))), "NaN stays NaN");
        }
    }
    for (uint32_t fraction = 1; fraction < 0x800000; fraction = fraction * 2 + 1) {
        check(isnan(to(from(bits_float(0x7f800000u | fraction)))), "NaN stays NaN");
    }
}

static void test_numbers(void) {
    test_format(f16_value, float_from_f16, f16_from_float, 0x7c00);
    test_format(bf16_value, float_from_bf16, float_to_bf16, 0x7f80);
    for (float x = -125.9f; x < 127.9f; x += 0.0371f) {
        check(fabs(fast_exp2(x) / exp2((double)x) - 1) < 3e-7, "2^x");
    }
    check(fast_exp2(0.0f) == 1.0f && fast_exp2(-INFINITY) == 0.0f && isinf(fast_exp2(INFINITY)));
    check(isnan(fast_exp2(NAN)) && isinf(fast_exp2(129.0f)) && fast_exp2(-126.0f) == FLT_MIN);
    check(fast_exp2(-127.0f) == 0.0f && fast_exp2(-149.0f) == 0.0f, "denormals are flushed");
    check(fast_reciprocal(-4.0f) == -0.25f && fast_reciprocal(INFINITY) == 0.0f);
    check(isinf(fast_reciprocal(1e-40f)) && fast_reciprocal(2e38f) == 0.0f, "denormals again");
    const float some[] = {0.1f, -3.7e4f, 1e-7f, INFINITY, 65519.0f, -0.0f};
    for (float low : some) {
        for (float high : some) {
            const uint32_t bf16 = float_to_bf16(low) | (uint32_t)float_to_bf16(high) << 16;
            const uint32_t f16 = f16_from_float(low) | (uint32_t)f16_from_float(high) << 16;
            check(pack_bf16(low, high) == bf16 && pack_f16(low, high) == f16, "pairs");
        }
    }
    uint32_t counter = 7;
    count_shared(&counter);
    check(counter == 8 && count_release(&counter) == 8 && counter == 9);
}

/* ---- Errors -------------------------------------------------------------- */

/* Waits where other threads do not, or does something that no GPU allows. */
DEVICE void go_wrong(const probe_params *p, unsigned i) {
    char frame[64] = {(char)i};
    uint32_t rows[4] = {};
    float sums[4] = {};
    switch (p->what) {
    case 0:
        if (i < 40) sync_block();
        break;
    case 1:
        if (i % 2) {
            sync_block();
        } else {
            sync_block();
        }
        break;
    case 2:
        if (i % 32 < 16) {
            shfl_xor(1, 1);
        } else {
            shfl_xor(1, 1);
        }
        break;
    case 3:
        i % 2 ? (void)warp_ballot(true) : sync_warp();
        break;
    case 4:
        if (i % 32 < 20) warp_all(true);
        break;
    case 5:
        if (i < 16) {
            sync_warp();
        } else {
            sync_block();
        }
        break;
    case 6:
        load16(p->bytes + (i == 9 ? 8 : 0));
        break;
    case 7:
        store16(p->bytes + (i == 9 ? 4 : 16 * i), vec16{});
        break;
    case 8:
        load_matrices(rows, p->bytes + (i == 9 ? 2 : 0));
        break;
    case 9:
        if (i % 32 < 31) multiply_f16(sums, rows, rows);
        break;
    case 10:
        if (blockIdx.y == 1 && i == 0) sync_warp();
        break;
    case 11:
        if (i == 9) copy_async<4>(rows, p->bytes + 2);
        break;
    case 12:
        for (int k = 0; i == 9 && k < 100; k++) copy_async<4>(rows, p->bytes);
        break;
    }
    p->out[blockIdx.y * blockDim.x + i] += (uint32_t)frame[0];
}

KERNEL(probe_error, probe_params) { go_wrong(&params, threadIdx.x); }

static bool error_has(const char *text) { return strstr(shim_error(), text) != nullptr; }

static void test_errors(void) {
    static const char *const words[][3] = {
        {"24 of 64 threads have returned", "thread 0 waits for its block at line", ""},
        {"thread 1 waits for its block at line", "others at line", ""},
        {"thread 16 waits for its warp at line", "others at line", ""},
        {"thread 1 waits for its warp", "another operation", ""},
        {"24 of 64 threads have returned", "thread 0 waits for its warp at line", ""},
        {"0 of 64 threads have returned", "thread 0 waits for its warp at line",
         "thread 16 waits for its block at line"},
        {"thread 9", "no multiple of 16", ""},
        {"thread 9", "no multiple of 16", ""},
        {"thread 9", "no multiple of 16", ""},
        {"2 of 64 threads have returned", "thread 0 waits for its warp at line", ""},
        {"block 0,1,0:", "thread 0 waits for its warp", ""},
        {"thread 9", "4 bytes", "no multiple of 4"},
        {"thread 9", "more than 64 copies", ""},
    };
    alignas(16) char bytes[16 * 65] = {};
    shim_seed(0);
    for (int what = 0; what < 13; what++) {
        std::vector<uint32_t> out(3 * 64), deep(64);
        const probe_params params = {what, out.data(), nullptr, bytes};
        check(launch("probe_error", params, {{1, 3, 1}, 64, 0}, nullptr) == 719, "fails");
        for (const char *word : words[what]) check(error_has(word), word);
        /* and later launches are not affected */
        check(launch("probe_stack", probe_params{0, deep.data()}, {{1, 1, 1}, 64, 0}, nullptr) ==
              0);
        check(all_are(deep, 1));
    }
}

static void test_launches(void) {
    std::vector<uint32_t> out(96);
    const probe_params params = {0, out.data()};
    const char *const name = "probe_warp";
    check(launch("probe_nothing", params, {{1, 1, 1}, 32, 0}, nullptr) == 98);
    check(error_has("probe_nothing"));
    const shape wrong[] = {{{0, 1, 1}, 32, 0},         {{1, 65536, 1}, 32, 0},
                           {{1, 1, 65536}, 32, 0},     {{1, 1, 1}, 0, 0},
                           {{1, 1, 1}, 33, 0},         {{1, 1, 1}, 1056, 0},
                           {{1, 1, 1}, 32, 100 << 10}, {{0x80000000u, 1, 1}, 32, 0}};
    for (const shape &s : wrong) {
        check(launch(name, params, s, nullptr) == 1 && error_has(name), "a bad launch");
    }
    check(shim_launch(name, &params, sizeof params - 1, nullptr, wrong[1].grid, 32, 0) == 1);
    check(shim_params_size(name) == (long)sizeof params && shim_params_size("probe_nothing") == -1);
    check(launch(name, params, {{1, 1, 1}, 96, 0}, nullptr) == 0 && all_are(out, 1));
}

/* ---- Seeded bugs --------------------------------------------------------- */

static bool near(const std::vector<float> &a, const std::vector<float> &b) {
    for (size_t i = 0; i < a.size(); i++) {
        if (!(fabsf(a[i] - b[i]) <= 1e-5f)) return false;
    }
    return true;
}

/* The outcome of one run: "error", "right" or "wrong". */
static const char *run_sample(const sample &s, bug with) {
    const shape of = {{s.blocks, 1, 1}, THREADS, s.shared};
    std::vector<float> in(THREADS * DEPTH), slots(SLOTS * DEPTH);
    for (size_t i = 0; i < in.size(); i++) in[i] = sinf((float)(i * i % 1009)) * 1.5f;
    for (size_t i = 0; i < slots.size(); i++) slots[i] = cosf((float)i) * 1.5f;
    std::vector<float> out(s.outputs), sums(THREADS), expected(s.outputs), totals(THREADS);
    std::vector<float> workspace((ROWS + 1) * THREADS);
    uint32_t counter = 0;
    const sample_params params = {with, in.data(), slots.data(), out.data(), sums.data(), &counter};
    char *const memory = (char *)workspace.data();
    s.expect(&params, expected.data(), totals.data());
    shim_unset(memory, workspace.size() * sizeof workspace[0]);
    if (with == COUNTER_NOT_CLEARED) shim_unset(&counter, sizeof counter);
    if (launch(s.kernel, params, of, memory) != 0) return "error";
    if (s.then && launch(s.then, params, of, memory) != 0) return "error";
    return near(out, expected) && near(sums, totals) ? "right" : "wrong";
}

static const sample &sample_named(const char *kernel) {
    for (const sample &s : samples) {
        if (strcmp(s.kernel, kernel) == 0) return s;
    }
    abort();
}

enum { SEEDS = 4 };

/* The process for one bug. It prints a line for each seed. */
static int run_bug(const char *name) {
    for (const seeded &b : bugs) {
        for (uint64_t seed = 0; strcmp(b.name, name) == 0 && seed < SEEDS; seed++) {
            shim_seed(seed);
            printf("seed %u: %s; %s\n", (unsigned)seed, run_sample(sample_named(b.kernel), b.with),
                   shim_error());
            fflush(stdout);
        }
    }
    return 0;
}

/* Runs this program for a bug, writes the beginning of its output to `output`, and returns its
 * status. */
static int run_process(const char *program, const char *name, char *output, size_t size) {
    char command[512];
    snprintf(command, sizeof command, "'%s' %s 2>&1", program, name);
    FILE *const pipe = popen(command, "r");
    check(pipe != nullptr);
    output[fread(output, 1, size - 1, pipe)] = 0;
    while (fgetc(pipe) != EOF) continue;
    return pclose(pipe);
}

static void test_bugs(const char *program) {
    /* without bugs all results are right, and no sanitizer ends this process */
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        shim_seed(seed);
        for (const sample &s : samples) {
            check(strcmp(run_sample(s, NO_BUG), "right") == 0, s.kernel);
        }
    }
    for (const seeded &b : bugs) {
        static char output[64 << 10];
        const int status = run_process(program, b.name, output, sizeof output);
        const char wanted = b.detected[sanitizer];
        const auto has = [](const char *word) { return strstr(output, word) != nullptr; };
        const bool detected = wanted == 'F'   ? has("wrong")
                              : wanted == 'E' ? has("error; block")
                              : wanted == 'D' ? WEXITSTATUS(status) > 128
                              : wanted == 'S' ? status != 0 && has(sanitizers[sanitizer])
                                              : true;
        if (!detected) fputs(output, stderr);
        check(detected, b.name);
    }
}

int main(int count, char **arguments) {
    if (count > 1) return run_bug(arguments[1]);
    test_numbers();
    test_operations();
    test_orders();
    test_errors();
    test_launches();
    test_bugs(arguments[0]);
    return 0;
}
