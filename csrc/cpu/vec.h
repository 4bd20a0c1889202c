/* vec.h - the vector layer over which every kernel body is written once.
 *
 * A level_<name>.c switches the compiler to its instruction set, defines one
 * of H2O_VEC_GENERIC, _AVX2, _AVX512, _NEON (and H2O_DOT_BF16 if it has dpbf16,
 * H2O_TILE_BF16 if gemm.inc can use a matrix unit too), then includes this file
 * and the bodies. Everything here is static and always inlined, so each level
 * gets its own copies.
 *
 * The level's own header defines, with n any int (n <= 0: no lane, n >= VL: all):
 *
 *   vf, VL, REGISTERS       a vector of VL floats; the number of such registers
 *   TILE_ROWS TILE_VECTORS  shape of the register tile of matrix products, at most 6 x 4
 *   vf_set1 vf_zero
 *   vf_load vf_store        from and to any address
 *   vf_load_n vf_store_n    the first n lanes; other lanes are loaded as 0 and not stored
 *   vf_fma(a, b, c)         a * b + c, fused if the machine can
 *   vf_max(a, b)            b if either is NaN
 *   vf_abs vf_copysign(magnitude, sign)
 *   vf_less(a, b, yes, no)  per lane a < b ? yes : no; NaN gives no
 *   vf_any_greater(a, b)    whether a > b in any lane; false for NaN
 *   vf_first_n(n, a, b)     lanes below n from a, the others from b
 *   vf_hsum vf_hmax         over all lanes, in a fixed order
 *   vf_exp2_parts(x, *f)    x = i + f with |f| <= 1/2, returns i as a float
 *   vf_scale2(x, i)         x * 2^i for integral i in -125..127; NaN if both are
 *   vf_scale2_from(least, x, i)  the same, but 0 where i < least; instead of vf_scale2 (AVX-512)
 *   vh vh_load vh_store     a vector of VL 16-bit elements; AVX-512 also vh_load_n vh_store_n
 *   widen_f16 _bf16         to floats
 *   narrow_f16 _bf16        from floats; the generic level defines instead vf_store_f16 _bf16,
 *                           and with _n
 *   vf_set1_f16(p)          the f16 at p in all lanes
 *   vf_load_i8(p)           VL signed bytes
 *   vf_store_bytes(p, x)    integers from -128 to 255 as one byte each
 *   vf_load_u4(p, high)     the high or the low halves of VL bytes
 *   vf_load_u4_as(p, scale, minimum, *low, *high)  both halves, as vf_fma(q, scale, minimum)
 *   widen_u4(p, to)         the low halves n of 16 bytes, followed by their high halves, as signed
 *                           bytes 16 * n - 120 (as unsigned ones they would be 16 * n + 8)
 *   vf_swap(x, h)           lanes i and i ^ h exchanged, for a constant power of two h < VL
 *   vf_transpose(v)         v[VL] as a VL x VL matrix, in place
 *   vf_hsums(v)             lane i is the sum over the lanes of v[i], i < VL
 *
 * and with H2O_DOT_BF16, where a vf may carry 2 * VL bf16 as bits, each lane being a pair whose low
 * half is the first element:
 *
 *   vf_dot_bf16(a, b, c)    c + a.first * b.first + a.second * b.second per lane
 *   vf_pair_bf16(a, b)      2 * VL floats rounded to bf16: a's in the low half
 *   vf_zip_bf16(a, b, *lo, *hi)  rows of bf16 to pairs: lo holds the pairs
 *                           (a0 b0) (a1 b1) ..., hi those from a[VL] on
 *   vf_set1_two(p)          the two floats at p, alternating
 *   vf_zip(a, b, *lo, *hi)  lo holds a0 b0 a1 b1 ..., hi those from a[VL / 2] on
 *   vf_add_zipped(lo, hi)   a + b, given the results of vf_zip
 */
#ifndef H2O_VEC_H
#define H2O_VEC_H

#include "../expect.h"
#include "../half.h"

#define VEC static inline __attribute__((always_inline))

