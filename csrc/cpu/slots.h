/* slots.h - where the small tensors of a layer's slots keep what belongs to
 * row b and key/value head g. */
#ifndef H2O_SLOTS_H
#define H2O_SLOTS_H

#include "../policy.h"

/* [S] of a [B,G,S] tensor of 32-bit elements. */
static inline void *slot_row(const h2o_view *view, int64_t b, int64_t g) {
    return (char *)view->data + (b * view->stride[0] + g * view->stride[1]) * 4;
}

static inline int32_t *slot_free(const h2o_slots *slots, int64_t b, int64_t g) {
    return (int32_t *)slots->free.data + b * slots->free.stride[0] + g * slots->free.stride[1];
}

static inline double *slot_lost(const h2o_slots *slots, int64_t b, int64_t g) {
    return (double *)slots->lost.data + b * slots->lost.stride[0] + g * slots->lost.stride[1];
}

static inline int64_t *slot_length(const h2o_slots *slots, int64_t b) {
    return (int64_t *)slots->lengths.data + b * slots->lengths.stride[0];
}

/* The ranking of row b when it has seen length tokens. */
static inline h2o_ranking slot_ranking(const h2o_view *budget, const h2o_policy *policy, int64_t b,
                                       int64_t length) {
    const int32_t *const row = (const int32_t *)budget->data + b * budget->stride[0];
    return h2o_policy_ranking(policy, row[0], row[budget->stride[1]], length);
}

/* Whether column q of row b is a token and no pad. */
static inline bool is_token(const h2o_view *mask, int64_t b, int64_t q) {
    return !h2o_given(mask) ||
           ((const uint8_t *)mask->data)[b * mask->stride[0] + q * mask->stride[1]];
}

#endif
