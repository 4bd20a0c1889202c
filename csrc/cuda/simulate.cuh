/* simulate.cuh - a whole text through a cache that evicts after every row.
 *
 * The rows of the prompt, and those after it until some head's budget is full, are plain
 * attention (attend.cuh). Then each head goes through the rest by itself, a block for each:
 * its store lies in the workspace, evict cuts the prompt, and step goes on from token to
 * token, as they do in a real cache. */
#ifndef H2O_CUDA_SIMULATE_CUH
#define H2O_CUDA_SIMULATE_CUH

#include "attend.cuh"
#include "evict.cuh"
#include "step.cuh"

/* ---- The dense part ------------------------------------------------------ */

/* Until the budget of some head is full nothing is evicted, however short the prompt. But in a
 * quantised store the tokens after the prompt see what is stored. */
DEVICE int64_t dense_tokens(const h2o_simulate_params *p, int64_t b) {
    int64_t budget = h2o_given(&p->stored_keys) ? 0 : INT32_MAX;
    for (int64_t g = 0; g < p->dims.G; g++) {
        h2o_head head = {};
        read_budget(&p->budget, b, g, &p->policy, &head);
        budget = lower(budget, head.budget);
    }
    return higher(budget, higher(i32_at(&p->prompt, b, 0, 0), 1));
}

/* Grid: B. */
KERNEL(h2o_cuda_simulate_prepare, h2o_simulate_params) {
    DYN_SHARED(room);
    prepare_row(&params.mask, &params.dims, params.policy.decay, blockIdx.x,
                dense_tokens(&params, blockIdx.x), workspace, (select_room *)room);
}
EXPORT_KERNEL(h2o_cuda_simulate_prepare, h2o_simulate_params)

/* ---- A head -------------------------------------------------------------- */

typedef struct {
    const h2o_simulate_params *p;
    int64_t b, g, tokens, dense;
    const int32_t *columns; /* [tokens] */
    evict_unit cut;
    step_unit step;
} simulate_head;

DEVICE slot_store private_store(const h2o_simulate_params *p, const simulate_layout *at,
                                char *workspace, int64_t unit, int64_t slots) {
    const int64_t D = p->dims.D, first = unit * at->slots;
    slot_store store = {};
    store.keys = workspace + at->keys + first * at->key_bytes;
    store.values = workspace + at->values + first * at->value_bytes;
    store.key_stride = at->key_bytes;
    store.value_stride = at->value_bytes;
    store.key_type = h2o_stored_type(cuda_stored_like(&p->keys, &p->stored_keys), D);
    store.value_type = h2o_stored_type(cuda_stored_like(&p->values, &p->stored_values), D);
    store.scores = (float *)(workspace + at->scores) + first;
    store.positions = (int32_t *)(workspace + at->positions) + first;
    if (p->policy.value_weighted) store.norms = (float *)(workspace + at->norms) + first;
    if (h2o_merges(&p->policy)) store.bias = (float *)(workspace + at->bias) + first;
    store.slots = slots;
    return store;
}

DEVICE void open_cut(simulate_head *h, const simulate_layout *at, char *workspace, int64_t unit,
                     char *room) {
    const h2o_simulate_params *const p = h->p;
    const h2o_dims *const d = &p->dims;
    const int64_t row = cuda_row_bytes(cuda_stored_like(&p->keys, &p->stored_keys),
                                       cuda_stored_like(&p->values, &p->stored_values), d->D);
    const evict_layout evict = cuda_evict_layout(d, at->slots, row, &p->policy);
    evict_unit *const u = &h->cut;
    u->policy = &p->policy;
    u->keys = &p->keys;
    u->values = &p->values;
    u->scores = &p->scores;
    u->mask = &p->mask;
    u->b = h->b;
    u->g = h->g;
    u->Q = d->Q;
    u->D = d->D;
    u->tokens = h->dense;
    read_budget(&p->budget, h->b, h->g, &p->policy, &u->head);
    u->head.slots = lower(u->head.budget, h->tokens) + 1;
    u->store = private_store(p, at, workspace, unit, u->head.slots);
    u->lost = (double *)(workspace + at->lost) + unit;
    u->free_slot = (int32_t *)(workspace + at->free) + unit;
    u->room = room;
    find_workspace(u, &evict, workspace + at->evict, unit);
}

