/* matrix_sums.cuh - sums.cuh with tensor cores: the attention that each key received.
 *
 * A block has 128 keys, 32 of them in the registers of each warp, which computes their logits for a
 * tile of queries, some columns at a time. Where rows have more than 128 elements, a block has 64
 * keys, and two warps share their columns. Queries come in tiles through two stages of shared
 * memory: while one tile's logits and exponentials are computed, the next one is being copied. */
#ifndef H2O_CUDA_MATRIX_SUMS_CUH
#define H2O_CUDA_MATRIX_SUMS_CUH

#include "matrix_stored.cuh"
#include "sums.cuh"

enum { LANE_KEYS = 4 }; /* that a lane sums for, 8 rows apart */

template <int DEPTH> struct sums_buffer {
    enum {
        COLUMNS = CUDA_MATRIX_COLUMNS(DEPTH),
        STAGES = CUDA_SUMS_STAGES(DEPTH),
        ROWS = CUDA_SUMS_ROWS(DEPTH),
        SHARING = ATTEND_THREADS / ROWS, /* warps that have the same keys */
        TURN = COLUMNS / SHARING < 32 ? COLUMNS / SHARING : 32
    };
    uint16_t columns[STAGES][COLUMNS][DEPTH];       /* two of queries, keys in the last */
    float row_max[2][COLUMNS], factors[2][COLUMNS]; /* of these queries */
    uint32_t is_key[ROWS];                          /* as in matrix_buffer, ... */
    float scales[ROWS];                             /* ... likewise */
    float sums[SHARING][ROWS];                      /* over the columns of each of these warps */
};

/* A warp's keys, whose rows are in shared memory: 16 elements of 16 keys are a matrix a of mma. Of
 * rows of more than 128 elements registers have no room for all. */
