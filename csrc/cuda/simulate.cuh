/* simulate.cuh - a whole text of Q tokens through a cache that evicts after every token: outputs
 * [B,Q,H,D], final scores [B,G,Q], and when each key was evicted, evicted_at [B,G,Q].
 *
 *   1. Dense part: the prompt, and the tokens after it until the budget of some head is full,
 *      by the kernels of attend (attend.cuh) for all heads together.
 *   2. One block for each head then goes through the rest alone, with a private store in the
 *      workspace: pruning of the prompt to the budget, as evict does it (evict.cuh), then one
 *      decode step after the other (step.cuh), with all slots in one part. */
#ifndef H2O_CUDA_SIMULATE_CUH
#define H2O_CUDA_SIMULATE_CUH

#include "attend.cuh"
#include "evict.cuh"
#include "step.cuh"

/* ---- The dense part ------------------------------------------------------ */

/* Tokens of row b that the dense part covers: at least the prompt, and all before the first
 * eviction. In a quantised store only the prompt, since later tokens attend to quantised rows. */
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
    DYN_SHARED(shared);
    prepare_row(&params.mask, &params.dims, params.policy.decay, blockIdx.x,
                dense_tokens(&params, blockIdx.x), workspace, (select_buffer *)shared);
}
EXPORT_KERNEL(h2o_cuda_simulate_prepare, h2o_simulate_params)

/* ---- A head -------------------------------------------------------------- */

typedef struct {
    const h2o_simulate_params *p;
    int64_t b, g, tokens, dense; /* tokens of the row, and of the dense part */
    const int32_t *columns;      /* [tokens] */
    evict_item pruning;
    step_item step;
} simulate_head;

DEVICE slot_store private_store(const h2o_simulate_params *p, const simulate_layout *at,
                                char *workspace, int64_t head_index, int64_t slots) {
    const int64_t D = p->dims.D, first = head_index * at->slots;
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

DEVICE void open_pruning(simulate_head *h, const simulate_layout *at, char *workspace,
                         int64_t head_index, char *shared) {
    const h2o_simulate_params *const p = h->p;
    const h2o_dims *const d = &p->dims;
    const int64_t row = cuda_row_bytes(cuda_stored_like(&p->keys, &p->stored_keys),
                                       cuda_stored_like(&p->values, &p->stored_values), d->D);
    const evict_layout evict = cuda_evict_layout(d, at->slots, row, &p->policy);
    evict_item *const item = &h->pruning;
    item->policy = &p->policy;
    item->keys = &p->keys;
    item->values = &p->values;
    item->scores = &p->scores;
    item->mask = &p->mask;
    item->b = h->b;
    item->g = h->g;
    item->Q = d->Q;
    item->D = d->D;
    item->tokens = h->dense;
    read_budget(&p->budget, h->b, h->g, &p->policy, &item->head);
    item->head.slots = lower(item->head.budget, h->tokens) + 1;
    item->store = private_store(p, at, workspace, head_index, item->head.slots);
    item->lost = (double *)(workspace + at->lost) + head_index;
    item->free_slot = (int32_t *)(workspace + at->free) + head_index;
    item->shared = shared;
    lay_out_workspace(item, &evict, workspace + at->evict, head_index);
}

DEVICE void open_steps(simulate_head *h, const simulate_layout *at, char *workspace,
                       int64_t head_index) {
    const h2o_simulate_params *const p = h->p;
    const int64_t R = p->dims.R, D = p->dims.D;
    step_item *const item = &h->step;
    item->policy = &p->policy;
    item->R = R;
    item->D = D;
    item->scale = p->scale;
    item->softcap = p->softcap;
    item->sink_logits = &p->sink_logits;
    item->first_head = h->g * R;
    item->query_stride = p->query.stride[1] * h2o_dtype_size(p->query.dtype);
    item->out_stride = p->out.stride[2] * h2o_dtype_size(p->out.dtype);
    item->head = h->pruning.head;
    item->store = h->pruning.store;
    item->lost = h->pruning.lost;
    item->free_slot = h->pruning.free_slot;
    item->parts = 1;
    item->weights = (float *)(workspace + at->weights) + head_index * at->slots * R;
    item->row_max = (float *)(workspace + at->row_max) + head_index * R;
    item->row_sum = (float *)(workspace + at->row_sum) + head_index * R;
    item->outputs = (float *)(workspace + at->outputs) + head_index * R * D;
}

DEVICE int32_t *evicted_at(const simulate_head *h, int64_t column) {
    return (int32_t *)h2o_at(&h->p->evicted_at, h->b, h->g, column);
}

DEVICE float *final_score(const simulate_head *h, int64_t column) {
    return (float *)h2o_at(&h->p->scores, h->b, h->g, column);
}

/* Empties the store; no token is evicted yet. */
DEVICE void clear_head(const simulate_head *h) {
    const h2o_simulate_params *const p = h->p;
    NO_UNROLL
    for (int64_t q = threadIdx.x; q < p->dims.Q; q += blockDim.x) {
        *evicted_at(h, q) = is_token(&p->mask, h->b, q) ? (int32_t)p->dims.Q : 0;
    }
    clear_slots(&h->pruning.store, 0, h->pruning.head.slots);
    if (threadIdx.x == 0) *h->pruning.lost = 0.0;
    sync_block();
}

/* Selects among the keys of the dense part; those not in the store then were evicted. */
DEVICE void prune_prompt(const simulate_head *h) {
    const slot_store *const store = &h->pruning.store;
    evict_head(&h->pruning);
    const int32_t first_row = h->columns[h->dense - 1] + 1; /* without them */
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < h->dense; i += blockDim.x) {
        *evicted_at(h, h->columns[i]) = first_row;
    }
    sync_block();
    NO_UNROLL
    for (int64_t s = threadIdx.x; s < h->pruning.head.slots; s += blockDim.x) {
        const int32_t position = store->positions[s];
        if (position >= 0) *evicted_at(h, h->columns[position]) = (int32_t)h->p->dims.Q;
    }
    sync_block();
}

