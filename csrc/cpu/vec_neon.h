/* vec_neon.h - the vector layer (vec.h) with vectors of four floats: aarch64 Advanced SIMD,
 * and with H2O_DOT_BF16 dot products of bf16 pairs (FEAT_BF16). */
#ifndef H2O_VEC_NEON_H
#define H2O_VEC_NEON_H

#include <arm_neon.h>

enum { VL = 4, REGISTERS = 32 };
#define TILE_ROWS 4
#define TILE_VECTORS 4

typedef float32x4_t vf;
typedef uint16x4_t vh;
typedef int32x4_t vi;
typedef uint32x4_t vu;

VEC vf vf_set1(float x) { return vdupq_n_f32(x); }
VEC vf vf_zero(void) { return vdupq_n_f32(0.0f); }
VEC vf vf_load(const void *p) { return vld1q_f32(p); }
VEC void vf_store(void *p, vf x) { vst1q_f32(p, x); }

VEC vf vf_load_n(const void *p, int n) {
    float x[VL] = {0};
    memcpy(x, p, sizeof *x * (size_t)(n < 0 ? 0 : n < VL ? n : VL));
    return vf_load(x);
}

VEC void vf_store_n(void *p, vf x, int n) {
    float lanes[VL];
    vf_store(lanes, x);
    memcpy(p, lanes, sizeof *lanes * (size_t)(n < 0 ? 0 : n < VL ? n : VL));
}

VEC vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
/* Not vmaxq_f32, which returns NaN if either is NaN. */
VEC vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
VEC vf vf_abs(vf x) { return vabsq_f32(x); }

VEC vf vf_copysign(vf magnitude, vf sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}

VEC vf vf_less(vf a, vf b, vf yes, vf no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
VEC bool vf_any_greater(vf a, vf b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }

VEC vf vf_first_n(int n, vf a, vf b) {
    const int32x4_t lane = {0, 1, 2, 3};
    return vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n)), a, b);
}

VEC float vf_hsum(vf x) { return vaddvq_f32(x); }
VEC float vf_hmax(vf x) { return vmaxnmvq_f32(x); }

VEC vf vf_exp2_parts(vf x, vf *f) {
    const vf integer = vrndnq_f32(x);
    *f = vsubq_f32(x, integer);
    return integer;
}

VEC vf vf_scale2(vf x, vf i) {
    const int32x4_t shift = vshlq_n_s32(vcvtq_s32_f32(i), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), shift));
}

VEC vh vh_load(const void *p) { return vld1_u16(p); }
VEC void vh_store(void *p, vh x) { vst1_u16(p, x); }
VEC vf widen_f16(vh h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
VEC vf widen_bf16(vh h) { return vreinterpretq_f32_u32(vshll_n_u16(h, 16)); }
VEC vh narrow_f16(vf x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

#ifdef H2O_DOT_BF16
VEC vh narrow_bf16(vf x) { return vreinterpret_u16_bf16(vcvt_bf16_f32(x)); }
#else
VEC vh narrow_bf16(vf x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t number = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), number, nan), 16);
}
#endif

VEC vu load_bytes(const void *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    const uint16x8_t pairs = vshll_n_u8(vcreate_u8(word), 8);
    return vshll_n_u16(vget_low_u16(pairs), 16);
}

VEC vf vf_swap(vf x, const int h) { return h == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2); }

VEC void vf_transpose(vf v[VL]) {
    const float32x4x2_t a = vtrnq_f32(v[0], v[1]), b = vtrnq_f32(v[2], v[3]);
    v[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    v[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    v[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    v[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

VEC vf vf_hsums(const vf v[VL]) {
    return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
}

#ifdef H2O_DOT_BF16

/* Sums are rounded to odd, and subnormal numbers count as 0. */
VEC vf vf_dot_bf16(vf a, vf b, vf c) {
    return vbfdotq_f32(c, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}

VEC vf vf_pair_bf16(vf a, vf b) {
    return vreinterpretq_f32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b));
}

VEC void vf_zip_bf16(vf a, vf b, vf *lo, vf *hi) {
    const uint16x8_t x = vreinterpretq_u16_f32(a), y = vreinterpretq_u16_f32(b);
    *lo = vreinterpretq_f32_u16(vzip1q_u16(x, y));
    *hi = vreinterpretq_f32_u16(vzip2q_u16(x, y));
}

VEC vf vf_set1_two(const void *p) { return vreinterpretq_f32_u64(vld1q_dup_u64(p)); }

VEC void vf_zip(vf a, vf b, vf *lo, vf *hi) {
    *lo = vzip1q_f32(a, b);
    *hi = vzip2q_f32(a, b);
}

VEC vf vf_add_zipped(vf lo, vf hi) { return vpaddq_f32(lo, hi); }

#endif

#endif
