/* scores.h - how the score of a key grows with the attention that it receives: by the sum of the
 * weights that queries and heads give it or, with `largest` (h2o_scores_largest), to the largest
 * weight. NaN stays NaN. */
#ifndef H2O_SCORES_H
#define H2O_SCORES_H

#include "../policy.h"
#include "vec.h"

/* The larger of a and a weight; NaN if either is. A weight is never infinite. */
VEC vf larger_weight(vf a, vf weight) {
    return vf_less(weight, vf_set1(INFINITY), vf_max(weight, a), weight);
}

/* Combines what a key receives from two sets of queries. */
VEC vf received_together(vf a, vf b, const bool largest) {
    return largest ? larger_weight(a, b) : vf_add(a, b);
}

/* Adds to what a key has received one more query, whose weight is e * factor. */
VEC vf received_with(vf received, vf e, vf factor, const bool largest) {
    return largest ? larger_weight(received, vf_mul(e, factor)) : vf_fma(e, factor, received);
}

/* What VL keys receive from the R heads of a query. Head r's weights are e[r * ld] * factors[r]. */
VEC vf received_from_heads(const float *e, int64_t ld, const float *factors, int64_t R,
                           const bool largest) {
    vf received = vf_zero();
    for (int64_t r = 0; r < R; r++) {
        received = received_with(received, vf_load(e + r * ld), vf_set1(factors[r]), largest);
    }
    return received;
}

/* A score times `decay`, plus what its key has received since, or the larger of the two. */
VEC vf score_after(vf score, vf decay, vf received, const bool largest) {
    return largest ? larger_weight(vf_mul(score, decay), received) : vf_fma(score, decay, received);
}

#endif
