/* matrix_sums.cuh - sums.cuh with tensor cores: the attention that each key received.
 *
 * A block has MATRIX_ROWS keys, which stay in shared memory, a warp 16 of them, and a lane sums
 * for two. Queries come in tiles through two stages of shared memory: while one tile's logits and
 * exponentials are computed, the next one is being copied. */
#ifndef H2O_CUDA_MATRIX_SUMS_CUH
#define H2O_CUDA_MATRIX_SUMS_CUH

#include "matrix_stored.cuh"

/* Starts the copy of a tile of queries of one head with their row max and factors. */
template <int DEPTH>
DEVICE void fetch_queries(const attend_item *item, const row_source *queries, int64_t h,
                          int64_t query, int stage, matrix_buffer<DEPTH> *buffer) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    const int64_t token = query + threadIdx.x;
    fetch_matrix<DEPTH, columns>(buffer->columns[stage], item, queries, false, query, NULL);
    if (threadIdx.x < (unsigned)columns && token < item->tokens) {
        const int64_t from = h * item->p->dims.Q + token;
        copy_async<4>(&buffer->row_max[stage][threadIdx.x], item->row_max + from);
        copy_async<4>(&buffer->factors[stage][threadIdx.x], item->factors + from);
    }
    close_copies();
}

/* Adds what such a tile, of which c has the logits, gives to a lane's two keys. UNMASKED: every
 * query sees every key, and no key has a bias. LARGEST: maxima instead of sums. */
template <int DEPTH, bool UNMASKED, bool LARGEST>
DEVICE void add_column_sums_of(const attend_item *item, bool stored, int64_t first, int64_t query,
                               int stage, const matrix_buffer<DEPTH> *buffer,
                               const float c[matrix_buffer<DEPTH>::COLUMNS / 8][4], float sum[2]) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS, row = warp_row() + lane_row();
    UNROLL
    for (int k = 0; k < columns / 4; k++) {
        const int at = k / 2 * 8 + lane_column() + k % 2;
        const int64_t token = query + at;
        if (!UNMASKED && token >= item->tokens) continue;
        const float row_max = buffer->row_max[stage][at], factor = buffer->factors[stage][at];
        UNROLL
        for (int i = 0; i < 2; i++) {
            float logit = c[k / 2][2 * i + k % 2];
            if (!UNMASKED) {
                const float bias = buffer->bias[row + 8 * i];
                if (bias == INFINITY || (!stored && first + row + 8 * i > token)) continue;
                logit += bias;
            }
            const float e = fast_exp(logit - row_max);
            sum[i] = LARGEST ? h2o_larger(sum[i], e * factor) : fmaf(e, factor, sum[i]);
        }
    }
}

template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_matrix_column_sums(const attend_item *item, bool stored, int64_t first,
                                   int64_t query, int stage, const matrix_buffer<DEPTH> *buffer,
                                   float sum[2]) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    const bool unmasked =
        !stored && first + MATRIX_ROWS <= query + 1 && query + columns <= item->tokens;
    float c[columns / 8][4];
    matrix_dots<DEPTH, TYPE>(buffer, buffer->columns[stage], c);
    if (stored && h2o_row_is_quantised(item->store.key_type)) {
        const float *const scales = &buffer->scales[warp_row() + lane_row()];
        scale_dots<columns / 8>(c, [&](int i) { return scales[i % 4 / 2 * 8]; });
    }
    dots_to_logits<columns / 8>(c, item->p->scale, item->p->softcap);
    if (h2o_scores_largest(&item->p->policy)) {
        add_column_sums_of<DEPTH, false, true>(item, stored, first, query, stage, buffer, c, sum);
    } else if (unmasked) {
        add_column_sums_of<DEPTH, true, false>(item, stored, first, query, stage, buffer, c, sum);
    } else {
        add_column_sums_of<DEPTH, false, false>(item, stored, first, query, stage, buffer, c, sum);
    }
}

/* The column sums of a tile of keys, over the queries that see them of all R heads. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void sum_over_queries(const attend_item *item, bool stored, int64_t first,
                             matrix_buffer<DEPTH> *buffer, float sum[2]) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    const int64_t R = item->p->dims.R, begin = stored ? 0 : first;
    const int64_t tiles = cuda_ceil(item->tokens - begin, columns);
    const row_source keys = key_source(item, stored);
    row_source queries = token_source(item, &item->p->query, item->g * R);
    if (h2o_row_is_quantised(keys.type)) {
        load_numbers<DEPTH, TYPE, MATRIX_ROWS>(buffer->rows, item, &keys, first, buffer);
    } else {
        fetch_matrix<DEPTH, MATRIX_ROWS>(buffer->rows, item, &keys, stored, first, NULL);
    }
    fetch_queries<DEPTH>(item, &queries, item->g * R, begin, 0, buffer);
    int stage = 0;
    for (int64_t r = 0; r < R; r++) {
        for (int64_t i = 0; i < tiles; i++) {
            const bool last = i + 1 == tiles;
            wait_copies<0>();
            sync_block(); /* the previous tile has been used */
            if (!last || r + 1 < R) {
                if (last) queries = token_source(item, &item->p->query, item->g * R + r + 1);
                fetch_queries<DEPTH>(item, &queries, item->g * R + r + last,
                                     begin + (last ? 0 : i + 1) * columns, 1 - stage, buffer);
            }
            add_matrix_column_sums<DEPTH, TYPE>(item, stored, first, begin + i * columns, stage,
                                                buffer, sum);
            stage = 1 - stage;
        }
    }
}

/* Grid: tiles of keys, stored ones first, G, B. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_sums_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    matrix_buffer<DEPTH> *const buffer = (matrix_buffer<DEPTH> *)shared;
    const int64_t g = blockIdx.y, b = blockIdx.z;
    const attend_item item = open_attend(p, workspace, b, g);
    const int64_t stored_tiles = gridDim.x - cuda_ceil(p->dims.Q, MATRIX_ROWS);
    const bool stored = blockIdx.x < stored_tiles;
    const int64_t first = (stored ? blockIdx.x : blockIdx.x - stored_tiles) * MATRIX_ROWS;
    if (!stored) clear_pad_scores(p, b, g, first, MATRIX_ROWS);
    const bool any = load_bias(&item, stored, first, MATRIX_ROWS, buffer->bias) && item.tokens > 0;
    float sum[2] = {};
    if (any) sum_over_queries<DEPTH, TYPE>(&item, stored, first, buffer, sum);
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int row = warp_row() + lane_row() + 8 * i;
        const float column_sum = h2o_scores_largest(&p->policy) ? largest_of_lanes<4>(sum[i])
                                                                : quad_sum(sum[i]);
        if (lane_column() == 0)
            write_score(&item, stored, first + row, buffer->bias[row], column_sum);
    }
}

#endif
