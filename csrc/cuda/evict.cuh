/* evict.cuh - new keys come into the slots and the rest leaves: a block for each head.
 *
 * The candidates are the stored keys, by slot, and the new ones, by column. Of k that stay,
 * stored ones in slots 0..k-1 remain where they are; the new ones, then stored ones from
 * further up, take what is free among these slots. So no row is read after its place was
 * given away. Where keys are merged, those that leave come last, one after the other by
 * position: rows that were stored are saved before their slots are taken. */
#ifndef H2O_CUDA_EVICT_CUH
#define H2O_CUDA_EVICT_CUH

#include "evict_list.cuh"

/* ---- Moving -------------------------------------------------------------- */

/* Lists the places that are free among the first `kept` and who comes there; returns how many. */
DEVICE int64_t list_moves(const evict_unit *u, int64_t kept, select_room *room) {
    const int64_t slots = u->head.slots;
    const int64_t holes = compact(
        kept, 0, room, [&](int64_t s) { return u->marks[s] != STAYS; },
        [&](int64_t s, int64_t place) { u->holes[place] = (int32_t)s; });
    int64_t come = compact(
        u->Q, 0, room, [&](int64_t q) { return u->marks[slots + q] == STAYS; },
        [&](int64_t q, int64_t place) { u->sources[place] = (int32_t)(slots + q); });
    come = compact(
        slots - kept, come, room, [&](int64_t s) { return u->marks[kept + s] == STAYS; },
        [&](int64_t s, int64_t place) { u->sources[place] = (int32_t)(kept + s); });
    return lower(holes, come);
}

/* A warp brings a candidate into a slot. */
DEVICE void move_candidate(const evict_unit *u, int64_t i, int64_t to) {
    const slot_store *const store = &u->store;
    char *const key = store->keys + to * store->key_stride;
    char *const value = store->values + to * store->value_stride;
    if (is_new(u, i)) {
        const int64_t q = column_of(u, i);
        make_row(key, store->key_type, row_of(u->keys, u->b, u->g, q), u->D);
        make_row(value, store->value_type, row_of(u->values, u->b, u->g, q), u->D);
    } else {
        copy_row(key, store->keys + i * store->key_stride, h2o_row_bytes(store->key_type, u->D));
        copy_row(value, store->values + i * store->value_stride,
                 h2o_row_bytes(store->value_type, u->D));
    }
    if (threadIdx.x % 32 == 0) {
        store->scores[to] = score_of(u, i);
        store->positions[to] = position_of(u, i);
        if (store->norms) store->norms[to] = norm_of_candidate(u, i);
        if (store->bias) store->bias[to] = is_new(u, i) ? 0.0f : store->bias[i];
    }
}

DEVICE void clear_slots(const slot_store *store, int64_t begin, int64_t end) {
    ROLLED
    for (int64_t s = begin + threadIdx.x; s < end; s += blockDim.x) {
        store->positions[s] = -1;
        store->scores[s] = 0.0f;
        if (store->bias) store->bias[s] = 0.0f;
    }
}

DEVICE void move_all(const evict_unit *u, int64_t moves, int64_t kept) {
    ROLLED
    for (int64_t m = threadIdx.x / 32; m < moves; m += blockDim.x / 32) {
        move_candidate(u, u->sources[m], u->holes[m]);
    }
    sync_block();
    clear_slots(&u->store, kept, u->head.slots);
    if (threadIdx.x == 0) *u->free_slot = (int32_t)kept;
}

/* ---- Merging ------------------------------------------------------------- */

/* Stored ones by position, whose rows and numbers are saved, then the new ones, which are later.
 * Returns how many; *stored of them were. */
DEVICE int64_t list_leavers(const evict_unit *u, int64_t *stored, select_room *room) {
    const slot_store *const store = &u->store;
    const int64_t slots = u->head.slots, warps = blockDim.x / 32;
    const int64_t key_bytes = h2o_row_bytes(store->key_type, u->D);
    const int64_t found = compact(
        slots, 0, room, [&](int64_t s) { return u->marks[s] == LEAVES; },
        [&](int64_t s, int64_t place) { u->sources[place] = (int32_t)s; });
    *stored = lower(found, lower(slots, u->Q)); /* as many as come, unless somebody interfered */
    ROLLED
    for (int64_t i = threadIdx.x / 32; i < *stored; i += warps) {
        const int32_t slot = u->sources[i], position = store->positions[slot];
        int32_t earlier = 0;
        ROLLED
        for (int64_t j = threadIdx.x % 32; j < *stored; j += 32) {
            const int32_t other = store->positions[u->sources[j]];
            earlier += other < position || (other == position && j < i);
        }
        for (int lanes = 16; lanes > 0; lanes /= 2) earlier += shfl_xor(earlier, lanes);
        char *const row = u->saved + earlier * u->row;
        copy_row(row, store->keys + slot * store->key_stride, key_bytes);
        copy_row(row + key_bytes, store->values + slot * store->value_stride,
                 h2o_row_bytes(store->value_type, u->D));
        if (threadIdx.x % 32 == 0) {
            u->leavers[earlier] = slot;
            u->members[earlier] = h2o_member{store->scores[slot], store->bias[slot], position};
        }
    }
    sync_block();
    return compact(
        u->Q, *stored, room, [&](int64_t q) { return u->marks[slots + q] == LEAVES; },
        [&](int64_t q, int64_t place) { u->leavers[place] = (int32_t)(slots + q); });
}

