/* evict.cuh - takes Q new keys of each head into its slots and evicts what exceeds the budget k.
 * One block for each of the B * G heads; rows of a long prompt are moved by more, in a launch of
 * their own.
 *
 *   1. Selection among stored and new keys (evict_list.cuh).
 *   2. If evicted keys are merged: their list by position, stored rows saved to the workspace.
 *   3. Moves: a kept key in slots 0..k-1 remains there; kept new keys, then kept ones of slots
 *      from k on, fill the other slots of 0..k-1. No slot is both read and written by this.
 *   4. Slots from k on are emptied; slot k is the next free one.
 *   5. Evicted keys go one after the other into the nearest kept ones (merge.cuh). Scores of
 *      those that do not are added to lost [B,G].
 *
 * The last head of a row to finish advances lengths [B], which all of them read at first. */
#ifndef H2O_CUDA_EVICT_CUH
#define H2O_CUDA_EVICT_CUH

#include "evict_list.cuh"
#include "move_rows.cuh"

/* ---- Moving -------------------------------------------------------------- */

/* Lists the slots below `kept` that are to be filled, and the candidates that fill them; returns
 * how many. */
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

/* Moves of keys, or of values. */
DEVICE row_moves moves_of(const evict_item *item, bool values, int64_t count) {
    const slot_store *const store = &item->store;
    const h2o_view *const tensor = values ? item->values : item->keys;
    row_moves moves = {};
    moves.rows = values ? store->values : store->keys;
    moves.stride = values ? store->value_stride : store->key_stride;
    moves.type = values ? store->value_type : store->key_type;
    moves.first = row_of(tensor, item->b, item->g, 0);
    moves.pitch = tensor->stride[2] * h2o_dtype_size(tensor->dtype);
    moves.slots = item->head.slots;
    moves.D = item->D;
    moves.count = count;
    moves.sources = item->sources;
    moves.destinations = item->destinations;
    return moves;
}

/* Everything of a key but its rows. */
DEVICE void move_records(const evict_item *item, int64_t moves) {
    const slot_store *const store = &item->store;
    NO_UNROLL
    for (int64_t m = threadIdx.x; m < moves; m += blockDim.x) {
        const int64_t i = item->sources[m], to = item->destinations[m];
        TAKEN(evict_moves_stored, !is_new(item, i));
        store->scores[to] = score_of(item, i);
        store->positions[to] = position_of(item, i);
        if (store->norms) store->norms[to] = norm_of_candidate(item, i);
        if (store->bias) store->bias[to] = is_new(item, i) ? 0.0f : store->bias[i];
    }
}

