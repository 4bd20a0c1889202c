/* merge.cuh - merges an evicted key into the kept key nearest to it, where a policy merges.
 *
 *   1. find_nearest: the kept key with the highest cosine to the evicted one, if that is above
 *      the policy's threshold; a team of threads for each slot;
 *   2. merge_into: key and value of that slot become weighted means, its score and bias grow;
 *      weights and the new score are those of h2o_policy_merge (policy.h).
 *
 * A block works on one evicted key [D] and its value at a time, as floats in shared memory. */
#ifndef H2O_CUDA_MERGE_CUH
#define H2O_CUDA_MERGE_CUH

#include "team.cuh"

/* The nearest kept key so far. Similarity is the squared dot product over the kept key's squared
 * norm, which orders keys as positive cosines do. */
typedef struct {
    float similarity;
    int32_t position;
    int64_t slot; /* -1: none is similar enough */
} nearest_key;

/* Rows of floats in shared memory, 0 from D on. */
typedef struct {
    const float *key, *value;
    h2o_member member;
} evicted_key;

/* Of equal ones that with the lower position. NaN is similar to nothing. */
DEVICE nearest_key nearer(nearest_key a, nearest_key b) {
    const bool second =
        b.slot >= 0 && (b.similarity > a.similarity ||
                        (b.similarity == a.similarity && a.slot >= 0 && b.position < a.position));
    return second ? b : a;
}

DEVICE nearest_key warp_nearest(nearest_key nearest) {
    UNROLL
    for (int offset = 16; offset > 0; offset /= 2) {
        const nearest_key other = {shfl_xor(nearest.similarity, offset),
                                   shfl_xor(nearest.position, offset),
                                   shfl_xor(nearest.slot, offset)};
        nearest = nearer(nearest, other);
    }
    return nearest;
}

/* A stored row as floats, by all threads of a block; a sync_block must follow. */
DEVICE void load_floats(const char *row, h2o_dtype type, int64_t D, float *x) {
    NO_UNROLL
    for (int64_t d = threadIdx.x * RUN; d < D; d += blockDim.x * RUN) {
        float run[RUN];
        load_stored(row, type, d, D, run);
        UNROLL
        for (int i = 0; i < RUN; i++) x[d + i] = run[i];
    }
}

/* Of slots 0..n-1 but `skip`, with positions from `first` on, the one whose key has the highest
 * cosine with e's, if that is above `threshold`. warps: shared, one for each warp. */
DEVICE nearest_key find_nearest(const slot_store *store, const evicted_key *e, int64_t D,
                                int32_t first, int64_t n, int64_t skip, float threshold,
                                nearest_key *warps) {
    const float norm = norm_of(element_ref{(const char *)e->key, H2O_F32, 1}, D);
    nearest_key nearest = {threshold * threshold * (norm * norm), -1, -1};
    for (int64_t base = 0; base < n; base += teams()) {
        const int64_t slot = base + team_of_thread(), at = slot < n ? slot : n - 1;
        const char *const row = store->keys + at * store->key_stride;
        float dot = 0.0f, square = 0.0f;
        for (int64_t d = index_in_team() * RUN; d < D; d += TEAM * RUN) {
            float x[RUN];
            load_stored(row, store->key_type, d, D, x);
            UNROLL
            for (int i = 0; i < RUN; i++) {
                dot = fmaf(x[i], e->key[d + i], dot);
                square = fmaf(x[i], x[i], square);
            }
        }
        dot = team_sum(dot);
        square = team_sum(square);
        const int32_t position = store->positions[at];
        const bool eligible = slot < n && slot != skip && position >= first && dot > 0.0f;
        const nearest_key candidate = {dot * dot / square, position, eligible ? slot : -1};
        nearest = nearer(nearest, candidate);
    }
    nearest = warp_nearest(nearest);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = nearest;
    sync_block();
    nearest = warps[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++) nearest = nearer(nearest, warps[i]);
    sync_block();
    return nearest;
}

/* row = x = kept_weight * row + evicted_weight * evicted; by a warp. */
DEVICE void merge_row(char *row, h2o_dtype type, const h2o_merged *both, const float *evicted,
                      int64_t D, float *x) {
    NO_UNROLL
    for (int64_t d = threadIdx.x % 32 * RUN; d < D; d += 32 * RUN) {
        float kept[RUN];
        load_stored(row, type, d, D, kept);
        UNROLL
        for (int i = 0; i < RUN; i++) {
            x[d + i] = fmaf(both->evicted_weight, evicted[d + i], both->kept_weight * kept[i]);
        }
    }
    sync_warp();
    store_floats(row, type, x, D);
}

/* Merges an evicted key into the nearest kept one. False, and nothing changes, where there is none
 * or the weights are not finite. x: shared, two rows of floats. */
DEVICE bool merge_into(const slot_store *store, nearest_key nearest, const evicted_key *e,
                       const h2o_ranking *ranking, int64_t D, float *x) {
    const int64_t j = nearest.slot, depth = cuda_depth(D);
    const int warp = threadIdx.x / 32;
    bool merged = false;
    h2o_merged both = {};
    if (j >= 0) {
        const h2o_member kept = {store->scores[j], store->bias[j], store->positions[j]};
        both = h2o_policy_merge(ranking, kept, e->member);
        merged = both.possible;
        TAKEN(merged, merged);
    }
    sync_block(); /* all threads have read what changes below */
    if (merged && warp < 2) {
        char *const row = warp == 0 ? store->keys + j * store->key_stride
                                    : store->values + j * store->value_stride;
        float *const mean = x + warp * depth;
        merge_row(row, warp == 0 ? store->key_type : store->value_type, &both,
                  warp == 0 ? e->key : e->value, D, mean);
        const float norm = norm_of(element_ref{(const char *)mean, H2O_F32, 1}, D);
        if (warp == 1 && store->norms && threadIdx.x % 32 == 0) store->norms[j] = norm;
    } else if (merged && threadIdx.x == 64) {
        store->scores[j] = both.score;
        store->bias[j] = both.bias;
    }
    sync_block();
    return merged;
}

#endif
