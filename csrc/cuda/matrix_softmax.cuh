/* matrix_softmax.cuh - step 2 of matrix_forward.cuh: the running softmax of a tile of logits.
 *
 * m, and with it O, stays as it is until a logit exceeds it by more than GROWTH, which rarely
 * happens after the first tile. P is then at most 2^GROWTH, which fits into 16 bits (as in
 * FlashAttention-4, where GROWTH is 8). */
#ifndef H2O_CUDA_MATRIX_SOFTMAX_CUH
#define H2O_CUDA_MATRIX_SOFTMAX_CUH

#include "matrix_tiles.cuh"

/* A tile of keys: first stored keys, then new keys up to the last query's own. */
typedef struct {
    bool stored;
    int32_t first;
    int32_t end;  /* of the new keys */
    int32_t past; /* end of the new keys that every query sees */
    row_source keys, values;
} key_tile;

/* As an exponent of 2. */
#define GROWTH 4

/* A lane's part of the running softmax of two queries, 8 rows apart: m, its share of the row sum l,
 * and of the accumulated P V. Logits and m are in a unit; see dots_to_exponents. */
template <int DEPTH> struct matrix_softmax {
    float row_max[2], row_sum[2];
    float output[DEPTH / 8][4];
};

/* m is rounded in its unit, so the exponents of a row exceed those of S - m by this much. */
DEVICE float excess(float row_max, float unit) {
    const float less = subtrahend(row_max), exponent = less * unit;
    return fabsf(exponent) < FAR ? fmaf(less, unit, -exponent) : 0.0f;
}

/* Raises m of the i-th query and rescales, given the largest of the lane's logits. */
template <int DEPTH>
DEVICE void raise_row_max(int i, float largest, float unit, matrix_softmax<DEPTH> *softmax) {
    const float before = softmax->row_max[i];
    const bool grown = (largest - before) * unit > (float)GROWTH;
    TAKEN(matrix_forward_not_raised, !grown);
    if (warp_all(!grown)) return;
    const float row_max = quad_max(largest);
    const bool raised = (row_max - before) * unit > (float)GROWTH; /* independent of other rows */
    const float exponent = fmaf(before - row_max, unit, excess(row_max, unit));
    const float rescale = raised ? fast_exp2(exponent - excess(before, unit)) : 1.0f;
    softmax->row_max[i] = raised ? row_max : before;
    softmax->row_sum[i] *= rescale;
    UNROLL
    for (int k = 0; k < DEPTH / 4; k++) softmax->output[k / 2][2 * i + k % 2] *= rescale;
}

/* Step 2: turns logits c into exponentials; -1 if the key is masked. */
template <int DEPTH, tile_sight SIGHT>
DEVICE void update_matrix_softmax(const key_tile *at, int64_t query, float unit,
                                  const matrix_buffer<DEPTH> *buffer,
                                  float c[matrix_buffer<DEPTH>::COLUMNS / 8][4],
                                  matrix_softmax<DEPTH> *softmax) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    const int ahead = at->first - (int)query; /* by how much new keys are ahead of the queries */
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int row = warp_row() + lane_row() + 8 * i;
        float largest = -INFINITY, row_sum = 0.0f;
        uint32_t visible = 0;
        UNROLL
        for (int k = 0; k < columns / 4; k++) {
            const int column = k / 2 * 8 + lane_column() + k % 2;
            float *const x = &c[k / 2][2 * i + k % 2];
            const bool is_visible = SIGHT == SEES_ALL    ? true
                                    : SIGHT == SEES_PAST ? column + ahead <= row
                                                         : buffer->is_key[column] != 0;
            visible |= (uint32_t)is_visible << k;
            largest = is_visible ? fmaxf(largest, *x) : largest;
        }
        raise_row_max<DEPTH>(i, largest, unit, softmax);
        const float less = subtrahend(softmax->row_max[i]);
        float exponent = less * unit;
        if (!(fabsf(exponent) < FAR)) {
            UNROLL
            for (int k = 0; k < columns / 4; k++) c[k / 2][2 * i + k % 2] -= less;
            exponent = 0.0f;
        }
        UNROLL
        for (int k = 0; k < columns / 4; k++) {
            float *const x = &c[k / 2][2 * i + k % 2];
            const bool is_visible = SIGHT == SEES_ALL || (visible >> k & 1);
            *x = is_visible ? fast_exp2(fmaf(*x, unit, -exponent)) : -1.0f;
            row_sum += is_visible ? *x : 0.0f;
        }
        softmax->row_sum[i] += row_sum;
    }
}

/* Like add_sink, for m in a unit. */
DEVICE void add_matrix_sink(float sink, float unit, float *row_max, float *row_sum) {
    if (sink == -INFINITY) return;
    const bool empty = *row_max == -INFINITY; /* then all weights must be 0 */
    if (empty) *row_max = 0.0f;
    *row_sum += empty ? 1.0f : fast_exp2(fmaf(sink, LOG2_E, -*row_max * unit));
}

#endif
