/* sums.cuh - the attention that each key receives: column sums of the softmax, [B,G,Q] for new keys
 * and [B,G,S] for stored ones.
 *
 * A softmax weight is known only after the last key of its row, so forward.cuh cannot add up
 * columns on its way. This second pass computes the logits again:
 *
 *     sum of key j = sum over queries i of exp(logit(i, j) - row max(i)) * factor(i)
 *     factor(i) = decay weight(i) / row sum(i)
 *
 * If scores are the largest attention, it takes the maximum over queries instead of the sum.
 *
 * A block has a tile of ATTEND_TILE keys at a time, which stay in shared memory, and loads the
 * queries that see them, of all R heads of the group, one tile after another. If there would be few
 * blocks, several blocks divide the tiles of queries, and the last to finish adds up all parts. The
 * order of additions is fixed. matrix_sums.cuh does the same with tensor cores. */
#ifndef H2O_CUDA_SUMS_CUH
#define H2O_CUDA_SUMS_CUH

#include "attend_tiles.cuh"

/* Adds what a thread's THREAD_ROWS keys receive from a tile of queries of one head. */
template <int DEPTH, bool LARGEST>
DEVICE void add_column_sums(const attend_item *item, bool stored, int64_t first, int64_t h,
                            int64_t query, const tile_buffer<DEPTH> *buffer,
                            float sum[THREAD_ROWS]) {
    const int row = threadIdx.x / ROW_THREADS * THREAD_ROWS, column = threadIdx.x % ROW_THREADS;
    const h2o_attend_params *const p = item->p;
    float dots[THREAD_ROWS][THREAD_COLUMNS] = {};
    add_tile_dots<DEPTH>(buffer->rows, buffer->columns, row, column, dots);
    UNROLL
    for (int j = 0; j < THREAD_COLUMNS; j++) {
        const int64_t token = query + column + j * ROW_THREADS;
        if (token >= item->tokens) continue;
        const int64_t at = h * p->dims.Q + token;
        const float row_max = item->row_max[at], factor = item->factors[at];
        UNROLL
        for (int i = 0; i < THREAD_ROWS; i++) {
            if (!buffer->is_key[row + i] || (!stored && first + row + i > token)) continue;
            const float logit = logit_of(dots[i][j], p->scale, p->softcap);
            const float e = fast_exp(logit - row_max);
            sum[i] = LARGEST ? h2o_larger(sum[i], e * factor) : fmaf(e, factor, sum[i]);
        }
    }
}

/* The number of blocks that share a group's queries, and which of them this one is. */
typedef struct {
    unsigned parts, part;
} sums_share;

DEVICE sums_share open_share(const h2o_dims *d) {
    const unsigned parts = gridDim.y / (unsigned)d->G;
    return sums_share{parts, blockIdx.y % parts};
}

/* A tile of queries: tile `index` of the `tiles` of a query head that see a tile of keys. */
typedef struct {
    int h, end; /* of the group's heads */
    int index, tiles;
} query_tile;

DEVICE bool is_tile(const query_tile *tile) { return tile->h < tile->end; }

/* Advances by `by` tiles, counting those of all heads in sequence. */
DEVICE void advance(query_tile *tile, unsigned by) {
    for (tile->index += (int)by; tile->index >= tile->tiles && is_tile(tile); tile->h++)
        tile->index -= tile->tiles;
}

/* A block's first tile; tiles must be > 0. The block has every parts-th tile from there on. */
DEVICE query_tile first_query_tile(const attend_item *item, const sums_share *share, int tiles) {
    const int R = (int)item->p->dims.R, h = (int)item->g * R;
    query_tile tile = {h, h + R, 0, tiles};
    advance(&tile, share->part);
    return tile;
}

/* The address of a part's column sums, from that of slot or new key `first` on. */
DEVICE float *column_sums(const attend_item *item, const sums_share *share, unsigned part,
                          bool stored, int64_t first) {
    h2o_dims d = item->p->dims;
    const int64_t S = compute_here(cuda_attend_slots(item->p));
    const int64_t row = (item->b * d.G + item->g) * share->parts + part;
    d.B = compute_here(d.B);
    float *const sums = (float *)(item->workspace + cuda_attend_layout(&d, S).sums);
    return sums + row * (S + d.Q) + (stored ? first : S + first);
}

/* Writes the scores of a tile, once all parts of its column sums are done. A tile has at most as
 * many keys as there are threads. */
