/* evict_list.cuh - the candidates of a head, and which of them the policy keeps.
 *
 * A head has slots + Q candidates: candidate i < slots is the key stored in slot i, candidate
 * slots + q the new key in column q. A mark for each says whether it is empty (no key, or padding),
 * evicted or kept. Selection is the work of one block:
 *
 *   1. index_tokens: positions of the new keys, not counting padding;
 *   2. list_candidates: ranks as unsigned integers in the same order (policy.h);
 *   3. choose: the highest ranks are kept, as many as the budget; ties by the lower position. */
#ifndef H2O_CUDA_EVICT_LIST_CUH
#define H2O_CUDA_EVICT_LIST_CUH

#include "select.cuh"

enum { EMPTY, EVICTED, KEPT }; /* marks of candidates */

/* One key/value head of one row, with the new tokens. */
typedef struct {
    const h2o_policy *policy;
    const h2o_view *keys, *values, *scores, *mask;
    int64_t b, g, Q, D;
    int64_t length, tokens; /* seen before; number of new ones that count, the row's first */
    h2o_head head;
    slot_store store;
    uint32_t *rank_keys; /* from here on see evict_layout */
    uint8_t *marks;
    int32_t *token_index, *destinations, *sources, *moves;
    float *norms;
    bool rows_wait;        /* for the kernel that moves them, if it is launched */
    select_buffer *buffer; /* in shared memory */
} evict_item;

/* ---- Opening ------------------------------------------------------------- */

DEVICE void lay_out_workspace(evict_item *item, const evict_layout *at, char *workspace,
                              int64_t head_index) {
    const int64_t S = at->slots, candidates = S + item->Q;
    item->rank_keys = (uint32_t *)(workspace + at->rank_keys) + head_index * candidates;
    item->marks = (uint8_t *)(workspace + at->marks) + head_index * candidates;
    item->token_index = (int32_t *)(workspace + at->token_index) + head_index * item->Q;
    item->norms = (float *)(workspace + at->norms) + head_index * item->Q;
    item->destinations = (int32_t *)(workspace + at->destinations) + head_index * S;
    item->sources = (int32_t *)(workspace + at->sources) + head_index * candidates;
    item->moves = (int32_t *)(workspace + at->moves) + head_index;
}

/* Fills in what depends on the new tokens only. PARAMS: those of evict or of simulate. */
template <typename PARAMS> DEVICE evict_item open_new(const PARAMS *p, int64_t b, int64_t g) {
    evict_item item = {};
    item.policy = &p->policy;
    item.keys = &p->keys;
    item.values = &p->values;
    item.scores = &p->scores;
    item.mask = &p->mask;
    item.b = b;
    item.g = g;
    item.Q = p->dims.Q;
    item.D = p->dims.D;
    return item;
}

/* Fills in what is needed to move rows. */
DEVICE evict_item open_rows(const h2o_evict_params *p, char *workspace, int64_t b, int64_t g) {
    const evict_layout at = cuda_evict_call(p);
    evict_item item = open_new(p, b, g);
    item.head = read_extent(&p->slots, b, g);
    item.store = open_store(&p->slots, &item.head, p->dims.D);
    lay_out_workspace(&item, &at, workspace, b * p->dims.G + g);
    return item;
}

DEVICE evict_item open_evict(const h2o_evict_params *p, char *workspace, int64_t b, int64_t g,
                             select_buffer *buffer) {
    evict_item item = open_rows(p, workspace, b, g);
    item.tokens = p->dims.Q;
    item.length = read_length(&p->slots.seen_tokens, item.head.row, p->dims.Q);
    read_budget(&p->slots.budget, item.head.row, g, &p->policy, &item.head);
    item.rows_wait = cuda_move_blocks(p) > 0;
    item.buffer = buffer;
    return item;
}

/* ---- Candidates ---------------------------------------------------------- */

DEVICE int64_t candidates(const evict_item *item) { return item->head.slots + item->Q; }
DEVICE bool is_new(const evict_item *item, int64_t i) { return i >= item->head.slots; }
DEVICE int64_t column_of(const evict_item *item, int64_t i) { return i - item->head.slots; }

/* These functions read one address, whatever i is: a branch would keep several loads apart. */
DEVICE float score_of(const evict_item *item, int64_t i) {
    const int64_t q = is_new(item, i) ? column_of(item, i) : 0;
    const void *const new_score = h2o_at(item->scores, item->b, item->g, q);
    return *(is_new(item, i) ? (const float *)new_score : item->store.scores + i);
}

