/* forward.cuh - outputs [B,Q,H,D] of attend, and the row max and factor of each query [B,H,Q].
 *
 * FlashAttention with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). A block
 * has ATTEND_TILE queries of one head and goes through the keys that they see, a tile at a time:
 *
 *   1. S = Q K^T for the tile, scaled and capped; masked keys are left out;
 *   2. running row max m; P = exp(S - m); row sum l and accumulated outputs O are rescaled by
 *      exp(old m - m);
 *   3. O += P V, with P in shared memory.
 *
 * At the end the outputs are O / l. From m and the factor, decay weight / l, sums.cuh computes the
 * column sums. matrix_forward.cuh does the same with tensor cores. */
#ifndef H2O_CUDA_FORWARD_CUH
#define H2O_CUDA_FORWARD_CUH

#include "attend_tiles.cuh"

/* A thread's part of the running softmax of THREAD_ROWS queries: row max m, its share of the row
 * sum l and, of the accumulated P V, four neighboring elements of every 32. */
template <int DEPTH> struct running_softmax {
    float row_max[THREAD_ROWS], row_sum[THREAD_ROWS];
    float output[THREAD_ROWS][DEPTH / ROW_THREADS];
};

/* Steps 1 and 2: turns dot products into exponentials in buffer->weights, and rescales. */
template <int DEPTH>
DEVICE void update_softmax(const attend_item *item, bool stored, int64_t first, int64_t query,
                           int row, int column, const float dots[THREAD_ROWS][THREAD_COLUMNS],
                           tile_buffer<DEPTH> *buffer, running_softmax<DEPTH> *softmax) {
    UNROLL
    for (int i = 0; i < THREAD_ROWS; i++) {
        float logit[THREAD_COLUMNS], row_max = softmax->row_max[i], row_sum = 0.0f;
        bool visible[THREAD_COLUMNS];
        UNROLL
        for (int j = 0; j < THREAD_COLUMNS; j++) {
            const int at = column + j * ROW_THREADS;
            visible[j] = buffer->is_key[at] && (stored || first + at <= query + row + i);
            logit[j] = logit_of(dots[i][j], item->p->scale, item->p->softcap);
            if (visible[j]) row_max = fmaxf(row_max, logit[j]);
        }
        row_max = max_of_lanes<ROW_THREADS>(row_max);
        const float rescale =
            softmax->row_max[i] == row_max ? 1.0f : exponential(softmax->row_max[i], row_max);
        UNROLL
        for (int j = 0; j < THREAD_COLUMNS; j++) {
            const float weight = visible[j] ? exponential(logit[j], row_max) : -1.0f;
            buffer->weights[row + i][column + j * ROW_THREADS] = weight;
            row_sum += visible[j] ? weight : 0.0f;
        }
        softmax->row_max[i] = row_max;
        softmax->row_sum[i] = fmaf(softmax->row_sum[i], rescale, row_sum);
        UNROLL
        for (int k = 0; k < DEPTH / ROW_THREADS; k++) softmax->output[i][k] *= rescale;
    }
}

/* Step 3: O += P V for a tile of keys. */
template <int DEPTH>
DEVICE void accumulate_values(int row, int column, const float (*weights)[ATTEND_TILE + 4],
                              const float (*values)[DEPTH + 4], running_softmax<DEPTH> *softmax) {
    for (int j = 0; j < ATTEND_TILE; j++) {
        float weight[THREAD_ROWS];
        UNROLL
        for (int i = 0; i < THREAD_ROWS; i++) weight[i] = weights[row + i][j];
        UNROLL
        for (int k = 0; k < DEPTH / ROW_THREADS; k += 4) {
            const vec16 value = load16(&values[j][k * ROW_THREADS + column * 4]);
            UNROLL
            for (int i = 0; i < THREAD_ROWS; i++) {
                if (weight[i] < 0.0f) continue; /* masked; NaN does not count as masked */
                UNROLL
                for (int e = 0; e < 4; e++) {
                    softmax->output[i][k + e] =
                        fmaf(weight[i], bits_float(value.w[e]), softmax->output[i][k + e]);
                }
            }
        }
    }
}