DEVICE void write_scores(const attend_item *item, const sums_share *share, bool stored,
                         int64_t first, unsigned rows, const uint32_t *is_key) {
    const h2o_attend_params *const p = item->p;
    const int64_t S = compute_here(cuda_attend_slots(p)), head = item->b * p->dims.G + item->g;
    const int64_t tile = head * cuda_key_tiles(&p->dims, S) + cuda_key_tile(S, stored, first);
    TAKEN(sums_of_several_parts, share->parts > 1);
    if (!arrive_last((uint32_t *)item->workspace + tile, share->parts)) return;
    if (!stored) clear_pad_scores(p, item->b, item->g, first, rows);
    if (threadIdx.x >= rows || !is_key[threadIdx.x]) return;
    float sum = 0.0f;
    for (unsigned part = 0; part < share->parts; part++) {
        const float next = column_sums(item, share, part, stored, first)[threadIdx.x];
        sum = h2o_scores_largest(&p->policy) ? h2o_larger(sum, next) : sum + next;
    }
    write_score(item, stored, first + threadIdx.x, sum);
}

/* Goes through a block's tiles of ROWS keys: one tile of slots, or two of new keys: the first and
 * the last, the second and the last but one, and so on, since earlier keys are seen by more
 * queries. use(stored, first, any) is told whether any query sees a key of the tile, and must write
 * its part of the column sums. */
template <int ROWS, typename USE>
DEVICE void each_key_tile(const attend_item *item, const sums_share *share, uint32_t *is_key,
                          USE use) {
    const int64_t tiles = cuda_ceil(item->p->dims.Q, ROWS);
    const int64_t stored_tiles = gridDim.x - cuda_ceil(tiles, 2);
    const bool stored = blockIdx.x < stored_tiles;
    const int64_t early = stored ? blockIdx.x : blockIdx.x - stored_tiles;
    const int64_t late = stored ? early : tiles - 1 - early;
    NO_UNROLL
    for (int64_t tile = early;; tile = late) {
        const int64_t first = tile * ROWS;
        TAKEN(sums_second_tile_of_keys, tile != early);
        const bool any = load_presence(item, stored, first, ROWS, is_key);
        use(stored, first, any && item->tokens > 0);
        write_scores(item, share, stored, first, ROWS, is_key);
        if (tile == late) return;
        sync_block(); /* all threads are done with the first tile */
    }
}

/* Adds up a tile of keys. */
template <int DEPTH>
DEVICE void sum_tile(const attend_item *item, const sums_share *share, bool stored, int64_t first,
                     tile_buffer<DEPTH> *buffer, float sum[THREAD_ROWS]) {
    const h2o_attend_params *const p = item->p;
    const int64_t begin = stored ? 0 : first;
    const int tiles = (int)cuda_ceil(item->tokens - begin, ATTEND_TILE);
    query_tile tile = first_query_tile(item, share, tiles);
    if (!is_tile(&tile)) return;
    load_tile<DEPTH>(buffer->rows, p->dims.D,
                     [&](int i) { return key_row(item, stored, first + i); });
    for (; is_tile(&tile); advance(&tile, share->parts)) {
        const int64_t query = begin + (int64_t)tile.index * ATTEND_TILE;
        TAKEN(sums_second_tile_of_queries, tile.index > 0);
        sync_block(); /* all threads are done with the previous tile */
        load_tile<DEPTH>(buffer->columns, p->dims.D,
                         [&](int i) { return token_row(item, &p->query, tile.h, query + i); });
        sync_block();
        TAKEN(sums_largest, h2o_scores_largest(&p->policy));
        if (h2o_scores_largest(&p->policy)) {
            add_column_sums<DEPTH, true>(item, stored, first, tile.h, query, buffer, sum);
        } else {
            add_column_sums<DEPTH, false>(item, stored, first, tile.h, query, buffer, sum);
        }
    }
}

/* Grid: cuda_sums_blocks, G times parts, B. */
template <int DEPTH>
DEVICE void sums_block(const h2o_attend_params *p, char *workspace, unsigned char *shared) {
    tile_buffer<DEPTH> *const buffer = (tile_buffer<DEPTH> *)shared;
    const sums_share share = open_share(&p->dims);
    const attend_item item = open_attend(p, workspace, blockIdx.z, blockIdx.y / share.parts);
    const int row = threadIdx.x / ROW_THREADS * THREAD_ROWS, column = threadIdx.x % ROW_THREADS;
    each_key_tile<ATTEND_TILE>(
        &item, &share, buffer->is_key, [&](bool stored, int64_t first, bool any) {
            float sum[THREAD_ROWS] = {};
            if (any) sum_tile<DEPTH>(&item, &share, stored, first, buffer, sum);
            UNROLL
            for (int i = 0; i < THREAD_ROWS; i++) {
                const float column_sum = h2o_scores_largest(&p->policy)
                                             ? largest_of_lanes<ROW_THREADS>(sum[i])
                                             : sum_of_lanes<ROW_THREADS>(sum[i]);
                if (column == 0 && buffer->is_key[row + i])
                    column_sums(&item, &share, share.part, stored, first)[row + i] = column_sum;
            }
        });
}

#endif
