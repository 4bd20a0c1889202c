/* simulate_head.cuh - one key/value head of a simulated text: the tokens of its dense part, which
 * of them it keeps, and the outputs evicted_at and scores [B,G,Q]. */
#ifndef H2O_CUDA_SIMULATE_HEAD_CUH
#define H2O_CUDA_SIMULATE_HEAD_CUH

#include "evict.cuh"
#include "kernels_simulate.h"

/* Number of tokens of row b in the dense part: at least the prompt, and all before the first
 * eviction. With a quantized store it is only the prompt, since later tokens attend to quantized
 * rows. */
DEVICE int64_t dense_tokens(const h2o_simulate_params *p, int64_t b) {
    int64_t budget = h2o_given(&p->stored_keys) ? 0 : INT32_MAX;
    for (int64_t g = 0; g < p->dims.G; g++) {
        h2o_head head = {};
        read_budget(&p->budget, b, g, &p->policy, &head);
        budget = lower(budget, head.budget);
    }
    return higher(budget, higher(i32_at(&p->prompt, b, 0, 0), 1));
}

typedef struct {
    const h2o_simulate_params *p;
    int64_t b, g, index;    /* index: among all heads */
    int64_t tokens, dense;  /* of the row, and of the dense part */
    const int32_t *columns; /* [tokens] */
    h2o_head head;
    slot_store store;
} simulate_head;

/* The head's store has no rows: keys and values are read from the tensors. */
DEVICE simulate_head open_head(const h2o_simulate_params *p, const simulate_layout *at,
                               char *workspace, int64_t b, int64_t g) {
    const attend_layout attend = cuda_attend_layout(&p->dims, 0);
    simulate_head h = {};
    h.p = p;
    h.b = b;
    h.g = g;
    h.index = b * p->dims.G + g;
    h.tokens = ((const int32_t *)(workspace + attend.row_tokens))[b];
    h.dense = ((const int32_t *)(workspace + attend.tokens))[b];
    h.columns = (const int32_t *)(workspace + attend.columns) + b * p->dims.Q;
    read_budget(&p->budget, b, g, &p->policy, &h.head);
    h.head.slots = lower(h.head.budget + at->window, h.tokens + 1);
    const int64_t first = h.index * at->slots;
    slot_store *const store = &h.store;
    store->scores = (float *)(workspace + at->scores) + first;
    store->positions = (int32_t *)(workspace + at->positions) + first;
    if (p->policy.value_weighted) store->norms = (float *)(workspace + at->norms) + first;
    return h;
}

DEVICE int32_t *evicted_at(const simulate_head *h, int64_t column) {
    return (int32_t *)h2o_at(&h->p->evicted_at, h->b, h->g, column);
}

DEVICE float *final_score(const simulate_head *h, int64_t column) {
    return (float *)h2o_at(&h->p->scores, h->b, h->g, column);
}

/* Records that a key is evicted after the token at position `after`. */
DEVICE void record_eviction(const simulate_head *h, int32_t position, float score, int64_t after) {
    const int64_t column = h->columns[position];
    *final_score(h, column) = score;
    *evicted_at(h, column) = h->columns[after] + 1;
}

/* Writes the scores of the keys that are kept to the end. */
DEVICE void record_kept(const simulate_head *h) {
    NO_UNROLL
    for (int64_t s = threadIdx.x; s < h->head.slots; s += blockDim.x) {
        const int32_t position = h->store.positions[s];
        if (position >= 0) *final_score(h, h->columns[position]) = h->store.scores[s];
    }
}

/* Empties the store; no token is evicted yet. */
DEVICE void clear_head(const simulate_head *h) {
    const h2o_simulate_params *const p = h->p;
    NO_UNROLL
    for (int64_t q = threadIdx.x; q < p->dims.Q; q += blockDim.x) {
        *evicted_at(h, q) = is_token(&p->mask, h->b, q) ? (int32_t)p->dims.Q : 0;
    }
    NO_UNROLL
    for (int64_t s = threadIdx.x; h->store.norms && s < h->head.slots; s += blockDim.x) {
        h->store.norms[s] = 0.0f;
    }
    clear_slots(&h->store, 0, h->head.slots);
    sync_block();
}

/* Selects among the keys of the dense part. Keys that are not kept are evicted at its end. */
DEVICE void prune_prompt(const simulate_head *h, const simulate_layout *at, char *workspace,
                         select_buffer *buffer) {
    const h2o_simulate_params *const p = h->p;
    const slot_store *const store = &h->store;
    const evict_layout evict = cuda_evict_layout(&p->dims, at->slots, &p->policy);
    evict_item item = open_new(p, h->b, h->g);
    item.tokens = h->dense;
    item.head = h->head;
    item.store = *store;
    item.rows_wait = true;
    item.buffer = buffer;
    lay_out_workspace(&item, &evict, workspace + at->evict, h->index);
    evict_head(&item);
    const int32_t first_row = h->columns[h->dense - 1] + 1; /* the first that does not see them */
    TAKEN(simulate_after_dense, h->dense < h->tokens);
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < h->dense; i += blockDim.x) {
        *evicted_at(h, h->columns[i]) = first_row;
    }
    sync_block();
    NO_UNROLL
    for (int64_t s = threadIdx.x; s < h->head.slots; s += blockDim.x) {
        const int32_t position = store->positions[s];
        if (position >= 0) *evicted_at(h, h->columns[position]) = (int32_t)p->dims.Q;
    }
    sync_block();
}

#endif
