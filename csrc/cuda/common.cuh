/* common.cuh - everything that only compilers for GPUs know: qualifiers, barriers, warp shuffles,
 * atomic counters, conversions, tensor cores, asynchronous copies.
 *
 * Kernels use device features through these names only. nvcc gets their definitions from this file,
 * all other compilers from shim.h of the tests, which emulates a GPU with one fiber per thread.
 *
 * Blocks have one dimension and a multiple of 32 threads. All 32 lanes of a warp take part in each
 * warp operation, and all threads of a block in each barrier: none may return earlier. */
#ifndef H2O_CUDA_COMMON_CUH
#define H2O_CUDA_COMMON_CUH

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__

#ifdef __CUDA_ARCH__
#define CAPABILITY (__CUDA_ARCH__ / 10) /* 10 * major + minor of the target device */
#else
#define CAPABILITY 80 /* the host pass, which runs no kernel */
#endif

#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1") /* for loops with long bodies that take little time */

#define DEVICE static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__

DEVICE float float_from_f16(uint16_t h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

DEVICE uint16_t f16_from_float(float x) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

#define H2O_OWN_F16
#include "../half.h"

/* A kernel gets the operation's parameters by value and a workspace. */
#define PARAMETERS(type) (const __grid_constant__ type params, char *workspace)
#define KERNEL(name, type) extern "C" __global__ void name PARAMETERS(type)
/* With `threads` threads per block, and with registers limited so that `blocks` blocks fit on a
 * multiprocessor. */
#define BOUNDED_KERNEL(name, type, threads, blocks)                                                \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name PARAMETERS(type)
#define TAKEN(branch, condition) /* tests count how often the condition holds; see shim.h */

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

DEVICE void check_alignment(const void *p) { (void)p; } /* the device itself faults */

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

/* A barrier. Returns whether the predicate holds in any thread of the block. */
DEVICE bool block_any(bool predicate) { return __syncthreads_or(predicate) != 0; }

template <typename T> DEVICE T shfl_xor(T x, int offset) {
    return __shfl_xor_sync(0xffffffffu, x, offset);
}

/* The value of x in a lane of the warp. */
template <typename T> DEVICE T shfl(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

DEVICE uint32_t warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
DEVICE bool warp_all(bool predicate) { return __all_sync(0xffffffffu, predicate) != 0; }
DEVICE int popcount(uint32_t x) { return __popc(x); }

/* Four of the bytes 0..3 of a and 4..7 of b, chosen by the digits of the selector, lowest first. */
DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

/* Error at most 2 units in the last place; denormals become 0. */
DEVICE float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Error at most one unit in the last place; denormal inputs and results become 0. */
DEVICE float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* For pairs of float16: a - b, a * b + c. */
DEVICE uint32_t subtract_f16(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE uint32_t fma_f16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

/* The same address, with its origin hidden from the compiler: loads at constant distances from it
 * then need no further additions. */
DEVICE const char *one_address(const char *p) {
    asm("" : "+l"(p));
    return p;
}

/* The same number. It forces what is computed from it to be computed here; a compiler might do so
 * before a loop and occupy registers that the loop needs for other things. */
DEVICE int64_t compute_here(int64_t x) {
    asm volatile("" : "+l"(x));
    return x;
}

#if CAPABILITY >= 80
/* a - b for pairs of bfloat16. */
DEVICE uint32_t subtract_bf16(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(b), "r"(0xbf80bf80), "r"(a));
    return r;
}

DEVICE uint16_t float_to_bf16(float x) {
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

/* Packs two floats, the first into the lower half. */
DEVICE uint32_t pack_f16(float low, float high) {
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#endif

/* Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane i passes row i % 8 of
 * matrix i / 8, and gets elements 2 (i % 4) and the next of row i / 4 of each matrix. The row's
 * address is (row ^ flip) + past, in bytes. load_transposed transposes each matrix. */
#define DEFINE_LOAD(name, form)                                                                    \
    DEVICE void name(uint32_t r[4], const void *row, uint32_t flip = 0, uint32_t past = 0) {       \
        const uint32_t at = ((uint32_t)__cvta_generic_to_shared(row) ^ flip) + past;               \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0, %1, %2, %3}, [%4];"    \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                              \
                     : "r"(at)                                                                     \
                     : "memory");                                                                  \
    }
DEFINE_LOAD(load_matrices, "")
DEFINE_LOAD(load_transposed, ".trans")

/* c [16][8] += a [16][8] b [8][8], in the layout of PTX's mma.m16n8k8 over a warp. */
DEVICE void multiply_half_f16(float c[4], const uint32_t a[2], uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

#if CAPABILITY >= 80
/* c [16][8] += a [16][16] b [16][8], in the layout of PTX's mma.m16n8k16 over a warp. */
#define DEFINE_PRODUCT(type)                                                                       \
    DEVICE void multiply_##type(float c[4], const uint32_t a[4], const uint32_t b[2]) {            \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 "                       \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                   \
    }
DEFINE_PRODUCT(f16)
DEFINE_PRODUCT(bf16)

/* Asynchronous copies from global to shared memory of BYTES = 4 or 16 bytes, aligned to BYTES.
 * close_copies ends a batch; wait_copies waits for all of the thread's batches but the last OPEN.
 * Other threads see the copied bytes after a barrier. */
template <int BYTES> DEVICE void copy_async(void *to, const void *from) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    const size_t source = __cvta_generic_to_global(from);
    if (BYTES == 16) { /* bypasses L1: no other thread of the block reads it */
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(source) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(source) : "memory");
    }
}

DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int OPEN> DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
}
#endif

#include "warpgroup.cuh"

/* Increments a counter in shared memory. */
DEVICE void count_shared(uint32_t *counter) { atomicAdd(counter, 1u); }

/* Increments a counter in global memory and returns its previous value. What this thread wrote, or
 * could see after a barrier of its block, is visible to every thread that increments it later. */
DEVICE uint32_t count_release(uint32_t *counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter)), "r"(1)
                 : "memory");
    return before;
}

