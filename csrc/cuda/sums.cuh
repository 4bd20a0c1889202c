/* sums.cuh - for each key the attention that it got, computed again from the logarithms of the
 * queries' sums, since it takes all of a row to know one weight. A block has its keys to itself,
 * so that nothing is added by atomics and the sums have one order. */
#ifndef H2O_CUDA_SUMS_CUH
#define H2O_CUDA_SUMS_CUH

#include "attend_tiles.cuh"

/* What a tile of queries of one head gives PAIRS keys. */
template <int DEPTH>
DEVICE void add_attention(const attend_unit *u, bool stored, int64_t first, int64_t h,
                          int64_t query, const attend_room<DEPTH> *room, float sum[PAIRS]) {
    const int row = threadIdx.x / LANES * PAIRS, column = threadIdx.x % LANES;
    const h2o_attend_params *const p = u->p;
    float dots[PAIRS][FOURS];
    tile_dots<DEPTH>(room->rows, room->columns, row, column, dots);
    UNROLL
    for (int j = 0; j < FOURS; j++) {
        const int64_t token = query + column + j * LANES;
        if (token >= u->tokens) continue;
        const float counts = u->weights[token], log = u->logs[h * p->dims.Q + token];
        UNROLL
        for (int i = 0; i < PAIRS; i++) {
            const float bias = room->bias[row + i];
            if (bias == INFINITY || (!stored && first + row + i > token)) continue;
            const float logit = logit_of(dots[i][j], p->scale, p->softcap, bias);
            sum[i] = fmaf(fast_exp(logit - log), counts, sum[i]);
        }
    }
}

/* Grid: tiles of keys, stored ones first, G, B. */
template <int DEPTH>
DEVICE void sums_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    attend_room<DEPTH> *const room = (attend_room<DEPTH> *)shared;
    const int64_t g = blockIdx.y, b = blockIdx.z;
    const attend_unit u = open_attend(p, workspace, b, g);
    const int64_t before = gridDim.x - cuda_ceil(p->dims.Q, ATTEND_TILE);
    const bool stored = blockIdx.x < before;
    const int64_t first = (stored ? blockIdx.x : blockIdx.x - before) * ATTEND_TILE;
    const int row = threadIdx.x / LANES * PAIRS, column = threadIdx.x % LANES;
    if (!stored) clear_pad_scores(p, b, g, first, ATTEND_TILE);
    const bool any = load_bias(&u, stored, first, ATTEND_TILE, room->bias) && u.tokens > 0;
    float sum[PAIRS] = {};
    if (any) {
        load_tile<DEPTH>(room->rows, p->dims.D,
                         [&](int i) { return key_row(&u, stored, first + i); });
    }
    for (int64_t r = 0; any && r < p->dims.R; r++) {
        const int64_t h = g * p->dims.R + r;
        for (int64_t query = stored ? 0 : first; query < u.tokens; query += ATTEND_TILE) {
            sync_block(); /* the tile before has been read */
            load_tile<DEPTH>(room->columns, p->dims.D,
                             [&](int i) { return token_row(&u, &p->query, h, query + i); });
            sync_block();
            add_attention<DEPTH>(&u, stored, first, h, query, room, sum);
        }
    }
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        const float all = lanes_sum(sum[i]);
        if (column == 0) write_sum(&u, stored, first + row + i, room->bias[row + i], all);
    }
}

#endif
