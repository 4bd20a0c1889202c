/* matrix_keys.cuh - shared by matrix_sums.cuh and hopper_sums.cuh: tiles of keys and of queries,
 * and what their products add to the sums of keys. */
#ifndef H2O_CUDA_MATRIX_KEYS_CUH
#define H2O_CUDA_MATRIX_KEYS_CUH

#include "matrix_stored.cuh"
#include "sums.cuh"

enum {
    LANE_KEYS = 4, /* keys for which a lane computes sums, 8 rows apart */
    PANEL = 64     /* adjacent elements of a row that the products of hopper_sums.cuh need */
};

template <int DEPTH> struct sums_buffer {
    enum {
        COLUMNS = CUDA_MATRIX_COLUMNS(DEPTH),
        STAGES = CUDA_SUMS_STAGES(DEPTH),
        ROWS = CUDA_SUMS_ROWS(DEPTH),
        SHARING = ATTEND_THREADS / ROWS, /* number of warps with the same keys */
        TURN = COLUMNS / SHARING < 32 ? COLUMNS / SHARING : 32,
        BY_GROUPS = WARPGROUPS && DEPTH <= 128, /* see hopper_sums.cuh: ... */
        WIDTH = BY_GROUPS ? PANEL : DEPTH       /* ... adjacent elements of a query */
    };
    uint16_t columns[STAGES][COLUMNS][DEPTH]; /* two stages of queries; keys in the last ones */
    float row_max[2][COLUMNS];                /* of these queries; ... */
    float softmax[2][COLUMNS][2];             /* ... as an exponent of 2, and their factors */
    uint32_t is_key[ROWS];                    /* as in matrix_buffer, ... */
    float scales[ROWS];                       /* ... likewise */
    float sums[SHARING][ROWS];                /* over the columns of each of these warps */
};

/* A warp's keys, whose rows are in shared memory. 16 elements of 16 keys are a matrix a of mma.
 * Registers keep all of them only if rows have at most 128 elements. */
template <int DEPTH> struct key_matrices {
    enum { KEPT = DEPTH <= 128 };
    uint32_t present; /* a bit for each of the warp's keys that exists */
    uint16_t (*rows)[DEPTH];
    uint32_t a[KEPT ? DEPTH / 16 : 1][2][4];
};

template <int DEPTH> DEVICE int first_key() {
    return threadIdx.x / 32 / sums_buffer<DEPTH>::SHARING * 32;
}
template <int DEPTH> DEVICE int lane_key() { return first_key<DEPTH>() + lane_row(); }
template <int DEPTH> DEVICE int column_share() {
    return threadIdx.x / 32 % sums_buffer<DEPTH>::SHARING;
}

/* The sums of a tile of keys, from `first` on, over the queries from `begin` on. */
typedef struct {
    const attend_item *item;
    const sums_share *share;
    bool stored;
    int first, begin;
    bool plain; /* products are logits up to a unit (dots_to_exponents), and scores are sums */
} sums_of_keys;

DEVICE sums_of_keys open_sums(const attend_item *item, const sums_share *share, bool stored,
                              int64_t first) {
    const h2o_attend_params *const p = item->p;
    const bool numbers = stored && h2o_row_is_quantized(item->store.keys.type);
    const bool scaled = p->softcap <= 0.0f && p->scale > 0.0f && !numbers;
    const bool plain = scaled && !h2o_scores_largest(&p->policy);
    const int begin = stored ? 0 : (int)first;
    return sums_of_keys{item, share, stored, (int)first, begin, plain};
}

/* Addresses of what a thread copies of the first head's first tile of queries, and the distances in
 * bytes to the next tile and to the next head. */
typedef struct {
    const char *run, *row_max, *factor;
    int32_t tile, head;
    bool plain; /* runs can be copied, and token indices are columns */
} query_source;

