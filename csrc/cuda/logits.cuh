/* logits.cuh - from a dot product q.k to a logit, and from logits to exponentials.
 *
 *     logit = softcap(scale * q.k) + bias        softcap(x) = cap * tanh(x / cap), or x
 *     weight = exp(logit - row max)
 *
 * by the GPU's approximate 2^x and 1/x; common.cuh has their errors. */
#ifndef H2O_CUDA_LOGITS_CUH
#define H2O_CUDA_LOGITS_CUH

#include "common.cuh"

DEVICE float fast_exp(float x) { return fast_exp2(x * 1.44269504f); }

/* tanh x; its absolute error is a few units in the last place of 1. */
DEVICE float fast_tanh(float x) { return 1.0f - 2.0f * fast_reciprocal(fast_exp(2.0f * x) + 1.0f); }

DEVICE float logit_of(float dot, float scale, float softcap, float bias) {
    const float x = scale * dot;
    return (softcap > 0.0f ? softcap * fast_tanh(x * fast_reciprocal(softcap)) : x) + bias;
}

/* exp(x - row_max) for x <= row_max; 0 where both are -infinity. */
DEVICE float exponential(float x, float row_max) {
    const float finite_max = row_max == -INFINITY ? 0.0f : row_max;
    return fast_exp(x - finite_max);
}

#endif
