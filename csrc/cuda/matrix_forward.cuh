/* matrix_forward.cuh - forward.cuh with tensor cores.
 *
 * A block has MATRIX_ROWS queries of one head, a warp 16 of them, and goes through the tiles of
 * keys that they see:
 *
 *   1. S = Q K^T in registers, while the tile's values are being copied to shared memory;
 *   2. running row max m, P = exp(S - m) in place, row sum l, and the rescaling of O;
 *   3. O += P V, with P as 16-bit matrices, while the next tile's keys are being copied.
 *
 * m, and with it O, stays as it is until a logit is above it by more than GROWTH, as few tiles but
 * the first have one: P is then up to 2^GROWTH, which 16 bits hold (as in FlashAttention-4).
 *
 * The matrix product turns 0 * infinity into NaN, where a key is masked, or has a weight that is 0
 * in float16 but not in 32 bits. So a block whose outputs have a NaN does all once more, and then
 * a tile whose values are not all finite takes a slow way for step 3. */
#ifndef H2O_CUDA_MATRIX_FORWARD_CUH
#define H2O_CUDA_MATRIX_FORWARD_CUH

#include "matrix_stored.cuh"

/* A tile of keys: stored ones first, then new ones up to the last query's own. */
typedef struct {
    bool stored;
    int32_t first;
    int32_t end;  /* of the new keys, ... */
    int32_t past; /* ... and of those that every query sees */
    row_source keys, values;
} key_tile;

DEVICE void open_keys(const attend_item *item, bool stored, key_tile *at) {
    at->stored = stored;
    at->first = 0;
    at->keys = key_source(item, stored);
    at->values = value_source(item, stored);
}

/* Whether every query sees every key of a tile, and none has a bias. */
DEVICE bool is_past(const key_tile *at, int columns) {
    return !at->stored && at->first + columns <= at->past;
}

#define GROWTH 8.0f     /* as exponents of 2 */
#define FAR 16777216.0f /* m, too: from here on it is subtracted by itself, see excess */

/* A lane's part of the running softmax of two queries, 8 rows apart: m, its share of the row sum l,
 * accumulated P V. Logits and m are in a unit, see dots_to_exponents. */
template <int DEPTH> struct matrix_softmax {
    float row_max[2], row_sum[2];
    float output[DEPTH / 8][4];
};

/* Since m is rounded in its unit, exponents of a row are those of S - m and so much. */
DEVICE float excess(float row_max, float unit) {
    const float less = subtrahend(row_max), exponent = less * unit;
    return fabsf(exponent) < FAR ? fmaf(less, unit, -exponent) : 0.0f;
}

/* m of the ith query and the rescaling, from the largest of the lane's logits. */
template <int DEPTH>
DEVICE void raise_row_max(int i, float largest, float unit, matrix_softmax<DEPTH> *softmax) {
    const float before = softmax->row_max[i];
    const bool grown = (largest - before) * unit > GROWTH;
    TAKEN(matrix_forward_not_raised, !grown);
    if (warp_all(!grown)) return;
    const float row_max = quad_max(largest);
    const bool raised = (row_max - before) * unit > GROWTH; /* whatever other rows do */
    const float exponent = fmaf(before - row_max, unit, excess(row_max, unit));
    const float rescale = raised ? fast_exp2(exponent - excess(before, unit)) : 1.0f;
    softmax->row_max[i] = raised ? row_max : before;
    softmax->row_sum[i] *= rescale;
    UNROLL
    for (int k = 0; k < DEPTH / 4; k++) softmax->output[k / 2][2 * i + k % 2] *= rescale;
}

/* Step 2: c from logits to exponentials, -1 where the key is masked. UNMASKED: no key is, and none
 * has a bias. */
template <int DEPTH, bool UNMASKED>
DEVICE void update_matrix_softmax(const key_tile *at, int64_t query, float unit,
                                  const matrix_buffer<DEPTH> *buffer,
                                  float c[matrix_buffer<DEPTH>::COLUMNS / 8][4],
                                  matrix_softmax<DEPTH> *softmax) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    const int ahead = at->stored ? -columns : at->first - (int)query; /* keys, of the queries */
    const float biases = bias_unit(unit);
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int row = warp_row() + lane_row() + 8 * i;
        float largest = -INFINITY, row_sum = 0.0f;
        uint32_t visible = 0;
        UNROLL
        for (int k = 0; k < columns / 4; k++) {
            const int column = k / 2 * 8 + lane_column() + k % 2;
            float *const x = &c[k / 2][2 * i + k % 2];
            if (!UNMASKED) {
                const float bias = buffer->bias[column];
                if (bias == INFINITY || column + ahead > row) continue;
                *x = fmaf(bias, biases, *x);
                visible |= 1u << k;
            }
            largest = fmaxf(largest, *x);
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
            const bool is_visible = UNMASKED || (visible >> k & 1);
            *x = is_visible ? fast_exp2(fmaf(*x, unit, -exponent)) : -1.0f;
            row_sum += is_visible ? *x : 0.0f;
        }
        softmax->row_sum[i] += row_sum;
    }
}

