/* rows.h - single rows of D elements, wherever they lie: copies and norms. */
#ifndef H2O_ROWS_H
#define H2O_ROWS_H

#include "vec.h"

#include <math.h>

/* n elements, stride apart, to contiguous ones of the same type. */
static inline void row_copy(void *to, const void *from, h2o_dtype type, int64_t n, int64_t stride) {
    const size_t size = (size_t)h2o_dtype_size(type);
    if (stride == 1) {
        memcpy(to, from, (size_t)n * size);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        memcpy((char *)to + i * (int64_t)size, (const char *)from + i * stride * (int64_t)size,
               size);
    }
}

/* The L2 norm of n elements, stride apart. */
static inline float row_norm(const void *row, h2o_dtype type, int64_t n, int64_t stride) {
    const int64_t size = h2o_dtype_size(type);
    const char *const bytes = row;
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += VL) {
        const int rest = n - i < VL ? (int)(n - i) : VL;
        float gathered[VL] = {0};
        vf x;
        if (stride == 1) {
            x = vf_load_as_n(bytes + i * size, type, rest);
        } else {
            for (int j = 0; j < rest; j++) {
                gathered[j] = load_scalar(bytes + (i + j) * stride * size, type);
            }
            x = vf_load(gathered);
        }
        sum = vf_fma(x, x, sum);
    }
    return sqrtf(vf_hsum(sum));
}

#endif