/* UNROLL stands before a loop of constant length over vectors and unrolls it completely, so that
 * arrays of vectors become registers. ROLLED prevents unrolling where it would need too many. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("nounroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#define ROLLED _Pragma("GCC unroll 1")
#endif

#if defined(H2O_VEC_AVX512)
#include "vec_avx512.h"
#elif defined(H2O_VEC_AVX2)
#include "vec_avx2.h"
#elif defined(H2O_VEC_NEON)
#include "vec_neon.h"
#else
#include "vec_generic.h"
#endif

VEC vf vf_add(vf a, vf b) { return a + b; }
VEC vf vf_sub(vf a, vf b) { return a - b; }
VEC vf vf_mul(vf a, vf b) { return a * b; }
VEC vf vf_div(vf a, vf b) { return a / b; }

/* Whether this level multiplies bf16 without widening it. If it does not, the functions for this
 * exist only to satisfy the compiler: their calls depend on PAIRS. */
#ifdef H2O_DOT_BF16
enum { PAIRS = 1 };
#else
enum { PAIRS = 0 };
VEC vf vf_dot_bf16(vf a, vf b, vf c) { return (void)a, (void)b, c; }
VEC vf vf_pair_bf16(vf a, vf b) { return (void)b, a; }
VEC void vf_zip_bf16(vf a, vf b, vf *lo, vf *hi) { *lo = a, *hi = b; }
#endif

#if !defined(H2O_VEC_AVX512) && !defined(H2O_VEC_AVX2)

/* Conversions for levels with vectors of four floats, since compilers convert single bytes one after
 * the other. Each of these levels defines
 *
 *   vi vu            vectors of four signed and unsigned integers
 *   load_bytes(p)    four bytes, each in the highest quarter of a lane, with zeros below */
VEC vf vf_set1_f16(const void *p) { return vf_set1(load_scalar(p, H2O_F16)); }
VEC vf vf_load_i8(const void *p) { return __builtin_convertvector((vi)load_bytes(p) >> 24, vf); }
/* Adding 1.5 * 2^23 leaves an integer in the lowest bits. */
VEC void vf_store_bytes(void *p, vf x) {
    const vf moved = x + vf_set1(12582912.0f);
    uint8_t bytes[VL];
    for (int i = 0; i < VL; i++) bytes[i] = (uint8_t)float_bits(moved[i]);
    memcpy(p, bytes, sizeof bytes);
}
VEC vf vf_load_u4(const void *p, bool high) {
    const vu bytes = high ? load_bytes(p) : load_bytes(p) << 4;
    return __builtin_convertvector((vi)(bytes >> 28), vf);
}

VEC void widen_u4(const char *p, char *to) {
    vu halves;
    memcpy(&halves, p, sizeof halves);
    const vu low = (halves << 4 & 0xf0f0f0f0) ^ 0x88888888,
             high = (halves & 0xf0f0f0f0) ^ 0x88888888;
    memcpy(to, &low, sizeof low);
    memcpy(to + sizeof low, &high, sizeof high);
}

#else

VEC void widen_u4(const char *p, char *to) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)),
                  highs = _mm256_sllv_epi32(twice, _mm256_setr_epi32(4, 4, 4, 4, 0, 0, 0, 0)),
                  bytes = _mm256_and_si256(highs, _mm256_set1_epi8((char)0xf0));
    _mm256_storeu_si256((__m256i *)to, _mm256_xor_si256(bytes, _mm256_set1_epi8((char)0x88)));
}
#endif

/* ---- 16-bit elements ----------------------------------------------------- */

#ifndef H2O_VEC_AVX512
VEC vh vh_load_n(const void *p, int n) {
    uint16_t h[VL] = {0};
    memcpy(h, p, 2 * (size_t)(n < 0 ? 0 : n < VL ? n : VL));
    return vh_load(h);
}
#endif

VEC vf vf_load_f16(const void *p) { return widen_f16(vh_load(p)); }
VEC vf vf_load_bf16(const void *p) { return widen_bf16(vh_load(p)); }
VEC vf vf_load_f16_n(const void *p, int n) { return widen_f16(vh_load_n(p, n)); }
VEC vf vf_load_bf16_n(const void *p, int n) { return widen_bf16(vh_load_n(p, n)); }