/* token_index of a new candidate, position of a stored one; -1: there is no key. */
DEVICE int32_t index_of(const evict_item *item, int64_t i) {
    return *(is_new(item, i) ? item->token_index + column_of(item, i) : item->store.positions + i);
}

/* Turns the result of index_of into a position. */
DEVICE int32_t position_by(const evict_item *item, int64_t i, int32_t index) {
    return index + (is_new(item, i) ? (int32_t)item->length : 0);
}

DEVICE float norm_of_candidate(const evict_item *item, int64_t i) {
    return *(is_new(item, i) ? item->norms + column_of(item, i) : item->store.norms + i);
}

/* Sets token_index of each column, -1 for padding. Returns the number of new tokens. */
DEVICE int64_t index_tokens(const evict_item *item, select_buffer *buffer) {
    NO_UNROLL
    for (int64_t q = threadIdx.x; q < item->Q; q += blockDim.x) item->token_index[q] = -1;
    sync_block();
    const int64_t limit = item->tokens;
    const int64_t row_tokens =
        each_token(item->mask, item->b, item->Q, buffer, [&](int64_t q, int64_t index) {
            item->token_index[q] = index < limit ? (int32_t)index : -1;
        });
    return lower(row_tokens, limit);
}

DEVICE void new_norms(const evict_item *item) {
    if (!item->policy->value_weighted) return;
    const int warps = blockDim.x / 32;
    NO_UNROLL
    for (int64_t q = threadIdx.x / 32; q < item->Q; q += warps) {
        const float norm = norm_of(tensor_row(item->values, item->b, item->g, q), item->D);
        if (threadIdx.x % 32 == 0) item->norms[q] = norm;
    }
}

/* What is read of a candidate before it is used. */
typedef struct {
    float score, norm;
    int32_t index; /* see index_of */
    uint8_t mark;
    uint32_t rank_key;
} candidate_read;

/* Marks every candidate as EMPTY or EVICTED, with a rank key. Returns how many are not EMPTY. */
DEVICE int64_t list_candidates(const evict_item *item, const h2o_ranking *ranking,
                               select_buffer *buffer) {
    const bool weighted = ranking->value_weighted;
    double count = 0.0;
    each_read(
        candidates(item),
        [&](int64_t i) {
            candidate_read x = {};
            x.score = score_of(item, i);
            x.index = index_of(item, i);
            x.norm = weighted ? norm_of_candidate(item, i) : 1.0f;
            return x;
        },
        [&](int64_t i, const candidate_read &x) {
            const bool empty = x.index < 0;
            const uint32_t key = h2o_policy_slot_key(ranking, ranking->kind, weighted, x.score,
                                                     position_by(item, i, x.index), x.norm);
            item->marks[i] = empty ? EMPTY : EVICTED;
            item->rank_keys[i] = empty ? 0 : key; /* 0 is read with the others and ignored */
            count += !empty;
        });
    return (int64_t)block_sum(count, buffer);
}

/* Marks `budget` of n candidates as KEPT, or all if there are fewer. Returns their number. */
DEVICE int64_t choose(const evict_item *item, int64_t n, int64_t budget, select_buffer *buffer) {
    const auto read = [&](int64_t i) {
        candidate_read x = {};
        x.mark = item->marks[i];
        x.rank_key = item->rank_keys[i];
        x.index = index_of(item, i);
        return x;
    };
    uint32_t lowest = 0;
    int32_t last = INT32_MAX;
    if (n > budget) {
        int64_t among, tied_among;
        TAKEN(evict_chooses, true);
        lowest = nth_highest(
            candidates(item), budget, &among, buffer, read,
            [](const candidate_read &x) { return x.mark != EMPTY; },
            [](int64_t, const candidate_read &x) { return x.rank_key; });
        last = (int32_t)~nth_highest(
            candidates(item), among, &tied_among, buffer, read,
            [&](const candidate_read &x) { return x.mark != EMPTY && x.rank_key == lowest; },
            [&](int64_t i, const candidate_read &x) {
                return ~(uint32_t)position_by(item, i, x.index);
            });
    }
    double count = 0.0;
    each_read(candidates(item), read, [&](int64_t i, const candidate_read &x) {
        if (x.mark == EMPTY) return;
        const bool kept =
            x.rank_key > lowest || (x.rank_key == lowest && position_by(item, i, x.index) <= last);
        if (kept) item->marks[i] = KEPT;
        count += kept;
    });
    return lower((int64_t)block_sum(count, buffer), item->head.slots);
}

#endif
