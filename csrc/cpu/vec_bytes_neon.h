/* vec_bytes_neon.h - products of bytes (vec_bytes.h) with aarch64's FEAT_DotProd (SDOT and UDOT);
 * with H2O_MATRIX_BYTES also with FEAT_I8MM (SMMLA, and SUDOT, which needs no bias). */
#ifndef H2O_VEC_BYTES_NEON_H
#define H2O_VEC_BYTES_NEON_H

typedef int32x4_t vb;

VEC int8x16_t signed_bytes(vb x) { return vreinterpretq_s8_s32(x); }
VEC uint8x16_t unsigned_bytes(vb x) { return vreinterpretq_u8_s32(x); }

VEC vb vb_zero(void) { return vdupq_n_s32(0); }
VEC vb vb_load(const void *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
VEC vb vb_add(vb a, vb b) { return vaddq_s32(a, b); }
VEC vb vb_set1(int32_t word) { return vdupq_n_s32(word); }
VEC vb vb_held(vb x) {
    __asm__("" : "+w"(x));
    return x;
}
VEC vb vb_number(vb hi, vb lo) { return vaddq_s32(vshlq_n_s32(hi, 8), lo); }
VEC vb vb_high(vb x) { return vshrq_n_s32(x, 8); }
VEC vb vb_rounded(vf x) { return vcvtnq_s32_f32(x); }
VEC vf vb_floats(vb x) { return vcvtq_f32_s32(x); }
VEC void vb_store(void *p, vb x) { vst1q_u8(p, unsigned_bytes(x)); }

VEC void vb_store_bytes(void *p, vb x) {
    const int16x4_t halves = vmovn_s32(x);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
    const uint32_t word = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
    memcpy(p, &word, sizeof word);
}

VEC void vb_store_limbs(void *p, vb x, vb y) {
    const uint16x8_t both = vuzp1q_u16(vreinterpretq_u16_s32(x), vreinterpretq_u16_s32(y));
    const uint32x2x2_t limbs =
        vzip_u32(vreinterpret_u32_u8(vshrn_n_u16(both, 8)), vreinterpret_u32_u8(vmovn_u16(both)));
    vst1q_u32(p, vcombine_u32(limbs.val[0], limbs.val[1]));
}

VEC vb vb_key(vb x) { return x; }

#ifdef H2O_MATRIX_BYTES

enum { KEY_BIAS = 0, VALUE_BIAS = 0 };

VEC vb vb_dot_key(vb c, vb k, vb s) { return vmmlaq_s32(c, signed_bytes(k), signed_bytes(s)); }
VEC vb vb_dot_value(vb c, const uint32_t limbs[2], int limb, vb v) {
    const uint8x8_t both = vreinterpret_u8_u32(vld1_u32(limbs));
    return limb == 0 ? vsudotq_lane_s32(c, signed_bytes(v), both, 0)
                     : vsudotq_lane_s32(c, signed_bytes(v), both, 1);
}

VEC vb vb_numbers(vb a, vb b) { return vb_number(vuzp1q_s32(a, b), vuzp2q_s32(a, b)); }

VEC void vb_zip(vb a, vb b, vb *lo, vb *hi) {
    const int64x2_t x = vreinterpretq_s64_s32(a), y = vreinterpretq_s64_s32(b);
    *lo = vreinterpretq_s32_s64(vzip1q_s64(x, y));
    *hi = vreinterpretq_s32_s64(vzip2q_s64(x, y));
}

#else

enum { KEY_BIAS = 0, VALUE_BIAS = 128 };

VEC vb vb_dot_key(vb c, vb k, vb s) { return vdotq_s32(c, signed_bytes(k), signed_bytes(s)); }
VEC vb vb_dot_value(vb c, const uint32_t limbs[2], int limb, vb v) {
    const uint8x8_t both = vreinterpret_u8_u32(vld1_u32(limbs));
    const uint32x4_t sum = vreinterpretq_u32_s32(c);
    return vreinterpretq_s32_u32(limb == 0 ? vdotq_lane_u32(sum, unsigned_bytes(v), both, 0)
                                           : vdotq_lane_u32(sum, unsigned_bytes(v), both, 1));
}

VEC void vb_zip(vb a, vb b, vb *lo, vb *hi) {
    *lo = vzip1q_s32(a, b);
    *hi = vzip2q_s32(a, b);
}

#endif

VEC vb vb_hsum_pairs(vb a, vb b) {
    const int64x2_t x = vreinterpretq_s64_s32(a), y = vreinterpretq_s64_s32(b);
    return vb_add(vreinterpretq_s32_s64(vzip1q_s64(x, y)), vreinterpretq_s32_s64(vzip2q_s64(x, y)));
}

VEC vb vb_hsum_quarters(const vb v[4]) { return v[0]; }

/* The bytes of four rows, alternating, from two vectors with those of two rows. */
VEC vb zip_low(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_s32_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
VEC vb zip_high(uint8x16_t a, uint8x16_t b) {
    return vreinterpretq_s32_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}

/* Columns stay in order. */
VEC void vb_interleave(const char *const p[4], vb o[4]) {
    uint8x16_t r[4];
    UNROLL
    for (int k = 0; k < 4; k++) r[k] = vld1q_u8((const uint8_t *)p[k]);
    const uint8x16_t a = vzip1q_u8(r[0], r[1]), b = vzip2q_u8(r[0], r[1]),
                     c = vzip1q_u8(r[2], r[3]), d = vzip2q_u8(r[2], r[3]);
    o[0] = zip_low(a, c);
    o[1] = zip_high(a, c);
    o[2] = zip_low(b, d);
    o[3] = zip_high(b, d);
    if (VALUE_BIAS == 0) return;
    const vb bias = vreinterpretq_s32_u8(vdupq_n_u8(VALUE_BIAS));
    UNROLL
    for (int j = 0; j < 4; j++) o[j] = veorq_s32(o[j], bias);
}

VEC void vb_interleave_u4(const char *const p[4], vb o[4]) {
    uint8x16_t r[4];
    UNROLL
    for (int k = 0; k < 4; k++) {
        r[k] = vcombine_u8(vld1_u8((const uint8_t *)p[k]), vdup_n_u8(0));
    }
    const uint8x16_t a = vzip1q_u8(r[0], r[1]), c = vzip1q_u8(r[2], r[3]);
    UNROLL
    for (int i = 0; i < 2; i++) {
        const uint8x16_t x = unsigned_bytes(i == 0 ? zip_low(a, c) : zip_high(a, c));
        o[2 * i] = vreinterpretq_s32_u8(vandq_u8(x, vdupq_n_u8(15)));
        o[2 * i + 1] = vreinterpretq_s32_u8(vshrq_n_u8(x, 4));
    }
}

VEC void vb_columns(vb x[4]) { (void)x; }

VEC vf vf_from_f16(const uint16_t h[VL]) { return widen_f16((uint16x4_t){h[0], h[1], h[2], h[3]}); }

VEC vf vf_load_pairs(const char *const p[1]) { return vf_load_f16(p[0]); }
VEC void vf_transpose_pairs(vf x[4]) { vf_transpose(x); }

#endif
