/* matrix_forward.cuh - forward.cuh by the tensor cores. */
#ifndef H2O_CUDA_MATRIX_FORWARD_CUH
#define H2O_CUDA_MATRIX_FORWARD_CUH

#include "matrix_tiles.cuh"

/* Where a block is in its keys: stored ones first, then new ones up to the last query's own. */
typedef struct {
    bool stored;
    int64_t first, end; /* end: of the new ones */
} key_tile;

/* What a lane has of two queries, 8 rows apart; total is its part of the sum. */
template <int DEPTH> struct matrix_sums {
    float top[2], total[2];
    float output[DEPTH / 8][4];
};

/* Logits to exponentials, in place, -1 where a query does not see the key. PLAIN: all see all, and
 * nothing is added. */
template <int DEPTH, bool PLAIN>
DEVICE void matrix_weights(const key_tile *at, int64_t query, const matrix_room<DEPTH> *room,
                           float c[matrix_room<DEPTH>::COLUMNS / 8][4], matrix_sums<DEPTH> *sums) {
    const int columns = matrix_room<DEPTH>::COLUMNS;
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int64_t token = query + warp_row() + lane_row() + 8 * i;
        float top = sums->top[i], total = 0.0f;
        uint64_t seen = 0;
        UNROLL
        for (int k = 0; k < columns / 4; k++) {
            const int column = k / 2 * 8 + lane_column() + k % 2;
            float *const x = &c[k / 2][2 * i + k % 2];
            if (!PLAIN) {
                const float bias = room->bias[column];
                if (bias == INFINITY || (!at->stored && at->first + column > token)) continue;
                *x += bias;
                seen |= (uint64_t)1 << k;
            }
            top = fmaxf(top, *x);
        }
        top = quad_max(top);
        const float factor = sums->top[i] == top ? 1.0f : exponential(sums->top[i], top);
        UNROLL
        for (int k = 0; k < columns / 4; k++) {
            float *const x = &c[k / 2][2 * i + k % 2];
            const bool counts = PLAIN || (seen >> k & 1);
            *x = counts ? exponential(*x, top) : -1.0f;
            total += counts ? *x : 0.0f;
        }
        sums->top[i] = top;
        sums->total[i] = fmaf(sums->total[i], factor, total);
        UNROLL
        for (int k = 0; k < DEPTH / 4; k++) sums->output[k / 2][2 * i + k % 2] *= factor;
    }
}

DEVICE float unless_unseen(float weight) { return weight < 0.0f ? 0.0f : weight; } /* NaN stays */

template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_matrix_values(const matrix_room<DEPTH> *room,
                              const float c[matrix_room<DEPTH>::COLUMNS / 8][4],
                              matrix_sums<DEPTH> *sums) {
    const int lane = threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < matrix_room<DEPTH>::COLUMNS; k += 16) {
        uint32_t a[4], b[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            const float *const pair = &c[k / 8 + i / 2][i % 2 * 2];
            a[i] = pack<TYPE>(unless_unseen(pair[0]), unless_unseen(pair[1]));
        }
        UNROLL
        for (int d = 0; d < DEPTH; d += 16) {
            load_transposed(b, &room->columns[1][k + lane % 16][d + lane / 16 * 8]);
            multiply<TYPE>(sums->output[d / 8], a, b);
            multiply<TYPE>(sums->output[d / 8 + 1], a, b + 2);
        }
    }
}

/* The same, one key after the other, where a value is not finite: nothing may touch what is not
 * seen. The weights go through shared memory, in the place of the keys, 32 columns at a time. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_odd_values(matrix_room<DEPTH> *room,
                           const float c[matrix_room<DEPTH>::COLUMNS / 8][4],
                           matrix_sums<DEPTH> *sums) {
    static_assert(sizeof room->columns[0] >= sizeof(float[MATRIX_ROWS][32]));
    float (*const weights)[32] = (float (*)[32])room->columns[0];
    const int row = warp_row() + lane_row();
    UNROLL
    for (int first = 0; first < matrix_room<DEPTH>::COLUMNS; first += 32) {
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
                const uint16_t half = room->columns[1][first + k][d];
                const float value = TYPE == H2O_BF16 ? bf16_to_float(half) : f16_to_float(half);
                UNROLL
                for (int i = 0; i < 2; i++) {
                    float *const x = &sums->output[n / 2][2 * i + n % 2];
                    *x = weight[i] < 0.0f ? *x : fmaf(weight[i], value, *x);
                }
            }
        }
        sync_warp();
    }
}

/* Finds the next tile with a key in it, from `at` on, and sends for the keys. */
template <int DEPTH>
DEVICE bool fetch_keys(const attend_unit *u, key_tile *at, matrix_room<DEPTH> *room) {
    const int columns = matrix_room<DEPTH>::COLUMNS;
    for (;; at->first += columns) {
        if (at->stored && at->first >= u->slots) *at = key_tile{false, 0, at->end};
        if (!at->stored && at->first >= at->end) return false;
        if (load_bias(u, at->stored, at->first, columns, room->bias)) break;
    }
    fetch_matrix<DEPTH, columns>(room->columns[0], u->p->dims.D,
                                 [&](int i) { return key_row(u, at->stored, at->first + i); });
    close_copies();
    return true;
}

