/* matrix_sums.cuh - sums.cuh with tensor cores: the attention that each key received.
 *
 * A block has MATRIX_ROWS keys, which stay in the registers of its warps: half of them in each, for
 * which it computes half the columns of a tile of queries, so that two warps instead of four read
 * a query from shared memory. Queries come in tiles through two stages of shared memory: while one
 * tile's logits and exponentials are computed, the next one is being copied. */
#ifndef H2O_CUDA_MATRIX_SUMS_CUH
#define H2O_CUDA_MATRIX_SUMS_CUH

#include "matrix_stored.cuh"
#include "sums.cuh"

enum { LANE_KEYS = 4 }; /* that a lane sums for, 8 rows apart */

template <int DEPTH> struct sums_buffer {
    enum { COLUMNS = CUDA_MATRIX_COLUMNS(DEPTH), STAGES = CUDA_SUMS_STAGES(DEPTH) };
    uint16_t columns[STAGES][COLUMNS][DEPTH];       /* two of queries, keys in the last */
    float row_max[2][COLUMNS], factors[2][COLUMNS]; /* of these queries */
    uint32_t is_key[MATRIX_ROWS];                   /* as in matrix_buffer, ... */
    float scales[MATRIX_ROWS];                      /* ... likewise */
    float sums[MATRIX_ROWS];                        /* over the second half of the columns */
};

/* A warp's keys, whose rows are in shared memory: 16 elements of 16 keys are a matrix a of mma. Of
 * rows of more than 128 elements registers have no room for all. */
template <int DEPTH> struct key_matrices {
    enum { KEPT = DEPTH <= 128 };
    uint16_t (*rows)[DEPTH];
    uint32_t a[KEPT ? DEPTH / 16 : 1][2][4];
};

DEVICE int first_key() { return threadIdx.x / 64 * 32; }
DEVICE int lane_key() { return first_key() + lane_row(); }
DEVICE int column_half() { return threadIdx.x / 32 % 2; }

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
    const int stages = MATRIX_ROWS / CUDA_MATRIX_COLUMNS(DEPTH); /* as large as a tile of keys */
    const row_source source = key_source(item, stored);
    keys->rows = (uint16_t (*)[DEPTH])buffer->columns[sums_buffer<DEPTH>::STAGES - stages];
    if (h2o_row_is_quantized(source.type)) {
        load_numbers<DEPTH, TYPE, MATRIX_ROWS>(keys->rows, item, &source, first, buffer->is_key,
                                               buffer->scales);
    } else {
        fetch_matrix<DEPTH, MATRIX_ROWS>(keys->rows, item, &source, stored, first, NULL);
    }
}

template <int DEPTH> DEVICE void keep_keys(key_matrices<DEPTH> *keys) {
    if (!key_matrices<DEPTH>::KEPT) return;
    wait_copies<0>();
    sync_block();
    UNROLL
    for (int i = 0; i < DEPTH / 16 * 2; i++)
        load_rows(keys->a[i / 2][i % 2], keys->rows, first_key() + i % 2 * 16, i / 2 * 16);
    sync_block();
}

/* The dot products of a warp's keys with its columns: of 16 keys with all of them, then of the
 * other 16. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void key_dots(key_matrices<DEPTH> *keys, const uint16_t (*tile)[DEPTH],
                     float c[sums_buffer<DEPTH>::COLUMNS / 8][4]) {
    const int columns = sums_buffer<DEPTH>::COLUMNS;
    UNROLL
    for (int i = 0; i < columns / 8 * 4; i++) c[i / 4][i % 4] = 0.0f;
    UNROLL
    for (int d = 0; d < DEPTH; d += 16) {
        const bool kept = key_matrices<DEPTH>::KEPT;
        uint32_t (*const a)[4] = keys->a[kept ? d / 16 : 0];
        UNROLL
        for (int i = 0; i < 2 && !kept; i++) load_rows(a[i], keys->rows, first_key() + i * 16, d);
        UNROLL
        for (int n = 0; n < columns / 2; n += 16) {
            uint32_t b[4];
            load_columns(b, tile, column_half() * columns / 2 + n, d);
            UNROLL
            for (int i = 0; i < 4; i++) {
                multiply<TYPE>(c[i / 2 * (columns / 16) + n / 8 + i % 2], a[i / 2], b + i % 2 * 2);
            }
        }
    }
}

/* Adds what such a tile, of which c has the logits in a unit (dots_to_exponents), gives to a lane's
 * keys. UNMASKED: every query sees every key. LARGEST: maxima instead of sums. */
template <int DEPTH, bool UNMASKED, bool LARGEST>
DEVICE void add_column_sums_of(const attend_item *item, bool stored, int64_t first, int64_t query,
                               int stage, const sums_buffer<DEPTH> *buffer,
                               const float c[sums_buffer<DEPTH>::COLUMNS / 8][4], float unit,
                               float sum[LANE_KEYS]) {
    const int columns = sums_buffer<DEPTH>::COLUMNS;
    const int count = (int)lower(item->tokens - query, columns);
    const int ahead = stored ? -MATRIX_ROWS : (int)(first - query); /* keys, of the queries */
    UNROLL
    for (int k = 0; k < columns / 8; k++) {
        const int at = column_half() * columns / 2 + k / 2 * 8 + lane_column() + k % 2;
        if (!UNMASKED && at >= count) continue;
        const float row_max = buffer->row_max[stage][at], factor = buffer->factors[stage][at];
        UNROLL
        for (int i = 0; i < LANE_KEYS; i++) {
            const float logit = c[i / 2 * (columns / 16) + k / 2][i % 2 * 2 + k % 2];
            const int key = lane_key() + 8 * i;
            if (!UNMASKED && (!buffer->is_key[key] || key + ahead > at)) continue;
            const float e = fast_exp2((logit - row_max) * unit);
            sum[i] = LARGEST ? h2o_larger(sum[i], e * factor) : fmaf(e, factor, sum[i]);
        }
    }
}

