/* common.cuh - the only home of what a GPU's compiler has and others do not.
 *
 * Kernels are written against these names. nvcc takes them from below; any other compiler
 * takes them from shim.h of the tests, where a GPU is emulated: one fiber for each thread.
 *
 * Blocks have one dimension and a multiple of 32 threads; warp operations are of whole
 * warps. No thread returns before a barrier that others wait at. */
#ifndef H2O_CUDA_COMMON_CUH
#define H2O_CUDA_COMMON_CUH

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../half.h"

#ifdef __CUDACC__

#define UNROLL _Pragma("unroll")

#define DEVICE static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__

/* A kernel has the operation's parameters by value and a workspace. */
#define KERNEL(name, type)                                                                         \
    extern "C" __global__ void name(const __grid_constant__ type params, char *workspace)
#define EXPORT_KERNEL(name, type)

extern __shared__ __align__(16) unsigned char dynamic_shared[];
#define DYN_SHARED(p) unsigned char *const p = dynamic_shared

DEVICE void check_alignment(const void *p) { (void)p; } /* the device faults by itself */

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

/* A barrier that tells every thread whether any of the block says so. */
DEVICE bool block_any(bool mine) { return __syncthreads_or(mine) != 0; }

template <typename T> DEVICE T shfl_xor(T x, int lanes) {
    return __shfl_xor_sync(0xffffffffu, x, lanes);
}

template <typename T> DEVICE T shfl(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

DEVICE uint32_t warp_ballot(bool mine) { return __ballot_sync(0xffffffffu, mine); }
DEVICE bool warp_all(bool mine) { return __all_sync(0xffffffffu, mine) != 0; }
DEVICE int popcount(uint32_t x) { return __popc(x); }

/* Within 2 units in the last place; denormals become 0. */
DEVICE float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float f16_to_float(uint16_t h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}

DEVICE uint16_t float_to_f16(float x) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

DEVICE uint16_t float_to_bf16(float x) {
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}

/* Counts in shared memory. */
DEVICE void count_shared(uint32_t *counter) { atomicAdd(counter, 1u); }

/* Counts in global memory; what this thread wrote, or a barrier of its block has shown it, is
 * visible to whoever counts after it. */
DEVICE uint32_t count_release(uint32_t *counter) {
    __threadfence();
    const uint32_t before = atomicAdd(counter, 1u);
    __threadfence();
    return before;
}

#else
#include "shim.h"
#endif

DEVICE float bf16_to_float(uint16_t h) { return float_from_bf16(h); }

/* 16 bytes that are read and written at once; their address is a multiple of 16. */
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

/* Called by all threads of `blocks` blocks: true for all of the block that comes last, which then
 * sees what the others have written. counter: 0 before the first. */
DEVICE bool arrive_last(uint32_t *counter, uint32_t blocks) {
    sync_block();
    return block_any(threadIdx.x == 0 && count_release(counter) == blocks - 1);
}

#endif
