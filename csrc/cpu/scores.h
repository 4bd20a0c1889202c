/* scores.h - how the score of a key grows by the attention that it receives: by the sum of the
 * weights that queries and heads give it, or, where `largest` (h2o_scores_largest), to the largest
 * of them. NaN, once it has come, stays. */
#ifndef H2O_SCORES_H
#define H2O_SCORES_H

#include "../policy.h"
#include "vec.h"

/* The larger of a and a weight, or NaN where either is. A weight is never infinite. */
VEC vf larger_weight(vf a, vf weight) {
    return vf_less(weight, vf_set1(INFINITY), vf_max(weight, a), weight);
}

/* What two sets of queries give together. */
VEC vf given_by_both(vf a, vf b, const bool largest) {
    return largest ? larger_weight(a, b) : vf_add(a, b);
}

/* What queries give of whom one more has the weight e * factor. */
VEC vf given_by_more(vf given, vf e, vf factor, const bool largest) {
    return largest ? larger_weight(given, vf_mul(e, factor)) : vf_fma(e, factor, given);
}

/* What the R heads of a query give, of whom head r has the weights e[r * ld] * factors[r]. */
VEC vf given_by_heads(const float *e, int64_t ld, const float *factors, int64_t R,
                      const bool largest) {
    vf given = vf_zero();
    for (int64_t r = 0; r < R; r++) {
        given = given_by_more(given, vf_load(e + r * ld), vf_set1(factors[r]), largest);
    }
    return given;
}

/* A score that has faded by `decay`, once queries have given so much. */
VEC vf score_after(vf score, vf decay, vf given, const bool largest) {
    return largest ? larger_weight(vf_mul(score, decay), given) : vf_fma(score, decay, given);
}

#endif
