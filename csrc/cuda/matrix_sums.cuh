/* matrix_sums.cuh - sums.cuh by the tensor cores. */
#ifndef H2O_CUDA_MATRIX_SUMS_CUH
#define H2O_CUDA_MATRIX_SUMS_CUH

#include "matrix_tiles.cuh"

/* What a tile of queries of one head gives a lane's two keys. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_matrix_attention(const attend_unit *u, bool stored, int64_t first, int64_t query,
                                 const matrix_room<DEPTH> *room, float sum[2]) {
    const int columns = matrix_room<DEPTH>::COLUMNS, row = warp_row() + lane_row();
    float c[matrix_room<DEPTH>::COLUMNS / 8][4];
    matrix_dots<DEPTH, TYPE>(room, c);
    UNROLL
    for (int k = 0; k < columns / 4; k++) {
        const int at = k / 2 * 8 + lane_column() + k % 2;
        const int64_t token = query + at;
        if (token >= u->tokens) continue;
        const float counts = room->weights[at], log = room->logs[at];
        UNROLL
        for (int i = 0; i < 2; i++) {
            const float bias = room->bias[row + 8 * i];
            if (bias == INFINITY || (!stored && first + row + 8 * i > token)) continue;
            const float logit = logit_of(c[k / 2][2 * i + k % 2], u->p->scale, u->p->softcap, bias);
            sum[i] = fmaf(fast_exp(logit - log), counts, sum[i]);
        }
    }
}

/* Grid: tiles of keys, stored ones first, G, B. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_sums_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    matrix_room<DEPTH> *const room = (matrix_room<DEPTH> *)shared;
    const int columns = matrix_room<DEPTH>::COLUMNS;
    const int64_t g = blockIdx.y, b = blockIdx.z, Q = p->dims.Q;
    const attend_unit u = open_attend(p, workspace, b, g);
    const int64_t before = gridDim.x - cuda_ceil(Q, MATRIX_ROWS);
    const bool stored = blockIdx.x < before;
    const int64_t first = (stored ? blockIdx.x : blockIdx.x - before) * MATRIX_ROWS;
    if (!stored) clear_pad_scores(p, b, g, first, MATRIX_ROWS);
    const bool any = load_bias(&u, stored, first, MATRIX_ROWS, room->bias) && u.tokens > 0;
    float sum[2] = {};
    if (any) {
        load_matrix<DEPTH, TYPE>(room->rows, MATRIX_ROWS, p->dims.D,
                                 [&](int i) { return key_row(&u, stored, first + i); });
    }
    for (int64_t r = 0; any && r < p->dims.R; r++) {
        const int64_t h = g * p->dims.R + r;
        for (int64_t query = stored ? 0 : first; query < u.tokens; query += columns) {
            const int64_t token = query + threadIdx.x;
            sync_block(); /* the tile before has been read */
            load_matrix<DEPTH, TYPE>(room->columns, columns, p->dims.D,
                                     [&](int i) { return token_row(&u, &p->query, h, query + i); });
            if (threadIdx.x < (unsigned)columns && token < u.tokens) {
                room->weights[threadIdx.x] = u.weights[token];
                room->logs[threadIdx.x] = u.logs[h * Q + token];
            }
            sync_block();
            add_matrix_attention<DEPTH, TYPE>(&u, stored, first, query, room, sum);
        }
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int row = warp_row() + lane_row() + 8 * i;
        const float all = quad_sum(sum[i]);
        if (lane_column() == 0) write_sum(&u, stored, first + row, room->bias[row], all);
    }
}

#endif
