/* matrix_tiles.cuh - attend with tensor cores: tiles of 16-bit elements in shared memory, and their
 * matrix products.
 *
 * A tile of logits has MATRIX_ROWS rows, which stay in shared memory, and COLUMNS columns, of
 * which one tile after the other is copied in asynchronously. Each of the four warps computes 16
 * rows of it by mma.m16n8k16: of each 16 x 8 product lane i has in c[0..1] elements 2 (i % 4) and
 * the next of row i / 4, in c[2..3] the same of row i / 4 + 8. So four lanes share a row. */
#ifndef H2O_CUDA_MATRIX_TILES_CUH
#define H2O_CUDA_MATRIX_TILES_CUH

#include "attend_tiles.cuh"

enum { MATRIX_GAP = 8 /* elements between rows, so that a column's banks differ */ };

template <int DEPTH> struct matrix_buffer {
    enum { COLUMNS = CUDA_MATRIX_COLUMNS(DEPTH) };
    uint16_t rows[MATRIX_ROWS][DEPTH + MATRIX_GAP]; /* forward: queries; sums: keys */
    /* forward: keys, and their values; sums: two stages of queries, in use and on their way */
    uint16_t columns[2][COLUMNS][DEPTH + MATRIX_GAP];
    float bias[MATRIX_ROWS];                        /* of keys, see load_bias */
    float row_max[2][COLUMNS], factors[2][COLUMNS]; /* sums: of each stage's queries */
};

DEVICE int lane_row() { return threadIdx.x % 32 / 4; }
DEVICE int lane_column() { return threadIdx.x % 4 * 2; }
DEVICE int warp_row() { return threadIdx.x / 32 * 16; }

/* Over the four lanes that share a row. */
DEVICE float quad_max(float x) {
    x = fmaxf(x, shfl_xor(x, 1));
    return fmaxf(x, shfl_xor(x, 2));
}

DEVICE float quad_sum(float x) {
    x += shfl_xor(x, 1);
    return x + shfl_xor(x, 2);
}

/* ---- Tiles --------------------------------------------------------------- */

/* Elements d..d+RUN-1 of 16 bits at any stride and alignment, 0 from D on. */
DEVICE vec16 load_halves(element_ref row, int64_t d, int64_t D) {
    const char *const p = row.data + 2 * d * row.stride;
    vec16 x = {};
    UNROLL
    for (int i = 0; i < RUN; i++) {
        if (d + i >= D) continue;
        const uint32_t half = *(const uint16_t *)(p + 2 * i * row.stride);
        x.w[i / 2] |= half << 16 * (i % 2);
    }
    return x;
}

/* Loads the tile whose rows are row(i), data NULL where there is none: aligned runs by copies that
 * the caller waits for, others at once. */
template <int DEPTH, int ROWS, typename ROW>
DEVICE void fetch_matrix(uint16_t (*tile)[DEPTH + MATRIX_GAP], int64_t D, ROW row) {
    const int runs = DEPTH / RUN, step = ATTEND_THREADS / runs, each = ROWS / step;
    const int first = threadIdx.x / runs, d = threadIdx.x % runs * RUN;
    const char *from[each];
    bool strided = false;
    UNROLL
    for (int k = 0; k < each; k++) {
        const element_ref x = row(first + k * step);
        from[k] = d < D ? x.data : NULL;
        if (!from[k]) continue;
        from[k] += 2 * d;
        strided = strided || x.stride != 1 || d + RUN > D || !is_aligned(from[k]);
    }
    if (strided) {
        NO_UNROLL
        for (int k = 0; k < each; k++) {
            const element_ref x = row(first + k * step);
            store16(&tile[first + k * step][d], x.data ? load_halves(x, d, D) : vec16{});
        }
        return;
    }
    UNROLL
    for (int k = 0; k < each; k++) {
        uint16_t *const to = &tile[first + k * step][d];
        if (from[k]) {
            copy_async<16>(to, from[k]);
        } else {
            store16(to, vec16{});
        }
    }
}

DEVICE bool is_finite(uint32_t halves, h2o_dtype type) {
    const uint32_t exponent = type == H2O_BF16 ? 0x7f80 : 0x7c00;
    return (halves & exponent) != exponent && (halves >> 16 & exponent) != exponent;
}

/* Whether this thread's share of a tile's elements is finite. */
template <int DEPTH, h2o_dtype TYPE, int ROWS>
DEVICE bool finite_part(const uint16_t (*tile)[DEPTH + MATRIX_GAP]) {
    const int runs = DEPTH / RUN;
    bool finite = true;
    for (int i = threadIdx.x; i < ROWS * runs; i += ATTEND_THREADS) {
        const vec16 x = load16(&tile[i / runs][i % runs * RUN]);
        UNROLL
        for (int j = 0; j < 4; j++) finite = finite && is_finite(x.w[j], TYPE);
    }
    return finite;
}

/* ---- Products ------------------------------------------------------------ */

template <h2o_dtype TYPE>
DEVICE void multiply(float c[4], const uint32_t a[4], const uint32_t b[2]) {
#if CAPABILITY >= 80
    if (TYPE == H2O_BF16) return multiply_bf16(c, a, b);
#endif
    multiply_f16(c, a, b);
}

template <h2o_dtype TYPE> DEVICE uint32_t pack(float low, float high) {
#if CAPABILITY >= 80
    if (TYPE == H2O_BF16) return pack_bf16(low, high);
#endif
    return pack_f16(low, high);
}

/* The dot products of a warp's 16 rows with all columns of a tile. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_dots(const matrix_buffer<DEPTH> *buffer,
                        const uint16_t (*tile)[DEPTH + MATRIX_GAP],
                        float c[matrix_buffer<DEPTH>::COLUMNS / 8][4]) {
    const int lane = threadIdx.x % 32, columns = matrix_buffer<DEPTH>::COLUMNS;
    UNROLL
    for (int i = 0; i < columns / 8 * 4; i++) c[i / 4][i % 4] = 0.0f;
    UNROLL
    for (int d = 0; d < DEPTH; d += 16) {
        uint32_t a[4], b[4];
        load_matrices(a, &buffer->rows[warp_row() + lane % 16][d + lane / 16 * 8]);
        UNROLL
        for (int n = 0; n < columns; n += 16) {
            load_matrices(b, &tile[n + lane % 8 + lane / 16 * 8][d + lane / 8 % 2 * 8]);
            multiply<TYPE>(c[n / 8], a, b);
            multiply<TYPE>(c[n / 8 + 1], a, b + 2);
        }
    }
}

/* Those products to logits, but for the keys' bias. */
template <int TILES> DEVICE void dots_to_logits(float c[TILES][4], float scale, float softcap) {
    UNROLL
    for (int i = 0; i < TILES * 4; i++) c[i / 4][i % 4] *= scale;
    if (softcap <= 0.0f) return;
    const float inverse = inverse_cap(softcap);
    UNROLL
    for (int i = 0; i < TILES * 4; i++) c[i / 4][i % 4] = capped_small(c[i / 4][i % 4], inverse);
    sync_warp(); /* keeps the compiler from taking both steps at once */
    UNROLL
    for (int i = 0; i < TILES * 4; i++)
        c[i / 4][i % 4] = capped_large(c[i / 4][i % 4], softcap, inverse);
}

#endif
