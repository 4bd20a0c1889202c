/* step_part.cuh - one block's part of a decode step: attention of R query heads over some slots of
 * their key/value head, not yet normalized, for any rows. step_matrix.cuh does the same with tensor
 * cores.
 *
 *   1. The block whose part has the free slot stores the new token there (step_item.cuh).
 *   2. S = Q K^T for the part's slots (step_logits.cuh).
 *   3. Row max m of the part, row sum l of P = exp(S - m).
 *   4. O = P V.
 *
 * S [R, slots], m and l [R] and O [R, D] are written to the workspace (step_layout), and step.cuh
 * combines the parts. */
#ifndef H2O_CUDA_STEP_PART_CUH
#define H2O_CUDA_STEP_PART_CUH

#include "step_logits.cuh"

/* Calls use(logit) for every 32nd slot from `first` on, in order. STEP_LOADS logits of a head are
 * read before the first is used. */
template <typename USE>
DEVICE void each_logit(const float *logits, int64_t first, int64_t end, USE use) {
    NO_UNROLL
    for (int64_t s = first; s < end; s += STEP_LOADS * 32) {
        float logit[STEP_LOADS];
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) logit[k] = logits[s + 32 * k < end ? s + 32 * k : s];
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            if (s + 32 * k < end) use(logit[k]);
        }
    }
}

/* Computes row max and row sum of a part; one warp per query head. */
DEVICE void part_softmax(const step_item *item, int64_t part, int64_t begin, int64_t end) {
    const int lane = threadIdx.x % 32;
    NO_UNROLL
    for (int64_t r = threadIdx.x / 32; r < item->R; r += STEP_WARPS) {
        const float *const logits = item->logits + r * item->head.slots;
        float row_max = -INFINITY, row_sum = 0.0f;
        each_logit(logits, begin + lane, end, [&](float x) { row_max = fmaxf(row_max, x); });
        row_max = max_of_lanes(row_max);
        each_logit(logits, begin + lane, end, [&](float x) { row_sum += exponential(x, row_max); });
        row_sum = sum_of_lanes(row_sum);
        if (lane == 0) {
            item->row_max[part * item->R + r] = row_max;
            item->row_sum[part * item->R + r] = row_sum;
        }
    }
}

/* Computes the part's exponentials times values for heads r.. of the group. A thread has one run of
 * elements and every `rows`-th slot; threads with the same run are then added up in order. Past the
 * last head the last one is computed again and not written. */
DEVICE void accumulate_part(const step_item *item, int64_t r, int64_t part, int64_t begin,
                            int64_t end, float *sums) {
    const int64_t runs = cuda_depth(item->D) / RUN, rows = STEP_THREADS / runs;
    const int64_t row = threadIdx.x / runs, d = threadIdx.x % runs * RUN;
    const float *logits[STEP_HEADS];
    float sum[STEP_HEADS][RUN] = {}, row_max[STEP_HEADS];
    UNROLL
    for (int i = 0; i < STEP_HEADS; i++) {
        const int64_t head = lower(r + i, item->R - 1);
        logits[i] = item->logits + head * item->head.slots;
        row_max[i] = item->row_max[part * item->R + head];
    }
    for (int64_t first = begin + row; first < end && row < rows; first += STEP_LOADS * rows) {
        const char *value[STEP_LOADS];
        float x[STEP_LOADS][RUN], weight[STEP_LOADS][STEP_HEADS];
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            const int64_t s = lower(first + k * rows, end - 1);
            value[k] = slot_row(&item->store.values, s);
            UNROLL
            for (int i = 0; i < STEP_HEADS; i++) weight[k][i] = logits[i][s];
        }
        load_rows<STEP_LOADS>(value, item->store.values.type, d, item->D, x);
        UNROLL
        for (int k = 0; k < STEP_LOADS * STEP_HEADS; k++) {
            float *const e = &weight[k / STEP_HEADS][k % STEP_HEADS];
            *e = exponential(*e, row_max[k % STEP_HEADS]);
        }
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            if (first + k * rows >= end) continue;
            UNROLL
            for (int i = 0; i < STEP_HEADS * RUN; i++) {
                float *const to = &sum[i / RUN][i % RUN];
                *to = fmaf(weight[k][i / RUN], x[k][i % RUN], *to);
            }
        }
    }
    sync_block(); /* all threads have read the queries */
    UNROLL
    for (int i = 0; i < STEP_HEADS; i++) {
        UNROLL
        for (int j = 0; j < RUN; j++) sums[(i * RUN + j) * STEP_THREADS + threadIdx.x] = sum[i][j];
    }
    sync_block();
    NO_UNROLL
    for (int64_t i = 0; i < STEP_HEADS && r + i < item->R; i++) {
        NO_UNROLL
        for (int64_t e = threadIdx.x; e < item->D; e += STEP_THREADS) {
            const float *const first = sums + (i * RUN + e % RUN) * STEP_THREADS + e / RUN;
            float total = 0.0f;
            for (int64_t n = 0; n < rows; n++) total += first[n * runs];
            item->outputs[(part * item->R + r + i) * item->D + e] = total;
        }
    }
    sync_block();
}

/* Does all of a block's work on its part of the slots. */
DEVICE void step_part(const step_item *item, int64_t part, float *shared) {
    const int64_t begin = part_begin(item, part), end = part_begin(item, part + 1);
    if (has_token(item, begin, end)) {
        if (item->D <= CUDA_DEPTH) {
            store_token<CUDA_DEPTH>(item);
        } else {
            store_token<0>(item);
        }
    }
    for (int64_t r = 0; r < item->R; r += STEP_HEADS) {
        load_queries(item, r, shared);
        sync_block(); /* now the token is stored, too */
        part_logits(item, r, begin, end, shared);
        TAKEN(step_of_many_heads, r > 0);
        TAKEN(step_without_slots, begin == end);
        sync_block();
    }
    part_softmax(item, part, begin, end);
    sync_block();
    for (int64_t r = 0; r < item->R; r += STEP_HEADS)
        accumulate_part(item, r, part, begin, end, shared);
}

#endif
