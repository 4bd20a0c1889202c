/* step_item.cuh - the work item of a decode step: one key/value head of one row and its new token.
 *
 * open_step collects its pointers and sizes from the call's parameters; everything that is read
 * from tensors is clamped (counts.cuh). store_token writes the token's key and value [D] to the
 * free slot, in the store's dtype. */
#ifndef H2O_CUDA_STEP_ITEM_CUH
#define H2O_CUDA_STEP_ITEM_CUH

#include "counts.cuh"

/* One key/value head of one row in a step. */
typedef struct {
    const h2o_policy *policy;
    const h2o_rotary *rotary; /* NULL: keys are stored with their rotary embedding */
    int64_t R, D;
    float scale, softcap;
    const h2o_view *sink_logits;
    int64_t first_head;                 /* of the group */
    row_ref query, key, value, out;     /* query, out: of the group's first head, ... */
    int64_t query_stride, out_stride;   /* ... and bytes from one head to the next */
    int32_t *ranks;
    h2o_head head;
    slot_store store;
    int64_t length, slots;                       /* tokens before this one; slots in use with it */
    int64_t parts, part_slots;                   /* slots of each part but the last ones */
    float *logits, *row_max, *row_sum, *outputs; /* see step_layout; logits [R, head.slots] */
    double *evicted_score;
    int32_t *free_slot;
} step_item;

/* ---- Opening ------------------------------------------------------------- */

/* Fills in what depends neither on the token nor on where a head's keys are. PARAMS: those of step
 * or of simulate. */
template <typename PARAMS> DEVICE step_item open_group(const PARAMS *p, int64_t g) {
    step_item item = {};
    item.policy = &p->policy;
    item.R = p->dims.R;
    item.D = p->dims.D;
    item.scale = p->scale;
    item.softcap = p->softcap;
    item.sink_logits = &p->sink_logits;
    item.first_head = g * p->dims.R;
    item.query_stride = p->query.stride[1] * h2o_dtype_size(p->query.dtype);
    item.out_stride = p->out.stride[2] * h2o_dtype_size(p->out.dtype);
    return item;
}

DEVICE step_item open_step(const h2o_step_params *p, char *workspace, int64_t b, int64_t g) {
    const step_layout at = cuda_step_layout(p);
    const int64_t R = p->dims.R, D = p->dims.D, head_index = b * p->dims.G + g;
    step_item item = open_group(p, g);
    item.query = tensor_row(&p->query, b, g * R, 0);
    item.key = tensor_row(&p->key, b, g, 0);
    item.value = tensor_row(&p->value, b, g, 0);
    item.out = tensor_row(&p->out, b, 0, g * R);
    item.head = read_extent(&p->slots, b, g);
    const int64_t row = item.head.row;
    item.length = read_length(&p->slots.seen_tokens, row, 1);
    read_budget(&p->slots.budget, row, g, &p->policy, &item.head);
    item.free_slot = (int32_t *)h2o_at(&p->slots.next_slot, row, g, 0);
    item.store = open_store(&p->slots, &item.head, D);
    const int64_t most = lower(h2o_policy_held(item.head.budget, item.length), item.head.slots - 1);
    item.head.held = h2o_policy_filled(item.store.positions, *item.free_slot, most);
    if (h2o_given(&p->rotary.table)) {
        item.rotary = &p->rotary;
        item.ranks = (int32_t *)h2o_at(&p->rotary.ranks, row, item.head.offset, 0);
        item.head.held = lower(item.head.held, p->dims.P - 1);
    }
    item.slots = item.head.held + 1;
    item.head.next_slot = clamp(*item.free_slot, 0, item.slots - 1);
    item.evicted_score = (double *)h2o_at(&p->slots.evicted_score, row, g, 0);
    item.parts = at.parts;
    item.part_slots = ((uint32_t)item.slots + (uint32_t)at.parts - 1) / (uint32_t)at.parts;
    const int64_t first =
        b * at.slots + (h2o_given(&p->slots.starts) ? item.head.offset : g * cuda_slots(&p->slots));
    item.logits = (float *)(workspace + at.logits) + first * R;
    item.row_max = (float *)(workspace + at.row_max) + head_index * at.parts * R;
    item.row_sum = (float *)(workspace + at.row_sum) + head_index * at.parts * R;
    item.outputs = (float *)(workspace + at.outputs) + head_index * at.parts * R * D;
    return item;
}

/* The first slot of a part, which is the end of the part before it. */
DEVICE int part_begin(const step_item *item, int64_t part) {
    const int begin = (int)part * (int)item->part_slots, slots = (int)item->slots;
    return begin < slots ? begin : slots;
}

/* Whether the new token's slot is among begin..end-1. */
DEVICE bool has_token(const step_item *item, int64_t begin, int64_t end) {
    return begin <= item->head.next_slot && item->head.next_slot < end;
}

/* Stores the new token in the free slot, with a score of 0, each part of it by one warp. DEPTH: a
 * row has at most so many elements, which are loaded at once; 0: any number. */
template <int DEPTH> DEVICE void store_token(const step_item *item) {
    const slot_store *const store = &item->store;
    const int64_t slot = item->head.next_slot;
    const int warp = threadIdx.x / 32;
    if (warp == 0 || (warp == 1 && !store_is_shared(store))) {
        const slot_rows rows = warp == 0 ? store->keys : store->values;
        const row_ref from = warp == 0 ? item->key : item->value;
        char *const row = slot_row(&rows, slot);
        if constexpr (DEPTH == 0) store_row(row, rows.type, from, item->D);
        if constexpr (DEPTH != 0) store_loaded<DEPTH>(row, rows.type, from, item->D);
    } else if (warp == 2 && store->norms) {
        float norm;
        if constexpr (DEPTH == 0) norm = norm_of(item->value, item->D);
        if constexpr (DEPTH != 0) norm = norm_of(load_lane<DEPTH>(item->value, item->D), item->D);
        if (threadIdx.x % 32 == 0) store->norms[slot] = norm;
    } else if (threadIdx.x == 96) {
        store->scores[slot] = 0.0f;
        store->positions[slot] = (int32_t)item->length;
        if (item->ranks) item->ranks[slot] = (int32_t)item->head.held;
    }
}

#endif