#if defined(H2O_VEC_AVX2) || defined(H2O_VEC_NEON)
VEC void vh_store_n(void *p, vh x, int n) {
    uint16_t h[VL];
    vh_store(h, x);
    memcpy(p, h, 2 * (size_t)(n < 0 ? 0 : n < VL ? n : VL));
}
#endif

#if defined(H2O_VEC_AVX2) || defined(H2O_VEC_NEON) || defined(H2O_VEC_AVX512)
VEC void vf_store_f16(void *p, vf x) { vh_store(p, narrow_f16(x)); }
VEC void vf_store_bf16(void *p, vf x) { vh_store(p, narrow_bf16(x)); }
VEC void vf_store_f16_n(void *p, vf x, int n) { vh_store_n(p, narrow_f16(x), n); }
VEC void vf_store_bf16_n(void *p, vf x, int n) { vh_store_n(p, narrow_bf16(x), n); }
#endif

#ifndef H2O_VEC_AVX512
VEC vf vf_scale2_from(vf least, vf x, vf i) {
    return vf_less(i, least, vf_zero(), vf_scale2(x, i));
}

VEC void vf_load_u4_as(const void *p, vf scale, vf minimum, vf *low, vf *high) {
    *low = vf_fma(vf_load_u4(p, false), scale, minimum);
    *high = vf_fma(vf_load_u4(p, true), scale, minimum);
}
#endif

/* ---- Elements of any dtype --------------------------------------------- */

/* p points at the element. If the type is a constant, the choice is made at compile time. */
VEC vf vf_load_as(const void *p, h2o_dtype type) {
    if (type == H2O_F32) return vf_load(p);
    return type == H2O_F16 ? vf_load_f16(p) : vf_load_bf16(p);
}

VEC vf vf_load_as_n(const void *p, h2o_dtype type, int n) {
    if (type == H2O_F32) return vf_load_n(p, n);
    return type == H2O_F16 ? vf_load_f16_n(p, n) : vf_load_bf16_n(p, n);
}

VEC void vf_store_as_n(void *p, h2o_dtype type, vf x, int n) {
    if (type == H2O_F32)
        vf_store_n(p, x, n);
    else if (type == H2O_F16)
        vf_store_f16_n(p, x, n);
    else
        vf_store_bf16_n(p, x, n);
}

/* ---- Functions --------------------------------------------------------- */

/* 2^x for x <= 127; NaN stays NaN. Below -125.5, and for -infinity, exactly 0, so that the result is
 * never subnormal; 2^0 is exactly 1.
 * A polynomial of degree 5 on [-1/2, 1/2], fitted for the smallest relative error with the constant
 * term fixed at 1. The error is 9e-8, with rounding 1.7e-7. */
VEC vf vf_exp2(vf x) {
    vf f;
    const vf integer = vf_exp2_parts(x, &f);
    vf p = vf_set1(1.3264727e-3f);
    p = vf_fma(p, f, vf_set1(9.671513e-3f));
    p = vf_fma(p, f, vf_set1(5.5507336e-2f));
    p = vf_fma(p, f, vf_set1(2.4022242e-1f));
    p = vf_fma(p, f, vf_set1(6.93147e-1f));
    p = vf_fma(p, f, vf_set1(1.0f));
    return vf_scale2_from(vf_set1(-125.0f), p, integer);
}

/* tanh(x) with a relative error of about 2e-7: an odd polynomial near 0, where the formula with the
 * exponential would cancel; elsewhere (1 - t) / (1 + t) with t = e^(-2|x|). */
VEC vf vf_tanh(vf x) {
    const vf size = vf_abs(x), z = vf_mul(x, x);
    vf p = vf_set1(-5.70499e-3f);
    p = vf_fma(p, z, vf_set1(2.063909e-2f));
    p = vf_fma(p, z, vf_set1(-5.373971e-2f));
    p = vf_fma(p, z, vf_set1(1.3331442e-1f));
    p = vf_fma(p, z, vf_set1(-3.3333282e-1f));
    p = vf_fma(vf_mul(p, z), x, x);
    const vf t = vf_exp2(vf_mul(size, vf_set1(-2.88539008f)));
    const vf one = vf_set1(1.0f);
    const vf q = vf_div(vf_sub(one, t), vf_add(one, t));
    return vf_less(size, vf_set1(0.625f), p, vf_copysign(q, x));
}

#endif