template <int TILES> DEVICE void masked_to_zero(float c[TILES][4]) {
    UNROLL
    for (int i = 0; i < TILES * 4; i++) {
        float *const x = &c[i / 4][i % 4];
        *x = *x < 0.0f ? 0.0f : *x; /* NaN stays */
    }
}

/* Step 3: O += P V. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void accumulate_matrix_values(const matrix_buffer<DEPTH> *buffer,
                                     const float c[matrix_buffer<DEPTH>::COLUMNS / 8][4],
                                     matrix_softmax<DEPTH> *softmax) {
    UNROLL
    for (int k = 0; k < matrix_buffer<DEPTH>::COLUMNS; k += 16) {
        uint32_t a[4], b[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            const float *const pair = &c[k / 8 + i / 2][i % 2 * 2];
            a[i] = pack<TYPE>(pair[0], pair[1]);
        }
        UNROLL
        for (int d = 0; d < DEPTH; d += 16) {
            load_values(b, buffer->columns[1], k, d);
            multiply<TYPE>(softmax->output[d / 8], a, b);
            multiply<TYPE>(softmax->output[d / 8 + 1], a, b + 2);
        }
    }
}

/* The same, one key after the other, where a value is not finite: values of masked keys are left
 * out. P goes through shared memory, in the place of the keys, 32 columns at a time. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void accumulate_nonfinite(matrix_buffer<DEPTH> *buffer,
                                 const float c[matrix_buffer<DEPTH>::COLUMNS / 8][4],
                                 matrix_softmax<DEPTH> *softmax) {
    static_assert(sizeof buffer->columns[0] >= sizeof(float[MATRIX_ROWS][32]));
    float (*const weights)[32] = (float (*)[32])buffer->columns[0];
    const int row = warp_row() + lane_row();
    UNROLL
    for (int first = 0; first < matrix_buffer<DEPTH>::COLUMNS; first += 32) {
        UNROLL
        for (int i = 0; i < 16; i++) {
            weights[row + i / 2 % 2 * 8][i / 4 * 8 + lane_column() + i % 2] =
                c[first / 8 + i / 4][i % 4];
        }
        sync_warp();
        for (int k = 0; k < 32; k++) {
            const float weight[2] = {weights[row][k], weights[row + 8][k]};
            UNROLL
            for (int n = 0; n < DEPTH / 4; n++) {
                const int d = n / 2 * 8 + lane_column() + n % 2;
                const uint16_t half = *tile_at(buffer->columns[1], first + k, d);
                const float value = TYPE == H2O_BF16 ? bf16_to_float(half) : f16_to_float(half);
                UNROLL
                for (int i = 0; i < 2; i++) {
                    float *const x = &softmax->output[n / 2][2 * i + n % 2];
                    *x = weight[i] < 0.0f ? *x : fmaf(weight[i], value, *x);
                }
            }
        }
        sync_warp();
    }
}

/* Advances `at` to the next tile that holds a key, and starts the copy of its keys, if they are not
 * quantised. Returns false where there is none. */
template <int DEPTH>
DEVICE bool fetch_keys(const attend_item *item, key_tile *at, matrix_buffer<DEPTH> *buffer) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    for (;; at->first += columns) {
        if (at->stored && at->first >= item->slots) open_keys(item, false, at);
        if (!at->stored && at->first >= at->end) return false;
        if (is_past(at, columns)) break; /* nobody asks for its bias */
        if (load_bias(item, at->stored, at->first, columns, buffer->bias)) break;
    }
    if (!h2o_row_is_quantised(at->keys.type)) {
        fetch_matrix<DEPTH, columns>(buffer->columns[0], item, &at->keys, at->stored, at->first,
                                     NULL);
    }
    close_copies();
    return true;
}

