/* stored_rows.cuh - rows [D] of keys and values in a store: read as floats by a thread, in runs of
 * RUN elements, and written by a warp.
 *
 * Elements are f32, f16 or bf16, or quantized as Q8, S4 or Q4 (quantize.h). There is a struct for each
 * kind of row, with the same functions:
 *
 *   load<N>(row, d, D, x)     elements d..d+RUN-1 of each of N rows, 0 from D on; d is a multiple
 *                             of RUN; the loads of one row do not depend on another's
 *   element(row, d, D)        element d of a key, whose rotary embedding may be applied as it is read
 *   numbers<N>(row, d, D, x)  like load, without scale(row, D); only for quantized keys
 *   store(row, from, D)       writes a token's key or value to the row of a slot; `from` has the
 *                             store's dtype if that is a float
 *
 * Only the functions by_..._dtype choose among the structs: to add a stored dtype, add a struct and
 * a line there. */
#ifndef H2O_CUDA_STORED_ROWS_CUH
#define H2O_CUDA_STORED_ROWS_CUH

#include "elements.cuh"

#include "../quantize.h"

DEVICE void store_half(char *p, uint16_t h) { memcpy(p, &h, sizeof h); }

struct float_rows {
    h2o_dtype type; /* f32, f16 or bf16 */

    template <int N>
    DEVICE_METHOD void load(const char *const row[N], int64_t d, int64_t D, float x[N][RUN]) const {
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

    DEVICE_METHOD float element(const char *row, int64_t d, int64_t) const {
        return load_float(row + d * h2o_dtype_size(type), type);
    }

    DEVICE_METHOD void store(char *row, row_ref from, int64_t D) const {
        const int64_t step = from.stride * h2o_dtype_size(type);
        NO_UNROLL
        for (int64_t d = threadIdx.x % 32; d < D; d += 32) {
            if (type == H2O_F32) {
                ((float *)row)[d] = *(const float *)(from.data + d * step);
            } else {
                ((uint16_t *)row)[d] = *(const uint16_t *)(from.data + d * step);
            }
        }
    }
};

/* Rows of D bytes and a scale. */
struct q8_rows {
    DEVICE_METHOD float scale(const char *row, int64_t D) const {
        return load_scalar(row + D, H2O_F16);
    }

    /* The integers of elements d..d+RUN-1. */
    template <int N>
    DEVICE_METHOD void numbers(const char *const row[N], int64_t d, int64_t D,
                               float x[N][RUN]) const {
        const char *numbers[N];
        uint32_t word[N][WORDS] = {};
        UNROLL
        for (int i = 0; i < N; i++) numbers[i] = row[i] + d;
        if (d + RUN <= D) {
            load_bytes<N>(numbers, word);
        } else {
            UNROLL
            for (int i = 0; i < N * RUN; i++) {
                const int e = i % RUN;
                const uint32_t byte = d + e < D ? (uint8_t)numbers[i / RUN][e] : 0;
                word[i / RUN][e / 4] |= byte << e % 4 * 8;
            }
        }
        UNROLL
        for (int i = 0; i < N * WORDS; i++)
            numbers_of(word[i / WORDS][i % WORDS], &x[i / WORDS][i % WORDS * 4]);
    }

    template <int N>
    DEVICE_METHOD void load(const char *const row[N], int64_t d, int64_t D, float x[N][RUN]) const {
        const char *scales[N];
        uint16_t half[N][1];
        float scale[N];
        UNROLL
        for (int i = 0; i < N; i++) scales[i] = row[i] + D;
        load_halves<N, 1>(scales, half);
        numbers<N>(row, d, D, x);
        UNROLL
        for (int i = 0; i < N; i++) scale[i] = float_from_f16(half[i][0]);
        UNROLL
        for (int i = 0; i < N * RUN; i++) {
            const int e = i % RUN;
            x[i / RUN][e] = d + e < D ? scale[i / RUN] * x[i / RUN][e] : 0.0f;
        }
    }

    DEVICE_METHOD float element(const char *row, int64_t d, int64_t D) const {
        return scale(row, D) * (float)(int8_t)row[d];
    }

