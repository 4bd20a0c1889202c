/* simulate.cuh - a whole text of Q tokens through a cache that evicts after every token: outputs
 * [B,Q,H,D], final scores [B,G,Q], and when each key was evicted, evicted_at [B,G,Q].
 *
 *   1. Dense part: the prompt, and the tokens after it until the budget of some head is full,
 *      by the kernels of attend (attend.cuh) for all heads together.
 *   2. One block for each head prunes the prompt to the budget, as evict does it (evict.cuh).
 *   3. The rest goes by windows (window.cuh); or, where keys are merged, by
 *      tokens: that block takes one decode step after the other (step.cuh), with all slots in one
 *      part, on a private store in the workspace. */
#ifndef H2O_CUDA_SIMULATE_CUH
#define H2O_CUDA_SIMULATE_CUH

#include "attend.cuh"
#include "simulate_head.cuh"
#include "step.cuh"
#include "window_matrix.cuh"
#include "window_rows.cuh"

/* Grid: B. */
KERNEL(h2o_cuda_simulate_prepare, h2o_simulate_params) {
    DYN_SHARED(shared);
    prepare_row(&params.mask, &params.dims, params.policy.decay, blockIdx.x,
                dense_tokens(&params, blockIdx.x), workspace, (select_buffer *)shared);
}
EXPORT_KERNEL(h2o_cuda_simulate_prepare, h2o_simulate_params)

/* ---- By windows ---------------------------------------------------------- */

/* Grid: G, B. */
KERNEL(h2o_cuda_simulate_open, h2o_simulate_params) {
    DYN_SHARED(shared);
    open_windows(&params, workspace, (char *)shared);
}
EXPORT_KERNEL(h2o_cuda_simulate_open, h2o_simulate_params)

/* Grid: G, B. */
BOUNDED_KERNEL(h2o_cuda_simulate_rows, h2o_simulate_params, WINDOW_THREADS, 1) {
    DYN_SHARED(shared);
    window_rows(&params, workspace, (window_buffer *)shared);
}
EXPORT_KERNEL(h2o_cuda_simulate_rows, h2o_simulate_params)

/* Logits, grid: blocks that share the tiles of a head, G, B. Values, grid: tiles times parts of the
 * cells, G, B. */
#define DEFINE_WINDOW(kind, buffer, logits, values)                                                \
    KERNEL(h2o_cuda_simulate_logits##kind, h2o_simulate_params) {                                  \
        DYN_SHARED(shared);                                                                        \
        logits(&params, workspace, (buffer *)shared);                                              \
    }                                                                                              \
    EXPORT_KERNEL(h2o_cuda_simulate_logits##kind, h2o_simulate_params)                             \
    KERNEL(h2o_cuda_simulate_values##kind, h2o_simulate_params) {                                  \
        DYN_SHARED(shared);                                                                        \
        values(&params, workspace, (buffer *)shared);                                              \
    }                                                                                              \
    EXPORT_KERNEL(h2o_cuda_simulate_values##kind, h2o_simulate_params)

DEFINE_WINDOW(, window_buffers, window_logits, window_values)
DEFINE_WINDOW(_f16, window_matrices, window_logits_matrix<H2O_F16>, window_values_matrix<H2O_F16>)
#if CAPABILITY >= 80
DEFINE_WINDOW(_bf16, window_matrices, window_logits_matrix<H2O_BF16>,
              window_values_matrix<H2O_BF16>)
#endif

/* ---- By tokens ----------------------------------------------------------- */

DEVICE step_item open_steps(const simulate_head *h, const simulate_layout *at, char *workspace) {
    const int64_t R = h->p->dims.R, D = h->p->dims.D;
    step_item item = open_group(h->p, h->g);
    item.head = h->head;
    item.store = h->store;
    item.lost = h->lost;
    item.free_slot = h->free_slot;
    item.parts = 1;
    item.logits = (float *)(workspace + at->weights) + h->index * at->slots * R;
    item.row_max = (float *)(workspace + at->row_max) + h->index * R;
    item.row_sum = (float *)(workspace + at->row_sum) + h->index * R;
    item.outputs = (float *)(workspace + at->outputs) + h->index * R * D;
    return item;
}

/* The item of the token at a position. */
DEVICE void open_token(const simulate_head *h, int64_t position, step_item *item) {
    const h2o_simulate_params *const p = h->p;
    const int64_t column = h->columns[position];
    item->query = row_of(&p->query, h->b, h->g * p->dims.R, column);
    item->key = row_of(&p->keys, h->b, h->g, column);
    item->value = row_of(&p->values, h->b, h->g, column);
    item->out = row_of(&p->out, h->b, column, h->g * p->dims.R);
    item->length = position;
    item->head.held = lower(h2o_policy_held(item->head.budget, position), item->head.slots - 1);
    item->head.free = *item->free_slot;
    item->slots = item->part_slots = item->head.held + 1;
}

/* One decode step. As in step.cuh, the item lies in shared memory, since registers have no room for
 * it, and is read again for the end. */
DEVICE void decode_token(const simulate_head *h, step_kept *kept, int64_t position, float *shared) {
    if (threadIdx.x == 0) open_token(h, position, &kept->item);
    sync_block();
    const step_item item = item_of(h->p, kept);
    step_part(&item, 0, shared);
    sync_block();
    const h2o_eviction eviction = step_finish<true, STEP_LOADS>([=] { return item_of(h->p, kept); },
                                                                shared, kept->reduction);
    if (threadIdx.x == 0 && eviction.position >= 0) record_eviction(h, eviction, position);
    sync_block();
}

/* Grid: G, B. */
KERNEL(h2o_cuda_simulate, h2o_simulate_params) {
    DYN_SHARED(shared);
    const h2o_simulate_params *const p = &params;
    const simulate_layout at = cuda_simulate_layout(p);
    const simulate_head h = open_head(p, &at, workspace, blockIdx.y, blockIdx.x, 1);
    step_kept *const kept = kept_in(shared, 0);
    clear_head(&h);
    if (h.tokens == 0) return;
    prune_prompt(&h, &at, workspace, (char *)shared);
    if (threadIdx.x == 0) kept->item = open_steps(&h, &at, workspace);
    for (int64_t i = h.dense; i < h.tokens; i++) decode_token(&h, kept, i, (float *)shared);
    record_kept(&h);
}
EXPORT_KERNEL(h2o_cuda_simulate, h2o_simulate_params)

#endif
