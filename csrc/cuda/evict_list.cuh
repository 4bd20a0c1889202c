/* evict_list.cuh - a head's candidates, and which of them stay. */
#ifndef H2O_CUDA_EVICT_LIST_CUH
#define H2O_CUDA_EVICT_LIST_CUH

#include "merge.cuh"
#include "select.cuh"

enum { NOBODY, LEAVES, STAYS }; /* marks of candidates */

/* A key/value head of a row, and the tokens that come. */
typedef struct {
    const h2o_policy *policy;
    const h2o_view *keys, *values, *scores, *mask;
    int64_t b, g, Q, D;
    int64_t length, tokens; /* seen before, and how many of the columns' tokens come */
    h2o_head head;
    slot_store store;
    double *lost;
    int32_t *free_slot;
    uint32_t *rank_keys; /* see evict_layout, from here on */
    uint8_t *marks;
    int32_t *order, *holes, *sources, *leavers;
    float *norms;
    h2o_member *members;
    char *saved;
    int64_t row;
    char *room; /* shared */
} evict_unit;

typedef struct {
    float *rows;      /* [4][CUDA_DEPTH] of one that leaves: key, value, and two of scratch */
    char *bytes;      /* its key and value as stored */
    neighbour *found; /* one for each warp */
    select_room *select;
} evict_room;

DEVICE evict_room rooms_of(const evict_unit *u) {
    float *const rows = (float *)u->room;
    char *const bytes = (char *)(rows + 4 * CUDA_DEPTH);
    char *const rest = bytes + 2 * CUDA_DEPTH * sizeof(float);
    return evict_room{rows, bytes, (neighbour *)rest, (select_room *)(rest + 256)};
}

/* ---- Opening ------------------------------------------------------------- */

DEVICE void find_workspace(evict_unit *u, const evict_layout *at, char *workspace, int64_t unit) {
    const int64_t S = at->slots, room = S + u->Q, stored = lower(S, u->Q);
    u->rank_keys = (uint32_t *)(workspace + at->keys) + unit * room;
    u->marks = (uint8_t *)(workspace + at->marks) + unit * room;
    u->order = (int32_t *)(workspace + at->order) + unit * u->Q;
    u->norms = (float *)(workspace + at->norms) + unit * u->Q;
    u->holes = (int32_t *)(workspace + at->holes) + unit * S;
    u->sources = (int32_t *)(workspace + at->sources) + unit * room;
    u->leavers = (int32_t *)(workspace + at->leavers) + unit * room;
    u->members = (h2o_member *)(workspace + at->members) + unit * stored;
    u->saved = workspace + at->saved + unit * stored * at->row;
    u->row = at->row;
}

DEVICE evict_unit open_evict(const h2o_evict_params *p, char *workspace, int64_t b, int64_t g,
                             char *room) {
    const evict_layout at = cuda_evict_call(p);
    evict_unit u = {};
    u.policy = &p->policy;
    u.keys = &p->keys;
    u.values = &p->values;
    u.scores = &p->scores;
    u.mask = &p->mask;
    u.b = b;
    u.g = g;
    u.Q = p->dims.Q;
    u.D = p->dims.D;
    u.tokens = p->dims.Q;
    u.length = read_length(&p->slots.lengths, b, p->dims.Q);
    u.head = read_head(&p->slots, b, g, &p->policy, u.length);
    u.store = open_store(&p->slots, b, &u.head, p->dims.D);
    u.lost = (double *)h2o_at(&p->slots.lost, b, g, 0);
    u.free_slot = (int32_t *)h2o_at(&p->slots.free, b, g, 0);
    u.room = room;
    find_workspace(&u, &at, workspace, b * p->dims.G + g);
    return u;
}

/* ---- Candidates ---------------------------------------------------------- */

