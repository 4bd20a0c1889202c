/* stored_rows.h - a store's rows by their type: written from elements, read as vectors of floats.
 *
 * This is the only file of the CPU kernels that knows the layout of each row type (csrc/types.h
 * lists the types, csrc/quantize.h describes quantized rows). For each type it defines
 *
 *   load_T(row, d, n, D)                    n <= VL elements from d on, followed by zeros, without
 *                                           the scale that a whole row has (row_scale)
 *   write_T(row, from, D)                   for quantized types: writes a row from elements
 *
 * and the functions below that take a type choose among these. If the type is a constant, as in
 * the kernels' instances (one for each type, generated from the list H2O_ROWS), the choice is made
 * at compile time. */
#ifndef H2O_STORED_ROWS_H
#define H2O_STORED_ROWS_H

#include "../quantize.h"
#include "hadamard.h"

/* ---- Writing ----------------------------------------------------------- */

static inline void store_f16(char *p, uint16_t h) { memcpy(p, &h, sizeof h); }

/* The integers nearest to x from `low` to `high`. */
VEC vf nearest(vf x, float low, float high) {
    const vf most = vf_set1(high);
    vf fraction;
    x = vf_max(x, vf_set1(low));
    return vf_exp2_parts(vf_less(most, x, most, x), &fraction);
}

/* The integers from `low` to `high` that represent x in a row of Q8 or a group of Q4. */
VEC vf quantize(vf x, vf scale, vf minimum, float low, float high) {
    return nearest(vf_div(vf_sub(x, minimum), scale), low, high);
}

/* Writes the scale of a row, `scales` of which are its largest magnitude, and returns it. */
static float write_scale(char *to, row_ref from, int64_t D, float scales) {
    vf high = vf_zero(), unfinite = vf_zero();
    for (int64_t d = 0; d < D; d += VL) {
        const vf x = row_vector(from, d, D);
        high = vf_max(vf_abs(x), high);
        unfinite = add_unfinite(unfinite, x);
    }
    const quantizer q = row_quantizer(vf_hmax(high), scales, vf_hsum(unfinite) == 0.0f);
    store_f16(to, q.scale);
    return float_from_f16(q.scale);
}

/* Writes the H2O_GROUP numbers from 0 to 15 of a group as halves of bytes. */
VEC void write_halves(char *to, const vf number[H2O_GROUP / VL]) {
    enum { HALF = H2O_GROUP / VL / 2 };
    UNROLL
    for (int i = 0; i < HALF; i++) {
        vf_store_bytes(to + i * VL, vf_fma(number[HALF + i], vf_set1(16.0f), number[i]));
    }
}

static void write_Q8(char *row, row_ref from, int64_t D) {
    const float scale = write_scale(row + D, from, D, Q8_SCALES);
    if (!(scale > 0.0f)) {
        memset(row, 0, (size_t)D);
        return;
    }
    for (int64_t d = 0; d < D; d += VL) {
        const int n = D - d < VL ? (int)(D - d) : VL;
        const vf x = quantize(row_vector(from, d, D), vf_set1(scale), vf_zero(), -127.0f, 127.0f);
        char bytes[VL];
        vf_store_bytes(n < VL ? bytes : row + d, x);
        if (n < VL) memcpy(row + d, bytes, (size_t)n);
    }
}

static void write_S4(char *row, row_ref from, int64_t D) {
    EXPECT(D % H2O_GROUP == 0);
    const float scale = write_scale(row + D / 2, from, D, S4_SCALES);
    if (!(scale > 0.0f)) {
        memset(row, 0, (size_t)D / 2);
        return;
    }
    const vf width = vf_set1(16.0f * scale);
    for (int64_t d = 0; d < D; d += H2O_GROUP) {
        vf number[H2O_GROUP / VL];
        UNROLL
        for (int i = 0; i < H2O_GROUP / VL; i++) {
            const vf x = vf_div(row_vector(from, d + i * VL, D), width);
            number[i] = nearest(vf_add(x, vf_set1(7.5f)), 0.0f, 15.0f);
        }
        write_halves(row + q4_elements(d), number);
    }
}

