/* vec_four.h - functions of the vector layer (vec.h) that levels with vectors of four floats
 * (generic, NEON) share: conversions of f16, int8 and packed 4-bit elements. Each of these levels
 * defines
 *
 *   vi vu            vectors of four signed and unsigned integers
 *   load_bytes(p)    four bytes, each in the highest quarter of a lane, with zeros below
 *
 * since compilers convert single bytes one after the other. */
#ifndef H2O_VEC_FOUR_H
#define H2O_VEC_FOUR_H

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

#endif
