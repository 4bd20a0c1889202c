/* half.h - scalar conversions between float and the two 16-bit formats.
 *
 * Portable C on bit patterns. The vector layers use these where the processor has no
 * instruction; scalar code uses them everywhere except on a GPU, where the file that includes
 * this one defines H2O_OWN_F16 and brings its own f16_from_float and float_from_f16.
 * Conversions round to nearest even. NaN stays NaN (quiet); overflow becomes infinity. */
#ifndef H2O_HALF_H
#define H2O_HALF_H

#include <stdint.h>
#include <string.h>

#include "h2o.h"

H2O_INLINE uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

H2O_INLINE float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

H2O_INLINE float float_from_bf16(uint16_t h) { return bits_float((uint32_t)h << 16); }

H2O_INLINE uint16_t bf16_from_float(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

#ifndef H2O_OWN_F16
/* Moves the fraction into place, then fixes the exponent: of a normal number by adding the
 * difference of the biases, of a subnormal by letting the floating-point unit normalize it, of
 * infinity and NaN by filling the exponent with ones. */
H2O_INLINE float float_from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t rest = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t bits;
    if (rest >= 0x0f800000u) /* infinity, NaN (made quiet) */
        bits = rest | 0x7f800000u | (rest > 0x0f800000u ? 0x400000u : 0);
    else if (rest >= 0x00800000u)
        bits = rest + 0x38000000u;
    else /* fraction * 2^-24 */
        bits = float_bits((float)(rest >> 13) * 0x1p-24f);
    return bits_float(bits | sign);
}

/* For subnormal results 0.5 is added: the unit then rounds to multiples of 2^-24, the smallest step
 * of f16, and leaves the fraction in the low bits. */
H2O_INLINE uint16_t f16_from_float(float x) {
    const uint32_t bits = float_bits(x);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    const uint32_t rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (rest < 0x38800000u)
        return (uint16_t)(sign | (float_bits(bits_float(rest) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13));
}
#endif

/* The f32, f16 or bf16 element at p, as a float. */
H2O_INLINE float load_scalar(const void *p, h2o_dtype type) {
    uint16_t h;
    float x;
    if (type == H2O_F32) {
        memcpy(&x, p, sizeof x);
        return x;
    }
    memcpy(&h, p, sizeof h);
    return type == H2O_F16 ? float_from_f16(h) : float_from_bf16(h);
}

H2O_INLINE void store_scalar(void *p, h2o_dtype type, float x) {
    if (type == H2O_F32) {
        memcpy(p, &x, sizeof x);
        return;
    }
    const uint16_t h = type == H2O_F16 ? f16_from_float(x) : bf16_from_float(x);
    memcpy(p, &h, sizeof h);
}

#endif
