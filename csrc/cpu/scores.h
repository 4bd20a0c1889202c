/* scores.h - how the score of a key grows by the attention that it receives: by the sum of the
 * weights that queries and heads give it, or, where `largest` (h2o_scores_largest), to the largest
 * of them. NaN stays NaN. */
#ifndef H2O_SCORES_H
#define H2O_SCORES_H

#include "../policy.h"
#include "vec.h"

/* The larger of a and a weight, or NaN where either is. A weight is never infinite. */
VEC vf larger_weight(vf a, vf weight) {
    return vf_less(weight, vf_set1(INFINITY), vf_max(weight, a), weight);
}

/* What a key receives from two sets of queries together. */
VEC vf received_together(vf a, vf b, const bool largest) {
    return largest ? larger_weight(a, b) : vf_add(a, b);
}

/* What a key receives from some queries and one more, whose weight is e * factor. */
VEC vf received_with(vf received, vf e, vf factor, const bool largest) {
    return largest ? larger_weight(received, vf_mul(e, factor)) : vf_fma(e, factor, received);
}

/* What keys receive from the R heads of a query; head r's weights are e[r * ld] * factors[r]. */
VEC vf received_from_heads(const float *e, int64_t ld, const float *factors, int64_t R,
                           const bool largest) {
    vf received = vf_zero();
    for (int64_t r = 0; r < R; r++) {
        received = received_with(received, vf_load(e + r * ld), vf_set1(factors[r]), largest);
    }
    return received;
}

/* A score times `decay`, and what its key has received since. */
VEC vf score_after(vf score, vf decay, vf received, const bool largest) {
    return largest ? larger_weight(vf_mul(score, decay), received) : vf_fma(score, decay, received);
}

#endif