DEVICE void clear_slots(const slot_store *store, int64_t begin, int64_t end) {
    NO_UNROLL
    for (int64_t s = begin + threadIdx.x; s < end; s += blockDim.x) {
        store->positions[s] = -1;
        store->scores[s] = 0.0f;
        if (store->bias) store->bias[s] = 0.0f;
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
    if (threadIdx.x == 0) {
        *item->free_slot = (int32_t)kept;
        *item->moves = (int32_t)moves;
    }
}

/* ---- Merging ------------------------------------------------------------- */

/* Lists evicted candidates by position: stored ones, whose rows and scores are saved, then new
 * ones. Returns how many; *stored_count of them were stored. */
DEVICE int64_t list_evicted(const evict_item *item, int64_t *stored_count, select_buffer *buffer) {
    const slot_store *const store = &item->store;
    const int64_t slots = item->head.slots, warps = blockDim.x / 32;
    const int64_t key_bytes = h2o_row_bytes(store->key_type, item->D);
    const int64_t evicted_slots = compact(
        slots, 0, buffer, [&](int64_t s) { return item->marks[s]; },
        [](uint8_t mark) { return mark == EVICTED; },
        [&](int64_t s, int64_t index) { item->sources[index] = (int32_t)s; });
    /* no consistent state evicts more stored keys than there are new ones, see evict_layout */
    *stored_count = lower(evicted_slots, lower(slots, item->Q));
    NO_UNROLL
    for (int64_t i = threadIdx.x / 32; i < *stored_count; i += warps) {
        const int32_t slot = item->sources[i], position = store->positions[slot];
        int32_t earlier = 0;
        NO_UNROLL
        for (int64_t j = threadIdx.x % 32; j < *stored_count; j += 32) {
            const int32_t other = store->positions[item->sources[j]];
            earlier += other < position || (other == position && j < i);
        }
        for (int offset = 16; offset > 0; offset /= 2) earlier += shfl_xor(earlier, offset);
        char *const row = item->saved + earlier * item->row;
        copy_row(row, store->keys + slot * store->key_stride, key_bytes);
        copy_row(row + key_bytes, store->values + slot * store->value_stride,
                 h2o_row_bytes(store->value_type, item->D));
        if (threadIdx.x % 32 == 0) {
            item->evicted[earlier] = slot;
            item->members[earlier] = h2o_member{store->scores[slot], store->bias[slot], position};
        }
    }
    sync_block();
    return compact(
        item->Q, *stored_count, buffer, [&](int64_t q) { return item->marks[slots + q]; },
        [](uint8_t mark) { return mark == EVICTED; },
        [&](int64_t q, int64_t index) { item->evicted[index] = (int32_t)(slots + q); });
}

/* The nth evicted key as floats; a new one's are those that a slot would have held. */
DEVICE evicted_key load_evicted(const evict_item *item, int64_t n, int64_t stored,
                                const evict_buffers *buffers) {
    const slot_store *const store = &item->store;
    const int64_t i = item->evicted[n], key_bytes = h2o_row_bytes(store->key_type, item->D);
    const char *row = item->saved + n * item->row;
    TAKEN(evict_merges_stored, n < stored);
    TAKEN(evict_merges_new, n >= stored);
    evicted_key e = {buffers->rows, buffers->rows + CUDA_DEPTH, {0.0f, 0.0f, 0}};
    if (n < stored) {
        e.member = item->members[n];
    } else {
        const int64_t q = column_of(item, i);
        e.member = h2o_member{score_of(item, i), 0.0f, position_of(item, i)};
        if (threadIdx.x / 32 == 0) {
            store_row(buffers->bytes, store->key_type, row_of(item->keys, item->b, item->g, q),
                      item->D);
        } else if (threadIdx.x / 32 == 1) {
            store_row(buffers->bytes + key_bytes, store->value_type,
                      row_of(item->values, item->b, item->g, q), item->D);
        }
        row = buffers->bytes;
    }
    sync_block();
    load_floats(row, store->key_type, item->D, buffers->rows);
    load_floats(row + key_bytes, store->value_type, item->D, buffers->rows + CUDA_DEPTH);
    sync_block();
    return e;
}

/* Merges the evicted keys one after the other, each into what is stored by then; returns the sum of
 * the scores of those that were not merged. */
DEVICE double merge_all(const evict_item *item, const h2o_ranking *ranking, int64_t evicted,
                        int64_t stored, int64_t kept, const evict_buffers *buffers) {
    double lost = 0.0;
    for (int64_t n = 0; n < evicted; n++) {
        const evicted_key e = load_evicted(item, n, stored, buffers);
        const nearest_key nearest = find_nearest(&item->store, &e, item->D, item->policy->sinks,
                                                 kept, -1, item->policy->merge, buffers->warps);
        if (!merge_into(&item->store, nearest, &e, ranking, item->D,
                        buffers->rows + 2 * CUDA_DEPTH)) {
            lost += (double)e.member.score;
        }
    }
    return lost;
}

/* ---- The kernel ---------------------------------------------------------- */

/* Steps 1 to 5 for a head; returns the number of new tokens. */
DEVICE int64_t evict_head(const evict_item *item) {
    const evict_buffers buffers = buffers_of(item);
    const int64_t tokens = index_tokens(item, buffers.select);
    if (tokens == 0) return 0;
    const h2o_ranking ranking = h2o_policy_ranking(item->policy, item->head.heavy,
                                                   item->head.recent, item->length + tokens);
    new_norms(item);
    sync_block();
    const int64_t n = list_candidates(item, &ranking, buffers.select);
    const int64_t kept = choose(item, n, lower(ranking.budget, item->head.slots), buffers.select);
    sync_block();
    int64_t evicted = 0, stored = 0;
    double lost = 0.0;
    if (h2o_merges(item->policy)) {
        evicted = list_evicted(item, &stored, buffers.select);
    } else {
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
        lost = block_sum(lost, buffers.select);
    }
    const int64_t moves = list_moves(item, kept, buffers.select);
    sync_block();
    move_all(item, moves, kept);
    sync_block();
    if (evicted > 0) lost = merge_all(item, &ranking, evicted, stored, kept, &buffers);
    if (threadIdx.x == 0) *item->lost += lost;
    return tokens;
}

/* Grid: G, B. */
KERNEL(h2o_cuda_evict, h2o_evict_params) {
    DYN_SHARED(shared);
    const h2o_evict_params *const p = &params;
    const int64_t g = blockIdx.x, b = blockIdx.y;
    const evict_item item = open_evict(p, workspace, b, g, (char *)shared);
    const int64_t tokens = evict_head(&item);
    if (tokens == 0) { /* the same for all heads of a row */
        if (threadIdx.x == 0) *item.moves = 0;
        return;
    }
    if (!is_last_head(&p->slots.lengths, item.head.row, p->dims.G)) return;
    if (threadIdx.x == 0) {
        *(int64_t *)h2o_at(&p->slots.lengths, item.head.row, 0, 0) = item.length + tokens;
    }
}
EXPORT_KERNEL(h2o_cuda_evict, h2o_evict_params)

/* The rows, where evict has left them to this. Grid: twice the blocks that share a head's moves, of
 * which the second half moves values, G, B. */
KERNEL(h2o_cuda_move, h2o_evict_params) {
    const h2o_evict_params *const p = &params;
    const int64_t blocks = gridDim.x / 2, index = blockIdx.x % blocks;
    const bool values = blockIdx.x >= blocks;
    const evict_item item = open_rows(p, workspace, blockIdx.z, blockIdx.y);
    if (values && store_is_shared(&item.store)) return;
    const row_moves rows = moves_of(&item, values, *item.moves);
    move_rows<true>(&rows, block_share{index, blocks});
}
EXPORT_KERNEL(h2o_cuda_move, h2o_evict_params)

#endif
