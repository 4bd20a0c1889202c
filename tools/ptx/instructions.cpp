/* instructions.cpp - the effect of each instruction on the lanes of a warp.
 *
 * A slot has 64 bits. Unsigned numbers are extended by zeros and signed ones by their sign. An
 * instruction reads as many of the low bits as its type has. */
#include "instructions.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>

#include "half.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef bool pred;

launch now;

void fail(const instruction &i, const std::string &text) {
    char at[80];
    snprintf(at, sizeof at, "block %u,%u,%u: ", now.at[0], now.at[1], now.at[2]);
    throw failure{at + i.name + ": " + text};
}

template <class T> static T get(u64 x) {
    if constexpr (std::is_same_v<T, f32>) return std::bit_cast<f32>((u32)x);
    else if constexpr (std::is_same_v<T, f64>) return std::bit_cast<f64>(x);
    else return (T)x;
}

template <class T> static u64 put(T x) {
    if constexpr (std::is_same_v<T, f32>) return std::bit_cast<u32>(x);
    else if constexpr (std::is_same_v<T, f64>) return std::bit_cast<u64>(x);
    else return (u64)x;
}

template <class F> static void each(u32 mask, F f) {
    if (mask == ALL) {
        for (int l = 0; l < LANES; l++) f(l);
    } else {
        for (int l = 0; l < LANES; l++) {
            if (mask >> l & 1) f(l);
        }
    }
}

/* ---- Arithmetic ---------------------------------------------------------- */

/* R = F(A), F(A, B) or F(A, B, C) in each lane. */
template <class R, class A, auto F> static void unary(warp &w, instruction &i, u32 mask) {
    u64 *const r = w.slot[i.at[0]];
    const u64 *const a = w.slot[i.at[1]];
    each(mask, [&](int l) { r[l] = put<R>((R)F(get<A>(a[l]))); });
}

template <class R, class A, class B, auto F>
static void binary(warp &w, instruction &i, u32 mask) {
    u64 *const r = w.slot[i.at[0]];
    const u64 *const a = w.slot[i.at[1]], *const b = w.slot[i.at[2]];
    each(mask, [&](int l) { r[l] = put<R>((R)F(get<A>(a[l]), get<B>(b[l]))); });
}

template <class R, class A, class C, auto F>
static void ternary(warp &w, instruction &i, u32 mask) {
    u64 *const r = w.slot[i.at[0]];
    const u64 *const a = w.slot[i.at[1]], *const b = w.slot[i.at[2]], *const c = w.slot[i.at[3]];
    each(mask, [&](int l) { r[l] = put<R>((R)F(get<A>(a[l]), get<A>(b[l]), get<C>(c[l]))); });
}

