/* logits.cuh - from dot products to attention. */
#ifndef H2O_CUDA_LOGITS_CUH
#define H2O_CUDA_LOGITS_CUH

#include "common.cuh"

DEVICE float fast_exp(float x) { return fast_exp2(x * 1.44269504f); }

/* tanh, within a few units in the last place of 1. */
DEVICE float bend(float x) { return 1.0f - 2.0f * fast_reciprocal(fast_exp(2.0f * x) + 1.0f); }

DEVICE float logit_of(float dot, float scale, float softcap, float bias) {
    const float x = scale * dot;
    return (softcap > 0.0f ? softcap * bend(x * fast_reciprocal(softcap)) : x) + bias;
}

/* The exponentials of logits x - base 2 - above the highest; where there is none but -infinity,
 * of -infinity. */
DEVICE float exponential(float x, float top) {
    const float least = top == -INFINITY ? 0.0f : top;
    return fast_exp(x - least);
}

#endif