DEVICE int64_t candidates(const evict_unit *u) { return u->head.slots + u->Q; }
DEVICE bool is_new(const evict_unit *u, int64_t i) { return i >= u->head.slots; }
DEVICE int64_t column_of(const evict_unit *u, int64_t i) { return i - u->head.slots; }

DEVICE float score_of(const evict_unit *u, int64_t i) {
    if (!is_new(u, i)) return u->store.scores[i];
    return *(const float *)h2o_at(u->scores, u->b, u->g, column_of(u, i));
}

DEVICE int32_t position_of(const evict_unit *u, int64_t i) {
    return is_new(u, i) ? (int32_t)(u->length + u->order[column_of(u, i)]) : u->store.positions[i];
}

DEVICE float norm_of_candidate(const evict_unit *u, int64_t i) {
    return is_new(u, i) ? u->norms[column_of(u, i)] : u->store.norms[i];
}

/* Numbers the new tokens, no more than u->tokens; returns how many there are. */
DEVICE int64_t order_tokens(const evict_unit *u, select_room *room) {
    ROLLED
    for (int64_t q = threadIdx.x; q < u->Q; q += blockDim.x) u->order[q] = -1;
    sync_block();
    const int64_t most = u->tokens;
    const int64_t found = compact(
        u->Q, 0, room, [&](int64_t q) { return is_token(u->mask, u->b, q); },
        [&](int64_t q, int64_t place) { u->order[q] = place < most ? (int32_t)place : -1; });
    return lower(found, most);
}

DEVICE void new_norms(const evict_unit *u) {
    if (!u->policy->value_weighted) return;
    const int warps = blockDim.x / 32;
    ROLLED
    for (int64_t q = threadIdx.x / 32; q < u->Q; q += warps) {
        const float norm = norm_of(row_of(u->values, u->b, u->g, q), u->D);
        if (threadIdx.x % 32 == 0) u->norms[q] = norm;
    }
}

/* Marks all candidates and gives them keys; returns how many there are. */
DEVICE int64_t list_candidates(const evict_unit *u, const h2o_ranking *ranking, select_room *room) {
    double mine = 0.0;
    ROLLED
    for (int64_t i = threadIdx.x; i < candidates(u); i += blockDim.x) {
        const bool is = is_new(u, i) ? u->order[column_of(u, i)] >= 0 : u->store.positions[i] >= 0;
        u->marks[i] = is ? LEAVES : NOBODY;
        if (!is) continue;
        mine += 1.0;
        const bool weighted = ranking->value_weighted;
        u->rank_keys[i] =
            h2o_policy_slot_key(ranking, ranking->kind, weighted, score_of(u, i), position_of(u, i),
                                weighted ? norm_of_candidate(u, i) : 1.0f);
    }
    return (int64_t)block_sum(mine, room);
}

/* Marks who of n stays; returns how many. */
DEVICE int64_t choose(const evict_unit *u, int64_t n, int64_t budget, select_room *room) {
    const auto all = [&](int64_t i) { return u->marks[i] != NOBODY; };
    uint32_t lowest = 0;
    int32_t last = INT32_MAX;
    if (n > budget) {
        int64_t among, tied_among;
        lowest = nth_highest(candidates(u), budget, &among, room, all,
                             [&](int64_t i) { return u->rank_keys[i]; });
        const auto tied = [&](int64_t i) { return all(i) && u->rank_keys[i] == lowest; };
        last = (int32_t)~nth_highest(candidates(u), among, &tied_among, room, tied,
                                     [&](int64_t i) { return ~(uint32_t)position_of(u, i); });
    }
    double mine = 0.0;
    ROLLED
    for (int64_t i = threadIdx.x; i < candidates(u); i += blockDim.x) {
        if (!all(i)) continue;
        const uint32_t key = u->rank_keys[i];
        const bool stays = key > lowest || (key == lowest && position_of(u, i) <= last);
        if (stays) u->marks[i] = STAYS;
        mine += stays;
    }
    return lower((int64_t)block_sum(mine, room), u->head.slots);
}

#endif
