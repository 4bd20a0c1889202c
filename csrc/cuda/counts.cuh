/* counts.cuh - reads the small integer tensors of a call on the device: mask [B,Q], budget [B,2] or
 * [B,G,2], seen_tokens [Z], starts [G+1], rows [B].
 *
 * On the CPU counts.c validates them and raises errors. A kernel that a graph has captured cannot
 * raise. So whatever determines an address is clamped here to the range that the tensors' shapes
 * allow. This does not change consistent states. */
#ifndef H2O_CUDA_COUNTS_CUH
#define H2O_CUDA_COUNTS_CUH

#include "stored_rows.cuh"

#include "../policy.h"

DEVICE int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
DEVICE int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }
DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

DEVICE int32_t i32_at(const h2o_view *view, int64_t i, int64_t j, int64_t k) {
    return *(const int32_t *)h2o_at(view, i, j, k);
}

/* Whether column q of row b is a token, not padding. */
DEVICE bool is_token(const h2o_view *mask, int64_t b, int64_t q) {
    return !h2o_given(mask) || *(const uint8_t *)h2o_at(mask, b, q, 0) != 0;
}

/* Where the slots of head g of a row begin on axis T; for g = G, where the last head's end. */
DEVICE int64_t start_at(const h2o_view *starts, int64_t row, int64_t g) {
    return starts->ndim == 2 ? i32_at(starts, row, g, 0) : i32_at(starts, g, 0, 0);
}

/* Finds the slots of key/value head g of batch row b: all S of axis G, or starts[g]..starts[g+1]-1
 * of axis T, in that row or in the one that `rows` names. */
DEVICE h2o_head read_extent(const h2o_slots *slots, int64_t b, int64_t g) {
    const int64_t all = cuda_slots(slots);
    h2o_head head = {};
    head.row = b;
    if (h2o_given(&slots->rows)) {
        head.row = clamp(i32_at(&slots->rows, b, 0, 0), 0, slots->scores.shape[0] - 1);
    }
    head.offset = g;
    head.slots = all;
    if (h2o_given(&slots->starts)) {
        head.offset = clamp(start_at(&slots->starts, head.row, g), 0, all - 1);
        const int64_t end = start_at(&slots->starts, head.row, g + 1);
        head.slots = clamp(end, head.offset + 1, all) - head.offset;
    }
    return head;
}

/* Reads heavy, recent and budget of a head; the budget is at least 1. */
DEVICE void read_budget(const h2o_view *budget, int64_t b, int64_t g, const h2o_policy *policy,
                        h2o_head *head) {
    const bool per_head = budget->ndim == 3;
    const int32_t heavy = per_head ? i32_at(budget, b, g, 0) : i32_at(budget, b, 0, 0);
    const int32_t recent = per_head ? i32_at(budget, b, g, 1) : i32_at(budget, b, 1, 0);
    head->heavy = heavy > 0 ? heavy : 0;
    head->recent = recent > 0 ? recent : 0;
    head->budget = higher(h2o_policy_budget(policy, head->heavy, head->recent), 1);
}

/* The number of tokens that a row of the slots had seen before this call, which adds `tokens`. */
DEVICE int64_t read_length(const h2o_view *lengths, int64_t row, int64_t tokens) {
    return clamp(*(const int64_t *)h2o_at(lengths, row, 0, 0), 0, INT32_MAX - tokens);
}

/* Writes the new number of tokens; called by one thread of the last block that works on a row. */
DEVICE void write_length(const h2o_view *lengths, int64_t row, int64_t length) {
    *(int64_t *)h2o_at(lengths, row, 0, 0) = length;
}

#endif
