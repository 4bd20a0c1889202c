/* store.cuh - rows of keys and values, as a warp or one thread reads and makes them. */
#ifndef H2O_CUDA_STORE_CUH
#define H2O_CUDA_STORE_CUH

#include "common.cuh"
#include "kernels.h"

#include "../quantise.h"
#include "../store.h"

/* A row's element at any stride: of a tensor of the caller's, or of a store of floats. */
typedef struct {
    const char *data;
    h2o_dtype type;
    int64_t stride;
} element_ref;

DEVICE element_ref row_of(const h2o_view *view, int64_t a, int64_t b, int64_t c) {
    return element_ref{(const char *)h2o_at(view, a, b, c), view->dtype, view->stride[3]};
}

/* A float whose address is a multiple of its size, as of all but the scales in rows of bytes. */
DEVICE float load_number(const char *p, h2o_dtype type) {
    if (type == H2O_F32) return *(const float *)p;
    const uint16_t h = *(const uint16_t *)p;
    return type == H2O_F16 ? f16_to_float(h) : bf16_to_float(h);
}

DEVICE float element(element_ref row, int64_t d) {
    return load_number(row.data + d * row.stride * h2o_dtype_size(row.type), row.type);
}

/* x as an element of a row that may be written. */
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
DEVICE bool lies_at(const void *p, unsigned bytes) { return ((uintptr_t)p & (bytes - 1)) == 0; }
DEVICE bool is_aligned(const void *p) { return lies_at(p, 16); }

/* Two floats of a word of two halves. */
DEVICE void unpack(uint32_t word, h2o_dtype type, float *x) {
    if (type == H2O_BF16) {
        x[0] = bf16_to_float((uint16_t)word);
        x[1] = bf16_to_float((uint16_t)(word >> 16));
    } else {
        x[0] = f16_to_float((uint16_t)word);
        x[1] = f16_to_float((uint16_t)(word >> 16));
    }
}

/* RUN whole elements of floats of each of N rows, side by side at an address of 16 bytes. */
template <int N> DEVICE void load_vectors(const char *const p[N], h2o_dtype type, float x[N][RUN]) {
    vec16 raw[N], more[N];
    UNROLL
    for (int i = 0; i < N; i++) raw[i] = load16(p[i]);
    if (type != H2O_F32) {
        UNROLL
        for (int i = 0; i < N * 4; i++) unpack(raw[i / 4].w[i % 4], type, &x[i / 4][i % 4 * 2]);
        return;
    }
    UNROLL
    for (int i = 0; i < N; i++) more[i] = load16(p[i] + 16);
    UNROLL
    for (int i = 0; i < N * 4; i++) {
        x[i / 4][i % 4] = bits_float(raw[i / 4].w[i % 4]);
        x[i / 4][4 + i % 4] = bits_float(more[i / 4].w[i % 4]);
    }
}

/* RUN bytes, as wide as they lie: rows of bytes follow each other without gaps. */
DEVICE void load_bytes(const char *p, uint8_t x[RUN]) {
    if (lies_at(p, 4)) {
        const uint32_t word[2] = {*(const uint32_t *)p, *(const uint32_t *)(p + 4)};
        UNROLL
        for (int i = 0; i < RUN; i++) x[i] = (uint8_t)(word[i / 4] >> i % 4 * 8);
    } else if (lies_at(p, 2)) {
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
    const char *const numbers = row + D / 2 + d / H2O_GROUP * 4;
    const int shift = d % H2O_GROUP >= H2O_GROUP / 2 ? 4 : 0;
    const float scale = load_scalar(numbers, H2O_F16);
    const float minimum = load_scalar(numbers + 2, H2O_F16);
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

/* Elements d..d+RUN-1 of N stored rows of D, 0 from D on; d is a multiple of RUN. What is loaded of
 * one row does not wait for another's. */
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
    bool whole = d + RUN <= D;
    UNROLL
    for (int i = 0; i < N; i++) {
        p[i] = row[i] + d * size;
        whole = whole && is_aligned(p[i]);
    }
    if (whole) {
        load_vectors<N>(p, type, x);
        return;
    }
    UNROLL
    for (int i = 0; i < N * RUN; i++) {
        const int e = i % RUN;
        x[i / RUN][e] = d + e < D ? load_number(p[i / RUN] + e * size, type) : 0.0f;
    }
}

DEVICE void load_stored(const char *row, h2o_dtype type, int64_t d, int64_t D, float x[RUN]) {
    load_rows<1>(&row, type, d, D, (float (*)[RUN])x);
}

/* The same of a tensor's row, whose elements may lie apart. */
DEVICE void load_given(element_ref row, int64_t d, int64_t D, float x[RUN]) {
    if (row.stride == 1) {
        load_stored(row.data, row.type, d, D, x);
        return;
    }
    UNROLL
    for (int i = 0; i < RUN; i++) x[i] = d + i < D ? element(row, d + i) : 0.0f;
}

/* ---- Making: by a warp --------------------------------------------------- */

DEVICE float warp_sum(float x) {
    UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shfl_xor(x, lanes);
    return x;
}

DEVICE float warp_max(float x) {
    UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, shfl_xor(x, lanes));
    return x;
}

