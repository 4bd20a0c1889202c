/* store.cuh - rows [D] of keys and values: read as floats by a thread, and stored by a warp.
 *
 * Rows of tensors have elements f32, f16 or bf16 at any stride; stored rows have them side by
 * side, or are Q8 or Q4 as quantise.h defines them. Threads read rows in runs of RUN elements,
 * by 16-byte loads where alignment allows. */
#ifndef H2O_CUDA_STORE_CUH
#define H2O_CUDA_STORE_CUH

#include "common.cuh"
#include "kernels.h"

#include "../quantise.h"
#include "../store.h"

/* A row of floats at any stride: of a tensor, or of a store. */
typedef struct {
    const char *data;
    h2o_dtype type;
    int64_t stride;
} element_ref;

DEVICE element_ref row_of(const h2o_view *view, int64_t a, int64_t b, int64_t c) {
    return element_ref{(const char *)h2o_at(view, a, b, c), view->dtype, view->stride[3]};
}

/* A float at an address that is a multiple of its size, as scales in quantised rows are not. */
DEVICE float load_float(const char *p, h2o_dtype type) {
    if (type == H2O_F32) return *(const float *)p;
    const uint16_t h = *(const uint16_t *)p;
    return type == H2O_F16 ? f16_to_float(h) : bf16_to_float(h);
}

DEVICE float element(element_ref row, int64_t d) {
    return load_float(row.data + d * row.stride * h2o_dtype_size(row.type), row.type);
}

/* Writes x as element d of a row. */
DEVICE void set_element(element_ref row, int64_t d, float x) {
    char *const p = (char *)row.data + d * row.stride * h2o_dtype_size(row.type);
    if (row.type == H2O_F32) {
        *(float *)p = x;
    } else {
        *(uint16_t *)p = row.type == H2O_F16 ? float_to_f16(x) : float_to_bf16(x);
    }
}

/* ---- Reading ------------------------------------------------------------- */

/* Whether an address is a multiple of a power of two. */
DEVICE bool is_aligned_to(const void *p, unsigned bytes) {
    return ((uintptr_t)p & (bytes - 1)) == 0;
}
DEVICE bool is_aligned(const void *p) { return is_aligned_to(p, 16); }

/* The two 16-bit floats of a word. */
DEVICE void unpack(uint32_t word, h2o_dtype type, float *x) {
    if (type == H2O_BF16) {
        x[0] = bf16_to_float((uint16_t)word);
        x[1] = bf16_to_float((uint16_t)(word >> 16));
    } else {
        x[0] = f16_to_float((uint16_t)word);
        x[1] = f16_to_float((uint16_t)(word >> 16));
    }
}

/* RUN float elements of each of N rows, from addresses that are multiples of 16. */
template <int N> DEVICE void load_vectors(const char *const p[N], h2o_dtype type, float x[N][RUN]) {
    vec16 first[N], second[N];
    UNROLL
    for (int i = 0; i < N; i++) first[i] = load16(p[i]);
    if (type != H2O_F32) {
        UNROLL
        for (int i = 0; i < N * 4; i++) unpack(first[i / 4].w[i % 4], type, &x[i / 4][i % 4 * 2]);
        return;
    }
    UNROLL
    for (int i = 0; i < N; i++) second[i] = load16(p[i] + 16);
    UNROLL
    for (int i = 0; i < N * 4; i++) {
        x[i / 4][i % 4] = bits_float(first[i / 4].w[i % 4]);
        x[i / 4][4 + i % 4] = bits_float(second[i / 4].w[i % 4]);
    }
}

/* RUN bytes by the widest loads that their alignment allows: quantised rows have odd addresses. */
DEVICE void load_bytes(const char *p, uint8_t x[RUN]) {
    if (is_aligned_to(p, 4)) {
        const uint32_t word[2] = {*(const uint32_t *)p, *(const uint32_t *)(p + 4)};
        UNROLL
        for (int i = 0; i < RUN; i++) x[i] = (uint8_t)(word[i / 4] >> i % 4 * 8);
    } else if (is_aligned_to(p, 2)) {
        UNROLL
        for (int i = 0; i < RUN; i += 2) {
            const uint16_t half = *(const uint16_t *)(p + i);
            x[i] = (uint8_t)half;
            x[i + 1] = (uint8_t)(half >> 8);
        }
    } else {
        UNROLL
        for (int i = 0; i < RUN; i++) x[i] = (uint8_t)p[i];
    }
}

DEVICE void load_q4(const char *row, int64_t d, int64_t D, float x[RUN]) {
    const char *const scale_minimum = row + D / 2 + d / H2O_GROUP * 4;
    const int shift = d % H2O_GROUP >= H2O_GROUP / 2 ? 4 : 0;
    const float scale = load_scalar(scale_minimum, H2O_F16);
    const float minimum = load_scalar(scale_minimum + 2, H2O_F16);
    uint8_t bytes[RUN];
    load_bytes(row + d / H2O_GROUP * (H2O_GROUP / 2) + d % (H2O_GROUP / 2), bytes);
    UNROLL
    for (int i = 0; i < RUN; i++) {
        x[i] = fmaf((float)(bytes[i] >> shift & 15), scale, minimum);
    }
}

DEVICE void load_q8(const char *row, int64_t d, int64_t D, float x[RUN]) {
    const float scale = load_scalar(row + D, H2O_F16);
    uint8_t bytes[RUN] = {};
    if (d + RUN <= D) {
        load_bytes(row + d, bytes);
    } else {
        UNROLL
        for (int i = 0; i < RUN; i++) bytes[i] = d + i < D ? (uint8_t)row[d + i] : 0;
    }
    UNROLL
    for (int i = 0; i < RUN; i++) x[i] = d + i < D ? scale * (float)(int8_t)bytes[i] : 0.0f;
}