/* Processes one tile of keys, whose values then replace them in shared memory. */
template <int DEPTH>
DEVICE void forward_tile(const attend_item *item, bool stored, int64_t first, int64_t query,
                         tile_buffer<DEPTH> *buffer, running_softmax<DEPTH> *softmax) {
    const int row = threadIdx.x / ROW_THREADS * THREAD_ROWS, column = threadIdx.x % ROW_THREADS;
    const int64_t D = item->p->dims.D;
    float dots[THREAD_ROWS][THREAD_COLUMNS] = {};
    if (!load_presence(item, stored, first, ATTEND_TILE, buffer->is_key)) return;
    TAKEN(forward_of_stored, stored);
    TAKEN(forward_second_tile, first > 0);
    load_tile<DEPTH>(buffer->columns, D, [&](int i) { return key_row(item, stored, first + i); });
    sync_block();
    add_tile_dots<DEPTH>(buffer->rows, buffer->columns, row, column, dots);
    update_softmax<DEPTH>(item, stored, first, query, row, column, dots, buffer, softmax);
    sync_block();
    load_tile<DEPTH>(buffer->columns, D, [&](int i) { return value_row(item, stored, first + i); });
    sync_block();
    accumulate_values<DEPTH>(row, column, buffer->weights, buffer->columns, softmax);
    sync_block();
}

/* Writes O / l, m and the factor. */
template <int DEPTH>
DEVICE void write_outputs(const attend_item *item, int64_t h, int64_t query,
                          const running_softmax<DEPTH> *softmax) {
    const h2o_attend_params *const p = item->p;
    const int row = threadIdx.x / ROW_THREADS * THREAD_ROWS, column = threadIdx.x % ROW_THREADS;
    UNROLL
    for (int i = 0; i < THREAD_ROWS; i++) {
        const int64_t token = query + row + i;
        float row_max = softmax->row_max[i],
              row_sum = sum_of_lanes<ROW_THREADS>(softmax->row_sum[i]);
        add_sink(sink_of(&p->sink_logits, h), &row_max, &row_sum);
        const float inverse = 1.0f / row_sum;
        if (token >= item->tokens) continue;
        const row_ref out = tensor_row(&p->out, item->b, item->columns[token], h);
        UNROLL
        for (int k = 0; k < DEPTH / ROW_THREADS; k++) {
            const int64_t d = k / 4 * 4 * ROW_THREADS + column * 4 + k % 4;
            const float x = softmax->output[i][k] * inverse;
            if (d < p->dims.D) set_element(out, d, x);
        }
        if (column == 0) write_softmax(item, h, token, row_max, row_sum);
    }
}

/* Grid: tiles of queries, H, B. */
template <int DEPTH>
DEVICE void forward_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    static_assert(sizeof(tile_buffer<DEPTH>) == CUDA_ATTEND_SHARED(DEPTH));
    tile_buffer<DEPTH> *const buffer = (tile_buffer<DEPTH> *)shared;
    const int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * ATTEND_TILE; /* most keys first */
    const int64_t h = blockIdx.y, b = blockIdx.z;
    const attend_item item = open_attend(p, workspace, b, h / p->dims.R);
    if (h2o_given(&p->mask)) clear_pads(p, b, h, query, ATTEND_TILE);
    if (query >= item.tokens) return;
    running_softmax<DEPTH> softmax = {};
    UNROLL
    for (int i = 0; i < THREAD_ROWS; i++) softmax.row_max[i] = -INFINITY;
    load_tile<DEPTH>(buffer->rows, p->dims.D,
                     [&](int i) { return token_row(&item, &p->query, h, query + i); });
    for (int64_t i = 0; i < item.slots; i += ATTEND_TILE) {
        forward_tile<DEPTH>(&item, true, i, query, buffer, &softmax);
    }
    for (int64_t i = 0; i < lower(query + ATTEND_TILE, item.tokens); i += ATTEND_TILE) {
        forward_tile<DEPTH>(&item, false, i, query, buffer, &softmax);
    }
    write_outputs<DEPTH>(&item, h, query, &softmax);
}

#endif
