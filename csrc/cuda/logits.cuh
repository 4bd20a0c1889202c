/* logits.cuh - turns a dot product q.k into a logit, and logits into exponentials.
 *
 *     logit = softcap(scale * q.k)        softcap(x) = cap * tanh(x / cap), or x
 *     weight = exp(logit - row max)
 *
 * They use the GPU's approximate 2^x and 1/x, whose errors are in common.cuh. The relative error of
 * a logit is a few units in the last place, however large the cap is. */
#ifndef H2O_CUDA_LOGITS_CUH
#define H2O_CUDA_LOGITS_CUH

#include "common.cuh"

#define LOG2_E 1.44269504f

/* From this exponent of 2 on, a row max is subtracted before logits are multiplied by the unit,
 * since the product of the row max and the unit would be too coarse. */
#define FAR 16777216.0f

DEVICE float fast_exp(float x) { return fast_exp2(x * LOG2_E); }

/* 1 / cap; finite for denormal caps too. */
DEVICE float inverse_cap(float softcap) { return fast_reciprocal(fmaxf(softcap, 1.17549435e-38f)); }

/* cap * tanh(x / cap) in two steps; with y = x / cap:
 *
 *   |y| < 0.15   x (1 - y^2 / 3 + 2 y^4 / 15): the other formula would cancel; with this one, x far
 *                below the cap stays x
 *   else         cap (1 - t) / (1 + t) with the sign of x, t = e^(-2|y|)
 *
 * After the first step no value is between tanh 0.15 = 0.1489 and 0.15, so the second step can tell
 * which values are done. All logits take the first step before any takes the second, which saves a
 * quarter of the registers. */
DEVICE float capped_small(float x, float inverse) {
    const float y = x * inverse, z = y * y;
    return z < 0.0225f ? x * fmaf(z, fmaf(1.3333333e-1f, z, -3.3333333e-1f), 1.0f) : x;
}

DEVICE float capped_large(float x, float softcap, float inverse) {
    const float size = fabsf(x * inverse), t = fast_exp(-2.0f * size);
    const float large = copysignf(softcap * ((1.0f - t) * fast_reciprocal(1.0f + t)), x);
    return size < 0.1495f ? x : large;
}

DEVICE float logit_of(float dot, float scale, float softcap) {
    const float x = scale * dot;
    TAKEN(softcap, softcap > 0.0f);
    if (softcap <= 0.0f) return x;
    const float inverse = inverse_cap(softcap);
    return capped_large(capped_small(x, inverse), softcap, inverse);
}

/* What is subtracted from the logits of a row: its max, if it has one. */
DEVICE float subtrahend(float row_max) { return row_max == -INFINITY ? 0.0f : row_max; }

/* exp(x - row_max) for x <= row_max; 0 if both are -infinity. */
DEVICE float exponential(float x, float row_max) { return fast_exp(x - subtrahend(row_max)); }

/* The sink logit of a query head; -infinity if there are none. +infinity becomes a large number, so
 * that differences from it are numbers. */
DEVICE float sink_of(const h2o_view *sink_logits, int64_t head) {
    const float largest = 1e30f;
    if (!h2o_given(sink_logits)) return -INFINITY;
    const float sink = *(const float *)h2o_at(sink_logits, head, 0, 0);
    return sink > largest ? largest : sink;
}

/* Adds a head's sink to the row sum of a query's exponentials. If all logits of a row are
 * -infinity, the sink becomes the row max, and all weights are 0. */
DEVICE void add_sink(float sink, float *row_max, float *row_sum) {
    if (sink == -INFINITY) return;
    if (*row_max == -INFINITY) *row_max = sink;
    *row_sum += fast_exp(sink - *row_max);
}

#endif
