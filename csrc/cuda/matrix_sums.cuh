/* matrix_sums.cuh - sums.cuh with tensor cores: the attention that each key receives.
 *
 * A block has 128 keys, 32 of them in the registers of each warp, which computes their logits for a
 * tile of queries, some columns at a time. If rows have more than 128 elements, a block has 64
 * keys, and two warps with the same keys divide the columns. Tiles of queries come through two
 * stages of shared memory: while one tile is processed, the next one is being copied. */
#ifndef H2O_CUDA_MATRIX_SUMS_CUH
#define H2O_CUDA_MATRIX_SUMS_CUH

#include "hopper_sums.cuh"

/* The dot products of a warp's keys with a turn of columns: first those of 16 keys with all
 * columns, then those of the other 16 keys. */
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

/* Adds up a tile of queries. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_matrix_column_sums(key_turn<LANE_KEYS, sums_buffer<DEPTH>::TURN> *turn,
                                   const attend_item *item, key_matrices<DEPTH> *keys,
                                   const sums_buffer<DEPTH> *buffer, float sum[LANE_KEYS]) {
    const int width = sums_buffer<DEPTH>::TURN, step = sums_buffer<DEPTH>::SHARING * width;
    NO_UNROLL
    for (turn->at = column_share<DEPTH>() * width; turn->at < sums_buffer<DEPTH>::COLUMNS;
         turn->at += step) {
        if (is_unseen(turn, keys)) continue;
        float c[width / 4][4];
        key_dots<DEPTH, TYPE>(keys, buffer->columns[turn->stage] + turn->at, c);
        add_turn(turn, item, keys, buffer, c, sum);
    }
}

/* Adds up tiles of queries, beginning with `tile`, which is already being fetched. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void sum_by_warps(const sums_of_keys *of, const query_source *source, query_tile tile,
                         key_matrices<DEPTH> *keys, sums_buffer<DEPTH> *buffer,
                         float sum[LANE_KEYS]) {
    for (int stage = 0; is_tile(&tile); stage = 1 - stage) {
        auto turn = open_turn<DEPTH, LANE_KEYS, sums_buffer<DEPTH>::TURN>(of, &tile, stage);
        TAKEN(matrix_sums_second_tile_of_queries, tile.index > 0);
        TAKEN(matrix_sums_second_head, tile.h > tile.end - (int)of->item->p->dims.R);
        advance(&tile, of->share->parts);
        turn.far = await_queries<DEPTH>(of->item, stage, buffer); /* all are done with the last */
        if (is_tile(&tile)) fetch_queries<DEPTH>(of, source, &tile, 1 - stage, buffer);
        add_matrix_column_sums<DEPTH, TYPE>(&turn, of->item, keys, buffer, sum);
    }
}

/* Computes the column sums of a tile of keys over the block's tiles of queries that see them. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void sum_over_queries(const sums_of_keys *of, sums_buffer<DEPTH> *buffer,
                             float sum[LANE_KEYS]) {
    const int tiles = (int)cuda_ceil(of->item->tokens - of->begin, sums_buffer<DEPTH>::COLUMNS);
    const query_tile tile = first_query_tile(of->item, of->share, tiles);
    key_matrices<DEPTH> keys;
    if (!is_tile(&tile)) return;
    load_keys<DEPTH, TYPE>(of->item, of->stored, of->first, buffer, &keys);
    keep_keys<DEPTH>(&keys);
    keys.present = warp_ballot(buffer->is_key[first_key<DEPTH>() + threadIdx.x % 32] != 0);
    const query_source source = open_queries<DEPTH>(of);
    fetch_queries<DEPTH>(of, &source, &tile, 0, buffer);
#if WARPGROUPS
    if constexpr (sums_buffer<DEPTH>::BY_GROUPS)
        sum_by_groups<DEPTH, TYPE>(of, &source, tile, &keys, buffer, sum);
    else
#endif
        sum_by_warps<DEPTH, TYPE>(of, &source, tile, &keys, buffer, sum);
}

/* Writes the column sums of a tile of keys, combining the columns of all warps. */
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
            const sums_of_keys of = open_sums(&item, &share, stored, first);
            if (any) sum_over_queries<DEPTH, TYPE>(&of, buffer, sum);
            write_column_sums<DEPTH>(&item, &share, stored, first, buffer, sum);
        });
}

#endif