template <int DEPTH> DEVICE query_source open_queries(const sums_of_keys *of) {
    const attend_item *const item = of->item;
    const int columns = sums_buffer<DEPTH>::COLUMNS, width = sums_buffer<DEPTH>::WIDTH;
    const int runs = width / RUN;
    const h2o_view *const view = &item->p->query;
    const row_source rows = token_source(item, view, 0);
    const int64_t tile = columns * rows.pitch, head = 2 * view->stride[1];
    const int64_t row = of->begin + threadIdx.x / runs, limit = INT32_MAX;
    const bool whole = rows.stride == 0 && head % 16 == 0 && item->p->dims.D == DEPTH;
    const bool near = tile <= limit && -tile <= limit && head <= limit && -head <= limit;
    query_source source;
    source.run = one_address(rows.data + row * rows.pitch + threadIdx.x % runs * RUN * 2);
    source.row_max = one_address((const char *)(item->row_max + of->begin + threadIdx.x));
    source.factor = one_address((const char *)(item->factors + of->begin + threadIdx.x));
    source.tile = (int32_t)tile;
    source.head = (int32_t)head;
    source.plain = whole && near && !h2o_given(&item->p->mask);
    return source;
}

/* Starts the copy of a tile of queries with their row maxima and factors. */
template <int DEPTH>
DEVICE void fetch_queries(const sums_of_keys *of, const query_source *source,
                          const query_tile *tile, int stage, sums_buffer<DEPTH> *buffer) {
    const attend_item *const item = of->item;
    const int columns = sums_buffer<DEPTH>::COLUMNS, width = sums_buffer<DEPTH>::WIDTH;
    const int runs = width / RUN, step = ATTEND_THREADS / runs;
    const int top = threadIdx.x / runs, run = threadIdx.x % runs * RUN;
    const int query = of->begin + tile->index * columns, token = query + threadIdx.x;
    uint16_t (*const panels)[width] = (uint16_t (*)[width])buffer->columns[stage];
    if (source->plain && query + columns <= item->tokens) {
        const char *from = source->run + (int64_t)tile->h * source->head;
        from += (int64_t)tile->index * source->tile;
        UNROLL
        for (int k = 0; k < columns; k += step, from += source->tile / (columns / step)) {
            UNROLL
            for (int d = 0; d < DEPTH; d += width)
                copy_async<16>(tile_at(panels + d / width * columns, top + k, run), from + 2 * d);
        }
    } else {
        const row_source queries = token_source(item, &item->p->query, tile->h);
        NO_UNROLL
        for (int d = 0; d < DEPTH; d += width) {
            fetch_matrix<width, columns>(panels + d / width * columns, item, &queries, false, query,
                                         NULL, d);
        }
    }
    if (threadIdx.x < (unsigned)columns) {
        float *const row_max = &buffer->row_max[stage][threadIdx.x];
        if (token < item->tokens) {
            const int64_t past = 4 * (tile->h * item->p->dims.Q + tile->index * columns);
            copy_async<4>(row_max, source->row_max + past);
            copy_async<4>(&buffer->softmax[stage][threadIdx.x][1], source->factor + past);
        } else {
            *row_max = 0.0f; /* any value that is not far */
        }
    }
    close_copies();
}

/* Waits for a tile of queries and for all threads. Returns whether a row max is so large that its
 * exponent would be too coarse. */
template <int DEPTH>
DEVICE bool await_queries(const attend_item *item, int stage, sums_buffer<DEPTH> *buffer) {
    bool far = false;
    wait_copies<0>();
    if (threadIdx.x < (unsigned)sums_buffer<DEPTH>::COLUMNS) {
        const float unit = exponent_unit(item->p->scale, item->p->softcap);
        const float exponent = buffer->row_max[stage][threadIdx.x] * unit;
        buffer->softmax[stage][threadIdx.x][0] = exponent;
        far = !(fabsf(exponent) < FAR);
    }
    return block_any(far);
}

