/* merge.cuh - a key that leaves goes into the kept key that is most like it, see policy.h.
 * A block does it together. */
#ifndef H2O_CUDA_MERGE_CUH
#define H2O_CUDA_MERGE_CUH

#include "team.cuh"

/* The kept key that is most like another so far: squared dot product over squared norm, which
 * orders keys as their cosines do. */
typedef struct {
    float likeness;
    int32_t position;
    int64_t slot; /* -1: none is like it enough */
} neighbour;

/* A key on its way out: rows of floats in shared memory, 0 from D on. */
typedef struct {
    const float *key, *value;
    h2o_member member;
} leaver;

/* Equal ones: the lower position. What is no number is like nothing. */
DEVICE neighbour more_similar(neighbour a, neighbour b) {
    const bool second =
        b.slot >= 0 && (b.likeness > a.likeness ||
                        (b.likeness == a.likeness && a.slot >= 0 && b.position < a.position));
    return second ? b : a;
}

DEVICE neighbour warp_neighbour(neighbour mine) {
    UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const neighbour other = {shfl_xor(mine.likeness, lanes), shfl_xor(mine.position, lanes),
                                 shfl_xor(mine.slot, lanes)};
        mine = more_similar(mine, other);
    }
    return mine;
}

/* All elements of a stored row, by the threads of a block; a sync_block makes them visible. */
DEVICE void read_floats(const char *row, h2o_dtype type, int64_t D, float *x) {
    ROLLED
    for (int64_t d = threadIdx.x * RUN; d < D; d += blockDim.x * RUN) {
        float run[RUN];
        load_stored(row, type, d, D, run);
        UNROLL
        for (int i = 0; i < RUN; i++) x[d + i] = run[i];
    }
}

/* Of slots 0..n-1 but `skip`, with positions from `first` on, the one whose key is most like that
 * of e, if it is like it by more than a cosine of `threshold`. found: shared, one for each warp. */
DEVICE neighbour most_similar(const slot_store *store, const leaver *e, int64_t D, int32_t first,
                              int64_t n, int64_t skip, float threshold, neighbour *found) {
    const float norm = norm_of(element_ref{(const char *)e->key, H2O_F32, 1}, D);
    neighbour best = {threshold * threshold * (norm * norm), -1, -1};
    for (int64_t base = 0; base < n; base += teams()) {
        const int64_t slot = base + team_of_thread(), at = slot < n ? slot : n - 1;
        const char *const row = store->keys + at * store->key_stride;
        float dot = 0.0f, square = 0.0f;
        for (int64_t d = place_in_team() * RUN; d < D; d += TEAM * RUN) {
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
        const bool fits = slot < n && slot != skip && position >= first && dot > 0.0f;
        const neighbour one = {dot * dot / square, position, fits ? slot : -1};
        best = more_similar(best, one);
    }
    best = warp_neighbour(best);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = best;
    sync_block();
    best = found[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++) best = more_similar(best, found[i]);
    sync_block();
    return best;
}

/* x [D] becomes the row that a slot holds; a warp's. */
DEVICE void store_floats(char *row, h2o_dtype stored, const float *x, int64_t D) {
    if (stored == H2O_Q8 || stored == H2O_Q4 || stored == H2O_F32) {
        make_row(row, stored, element_ref{(const char *)x, H2O_F32, 1}, D);
        return;
    }
    ROLLED
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) {
        ((uint16_t *)row)[d] = stored == H2O_F16 ? float_to_f16(x[d]) : float_to_bf16(x[d]);
    }
}

/* x = own * row + other * leaving, which then is what the row holds; a warp's. */
DEVICE void merge_row(char *row, h2o_dtype type, const h2o_merged *both, const float *leaving,
                      int64_t D, float *x) {
    ROLLED
    for (int64_t d = threadIdx.x % 32 * RUN; d < D; d += 32 * RUN) {
        float mine[RUN];
        load_stored(row, type, d, D, mine);
        UNROLL
        for (int i = 0; i < RUN; i++) {
            x[d + i] = fmaf(both->other, leaving[d + i], both->own * mine[i]);
        }
    }
    sync_warp();
    store_floats(row, type, x, D);
}

/* Merges a key that leaves into its neighbour; false, and nothing happens, where it has none or
 * the scores are no numbers. x: shared, room for two rows. */
DEVICE bool merge_into(const slot_store *store, neighbour found, const leaver *e,
                       const h2o_ranking *ranking, int64_t D, float *x) {
    const int64_t j = found.slot, depth = cuda_depth(D);
    const int warp = threadIdx.x / 32;
    bool merged = false;
    h2o_merged both = {};
    if (j >= 0) {
        const h2o_member kept = {store->scores[j], store->bias[j], store->positions[j]};
        both = h2o_policy_merge(ranking, kept, e->member);
        merged = both.possible;
    }
    sync_block(); /* all have read what now changes */
    if (merged && warp == 0) {
        merge_row(store->keys + j * store->key_stride, store->key_type, &both, e->key, D, x);
    } else if (merged && warp == 1) {
        merge_row(store->values + j * store->value_stride, store->value_type, &both, e->value, D,
                  x + depth);
        const float norm = norm_of(element_ref{(const char *)(x + depth), H2O_F32, 1}, D);
        if (store->norms && threadIdx.x % 32 == 0) store->norms[j] = norm;
    } else if (merged && threadIdx.x == 64) {
        store->scores[j] = both.score;
        store->bias[j] = both.bias;
    }
    sync_block();
    return merged;
}

#endif