#else
#include "../half.h"
#include "shim.h"
#endif

/* 16 bytes that are read and written at once, at an address that is a multiple of 16. */
typedef struct alignas(16) {
    uint32_t w[4];
} vec16;

DEVICE vec16 load16(const void *p) {
    check_alignment(p);
    return *(const vec16 *)p;
}

DEVICE void store16(void *p, vec16 x) {
    check_alignment(p);
    *(vec16 *)p = x;
}

/* ---- Devices before 8.0 -------------------------------------------------- */

/* They have no bfloat16 matrices, products of half the depth only, and no asynchronous copies. */
#if CAPABILITY < 80
DEVICE uint16_t float_to_bf16(float x) { return bf16_from_float(x); }

DEVICE uint32_t pack_f16(float low, float high) {
    return f16_from_float(low) | (uint32_t)f16_from_float(high) << 16;
}

DEVICE void multiply_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    multiply_half_f16(c, a, b[0]);
    multiply_half_f16(c, a + 2, b[1]);
}

template <int BYTES> DEVICE void copy_async(void *to, const void *from) {
    if (BYTES == 16) {
        store16(to, load16(from));
    } else {
        *(uint32_t *)to = *(const uint32_t *)from;
    }
}

DEVICE void close_copies() {}
template <int OPEN> DEVICE void wait_copies() {}
#endif

/* ---- Blocks -------------------------------------------------------------- */

/* Called by all threads of `blocks` blocks: true in the last block that calls it, which then sees
 * what the others have written. The counter must be 0 at first. */
DEVICE bool arrive_last(uint32_t *counter, uint32_t blocks) {
    sync_block();
    return blocks == 1 || block_any(threadIdx.x == 0 && count_release(counter) == blocks - 1);
}

#endif