    /* ROW: an row_ref or lane_elements. */
    template <typename ROW> DEVICE_METHOD void store(char *row, ROW from, int64_t D) const {
        bool finite;
        const float most = most_of(from, D, &finite);
        const quantizer q = row_quantizer(most, Q8_SCALES, finite);
        each_element(from, D,
                     [&](int64_t d, float x) { row[d] = (char)(int8_t)q8_quantized(q, x); });
        if (threadIdx.x % 32 == 0) store_half(row + D, q.scale);
    }
};

/* Elements d..d+RUN-1 of each of N rows of half bytes, as numbers from 0 to 15. */
template <int N> DEVICE void load_halves_of(const char *const row[N], int64_t d, float x[N][RUN]) {
    const int shift = d % H2O_GROUP >= H2O_GROUP / 2 ? 4 : 0;
    const char *numbers[N];
    uint32_t word[N][WORDS];
    UNROLL
    for (int i = 0; i < N; i++) numbers[i] = row[i] + q4_elements(d) + d % (H2O_GROUP / 2);
    load_bytes<N>(numbers, word);
    UNROLL
    for (int i = 0; i < N * WORDS; i++)
        halves_of(word[i / WORDS][i % WORDS] >> shift, &x[i / WORDS][i % WORDS * 4]);
}

/* Stores a number from 0 to 15 for each lane as the half bytes of a group. */
DEVICE void store_halves(char *row, int64_t d, int32_t low) {
    static_assert(H2O_GROUP == 32);
    const int lane = threadIdx.x % 32;
    const int32_t high = shfl_xor(low, 16);
    if (lane < 16) row[q4_elements(d) + lane] = (char)(low | high << 4);
}

/* Rows of D half bytes that stand for signed bytes, and a scale; D is a multiple of a group. */
struct s4_rows {
    DEVICE_METHOD float scale(const char *row, int64_t D) const {
        return load_scalar(row + D / 2, H2O_F16);
    }

    template <int N>
    DEVICE_METHOD void numbers(const char *const row[N], int64_t d, int64_t,
                               float x[N][RUN]) const {
        load_halves_of<N>(row, d, x);
        UNROLL
        for (int i = 0; i < N * RUN; i++)
            x[i / RUN][i % RUN] = fmaf(x[i / RUN][i % RUN], 16.0f, -120.0f);
    }

    template <int N>
    DEVICE_METHOD void load(const char *const row[N], int64_t d, int64_t D, float x[N][RUN]) const {
        const char *scales[N];
        uint16_t half[N][1];
        UNROLL
        for (int i = 0; i < N; i++) scales[i] = row[i] + D / 2;
        load_halves<N, 1>(scales, half);
        numbers<N>(row, d, D, x);
        UNROLL
        for (int i = 0; i < N * RUN; i++) x[i / RUN][i % RUN] *= float_from_f16(half[i / RUN][0]);
    }

    DEVICE_METHOD float element(const char *row, int64_t d, int64_t D) const {
        return scale(row, D) * (float)s4_byte(row, d);
    }

    template <typename ROW> DEVICE_METHOD void store(char *row, ROW from, int64_t D) const {
        bool finite;
        const float most = most_of(from, D, &finite);
        const quantizer q = row_quantizer(most, S4_SCALES, finite);
        each_element(from, D,
                     [&](int64_t d, float x) { store_halves(row, d, s4_quantized(q, x)); });
        if (threadIdx.x % 32 == 0) store_half(row + D / 2, q.scale);
    }
};

/* Rows of D half bytes, with a scale and a minimum for each group; D is a multiple of a group. */
struct q4_rows {
    template <int N>
    DEVICE_METHOD void load(const char *const row[N], int64_t d, int64_t D, float x[N][RUN]) const {
        const char *scales[N];
        uint16_t half[N][2];
        float scale[N], minimum[N];
        UNROLL
        for (int i = 0; i < N; i++) scales[i] = row[i] + q4_scale(d, D);
        load_halves<N, 2>(scales, half);
        load_halves_of<N>(row, d, x);
        UNROLL
        for (int i = 0; i < N; i++) {
            scale[i] = float_from_f16(half[i][0]);
            minimum[i] = float_from_f16(half[i][1]);
        }
        UNROLL
        for (int i = 0; i < N * RUN; i++)
            x[i / RUN][i % RUN] = fmaf(x[i / RUN][i % RUN], scale[i / RUN], minimum[i / RUN]);
    }

