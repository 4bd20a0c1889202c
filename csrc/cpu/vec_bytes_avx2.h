/* vec_bytes_avx2.h - products of bytes (vec_bytes.h) that are widened to 16-bit words, with AVX2. */
#ifndef H2O_VEC_BYTES_AVX2_H
#define H2O_VEC_BYTES_AVX2_H

typedef __m256i vb;

enum { KEY_BIAS = 0, VALUE_BIAS = 0 };

VEC vb vb_zero(void) { return _mm256_setzero_si256(); }
VEC vb vb_load(const void *p) { return _mm256_loadu_si256(p); }
VEC vb vb_add(vb a, vb b) { return _mm256_add_epi32(a, b); }
VEC vb vb_set1(int32_t word) { return _mm256_set1_epi32(word); }
VEC vb vb_held(vb x) {
    __asm__("" : "+x"(x));
    return x;
}
VEC vb vb_rounded(vf x) { return _mm256_cvtps_epi32(x); }
VEC vf vb_floats(vb x) { return _mm256_cvtepi32_ps(x); }
VEC void vb_store(void *p, vb x) { _mm256_storeu_si256(p, x); }

VEC vb vb_widen(const void *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(p)); }
VEC vb vb_dot_words(vb c, vb a, vb b) { return vb_add(c, _mm256_madd_epi16(a, b)); }
VEC vb vb_dot_value(vb c, const uint32_t pair[1], int limb, vb v) {
    (void)limb;
    return vb_dot_words(c, v, vb_set1((int32_t)pair[0]));
}

VEC void vb_store_words(void *p, vb x) {
    const __m256i quarters = _mm256_packs_epi32(x, x);
    _mm_storeu_si128(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(quarters, 0x08)));
}

VEC void vb_store_limbs(void *p, vb x, vb y) {
    vb_store(p, _mm256_shuffle_epi32(_mm256_packs_epi32(x, y), 0xd8));
}

VEC vb vb_hsums(const vb v[VL]) {
    vb a[VL / 2], b[VL / 4];
    UNROLL
    for (int i = 0; i < VL / 2; i++) {
        a[i] = vb_add(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                      _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    }
    UNROLL
    for (int i = 0; i < VL / 4; i++) {
        b[i] = vb_add(_mm256_unpacklo_epi64(a[2 * i], a[2 * i + 1]),
                      _mm256_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    }
    return vb_add(_mm256_permute2x128_si256(b[0], b[1], 0x20),
                  _mm256_permute2x128_si256(b[0], b[1], 0x31));
}

VEC void vb_regroup(const vb v[4], int count, vb x[4]) {
    if (count == 1) x[0] = v[0];
    if (count == 2) {
        x[0] = _mm256_permute2x128_si256(v[0], v[1], 0x20);
        x[1] = _mm256_permute2x128_si256(v[0], v[1], 0x31);
    }
    if (count < 4) return;
    const vb a = _mm256_unpacklo_epi64(v[0], v[1]), b = _mm256_unpackhi_epi64(v[0], v[1]),
             c = _mm256_unpacklo_epi64(v[2], v[3]), d = _mm256_unpackhi_epi64(v[2], v[3]);
    x[0] = _mm256_permute2x128_si256(a, c, 0x20);
    x[1] = _mm256_permute2x128_si256(b, d, 0x20);
    x[2] = _mm256_permute2x128_si256(a, c, 0x31);
    x[3] = _mm256_permute2x128_si256(b, d, 0x31);
}

/* Columns stay in order. */
VEC void vb_interleave(const char *const p[2], vb o[4]) {
    UNROLL
    for (int i = 0; i < 2; i++) {
        const __m128i a = _mm_loadu_si128((const __m128i *)p[0] + i),
                      b = _mm_loadu_si128((const __m128i *)p[1] + i);
        o[2 * i] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
        o[2 * i + 1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
    }
}

VEC void vb_interleave_u4(const char *const p[2], vb o[4]) {
    const vb low = _mm256_set1_epi16(15);
    UNROLL
    for (int i = 0; i < 2; i++) {
        const __m128i a = _mm_loadl_epi64((const __m128i *)(p[0] + i * VL)),
                      b = _mm_loadl_epi64((const __m128i *)(p[1] + i * VL));
        const vb x = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
        o[2 * i] = _mm256_and_si256(x, low);
        o[2 * i + 1] = _mm256_srli_epi16(x, 4);
    }
}

VEC void vb_columns(vb x[4]) { (void)x; }

/* From registers: loading a vector from f16 that were just stored one by one would stall. */
VEC vf vf_from_f16(const uint16_t h[VL]) {
#define FOUR(i) (short)h[i], (short)h[i + 1], (short)h[i + 2], (short)h[i + 3]
    return _mm256_cvtph_ps(_mm_setr_epi16(FOUR(0), FOUR(4)));
#undef FOUR
}

VEC vf vf_load_pairs(const char *const p[2]) {
    return _mm256_cvtph_ps(_mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)p[0]),
                                              _mm_loadl_epi64((const __m128i *)p[1])));
}

/* Transposes within halves, and then orders the words. */
VEC void vf_transpose_pairs(vf x[4]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const vf a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]),
             c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
    x[0] = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(a, c, 0x44), order);
    x[1] = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(a, c, 0xee), order);
    x[2] = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(b, d, 0x44), order);
    x[3] = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(b, d, 0xee), order);
}

#endif