DEVICE void open_steps(simulate_head *h, const simulate_layout *at, char *workspace, int64_t unit) {
    const h2o_simulate_params *const p = h->p;
    const int64_t R = p->dims.R, D = p->dims.D;
    step_unit *const u = &h->step;
    u->policy = &p->policy;
    u->R = R;
    u->D = D;
    u->scale = p->scale;
    u->softcap = p->softcap;
    u->query_step = p->query.stride[1] * h2o_dtype_size(p->query.dtype);
    u->out_step = p->out.stride[2] * h2o_dtype_size(p->out.dtype);
    u->head = h->cut.head;
    u->store = h->cut.store;
    u->lost = h->cut.lost;
    u->free_slot = h->cut.free_slot;
    u->parts = 1;
    u->weights = (float *)(workspace + at->weights) + unit * at->slots * R;
    u->tops = (float *)(workspace + at->tops) + unit * R;
    u->totals = (float *)(workspace + at->totals) + unit * R;
    u->outputs = (float *)(workspace + at->outputs) + unit * R * D;
}

DEVICE int32_t *evicted_at(const simulate_head *h, int64_t column) {
    return (int32_t *)h2o_at(&h->p->evicted_at, h->b, h->g, column);
}

DEVICE float *final_score(const simulate_head *h, int64_t column) {
    return (float *)h2o_at(&h->p->scores, h->b, h->g, column);
}

/* An empty store; no token has left. */
DEVICE void clear_head(const simulate_head *h) {
    const h2o_simulate_params *const p = h->p;
    ROLLED
    for (int64_t q = threadIdx.x; q < p->dims.Q; q += blockDim.x) {
        *evicted_at(h, q) = is_token(&p->mask, h->b, q) ? (int32_t)p->dims.Q : 0;
    }
    clear_slots(&h->cut.store, 0, h->cut.head.slots);
    if (threadIdx.x == 0) *h->cut.lost = 0.0;
    sync_block();
}

/* The prompt's keys leave, but for those that the store has now. */
DEVICE void cut_prompt(const simulate_head *h) {
    const slot_store *const store = &h->cut.store;
    evict_head(&h->cut);
    const int32_t gone = h->columns[h->dense - 1] + 1;
    ROLLED
    for (int64_t i = threadIdx.x; i < h->dense; i += blockDim.x) {
        *evicted_at(h, h->columns[i]) = gone;
    }
    sync_block();
    ROLLED
    for (int64_t s = threadIdx.x; s < h->cut.head.slots; s += blockDim.x) {
        const int32_t position = store->positions[s];
        if (position >= 0) *evicted_at(h, h->columns[position]) = (int32_t)h->p->dims.Q;
    }
    sync_block();
}

/* The token at a position comes. */
DEVICE void take_step(simulate_head *h, int64_t position, float *room) {
    const h2o_simulate_params *const p = h->p;
    const int64_t column = h->columns[position];
    step_unit *const u = &h->step;
    u->query = row_of(&p->query, h->b, h->g * p->dims.R, column);
    u->key = row_of(&p->keys, h->b, h->g, column);
    u->value = row_of(&p->values, h->b, h->g, column);
    u->out = row_of(&p->out, h->b, column, h->g * p->dims.R);
    u->length = position;
    u->head.held = lower(h2o_policy_held(u->head.budget, position), u->head.slots - 1);
    u->head.free = *u->free_slot;
    u->slots = u->head.held + 1;
    sync_block(); /* all have read who is free */
    step_part(u, 0, room);
    sync_block();
    const h2o_eviction gone = step_finish(u, room);
    if (threadIdx.x == 0 && gone.position >= 0) {
        const int64_t left = h->columns[gone.position];
        *final_score(h, left) = gone.score;
        *evicted_at(h, left) = (int32_t)column + 1;
    }
    sync_block();
}

/* Grid: G, B. */
KERNEL(h2o_cuda_simulate, h2o_simulate_params) {
    DYN_SHARED(room);
    const h2o_simulate_params *const p = &params;
    const simulate_layout at = cuda_simulate_layout(p);
    const attend_layout attend = cuda_attend_layout(&p->dims);
    simulate_head h = {};
    h.p = p;
    h.g = blockIdx.x;
    h.b = blockIdx.y;
    const int64_t unit = h.b * p->dims.G + h.g;
    h.tokens = ((const int32_t *)(workspace + attend.all))[h.b];
    h.dense = ((const int32_t *)(workspace + attend.tokens))[h.b];
    h.columns = (const int32_t *)(workspace + attend.columns) + h.b * p->dims.Q;
    open_cut(&h, &at, workspace, unit, (char *)room);
    open_steps(&h, &at, workspace, unit);
    clear_head(&h);
    if (h.tokens == 0) return;
    cut_prompt(&h);
    for (int64_t i = h.dense; i < h.tokens; i++) take_step(&h, i, (float *)room);
    ROLLED
    for (int64_t s = threadIdx.x; s < h.cut.head.slots; s += blockDim.x) {
        const int32_t position = h.cut.store.positions[s];
        if (position >= 0) *final_score(&h, h.columns[position]) = h.cut.store.scores[s];
    }
}
EXPORT_KERNEL(h2o_cuda_simulate, h2o_simulate_params)

#endif
