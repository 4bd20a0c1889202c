/* elements.cuh - elements of a row [D] of a tensor or a store (f32, f16 or bf16, at any stride) as
 * floats, and loads of several elements by one instruction if alignment allows. Also sums and
 * maxima over the lanes of a warp. */
#ifndef H2O_CUDA_ELEMENTS_CUH
#define H2O_CUDA_ELEMENTS_CUH

#include "common.cuh"
#include "kernels.h"

#include "../store.h"

/* Loads a float that is aligned to its size; scales in quantized rows are not. */
DEVICE float load_float(const char *p, h2o_dtype type) {
    if (type == H2O_F32) return *(const float *)p;
    const uint16_t h = *(const uint16_t *)p;
    return type == H2O_F16 ? float_from_f16(h) : float_from_bf16(h);
}

DEVICE float element_of(row_ref row, int64_t d) {
    return load_float(row.data + d * row.stride * h2o_dtype_size(row.type), row.type);
}

/* A lane's elements of a row of at most DEPTH elements, in registers: x[i] is element 32 i + lane,
 * 0 from D on; as stored, or as floats. */
template <int DEPTH> struct lane_bits {
    uint32_t x[DEPTH / 32];
};
template <int DEPTH> struct lane_elements {
    float x[DEPTH / 32];
};

/* Loads all elements before the first is used. */
template <int DEPTH> DEVICE lane_bits<DEPTH> load_bits(row_ref row, int64_t D) {
    const int lane = threadIdx.x % 32, size = (int)h2o_dtype_size(row.type);
    const char *p = row.data + lane * row.stride * size;
    lane_bits<DEPTH> bits = {};
    UNROLL
    for (int i = 0; i < DEPTH / 32; i++, p += 32 * row.stride * size) {
        if (32 * i + lane >= D) continue;
        bits.x[i] = size == 4 ? *(const uint32_t *)p : *(const uint16_t *)p;
    }
    return bits;
}

template <int DEPTH> DEVICE lane_elements<DEPTH> load_lane(row_ref row, int64_t D) {
    const lane_bits<DEPTH> bits = load_bits<DEPTH>(row, D);
    lane_elements<DEPTH> elements;
    UNROLL
    for (int i = 0; i < DEPTH / 32; i++) {
        elements.x[i] = row.type == H2O_F32   ? bits_float(bits.x[i])
                        : row.type == H2O_F16 ? float_from_f16((uint16_t)bits.x[i])
                                              : float_from_bf16((uint16_t)bits.x[i]);
    }
    return elements;
}

/* Calls use(d, x) for a lane's elements of a row, from memory or from registers. */
template <typename USE> DEVICE void each_element(row_ref row, int64_t D, USE use) {
    NO_UNROLL
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) use(d, element_of(row, d));
}

template <int DEPTH, typename USE>
DEVICE void each_element(lane_elements<DEPTH> row, int64_t D, USE use) {
    UNROLL
    for (int i = 0; i < DEPTH / 32; i++) {
        const int d = 32 * i + threadIdx.x % 32;
        if (d < D) use(d, row.x[i]);
    }
}

/* Writes x as element d of a row. */
DEVICE void set_element(row_ref row, int64_t d, float x) {
    char *const p = (char *)row.data + d * row.stride * h2o_dtype_size(row.type);
    if (row.type == H2O_F32) {
        *(float *)p = x;
    } else {
        *(uint16_t *)p = row.type == H2O_F16 ? f16_from_float(x) : float_to_bf16(x);
    }
}

/* ---- Aligned loads ------------------------------------------------------- */

DEVICE bool is_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

/* The two 16-bit floats of a word. */
DEVICE void unpack(uint32_t word, h2o_dtype type, float *x) {
    if (type == H2O_BF16) {
        x[0] = float_from_bf16((uint16_t)word);
        x[1] = float_from_bf16((uint16_t)(word >> 16));
    } else {
        x[0] = float_from_f16((uint16_t)word);
        x[1] = float_from_f16((uint16_t)(word >> 16));
    }
}

/* Loads eight 16-bit numbers at any address that is a multiple of 2. */
DEVICE vec16 load_eight(const char *p) {
    if (is_aligned(p)) return load16(p);
    const uint16_t *const half = (const uint16_t *)p;
    vec16 x;
    UNROLL
    for (int i = 0; i < 4; i++) x.w[i] = half[2 * i] | (uint32_t)half[2 * i + 1] << 16;
    return x;
}

/* Loads RUN float elements of each of N rows, from addresses that are multiples of 16. */
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