template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_matrix_column_sums(const attend_item *item, key_matrices<DEPTH> *keys, bool stored,
                                   int64_t first, int64_t query, int stage,
                                   const sums_buffer<DEPTH> *buffer, float sum[LANE_KEYS]) {
    const int columns = sums_buffer<DEPTH>::COLUMNS;
    const bool unmasked =
        !stored && first + MATRIX_ROWS <= query + 1 && query + columns <= item->tokens;
    TAKEN(matrix_sums_unmasked, unmasked);
    TAKEN(matrix_sums_of_stored, stored);
    TAKEN(matrix_sums_largest, h2o_scores_largest(&item->p->policy));
    float c[columns / 8][4];
    key_dots<DEPTH, TYPE>(keys, buffer->columns[stage], c);
    TAKEN(matrix_sums_of_quantized, stored && h2o_row_is_quantized(item->store.keys.type));
    if (stored && h2o_row_is_quantized(item->store.keys.type)) {
        const float *const scales = &buffer->scales[lane_key()];
        scale_dots<columns / 8>(
            c, [&](int i) { return scales[i / (columns / 4) * 16 + i % 4 / 2 * 8]; });
    }
    dots_to_exponents<columns / 8>(c, item->p->scale, item->p->softcap);
    const float unit = exponent_unit(item->p->scale, item->p->softcap);
    if (h2o_scores_largest(&item->p->policy)) {
        if (unmasked) {
            add_column_sums_of<DEPTH, true, true>(item, stored, first, query, stage, buffer, c,
                                                  unit, sum);
        } else {
            add_column_sums_of<DEPTH, false, true>(item, stored, first, query, stage, buffer, c,
                                                   unit, sum);
        }
    } else if (unmasked) {
        add_column_sums_of<DEPTH, true, false>(item, stored, first, query, stage, buffer, c, unit,
                                               sum);
    } else {
        add_column_sums_of<DEPTH, false, false>(item, stored, first, query, stage, buffer, c, unit,
                                                sum);
    }
}

/* The column sums of a tile of keys, over the queries that see them of all R heads. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void sum_over_queries(const attend_item *item, bool stored, int64_t first,
                             sums_buffer<DEPTH> *buffer, float sum[LANE_KEYS]) {
    const int columns = sums_buffer<DEPTH>::COLUMNS;
    const int64_t R = item->p->dims.R, begin = stored ? 0 : first;
    const int64_t tiles = cuda_ceil(item->tokens - begin, columns);
    row_source queries = token_source(item, &item->p->query, item->g * R);
    key_matrices<DEPTH> keys;
    load_keys<DEPTH, TYPE>(item, stored, first, buffer, &keys);
    fetch_queries<DEPTH>(item, &queries, item->g * R, begin, 0, buffer);
    keep_keys<DEPTH>(&keys);
    int stage = 0;
    for (int64_t r = 0; r < R; r++) {
        for (int64_t i = 0; i < tiles; i++) {
            const bool last = i + 1 == tiles;
            TAKEN(matrix_sums_second_tile_of_queries, i > 0);
            TAKEN(matrix_sums_second_head, r > 0);
            wait_copies<0>();
            sync_block(); /* the previous tile has been used */
            if (!last || r + 1 < R) {
                if (last) queries = token_source(item, &item->p->query, item->g * R + r + 1);
                fetch_queries<DEPTH>(item, &queries, item->g * R + r + last,
                                     begin + (last ? 0 : i + 1) * columns, 1 - stage, buffer);
            }
            add_matrix_column_sums<DEPTH, TYPE>(item, &keys, stored, first, begin + i * columns,
                                                stage, buffer, sum);
            stage = 1 - stage;
        }
    }
}

/* Writes the scores of a tile of keys, from both halves of the columns. */
template <int DEPTH>
DEVICE void write_scores(const attend_item *item, bool stored, int64_t first,
                         sums_buffer<DEPTH> *buffer, const float sum[LANE_KEYS]) {
    const bool largest = h2o_scores_largest(&item->p->policy);
    const bool speaks = lane_column() == 0, is_second = column_half() == 1;
    float half[LANE_KEYS];
    UNROLL
    for (int i = 0; i < LANE_KEYS; i++) {
        half[i] = largest ? largest_of_lanes<4>(sum[i]) : quad_sum(sum[i]);
        if (is_second && speaks) buffer->sums[lane_key() + 8 * i] = half[i];
    }
    sync_block();
    if (is_second || !speaks) return;
    UNROLL
    for (int i = 0; i < LANE_KEYS; i++) {
        const int row = lane_key() + 8 * i;
        const float other = buffer->sums[row];
        if (!buffer->is_key[row]) continue;
        write_score(item, stored, first + row,
                    largest ? h2o_larger(half[i], other) : half[i] + other);
    }
}

/* Grid: cuda_sums_blocks, G, B. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void matrix_sums_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    static_assert(sizeof(sums_buffer<DEPTH>) == CUDA_SUMS_SHARED(DEPTH));
    sums_buffer<DEPTH> *const buffer = (sums_buffer<DEPTH> *)shared;
    const attend_item item = open_attend(p, workspace, blockIdx.z, blockIdx.y);
    each_key_tile<MATRIX_ROWS>(&item, buffer->is_key, [&](bool stored, int64_t first, bool any) {
        float sum[LANE_KEYS] = {};
        if (any) sum_over_queries<DEPTH, TYPE>(&item, stored, first, buffer, sum);
        write_scores<DEPTH>(&item, stored, first, buffer, sum);
    });
}

#endif
