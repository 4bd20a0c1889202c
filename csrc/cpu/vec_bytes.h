/* vec_bytes.h - products of bytes as they are stored, where the level has them (H2O_DOT_BYTES):
 * AVX-512 VNNI. A vb carries 4 * VL bytes, or VL whole numbers of 32 bits, whose sums wrap.
 *
 *   vb_zero vb_load         and vb_set1(word), a word's four bytes in all lanes
 *   vb_pair(p)              two words at p: the first in the lower half of the lanes, the second
 *   vb_unsigned(x)          signed bytes plus 128
 *   vb_dot(c, u, s)         c + the sum of four products of unsigned bytes and signed ones per lane
 *   vb_add vb_times_256 vb_high(x)   x / 256 towards -infinity
 *   vb_hsums(v)             lane i is the sum over the lanes of v[i], i < VL
 *   vb_rounded(x) vb_floats(x)       floats to nearest whole numbers, and whole numbers as floats
 *   vb_store_bytes(p, x)    the low bytes of the VL numbers
 *   vb_interleave(p, o)  four rows of 4 * VL bytes from p[] on: each lane of o[] has the four
 *                           rows' bytes of a column, in an order of columns that vb_columns undoes
 *   vb_interleave_u4(p, o)  the same of two groups of elements in halves of bytes
 *   vb_columns(x)           x[4] sums of such lanes: x[j] the columns from VL * j on
 *   vf_load_pairs(p)        of four rows scale and minimum of two groups, f16, as floats: a row's
 *                           in four lanes side by side
 *   vf_rows(w)              w[4], the first four lanes of it: those of a row have the row's
 *   vb_store_limbs(hi, lo, x)  of such lanes the numbers under scales, by groups two words: the
 *                           four rows' high bytes and their low ones
 */
#ifndef H2O_VEC_BYTES_H
#define H2O_VEC_BYTES_H

#include "vec.h"

#ifdef H2O_DOT_BYTES

typedef __m512i vb;

VEC vb vb_zero(void) { return _mm512_setzero_si512(); }
VEC vb vb_load(const void *p) { return _mm512_loadu_si512(p); }
VEC vb vb_add(vb a, vb b) { return _mm512_add_epi32(a, b); }
VEC vb vb_set1(int32_t word) { return _mm512_set1_epi32(word); }
VEC vb vb_unsigned(vb x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }
VEC vb vb_dot(vb c, vb u, vb s) { return _mm512_dpbusd_epi32(c, u, s); }
VEC vb vb_times_256(vb x) { return _mm512_slli_epi32(x, 8); }
VEC vb vb_high(vb x) { return _mm512_srai_epi32(x, 8); }
VEC vb vb_rounded(vf x) { return _mm512_cvtps_epi32(x); }
VEC vf vb_floats(vb x) { return _mm512_cvtepi32_ps(x); }
VEC void vb_store(void *p, vb x) { _mm512_storeu_si512(p, x); }
VEC void vb_store_bytes(void *p, vb x) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(x)); }

VEC vb vb_pair(const void *p) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutexvar_epi32(lanes, _mm512_castsi128_si512(_mm_loadl_epi64(p)));
}

/* As vf_hsums. */
VEC vb vb_hsums(const vb v[VL]) {
    vb a[VL / 2], b[VL / 4], c[VL / 8];
    UNROLL
    for (int i = 0; i < VL / 2; i++) {
        a[i] = vb_add(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                      _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    }
    UNROLL
    for (int i = 0; i < VL / 4; i++) {
        b[i] = vb_add(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]),
                      _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    }
    UNROLL
    for (int i = 0; i < VL / 8; i++) {
        c[i] = vb_add(_mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0x88),
                      _mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0xdd));
    }
    return vb_add(_mm512_shuffle_i32x4(c[0], c[1], 0x88), _mm512_shuffle_i32x4(c[0], c[1], 0xdd));
}

/* o[j] has, in the n-th quarter of its lanes, the columns 16 n + 4 j and the three behind. */
VEC void vb_interleave(const char *const p[4], vb o[4]) {
    const __m512i r[4] = {vb_load(p[0]), vb_load(p[1]), vb_load(p[2]), vb_load(p[3])};
    const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]),
                  c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
    o[0] = _mm512_unpacklo_epi16(a, c);
    o[1] = _mm512_unpackhi_epi16(a, c);
    o[2] = _mm512_unpacklo_epi16(b, d);
    o[3] = _mm512_unpackhi_epi16(b, d);
}

/* A group's bytes become two quarters: their low halves, and their high ones. */
VEC void vb_interleave_u4(const char *const p[4], vb o[4]) {
    const __m512i twice = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3),
                  shift = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4), low = _mm512_set1_epi8(15);
    __m256i r[4];
    UNROLL
    for (int i = 0; i < 4; i++) r[i] = _mm256_loadu_si256((const __m256i *)p[i]);
    const __m256i a = _mm256_unpacklo_epi8(r[0], r[1]), b = _mm256_unpackhi_epi8(r[0], r[1]),
                  c = _mm256_unpacklo_epi8(r[2], r[3]), d = _mm256_unpackhi_epi8(r[2], r[3]);
    const __m256i bytes[4] = {_mm256_unpacklo_epi16(a, c), _mm256_unpackhi_epi16(a, c),
                              _mm256_unpacklo_epi16(b, d), _mm256_unpackhi_epi16(b, d)};
    UNROLL
    for (int j = 0; j < 4; j++) {
        const __m512i both = _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(bytes[j]));
        o[j] = _mm512_and_si512(_mm512_srlv_epi64(both, shift), low);
    }
}

VEC void vb_columns(vb x[4]) {
    const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44),
                  b = _mm512_shuffle_i32x4(x[0], x[1], 0xee),
                  c = _mm512_shuffle_i32x4(x[2], x[3], 0x44),
                  d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    x[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    x[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    x[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

VEC vf vf_load_pairs(const char *const p[4]) {
    const __m128i a = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)p[0]),
                                         _mm_loadl_epi64((const __m128i *)p[1])),
                  b = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)p[2]),
                                         _mm_loadl_epi64((const __m128i *)p[3]));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1));
}

VEC vf vf_rows(const float *w) {
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_loadu_ps(w)));
}

VEC void vb_store_limbs(void *hi, void *lo, vb x) {
    const __m512i bytes = _mm512_set1_epi32(0x08000901), /* of a row: both groups' high, low */
        rows = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    const __m128i four =
        _mm512_castsi512_si128(_mm512_permutexvar_epi32(rows, _mm512_shuffle_epi8(x, bytes)));
    const __m128i words =
        _mm_shuffle_epi8(four, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    _mm_storel_epi64(hi, words);
    _mm_storeh_pd(lo, _mm_castsi128_pd(words));
}

#endif
#endif
