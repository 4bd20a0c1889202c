/* team.cuh - dot products of stored rows [D] with vectors in shared memory.
 *
 * A team is TEAM adjacent threads of a warp that compute dot products of one row together: each
 * reads every TEAM-th run of the row, and shuffles add up the partial sums. */
#ifndef H2O_CUDA_TEAM_CUH
#define H2O_CUDA_TEAM_CUH

#include "counts.cuh"

DEVICE int team_of_thread(void) { return threadIdx.x / TEAM; }
DEVICE int index_in_team(void) { return threadIdx.x % TEAM; }

DEVICE float team_sum(float x) {
    UNROLL
    for (int offset = TEAM / 2; offset > 0; offset /= 2) x += shfl_xor(x, offset);
    return x;
}

/* Adds the products of run x, from element d on, with COUNT vectors that are `pitch` floats
 * apart. */
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

/* The dot products of N rows with COUNT vectors, the same in all threads of a team. load(d, x) must
 * read elements d..d+RUN-1 of each row. All threads of a warp must take part. */
template <int N, int COUNT, typename LOAD>
DEVICE void row_dots(int64_t D, const float *vectors, int64_t pitch, LOAD load,
                     float (*sum)[COUNT]) {
    UNROLL
    for (int i = 0; i < N * COUNT; i++) sum[i / COUNT][i % COUNT] = 0.0f;
    for (int64_t d = index_in_team() * RUN; d < D; d += TEAM * RUN) {
        float x[N][RUN];
        load(d, x);
        UNROLL
        for (int i = 0; i < N; i++) add_products<COUNT>(x[i], vectors, pitch, d, sum[i]);
    }
    UNROLL
    for (int i = 0; i < N * COUNT; i++) {
        float *const partial = &sum[i / COUNT][i % COUNT];
        *partial = team_sum(*partial);
    }
}

#endif