template <int DEPTH> struct key_matrices {
    enum { KEPT = DEPTH <= 128 };
    uint32_t present; /* bits of the warp's keys that are there */
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

/* Starts the copy of a tile of queries of one head with their row max and factors. */
template <int DEPTH>
DEVICE void fetch_queries(const attend_item *item, const row_source *queries, int64_t h,
                          int64_t query, int stage, sums_buffer<DEPTH> *buffer) {
    const int columns = sums_buffer<DEPTH>::COLUMNS;
    const int64_t token = query + threadIdx.x;
    fetch_matrix<DEPTH, columns>(buffer->columns[stage], item, queries, false, query, NULL);
    if (threadIdx.x < (unsigned)columns && token < item->tokens) {
        const int64_t from = h * item->p->dims.Q + token;
        copy_async<4>(&buffer->row_max[stage][threadIdx.x], item->row_max + from);
        copy_async<4>(&buffer->factors[stage][threadIdx.x], item->factors + from);
    }
    close_copies();
}

/* Loads a tile of keys. Those that registers keep were in the place of the second stage. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void load_keys(const attend_item *item, bool stored, int64_t first,
                      sums_buffer<DEPTH> *buffer, key_matrices<DEPTH> *keys) {
    const int rows = sums_buffer<DEPTH>::ROWS;
    const int stages = rows / sums_buffer<DEPTH>::COLUMNS; /* as large as a tile of keys */
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

template <int DEPTH> DEVICE uint32_t present_keys(const uint32_t *is_key) {
    return warp_ballot(is_key[first_key<DEPTH>() + threadIdx.x % 32] != 0);
}

/* The dot products of a warp's keys with a turn of columns: of 16 keys with all of them, then of the
 * other 16. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void key_dots(key_matrices<DEPTH> *keys, const uint16_t (*tile)[DEPTH],
                     float c[sums_buffer<DEPTH>::TURN / 4][4]) {
    const int turn = sums_buffer<DEPTH>::TURN;
    UNROLL
    for (int i = 0; i < turn; i++) c[i / 4][i % 4] = 0.0f;
    UNROLL
    for (int d = 0; d < DEPTH; d += 16) {
        const bool kept = key_matrices<DEPTH>::KEPT;
        uint32_t (*const a)[4] = keys->a[kept ? d / 16 : 0];
        UNROLL
        for (int i = 0; i < 2 && !kept; i++)
            load_rows(a[i], keys->rows + first_key<DEPTH>(), i * 16, d);
        UNROLL
        for (int n = 0; n < turn; n += 16) {
            uint32_t b[4];
            load_columns(b, tile, n, d);
            UNROLL
            for (int i = 0; i < 4; i++) {
                multiply<TYPE>(c[i / 2 * (turn / 8) + n / 8 + i % 2], a[i / 2], b + i % 2 * 2);
            }
        }
    }
}

/* Adds what a turn of columns from `at` on, of which c has the logits in a unit (dots_to_exponents),
 * gives to a lane's keys. Of `count` queries the keys are so far `ahead`. UNMASKED: every query sees
 * every key. LARGEST: maxima instead of sums. */
template <int DEPTH, bool UNMASKED, bool LARGEST>
DEVICE void add_column_sums_of(int ahead, int count, int at, int stage,
                               const sums_buffer<DEPTH> *buffer,
                               const float c[sums_buffer<DEPTH>::TURN / 4][4], float unit,
                               float sum[LANE_KEYS]) {
    const int turn = sums_buffer<DEPTH>::TURN;
    UNROLL
    for (int k = 0; k < turn / 4; k++) {
        const int column = at + k / 2 * 8 + lane_column() + k % 2;
        if (!UNMASKED && column >= count) continue;
        const float row_max = buffer->row_max[stage][column];
        const float factor = buffer->factors[stage][column];
        UNROLL
        for (int i = 0; i < LANE_KEYS; i++) {
            const float logit = c[i / 2 * (turn / 8) + k / 2][i % 2 * 2 + k % 2];
            const int key = lane_key<DEPTH>() + 8 * i;
            if (!UNMASKED && (!buffer->is_key[key] || key + ahead > column)) continue;
            const float e = fast_exp2((logit - row_max) * unit);
            sum[i] = LARGEST ? h2o_larger(sum[i], e * factor) : fmaf(e, factor, sum[i]);
        }
    }
}

/* The same of a tile of queries. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_matrix_column_sums(const attend_item *item, key_matrices<DEPTH> *keys, bool stored,
                                   int first, int query, int stage,
                                   const sums_buffer<DEPTH> *buffer, float sum[LANE_KEYS]) {
    const int columns = sums_buffer<DEPTH>::COLUMNS, turn = sums_buffer<DEPTH>::TURN;
    const int sharing = sums_buffer<DEPTH>::SHARING, warp = first_key<DEPTH>();
    const int ahead = stored ? -ATTEND_THREADS : first - query; /* keys, of the queries */
    const int count = (int)lower(item->tokens - query, columns);
    const float unit = exponent_unit(item->p->scale, item->p->softcap);
    const bool numbers = stored && h2o_row_is_quantized(item->store.keys.type);
    const bool largest = h2o_scores_largest(&item->p->policy);
    TAKEN(matrix_sums_of_stored, stored);
    TAKEN(matrix_sums_largest, largest);
    TAKEN(matrix_sums_of_quantized, numbers);
    NO_UNROLL
    for (int at = column_share<DEPTH>() * turn; at < columns; at += sharing * turn) {
        const bool unseen = keys->present == 0 || warp + ahead >= at + turn || at >= count;
        const bool unmasked = keys->present == ~0u && warp + ahead + 31 <= at && at + turn <= count;
        TAKEN(matrix_sums_unseen, unseen);
        TAKEN(matrix_sums_unmasked, unmasked);
        if (unseen) continue;
        float c[turn / 4][4];
        key_dots<DEPTH, TYPE>(keys, buffer->columns[stage] + at, c);
        if (numbers) {
            const float *const scales = &buffer->scales[lane_key<DEPTH>()];
            scale_dots<turn / 4>(
                c, [&](int i) { return scales[i / (turn / 2) * 16 + i % 4 / 2 * 8]; });
        }
        dots_to_exponents<turn / 4>(c, item->p->scale, item->p->softcap);
        if (largest && unmasked) {
            add_column_sums_of<DEPTH, true, true>(ahead, count, at, stage, buffer, c, unit, sum);
        } else if (largest) {
            add_column_sums_of<DEPTH, false, true>(ahead, count, at, stage, buffer, c, unit, sum);
        } else if (unmasked) {
            add_column_sums_of<DEPTH, true, false>(ahead, count, at, stage, buffer, c, unit, sum);
        } else {
            add_column_sums_of<DEPTH, false, false>(ahead, count, at, stage, buffer, c, unit, sum);
        }
    }
}

