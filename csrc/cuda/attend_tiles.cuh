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
    const int64_t D = p->dims.D, count = lower(columns, p->dims.Q - first);
    ROLLED
    for (int64_t i = threadIdx.x; i < count * D; i += blockDim.x) {
        const int64_t q = first + i / D;
        if (!is_token(&p->mask, b, q)) set_element(row_of(&p->out, b, q, h), i % D, 0.0f);
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

/* What attention counts after so many more rows. */
DEVICE float decay_after(float decay, int64_t rows) {
    return decay < 1.0f ? (float)pow((double)decay, (double)rows) : 1.0f;
}

/* Scores of keys: new ones begin with what they got; stored ones are added to. */
DEVICE void write_sum(const attend_unit *u, bool stored, int64_t i, float bias, float sum) {
    const h2o_attend_params *const p = u->p;
    if (bias == INFINITY) return;
    if (!stored) {
        *(float *)h2o_at(&p->scores, u->b, u->g, u->columns[i]) = sum;
    } else {
        const float decay = decay_after(p->policy.decay, u->tokens);
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
        weights[i] = decay_after(decay, tokens - 1 - i);
    }
    if (threadIdx.x == 0) {
        ((int32_t *)(workspace + at.all))[b] = (int32_t)found;
        ((int32_t *)(workspace + at.tokens))[b] = (int32_t)tokens;
    }
}

/* ---- Tiles --------------------------------------------------------------- */

template <int DEPTH> struct attend_room {
    enum { PITCH = DEPTH + 4 };
    float rows[ATTEND_TILE][PITCH];    /* that stay: forward's queries, sums' keys */
    float columns[ATTEND_TILE][PITCH]; /* that pass by: keys and values, or queries */
    float weights[ATTEND_TILE][ATTEND_TILE + 4];
    float bias[ATTEND_TILE]; /* of keys; +infinity where there is none */
};

/* A row of a tensor for a token, by its number and not its column, so that nothing depends on where
 * pads are; data is NULL where there is none. */
DEVICE element_ref token_row(const attend_unit *u, const h2o_view *from, int64_t h, int64_t token) {
    if (token >= u->tokens) return element_ref{NULL, from->dtype, 1};
    /* without pads a token's number is its column: a load less to wait for */
    const bool pads = h2o_given(&u->p->mask);
    return row_of(from, u->b, h, pads ? u->columns[token] : token);
}

DEVICE element_ref slot_row(const attend_unit *u, const char *rows, int64_t stride, h2o_dtype type,
                            int64_t slot) {
    return element_ref{slot < u->slots ? rows + slot * stride : NULL, type, 1};
}

/* Of keys and values that are there, also where a slot holds none. */
DEVICE element_ref key_row(const attend_unit *u, bool stored, int64_t i) {
    const slot_store *const s = &u->store;
    return stored ? slot_row(u, s->keys, s->key_stride, s->key_type, i)
                  : token_row(u, &u->p->keys, u->g, i);
}

DEVICE element_ref value_row(const attend_unit *u, bool stored, int64_t i) {
    const slot_store *const s = &u->store;
    return stored ? slot_row(u, s->values, s->value_stride, s->value_type, i)
                  : token_row(u, &u->p->values, u->g, i);
}

/* A tile of rows row(i): zeros where there is none, and from D on. */
template <int DEPTH, typename ROW>
DEVICE void load_tile(float (*tile)[DEPTH + 4], int64_t D, ROW row) {
    const int runs = DEPTH / RUN;
    ROLLED
    for (int i = threadIdx.x; i < ATTEND_TILE * runs; i += blockDim.x) {
        const int d = i % runs * RUN;
        const element_ref from = row(i / runs);
        float x[RUN] = {};
        if (from.data && d < D) load_given(from, d, D, x);
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