/* The bits of N addresses ORed: all are multiples of a power of two if the result is. */
template <int N> DEVICE uintptr_t all_bits(const char *const p[N]) {
    uintptr_t bits = 0;
    UNROLL
    for (int i = 0; i < N; i++) bits |= (uintptr_t)p[i];
    return bits;
}

enum { WORDS = RUN / 4 };

/* Loads RUN bytes of each of N rows, four in a word, by the widest loads that all addresses allow:
 * quantized rows may have odd addresses. */
template <int N> DEVICE void load_bytes(const char *const p[N], uint32_t word[N][WORDS]) {
    const uintptr_t bits = all_bits<N>(p);
    if (bits % 4 == 0) {
        UNROLL
        for (int i = 0; i < N * WORDS; i++) {
            word[i / WORDS][i % WORDS] = ((const uint32_t *)p[i / WORDS])[i % WORDS];
        }
    } else if (bits % 2 == 0) {
        UNROLL
        for (int i = 0; i < N * WORDS; i++) {
            const uint16_t *const half = (const uint16_t *)p[i / WORDS] + i % WORDS * 2;
            word[i / WORDS][i % WORDS] = half[0] | (uint32_t)half[1] << 16;
        }
    } else {
        UNROLL
        for (int i = 0; i < N * WORDS; i++) {
            const uint8_t *const byte = (const uint8_t *)p[i / WORDS] + i % WORDS * 4;
            word[i / WORDS][i % WORDS] =
                byte[0] | byte[1] << 8 | byte[2] << 16 | (uint32_t)byte[3] << 24;
        }
    }
}

/* A byte of a word as the float 2^23 + byte, without a conversion. */
DEVICE float float_of_byte(uint32_t word, int i) {
    return bits_float(permute(word, 0x4b000000, 0x7540 | (uint32_t)i));
}

/* The four signed bytes of a word, ... */
DEVICE void numbers_of(uint32_t word, float x[4]) {
    UNROLL
    for (int i = 0; i < 4; i++) x[i] = float_of_byte(word ^ 0x80808080, i) - 8388736.0f;
}

/* ... and the low halves of its bytes. */
DEVICE void halves_of(uint32_t word, float x[4]) {
    UNROLL
    for (int i = 0; i < 4; i++) x[i] = float_of_byte(word & 0x0f0f0f0f, i) - 8388608.0f;
}

/* Loads COUNT 16-bit numbers at each of N addresses in the same way. */
template <int N, int COUNT>
DEVICE void load_halves(const char *const p[N], uint16_t half[N][COUNT]) {
    if (all_bits<N>(p) % 2 == 0) {
        UNROLL
        for (int i = 0; i < N * COUNT; i++) {
            half[i / COUNT][i % COUNT] = ((const uint16_t *)p[i / COUNT])[i % COUNT];
        }
    } else {
        UNROLL
        for (int i = 0; i < N * COUNT; i++) {
            const uint8_t *const byte = (const uint8_t *)p[i / COUNT] + i % COUNT * 2;
            half[i / COUNT][i % COUNT] = (uint16_t)(byte[0] | byte[1] << 8);
        }
    }
}

/* ---- Over adjacent lanes of a warp --------------------------------------- */

template <int LANES = 32> DEVICE float sum_of_lanes(float x) {
    UNROLL
    for (int offset = LANES / 2; offset > 0; offset /= 2) x += shfl_xor(x, offset);
    return x;
}

template <int LANES = 32> DEVICE float max_of_lanes(float x) {
    UNROLL
    for (int offset = LANES / 2; offset > 0; offset /= 2) x = fmaxf(x, shfl_xor(x, offset));
    return x;
}

/* The largest magnitude of a row (a row_ref or lane_elements), the same in all lanes; *finite:
 * whether all of its elements are finite. */
template <typename ROW> DEVICE float most_of(ROW row, int64_t D, bool *finite) {
    float high = 0.0f;
    bool sound = true;
    each_element(row, D, [&](int64_t, float x) {
        sound = sound && x - x == 0.0f;
        high = fmaxf(high, fabsf(x));
    });
    *finite = warp_all(sound);
    return max_of_lanes(high);
}

/* The L2 norm of a row (a row_ref or lane_elements), the same in all lanes. */
template <typename ROW> DEVICE float norm_of(ROW row, int64_t D) {
    float sum = 0.0f;
    each_element(row, D, [&](int64_t, float x) { sum = fmaf(x, x, sum); });
    return sqrtf(sum_of_lanes(sum));
}

#endif