/* The column sums of a tile of keys, over the queries that see them of the block's heads. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void sum_over_queries(const attend_item *item, const sums_share *share, bool stored,
                             int64_t first, sums_buffer<DEPTH> *buffer, float sum[LANE_KEYS]) {
    const int columns = sums_buffer<DEPTH>::COLUMNS;
    const int begin = stored ? 0 : (int)first;
    const int tiles = (int)cuda_ceil(item->tokens - begin, columns);
    row_source queries = token_source(item, &item->p->query, share->begin);
    key_matrices<DEPTH> keys;
    load_keys<DEPTH, TYPE>(item, stored, first, buffer, &keys);
    keep_keys<DEPTH>(&keys);
    keys.present = present_keys<DEPTH>(buffer->is_key);
    fetch_queries<DEPTH>(item, &queries, share->begin, begin, 0, buffer);
    int stage = 0;
    for (unsigned h = share->begin; h < share->end; h++) {
        for (int i = 0; i < tiles; i++) {
            const bool last = i + 1 == tiles;
            TAKEN(matrix_sums_second_tile_of_queries, i > 0);
            TAKEN(matrix_sums_second_head, h > share->begin);
            wait_copies<0>();
            sync_block(); /* the previous tile has been used */
            if (!last || h + 1 < share->end) {
                if (last) queries = token_source(item, &item->p->query, h + 1);
                fetch_queries<DEPTH>(item, &queries, h + last, begin + (last ? 0 : i + 1) * columns,
                                     1 - stage, buffer);
            }
            add_matrix_column_sums<DEPTH, TYPE>(item, &keys, stored, (int)first,
                                                begin + i * columns, stage, buffer, sum);
            stage = 1 - stage;
        }
    }
}

/* Writes the column sums of a tile of keys, from the columns of all warps. */
template <int DEPTH>
DEVICE void write_column_sums(const attend_item *item, const sums_share *share, bool stored,
                              int64_t first, sums_buffer<DEPTH> *buffer,
                              const float sum[LANE_KEYS]) {
    const bool largest = h2o_scores_largest(&item->p->policy);
    UNROLL
    for (int i = 0; i < LANE_KEYS; i++) {
        const float all = largest ? largest_of_lanes<4>(sum[i]) : quad_sum(sum[i]);
        const int key = lane_key<DEPTH>() + 8 * i;
        if (lane_column() == 0) buffer->sums[column_share<DEPTH>()][key] = all;
    }
    sync_block();
    const int key = threadIdx.x;
    if (key >= sums_buffer<DEPTH>::ROWS || !buffer->is_key[key]) return;
    float all = buffer->sums[0][key];
    UNROLL
    for (int i = 1; i < sums_buffer<DEPTH>::SHARING; i++) {
        const float next = buffer->sums[i][key];
        all = largest ? h2o_larger(all, next) : all + next;
    }
    column_sums(item, share, share->part, stored, first)[key] = all;
}

/* Grid: cuda_sums_blocks, G times parts, B. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_sums_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    static_assert(sizeof(sums_buffer<DEPTH>) == CUDA_SUMS_SHARED(DEPTH));
    sums_buffer<DEPTH> *const buffer = (sums_buffer<DEPTH> *)shared;
    const sums_share share = open_share(&p->dims);
    const attend_item item = open_attend(p, workspace, blockIdx.z, blockIdx.y / share.parts);
    each_key_tile<sums_buffer<DEPTH>::ROWS>(
        &item, &share, buffer->is_key, [&](bool stored, int64_t first, bool any) {
            float sum[LANE_KEYS] = {};
            if (any) sum_over_queries<DEPTH, TYPE>(&item, &share, stored, first, buffer, sum);
            write_column_sums<DEPTH>(&item, &share, stored, first, buffer, sum);
        });
}

#endif