/* Loads a tile of keys; those that registers keep go through the memory of the second stage. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void load_keys(const attend_item *item, bool stored, int64_t first,
                      sums_buffer<DEPTH> *buffer, key_matrices<DEPTH> *keys) {
    const int rows = sums_buffer<DEPTH>::ROWS;
    const int stages = rows / sums_buffer<DEPTH>::COLUMNS; /* that a tile of keys takes */
    const row_source source = key_source(item, stored);
    keys->rows = (uint16_t (*)[DEPTH])buffer->columns[sums_buffer<DEPTH>::STAGES - stages];
    if (h2o_row_is_quantized(source.type)) {
        load_numbers<DEPTH, TYPE, rows>(keys->rows, item, &source, first, buffer->is_key,
                                        buffer->scales);
    } else {
        fetch_matrix<DEPTH, rows>(keys->rows, item, &source, stored, first, NULL);
    }
}

template <int DEPTH> DEVICE void keep_keys(key_matrices<DEPTH> *keys) {
    if (!key_matrices<DEPTH>::KEPT) return;
    close_copies();
    wait_copies<0>();
    sync_block();
    UNROLL
    for (int i = 0; i < DEPTH / 16 * 2; i++)
        load_rows(keys->a[i / 2][i % 2], keys->rows + first_key<DEPTH>(), i % 2 * 16, i / 2 * 16);
    sync_block();
}

/* Columns of a tile of queries from `at` on, and 8 * KEYS of the warp's keys from `key` on, KEYS
 * for each lane. The tile has `count` queries; new keys are `ahead` columns ahead of them. */
template <int KEYS, int WIDTH> struct key_turn {
    enum { FRAGMENTS = KEYS * WIDTH / 16 };
    int key, at, stage, count, ahead;
    bool stored, plain, far; /* far: see await_queries */
};

template <int DEPTH, int KEYS, int WIDTH>
DEVICE key_turn<KEYS, WIDTH> open_turn(const sums_of_keys *of, const query_tile *tile, int stage) {
    const int columns = sums_buffer<DEPTH>::COLUMNS, query = of->begin + tile->index * columns;
    const int ahead = of->stored ? -ATTEND_THREADS : of->first - query;
    const int count = (int)lower(of->item->tokens - query, columns);
    return {0, 0, stage, count, ahead, of->stored, of->plain, false};
}

/* The highest 8 * KEYS bits: which of the keys exist. */
template <int DEPTH, int KEYS, int WIDTH>
DEVICE uint32_t present_in(const key_turn<KEYS, WIDTH> *turn, const key_matrices<DEPTH> *keys) {
    return keys->present >> turn->key << (32 - 8 * KEYS);
}

/* Whether no query sees any of the keys. */
template <int DEPTH, int KEYS, int WIDTH>
DEVICE bool is_unseen(const key_turn<KEYS, WIDTH> *turn, const key_matrices<DEPTH> *keys) {
    const bool later = first_key<DEPTH>() + turn->key + turn->ahead >= turn->at + WIDTH;
    const bool unseen = present_in(turn, keys) == 0 || later || turn->at >= turn->count;
    TAKEN(matrix_sums_unseen, unseen);
    return unseen;
}

/* Whether every query sees every key. */
template <int DEPTH, int KEYS, int WIDTH>
DEVICE bool is_unmasked(const key_turn<KEYS, WIDTH> *turn, const key_matrices<DEPTH> *keys) {
    const int last = first_key<DEPTH>() + turn->key + 8 * KEYS - 1 + turn->ahead;
    const bool all = present_in(turn, keys) == ~0u << (32 - 8 * KEYS);
    const bool unmasked = all && last <= turn->at && turn->at + WIDTH <= turn->count;
    TAKEN(matrix_sums_unmasked, unmasked);
    return unmasked;
}

/* Adds the exponentials of a turn to the sums of a lane's keys. c has the logits in a unit
 * (dots_to_exponents). LARGEST: maxima instead of sums. */
