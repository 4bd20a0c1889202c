/* matrix_sums.cuh - sums.cuh by the tensor cores. */
#ifndef H2O_CUDA_MATRIX_SUMS_CUH
#define H2O_CUDA_MATRIX_SUMS_CUH

#include "matrix_tiles.cuh"

/* Sends for a tile of queries of one head, and what each of them counts. */
template <int DEPTH>
DEVICE void fetch_queries(const attend_unit *u, int64_t h, int64_t query, int side,
                          matrix_room<DEPTH> *room) {
    const int columns = matrix_room<DEPTH>::COLUMNS;
    const int64_t token = query + threadIdx.x;
    fetch_matrix<DEPTH, columns>(room->columns[side], u->p->dims.D,
                                 [&](int i) { return token_row(u, &u->p->query, h, query + i); });
    if (threadIdx.x < (unsigned)columns && token < u->tokens) {
        copy_async<4>(&room->weights[side][threadIdx.x], u->weights + token);
        copy_async<4>(&room->logs[side][threadIdx.x], u->logs + h * u->p->dims.Q + token);
    }
    close_copies();
}

/* What such a tile gives a lane's two keys. PLAIN: all see all, and nothing is added to logits. */
template <int DEPTH, bool PLAIN>
DEVICE void add_attention_of(const attend_unit *u, bool stored, int64_t first, int64_t query,
                             int side, const matrix_room<DEPTH> *room,
                             const float c[matrix_room<DEPTH>::COLUMNS / 8][4], float sum[2]) {
    const int columns = matrix_room<DEPTH>::COLUMNS, row = warp_row() + lane_row();
    UNROLL
    for (int k = 0; k < columns / 4; k++) {
        const int at = k / 2 * 8 + lane_column() + k % 2;
        const int64_t token = query + at;
        if (!PLAIN && token >= u->tokens) continue;
        const float counts = room->weights[side][at], log = room->logs[side][at];
        UNROLL
        for (int i = 0; i < 2; i++) {
            float logit = c[k / 2][2 * i + k % 2];
            if (!PLAIN) {
                const float bias = room->bias[row + 8 * i];
                if (bias == INFINITY || (!stored && first + row + 8 * i > token)) continue;
                logit += bias;
            }
            sum[i] = fmaf(fast_exp(logit - log), counts, sum[i]);
        }
    }
}

template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_matrix_attention(const attend_unit *u, bool stored, int64_t first, int64_t query,
                                 int side, const matrix_room<DEPTH> *room, float sum[2]) {
    const int columns = matrix_room<DEPTH>::COLUMNS;
    const bool plain = !stored && first + MATRIX_ROWS <= query + 1 && query + columns <= u->tokens;
    float c[columns / 8][4];
    matrix_dots<DEPTH, TYPE>(room, room->columns[side], c);
    scale_dots<columns / 8>(c, u->p->scale, u->p->softcap);
    if (plain) {
        add_attention_of<DEPTH, true>(u, stored, first, query, side, room, c, sum);
    } else {
        add_attention_of<DEPTH, false>(u, stored, first, query, side, room, c, sum);
    }
}

/* A tile of keys with the queries that see them, of all heads of the group: a tile of queries comes
 * while the one before it is being used. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_queries(const attend_unit *u, bool stored, int64_t first, matrix_room<DEPTH> *room,
                        float sum[2]) {
    const int columns = matrix_room<DEPTH>::COLUMNS;
    const int64_t R = u->p->dims.R, begin = stored ? 0 : first;
    const int64_t tiles = cuda_ceil(u->tokens - begin, columns);
    fetch_matrix<DEPTH, MATRIX_ROWS>(room->rows, u->p->dims.D,
                                     [&](int i) { return key_row(u, stored, first + i); });
    fetch_queries<DEPTH>(u, u->g * R, begin, 0, room);
    int side = 0;
    for (int64_t r = 0; r < R; r++) {
        for (int64_t i = 0; i < tiles; i++) {
            const bool last = i + 1 == tiles;
            wait_copies<0>();
            sync_block(); /* and the tile before has been used */
            if (!last || r + 1 < R) {
                fetch_queries<DEPTH>(u, u->g * R + r + last, begin + (last ? 0 : i + 1) * columns,
                                     1 - side, room);
            }
            add_matrix_attention<DEPTH, TYPE>(u, stored, first, begin + i * columns, side, room,
                                              sum);
            side = 1 - side;
        }
    }
}

/* Grid: tiles of keys, stored ones first, G, B. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_sums_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    matrix_room<DEPTH> *const room = (matrix_room<DEPTH> *)shared;
    const int64_t g = blockIdx.y, b = blockIdx.z;
    const attend_unit u = open_attend(p, workspace, b, g);
    const int64_t before = gridDim.x - cuda_ceil(p->dims.Q, MATRIX_ROWS);
    const bool stored = blockIdx.x < before;
    const int64_t first = (stored ? blockIdx.x : blockIdx.x - before) * MATRIX_ROWS;
    if (!stored) clear_pad_scores(p, b, g, first, MATRIX_ROWS);
    const bool any = load_bias(&u, stored, first, MATRIX_ROWS, room->bias) && u.tokens > 0;
    float sum[2] = {};
    if (any) add_queries<DEPTH, TYPE>(&u, stored, first, room, sum);
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int row = warp_row() + lane_row() + 8 * i;
        const float all = quad_sum(sum[i]);
        if (lane_column() == 0) write_sum(&u, stored, first + row, room->bias[row], all);
    }
}

#endif
