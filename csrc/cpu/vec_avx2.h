/* vec_avx2.h - the vector layer (vec.h) with vectors of eight floats: AVX2, FMA, F16C. */
#ifndef H2O_VEC_AVX2_H
#define H2O_VEC_AVX2_H

#include <immintrin.h>

enum { VL = 8, REGISTERS = 16 };
#define TILE_ROWS 6
#define TILE_VECTORS 2

typedef __m256 vf;
typedef __m128i vh;

VEC vf vf_set1(float x) { return _mm256_set1_ps(x); }
VEC vf vf_zero(void) { return _mm256_setzero_ps(); }
VEC vf vf_load(const void *p) { return _mm256_loadu_ps(p); }
VEC void vf_store(void *p, vf x) { _mm256_storeu_ps(p, x); }

/* All ones in the lanes below n. */
VEC __m256i lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

VEC vf vf_load_n(const void *p, int n) { return _mm256_maskload_ps(p, lanes_below(n)); }
VEC void vf_store_n(void *p, vf x, int n) { _mm256_maskstore_ps(p, lanes_below(n), x); }

VEC vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
VEC vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
VEC vf vf_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

VEC vf vf_copysign(vf magnitude, vf sign) {
    const vf bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}

VEC vf vf_less(vf a, vf b, vf yes, vf no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

VEC bool vf_any_greater(vf a, vf b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}

VEC vf vf_first_n(int n, vf a, vf b) {
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(lanes_below(n)));
}

VEC float vf_hsum(vf x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

VEC float vf_hmax(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

VEC vf vf_exp2_parts(vf x, vf *f) {
    const vf integer = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *f = _mm256_sub_ps(x, integer);
    return integer;
}

VEC vf vf_scale2(vf x, vf i) {
    const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(i), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shift));
}

VEC vh vh_load(const void *p) { return _mm_loadu_si128(p); }
VEC void vh_store(void *p, vh x) { _mm_storeu_si128(p, x); }
VEC vf widen_f16(vh h) { return _mm256_cvtph_ps(h); }

VEC vf widen_bf16(vh h) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

VEC vh narrow_f16(vf x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

VEC vh narrow_bf16(vf x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i number = _mm256_add_epi32(bits, half);
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 unordered = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i both = _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(number), _mm256_castsi256_ps(nan), unordered));
    const __m256i high = _mm256_srli_epi32(both, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

VEC vf vf_set1_f16(const void *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
VEC vf vf_load_i8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
}
VEC void vf_store_bytes(void *p, vf x) {
    const __m256i words = _mm256_and_si256(_mm256_cvtps_epi32(x), _mm256_set1_epi32(255));
    const __m128i pairs =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(p, _mm_packus_epi16(pairs, pairs));
}
VEC vf vf_load_u4(const void *p, bool high) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
    const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(high ? _mm256_srli_epi32(bytes, 4) : low);
}

VEC vf vf_swap(vf x, const int h) {
    if (h == 4) return _mm256_permute2f128_ps(x, x, 0x01);
    return h == 2 ? _mm256_permute_ps(x, 0x4e) : _mm256_permute_ps(x, 0xb1);
}

/* Three rounds, which exchange the halves of blocks of 1, 2 and 4 lanes. */
VEC void vf_transpose(vf v[VL]) {
    vf a[VL];
    UNROLL
    for (int i = 0; i < VL; i += 2) {
        a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    vf b[VL];
    UNROLL
    for (int i = 0; i < VL; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

/* The rounds of a transposition, each followed by the additions that it makes possible, which
 * halve the number of vectors. */
VEC vf vf_hsums(const vf v[VL]) {
    vf a[VL / 2], b[VL / 4];
    UNROLL
    for (int i = 0; i < VL / 2; i++) {
        a[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
    UNROLL
    for (int i = 0; i < VL / 4; i++) {
        b[i] = _mm256_add_ps(_mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
                             _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20),
                         _mm256_permute2f128_ps(b[0], b[1], 0x31));
}

#endif
