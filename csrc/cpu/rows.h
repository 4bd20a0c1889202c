/* rows.h - single rows of D elements, wherever they are (row_ref of store.h): copies, norms and checks
 * for finiteness. */
#ifndef H2O_ROWS_H
#define H2O_ROWS_H

#include "../store.h"
#include "vec.h"

#include <math.h>

/* The row of a slot. */
static inline row_ref stored_row(const slot_rows *rows, int64_t slot) {
    return (row_ref){slot_row(rows, slot), rows->type, 1};
}

/* Copies a row to contiguous elements of the same type. */
static inline void row_copy(char *to, row_ref from, int64_t D) {
    if (from.stride == 1) {
        memcpy(to, from.data, (size_t)h2o_row_bytes(from.type, D));
        return;
    }
    const int64_t size = h2o_dtype_size(from.type);
    for (int64_t i = 0; i < D; i++) {
        memcpy(to + i * size, from.data + i * from.stride * size, (size_t)size);
    }
}

/* VL elements of a row of floats from i on; 0 from D on. */
VEC vf row_load(row_ref row, int64_t i, int64_t D) {
    const int64_t size = h2o_dtype_size(row.type);
    const int n = D - i < VL ? (int)(D - i) : VL;
    if (row.stride == 1 && n == VL) return vf_load_as(row.data + i * size, row.type);
    if (row.stride == 1) return vf_load_as_n(row.data + i * size, row.type, n);
    float gathered[VL] = {0};
    for (int j = 0; j < n; j++) {
        gathered[j] = load_scalar(row.data + (i + j) * row.stride * size, row.type);
    }
    return vf_load(gathered);
}

/* to [D rounded up to VL] = a row of floats, followed by zeros. Chooses by type once, not for each
 * vector as row_load does. */
static void load_row(row_ref row, int64_t D, float *to) {
    const int64_t plain = row.stride == 1 ? D / VL * VL : 0;
#define LOAD(name, ...)                                                                            \
    for (int64_t d = 0; row.type == H2O_##name && d < plain; d += VL) {                            \
        vf_store(to + d, vf_load_as(row.data + d * h2o_dtype_size(H2O_##name), H2O_##name));       \
    }
    H2O_FLOAT_ROWS(LOAD)
#undef LOAD
    for (int64_t d = plain; d < D; d += VL) vf_store(to + d, row_load(row, d, D));
}

/* Calls row_load, whose code would otherwise be repeated for each vector of a row. */
static __attribute__((noinline)) vf row_vector(row_ref row, int64_t i, int64_t D) {
    return row_load(row, i, D);
}

/* The L2 norm of a row of floats. */
static inline float row_norm(row_ref row, int64_t D) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < D; i += VL) {
        const vf x = row_load(row, i, D);
        sum = vf_fma(x, x, sum);
    }
    return sqrtf(vf_hsum(sum));
}

/* The dot product of two rows of floats. */
static inline float row_dot(row_ref a, row_ref b, int64_t D) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < D; i += VL) sum = vf_fma(row_load(a, i, D), row_load(b, i, D), sum);
    return vf_hsum(sum);
}

/* Adds 0 if x is finite, else NaN. A sum of 0 means that everything added was finite. */
VEC vf add_unfinite(vf sum, vf x) { return vf_add(sum, vf_sub(x, x)); }

#endif
