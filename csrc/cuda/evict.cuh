/* evict.cuh - takes Q new keys of each head into its slots and evicts what exceeds the budget k.
 * One block works on each of the B * G heads. The rows of a long prompt are moved by more blocks,
 * in a separate launch.
 *
 *   1. Selection among stored and new keys (evict_list.cuh).
 *   2. The scores of evicted keys are added to evicted_score [B,G].
 *   3. Moves: a kept key in slots 0..k-1 stays there. Kept new keys, then kept keys in slots from k
 *      on, fill the other slots of 0..k-1. No slot is both read and written by this.
 *   4. Slots from k on are emptied; slot k is the next free one.
 *
 * The last head of a row to finish advances seen_tokens [B], which all heads read at first. */
#ifndef H2O_CUDA_EVICT_CUH
#define H2O_CUDA_EVICT_CUH

#include "evict_list.cuh"
#include "move_rows.cuh"

/* ---- Moving -------------------------------------------------------------- */

/* Lists the slots below `kept` that must be filled, and the candidates that fill them. Returns
 * their number. */
DEVICE int64_t list_moves(const evict_item *item, int64_t kept, select_buffer *buffer) {
    const int64_t slots = item->head.slots;
    const int64_t vacant = compact(
        kept, 0, buffer, [&](int64_t s) { return item->marks[s]; },
        [](uint8_t mark) { return mark != KEPT; },
        [&](int64_t s, int64_t index) { item->destinations[index] = (int32_t)s; });
    int64_t count = compact(
        item->Q, 0, buffer, [&](int64_t q) { return item->marks[slots + q]; },
        [](uint8_t mark) { return mark == KEPT; },
        [&](int64_t q, int64_t index) { item->sources[index] = (int32_t)(slots + q); });
    count = compact(
        slots - kept, count, buffer, [&](int64_t s) { return item->marks[kept + s]; },
        [](uint8_t mark) { return mark == KEPT; },
        [&](int64_t s, int64_t index) { item->sources[index] = (int32_t)(kept + s); });
    return lower(vacant, count);
}

/* The moves of keys or of values. */
DEVICE row_moves moves_of(const evict_item *item, bool values, int64_t count) {
    const h2o_view *const tensor = values ? item->values : item->keys;
    row_moves moves = {};
    moves.rows = values ? item->store.values : item->store.keys;
    moves.first = tensor_row(tensor, item->b, item->g, 0);
    moves.pitch = tensor->stride[2] * h2o_dtype_size(tensor->dtype);
    moves.slots = item->head.slots;
    moves.D = item->D;
    moves.count = count;
    moves.sources = item->sources;
    moves.destinations = item->destinations;
    return moves;
}

/* Moves everything that belongs to a key except its rows. */
DEVICE void move_records(const evict_item *item, int64_t moves) {
    const slot_store *const store = &item->store;
    NO_UNROLL
    for (int64_t m = threadIdx.x; m < moves; m += blockDim.x) {
        const int64_t i = item->sources[m], to = item->destinations[m];
        TAKEN(evict_moves_stored, !is_new(item, i));
        store->scores[to] = score_of(item, i);
        store->positions[to] = position_by(item, i, index_of(item, i));
        if (store->norms) store->norms[to] = norm_of_candidate(item, i);
    }
}

DEVICE void clear_slots(const slot_store *store, int64_t begin, int64_t end) {
    NO_UNROLL
    for (int64_t s = begin + threadIdx.x; s < end; s += blockDim.x) {
        store->positions[s] = -1;
        store->scores[s] = 0.0f;
    }
}

DEVICE void move_all(const evict_item *item, int64_t moves, int64_t kept) {
    move_records(item, moves);
    NO_UNROLL
    for (int values = 0; !item->rows_wait && values <= !store_is_shared(&item->store); values++) {
        const row_moves rows = moves_of(item, values != 0, moves);
        move_rows<false>(&rows, block_share{0, 1});
    }
    sync_block();
    clear_slots(&item->store, kept, item->head.slots);
    if (threadIdx.x == 0) *item->moves = (int32_t)moves;
}

/* ---- The kernel ---------------------------------------------------------- */

/* The sum of the scores of all evicted keys. */
DEVICE double lost_scores(const evict_item *item) {
    double lost = 0.0;
    each_read(
        candidates(item),
        [&](int64_t i) {
            candidate_read x = {};
            x.mark = item->marks[i];
            x.score = score_of(item, i);
            return x;
        },
        [&](int64_t, const candidate_read &x) {
            if (x.mark == EVICTED) lost += (double)x.score;
        });
    return block_sum(lost, item->buffer);
}

/* New tokens of a head, keys that it keeps, and the sum of the scores of the others. */
typedef struct {
    int64_t tokens, kept;
    double lost;
} evict_result;

/* Does steps 1 to 4 for a head. */
DEVICE evict_result evict_head(const evict_item *item) {
    select_buffer *const buffer = item->buffer;
    const int64_t tokens = index_tokens(item, buffer);
    if (tokens == 0) return evict_result{};
    const h2o_ranking ranking = h2o_policy_ranking(item->policy, item->head.heavy,
                                                   item->head.recent, item->length + tokens);
    new_norms(item);
    sync_block();
    const int64_t n = list_candidates(item, &ranking, buffer);
    const int64_t kept = choose(item, n, lower(ranking.budget, item->head.slots), buffer);
    sync_block();
    const double lost = lost_scores(item);
    const int64_t moves = list_moves(item, kept, buffer);
    sync_block();
    move_all(item, moves, kept);
    return evict_result{tokens, kept, lost};
}

/* Grid: G, B. */
KERNEL(h2o_cuda_evict, h2o_evict_params) {
    const h2o_evict_params *const p = &params;
    const int64_t g = blockIdx.x, b = blockIdx.y;
    const evict_item item = open_evict(p, workspace, b, g, (select_buffer *)dynamic_shared);
    const evict_result evicted = evict_head(&item);
    const int64_t row = item.head.row;
    if (evicted.tokens == 0) { /* the same for all heads of a row */
        if (threadIdx.x == 0) *item.moves = 0;
        return;
    }
    if (threadIdx.x == 0) {
        *(int32_t *)h2o_at(&p->slots.next_slot, row, g, 0) = (int32_t)evicted.kept;
        *(double *)h2o_at(&p->slots.evicted_score, row, g, 0) += evicted.lost;
    }
    if (!arrive_last((uint32_t *)workspace + b, (uint32_t)p->dims.G) || threadIdx.x != 0) return;
    write_length(&p->slots.seen_tokens, row, item.length + evicted.tokens);
}

/* Moves the rows if evict has left them to this kernel. Grid: twice the number of blocks that share
 * a head's moves (the second half moves values), G, B. */
KERNEL(h2o_cuda_move, h2o_evict_params) {
    const h2o_evict_params *const p = &params;
    const int64_t blocks = gridDim.x / 2, index = blockIdx.x % blocks;
    const bool values = blockIdx.x >= blocks;
    const evict_item item = open_rows(p, workspace, blockIdx.z, blockIdx.y);
    if (values && store_is_shared(&item.store)) return;
    const row_moves rows = moves_of(&item, values, *item.moves);
    move_rows<true>(&rows, block_share{index, blocks});
}

#endif