template <int DEPTH, h2o_dtype TYPE>
DEVICE void fetch_values(const attend_unit *u, const key_tile *at, matrix_room<DEPTH> *room) {
    fetch_matrix<DEPTH, matrix_room<DEPTH>::COLUMNS>(room->columns[1], u->p->dims.D, [&](int i) {
        if (room->bias[i] == INFINITY) return element_ref{NULL, TYPE, 1};
        return value_row(u, at->stored, at->first + i);
    });
    close_copies();
}

/* All keys: values come while their keys are being multiplied, and the next keys while they are. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_keys(const attend_unit *u, int64_t query, matrix_room<DEPTH> *room,
                     matrix_sums<DEPTH> *sums) {
    const int columns = matrix_room<DEPTH>::COLUMNS;
    key_tile at = {true, 0, lower(query + MATRIX_ROWS, u->tokens)};
    bool more = fetch_keys<DEPTH>(u, &at, room);
    while (more) {
        float c[columns / 8][4];
        wait_copies<0>();
        sync_block(); /* and the values before have been used */
        fetch_values<DEPTH, TYPE>(u, &at, room);
        matrix_dots<DEPTH, TYPE>(room, room->columns[0], c);
        scale_dots<columns / 8>(c, u->p->scale, u->p->softcap);
        /* a query that does not see a key must not touch its value, whatever that is */
        const bool whole = at.stored || at.first + columns <= query + 1;
        if (whole && !at.stored) {
            matrix_weights<DEPTH, true>(&at, query, room, c, sums);
        } else {
            matrix_weights<DEPTH, false>(&at, query, room, c, sums);
        }
        wait_copies<0>();
        sync_block(); /* the keys have been used */
        const bool odd = !whole && block_any(!finite_part<DEPTH, TYPE, columns>(room->columns[1]));
        if (odd) {
            add_odd_values<DEPTH, TYPE>(room, c, sums);
            sync_block();
        }
        at.first += columns;
        more = fetch_keys<DEPTH>(u, &at, room);
        if (!odd) add_matrix_values<DEPTH, TYPE>(room, c, sums);
    }
}

template <int DEPTH, h2o_dtype TYPE>
DEVICE void write_matrix(const attend_unit *u, int64_t h, int64_t query, float *logs,
                         const matrix_sums<DEPTH> *sums) {
    const h2o_attend_params *const p = u->p;
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int64_t token = query + warp_row() + lane_row() + 8 * i;
        const float total = quad_sum(sums->total[i]), inverse = 1.0f / total;
        if (token >= u->tokens) continue;
        element_ref out = row_of(&p->out, u->b, u->columns[token], h);
        out.type = TYPE; /* as all here, which the compiler then knows */
        UNROLL
        for (int k = 0; k < DEPTH / 4; k++) {
            const int64_t d = k / 2 * 8 + lane_column() + k % 2;
            const float x = sums->output[k / 2][2 * i + k % 2] * inverse;
            if (d < p->dims.D) set_element(out, d, x);
        }
        if (lane_column() == 0) logs[token] = sums->top[i] + logf(total);
    }
}

/* Grid: tiles of queries, H, B. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_forward(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    static_assert(sizeof(matrix_room<DEPTH>) == CUDA_MATRIX_SHARED(DEPTH));
    matrix_room<DEPTH> *const room = (matrix_room<DEPTH> *)shared;
    const int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * MATRIX_ROWS; /* longest first */
    const int64_t h = blockIdx.y, b = blockIdx.z;
    const attend_unit u = open_attend(p, workspace, b, h / p->dims.R);
    if (h2o_given(&p->mask)) clear_pads(p, b, h, query, MATRIX_ROWS);
    if (query >= u.tokens) return;
    matrix_sums<DEPTH> sums = {};
    sums.top[0] = sums.top[1] = -INFINITY;
    fetch_matrix<DEPTH, MATRIX_ROWS>(room->rows, p->dims.D,
                                     [&](int i) { return token_row(&u, &p->query, h, query + i); });
    add_keys<DEPTH, TYPE>(&u, query, room, &sums);
    write_matrix<DEPTH, TYPE>(&u, h, query, (float *)u.logs + h * p->dims.Q, &sums);
}

#endif
