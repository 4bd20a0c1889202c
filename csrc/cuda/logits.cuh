/* logits.cuh - from a dot product q.k to a logit, and from logits to exponentials.
 *
 *     logit = softcap(scale * q.k) + bias        softcap(x) = cap * tanh(x / cap), or x
 *     weight = exp(logit - row max)
 *
 * by the GPU's approximate 2^x and 1/x; common.cuh has their errors. The relative error of a
 * logit is a few units in the last place, however large the cap. */
#ifndef H2O_CUDA_LOGITS_CUH
#define H2O_CUDA_LOGITS_CUH

#include "common.cuh"

DEVICE float fast_exp(float x) { return fast_exp2(x * 1.44269504f); }

/* What capped() multiplies by; a number for denormal caps too. */
DEVICE float inverse_cap(float softcap) { return fast_reciprocal(fmaxf(softcap, 1.17549435e-38f)); }

/* cap * tanh(x / cap). With y = x / cap: by x times an even polynomial near 0, where the formula
 * with the exponential would cancel (csrc/cpu/vec.h has the same one), so that x far below the cap
 * stays x; elsewhere (1 - t) / (1 + t), t = e^(-2|y|). */
DEVICE float capped(float x, float softcap, float inverse) {
    const float y = x * inverse, size = fabsf(y), z = y * y;
    float p = fmaf(-5.70499e-3f, z, 2.063909e-2f);
    p = fmaf(p, z, -5.373971e-2f);
    p = fmaf(p, z, 1.3331442e-1f);
    p = fmaf(p, z, -3.3333282e-1f);
    const float t = fast_exp(-2.0f * size);
    const float outer = copysignf(softcap * ((1.0f - t) * fast_reciprocal(1.0f + t)), x);
    return size < 0.625f ? fmaf(p * z, x, x) : outer;
}

DEVICE float logit_of(float dot, float scale, float softcap, float bias) {
    const float x = scale * dot;
    return (softcap > 0.0f ? capped(x, softcap, inverse_cap(softcap)) : x) + bias;
}

/* exp(x - row_max) for x <= row_max; 0 where both are -infinity. */
DEVICE float exponential(float x, float row_max) {
    const float finite_max = row_max == -INFINITY ? 0.0f : row_max;
    return fast_exp(x - finite_max);
}

#endif
