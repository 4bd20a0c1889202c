/* rows.h - single rows of D elements, wherever they lie: copies and norms.
 *
 * A row is a token's key, value or query: of a caller's tensor, at any stride, or of a store
 * (stored_rows.h), whose rows may be quantised. */
#ifndef H2O_ROWS_H
#define H2O_ROWS_H

#include "vec.h"

#include <math.h>

typedef struct {
    const char *data; /* element 0 */
    h2o_dtype type;   /* of a tensor's element, or of a store's row */
    int64_t stride;   /* elements from one to the next; 1 if quantised */
} row_ref;

/* Row [a, b, c] of a tensor [.., .., .., D]. */
static inline row_ref tensor_row(const h2o_view *view, int64_t a, int64_t b, int64_t c) {
    return (row_ref){h2o_at(view, a, b, c), view->dtype, view->stride[3]};
}

static inline row_ref float_row(const float *x) { return (row_ref){(const char *)x, H2O_F32, 1}; }

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

/* The L2 norm of a row of floats. */
static inline float row_norm(row_ref row, int64_t D) {
    const int64_t size = h2o_dtype_size(row.type);
    vf sum = vf_zero();
    for (int64_t i = 0; i < D; i += VL) {
        const int rest = D - i < VL ? (int)(D - i) : VL;
        float gathered[VL] = {0};
        vf x;
        if (row.stride == 1) {
            x = vf_load_as_n(row.data + i * size, row.type, rest);
        } else {
            for (int j = 0; j < rest; j++) {
                gathered[j] = load_scalar(row.data + (i + j) * row.stride * size, row.type);
            }
            x = vf_load(gathered);
        }
        sum = vf_fma(x, x, sum);
    }
    return sqrtf(vf_hsum(sum));
}

#endif
