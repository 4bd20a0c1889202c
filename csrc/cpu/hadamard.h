/* hadamard.h - the orthonormal Hadamard transform of a row [D], by which quantized keys and values
 * are stored if they have offsets (quantize.h).
 *
 * It is applied to blocks of n elements, where n is the largest power of two that divides D. A stage
 * for h = 1, 2, 4, ..., n / 2 replaces elements i and i + h by their sum and their difference; then
 * everything is divided by sqrt(n). The transform is its own inverse. All levels and h2o.quantization
 * round alike, since each adds the same pairs in the same order. */
#ifndef H2O_HADAMARD_H
#define H2O_HADAMARD_H

#include "rows.h"

enum { HADAMARD_VECTORS = 8 /* of a block whose first stages stay in registers */ };

/* x[i] + x[i ^ h] in lanes i without bit h, x[i ^ h] - x[i] in the others. */
VEC vf add_within(vf x, const int h) {
    static const float signs[4][16] = {
        {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
        {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
        {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
        {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
    };
    return vf_fma(x, vf_load(signs[h == 1 ? 0 : h == 2 ? 1 : h == 4 ? 2 : 3]), vf_swap(x, h));
}

/* The stages below vectors * VL for so many vectors, then multiplies by the factor. */
VEC void hadamard_vectors(float *x, const int vectors, vf factor) {
    vf v[HADAMARD_VECTORS];
    UNROLL
    for (int i = 0; i < vectors; i++) {
        v[i] = vf_load(x + i * VL);
        UNROLL
        for (int h = 1; h < VL; h *= 2) v[i] = add_within(v[i], h);
    }
    UNROLL
    for (int h = 1; h < vectors; h *= 2) {
        UNROLL
        for (int i = 0; i < vectors; i++) {
            if (i & h) continue;
            const vf a = v[i], b = v[i + h];
            v[i] = vf_add(a, b);
            v[i + h] = vf_sub(a, b);
        }
    }
    UNROLL
    for (int i = 0; i < vectors; i++) vf_store(x + i * VL, vf_mul(v[i], factor));
}

/* The stage of vectors h elements apart, in blocks of n, then multiplies by the factor. */
VEC void hadamard_stage(float *x, int64_t D, int64_t h, vf factor) {
    for (int64_t first = 0; first < D; first += 2 * h) {
        for (int64_t i = first; i < first + h; i += VL) {
            const vf a = vf_load(x + i), b = vf_load(x + i + h);
            vf_store(x + i, vf_mul(vf_add(a, b), factor));
            vf_store(x + i + h, vf_mul(vf_sub(a, b), factor));
        }
    }
}

/* Blocks that are smaller than a vector. */
static void hadamard_elements(float *x, int64_t D, int64_t n, float factor) {
    for (int64_t h = 1; h < n; h *= 2) {
        for (int64_t i = 0; i < D; i++) {
            if (i & h) continue;
            const float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    }
    for (int64_t i = 0; i < D; i++) x[i] *= factor;
}

/* Transforms x [D] in place. */
VEC void hadamard_blocks(float *x, int64_t D) {
    const int64_t n = D & -D;
    const float whole = (float)(1.0 / sqrt((double)n));
    if (n < VL) {
        hadamard_elements(x, D, n, whole);
        return;
    }
    const int64_t vectors = n / VL < HADAMARD_VECTORS ? n / VL : HADAMARD_VECTORS;
    const vf factor = vf_set1(vectors * VL == n ? whole : 1.0f);
    for (int64_t d = 0; d < D; d += vectors * VL) {
        switch (vectors) {
        case 1:
            hadamard_vectors(x + d, 1, factor);
            break;
        case 2:
            hadamard_vectors(x + d, 2, factor);
            break;
        case 4:
            hadamard_vectors(x + d, 4, factor);
            break;
        default:
            hadamard_vectors(x + d, HADAMARD_VECTORS, factor);
        }
    }
    for (int64_t h = vectors * VL; h < n; h *= 2) {
        hadamard_stage(x, D, h, vf_set1(2 * h == n ? whole : 1.0f));
    }
}

/* Transforms x [D] in place, with constants for the most common sizes. Not inlined, so that no
 * compiler fuses its last multiplication with what follows. */
static __attribute__((noinline)) void hadamard(float *x, int64_t D) {
    if (D == 64)
        hadamard_blocks(x, 64);
    else if (D == 128)
        hadamard_blocks(x, 128);
    else
        hadamard_blocks(x, D);
}

/* to [D rounded up to VL] = a key as it is quantized: without its offset, smoothed, transformed. */
static void load_changed_key(row_ref key, key_change change, int64_t D, float *to) {
    load_row(key, D, to);
    for (int64_t d = 0; d < D; d += VL) {
        vf_store(to + d, vf_sub(vf_load(to + d), row_vector(change.offset, d, D)));
    }
    for (int64_t d = 0; change.smoothing.data && d < D; d += VL) {
        vf_store(to + d, vf_div(vf_load(to + d), row_vector(change.smoothing, d, D)));
    }
    hadamard(to, D);
}

/* to [D rounded up to VL] = the query for such keys. */
static void load_changed_query(row_ref query, row_ref smoothing, int64_t D, float *to) {
    load_row(query, D, to);
    for (int64_t d = 0; smoothing.data && d < D; d += VL) {
        vf_store(to + d, vf_mul(vf_load(to + d), row_vector(smoothing, d, D)));
    }
    hadamard(to, D);
}

/* A row of floats. */
static row_ref float_row(const float *x) { return (row_ref){(const char *)x, H2O_F32, 1}; }

#endif
