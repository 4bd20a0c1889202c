/* attend_tiles.cuh - shared by attend's kernels: which keys and queries there are, and tiles in
 * shared memory with their products.
 *
 * A block computes one tile of logits at a time: ATTEND_TILE rows that stay in shared memory
 * (forward.cuh: queries [tile, D]; sums.cuh: keys [tile, D]) times columns that are loaded one tile
 * after another (forward: keys, then their values; sums: queries). A thread computes
 * THREAD_ROWS x THREAD_COLUMNS logits; the ROW_THREADS threads of a row are neighbors in a warp.
 *
 * A tile has either stored keys, which every query sees, or new keys, which queries see up to their
 * own. Among exponentials -1 marks a masked key. The value of a masked key is not used at all,
 * since 0 times the content of an empty slot may be NaN. */
#ifndef H2O_CUDA_ATTEND_TILES_CUH
#define H2O_CUDA_ATTEND_TILES_CUH

#include "logits.cuh"
#include "select.cuh"

enum {
    THREAD_ROWS = 2, /* rows of a tile of logits that a thread computes, ... */
    THREAD_COLUMNS = 4,
    ROW_THREADS = ATTEND_TILE / THREAD_COLUMNS /* ... and number of threads that share a row */
};

/* One key/value head of one batch row. */
typedef struct {
    const h2o_attend_params *p;
    int64_t b, g, slots; /* slots: 0 if nothing is stored */
    slot_store store;
    int64_t tokens;
    const int32_t *columns;   /* [tokens] */
    const float *decays;      /* [tokens] */
    float *row_max, *factors; /* [H][Q]: forward writes them, sums reads them; see attend_layout */
    char *workspace;
} attend_item;

DEVICE attend_item open_attend(const h2o_attend_params *p, char *workspace, int64_t b, int64_t g) {
    const attend_layout at = cuda_attend_layout(&p->dims, cuda_attend_slots(p));
    attend_item item = {};
    item.p = p;
    item.workspace = workspace;
    item.b = b;
    item.g = g;
    item.tokens = ((const int32_t *)(workspace + at.tokens))[b];
    item.columns = (const int32_t *)(workspace + at.columns) + b * p->dims.Q;
    item.decays = (const float *)(workspace + at.decays) + b * p->dims.Q;
    item.row_max = (float *)(workspace + at.row_max) + b * p->dims.H * p->dims.Q;
    item.factors = (float *)(workspace + at.factors) + b * p->dims.H * p->dims.Q;
    if (p->has_slots) {
        const h2o_head head = read_extent(&p->slots, b, g);
        item.slots = head.slots;
        item.store = open_store(&p->slots, &head, p->dims.D);
    }
    return item;
}

/* Sets is_key for `count` slots or new tokens from `first` on. Returns whether any has a key. */
DEVICE bool load_presence(const attend_item *item, bool stored, int64_t first, int count,
                          uint32_t *is_key) {
    bool any = false;
    if (threadIdx.x < (unsigned)count) {
        const int64_t i = first + threadIdx.x;
        any = stored ? i < item->slots && item->store.positions[i] >= 0 : i < item->tokens;
        is_key[threadIdx.x] = any;
    }
    return block_any(any);
}

/* Stores what the sums need of a query's softmax: they compute exp(logit - row max) * factor; with
 * tensor cores in the units of dots_to_exponents and with a row max that may be slightly low. Row
 * max and row sum stay separate, since large logits would swallow the logarithm of the sum. */
DEVICE void write_softmax(const attend_item *item, int64_t h, int64_t token, float row_max,
                          float row_sum) {
    const int64_t at = h * item->p->dims.Q + token;
    item->row_max[at] = row_max;
    item->factors[at] = item->decays[token] / row_sum;
}

/* ---- Outputs and scores ----------------------------------------------------- */

/* Sets the outputs of padding among these columns to 0. */
DEVICE void clear_pads(const h2o_attend_params *p, int64_t b, int64_t h, int64_t first,
                       int64_t columns) {
    const int64_t D = p->dims.D, count = lower(columns, p->dims.Q - first);
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < count * D; i += blockDim.x) {
        const int64_t q = first + i / D;
        if (!is_token(&p->mask, b, q)) set_element(tensor_row(&p->out, b, q, h), i % D, 0.0f);
    }
}

/* Sets the scores of padding to 0, for at most as many columns as there are threads. */
DEVICE void clear_pad_scores(const h2o_attend_params *p, int64_t b, int64_t g, int64_t first,
                             unsigned columns) {
    const int64_t q = first + threadIdx.x;
    if (threadIdx.x < columns && q < p->dims.Q && !is_token(&p->mask, b, q)) {
        *(float *)h2o_at(&p->scores, b, g, q) = 0.0f;
    }
}

/* The decay weight of a query that is followed by `rows` others. */
DEVICE float decay_after(float decay, int64_t rows) {
    return decay < 1.0f ? (float)pow((double)decay, (double)rows) : 1.0f;
}

/* Writes the score of a key, given its column sum (the column's maximum if scores are the largest
 * attention). The score of a new key is the sum; a stored key's score decays first. */
