/* step.cuh - one decode step: attention to the slots, scores, and who leaves.
 *
 * The slots of a head are shared by several blocks (step_part.cuh). The last of them to be done
 * puts the parts together in order, so that no result depends on who that was, adds the scores
 * and lets the policy name who leaves. The last head of a row to be done advances its length,
 * which all have read by then. */
#ifndef H2O_CUDA_STEP_CUH
#define H2O_CUDA_STEP_CUH

#include "step_part.cuh"

/* ---- Putting the parts together ------------------------------------------ */

/* What each part's exponentials are to be multiplied by, in the place of its highest logit. */
DEVICE void step_factors(const step_unit *u) {
    ROLLED
    for (int64_t r = threadIdx.x; r < u->R; r += blockDim.x) {
        float top = -INFINITY, total = 0.0f;
        for (int64_t c = 0; c < u->parts; c++) top = fmaxf(top, u->tops[c * u->R + r]);
        for (int64_t c = 0; c < u->parts; c++) {
            const float factor = exponential(u->tops[c * u->R + r], top);
            u->tops[c * u->R + r] = factor;
            total = fmaf(factor, u->totals[c * u->R + r], total);
        }
        for (int64_t c = 0; c < u->parts; c++) u->tops[c * u->R + r] /= total;
    }
}

/* x as element d of head r of the group. */
DEVICE void write_output(const step_unit *u, int64_t r, int64_t d, float x) {
    element_ref row = u->out;
    row.data += r * u->out_step;
    set_element(row, d, x);
}

DEVICE void step_outputs(const step_unit *u) {
    ROLLED
    for (int64_t i = threadIdx.x; i < u->R * u->D; i += blockDim.x) {
        float sum = 0.0f;
        for (int64_t c = 0; c < u->parts; c++) {
            const float factor = u->tops[c * u->R + i / u->D];
            const float output = u->outputs[c * u->R * u->D + i];
            if (c * part_slots(u) < u->slots) sum = fmaf(output, factor, sum);
        }
        write_output(u, i / u->D, i % u->D, sum);
    }
}

/* The candidate of all threads of a block. found: shared, one for each warp. */
DEVICE h2o_candidate block_candidate(h2o_candidate mine, h2o_candidate *found) {
    UNROLL
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const h2o_candidate other = {shfl_xor(mine.key, lanes), shfl_xor(mine.position, lanes),
                                     shfl_xor(mine.index, lanes)};
        /* of two that are the same, both lanes must choose the same */
        mine = threadIdx.x % (2 * lanes) < (unsigned)lanes ? h2o_policy_worse(mine, other)
                                                           : h2o_policy_worse(other, mine);
    }
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = mine;
    sync_block();
    mine = found[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++) mine = h2o_policy_worse(mine, found[i]);
    sync_block();
    return mine;
}

/* scores = decay * scores + what the R heads gave; returns who of all would leave. */
DEVICE h2o_candidate step_scores(const step_unit *u, const h2o_ranking *ranking,
                                 h2o_candidate *found) {
    const slot_store *const store = &u->store;
    const int64_t each = part_slots(u);
    h2o_candidate worst = {UINT32_MAX, 0, -1};
    ROLLED
    for (int64_t s = threadIdx.x; s < u->slots; s += blockDim.x) {
        const float *const factors = u->tops + s / each * u->R;
        float sum = 0.0f;
        for (int64_t r = 0; r < u->R; r++) sum = fmaf(u->weights[s * u->R + r], factors[r], sum);
        const float score = fmaf(store->scores[s], u->policy->decay, sum);
        const int32_t position = store->positions[s];
        store->scores[s] = score;
        const h2o_candidate one = {
            h2o_policy_slot_key(ranking, ranking->kind, ranking->value_weighted, score, position,
                                ranking->value_weighted ? store->norms[s] : 1.0f),
            (uint32_t)position, s};
        worst = worst.index < 0 ? one : h2o_policy_worse(worst, one);
    }
    return block_candidate(worst, found);
}