/* Starts the copy of the tile's values; zeros for those of no key. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void fetch_values(const attend_item *item, const key_tile *at,
                         matrix_buffer<DEPTH> *buffer) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    if (h2o_row_is_quantised(at->values.type)) {
        load_rounded<DEPTH, TYPE, columns>(buffer->columns[1], item, &at->values, at->first,
                                           buffer->bias);
    } else {
        fetch_matrix<DEPTH, columns>(buffer->columns[1], item, &at->values, at->stored, at->first,
                                     at->stored ? buffer->bias : NULL);
    }
    close_copies();
}

/* Steps 1 to 3 for all tiles. Copies overlap with products: values with those of their keys, the
 * next tile's keys with those of the values. careful: values may be infinite. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void forward_keys(const attend_item *item, int64_t query, bool careful,
                         matrix_buffer<DEPTH> *buffer, matrix_softmax<DEPTH> *softmax) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    key_tile at = {};
    at.end = (int32_t)lower(query + MATRIX_ROWS, item->tokens);
    at.past = (int32_t)query + 1;
    open_keys(item, item->slots > 0, &at);
    bool more = fetch_keys<DEPTH>(item, &at, buffer);
    while (more) {
        float c[columns / 8][4];
        const bool numbers = h2o_row_is_quantised(at.keys.type);
        if (numbers)
            load_numbers<DEPTH, TYPE, columns>(buffer->columns[0], item, &at.keys, at.first,
                                               buffer->bias, buffer->scales);
        wait_copies<0>();
        sync_block(); /* the previous values have been used */
        fetch_values<DEPTH, TYPE>(item, &at, buffer);
        matrix_dots<DEPTH, TYPE>(buffer, buffer->columns[0], c);
        if (numbers) {
            scale_dots<columns / 8>(
                c, [&](int i) { return buffer->scales[i / 4 * 8 + lane_column() + i % 2]; });
        }
        dots_to_exponents<columns / 8>(c, item->p->scale, item->p->softcap);
        const float unit = exponent_unit(item->p->scale, item->p->softcap);
        const bool past = is_past(&at, columns);
        TAKEN(matrix_forward_unmasked, past);
        TAKEN(matrix_forward_of_stored, at.stored);
        TAKEN(matrix_forward_of_quantised, numbers);
        if (past) {
            update_matrix_softmax<DEPTH, true>(&at, query, unit, buffer, c, softmax);
        } else {
            update_matrix_softmax<DEPTH, false>(&at, query, unit, buffer, c, softmax);
        }
        wait_copies<0>();
        sync_block(); /* the keys have been used */
        const bool slow =
            careful && block_any(!finite_part<DEPTH, TYPE, columns>(buffer->columns[1]));
        TAKEN(matrix_forward_nonfinite, slow);
        if (slow) {
            accumulate_nonfinite<DEPTH, TYPE>(buffer, c, softmax);
            sync_block();
        } else if (!past) {
            masked_to_zero<columns / 8>(c);
        }
        at.first += columns;
        more = fetch_keys<DEPTH>(item, &at, buffer);
        if (!slow) accumulate_matrix_values<DEPTH, TYPE>(buffer, c, softmax);
    }
}

/* Whether there is a NaN among the block's outputs. */
template <int DEPTH> DEVICE bool any_nan(const matrix_softmax<DEPTH> *softmax) {
    bool any = false;
    UNROLL
    for (int i = 0; i < DEPTH / 8 * 4; i++) {
        const float x = softmax->output[i / 4][i % 4];
        any |= x != x;
    }
    return block_any(any);
}

/* As add_sink, for m in a unit. */
DEVICE void add_matrix_sink(float sink, float unit, float *row_max, float *row_sum) {
    if (sink == -INFINITY) return;
    const bool empty = *row_max == -INFINITY; /* all weights are to be 0 */
    if (empty) *row_max = 0.0f;
    *row_sum += empty ? 1.0f : fast_exp2(fmaf(sink, LOG2_E, -*row_max * unit));
}

/* O / l, m and the factor. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void write_matrix_outputs(const attend_item *item, int64_t h, int64_t query,
                                 const matrix_softmax<DEPTH> *softmax) {
    const h2o_attend_params *const p = item->p;
    const float unit = exponent_unit(p->scale, p->softcap);
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int64_t token = query + warp_row() + lane_row() + 8 * i;
        float row_max = softmax->row_max[i], row_sum = quad_sum(softmax->row_sum[i]);
        add_matrix_sink(sink_of(&p->sink_logits, h), unit, &row_max, &row_sum);
        const float inverse = 1.0f / row_sum;
        if (token >= item->tokens) continue;
        element_ref out = row_of(&p->out, item->b, item->columns[token], h);
        out.type = TYPE; /* which it is, and the compiler then knows */
        UNROLL
        for (int k = 0; k < DEPTH / 4; k++) {
            const int64_t d = k / 2 * 8 + lane_column() + k % 2;
            const float x = softmax->output[k / 2][2 * i + k % 2] * inverse;
            if (d < p->dims.D) set_element(out, d, x);
        }
        row_sum *= fast_exp2(-excess(row_max, unit));
        if (lane_column() == 0) write_softmax(item, h, token, row_max, row_sum);
    }
}

/* Grid: tiles of queries, H, B. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_forward(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    static_assert(sizeof(matrix_buffer<DEPTH>) == CUDA_MATRIX_SHARED(DEPTH));
    matrix_buffer<DEPTH> *const buffer = (matrix_buffer<DEPTH> *)shared;
    const int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * MATRIX_ROWS; /* most keys first */
    const int64_t h = blockIdx.y, b = blockIdx.z;
    const attend_item item = open_attend(p, workspace, b, h / p->dims.R);
    if (h2o_given(&p->mask)) clear_pads(p, b, h, query, MATRIX_ROWS);
    TAKEN(matrix_forward_of_pads, query >= item.tokens);
    if (query >= item.tokens) return;
    matrix_softmax<DEPTH> softmax;
    const row_source queries = token_source(&item, &p->query, h);
    fetch_matrix<DEPTH, MATRIX_ROWS>(buffer->rows, &item, &queries, false, query, NULL);
    bool careful = false;
    do {
        softmax = {};
        softmax.row_max[0] = softmax.row_max[1] = -INFINITY;
        forward_keys<DEPTH, TYPE>(&item, query, careful, buffer, &softmax);
        careful = !careful && any_nan<DEPTH>(&softmax);
    } while (careful);
    write_matrix_outputs<DEPTH, TYPE>(&item, h, query, &softmax);
}

#endif
