/* shim.h - emulates a GPU on the CPU. It defines the names of common.cuh, with one fiber per thread
 * of a block.
 *
 * A fiber runs until it waits at a barrier of its block or for the other lanes of its warp. The
 * seed determines the order in which fibers run, so that a result that depends on the order differs
 * between seeds. Under ThreadSanitizer each fiber counts as a thread and only barriers order memory
 * accesses: a missing barrier is reported as a race even if the result is right. Shared memory is a
 * heap block of the requested size, full of 0xff: NaN, or -1. */
#ifndef H2O_SHIM_H
#define H2O_SHIM_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "half.h"

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#define SHIM_MSAN
#endif
#endif

#ifndef CAPABILITY /* compute capability of the emulated GPU, 10 * major + minor */
#define CAPABILITY 80
#endif

#define DEVICE static inline
#define UNROLL
#define NO_UNROLL
#define DEVICE_METHOD inline

/* ---- For tests ----------------------------------------------------------- */

typedef void (*shim_entry)(const void *params, char *workspace);

/* Runs a kernel by name. Its parameters are copied first, as by a driver. Returns 0 or CUDA's error
 * code (98: no such kernel, 1: invalid launch, 719: the kernel failed); shim_error has the text. */
extern "C" int shim_launch(const char *name, const void *params, size_t size, char *workspace,
                           const unsigned grid[3], unsigned block, unsigned shared);
extern "C" const char *shim_error(void);
extern "C" void shim_seed(uint64_t seed);           /* 0: ascending order */
extern "C" long shim_params_size(const char *name); /* -1: no such kernel */
extern "C" const char *shim_kernel(size_t i);       /* name of kernel i, NULL after the last */

/* Fills memory with 0xff and marks it as uninitialized for MemorySanitizer. */
extern "C" void shim_unset(void *p, size_t bytes);
extern "C" void shim_stop_after(unsigned blocks); /* the next longer launch fails after these */

/* A kernel, in a list of all kernels. */
struct shim_registration {
    const char *name;
    size_t size;
    shim_entry entry;
    const shim_registration *next;
    shim_registration(const char *name, size_t size, shim_entry entry);
};

/* The head of a kernel, after its registration. */
#define KERNEL(name, type)                                                                         \
    extern "C" void name(const type params, char *workspace);                                      \
    static void name##_entry(const void *params, char *workspace) {                                \
        name(*(const type *)params, workspace);                                                    \
    }                                                                                              \
    static const shim_registration name##_registration(#name, sizeof(type), name##_entry);         \
    extern "C" void name(const type params, char *workspace)
#define BOUNDED_KERNEL(name, type, threads, blocks) KERNEL(name, type)

/* Number of times that threads have taken a branch of the kernels. The list has all branches, even
 * those never taken. */
struct shim_branch {
    const char *name;
    long taken;
    shim_branch *next;
    shim_branch(const char *name);
};
extern "C" shim_branch *shim_branches(void);

template <size_t N> struct shim_text {
    char text[N];
    constexpr shim_text(const char (&from)[N]) {
        for (size_t i = 0; i < N; i++) text[i] = from[i];
    }
};
template <shim_text NAME> inline shim_branch shim_branch_of{NAME.text};

#define TAKEN(branch, condition)                                                                   \
    __atomic_fetch_add(&shim_branch_of<#branch>.taken, (condition) ? 1 : 0, __ATOMIC_RELAXED)

/* ---- Inside a kernel ----------------------------------------------------- */

struct shim_dim3 {
    unsigned x, y, z;
};

/* Indices of the running fiber. These are functions because the scheduler, which is not
 * instrumented, writes the indices. */
extern "C" shim_dim3 shim_block_index(void), shim_block_size(void), shim_grid_size(void);
extern "C" unsigned char *shim_shared(void);
extern "C" __attribute__((const)) unsigned shim_thread_index(void); /* constant within a fiber */
#define threadIdx (shim_dim3{shim_thread_index(), 0, 0})
#define blockIdx (shim_block_index())
#define blockDim (shim_block_size())
#define gridDim (shim_grid_size())
#define dynamic_shared shim_shared()

enum shim_operation {
    SHIM_SYNC,
    SHIM_SHUFFLE,
    SHIM_BALLOT,
    SHIM_MATRICES, /* from here on in matrix.cpp: a word points to a lane's operands */
    SHIM_TRANSPOSED,
    SHIM_MULTIPLY,
    SHIM_MULTIPLY_HALF
};

/* shim_block waits for all threads of a block, each with a predicate; shim_warp waits for the lanes
 * of a warp, each with a word. All must call from the same line. */
extern "C" bool shim_block(bool predicate, int line);
extern "C" uint64_t shim_warp(shim_operation operation, uint64_t word, int lane, int line);

DEVICE void sync_block(int line = __builtin_LINE()) { shim_block(false, line); }
DEVICE bool block_any(bool predicate, int line = __builtin_LINE()) {
    return shim_block(predicate, line);
}
DEVICE void sync_warp(int line = __builtin_LINE()) { shim_warp(SHIM_SYNC, 0, 0, line); }

template <typename T> DEVICE T shfl(T x, int lane, int line = __builtin_LINE()) {
    static_assert(sizeof x <= 8);
    uint64_t word = 0;
    memcpy(&word, &x, sizeof x);
    word = shim_warp(SHIM_SHUFFLE, word, lane, line);
    memcpy(&x, &word, sizeof x);
    return x;
}

template <typename T> DEVICE T shfl_xor(T x, int mask, int line = __builtin_LINE()) {
    return shfl(x, (int)(threadIdx.x % 32) ^ mask, line);
}

DEVICE uint32_t warp_ballot(bool predicate, int line = __builtin_LINE()) {
    return (uint32_t)shim_warp(SHIM_BALLOT, predicate, 0, line);
}

DEVICE bool warp_all(bool predicate, int line = __builtin_LINE()) {
    return warp_ballot(predicate, line) == 0xffffffffu;
}

DEVICE int popcount(uint32_t x) { return __builtin_popcount(x); }

DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        r |= (uint32_t)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    }
    return r;
}

