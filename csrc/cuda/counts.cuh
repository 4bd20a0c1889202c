/* counts.cuh - what the small tensors of a call say, as a device reads them.
 *
 * Nothing is judged here, since a launch that a graph has captured cannot raise: what
 * decides on an address is brought into what the tensors' shapes allow. Where the
 * state is consistent, as counts.c of the CPU demands, nothing changes by that. */
#ifndef H2O_CUDA_COUNTS_CUH
#define H2O_CUDA_COUNTS_CUH

#include "store.cuh"

#include "../policy.h"

DEVICE int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
DEVICE int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }
DEVICE int64_t within(int64_t x, int64_t least, int64_t most) {
    return x < least ? least : x > most ? most : x;
}

DEVICE int32_t i32_at(const h2o_view *view, int64_t i, int64_t j, int64_t k) {
    return *(const int32_t *)h2o_at(view, i, j, k);
}

/* Whether the token in a column is no pad. */
DEVICE bool is_token(const h2o_view *mask, int64_t b, int64_t q) {
    return !h2o_given(mask) || *(const uint8_t *)h2o_at(mask, b, q, 0) != 0;
}

/* Where the slots of key/value head g are: S of its own, or its part of a row's. */
DEVICE h2o_head read_place(const h2o_slots *slots, int64_t g) {
    const int64_t all = cuda_slots(slots);
    h2o_head head = {};
    head.offset = g;
    head.slots = all;
    if (h2o_given(&slots->starts)) {
        head.offset = within(i32_at(&slots->starts, g, 0, 0), 0, all - 1);
        head.slots = within(i32_at(&slots->starts, g + 1, 0, 0), head.offset + 1, all) - head.offset;
    }
    return head;
}

/* heavy, recent and budget, of which something is kept. */
DEVICE void read_budget(const h2o_view *budget, int64_t b, int64_t g, const h2o_policy *policy,
                        h2o_head *head) {
    const bool own = budget->ndim == 3;
    const int32_t heavy = own ? i32_at(budget, b, g, 0) : i32_at(budget, b, 0, 0);
    const int32_t recent = own ? i32_at(budget, b, g, 1) : i32_at(budget, b, 1, 0);
    head->heavy = heavy > 0 ? heavy : 0;
    head->recent = recent > 0 ? recent : 0;
    head->budget = higher(h2o_policy_budget(policy, head->heavy, head->recent), 1);
}

/* The tokens that a row had seen before this call of `tokens` more. */
DEVICE int64_t read_length(const h2o_view *lengths, int64_t b, int64_t tokens) {
    return within(*(const int64_t *)h2o_at(lengths, b, 0, 0), 0, INT32_MAX - tokens);
}

/* A key/value head of a row, at the beginning of a call that knows lengths and budget. */
DEVICE h2o_head read_head(const h2o_slots *slots, int64_t b, int64_t g, const h2o_policy *policy,
                          int64_t length) {
    h2o_head head = read_place(slots, g);
    read_budget(&slots->budget, b, g, policy, &head);
    head.held = h2o_policy_held(head.budget, length);
    return head;
}

#endif
