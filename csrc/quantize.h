/* quantize.h - what the rows of a quantized store hold: scales, minima and whole numbers.
 *
 * A row holds D elements and what is needed to read them, in bytes:
 *
 *   Q8   D signed bytes q, then a f16 scale: x = scale * q
 *   Q4   for each group of 32 elements 16 bytes, byte j with element j in its low
 *        half and element j + 16 in its high one; then for each group f16 scale
 *        and f16 minimum: x = minimum + scale * q
 *
 * Scales are rounded up and minima down, so that nothing clips but what f16 cannot
 * reach; elements to nearest, ties to even. Where an element is not finite the
 * scale is NaN, and so is all that is read from it. (Symmetric bytes per token for
 * keys, groups with a minimum, which others call zero point, for values: compare Liu et
 * al., "KIVI", ICML 2024.) */
#ifndef H2O_QUANTIZE_H
#define H2O_QUANTIZE_H

#include "half.h"

#include <math.h>

enum { F16_MOST = 0x7bff, F16_NAN = 0x7e00 };

/* The smallest f16 from 0 on that is no less than x; the largest there is beyond. */
H2O_INLINE uint16_t f16_no_less(float x) {
    const uint16_t near = f16_from_float(x > 0.0f ? x : 0.0f);
    if (near > F16_MOST) return F16_MOST;
    return (uint16_t)(near + (float_from_f16(near) < x && near < F16_MOST));
}

/* The largest f16 that is no more than x; the smallest there is beyond. */
H2O_INLINE uint16_t f16_no_more(float x) {
    const bool negative = x < 0.0f;
    uint16_t near = f16_from_float(fabsf(x)), least = near;
    near = near > F16_MOST ? F16_MOST : near;
    const float size = float_from_f16(near);
    if (negative) {
        least = (uint16_t)(0x8000 | (near + (size < -x && near < F16_MOST)));
    } else {
        least = size > x ? (uint16_t)(near - 1) : near;
    }
    return least;
}

/* What a row of Q8 or a group of Q4 is read with, as f16; the minimum of Q8 is 0. */
typedef struct {
    uint16_t scale, minimum;
} quantizer;

/* high: the largest magnitude. */
H2O_INLINE quantizer q8_quantizer(float high, bool finite) {
    const quantizer q = {finite ? f16_no_less(high / 127.0f) : (uint16_t)F16_NAN, 0};
    return q;
}

H2O_INLINE quantizer q4_quantizer(float low, float high, bool finite) {
    quantizer q = {F16_NAN, 0};
    if (!finite) return q;
    q.minimum = f16_no_more(low);
    q.scale = f16_no_less((high - float_from_f16(q.minimum)) / 15.0f);
    return q;
}

/* The whole number from `low` to `high` that stands for x. */
H2O_INLINE int32_t quantized(quantizer q, float x, float low, float high) {
    const float scale = float_from_f16(q.scale);
    if (!(scale > 0.0f)) return 0; /* all are the same, or one is not finite */
    const float rounded = nearbyintf((x - float_from_f16(q.minimum)) / scale);
    return (int32_t)(rounded < low ? low : rounded > high ? high : rounded);
}

/* Where in a row of Q4 the group of element d has the bytes of its elements, and where it has its
 * scale and minimum. */
H2O_INLINE int64_t q4_elements(int64_t d) { return d / H2O_GROUP * (H2O_GROUP / 2); }
H2O_INLINE int64_t q4_scale(int64_t d, int64_t D) { return D / 2 + d / H2O_GROUP * 4; }

H2O_INLINE int32_t q8_quantized(quantizer q, float x) { return quantized(q, x, -127.0f, 127.0f); }
H2O_INLINE int32_t q4_quantized(quantizer q, float x) { return quantized(q, x, 0.0f, 15.0f); }

#endif
