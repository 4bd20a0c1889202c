/* stored.h - rows of a quantised store: how they are made, and read as floats;
 * quantise.h says what their bytes are. */
#ifndef H2O_STORED_H
#define H2O_STORED_H

#include "../quantise.h"
#include "rows.h"

enum { GROUP = H2O_GROUP };

static inline void store_f16(char *p, uint16_t h) { memcpy(p, &h, sizeof h); }

/* ---- Making ------------------------------------------------------------ */

static inline bool all_finite(const float *x, int64_t n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; i++) sum += x[i] - x[i];
    return sum == 0.0f;
}

/* A row's element at any stride. */
typedef struct {
    const char *data;
    h2o_dtype type;
    int64_t stride;
} element_ref;

static inline void gather(element_ref from, int64_t first, int64_t n, float *x) {
    const int64_t step = from.stride * h2o_dtype_size(from.type);
    for (int64_t i = 0; i < n; i++) {
        x[i] = load_scalar(from.data + (first + i) * step, from.type);
    }
}

static inline void make_q8(char *row, element_ref from, int64_t D) {
    float x[GROUP], high = 0.0f;
    bool finite = true;
    for (int64_t d = 0; d < D; d += GROUP) {
        const int64_t n = D - d < GROUP ? D - d : GROUP;
        gather(from, d, n, x);
        finite = finite && all_finite(x, n);
        for (int64_t i = 0; i < n; i++) high = fabsf(x[i]) > high ? fabsf(x[i]) : high;
    }
    const quantiser q = q8_quantiser(high, finite);
    for (int64_t d = 0; d < D; d += GROUP) {
        const int64_t n = D - d < GROUP ? D - d : GROUP;
        gather(from, d, n, x);
        for (int64_t i = 0; i < n; i++) row[d + i] = (char)(int8_t)q8_quantised(q, x[i]);
    }
    store_f16(row + D, q.scale);
}

static inline void make_q4_group(char *bytes, char *numbers, const float *x) {
    float low = x[0], high = x[0];
    for (int i = 1; i < GROUP; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const quantiser q = q4_quantiser(low, high, all_finite(x, GROUP));
    for (int i = 0; i < GROUP / 2; i++) {
        bytes[i] = (char)(q4_quantised(q, x[i]) | q4_quantised(q, x[i + GROUP / 2]) << 4);
    }
    store_f16(numbers, q.scale);
    store_f16(numbers + 2, q.minimum);
}

/* What a slot is to hold of a token's key or value, as the store has it. */
static inline void store_row(char *row, h2o_dtype stored, element_ref from, int64_t D) {
    float x[GROUP];
    if (stored == H2O_Q8) {
        make_q8(row, from, D);
    } else if (stored == H2O_Q4) {
        for (int64_t group = 0; group < D / GROUP; group++) {
            gather(from, group * GROUP, GROUP, x);
            make_q4_group(row + group * GROUP / 2, row + D / 2 + 4 * group, x);
        }
    } else {
        row_copy(row, from.data, from.type, D, from.stride);
    }
}

/* The same of floats, x [D]. */
static inline void store_floats(char *row, h2o_dtype stored, const float *x, int64_t D) {
    if (stored == H2O_Q8 || stored == H2O_Q4) {
        store_row(row, stored, (element_ref){(const char *)x, H2O_F32, 1}, D);
        return;
    }
    for (int64_t d = 0; d < D; d += VL) {
        const int n = D - d < VL ? (int)(D - d) : VL;
        vf_store_as_n(row + d * h2o_dtype_size(stored), stored, vf_load_n(x + d, n), n);
    }
}

/* ---- Reading ----------------------------------------------------------- */

/* n <= VL bytes q from d on; those of Q8 want the scale yet. */
VEC vf load_q8(const char *row, int64_t d, int n) {
    int8_t bytes[VL] = {0};
    if (n == VL) return vf_load_i8(row + d);
    memcpy(bytes, row + d, (size_t)n);
    return vf_load_i8(bytes);
}

/* Scale and minimum of the group that element d is in. */
static inline const char *q4_numbers(const char *row, int64_t d, int64_t D) {
    return row + D / 2 + d / GROUP * 4;
}

VEC vf load_q4(const char *row, int64_t d, int64_t D) {
    const char *const numbers = q4_numbers(row, d, D);
    const char *const bytes = row + d / GROUP * (GROUP / 2) + d % (GROUP / 2);
    const vf q = vf_load_u4(bytes, d % GROUP >= GROUP / 2);
    return vf_fma(q, vf_set1_f16(numbers), vf_set1_f16(numbers + 2));
}

/* The GROUP elements from d on. */
VEC void load_q4_group(const char *row, int64_t d, int64_t D, vf x[GROUP / VL]) {
    enum { HALF = GROUP / VL / 2 };
    const char *const numbers = q4_numbers(row, d, D);
    const vf scale = vf_set1_f16(numbers), minimum = vf_set1_f16(numbers + 2);
    UNROLL
    for (int i = 0; i < HALF; i++) {
        vf_load_u4_as(row + d / 2 + i * VL, scale, minimum, &x[i], &x[HALF + i]);
    }
}

/* VL elements from d on, 0 from D on. */
VEC vf stored_floats(const char *row, h2o_dtype stored, int64_t d, int64_t D) {
    if (stored == H2O_Q4) return load_q4(row, d, D);
    const int n = D - d < VL ? (int)(D - d) : VL;
    return vf_mul(load_q8(row, d, n), vf_set1_f16(row + D));
}

/* The same of any store's row. */
VEC vf row_floats(const char *row, h2o_dtype type, int64_t d, int64_t D) {
    if (type == H2O_Q8 || type == H2O_Q4) return stored_floats(row, type, d, D);
    const char *const p = row + d * h2o_dtype_size(type);
    return D - d < VL ? vf_load_as_n(p, type, (int)(D - d)) : vf_load_as(p, type);
}

#endif