template <bool LARGEST, int DEPTH, int KEYS, int WIDTH>
DEVICE void add_exponentials(const key_turn<KEYS, WIDTH> *turn, const sums_buffer<DEPTH> *buffer,
                             const float (*c)[4], float unit, float *sum) {
    UNROLL
    for (int k = 0; k < WIDTH / 4; k++) {
        const int column = turn->at + k / 2 * 8 + lane_column() + k % 2;
        if (column >= turn->count) continue;
        const float row_max = buffer->row_max[turn->stage][column];
        const float factor = buffer->softmax[turn->stage][column][1];
        UNROLL
        for (int i = 0; i < KEYS; i++) {
            const float logit = c[i / 2 * (WIDTH / 8) + k / 2][i % 2 * 2 + k % 2];
            const int key = lane_key<DEPTH>() + turn->key + 8 * i;
            if (!buffer->is_key[key] || key + turn->ahead > column) continue;
            const float e = fast_exp2((logit - row_max) * unit);
            sum[i] = LARGEST ? h2o_larger(sum[i], e * factor) : fmaf(e, factor, sum[i]);
        }
    }
}

/* The same if every query sees every key and no row max is far. */
template <bool LARGEST, int DEPTH, int KEYS, int WIDTH>
DEVICE void add_all_exponentials(const key_turn<KEYS, WIDTH> *turn,
                                 const sums_buffer<DEPTH> *buffer, const float (*c)[4], float unit,
                                 float *sum) {
    UNROLL
    for (int k = 0; k < WIDTH / 8; k++) {
        const vec16 two = load16(buffer->softmax[turn->stage][turn->at + k * 8 + lane_column()]);
        UNROLL
        for (int i = 0; i < 2 * KEYS; i++) {
            const float logit = c[i / 4 * (WIDTH / 8) + k][i % 4];
            const float exponent = bits_float(two.w[i % 2 * 2]);
            const float factor = bits_float(two.w[i % 2 * 2 + 1]);
            const float e = fast_exp2(fmaf(logit, unit, -exponent));
            float *const to = &sum[i / 2];
            *to = LARGEST ? h2o_larger(*to, e * factor) : fmaf(e, factor, *to);
        }
    }
}

/* The same, given a turn's products with keys in c. */
template <int DEPTH, int KEYS, int WIDTH>
DEVICE void add_turn(const key_turn<KEYS, WIDTH> *turn, const attend_item *item,
                     const key_matrices<DEPTH> *keys, const sums_buffer<DEPTH> *buffer,
                     float (*c)[4], float *sum) {
    const int fragments = key_turn<KEYS, WIDTH>::FRAGMENTS;
    const float unit = exponent_unit(item->p->scale, item->p->softcap);
    const bool numbers = turn->stored && h2o_row_is_quantized(item->store.keys.type);
    const bool largest = h2o_scores_largest(&item->p->policy);
    const bool all = is_unmasked(turn, keys) && !turn->far;
    TAKEN(matrix_sums_of_stored, turn->stored);
    TAKEN(matrix_sums_largest, largest);
    TAKEN(matrix_sums_of_quantized, numbers);
    TAKEN(matrix_sums_plain, all && turn->plain);
    if (all && turn->plain) return add_all_exponentials<false>(turn, buffer, c, unit, sum);
    if (numbers) {
        const float *const scales = &buffer->scales[lane_key<DEPTH>() + turn->key];
        scale_dots<fragments>(
            c, [&](int i) { return scales[i / (WIDTH / 2) * 16 + i % 4 / 2 * 8]; });
    }
    dots_to_exponents<fragments>(c, item->p->scale, item->p->softcap);
    if (all) {
        if (largest) return add_all_exponentials<true>(turn, buffer, c, unit, sum);
        return add_all_exponentials<false>(turn, buffer, c, unit, sum);
    }
    if (largest) return add_exponentials<true>(turn, buffer, c, unit, sum);
    add_exponentials<false>(turn, buffer, c, unit, sum);
}

#endif