static void write_Q4(char *row, row_ref from, int64_t D) {
    enum { VECTORS = H2O_GROUP / VL };
    EXPECT(D % H2O_GROUP == 0);
    for (int64_t d = 0; d < D; d += H2O_GROUP) {
        vf x[VECTORS], negative, high, unfinite = vf_zero();
        UNROLL
        for (int i = 0; i < VECTORS; i++) {
            x[i] = row_vector(from, d + i * VL, D);
            unfinite = add_unfinite(unfinite, x[i]);
            negative = i == 0 ? vf_sub(vf_zero(), x[0]) : vf_max(vf_sub(vf_zero(), x[i]), negative);
            high = i == 0 ? x[0] : vf_max(x[i], high);
        }
        const quantizer q =
            q4_quantizer(-vf_hmax(negative), vf_hmax(high), vf_hsum(unfinite) == 0.0f);
        char *const elements = row + q4_elements(d), *const at = row + q4_scale(d, D);
        store_f16(at, q.scale);
        store_f16(at + 2, q.minimum);
        if (!(float_from_f16(q.scale) > 0.0f)) {
            memset(elements, 0, H2O_GROUP / 2);
            continue;
        }
        const vf scale = vf_set1_f16(at), minimum = vf_set1_f16(at + 2);
        UNROLL
        for (int i = 0; i < VECTORS; i++) x[i] = quantize(x[i], scale, minimum, 0.0f, 15.0f);
        write_halves(elements, x);
    }
}

/* Writes a token's key or value [D] to the row of a slot, converted to the store's row type. */
static inline void store_row(char *row, h2o_dtype stored, row_ref from, int64_t D) {
#define WRITE(name, ...)                                                                           \
    case H2O_##name:                                                                               \
        write_##name(row, from, D);                                                                \
        break;
    switch (stored) {
        H2O_QUANTIZED_ROWS(WRITE)
    default:
        row_copy(row, from, D);
    }
#undef WRITE
}

/* ---- Reading ----------------------------------------------------------- */

