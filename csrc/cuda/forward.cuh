/* forward.cuh - outputs by online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), and the
 * logarithm of each query's sum of exponentials. */
#ifndef H2O_CUDA_FORWARD_CUH
#define H2O_CUDA_FORWARD_CUH

#include "attend_tiles.cuh"

/* What a thread has of PAIRS queries: the highest logit, its part of the sum of exponentials, and
 * their products with the values, of which it has four elements in a row of every 32. */
template <int DEPTH> struct query_sums {
    float top[PAIRS], total[PAIRS];
    float output[PAIRS][DEPTH / LANES];
};

/* Logits to exponentials, which others of the row read after a sync_warp. */
template <int DEPTH>
DEVICE void add_logits(const attend_unit *u, bool stored, int64_t first, int64_t query, int row,
                       int column, const float dots[PAIRS][FOURS], attend_room<DEPTH> *room,
                       query_sums<DEPTH> *sums) {
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        float logit[FOURS], top = sums->top[i], total = 0.0f;
        bool seen[FOURS];
        UNROLL
        for (int j = 0; j < FOURS; j++) {
            const int at = column + j * LANES;
            const float bias = room->bias[at];
            seen[j] = bias != INFINITY && (stored || first + at <= query + row + i);
            logit[j] = logit_of(dots[i][j], u->p->scale, u->p->softcap, bias);
            if (seen[j]) top = fmaxf(top, logit[j]);
        }
        top = lanes_max(top);
        const float factor = sums->top[i] == top ? 1.0f : exponential(sums->top[i], top);
        UNROLL
        for (int j = 0; j < FOURS; j++) {
            const float weight = seen[j] ? exponential(logit[j], top) : -1.0f;
            room->weights[row + i][column + j * LANES] = weight;
            total += seen[j] ? weight : 0.0f;
        }
        sums->top[i] = top;
        sums->total[i] = fmaf(sums->total[i], factor, total);
        UNROLL
        for (int k = 0; k < DEPTH / LANES; k++) sums->output[i][k] *= factor;
    }
}

template <int DEPTH>
DEVICE void add_values(int row, int column, const attend_room<DEPTH> *room,
                       query_sums<DEPTH> *sums) {
    for (int j = 0; j < ATTEND_TILE; j++) {
        float weight[PAIRS];
        UNROLL
        for (int i = 0; i < PAIRS; i++) weight[i] = room->weights[row + i][j];
        UNROLL
        for (int k = 0; k < DEPTH / LANES; k += 4) {
            const vec16 value = load16(&room->columns[j][k * LANES + column * 4]);
            UNROLL
            for (int i = 0; i < PAIRS; i++) {
                if (weight[i] < 0.0f) continue; /* not seen; NaN is */
                UNROLL
                for (int e = 0; e < 4; e++) {
                    sums->output[i][k + e] =
                        fmaf(weight[i], bits_float(value.w[e]), sums->output[i][k + e]);
                }
            }
        }
    }
}

/* A tile of keys, and their values in the same place. */
template <int DEPTH>
DEVICE void forward_tile(const attend_unit *u, bool stored, int64_t first, int64_t query,
                         attend_room<DEPTH> *room, query_sums<DEPTH> *sums) {
    const int row = threadIdx.x / LANES * PAIRS, column = threadIdx.x % LANES;
    const int64_t D = u->p->dims.D;
    float dots[PAIRS][FOURS];
    if (!load_bias(u, stored, first, ATTEND_TILE, room->bias)) return;
    load_tile<DEPTH>(room->columns, D, [&](int i) { return key_row(u, stored, first + i); });
    sync_block();
    tile_dots<DEPTH>(room->rows, room->columns, row, column, dots);
    add_logits<DEPTH>(u, stored, first, query, row, column, dots, room, sums);
    sync_block();
    load_tile<DEPTH>(room->columns, D, [&](int i) { return value_row(u, stored, first + i); });
    sync_block();
    add_values<DEPTH>(row, column, room, sums);
    sync_block();
}

template <int DEPTH>
DEVICE void write_queries(const attend_unit *u, int64_t h, int64_t query, float *logs,
                          const query_sums<DEPTH> *sums) {
    const h2o_attend_params *const p = u->p;
    const int row = threadIdx.x / LANES * PAIRS, column = threadIdx.x % LANES;
    UNROLL
    for (int i = 0; i < PAIRS; i++) {
        const int64_t token = query + row + i;
        const float total = lanes_sum(sums->total[i]), inverse = 1.0f / total;
        if (token >= u->tokens) continue;
        const element_ref out = row_of(&p->out, u->b, u->columns[token], h);
        UNROLL
        for (int k = 0; k < DEPTH / LANES; k++) {
            const int64_t d = k / 4 * 4 * LANES + column * 4 + k % 4;
            const float x = sums->output[i][k] * inverse;
            if (d < p->dims.D) set_element(out, d, x);
        }
        if (column == 0) logs[token] = sums->top[i] + logf(total);
    }
}

/* Grid: tiles of queries, H, B. */
template <int DEPTH>
DEVICE void forward_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    static_assert(sizeof(attend_room<DEPTH>) == CUDA_ATTEND_SHARED(DEPTH));
    attend_room<DEPTH> *const room = (attend_room<DEPTH> *)shared;
    const int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * ATTEND_TILE; /* longest first */
    const int64_t h = blockIdx.y, b = blockIdx.z;
    const attend_unit u = open_attend(p, workspace, b, h / p->dims.R);
    if (h2o_given(&p->mask)) clear_pads(p, b, h, query, ATTEND_TILE);
    if (query >= u.tokens) return;
    query_sums<DEPTH> sums = {};
    UNROLL
    for (int i = 0; i < PAIRS; i++) sums.top[i] = -INFINITY;
    load_tile<DEPTH>(room->rows, p->dims.D,
                     [&](int i) { return token_row(&u, &p->query, h, query + i); });
    for (int64_t i = 0; i < u.slots; i += ATTEND_TILE) {
        forward_tile<DEPTH>(&u, true, i, query, room, &sums);
    }
    for (int64_t i = 0; i < lower(query + ATTEND_TILE, u.tokens); i += ATTEND_TILE) {
        forward_tile<DEPTH>(&u, false, i, query, room, &sums);
    }
    float *const logs = (float *)u.logs + h * p->dims.Q;
    write_queries<DEPTH>(&u, h, query, logs, &sums);
}

#endif