/* Whether the one who leaves has gone into another. room: shared, four rows. */
DEVICE bool step_merge(const step_unit *u, const h2o_ranking *ranking, int64_t slot, float *room,
                       neighbour *found) {
    const slot_store *const store = &u->store;
    const int64_t depth = cuda_depth(u->D);
    const leaver e = {
        room, room + depth, {store->scores[slot], store->bias[slot], store->positions[slot]}};
    read_floats(store->keys + slot * store->key_stride, store->key_type, u->D, room);
    read_floats(store->values + slot * store->value_stride, store->value_type, u->D, room + depth);
    sync_block();
    const neighbour like =
        most_similar(store, &e, u->D, u->policy->sinks, u->slots, slot, u->policy->merge, found);
    return merge_into(store, like, &e, ranking, u->D, room + 2 * depth);
}

/* Empties the slot of the one who leaves; position -1 where nobody does. */
DEVICE h2o_eviction step_evict(const step_unit *u, const h2o_ranking *ranking, int64_t slot,
                                float *room, neighbour *found) {
    const slot_store *const store = &u->store;
    const bool leaves = u->slots > ranking->budget;
    h2o_eviction gone = {-1, 0.0f};
    if (leaves) gone = h2o_eviction{store->positions[slot], store->scores[slot]};
    bool merged = false;
    if (leaves && h2o_merges(u->policy)) merged = step_merge(u, ranking, slot, room, found);
    const int32_t rank = leaves && u->ranks ? u->ranks[slot] : 0;
    sync_block(); /* all have read what now changes */
    ROLLED
    for (int64_t s = threadIdx.x; leaves && u->ranks && s < u->slots; s += blockDim.x) {
        if (s != slot && u->ranks[s] > rank) u->ranks[s]--;
    }
    if (threadIdx.x == 0) {
        if (leaves) {
            if (!merged) *u->lost += (double)gone.score;
            store->scores[slot] = 0.0f;
            store->positions[slot] = -1;
            if (store->bias) store->bias[slot] = 0.0f;
            if (u->ranks) u->ranks[slot] = -1;
        }
        *u->free_slot = (int32_t)(leaves ? slot : u->slots);
    }
    return gone;
}

/* What remains to be done when all parts are there. */
DEVICE h2o_eviction step_finish(const step_unit *u, float *room) {
    char *const agreed = (char *)(room + STEP_THREADS * STEP_HEADS * RUN);
    const h2o_ranking ranking =
        h2o_policy_ranking(u->policy, u->head.heavy, u->head.recent, u->length + 1);
    step_factors(u);
    sync_block();
    step_outputs(u);
    const h2o_candidate worst = step_scores(u, &ranking, (h2o_candidate *)agreed);
    return step_evict(u, &ranking, worst.index, room, (neighbour *)(agreed + 256));
}

/* ---- The kernel ---------------------------------------------------------- */

/* Grid: parts, G, B. */
DEVICE void step_block(const h2o_step_params *p, char *workspace, float *room) {
    const int64_t part = blockIdx.x, g = blockIdx.y, b = blockIdx.z;
    const step_layout at = cuda_step_layout(p);
    if (!is_token(&p->mask, b, 0)) { /* the same for all blocks of a row */
        const int64_t R = p->dims.R, D = p->dims.D;
        ROLLED
        for (int64_t i = threadIdx.x; part == 0 && i < R * D; i += blockDim.x) {
            set_element(row_of(&p->out, b, 0, g * R + i / D), i % D, 0.0f);
        }
        return;
    }
    const step_unit u = open_step(p, workspace, b, g);
    step_part(&u, part, room);
    uint32_t *const heads = (uint32_t *)(workspace + at.heads) + b * p->dims.G + g;
    uint32_t *const rows = (uint32_t *)(workspace + at.rows) + b;
    if (!arrive_last(heads, (uint32_t)at.parts)) return;
    step_finish(&u, room);
    if (!arrive_last(rows, (uint32_t)p->dims.G)) return;
    if (threadIdx.x == 0) *(int64_t *)h2o_at(&p->slots.lengths, b, 0, 0) = u.length + 1;
}

BOUNDED_KERNEL(h2o_cuda_step, h2o_step_params, STEP_THREADS, 3) {
    DYN_SHARED(room);
    step_block(&params, workspace, (float *)room);
}
EXPORT_KERNEL(h2o_cuda_step, h2o_step_params)

#endif
