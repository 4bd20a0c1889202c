/* quantize.h - the rows of a quantized store: scales, minima and integers.
 *
 * A row holds D elements together with their scales:
 *
 *   Q8   D signed bytes q, then an f16 scale: x = scale * q
 *   S4   16 bytes for each group of 32 elements: byte j has element j in its low half
 *        and element j + 16 in its high half. A half n stands for the signed byte
 *        q = 16 * n - 120. Then an f16 scale: x = scale * q
 *   Q4   the same halves. Then an f16 scale and an f16 minimum for each group:
 *        x = minimum + scale * n
 *
 * Keys are Q8 or S4, values Q8 or Q4. Since a half of S4 stands for a byte, keys of both types are
 * multiplied by the same integers.
 *
 * Keys whose elements lie around a constant far from 0, as a bias of the key projection makes
 * them, need a coarse scale. So an offset for each row and head is subtracted before a key is
 * quantized: the mean of the first keys of the row, up to CENTER_TOKENS of them. (SageAttention,
 * Zhang et al., ICLR 2025, subtracts the mean of all keys.)
 *
 * A single element far from the others would need a coarse scale as well. So rows with offsets, keys
 * and values alike, are then transformed by an orthonormal Hadamard matrix (cpu/hadamard.h), which
 * spreads every element over a block of the row. A key is offset + transform(scale * q), a value
 * transform(minimum + scale * q). Products do not change if both factors are transformed, so a step
 * transforms its query instead of the keys, and its output instead of the values. (QuaRot, Ashkboos
 * et al., NeurIPS 2024.)
 *
 * Four-bit keys are divided by smoothing factors after their offset is subtracted, one for each
 * element, and queries are multiplied by them. Products do not change, and elements that queries
 * multiply by large numbers are rounded less. (SmoothQuant, Xiao et al., ICML 2023, for activations
 * and weights.) A key is then offset + smoothing * transform(scale * q).
 *
 * Scales are rounded up and minima down, so that only values beyond the range of f16 are
 * clipped. Elements are rounded to nearest, ties to even. If an element is not finite, the
 * scale is NaN, and so is everything that is read with it. (Symmetric per-token bytes for
 * keys, groups with a minimum, also known as zero point, for values: compare Liu et al.,
 * "KIVI", ICML 2024.) */
#ifndef H2O_QUANTIZE_H
#define H2O_QUANTIZE_H

#include "half.h"

#include <math.h>

enum { F16_MOST = 0x7bff, F16_NAN = 0x7e00, CENTER_TOKENS = 32 };

/* The smallest f16 >= max(x, 0); the largest finite f16 if x is beyond it. */
H2O_INLINE uint16_t f16_no_less(float x) {
    const uint16_t near = f16_from_float(x > 0.0f ? x : 0.0f);
    if (near > F16_MOST) return F16_MOST;
    return (uint16_t)(near + (float_from_f16(near) < x && near < F16_MOST));
}

/* The largest f16 <= x; the lowest finite f16 if x is below it. */
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

/* How many scales the largest magnitude of a row is. The halves of S4 divide the range up to it into
 * 16 intervals of equal width, and an element becomes the middle of its interval. For transformed
 * rows, which are almost Gaussian, the squared error is then 8% smaller than if the outermost middles
 * were the ends of the range. */
enum { Q8_SCALES = 127, S4_SCALES = 128 };

/* The parameters of a Q8 or S4 row or of a Q4 group, as f16. The minimum of Q8 and S4 is 0. */
typedef struct {
    uint16_t scale, minimum;
} quantizer;

/* The parameters of a Q8 or S4 row. high: its largest magnitude; scales: how many it is. */
H2O_INLINE quantizer row_quantizer(float high, float scales, bool finite) {
    const quantizer q = {finite ? f16_no_less(high / scales) : (uint16_t)F16_NAN, 0};
    return q;
}

H2O_INLINE quantizer q4_quantizer(float low, float high, bool finite) {
    quantizer q = {F16_NAN, 0};
    if (!finite) return q;
    q.minimum = f16_no_more(low);
    q.scale = f16_no_less((high - float_from_f16(q.minimum)) / 15.0f);
    return q;
}

/* The integer from `low` to `high` that is nearest to x / width + zero. */
H2O_INLINE int32_t quantized(float x, float width, float zero, float low, float high) {
    if (!(width > 0.0f)) return 0; /* all elements are equal, or one is not finite */
    const float rounded = nearbyintf(x / width + zero);
    return (int32_t)(rounded < low ? low : rounded > high ? high : rounded);
}

/* The integer that represents x; for halves of bytes the number n. */
H2O_INLINE int32_t q8_quantized(quantizer q, float x) {
    return quantized(x, float_from_f16(q.scale), 0.0f, -127.0f, 127.0f);
}

H2O_INLINE int32_t s4_quantized(quantizer q, float x) {
    return quantized(x, 16.0f * float_from_f16(q.scale), 7.5f, 0.0f, 15.0f);
}

H2O_INLINE int32_t q4_quantized(quantizer q, float x) {
    return quantized(x - float_from_f16(q.minimum), float_from_f16(q.scale), 0.0f, 0.0f, 15.0f);
}

/* An element of an offset, given the sum of `count` keys' elements, as f16. 0 if it is not finite. */
H2O_INLINE uint16_t offset_element(double sum, int64_t count) {
    const float mean = (float)(sum / (double)count);
    return fabsf(mean) <= 65504.0f ? f16_from_float(mean) : (uint16_t)0;
}

/* The byte offset of the elements of a group in a row of half bytes, and of the scale and minimum
 * of a Q4 group; d: an element of it. */
H2O_INLINE int64_t q4_elements(int64_t d) { return d / H2O_GROUP * (H2O_GROUP / 2); }
H2O_INLINE int64_t q4_scale(int64_t d, int64_t D) { return D / 2 + d / H2O_GROUP * 4; }

/* The signed byte that element d of an S4 row stands for. */
H2O_INLINE int8_t s4_byte(const char *row, int64_t d) {
    const uint8_t halves = (uint8_t)row[q4_elements(d) + d % (H2O_GROUP / 2)];
    return (int8_t)((d % H2O_GROUP < H2O_GROUP / 2 ? halves % 16 : halves / 16) * 16 - 120);
}

#endif