DEVICE void store_half(char *p, uint16_t h) { memcpy(p, &h, sizeof h); }

DEVICE void make_q8(char *row, element_ref from, int64_t D) {
    const int lane = threadIdx.x % 32;
    float high = 0.0f;
    bool finite = true;
    ROLLED
    for (int64_t d = 0; d < D; d += 32) {
        const float x = d + lane < D ? element(from, d + lane) : 0.0f;
        finite = finite && x - x == 0.0f;
        high = fmaxf(high, fabsf(x));
    }
    const quantiser q = q8_quantiser(warp_max(high), warp_all(finite));
    ROLLED
    for (int64_t d = lane; d < D; d += 32) {
        row[d] = (char)(int8_t)q8_quantised(q, element(from, d));
    }
    if (lane == 0) store_half(row + D, q.scale);
}

/* A lane has an element of each group. */
DEVICE void make_q4(char *row, element_ref from, int64_t D) {
    const int lane = threadIdx.x % 32;
    for (int64_t group = 0; group < D / H2O_GROUP; group++) {
        const float x = element(from, group * H2O_GROUP + lane);
        const quantiser q = q4_quantiser(-warp_max(-x), warp_max(x), warp_all(x - x == 0.0f));
        const int32_t low = q4_quantised(q, x), high = shfl_xor(low, 16);
        char *const numbers = row + D / 2 + 4 * group;
        if (lane < 16) row[group * (H2O_GROUP / 2) + lane] = (char)(low | high << 4);
        if (lane == 0) {
            store_half(numbers, q.scale);
            store_half(numbers + 2, q.minimum);
        }
    }
}

/* What a slot is to hold of a token's key or value, as the store has it. */
DEVICE void make_row(char *row, h2o_dtype stored, element_ref from, int64_t D) {
    if (stored == H2O_Q8) {
        make_q8(row, from, D);
    } else if (stored == H2O_Q4) {
        make_q4(row, from, D);
    } else {
        const int64_t step = from.stride * h2o_dtype_size(stored);
        ROLLED
        for (int64_t d = threadIdx.x % 32; d < D; d += 32) {
            if (stored == H2O_F32) {
                ((float *)row)[d] = *(const float *)(from.data + d * step);
            } else {
                ((uint16_t *)row)[d] = *(const uint16_t *)(from.data + d * step);
            }
        }
    }
}

/* Copies rows of the store. */
DEVICE void copy_row(char *to, const char *from, int64_t bytes) {
    const bool whole = is_aligned(to) && is_aligned(from);
    const int64_t vectors = whole ? bytes / 16 : 0;
    ROLLED
    for (int64_t i = threadIdx.x % 32; i < vectors; i += 32)
        store16(to + 16 * i, load16(from + 16 * i));
    ROLLED
    for (int64_t i = 16 * vectors + threadIdx.x % 32; i < bytes; i += 32) to[i] = from[i];
}

/* The L2 norm of a row, the same for all lanes. */
DEVICE float norm_of(element_ref row, int64_t D) {
    float sum = 0.0f;
    ROLLED
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) {
        const float x = element(row, d);
        sum = fmaf(x, x, sum);
    }
    return sqrtf(warp_sum(sum));
}

#endif
