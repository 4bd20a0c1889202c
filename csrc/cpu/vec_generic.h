/* vec_generic.h - the vector layer (vec.h) with vectors of four floats in the compilers' vector
 * extension: SSE2 on x86-64, elsewhere whatever the compiler generates. */
#ifndef H2O_VEC_GENERIC_H
#define H2O_VEC_GENERIC_H

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { VL = 4, REGISTERS = 16 };
#define TILE_ROWS 4
#define TILE_VECTORS 2

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
typedef vu vh;

VEC vf vf_set1(float x) { return (vf){x, x, x, x}; }
VEC vf vf_zero(void) { return vf_set1(0.0f); }

VEC vf vf_load(const void *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

VEC void vf_store(void *p, vf x) { memcpy(p, &x, sizeof x); }

VEC vf vf_load_n(const void *p, int n) {
    if (n >= VL) return vf_load(p);
    float x[VL] = {0};
    for (int i = 0; i < n; i++) memcpy(x + i, (const float *)p + i, sizeof *x);
    return vf_load(x);
}

VEC void vf_store_n(void *p, vf x, int n) {
    for (int i = 0; i < (n < VL ? n : VL); i++) {
        const float lane = x[i];
        memcpy((float *)p + i, &lane, sizeof lane);
    }
}

VEC vf vf_fma(vf a, vf b, vf c) { return a * b + c; }

VEC vf vf_choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

VEC vf vf_max(vf a, vf b) { return vf_choose(a > b, a, b); }
VEC vf vf_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

VEC vf vf_copysign(vf magnitude, vf sign) {
    return (vf)(((vi)magnitude & 0x7fffffff) | ((vi)sign & INT32_MIN));
}

VEC vf vf_less(vf a, vf b, vf yes, vf no) { return vf_choose(a < b, yes, no); }

VEC bool vf_any_greater(vf a, vf b) {
    const vi m = a > b;
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}

VEC vf vf_first_n(int n, vf a, vf b) {
    return vf_choose((vi){0, 1, 2, 3} < (vi){n, n, n, n}, a, b);
}

VEC float vf_hsum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }

VEC float vf_hmax(vf x) {
    const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}

/* Adding 1.5 * 2^23 leaves no bits for a fraction: the processor rounds. */
VEC vf vf_exp2_parts(vf x, vf *f) {
    const vf integer = x + 12582912.0f - 12582912.0f;
    *f = x - integer;
    return integer;
}

/* The same sum has the integer in its lowest bits; for NaN these bits may be anything. */
VEC vf vf_scale2(vf x, vf i) {
    const vu bits = (vu)(i + 12582912.0f) << 23;
    return (vf)((vu)x + (bits & (vu)(i == i)));
}

/* Four 16-bit values, each in the high half of a lane. */
VEC vh vh_load(const void *p) {
#ifdef __SSE2__
    return (vu)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(p));
#else
    uint16_t h[VL];
    memcpy(h, p, sizeof h);
    return (vu){h[0], h[1], h[2], h[3]} << 16;
#endif
}

VEC vu load_bytes(const void *p) {
#ifdef __SSE2__
    int32_t word;
    memcpy(&word, p, sizeof word);
    const __m128i pairs = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_cvtsi32_si128(word));
    return (vu)_mm_unpacklo_epi16(_mm_setzero_si128(), pairs);
#else
    uint8_t b[VL];
    memcpy(b, p, sizeof b);
    return (vu){b[0], b[1], b[2], b[3]} << 24;
#endif
}

/* float_from_f16 of half.h, all three cases at once: numbers get the other bias, infinities and NaN
 * all exponent bits; subnormals are fraction * 2^-24. */
VEC vf widen_f16(vh h) {
    const vu rest = (h & 0x7fff0000u) >> 3;
    const vf tiny = __builtin_convertvector((vi)(rest >> 13), vf) * 0x1p-24f;
    const vu number = rest + ((vu)(rest >= 0x0f800000u) & 0x38000000u) + 0x38000000u;
    const vf size = vf_choose((vi)(rest < 0x00800000u), tiny, (vf)number);
    return (vf)((vu)size | (h & 0x80000000u));
}

VEC vf widen_bf16(vh h) { return (vf)h; }

VEC void vf_store_f16_n(void *p, vf x, int n) {
    for (int i = 0; i < (n < VL ? n : VL); i++) store_scalar((char *)p + 2 * i, H2O_F16, x[i]);
}

VEC void vf_store_bf16_n(void *p, vf x, int n) {
    for (int i = 0; i < (n < VL ? n : VL); i++) store_scalar((char *)p + 2 * i, H2O_BF16, x[i]);
}

VEC void vf_store_f16(void *p, vf x) { vf_store_f16_n(p, x, VL); }
VEC void vf_store_bf16(void *p, vf x) { vf_store_bf16_n(p, x, VL); }

VEC vf vf_swap(vf x, const int h) {
    return h == 1 ? (vf){x[1], x[0], x[3], x[2]} : (vf){x[2], x[3], x[0], x[1]};
}

VEC void vf_transpose(vf v[VL]) {
    const vf a = v[0], b = v[1], c = v[2], d = v[3];
    v[0] = (vf){a[0], b[0], c[0], d[0]};
    v[1] = (vf){a[1], b[1], c[1], d[1]};
    v[2] = (vf){a[2], b[2], c[2], d[2]};
    v[3] = (vf){a[3], b[3], c[3], d[3]};
}

VEC vf vf_hsums(const vf v[VL]) {
    vf t[VL] = {v[0], v[1], v[2], v[3]};
    vf_transpose(t);
    return (t[0] + t[2]) + (t[1] + t[3]);
}

#endif
