/* matrix_forward.cuh - forward.cuh by the tensor cores. */
#ifndef H2O_CUDA_MATRIX_FORWARD_CUH
#define H2O_CUDA_MATRIX_FORWARD_CUH

#include "matrix_tiles.cuh"

/* What a lane has of two queries, 8 rows apart; total is its part of the sum. */
template <int DEPTH> struct matrix_sums {
    float top[2], total[2];
    float output[DEPTH / 8][4];
};

/* Dot products to exponentials, in place, -1 where a query does not see the key. */
template <int DEPTH>
DEVICE void matrix_weights(const attend_unit *u, bool stored, int64_t first, int64_t query,
                           const matrix_room<DEPTH> *room,
                           float c[matrix_room<DEPTH>::COLUMNS / 8][4], matrix_sums<DEPTH> *sums) {
    const int columns = matrix_room<DEPTH>::COLUMNS;
    UNROLL
    for (int i = 0; i < 2; i++) {
        const int64_t token = query + warp_row() + lane_row() + 8 * i;
        float top = sums->top[i], total = 0.0f;
        uint64_t seen = 0;
        UNROLL
        for (int k = 0; k < columns / 4; k++) {
            const int at = k / 2 * 8 + lane_column() + k % 2;
            const float bias = room->bias[at];
            float *const x = &c[k / 2][2 * i + k % 2];
            if (bias == INFINITY || (!stored && first + at > token)) continue;
            *x = logit_of(*x, u->p->scale, u->p->softcap, bias);
            top = fmaxf(top, *x);
            seen |= (uint64_t)1 << k;
        }
        top = quad_max(top);
        const float factor = sums->top[i] == top ? 1.0f : exponential(sums->top[i], top);
        UNROLL
        for (int k = 0; k < columns / 4; k++) {
            float *const x = &c[k / 2][2 * i + k % 2];
            const bool counts = seen >> k & 1;
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
            load_transposed(b, &room->values[k + lane % 16][d + lane / 16 * 8]);
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
    static_assert(sizeof room->columns >= sizeof(float[MATRIX_ROWS][32]));
    float (*const weights)[32] = (float (*)[32])room->columns;
    const int row = warp_row() + lane_row();
    sync_block(); /* the keys have been read */
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
                const uint16_t half = room->values[first + k][n / 2 * 8 + lane_column() + n % 2];
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

template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_forward_tile(const attend_unit *u, bool stored, int64_t first, int64_t query,
                                matrix_room<DEPTH> *room, matrix_sums<DEPTH> *sums) {
    const int columns = matrix_room<DEPTH>::COLUMNS;
    float c[matrix_room<DEPTH>::COLUMNS / 8][4];
    if (!load_bias(u, stored, first, columns, room->bias)) return;
    load_matrix<DEPTH, TYPE>(room->columns, columns, u->p->dims.D,
                             [&](int i) { return key_row(u, stored, first + i); });
    const bool finite = load_matrix<DEPTH, TYPE>(room->values, columns, u->p->dims.D, [&](int i) {
        if (room->bias[i] == INFINITY) return element_ref{NULL, TYPE, 1};
        return value_row(u, stored, first + i);
    });
    const bool odd = block_any(!finite);
    matrix_dots<DEPTH, TYPE>(room, c);
    matrix_weights<DEPTH>(u, stored, first, query, room, c, sums);
    if (odd) {
        add_odd_values<DEPTH, TYPE>(room, c, sums);
    } else {
        add_matrix_values<DEPTH, TYPE>(room, c, sums);
    }
    sync_block();
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
    const int columns = matrix_room<DEPTH>::COLUMNS;
    const int64_t query = (int64_t)(gridDim.x - 1 - blockIdx.x) * MATRIX_ROWS; /* longest first */
    const int64_t h = blockIdx.y, b = blockIdx.z;
    const attend_unit u = open_attend(p, workspace, b, h / p->dims.R);
    if (h2o_given(&p->mask)) clear_pads(p, b, h, query, MATRIX_ROWS);
    if (query >= u.tokens) return;
    matrix_sums<DEPTH> sums = {};
    sums.top[0] = sums.top[1] = -INFINITY;
    load_matrix<DEPTH, TYPE>(room->rows, MATRIX_ROWS, p->dims.D,
                             [&](int i) { return token_row(&u, &p->query, h, query + i); });
    for (int64_t i = 0; i < u.slots; i += columns) {
        matrix_forward_tile<DEPTH, TYPE>(&u, true, i, query, room, &sums);
    }
    for (int64_t i = 0; i < lower(query + MATRIX_ROWS, u.tokens); i += columns) {
        matrix_forward_tile<DEPTH, TYPE>(&u, false, i, query, room, &sums);
    }
    write_matrix<DEPTH, TYPE>(&u, h, query, (float *)u.logs + h * p->dims.Q, &sums);
}

#endif
