/* attend_tiles.cuh - what the kernels of attend share: who comes and what they count, and tiles of
 * rows in shared memory.
 *
 * Tiles of keys are of stored ones or of new ones. In a tile of attention -1 stands for what a
 * query does not see: it must not touch the values there, which need not be numbers. */
#ifndef H2O_CUDA_ATTEND_TILES_CUH
#define H2O_CUDA_ATTEND_TILES_CUH

#include "logits.cuh"
#include "select.cuh"

enum { PAIRS = 2, FOURS = 4, LANES = ATTEND_TILE / FOURS }; /* of a thread: rows, columns */

/* A row of the batch and a key/value head, as the two kernels see it. */
typedef struct {
    const h2o_attend_params *p;
    int64_t b, g, slots; /* slots: 0 where nothing is stored */
    slot_store store;
    int64_t tokens;
    const int32_t *columns;      /* [tokens] */
    const float *weights, *logs; /* [tokens], [H][Q] */
} attend_unit;

DEVICE attend_unit open_attend(const h2o_attend_params *p, char *workspace, int64_t b, int64_t g) {
    const attend_layout at = cuda_attend_layout(&p->dims);
    attend_unit u = {};
    u.p = p;
    u.b = b;
    u.g = g;
    u.tokens = ((const int32_t *)(workspace + at.tokens))[b];
    u.columns = (const int32_t *)(workspace + at.columns) + b * p->dims.Q;
    u.weights = (const float *)(workspace + at.weights) + b * p->dims.Q;
    u.logs = (const float *)(workspace + at.logs) + b * p->dims.H * p->dims.Q;
    if (p->has_slots) {
        const h2o_head head = read_place(&p->slots, g);
        u.slots = head.slots;
        u.store = open_store(&p->slots, b, &head, p->dims.D);
    }
    return u;
}

/* Which of `count` keys there are: what is added to their logits, else +infinity, which nothing
 * adds. Returns whether there is any. */
DEVICE bool load_bias(const attend_unit *u, bool stored, int64_t first, int count, float *biases) {
    bool any = false;
    if (threadIdx.x < (unsigned)count) {
        const int64_t i = first + threadIdx.x;
        float bias = INFINITY;
        if (stored && i < u->slots && u->store.positions[i] >= 0) {
            bias = u->store.bias ? u->store.bias[i] : 0.0f;
        } else if (!stored && i < u->tokens) {
            bias = 0.0f;
        }
        any = bias != INFINITY;
        biases[threadIdx.x] = bias;
    }
    return block_any(any);
}

/* ---- What is written ----------------------------------------------------- */

/* The outputs of pads among some columns. */
DEVICE void clear_pads(const h2o_attend_params *p, int64_t b, int64_t h, int64_t first,
                       int64_t columns) {
    const int64_t size = h2o_dtype_size(p->out.dtype), D = p->dims.D;
    const int64_t count = lower(columns, p->dims.Q - first);
    ROLLED
    for (int64_t i = threadIdx.x; i < count * D; i += blockDim.x) {
        const int64_t q = first + i / D;
        char *const out = (char *)h2o_at(&p->out, b, q, h) + i % D * p->out.stride[3] * size;
        if (!is_token(&p->mask, b, q)) store_number(out, p->out.dtype, 0.0f);
    }
}

/* The same of their scores; no more columns than threads. */
DEVICE void clear_pad_scores(const h2o_attend_params *p, int64_t b, int64_t g, int64_t first,
                             unsigned columns) {
    const int64_t q = first + threadIdx.x;
    if (threadIdx.x < columns && q < p->dims.Q && !is_token(&p->mask, b, q)) {
        *(float *)h2o_at(&p->scores, b, g, q) = 0.0f;
    }
}

/* Scores of keys: new ones begin with what they got; stored ones are added to. */
DEVICE void write_sum(const attend_unit *u, bool stored, int64_t i, float bias, float sum) {
    const h2o_attend_params *const p = u->p;
    if (bias == INFINITY) return;
    if (!stored) {
        *(float *)h2o_at(&p->scores, u->b, u->g, u->columns[i]) = sum;
    } else {
        const float decay =
            p->decay < 1.0f ? (float)pow((double)p->decay, (double)u->tokens) : 1.0f;
        u->store.scores[i] = fmaf(u->store.scores[i], decay, sum);
    }
}

/* ---- prepare ------------------------------------------------------------- */

