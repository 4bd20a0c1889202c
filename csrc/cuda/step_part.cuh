/* step_part.cuh - one block's part of a decode step: attention of R query heads over some slots of
 * their key/value head, not yet normalised.
 *
 *   1. The block whose part holds the free slot stores the new token there (step_item.cuh).
 *   2. S = Q K^T for the part's slots (step_logits.cuh).
 *   3. Row max m of the part, P = exp(S - m) in place, row sum l of P.
 *   4. O = P V.
 *
 * P [slots, R], m and l [R] and O [R, D] go to the workspace (step_layout), where step.cuh
 * combines the parts. */
#ifndef H2O_CUDA_STEP_PART_CUH
#define H2O_CUDA_STEP_PART_CUH

#include "step_logits.cuh"

/* Calls use(address, logit) for every 32nd slot from `first` on, in order: STEP_LOADS logits of a
 * head r are read before the first is used. */
template <typename USE>
DEVICE void each_weight(const step_item *item, int64_t r, int64_t first, int64_t end, USE use) {
    NO_UNROLL
    for (int64_t s = first; s < end; s += STEP_LOADS * 32) {
        float weight[STEP_LOADS];
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++)
            weight[k] = item->weights[(s + 32 * k < end ? s + 32 * k : s) * item->R + r];
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            if (s + 32 * k < end) use(&item->weights[(s + 32 * k) * item->R + r], weight[k]);
        }
    }
}

/* Row max, exponentials and row sum of a part; a warp for each query head. */
DEVICE void part_exponentials(const step_item *item, int64_t part, int64_t begin, int64_t end) {
    const int lane = threadIdx.x % 32, warps = STEP_THREADS / 32;
    NO_UNROLL
    for (int64_t r = threadIdx.x / 32; r < item->R; r += warps) {
        float row_max = -INFINITY, row_sum = 0.0f;
        each_weight(item, r, begin + lane, end,
                    [&](float *, float logit) { row_max = fmaxf(row_max, logit); });
        row_max = warp_max(row_max);
        each_weight(item, r, begin + lane, end, [&](float *at, float logit) {
            const float weight = exponential(logit, row_max);
            *at = weight;
            row_sum += weight;
        });
        row_sum = warp_sum(row_sum);
        if (lane == 0) {
            item->row_max[part * item->R + r] = row_max;
            item->row_sum[part * item->R + r] = row_sum;
        }
    }
}

/* The part's exponentials times values, for heads r.. of the group. A thread has one run of
 * elements and every `rows`-th slot; then threads with the same run are added up in order. Heads
 * past the last repeat it, and go nowhere. */
DEVICE void accumulate_part(const step_item *item, int64_t r, int64_t part, int64_t begin,
                            int64_t end, float *sums) {
    const int64_t runs = cuda_depth(item->D) / RUN, rows = STEP_THREADS / runs;
    const int64_t row = threadIdx.x / runs, d = threadIdx.x % runs * RUN;
    float sum[STEP_HEADS][RUN] = {};
    for (int64_t first = begin + row; first < end && row < rows; first += STEP_LOADS * rows) {
        const char *value[STEP_LOADS];
        float x[STEP_LOADS][RUN], weight[STEP_LOADS][STEP_HEADS];
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            const int64_t s = lower(first + k * rows, end - 1);
            value[k] = item->store.values + s * item->store.value_stride;
            UNROLL
            for (int i = 0; i < STEP_HEADS; i++)
                weight[k][i] = item->weights[s * item->R + lower(r + i, item->R - 1)];
        }
        load_rows<STEP_LOADS>(value, item->store.value_type, d, item->D, x);
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
    sync_block(); /* the queries have been read */
    UNROLL
    for (int i = 0; i < STEP_HEADS; i++) {
        UNROLL
        for (int j = 0; j < RUN; j++) sums[(i * RUN + j) * STEP_THREADS + threadIdx.x] = sum[i][j];
    }
    sync_block();
    NO_UNROLL
    for (int64_t k = threadIdx.x; k < STEP_HEADS * item->D; k += STEP_THREADS) {
        const int64_t i = k / item->D, e = k % item->D;
        if (r + i >= item->R) continue;
        float total = 0.0f;
        for (int64_t n = 0; n < rows; n++) {
            total += sums[(i * RUN + e % RUN) * STEP_THREADS + n * runs + e / RUN];
        }
        item->outputs[(part * item->R + r + i) * item->D + e] = total;
    }
    sync_block();
}

/* All that a block does with its part of the slots. */
DEVICE void step_part(const step_item *item, int64_t part, float *shared) {
    const int64_t begin = lower(part * part_slots(item), item->slots);
    const int64_t end = lower(begin + part_slots(item), item->slots);
    if (begin <= item->head.free && item->head.free < end) store_token(item);
    sync_block();
    for (int64_t r = 0; r < item->R; r += STEP_HEADS) {
        load_queries(item, r, shared);
        sync_block();
        part_logits(item, r, begin, end, shared);
        TAKEN(step_of_many_heads, r > 0);
        TAKEN(step_without_slots, begin == end);
        sync_block();
    }
    part_exponentials(item, part, begin, end);
    sync_block();
    for (int64_t r = 0; r < item->R; r += STEP_HEADS)
        accumulate_part(item, r, part, begin, end, shared);
}

#endif
