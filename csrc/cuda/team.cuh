/* team.cuh - dot products of the rows of a store with vectors in shared memory. TEAM threads
 * share a row, each with every TEAM-th run of it. */
#ifndef H2O_CUDA_TEAM_CUH
#define H2O_CUDA_TEAM_CUH

#include "counts.cuh"

DEVICE int teams(void) { return blockDim.x / TEAM; }
DEVICE int team_of_thread(void) { return threadIdx.x / TEAM; }
DEVICE int place_in_team(void) { return threadIdx.x % TEAM; }

DEVICE float team_sum(float x) {
    UNROLL
    for (int lanes = TEAM / 2; lanes > 0; lanes /= 2) x += shfl_xor(x, lanes);
    return x;
}

/* Adds x's products with `count` vectors of `pitch` floats each, from element d on. */
template <int COUNT>
DEVICE void add_products(const float x[RUN], const float *vectors, int64_t pitch, int64_t d,
                         float sum[COUNT]) {
    UNROLL
    for (int i = 0; i < COUNT; i++) {
        const float *const v = vectors + i * pitch + d;
        UNROLL
        for (int j = 0; j < RUN; j++) sum[i] = fmaf(x[j], v[j], sum[i]);
    }
}

/* The dot products of N rows with those vectors, the same for all threads of a team: load(d, x)
 * gives elements d..d+RUN-1 of each. All threads of a warp take part. */
template <int N, int COUNT, typename LOAD>
DEVICE void row_dots(int64_t D, const float *vectors, int64_t pitch, LOAD load,
                     float (*sum)[COUNT]) {
    UNROLL
    for (int i = 0; i < N * COUNT; i++) sum[i / COUNT][i % COUNT] = 0.0f;
    for (int64_t d = place_in_team() * RUN; d < D; d += TEAM * RUN) {
        float x[N][RUN];
        load(d, x);
        UNROLL
        for (int i = 0; i < N; i++) add_products<COUNT>(x[i], vectors, pitch, d, sum[i]);
    }
    UNROLL
    for (int i = 0; i < N * COUNT; i++) {
        float *const one = &sum[i / COUNT][i % COUNT];
        *one = team_sum(*one);
    }
}

#endif
