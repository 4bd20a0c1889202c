/* vec_bytes_avx512.h - products of bytes (vec_bytes.h) with AVX-512 VNNI. */
#ifndef H2O_VEC_BYTES_AVX512_H
#define H2O_VEC_BYTES_AVX512_H

typedef __m512i vb;

#ifdef H2O_TILE_BYTES
enum { KEY_BIAS = 0, VALUE_BIAS = 0 };
#else
enum { KEY_BIAS = 128, VALUE_BIAS = 0 };
#endif

VEC vb vb_zero(void) { return _mm512_setzero_si512(); }
VEC vb vb_load(const void *p) { return _mm512_loadu_si512(p); }
VEC vb vb_add(vb a, vb b) { return _mm512_add_epi32(a, b); }
VEC vb vb_set1(int32_t word) { return _mm512_set1_epi32(word); }
/* The instruction multiplies unsigned bytes by signed ones. */
VEC vb vb_key(vb x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }
VEC vb vb_dot_key(vb c, vb k, vb s) { return _mm512_dpbusd_epi32(c, k, s); }
VEC vb vb_dot_value(vb c, const uint32_t limbs[2], int limb, vb v) {
    return _mm512_dpbusd_epi32(c, vb_set1((int32_t)limbs[limb]), v);
}
VEC vb vb_held(vb x) {
    __asm__("" : "+v"(x));
    return x;
}
VEC vb vb_number(vb hi, vb lo) { return vb_add(_mm512_slli_epi32(hi, 8), lo); }
VEC vb vb_high(vb x) { return _mm512_srai_epi32(x, 8); }
VEC vb vb_rounded(vf x) { return _mm512_cvtps_epi32(x); }
VEC vf vb_floats(vb x) { return _mm512_cvtepi32_ps(x); }
VEC void vb_store(void *p, vb x) { _mm512_storeu_si512(p, x); }
VEC void vb_store_bytes(void *p, vb x) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(x)); }

VEC void vb_store_limbs(void *p, vb x, vb y) {
    const vb order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
    vb_store(p, _mm512_shuffle_epi8(_mm512_packus_epi32(x, y), order));
}

VEC void vb_zip(vb a, vb b, vb *lo, vb *hi) {
    *lo = _mm512_unpacklo_epi32(a, b);
    *hi = _mm512_unpackhi_epi32(a, b);
}

VEC vb vb_hsum_pairs(vb a, vb b) {
    return vb_add(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

VEC vb vb_even_quarters(vb a, vb b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
VEC vb vb_odd_quarters(vb a, vb b) { return _mm512_shuffle_i32x4(a, b, 0xdd); }

VEC vb vb_hsum_quarters(const vb v[4]) {
    vb half[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
        half[i] = vb_add(vb_even_quarters(v[2 * i], v[2 * i + 1]),
                         vb_odd_quarters(v[2 * i], v[2 * i + 1]));
    }
    return vb_add(vb_even_quarters(half[0], half[1]), vb_odd_quarters(half[0], half[1]));
}

/* Transposes within quarters, and then the quarters by words. */
VEC void vb_transpose(vb x[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]),
                  c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm512_permutexvar_epi32(order, _mm512_unpacklo_epi64(a, c));
    x[1] = _mm512_permutexvar_epi32(order, _mm512_unpackhi_epi64(a, c));
    x[2] = _mm512_permutexvar_epi32(order, _mm512_unpacklo_epi64(b, d));
    x[3] = _mm512_permutexvar_epi32(order, _mm512_unpackhi_epi64(b, d));
}

/* The n-th quarter of the lanes of o[j] has columns 16 n + 4 j to 16 n + 4 j + 3. */
VEC void vb_interleave(const char *const p[4], vb o[4]) {
    const __m512i r[4] = {vb_load(p[0]), vb_load(p[1]), vb_load(p[2]), vb_load(p[3])};
    const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]),
                  c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
    o[0] = _mm512_unpacklo_epi16(a, c);
    o[1] = _mm512_unpackhi_epi16(a, c);
    o[2] = _mm512_unpacklo_epi16(b, d);
    o[3] = _mm512_unpackhi_epi16(b, d);
}

/* Four rows of a group fill a vector: its words are transposed, then the bytes of four words. */
VEC void vb_interleave_u4(const char *const p[4], vb o[4]) {
    const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                  bytes = _mm512_broadcast_i32x4(
                      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)),
                  low = _mm512_set1_epi8(15);
    UNROLL
    for (int i = 0; i < 2; i++) {
        __m128i r[4];
        UNROLL
        for (int k = 0; k < 4; k++) r[k] = _mm_loadu_si128((const __m128i *)(p[k] + 16 * i));
        __m512i x = _mm512_inserti32x4(_mm512_castsi128_si512(r[0]), r[1], 1);
        x = _mm512_inserti32x4(_mm512_inserti32x4(x, r[2], 2), r[3], 3);
        x = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, x), bytes);
        o[2 * i] = _mm512_and_si512(x, low);
        o[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi32(x, 4), low);
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

/* From registers: loading a vector from f16 that were just stored one by one would stall. */
VEC vf vf_from_f16(const uint16_t h[VL]) {
#define FOUR(i) (short)h[i], (short)h[i + 1], (short)h[i + 2], (short)h[i + 3]
    return _mm512_cvtph_ps(_mm256_setr_epi16(FOUR(0), FOUR(4), FOUR(8), FOUR(12)));
#undef FOUR
}

#ifdef H2O_TILE_BYTES
VEC void vb_zip_words(vb a, vb b, vb *lo, vb *hi) {
    *lo = _mm512_unpacklo_epi16(a, b);
    *hi = _mm512_unpackhi_epi16(a, b);
}

VEC void vb_zip_quarters(vb a, vb b, vb *lo, vb *hi) {
    const vb first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
             second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    *lo = _mm512_permutex2var_epi64(a, first, b);
    *hi = _mm512_permutex2var_epi64(a, second, b);
}

/* Gathers words that end with the f16, since a row may end there. */
VEC vf vf_gather_f16(const char *first, int64_t stride) {
    const vb lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vb at = _mm512_mullo_epi32(lane, vb_set1((int32_t)stride));
    const vb words = _mm512_i32gather_epi32(at, first - 2, 1);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
}
#endif

VEC vf vf_load_pairs(const char *const p[4]) {
    const __m128i a = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)p[0]),
                                         _mm_loadl_epi64((const __m128i *)p[1])),
                  b = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)p[2]),
                                         _mm_loadl_epi64((const __m128i *)p[3]));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1));
}

/* Transposes within quarters, and then the quarters by words. */
VEC void vf_transpose_pairs(vf x[4]) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const vf a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]),
             c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    x[0] = _mm512_permutexvar_ps(order, _mm512_shuffle_ps(a, c, 0x44));
    x[1] = _mm512_permutexvar_ps(order, _mm512_shuffle_ps(a, c, 0xee));
    x[2] = _mm512_permutexvar_ps(order, _mm512_shuffle_ps(b, d, 0x44));
    x[3] = _mm512_permutexvar_ps(order, _mm512_shuffle_ps(b, d, 0xee));
}

#endif