/* One decode step, for the token at a position. */
DEVICE void decode_token(simulate_head *h, int64_t position, float *shared) {
    const h2o_simulate_params *const p = h->p;
    const int64_t column = h->columns[position];
    step_item *const item = &h->step;
    item->query = row_of(&p->query, h->b, h->g * p->dims.R, column);
    item->key = row_of(&p->keys, h->b, h->g, column);
    item->value = row_of(&p->values, h->b, h->g, column);
    item->out = row_of(&p->out, h->b, column, h->g * p->dims.R);
    item->length = position;
    item->head.held = lower(h2o_policy_held(item->head.budget, position), item->head.slots - 1);
    item->head.free = *item->free_slot;
    item->slots = item->head.held + 1;
    sync_block(); /* all threads have read the free slot */
    step_part(item, 0, shared);
    sync_block();
    const h2o_eviction eviction = step_finish(item, shared);
    if (threadIdx.x == 0 && eviction.position >= 0) {
        const int64_t evicted = h->columns[eviction.position];
        *final_score(h, evicted) = eviction.score;
        *evicted_at(h, evicted) = (int32_t)column + 1;
    }
    sync_block();
}

/* Grid: G, B. */
KERNEL(h2o_cuda_simulate, h2o_simulate_params) {
    DYN_SHARED(shared);
    const h2o_simulate_params *const p = &params;
    const simulate_layout at = cuda_simulate_layout(p);
    const attend_layout attend = cuda_attend_layout(&p->dims);
    simulate_head h = {};
    h.p = p;
    h.g = blockIdx.x;
    h.b = blockIdx.y;
    const int64_t head_index = h.b * p->dims.G + h.g;
    h.tokens = ((const int32_t *)(workspace + attend.row_tokens))[h.b];
    h.dense = ((const int32_t *)(workspace + attend.tokens))[h.b];
    h.columns = (const int32_t *)(workspace + attend.columns) + h.b * p->dims.Q;
    open_pruning(&h, &at, workspace, head_index, (char *)shared);
    open_steps(&h, &at, workspace, head_index);
    clear_head(&h);
    if (h.tokens == 0) return;
    prune_prompt(&h);
    for (int64_t i = h.dense; i < h.tokens; i++) decode_token(&h, i, (float *)shared);
    NO_UNROLL
    for (int64_t s = threadIdx.x; s < h.pruning.head.slots; s += blockDim.x) {
        const int32_t position = h.pruning.store.positions[s];
        if (position >= 0) *final_score(&h, h.columns[position]) = h.pruning.store.scores[s];
    }
}
EXPORT_KERNEL(h2o_cuda_simulate, h2o_simulate_params)

#endif