static f32 flushed(f32 x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

static f32 fma_down(f32 a, f32 b, f32 c) {
    const f64 exact = (f64)a * b + c;
    const f32 near = (f32)exact;
    return near > exact ? std::nextafter(near, -INFINITY) : near;
}

template <class T> static T shifted_left(T x, u32 n) {
    return n >= 8 * sizeof x ? (T)0 : (T)(x << n);
}

template <class T> static T shifted_right(T x, u32 n) {
    const u32 most = 8 * sizeof x - 1;
    return n > most ? (T)(x >> most >> 1) : (T)(x >> n);
}

/* The quotient. An integer divided by zero gives all ones, as on GPUs. */
template <class T> static T quotient(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a / b;
    else return b == 0 ? (T)-1 : b == (T)-1 && (T)-1 < 0 ? (T)(0 - (u64)a) : (T)(a / b);
}

template <class T> static T remainder_of(T a, T b) {
    return b == 0 ? a : b == (T)-1 ? (T)(sizeof(T) && (T)-1 < 0 ? 0 : a % b) : (T)(a % b);
}

static u32 permuted(u32 a, u32 b, u32 selector) {
    const u64 both = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        const u32 nibble = selector >> 4 * i & 15, byte = (u32)(both >> 8 * (nibble & 7)) & 255;
        r |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}

template <class T> static void insert_bits(warp &w, instruction &i, u32 mask) {
    each(mask, [&](int l) {
        const T a = (T)w.slot[i.at[1]][l], b = (T)w.slot[i.at[2]][l];
        const u32 from = (u32)w.slot[i.at[3]][l] & 255, count = (u32)w.slot[i.at[4]][l] & 255;
        const T ones = (T)(shifted_left((T)1, count) - 1), field = shifted_left(ones, from);
        w.slot[i.at[0]][l] = (b & ~field) | (shifted_left(a, from) & field);
    });
}

template <class T> static T whole(f64 x, f64 least, f64 most) {
    return x != x ? (T)0 : x <= least ? (T)least : x >= most ? (T)most : (T)x;
}

template <int BITS> static void pack(warp &w, instruction &i, u32 mask) {
    each(mask, [&](int l) {
        u64 x = 0;
        for (size_t k = 1; k < i.at.size(); k++) {
            x |= (w.slot[i.at[k]][l] & (((u64)1 << BITS) - 1)) << BITS * (k - 1);
        }
        w.slot[i.at[0]][l] = x;
    });
}

template <int BITS> static void unpack(warp &w, instruction &i, u32 mask) {
    const int from = i.at.back();
    each(mask, [&](int l) {
        const u64 x = w.slot[from][l];
        for (int k = 0; k < i.results; k++) {
            w.slot[i.at[k]][l] = x >> BITS * k & (((u64)1 << BITS) - 1);
        }
    });
}

template <class T> static void select(warp &w, instruction &i, u32 mask) {
    ternary<T, T, pred, [](T a, T b, pred p) { return p ? a : b; }>(w, i, mask);
}

/* ---- Memory -------------------------------------------------------------- */

/* Passes of shared memory for an access of a warp. For each group of lanes that one access covers,
 * it is the largest number of distinct words in a bank. */
static u32 wavefronts(const u64 *address, u32 mask, int bytes) {
    const int lanes = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8, words = bytes < 4 ? 1 : bytes / 4;
    u32 total = 0;
    for (int first = 0; first < LANES; first += lanes) {
        u64 bank[32][32];
        int count[32] = {}, most = 0;
        for (int l = first; l < first + lanes; l++) {
            for (int k = 0; (mask >> l & 1) && k < words; k++) {
                const u64 word = address[l] / 4 + (u64)k;
                const int b = (int)(word % 32);
                int n = 0;
                while (n < count[b] && bank[b][n] != word) n++;
                if (n == count[b]) bank[b][count[b]++] = word;
                if (count[b] > most) most = count[b];
            }
        }
        total += (u32)most;
    }
    return total;
}

static void count_global(instruction &i, const u64 *address, u32 mask, int bytes) {
    u64 sector[2 * LANES], start[LANES];
    int sectors = 0, starts = 0;
    each(mask, [&](int l) {
        int n = starts;
        while (n > 0 && start[n - 1] != address[l]) n--;
        if (n > 0) return;
        start[starts++] = address[l];
        for (u64 s = address[l] / 32; s <= (address[l] + (u64)bytes - 1) / 32; s++) {
            n = sectors;
            while (n > 0 && sector[n - 1] != s) n--;
            if (n == 0) sector[sectors++] = s;
        }
    });
    i.sectors += (u64)sectors;
    for (int n = 0; n < sectors; n++) {
        u64 *const cached = &now.cached[sector[n] % CACHED];
        i.fetched += !i.cached || *cached != sector[n];
        if (i.cached) *cached = sector[n];
        now.sectors->insert(sector[n]);
    }
    i.bytes += (u64)starts * (u64)bytes;
}

/* Computes the host addresses that the lanes access. Checks bounds and alignment, and counts. */
static void resolve(warp &w, instruction &i, int slot, enum space space, int bytes, u32 mask,
                    u64 at[LANES]) {
    const u64 shared = (u64)(uintptr_t)now.shared, params = (u64)(uintptr_t)now.params;
    u32 in_shared = 0;
    each(mask, [&](int l) {
        at[l] = w.slot[slot][l] + (u64)i.offset;
        if (space == SHARED) at[l] = (u32)at[l] - SHARED_AT + shared;
        if (space == SHARED || (space == GENERIC && at[l] - shared < now.shared_bytes)) {
            if (at[l] - shared + (u64)bytes > now.shared_bytes || at[l] < shared) {
                fail(i, "beyond the block's shared memory");
            }
            in_shared |= 1u << l;
        }
        if (at[l] % (u64)bytes) fail(i, "misaligned");
    });
    if (in_shared) i.wavefronts += wavefronts(at, in_shared, bytes);
    if (space == PARAM || (space == GENERIC && at[__builtin_ctz(mask)] - params < 4096)) return;
    i.travels = in_shared != mask;
    if (i.travels) count_global(i, at, mask & ~in_shared, bytes);
}

template <class T> static void load(warp &w, instruction &i, u32 mask) {
    u64 at[LANES];
    resolve(w, i, i.at.back(), i.space, (int)sizeof(T) * i.results, mask, at);
    for (int k = 0; k < i.results; k++) {
        u64 *const r = w.slot[i.at[k]];
        each(mask, [&](int l) {
            T x;
            memcpy(&x, (const T *)(uintptr_t)at[l] + k, sizeof x);
            r[l] = put<T>(x);
        });
    }
}

template <class T> static void store(warp &w, instruction &i, u32 mask) {
    u64 at[LANES];
    const int count = (int)i.at.size() - 1;
    resolve(w, i, i.at[0], i.space, (int)sizeof(T) * count, mask, at);
    for (int k = 0; k < count; k++) {
        const u64 *const a = w.slot[i.at[k + 1]];
        each(mask, [&](int l) {
            const T x = (T)a[l];
            memcpy((T *)(uintptr_t)at[l] + k, &x, sizeof x);
        });
    }
}

static void atomic_add(warp &w, instruction &i, u32 mask) {
    u64 at[LANES];
    resolve(w, i, i.at[1], i.space, 4, mask, at);
    each(mask, [&](int l) {
        u32 x;
        memcpy(&x, (const void *)(uintptr_t)at[l], sizeof x);
        const u32 sum = x + (u32)w.slot[i.at[2]][l];
        memcpy((void *)(uintptr_t)at[l], &sum, sizeof sum);
        w.slot[i.at[0]][l] = x;
    });
}

template <bool INWARD> static void shared_address(warp &w, instruction &i, u32 mask) {
    const u64 shift = (u64)(uintptr_t)now.shared - SHARED_AT;
    each(mask, [&](int l) {
        w.slot[i.at[0]][l] = w.slot[i.at[1]][l] + (INWARD ? 0 - shift : shift);
    });
}

/* ---- Asynchronous copies ------------------------------------------------- */

/* The bytes arrive at once or at the wait, chosen at random from the seed. Until they arrive, a
 * thread reads all ones. */
static void copy_async(warp &w, instruction &i, u32 mask) {
    u64 to[LANES], from[LANES];
    const int bytes = (int)i.offset;
    i.offset = 0;
    resolve(w, i, i.at[0], SHARED, bytes, mask, to);
    resolve(w, i, i.at[1], GLOBAL, bytes, mask, from);
    i.offset = bytes;
    each(mask, [&](int l) {
        now.random = now.random * 6364136223846793005u + 1442695040888963407u;
        if (now.random >> 63) {
            memcpy((void *)(uintptr_t)to[l], (const void *)(uintptr_t)from[l], (size_t)bytes);
        } else {
            memset((void *)(uintptr_t)to[l], 0xff, (size_t)bytes);
            w.copies.push_back({to[l], from[l], bytes, (int)w.landed.size()});
        }
    });
}

static void close_batch(warp &w, instruction &, u32) {
    w.landed.push_back(w.landing);
    w.landing = 0;
}

static void wait_for_copies(warp &w, instruction &i, u32) {
    const int due = (int)w.landed.size() - (int)i.offset;
    std::vector<copy> open;
    for (const copy &c : w.copies) {
        if (c.batch < due) {
            memcpy((void *)(uintptr_t)c.to, (const void *)(uintptr_t)c.from, (size_t)c.bytes);
        } else {
            open.push_back(c);
        }
    }
    w.copies.swap(open);
    for (int k = 0; k < due; k++) w.latest = std::max(w.latest, w.landed[(size_t)k]);
}

/* ---- A warp together ----------------------------------------------------- */

template <bool XOR> static void shuffle(warp &w, instruction &i, u32) {
    u64 from[LANES];
    memcpy(from, w.slot[i.at[2]], sizeof from);
    for (int l = 0; l < LANES; l++) {
        const int lane = (int)(w.slot[i.at[3]][l] & 31);
        w.slot[i.at[0]][l] = (u32)from[XOR ? l ^ lane : lane];
        w.slot[i.at[1]][l] = 1;
    }
}

static u32 votes(const warp &w, const instruction &i) {
    u32 all = 0;
    for (int l = 0; l < LANES; l++) all |= (u32)(w.slot[i.at[1]][l] & 1) << l;
    return all;
}

static void vote_all(warp &w, instruction &i, u32) {
    const bool all = votes(w, i) == ALL;
    for (int l = 0; l < LANES; l++) w.slot[i.at[0]][l] = all;
}

static void vote_ballot(warp &w, instruction &i, u32) {
    const u32 all = votes(w, i);
    for (int l = 0; l < LANES; l++) w.slot[i.at[0]][l] = all;
}

/* Row r of matrix m comes from lane 8 m + r; lane l gets elements 2 (l % 4) and the next of row
 * l / 4 of each, or of column l / 4 (PTX ISA, "ldmatrix"). */
template <bool TRANSPOSED> static void load_matrices(warp &w, instruction &i, u32 mask) {
    u64 at[LANES];
    u16 x[4][8][8];
    resolve(w, i, i.at[4], SHARED, 16, mask, at);
    for (int l = 0; l < LANES; l++) {
        memcpy(x[l / 8][l % 8], (const void *)(uintptr_t)at[l], sizeof x[0][0]);
    }
    for (int l = 0; l < LANES; l++) {
        const int row = l / 4, column = l % 4 * 2;
        for (int m = 0; m < 4; m++) {
            const u16 low = TRANSPOSED ? x[m][column][row] : x[m][row][column];
            const u16 high = TRANSPOSED ? x[m][column + 1][row] : x[m][row][column + 1];
            w.slot[i.at[m]][l] = low | (u32)high << 16;
        }
    }
}

/* D [16][8] = A [16][DEPTH] B [DEPTH][8] + C (PTX ISA, "Matrix fragments for mma.m16n8k16" and
 * "m16n8k8"), added up in the order of the emulation's matrix.cpp. */
template <int DEPTH, auto WIDEN> static void multiply(warp &w, instruction &i, u32) {
    const int of_a = 4, of_b = of_a + DEPTH / 4, of_c = of_b + DEPTH / 8;
    f32 a[16][16], b[16][8], sum[LANES][4];
    for (int l = 0; l < LANES; l++) {
        const int row = l / 4, column = l % 4 * 2;
        for (int e = 0; e < DEPTH / 2; e++) {
            const u32 pair = (u32)w.slot[i.at[of_a + e / 2]][l];
            a[row + e / 2 % 2 * 8][column + e % 2 + e / 4 * 8] = WIDEN((u16)(pair >> 16 * (e % 2)));
        }
        for (int e = 0; e < DEPTH / 4; e++) {
            const u32 pair = (u32)w.slot[i.at[of_b + e / 2]][l];
            b[column + e % 2 + e / 2 * 8][row] = WIDEN((u16)(pair >> 16 * (e % 2)));
        }
    }
    for (int l = 0; l < LANES; l++) {
        for (int e = 0; e < 4; e++) {
            const int row = l / 4 + e / 2 * 8, column = l % 4 * 2 + e % 2;
            sum[l][e] = get<f32>(w.slot[i.at[of_c + e]][l]);
            for (int k = 0; k < DEPTH; k++) sum[l][e] += a[row][k] * b[k][column];
        }
    }
    for (int l = 0; l < LANES; l++) {
        for (int e = 0; e < 4; e++) w.slot[i.at[e]][l] = put<f32>(sum[l][e]);
    }
}

/* For instructions that machine.cpp executes: branches, returns, barriers. */
static void nothing(warp &, instruction &, u32) {}

/* ---- Names --------------------------------------------------------------- */

#define BINARY(name, T, expression)                                                                \
    {name "." #T, binary<T, T, T, [](T a, T b) { return (expression); }>}
#define COMPARE(name, T, expression)                                                               \
    {"setp." name "." #T, binary<pred, T, T, [](T a, T b) { return (expression); }>}
#define UNARY(name, T, expression) {name "." #T, unary<T, T, [](T a) { return (expression); }>}
#define CONVERT(R, A) {"cvt." #R "." #A, unary<R, A, [](A a) { return (R)a; }>}
#define BY(T, N) binary<T, T, u32, N>

#define ORDERED(T)                                                                                 \
    COMPARE("eq", T, a == b), COMPARE("lt", T, a < b), COMPARE("le", T, a <= b),                   \
        COMPARE("gt", T, a > b), COMPARE("ge", T, a >= b), BINARY("add", T, a + b),                \
        BINARY("sub", T, a - b), BINARY("mul", T, a *b), UNARY("mov", T, a), {"selp." #T, select<T>}
#define INTEGER(T)                                                                                 \
    ORDERED(T), COMPARE("ne", T, a != b), BINARY("and", T, a & b), BINARY("or", T, a | b),         \
        BINARY("xor", T, a ^ b), UNARY("not", T, ~a), UNARY("neg", T, 0 - a),                      \
        BINARY("div", T, quotient<T>(a, b)), BINARY("rem", T, remainder_of<T>(a, b)),              \
        BINARY("min", T, a < b ? a : b), BINARY("max", T, a > b ? a : b),                          \
        {"shl." #T, BY(T, shifted_left<T>)}, {"shr." #T, BY(T, shifted_right<T>)},                 \
        {"mad." #T, ternary<T, T, T, [](T a, T b, T c) { return a * b + c; }>},                    \
        CONVERT(T, u8), CONVERT(T, s8), CONVERT(T, u16), CONVERT(T, s16), CONVERT(T, u32),         \
        CONVERT(T, s32), CONVERT(T, u64), CONVERT(T, s64), CONVERT(f32, T), CONVERT(f64, T)
#define FLOATING(T)                                                                                \
    ORDERED(T), COMPARE("ne", T, a < b || a > b), COMPARE("num", T, a == a && b == b),             \
        COMPARE("nan", T, a != a || b != b), COMPARE("equ", T, !(a < b || a > b)),                 \
        COMPARE("neu", T, a != b), COMPARE("ltu", T, !(a >= b)), COMPARE("leu", T, !(a > b)),      \
        COMPARE("gtu", T, !(a <= b)), COMPARE("geu", T, !(a < b)), UNARY("neg", T, -a),            \
        UNARY("abs", T, std::fabs(a)), BINARY("div", T, a / b), BINARY("min", T, std::fmin(a, b)), \
        BINARY("max", T, std::fmax(a, b)), UNARY("sqrt", T, std::sqrt(a)),                         \
        {"fma." #T, ternary<T, T, T, [](T a, T b, T c) { return std::fma(a, b, c); }>},            \
        {"cvt." #T "." #T ".rzi", unary<T, T, [](T a) { return std::trunc(a); }>},                 \
        {"cvt." #T "." #T ".rni", unary<T, T, [](T a) { return std::nearbyint(a); }>},             \
        {"cvt." #T "." #T ".sat", unary<T, T, [](T a) { return (a > 1 ? 1 : a > 0 ? a : 0); }>},     \
        {"cvt.s32." #T ".rzi", unary<s32, T, [](T a) { return whole<s32>(a, -0x1p31, 2147483647.0); }>}, \
        {"cvt.s64." #T ".rzi", unary<s64, T, [](T a) { return whole<s64>(a, -0x1p63, 0x1p63 - 1024); }>}
#define MEMORY(T) {"load." #T, load<T>}, {"store." #T, store<T>}
#define HALF(name, of)                                                                             \
    {"cvt." name ".f32", unary<u16, f32, [](f32 a) { return of(a); }>}, {                          \
        "cvt." name "x2.f32", binary<u32, f32, f32, [](f32 a, f32 b) {                             \
            return (u32)of(a) << 16 | of(b);                                                       \
        }>                                                                                         \
    }

static f32 widen_f16(u16 h) { return float_from_f16(h); }
static f32 widen_bf16(u16 h) { return float_from_bf16(h); }

/* An operation on pairs of float16: on floats, with the results rounded. */
template <auto F> static u32 of_pairs(u32 a, u32 b, u32 c) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16) {
        const f32 x = widen_f16((u16)(a >> i)), y = widen_f16((u16)(b >> i));
        r |= (u32)f16_from_float(F(x, y, widen_f16((u16)(c >> i)))) << i;
    }
    return r;
}

/* a * b + c on pairs of bfloat16. */
static u32 fma_bf16(u32 a, u32 b, u32 c) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16) {
        const f32 x = float_from_bf16((u16)(a >> i)), y = float_from_bf16((u16)(b >> i));
        r |= (u32)bf16_from_float(std::fma(x, y, float_from_bf16((u16)(c >> i)))) << i;
    }
    return r;
}

template <auto F> static u32 of_two(u32 a, u32 b) {
    return of_pairs<[](f32 x, f32 y, f32) { return F(x, y); }>(a, b, 0);
}

static const std::map<std::string, handler *> handlers = {
    {"sub.f16x2", binary<u32, u32, u32, of_two<[](f32 x, f32 y) { return x - y; }>>},
    {"fma.f16x2", ternary<u32, u32, u32,
                          of_pairs<[](f32 x, f32 y, f32 z) { return std::fma(x, y, z); }>>},
    {"fma.bf16x2", ternary<u32, u32, u32, fma_bf16>},
    INTEGER(u16), INTEGER(s16), INTEGER(u32), INTEGER(s32), INTEGER(u64), INTEGER(s64),
    FLOATING(f32), FLOATING(f64),
    MEMORY(u8), MEMORY(s8), MEMORY(u16), MEMORY(s16), MEMORY(u32), MEMORY(s32), MEMORY(u64),
    MEMORY(s64),
    HALF("f16", f16_from_float), HALF("bf16", bf16_from_float),
    BINARY("and", pred, a && b), BINARY("or", pred, a || b), BINARY("xor", pred, a != b),
    UNARY("not", pred, !a), UNARY("mov", pred, a),
    CONVERT(f32, f64), CONVERT(f64, f32), CONVERT(u8, u16), CONVERT(s8, s16),
    {"cvt.f32.f16", unary<f32, u16, widen_f16>},
    {"fma.rm.f32", ternary<f32, f32, f32, fma_down>},
    {"rcp.approx.f64", unary<f64, f64, [](f64 a) { return 1.0 / a; }>},
    {"rcp.f32", unary<f32, f32, [](f32 a) { return 1.0f / a; }>},
    {"rcp.approx.f32", unary<f32, f32, [](f32 a) { return flushed(1.0f / flushed(a)); }>},
    {"ex2.f32", unary<f32, f32, [](f32 a) { return flushed(std::exp2(a)); }>},
    {"pow.f64", binary<f64, f64, f64, [](f64 a, f64 b) { return std::pow(a, b); }>},
    {"mul.wide.u16", binary<u32, u16, u16, [](u16 a, u16 b) { return (u32)a * b; }>},
    {"mul.wide.s16", binary<s32, s16, s16, [](s16 a, s16 b) { return (s32)a * b; }>},
    {"mul.wide.u32", binary<u64, u32, u32, [](u32 a, u32 b) { return (u64)a * b; }>},
    {"mul.wide.s32", binary<s64, s32, s32, [](s32 a, s32 b) { return (s64)a * b; }>},
    {"popc.u32", unary<u32, u32, [](u32 a) { return __builtin_popcount(a); }>},
    {"prmt.u32", ternary<u32, u32, u32, permuted>},
    {"bfi.u32", insert_bits<u32>}, {"bfi.u64", insert_bits<u64>},
    {"pack.16", pack<16>}, {"pack.32", pack<32>},
    {"unpack.16", unpack<16>}, {"unpack.32", unpack<32>},
    {"cvta.shared", shared_address<false>}, {"cvta.to.shared", shared_address<true>},
    {"atom.add.u32", atomic_add}, {"atom.release.add.u32", atomic_add},
    {"copy", copy_async}, {"copy.commit", close_batch}, {"copy.wait", wait_for_copies},
    {"shfl", shuffle<true>}, {"shfl.idx", shuffle<false>}, {"vote.all", vote_all}, {"vote.ballot", vote_ballot},
    {"ldmatrix", load_matrices<false>}, {"ldmatrix.trans", load_matrices<true>},
    {"mma.f16.16", multiply<16, widen_f16>}, {"mma.bf16.16", multiply<16, widen_bf16>},
    {"mma.f16.8", multiply<8, widen_f16>},
    {"bra", nothing}, {"ret", nothing}, {"membar", nothing}, {"bar", nothing},
    {"bar.warp", nothing}, {"bar.red", nothing},
};

handler *find_handler(const std::string &name) {
    const auto found = handlers.find(name);
    return found == handlers.end() ? nullptr : found->second;
}
