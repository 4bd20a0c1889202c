/* matrix_forward.cuh - forward.cuh with tensor cores.
 *
 * A block has MATRIX_ROWS queries of one head, each warp 16 of them, and goes through the tiles of
 * keys that they see:
 *
 *   1. S = Q K^T in registers, while the tile's values are being copied to shared memory;
 *   2. running row max m, P = exp(S - m) in place, row sum l, rescaling of O: matrix_softmax.cuh;
 *   3. O += P V, with P as 16-bit matrices, while the next tile's keys are being copied.
 *
 * The matrix product turns 0 * infinity into NaN if a key is masked, or if its weight is 0 in
 * float16 but not in 32 bits. So a block with a NaN among its outputs repeats everything, and then
 * does step 3 in a slower way for tiles whose values are not all finite. */
#ifndef H2O_CUDA_MATRIX_FORWARD_CUH
#define H2O_CUDA_MATRIX_FORWARD_CUH

#include "matrix_softmax.cuh"
#include "matrix_stored.cuh"

DEVICE void open_keys(const attend_item *item, bool stored, key_tile *at) {
    at->stored = stored;
    at->first = 0;
    at->keys = key_source(item, stored);
    at->values = value_source(item, stored);
}

template <int TILES> DEVICE void masked_to_zero(float c[TILES][4]) {
    UNROLL
    for (int i = 0; i < TILES * 4; i++) {
        float *const x = &c[i / 4][i % 4];
        *x = *x < 0.0f ? 0.0f : *x; /* NaN stays */
    }
}

/* Step 3: O += P V, in units of weight_unit<TYPE>(GROWTH). */
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
            a[i] = pack_weights<TYPE>(pair[0], pair[1], GROWTH);
        }
        UNROLL
        for (int d = 0; d < DEPTH; d += 16) {
            load_values(b, buffer->columns[1], k, d);
            multiply<TYPE>(softmax->output[d / 8], a, b);
            multiply<TYPE>(softmax->output[d / 8 + 1], a, b + 2);
        }
    }
}

/* The same one key at a time, for tiles with a value that is not finite: values of masked keys are
 * left out. P goes through shared memory, in place of the keys, 32 columns at a time. */
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
                const float value = TYPE == H2O_BF16 ? float_from_bf16(half) : float_from_f16(half);
                UNROLL
                for (int i = 0; i < 2; i++) {
                    float *const x = &softmax->output[n / 2][2 * i + n % 2];
                    const float scaled = weight[i] * weight_unit<TYPE>(GROWTH);
                    *x = weight[i] < 0.0f ? *x : fmaf(scaled, value, *x);
                }
            }
        }
        sync_warp();
    }
}

/* Advances `at` to the next tile that holds a key, and starts the copy of its keys unless they are
 * quantized. Returns false if there is no such tile. */
template <int DEPTH>
DEVICE bool fetch_keys(const attend_item *item, key_tile *at, matrix_buffer<DEPTH> *buffer) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    for (;; at->first += columns) {
        if (at->stored && at->first >= item->slots) open_keys(item, false, at);
        if (!at->stored && at->first >= at->end) return false;
        if (!at->stored) break; /* a tile of new keys always has one, and is_key is not needed */
        if (load_presence(item, true, at->first, columns, buffer->is_key)) break;
    }
    if (!h2o_row_is_quantized(at->keys.type)) {
        fetch_matrix<DEPTH, columns>(buffer->columns[0], item, &at->keys, at->stored, at->first,
                                     NULL);
    }
    close_copies();
    return true;
}

/* Starts the copy of the tile's values; zeros where there is no key. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void fetch_values(const attend_item *item, const key_tile *at,
                         matrix_buffer<DEPTH> *buffer) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    if (h2o_row_is_quantized(at->values.type)) {
        load_rounded<DEPTH, TYPE, columns>(buffer->columns[1], item, &at->values, at->first,
                                           buffer->is_key);
    } else {
        fetch_matrix<DEPTH, columns>(buffer->columns[1], item, &at->values, at->stored, at->first,
                                     at->stored ? buffer->is_key : NULL);
    }
    close_copies();
}

/* Steps 1 to 3 for all tiles. Copies overlap with products: those of values with the products of
 * their keys, those of the next tile's keys with the products of the values. careful: values may be
 * infinite. */
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
        const bool numbers = h2o_row_is_quantized(at.keys.type);
        if (numbers)
            load_numbers<DEPTH, TYPE, columns>(buffer->columns[0], item, &at.keys, at.first,
                                               buffer->is_key, buffer->scales);
        wait_copies<0>();
        sync_block(); /* all threads are done with the previous values */
        fetch_values<DEPTH, TYPE>(item, &at, buffer);
        float c[columns / 8][4] = {};
        add_matrix_dots<DEPTH, TYPE>(buffer, buffer->columns[0], c);
        if (numbers) {
            scale_dots<columns / 8>(
                c, [&](int i) { return buffer->scales[i / 4 * 8 + lane_column() + i % 2]; });
        }
        dots_to_exponents<columns / 8>(c, item->p->scale, item->p->softcap);
        const float unit = exponent_unit(item->p->scale, item->p->softcap);
        const bool past = !at.stored && at.first + columns <= at.past; /* all see every key */
        TAKEN(matrix_forward_unmasked, past);
        TAKEN(matrix_forward_of_stored, at.stored);
        TAKEN(matrix_forward_of_quantized, numbers);
        if (past) {
            update_matrix_softmax<DEPTH, SEES_ALL>(&at, query, unit, buffer, c, softmax);
        } else if (at.stored) {
            update_matrix_softmax<DEPTH, SEES_STORED>(&at, query, unit, buffer, c, softmax);
        } else {
            update_matrix_softmax<DEPTH, SEES_PAST>(&at, query, unit, buffer, c, softmax);
        }
        wait_copies<0>();
        sync_block(); /* all threads are done with the keys */
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

/* Whether any of the block's outputs is NaN. */
template <int DEPTH> DEVICE bool any_nan(const matrix_softmax<DEPTH> *softmax) {
    bool any = false;
    UNROLL
    for (int i = 0; i < DEPTH / 8 * 4; i++) {
        const float x = softmax->output[i / 4][i % 4];
        any |= x != x;
    }
    return block_any(any);
}

/* Writes O / l, m and the factor. */
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
        const float inverse = 1.0f / (row_sum * weight_unit<TYPE>(GROWTH));
        if (token >= item->tokens) continue;
        row_ref out = tensor_row(&p->out, item->b, item->columns[token], h);
        out.type = TYPE; /* it is TYPE already; this tells the compiler */
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