#define LOAD_FLOATS(name, ...)                                                                     \
    VEC vf load_##name(const char *row, int64_t d, int n, int64_t D) {                             \
        const char *const p = row + d * h2o_dtype_size(H2O_##name);                                \
        (void)D;                                                                                   \
        return n < VL ? vf_load_as_n(p, H2O_##name, n) : vf_load_as(p, H2O_##name);                \
    }
H2O_FLOAT_ROWS(LOAD_FLOATS)
#undef LOAD_FLOATS

VEC vf load_Q8(const char *row, int64_t d, int n, int64_t D) {
    int8_t bytes[VL] = {0};
    (void)D;
    if (n == VL) return vf_load_i8(row + d);
    for (int i = 0; i < VL && i < n; i++) bytes[i] = (int8_t)row[d + i];
    return vf_load_i8(bytes);
}

/* The numbers from 0 to 15 of VL elements from d on, a multiple of VL. */
VEC vf load_halves(const char *row, int64_t d) {
    EXPECT(d % VL == 0);
    return vf_load_u4(row + q4_elements(d) + d % (H2O_GROUP / 2), d % H2O_GROUP >= H2O_GROUP / 2);
}

VEC vf load_S4(const char *row, int64_t d, int n, int64_t D) {
    int8_t bytes[VL] = {0};
    (void)D;
    if (n == VL && d % VL == 0)
        return vf_fma(load_halves(row, d), vf_set1(16.0f), vf_set1(-120.0f));
    for (int i = 0; i < VL && i < n; i++) bytes[i] = s4_byte(row, d + i);
    return vf_load_i8(bytes);
}

VEC vf load_Q4(const char *row, int64_t d, int n, int64_t D) {
    EXPECT(n == VL && d + n <= D);
    const char *const scale = row + q4_scale(d, D);
    return vf_fma(load_halves(row, d), vf_set1_f16(scale), vf_set1_f16(scale + 2));
}

/* n <= VL elements of a row from d on, without the row's scale: load_T. */
VEC vf load_unscaled(const char *row, h2o_dtype type, int64_t d, int n, int64_t D) {
#define LOAD(name, ...)                                                                            \
    if (type == H2O_##name) return load_##name(row, d, n, D);
    H2O_QUANTIZED_ROWS(LOAD)
    H2O_FLOAT_ROWS(LOAD)
#undef LOAD
    return vf_zero();
}

/* The address of the scale of a whole row. */
VEC const char *scale_at(const char *row, h2o_dtype type, int64_t D) {
    return row + h2o_row_bytes(type, D) - 2;
}

/* The scale of a whole row; 1 for types without one. */
VEC float row_scale(const char *row, h2o_dtype type, int64_t D) {
    return h2o_row_has_scale(type) ? load_scalar(scale_at(row, type, D), H2O_F16) : 1.0f;
}

/* Like load_unscaled, with the scale applied. */
VEC vf load_scaled(const char *row, h2o_dtype type, int64_t d, int n, int64_t D) {
    const vf x = load_unscaled(row, type, d, n, D);
    return h2o_row_has_scale(type) ? vf_mul(x, vf_set1_f16(scale_at(row, type, D))) : x;
}

/* VL elements from d on, scaled; 0 from D on. */
VEC vf row_floats(const char *row, h2o_dtype type, int64_t d, int64_t D) {
    return load_scaled(row, type, d, D - d < VL ? (int)(D - d) : VL, D);
}

/* row_floats for a row that is known to be quantized. */
VEC vf quantized_floats(const char *row, h2o_dtype type, int64_t d, int64_t D) {
#define LOAD(name, ...)                                                                            \
    if (type == H2O_##name) return row_floats(row, H2O_##name, d, D);
    H2O_QUANTIZED_ROWS(LOAD)
#undef LOAD
    return vf_zero();
}

/* to [D rounded up to VL] = a stored value, transformed back. */
static void restore_value(const char *row, h2o_dtype type, int64_t D, float *to) {
    for (int64_t d = 0; d < D; d += VL) vf_store(to + d, quantized_floats(row, type, d, D));
    hadamard(to, D);
}

/* to [D rounded up to VL] = a stored key as the model computed it. */
static void restore_key(const char *row, h2o_dtype type, key_change change, int64_t D, float *to) {
    restore_value(row, type, D, to);
    for (int64_t d = 0; change.smoothing.data && d < D; d += VL) {
        vf_store(to + d, vf_mul(vf_load(to + d), row_vector(change.smoothing, d, D)));
    }
    for (int64_t d = 0; d < D; d += VL) {
        vf_store(to + d, vf_add(vf_load(to + d), row_vector(change.offset, d, D)));
    }
}

/* The type as which quantized keys are multiplied. */
VEC h2o_dtype widened_type(h2o_dtype type) { return type == H2O_S4 ? H2O_Q8 : type; }

/* to [D + 2] = a row of S4 as one of Q8. */
VEC void widen_row(const char *row, int64_t D, char *to) {
    for (int64_t d = 0; d < D; d += H2O_GROUP) widen_u4(row + d / 2, to + d);
    memcpy(to + D, row + D / 2, 2);
}

/* ---- Reading several vectors ------------------------------------------- */

VEC void load_each(const char *row, h2o_dtype type, int64_t d, int vectors, int n, int64_t D,
                   vf *x) {
    const vf scale = h2o_row_has_scale(type) ? vf_set1_f16(scale_at(row, type, D)) : vf_zero();
    UNROLL
    for (int j = 0; j < vectors; j++) {
        x[j] = load_unscaled(row, type, d + j * VL, n, D);
        if (h2o_row_has_scale(type)) x[j] = vf_mul(x[j], scale);
    }
}

/* Loads the H2O_GROUP elements from d on, with one load of scale and minimum for all of them. */
VEC void load_q4_group(const char *row, int64_t d, int64_t D, vf x[H2O_GROUP / VL]) {
    enum { HALF = H2O_GROUP / VL / 2 };
    const char *const at = row + q4_scale(d, D);
    const vf scale = vf_set1_f16(at), minimum = vf_set1_f16(at + 2);
    UNROLL
    for (int i = 0; i < HALF; i++) {
        vf_load_u4_as(row + d / 2 + i * VL, scale, minimum, &x[i], &x[HALF + i]);
    }
}

/* Loads x [vectors] from element d on, scaled; the last vector has n elements. */
VEC void load_columns(const char *row, h2o_dtype type, int64_t d, int vectors, int n, int64_t D,
                      vf *x) {
    if (type != H2O_Q4 || vectors * VL % H2O_GROUP != 0) {
        load_each(row, type, d, vectors, n, D, x);
        return;
    }
    EXPECT(d % H2O_GROUP == 0 && d + vectors * VL <= D);
    UNROLL
    for (int j = 0; j < vectors; j += H2O_GROUP / VL) {
        load_q4_group(row, d + j * VL, D, x + j);
    }
}

#endif