/* The n-th that leaves, as a slot has it or would have had it. */
DEVICE leaver read_leaver(const evict_unit *u, int64_t n, int64_t stored, const evict_room *room) {
    const slot_store *const store = &u->store;
    const int64_t i = u->leavers[n], key_bytes = h2o_row_bytes(store->key_type, u->D);
    const char *row = u->saved + n * u->row;
    leaver e = {room->rows, room->rows + CUDA_DEPTH, {0.0f, 0.0f, 0}};
    if (n < stored) {
        e.member = u->members[n];
    } else {
        const int64_t q = column_of(u, i);
        e.member = h2o_member{score_of(u, i), 0.0f, position_of(u, i)};
        if (threadIdx.x / 32 == 0) {
            make_row(room->bytes, store->key_type, row_of(u->keys, u->b, u->g, q), u->D);
        } else if (threadIdx.x / 32 == 1) {
            make_row(room->bytes + key_bytes, store->value_type, row_of(u->values, u->b, u->g, q),
                     u->D);
        }
        row = room->bytes;
    }
    sync_block();
    read_floats(row, store->key_type, u->D, room->rows);
    read_floats(row + key_bytes, store->value_type, u->D, room->rows + CUDA_DEPTH);
    sync_block();
    return e;
}

/* One after the other into what is there by then; returns the scores of those that went nowhere. */
DEVICE double merge_all(const evict_unit *u, const h2o_ranking *ranking, int64_t leaving,
                        int64_t stored, int64_t kept, const evict_room *room) {
    double lost = 0.0;
    for (int64_t n = 0; n < leaving; n++) {
        const leaver e = read_leaver(u, n, stored, room);
        const neighbour found = most_similar(&u->store, &e, u->D, u->policy->sinks, kept, -1,
                                             u->policy->merge, room->found);
        if (!merge_into(&u->store, found, &e, ranking, u->D, room->rows + 2 * CUDA_DEPTH)) {
            lost += (double)e.member.score;
        }
    }
    return lost;
}

/* ---- The kernel ---------------------------------------------------------- */

/* Returns how many tokens came. */
DEVICE int64_t evict_head(const evict_unit *u) {
    const evict_room room = rooms_of(u);
    const int64_t tokens = order_tokens(u, room.select);
    if (tokens == 0) return 0;
    const h2o_ranking ranking =
        h2o_policy_ranking(u->policy, u->head.heavy, u->head.recent, u->length + tokens);
    new_norms(u);
    sync_block();
    const int64_t n = list_candidates(u, &ranking, room.select);
    const int64_t kept = choose(u, n, lower(ranking.budget, u->head.slots), room.select);
    sync_block();
    int64_t leaving = 0, stored = 0;
    double lost = 0.0;
    if (h2o_merges(u->policy)) {
        leaving = list_leavers(u, &stored, room.select);
    } else {
        ROLLED
        for (int64_t i = threadIdx.x; i < candidates(u); i += blockDim.x) {
            if (u->marks[i] == LEAVES) lost += (double)score_of(u, i);
        }
        lost = block_sum(lost, room.select);
    }
    const int64_t moves = list_moves(u, kept, room.select);
    sync_block();
    move_all(u, moves, kept);
    sync_block();
    if (leaving > 0) lost = merge_all(u, &ranking, leaving, stored, kept, &room);
    if (threadIdx.x == 0) *u->lost += lost;
    return tokens;
}

/* Grid: G, B. */
KERNEL(h2o_cuda_evict, h2o_evict_params) {
    DYN_SHARED(room);
    const h2o_evict_params *const p = &params;
    const int64_t g = blockIdx.x, b = blockIdx.y;
    const evict_unit u = open_evict(p, workspace, b, g, (char *)room);
    const int64_t tokens = evict_head(&u);
    if (tokens == 0) return; /* the same for all heads of a row */
    if (!arrive_last((uint32_t *)workspace + b, (uint32_t)p->dims.G)) return;
    if (threadIdx.x == 0) {
        *(int64_t *)h2o_at(&p->slots.lengths, b, 0, 0) = u.length + tokens;
    }
}
EXPORT_KERNEL(h2o_cuda_evict, h2o_evict_params)

#endif
