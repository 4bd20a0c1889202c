/* matrix_tiles.cuh - attention by the tensor cores: tiles of 16-bit numbers in shared memory, and
 * their products over a warp.
 *
 * A warp has 16 rows of the tile that stays. In what it gets of a product, lane i has elements
 * 2 (i % 4) and the next of rows i / 4 and 8 + i / 4, for each 8 columns. */
#ifndef H2O_CUDA_MATRIX_TILES_CUH
#define H2O_CUDA_MATRIX_TILES_CUH

#include "attend_tiles.cuh"

enum { MATRIX_GAP = 8 /* elements between rows, so that a column is in different banks */ };

template <int DEPTH> struct matrix_room {
    enum { COLUMNS = CUDA_MATRIX_COLUMNS(DEPTH) };
    uint16_t rows[MATRIX_ROWS][DEPTH + MATRIX_GAP]; /* that stay: queries, or sums' keys */
    uint16_t columns[COLUMNS][DEPTH + MATRIX_GAP];  /* that pass by: keys, or queries */
    uint16_t values[COLUMNS][DEPTH + MATRIX_GAP];   /* forward's */
    float bias[MATRIX_ROWS];                        /* of keys, see load_bias */
    float weights[MATRIX_ROWS], logs[MATRIX_ROWS];  /* of sums' queries */
};

DEVICE int lane_row() { return threadIdx.x % 32 / 4; }
DEVICE int lane_column() { return threadIdx.x % 4 * 2; }
DEVICE int warp_row() { return threadIdx.x / 32 * 16; }

/* Of the lanes that share rows. */
DEVICE float quad_max(float x) {
    x = fmaxf(x, shfl_xor(x, 1));
    return fmaxf(x, shfl_xor(x, 2));
}

DEVICE float quad_sum(float x) {
    x += shfl_xor(x, 1);
    return x + shfl_xor(x, 2);
}

/* ---- Tiles --------------------------------------------------------------- */

/* RUN elements of 16 bits from d on, 0 from D on. */
DEVICE vec16 load_halves(element_ref row, int64_t d, int64_t D) {
    const char *const p = row.data + 2 * d * row.stride;
    vec16 x = {};
    if (row.stride == 1 && d + RUN <= D && is_aligned(p)) return load16(p);
    UNROLL
    for (int i = 0; i < RUN; i++) {
        if (d + i >= D) continue;
        const uint32_t half = *(const uint16_t *)(p + 2 * i * row.stride);
        x.w[i / 2] |= half << 16 * (i % 2);
    }
    return x;
}

DEVICE bool is_finite(uint32_t halves, h2o_dtype type) {
    const uint32_t most = type == H2O_BF16 ? 0x7f80 : 0x7c00;
    return (halves & most) != most && (halves >> 16 & most) != most;
}

/* `rows` rows of a tile by row(i), whose data is NULL where there is none. Returns whether all that
 * this thread has seen is finite. */
template <int DEPTH, h2o_dtype TYPE, typename ROW>
DEVICE bool load_matrix(uint16_t (*tile)[DEPTH + MATRIX_GAP], int rows, int64_t D, ROW row) {
    const int runs = DEPTH / RUN;
    bool finite = true;
    ROLLED
    for (int i = threadIdx.x; i < rows * runs; i += blockDim.x) {
        const int d = i % runs * RUN;
        const element_ref from = row(i / runs);
        vec16 x = {};
        if (from.data && d < D) x = load_halves(from, d, D);
        UNROLL
        for (int j = 0; j < 4; j++) finite = finite && is_finite(x.w[j], TYPE);
        store16(&tile[i / runs][d], x);
    }
    return finite;
}

/* ---- Products ------------------------------------------------------------ */

template <h2o_dtype TYPE>
DEVICE void multiply(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    if (TYPE == H2O_BF16)
        multiply_bf16(c, a, b);
    else
        multiply_f16(c, a, b);
}

template <h2o_dtype TYPE> DEVICE uint32_t pack(float low, float high) {
    return TYPE == H2O_BF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

/* A warp's rows with all columns. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_dots(const matrix_room<DEPTH> *room,
                        float c[matrix_room<DEPTH>::COLUMNS / 8][4]) {
    const int lane = threadIdx.x % 32, columns = matrix_room<DEPTH>::COLUMNS;
    UNROLL
    for (int i = 0; i < columns / 8 * 4; i++) c[i / 4][i % 4] = 0.0f;
    UNROLL
    for (int d = 0; d < DEPTH; d += 16) {
        uint32_t a[4], b[4];
        load_matrices(a, &room->rows[warp_row() + lane % 16][d + lane / 16 * 8]);
        UNROLL
        for (int n = 0; n < columns; n += 16) {
            load_matrices(b, &room->columns[n + lane % 8 + lane / 16 * 8][d + lane / 8 % 2 * 8]);
            multiply<TYPE>(c[n / 8], a, b);
            multiply<TYPE>(c[n / 8 + 1], a, b + 2);
        }
    }
}

#endif