/* Elements d..d+RUN-1 of N stored rows of D, 0 from D on; d is a multiple of RUN. The loads of
 * different rows do not depend on each other. */
template <int N>
DEVICE void load_rows(const char *const row[N], h2o_dtype type, int64_t d, int64_t D,
                      float x[N][RUN]) {
    if (type == H2O_Q4) { /* D is a multiple of 32 here */
        UNROLL
        for (int i = 0; i < N; i++) load_q4(row[i], d, D, x[i]);
        return;
    }
    if (type == H2O_Q8) {
        UNROLL
        for (int i = 0; i < N; i++) load_q8(row[i], d, D, x[i]);
        return;
    }
    const int64_t size = h2o_dtype_size(type);
    const char *p[N];
    bool vectors = d + RUN <= D;
    UNROLL
    for (int i = 0; i < N; i++) {
        p[i] = row[i] + d * size;
        vectors = vectors && is_aligned(p[i]);
    }
    if (vectors) {
        load_vectors<N>(p, type, x);
        return;
    }
    UNROLL
    for (int i = 0; i < N * RUN; i++) {
        const int e = i % RUN;
        x[i / RUN][e] = d + e < D ? load_float(p[i / RUN] + e * size, type) : 0.0f;
    }
}

DEVICE void load_stored(const char *row, h2o_dtype type, int64_t d, int64_t D, float x[RUN]) {
    load_rows<1>(&row, type, d, D, (float (*)[RUN])x);
}

/* The same of a tensor's row, at any stride. */
DEVICE void load_strided(element_ref row, int64_t d, int64_t D, float x[RUN]) {
    if (row.stride == 1) {
        load_stored(row.data, row.type, d, D, x);
        return;
    }
    UNROLL
    for (int i = 0; i < RUN; i++) x[i] = d + i < D ? element(row, d + i) : 0.0f;
}

/* ---- Storing, by a warp -------------------------------------------------- */

DEVICE float warp_sum(float x) {
    UNROLL
    for (int offset = 16; offset > 0; offset /= 2) x += shfl_xor(x, offset);
    return x;
}

DEVICE float warp_max(float x) {
    UNROLL
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, shfl_xor(x, offset));
    return x;
}

DEVICE void store_half(char *p, uint16_t h) { memcpy(p, &h, sizeof h); }

DEVICE void quantise_q8(char *row, element_ref from, int64_t D) {
    const int lane = threadIdx.x % 32;
    float high = 0.0f;
    bool finite = true;
    NO_UNROLL
    for (int64_t d = 0; d < D; d += 32) {
        const float x = d + lane < D ? element(from, d + lane) : 0.0f;
        finite = finite && x - x == 0.0f;
        high = fmaxf(high, fabsf(x));
    }
    const quantiser q = q8_quantiser(warp_max(high), warp_all(finite));
    NO_UNROLL
    for (int64_t d = lane; d < D; d += 32) {
        row[d] = (char)(int8_t)q8_quantised(q, element(from, d));
    }
    if (lane == 0) store_half(row + D, q.scale);
}

/* Each lane has one element of a group. */
DEVICE void quantise_q4(char *row, element_ref from, int64_t D) {
    const int lane = threadIdx.x % 32;
    for (int64_t group = 0; group < D / H2O_GROUP; group++) {
        const float x = element(from, group * H2O_GROUP + lane);
        const quantiser q = q4_quantiser(-warp_max(-x), warp_max(x), warp_all(x - x == 0.0f));
        const int32_t low = q4_quantised(q, x), high = shfl_xor(low, 16);
        char *const scale_minimum = row + D / 2 + 4 * group;
        if (lane < 16) row[group * (H2O_GROUP / 2) + lane] = (char)(low | high << 4);
        if (lane == 0) {
            store_half(scale_minimum, q.scale);
            store_half(scale_minimum + 2, q.minimum);
        }
    }
}

/* Stores a token's key or value as the row of a slot; floats have the tensor's dtype. */
DEVICE void store_row(char *row, h2o_dtype stored, element_ref from, int64_t D) {
    if (stored == H2O_Q8) {
        quantise_q8(row, from, D);
    } else if (stored == H2O_Q4) {
        quantise_q4(row, from, D);
    } else {
        const int64_t step = from.stride * h2o_dtype_size(stored);
        NO_UNROLL
        for (int64_t d = threadIdx.x % 32; d < D; d += 32) {
            if (stored == H2O_F32) {
                ((float *)row)[d] = *(const float *)(from.data + d * step);
            } else {
                ((uint16_t *)row)[d] = *(const uint16_t *)(from.data + d * step);
            }
        }
    }
}

/* Copies a stored row. */
DEVICE void copy_row(char *to, const char *from, int64_t bytes) {
    const bool aligned = is_aligned(to) && is_aligned(from);
    const int64_t vectors = aligned ? bytes / 16 : 0;
    NO_UNROLL
    for (int64_t i = threadIdx.x % 32; i < vectors; i += 32)
        store16(to + 16 * i, load16(from + 16 * i));
    NO_UNROLL
    for (int64_t i = 16 * vectors + threadIdx.x % 32; i < bytes; i += 32) to[i] = from[i];
}

/* The L2 norm of a row, the same for all lanes. */
DEVICE float norm_of(element_ref row, int64_t D) {
    float sum = 0.0f;
    NO_UNROLL
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) {
        const float x = element(row, d);
        sum = fmaf(x, x, sum);
    }
    return sqrtf(warp_sum(sum));
}

#endif