    /* Each lane has one element of a group. */
    template <typename ROW> DEVICE_METHOD void store(char *row, ROW from, int64_t D) const {
        each_element(from, D, [&](int64_t d, float x) {
            const quantizer q =
                q4_quantizer(-max_of_lanes(-x), max_of_lanes(x), warp_all(x - x == 0.0f));
            char *const scale_minimum = row + q4_scale(d, D);
            store_halves(row, d, q4_quantized(q, x));
            if (threadIdx.x % 32 == 0) {
                store_half(scale_minimum, q.scale);
                store_half(scale_minimum + 2, q.minimum);
            }
        });
    }
};

/* For quantized keys, and for quantized values. */
template <typename USE> DEVICE auto by_key_dtype(h2o_dtype stored, USE use) {
    if (stored == H2O_S4) return use(s4_rows{});
    return use(q8_rows{});
}

template <typename USE> DEVICE auto by_value_dtype(h2o_dtype stored, USE use) {
    if (stored == H2O_Q4) return use(q4_rows{});
    return use(q8_rows{});
}

/* FLOATS: whether rows may be floats. */
template <bool FLOATS = true, typename USE> DEVICE auto by_stored_dtype(h2o_dtype stored, USE use) {
    if (stored == H2O_Q4) return use(q4_rows{});
    if (stored == H2O_S4) return use(s4_rows{});
    if constexpr (FLOATS) {
        if (stored != H2O_Q8) return use(float_rows{stored});
    }
    return use(q8_rows{});
}

/* ---- Rows of any stored dtype -------------------------------------------- */

template <int N>
DEVICE void load_rows(const char *const row[N], h2o_dtype type, int64_t d, int64_t D,
                      float x[N][RUN]) {
    by_stored_dtype(type, [&](auto rows) { rows.template load<N>(row, d, D, x); });
}

/* An element of a key. */
DEVICE float stored_element(const char *row, h2o_dtype type, int64_t d, int64_t D) {
    if (!h2o_row_is_quantized(type)) return float_rows{type}.element(row, d, D);
    return by_key_dtype(type, [&](auto rows) { return rows.element(row, d, D); });
}

/* Loads elements d..d+RUN-1 of a tensor's row, at any stride. */
DEVICE void load_strided(row_ref row, int64_t d, int64_t D, float x[RUN]) {
    if (row.stride == 1) {
        load_rows<1>(&row.data, row.type, d, D, (float (*)[RUN])x);
        return;
    }
    UNROLL
    for (int i = 0; i < RUN; i++) x[i] = d + i < D ? element_of(row, d + i) : 0.0f;
}

DEVICE void store_row(char *row, h2o_dtype stored, row_ref from, int64_t D) {
    by_stored_dtype(stored, [&](auto rows) { rows.store(row, from, D); });
}

/* The same for at most DEPTH elements, all of which are loaded before the first is stored. */
template <int DEPTH>
DEVICE void store_loaded(char *row, h2o_dtype stored, row_ref from, int64_t D) {
    if (h2o_row_is_quantized(stored)) {
        const lane_elements<DEPTH> elements = load_lane<DEPTH>(from, D);
        by_stored_dtype<false>(stored, [&](auto rows) { rows.store(row, elements, D); });
        return;
    }
    const lane_bits<DEPTH> bits = load_bits<DEPTH>(from, D);
    UNROLL
    for (int i = 0; i < DEPTH / 32; i++) {
        const int d = 32 * i + threadIdx.x % 32;
        if (d < D && stored == H2O_F32) ((uint32_t *)row)[d] = bits.x[i];
        if (d < D && stored != H2O_F32) ((uint16_t *)row)[d] = (uint16_t)bits.x[i];
    }
}

#endif
