/* vec_avx512.h - the vector layer (vec.h) with vectors of sixteen floats: AVX-512 F, BW, VL, DQ,
 * and with H2O_DOT_BF16 dot products of bf16 pairs. */
#ifndef H2O_VEC_AVX512_H
#define H2O_VEC_AVX512_H

#include <immintrin.h>

enum { VL = 16, REGISTERS = 32 };
#define TILE_ROWS 4
#define TILE_VECTORS 4

typedef __m512 vf;
typedef __m256i vh;

VEC __mmask16 lanes_below(int n) {
    return (__mmask16)(n >= VL ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u);
}

VEC vf vf_set1(float x) { return _mm512_set1_ps(x); }
VEC vf vf_zero(void) { return _mm512_setzero_ps(); }
VEC vf vf_load(const void *p) { return _mm512_loadu_ps(p); }
VEC void vf_store(void *p, vf x) { _mm512_storeu_ps(p, x); }
VEC vf vf_load_n(const void *p, int n) { return _mm512_maskz_loadu_ps(lanes_below(n), p); }
VEC void vf_store_n(void *p, vf x, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), x); }

VEC vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
VEC vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
VEC vf vf_abs(vf x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }

VEC vf vf_copysign(vf magnitude, vf sign) {
    const vf bit = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude), _mm512_and_ps(bit, sign));
}

VEC vf vf_less(vf a, vf b, vf yes, vf no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

VEC bool vf_any_greater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
VEC vf vf_first_n(int n, vf a, vf b) { return _mm512_mask_blend_ps(lanes_below(n), b, a); }
VEC float vf_hsum(vf x) { return _mm512_reduce_add_ps(x); }
VEC float vf_hmax(vf x) { return _mm512_reduce_max_ps(x); }

VEC vf vf_exp2_parts(vf x, vf *f) {
    *f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_sub_ps(x, *f);
}

VEC vf vf_scale2_from(vf least, vf x, vf i) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(i, least, _CMP_NLT_UQ), x, i);
}

VEC vh vh_load(const void *p) { return _mm256_loadu_si256(p); }
VEC void vh_store(void *p, vh x) { _mm256_storeu_si256(p, x); }
VEC vh vh_load_n(const void *p, int n) { return _mm256_maskz_loadu_epi16(lanes_below(n), p); }
VEC void vh_store_n(void *p, vh x, int n) { _mm256_mask_storeu_epi16(p, lanes_below(n), x); }
VEC vf widen_f16(vh h) { return _mm512_cvtph_ps(h); }

VEC vf widen_bf16(vh h) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

VEC vh narrow_f16(vf x) {
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

VEC vh narrow_bf16(vf x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i number = _mm512_add_epi32(bits, half);
    const __m512i both = _mm512_mask_or_epi32(number, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16));
}

VEC vf vf_set1_f16(const void *p) {
    int16_t h;
    memcpy(&h, p, sizeof h);
    return _mm512_cvtph_ps(_mm256_set1_epi16(h));
}
VEC vf vf_load_i8(const void *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
}
VEC void vf_store_bytes(void *p, vf x) {
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
VEC vf vf_load_u4(const void *p, bool high) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
    const __m512i low = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
    return _mm512_cvtepi32_ps(high ? _mm512_srli_epi32(bytes, 4) : low);
}

/* q has sixteen possible values and a vector sixteen lanes, so values are looked up in a vector. */
VEC void vf_load_u4_as(const void *p, vf scale, vf minimum, vf *low, vf *high) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p));
    const vf q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vf values = vf_fma(q, scale, minimum);
    *low = _mm512_permutexvar_ps(bytes, values); /* uses the low halves of the lanes' bytes */
    *high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}

VEC vf vf_swap(vf x, const int h) {
    if (h >= 4) {
        return h == 8 ? _mm512_shuffle_f32x4(x, x, 0x4e) : _mm512_shuffle_f32x4(x, x, 0xb1);
    }
    return h == 2 ? _mm512_permute_ps(x, 0x4e) : _mm512_permute_ps(x, 0xb1);
}

/* Four rounds, which exchange the halves of blocks of 1, 2, 4 and 8 lanes. */
VEC void vf_transpose(vf v[VL]) {
    vf a[VL], b[VL];
    UNROLL
    for (int i = 0; i < VL; i += 2) {
        a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    UNROLL
    for (int i = 0; i < VL; i += 4) {
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    UNROLL
    for (int i = 0; i < VL; i += 8) UNROLL
    for (int j = i; j < i + 4; j++) {
        a[j] = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88);
        a[j + 4] = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd);
    }
    UNROLL
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
    }
}

/* The rounds of a transposition, each followed by the additions that it makes possible, which
 * halve the number of vectors. */
VEC vf vf_hsums(const vf v[VL]) {
    vf a[VL / 2], b[VL / 4], c[VL / 8];
    UNROLL
    for (int i = 0; i < VL / 2; i++) {
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
    UNROLL
    for (int i = 0; i < VL / 4; i++) {
        b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    }
    UNROLL
    for (int i = 0; i < VL / 8; i++) {
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                         _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

#ifdef H2O_DOT_BF16

VEC vf vf_dot_bf16(vf a, vf b, vf c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}

VEC vf vf_pair_bf16(vf a, vf b) { return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(b, a)); }

VEC void vf_zip_bf16(vf a, vf b, vf *lo, vf *hi) {
    const __m512i step = _mm512_set1_epi32(0x00200000); /* low halves 0, high halves 32 */
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i twice = _mm512_or_si512(lane, _mm512_slli_epi32(lane, 16));
    const __m512i first = _mm512_add_epi16(twice, step);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    *lo = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, first, y));
    *hi = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, second, y));
}

VEC vf vf_set1_two(const void *p) {
    return _mm512_castsi512_ps(_mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)p)));
}

VEC void vf_zip(vf a, vf b, vf *lo, vf *hi) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *lo = _mm512_permutex2var_ps(a, first, b);
    *hi = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(VL / 2)), b);
}

VEC vf vf_add_zipped(vf lo, vf hi) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_add_ps(_mm512_permutex2var_ps(lo, even, hi), _mm512_permutex2var_ps(lo, odd, hi));
}

#endif

#endif