/* Lists the tokens of a row; of those after the first `most` none comes. */
DEVICE void prepare_row(const h2o_view *mask, const h2o_dims *d, float decay, int64_t b,
                        int64_t most, char *workspace, select_room *room) {
    const attend_layout at = cuda_attend_layout(d);
    int32_t *const columns = (int32_t *)(workspace + at.columns) + b * d->Q;
    float *const weights = (float *)(workspace + at.weights) + b * d->Q;
    const int64_t found = compact(
        d->Q, 0, room, [&](int64_t q) { return is_token(mask, b, q); },
        [&](int64_t q, int64_t place) { columns[place] = (int32_t)q; });
    const int64_t tokens = lower(found, most);
    ROLLED
    for (int64_t i = threadIdx.x; i < tokens; i += blockDim.x) {
        const double after = (double)(tokens - 1 - i);
        weights[i] = decay < 1.0f ? (float)pow((double)decay, after) : 1.0f;
    }
    if (threadIdx.x == 0) ((int32_t *)(workspace + at.tokens))[b] = (int32_t)tokens;
}

/* ---- Tiles --------------------------------------------------------------- */

template <int DEPTH> struct attend_room {
    enum { PITCH = DEPTH + 4 };
    float rows[ATTEND_TILE][PITCH];    /* that stay: forward's queries, sums' keys */
    float columns[ATTEND_TILE][PITCH]; /* that pass by: keys and values, or queries */
    float weights[ATTEND_TILE][ATTEND_TILE + 4];
    float bias[ATTEND_TILE]; /* of keys; +infinity where there is none */
};

/* The rows of ATTEND_TILE tokens from `first` on; zeros where there are no more, and from D on. So
 * nothing depends on where pads are. */
template <int DEPTH>
DEVICE void load_given_tile(float (*tile)[DEPTH + 4], const attend_unit *u, const h2o_view *from,
                            int64_t h, int64_t first) {
    const int runs = DEPTH / RUN;
    const int64_t D = u->p->dims.D;
    ROLLED
    for (int i = threadIdx.x; i < ATTEND_TILE * runs; i += blockDim.x) {
        const int64_t token = first + i / runs, d = i % runs * RUN;
        float x[RUN] = {};
        if (token < u->tokens && d < D) {
            load_given(row_of(from, u->b, h, u->columns[token]), d, D, x);
        }
        UNROLL
        for (int j = 0; j < RUN; j++) tile[i / runs][d + j] = x[j];
    }
}

template <int DEPTH>
DEVICE void load_stored_tile(float (*tile)[DEPTH + 4], const char *rows, int64_t stride,
                             h2o_dtype type, int64_t first, int64_t count, int64_t D) {
    const int runs = DEPTH / RUN;
    ROLLED
    for (int i = threadIdx.x; i < ATTEND_TILE * runs; i += blockDim.x) {
        const int64_t row = first + i / runs, d = i % runs * RUN;
        float x[RUN] = {};
        if (row < count && d < D) load_stored(rows + row * stride, type, d, D, x);
        UNROLL
        for (int j = 0; j < RUN; j++) tile[i / runs][d + j] = x[j];
    }
}

/* The products of PAIRS rows of one tile with FOURS of the other, LANES apart. */
template <int DEPTH>
DEVICE void tile_dots(const float (*rows)[DEPTH + 4], const float (*columns)[DEPTH + 4], int row,
                      int column, float sum[PAIRS][FOURS]) {
    UNROLL
    for (int i = 0; i < PAIRS * FOURS; i++) sum[i / FOURS][i % FOURS] = 0.0f;
    for (int d = 0; d < DEPTH; d += 4) {
        vec16 x[PAIRS];
        UNROLL
        for (int i = 0; i < PAIRS; i++) x[i] = load16(&rows[row + i][d]);
        UNROLL
        for (int j = 0; j < FOURS; j++) {
            const vec16 y = load16(&columns[column + j * LANES][d]);
            UNROLL
            for (int i = 0; i < PAIRS; i++) {
                UNROLL
                for (int k = 0; k < 4; k++) {
                    sum[i][j] = fmaf(bits_float(x[i].w[k]), bits_float(y.w[k]), sum[i][j]);
                }
            }
        }
    }
}

/* Of the threads that share rows. */
DEVICE float lanes_max(float x) {
    UNROLL
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x = fmaxf(x, shfl_xor(x, lanes));
    return x;
}

DEVICE float lanes_sum(float x) {
    UNROLL
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) x += shfl_xor(x, lanes);
    return x;
}

#endif