/* Denormals become 0 with the same sign. */
DEVICE float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

DEVICE float fast_exp2(float x) { return flushed(exp2f(x)); }
DEVICE float fast_reciprocal(float x) { return flushed(1.0f / flushed(x)); }

/* An operation on pairs. float holds sums and products of two float16 numbers exactly, but not the
 * result of a fused multiply-add. */
template <typename OPERATION>
DEVICE uint32_t each_f16(uint32_t a, uint32_t b, uint32_t c, OPERATION operation) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i += 16) {
        const float x = float_from_f16((uint16_t)(a >> i)), y = float_from_f16((uint16_t)(b >> i));
        r |= (uint32_t)f16_from_float(operation(x, y, float_from_f16((uint16_t)(c >> i)))) << i;
    }
    return r;
}

DEVICE uint32_t subtract_f16(uint32_t a, uint32_t b) {
    return each_f16(a, b, 0, [](float x, float y, float) { return x - y; });
}
DEVICE uint32_t fma_f16(uint32_t a, uint32_t b, uint32_t c) {
    return each_f16(a, b, c, [](float x, float y, float z) { return fmaf(x, y, z); });
}
DEVICE uint32_t subtract_bf16(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i += 16) {
        const float x = float_from_bf16((uint16_t)(a >> i));
        r |= (uint32_t)bf16_from_float(x - float_from_bf16((uint16_t)(b >> i))) << i;
    }
    return r;
}

DEVICE const char *one_address(const char *p) { return p; }
DEVICE int64_t compute_here(int64_t x) { return x; }

/* MemorySanitizer treats everything that an atomic operation has touched as initialized. */
template <int ORDER> DEVICE uint32_t shim_count(uint32_t *counter) {
#ifdef SHIM_MSAN
    const uint32_t before = *counter;
    *counter += 1;
    return before;
#else
    return __atomic_fetch_add(counter, 1u, ORDER);
#endif
}

DEVICE void count_shared(uint32_t *counter) { shim_count<__ATOMIC_RELAXED>(counter); }
DEVICE uint32_t count_release(uint32_t *counter) { return shim_count<__ATOMIC_ACQ_REL>(counter); }

extern "C" void shim_misaligned(const void *p, int bytes);
DEVICE void check_alignment(const void *p, int bytes = 16) {
    if ((uintptr_t)p % (unsigned)bytes) shim_misaligned(p, bytes);
}

/* ---- Asynchronous copies ------------------------------------------------- */

/* The bytes arrive either at once or when the thread waits for them, as the seed determines. The
 * thread copies them itself, so that sanitizers attribute the access to it. */
struct shim_copy {
    void *to;
    const void *from;
    int bytes;
    unsigned batch;
};

extern "C" bool shim_postpone(void *to, const void *from, int bytes); /* false: copy now */
extern "C" void shim_close_batch(void);
extern "C" shim_copy shim_due(unsigned open); /* next copy to complete; to NULL: none */

#if CAPABILITY >= 80
template <int BYTES> DEVICE void copy_async(void *to, const void *from) {
    static_assert(BYTES == 4 || BYTES == 16);
    check_alignment(to, BYTES);
    check_alignment(from, BYTES);
    if (!shim_postpone(to, from, BYTES)) memcpy(to, from, BYTES);
}

DEVICE void close_copies() { shim_close_batch(); }