DEVICE void write_score(const attend_item *item, bool stored, int64_t i, float sum) {
    const h2o_attend_params *const p = item->p;
    TAKEN(score_of_stored, stored);
    if (!stored) {
        *(float *)h2o_at(&p->scores, item->b, item->g, item->columns[i]) = sum;
    } else {
        const float decay = p->policy.decay;
        const float faded = h2o_policy_faded(decay, decay_after(decay, item->tokens));
        float *const score = &item->store.scores[i];
        *score = h2o_scores_largest(&p->policy) ? h2o_larger(*score * faded, sum)
                                                : fmaf(*score, faded, sum);
    }
}

/* ---- prepare ------------------------------------------------------------- */

/* Lists the columns of a row's tokens, and the decay weights of the first `limit` tokens, to which
 * this call attends; S as in cuda_attend_layout. */
DEVICE void prepare_row(const h2o_view *mask, const h2o_dims *d, float decay, int64_t b,
                        int64_t limit, int64_t S, char *workspace, select_buffer *buffer) {
    const attend_layout at = cuda_attend_layout(d, S);
    int32_t *const columns = (int32_t *)(workspace + at.columns) + b * d->Q;
    float *const decays = (float *)(workspace + at.decays) + b * d->Q;
    const int64_t row_tokens = each_token(
        mask, b, d->Q, buffer, [&](int64_t q, int64_t index) { columns[index] = (int32_t)q; });
    const int64_t tokens = lower(row_tokens, limit);
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < tokens; i += blockDim.x) {
        decays[i] = decay_after(decay, tokens - 1 - i);
    }
    if (threadIdx.x == 0) {
        ((int32_t *)(workspace + at.row_tokens))[b] = (int32_t)row_tokens;
        ((int32_t *)(workspace + at.tokens))[b] = (int32_t)tokens;
    }
}

/* ---- Tiles --------------------------------------------------------------- */

template <int DEPTH> struct tile_buffer {
    enum { PITCH = DEPTH + 4 };
    float rows[ATTEND_TILE][PITCH];              /* forward: queries; sums: keys */
    float columns[ATTEND_TILE][PITCH];           /* forward: keys, then values; sums: queries */
    float weights[ATTEND_TILE][ATTEND_TILE + 4]; /* forward: exponentials; -1: masked */
    uint32_t is_key[ATTEND_TILE];                /* see load_presence */
};

/* A token's row of a tensor [B,.,Q,D]; data is NULL past the last token. Tokens are counted without
 * padding, so results do not depend on where padding is. */
DEVICE row_ref token_row(const attend_item *item, const h2o_view *from, int64_t h, int64_t token) {
    if (token >= item->tokens) return row_ref{NULL, from->dtype, 1};
    /* without padding a token's index is its column, and `columns` need not be read */
    const bool pads = h2o_given(&item->p->mask);
    return tensor_row(from, item->b, h, pads ? item->columns[token] : token);
}

DEVICE row_ref stored_row(const attend_item *item, const slot_rows *rows, int64_t slot) {
    return row_ref{slot < item->slots ? slot_row(rows, slot) : NULL, rows->type, 1};
}

/* The row of a stored or new key. Empty slots have rows too; their keys are masked. */
DEVICE row_ref key_row(const attend_item *item, bool stored, int64_t i) {
    return stored ? stored_row(item, &item->store.keys, i)
                  : token_row(item, &item->p->keys, item->g, i);
}

DEVICE row_ref value_row(const attend_item *item, bool stored, int64_t i) {
    return stored ? stored_row(item, &item->store.values, i)
                  : token_row(item, &item->p->values, item->g, i);
}

/* Loads a tile whose rows are row(i); zeros if data is NULL, and from D on. */
template <int DEPTH, typename ROW>
DEVICE void load_tile(float (*tile)[DEPTH + 4], int64_t D, ROW row) {
    const int runs = DEPTH / RUN;
    NO_UNROLL
    for (int i = threadIdx.x; i < ATTEND_TILE * runs; i += blockDim.x) {
        const int d = i % runs * RUN;
        const row_ref from = row(i / runs);
        float x[RUN] = {};
        if (from.data && d < D) load_strided(from, d, D, x);
        UNROLL
        for (int j = 0; j < RUN; j++) tile[i / runs][d + j] = x[j];
    }
}

/* Adds the dot products of THREAD_ROWS rows with THREAD_COLUMNS columns, which are ROW_THREADS
 * apart: a thread's part of a tile of logits. */
template <int DEPTH>
DEVICE void add_tile_dots(const float (*rows)[DEPTH + 4], const float (*columns)[DEPTH + 4],
                          int row, int column, float sum[THREAD_ROWS][THREAD_COLUMNS]) {
    for (int d = 0; d < DEPTH; d += 4) {
        vec16 x[THREAD_ROWS];
        UNROLL
        for (int i = 0; i < THREAD_ROWS; i++) x[i] = load16(&rows[row + i][d]);
        UNROLL
        for (int j = 0; j < THREAD_COLUMNS; j++) {
            const vec16 y = load16(&columns[column + j * ROW_THREADS][d]);
            UNROLL
            for (int i = 0; i < THREAD_ROWS; i++) {
                UNROLL
                for (int k = 0; k < 4; k++) {
                    sum[i][j] = fmaf(bits_float(x[i].w[k]), bits_float(y.w[k]), sum[i][j]);
                }
            }
        }
    }
}

/* The largest column sum of LANES adjacent lanes, or NaN. */
template <int LANES> DEVICE float largest_of_lanes(float x) {
    UNROLL
    for (int offset = LANES / 2; offset > 0; offset /= 2) x = h2o_larger(x, shfl_xor(x, offset));
    return x;
}

#endif