template <int OPEN> DEVICE void wait_copies() {
    for (shim_copy copy = shim_due(OPEN); copy.to; copy = shim_due(OPEN)) {
        memcpy(copy.to, copy.from, (size_t)copy.bytes);
    }
}
#endif

/* ---- Matrices ------------------------------------------------------------ */

struct shim_rows { /* operands of load_matrices */
    uint32_t row[4];
    uint32_t *to;
};

struct shim_product {
    float *c;
    const uint32_t *a, *b;
    float (*widen)(uint16_t);
};

/* Each lane reads its row itself, so that sanitizers attribute the access to it. */
DEVICE void shim_load(shim_operation operation, uint32_t r[4], const void *row, int line) {
    shim_rows operands = {{}, r};
    check_alignment(row);
    memcpy(operands.row, row, sizeof operands.row);
    shim_warp(operation, (uintptr_t)&operands, 0, line);
}

DEVICE const void *shim_address(const void *row, uint32_t flip, uint32_t past) {
    return (const char *)((uintptr_t)row ^ flip) + past;
}

DEVICE void load_matrices(uint32_t r[4], const void *row, uint32_t flip = 0, uint32_t past = 0,
                          int line = __builtin_LINE()) {
    shim_load(SHIM_MATRICES, r, shim_address(row, flip, past), line);
}

DEVICE void load_transposed(uint32_t r[4], const void *row, uint32_t flip = 0, uint32_t past = 0,
                            int line = __builtin_LINE()) {
    shim_load(SHIM_TRANSPOSED, r, shim_address(row, flip, past), line);
}

DEVICE void multiply_half_f16(float c[4], const uint32_t a[2], uint32_t b,
                              int line = __builtin_LINE()) {
    const shim_product operands = {c, a, &b, float_from_f16};
    shim_warp(SHIM_MULTIPLY_HALF, (uintptr_t)&operands, 0, line);
}

#if CAPABILITY >= 80
DEVICE uint16_t float_to_bf16(float x) { return bf16_from_float(x); }

DEVICE void multiply_bf16(float c[4], const uint32_t a[4], const uint32_t b[2],
                          int line = __builtin_LINE()) {
    const shim_product operands = {c, a, b, float_from_bf16};
    shim_warp(SHIM_MULTIPLY, (uintptr_t)&operands, 0, line);
}

DEVICE void multiply_f16(float c[4], const uint32_t a[4], const uint32_t b[2],
                         int line = __builtin_LINE()) {
    const shim_product operands = {c, a, b, float_from_f16};
    shim_warp(SHIM_MULTIPLY, (uintptr_t)&operands, 0, line);
}

DEVICE uint32_t pack_bf16(float low, float high) {
    return bf16_from_float(low) | (uint32_t)bf16_from_float(high) << 16;
}

DEVICE uint32_t pack_f16(float low, float high) {
    return f16_from_float(low) | (uint32_t)f16_from_float(high) << 16;
}
#endif

#define WARPGROUPS (CAPABILITY == 90)

#if WARPGROUPS
/* Emulates addresses in a block's shared memory: bits 7 to 9 swizzle bits 4 to 6. */
DEVICE const void *shim_swizzled(uint32_t at) { return shim_shared() + (at ^ (at >> 7 & 7) << 4); }

DEVICE uint32_t group_matrix(const void *rows) {
    return (uint32_t)((const unsigned char *)rows - shim_shared()) / 16;
}

/* Each warp computes its part at once, as products of 8 columns. */
template <typename PRODUCT>
DEVICE void multiply_group(float c[8][4], uint32_t matrix, bool add, PRODUCT product) {
    const uint32_t column = threadIdx.x % 32 / 4, at = 16 * matrix + threadIdx.x % 4 * 4;
    for (uint32_t n = 0; n < 8; n++) {
        uint32_t b[2];
        for (uint32_t i = 0; i < 2; i++)
            memcpy(&b[i], shim_swizzled(at + (8 * n + column) * 128 + 16 * i), sizeof b[i]);
        for (int i = 0; i < 4 && !add; i++) c[n][i] = 0.0f;
        product(c[n], b);
    }
}

DEVICE void multiply_group_bf16(float c[8][4], const uint32_t a[4], uint32_t matrix, bool add,
                                int line = __builtin_LINE()) {
    multiply_group(c, matrix, add,
                   [&](float *to, const uint32_t *b) { multiply_bf16(to, a, b, line); });
}

DEVICE void multiply_group_f16(float c[8][4], const uint32_t a[4], uint32_t matrix, bool add,
                               int line = __builtin_LINE()) {
    multiply_group(c, matrix, add,
                   [&](float *to, const uint32_t *b) { multiply_f16(to, a, b, line); });
}

DEVICE void open_products() {}
DEVICE void close_products() {}
DEVICE void wait_products(float c[8][4]) { (void)c; }
DEVICE void share_with_products() {}
#endif

#endif
