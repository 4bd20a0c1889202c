/* step.cuh - one decode step in one launch: attention of one new token [B,H,1,D] over the slots of
 * its head, scores [B,G,S], and the eviction of one key where the budget is exceeded.
 *
 * The slots of a head are split among several blocks, as in Flash-Decoding (Dao et al., 2023):
 *
 *   1. every block: exponentials of its part, relative to the part's row max, their row sum, and
 *      their products with the values (step_part.cuh);
 *   2. the last block of a head to finish: rescale factors exp(part's max - max) / row sum,
 *      outputs and softmax weights, always in the order of the parts, so that results do not
 *      depend on which block that is;
 *   3. scores = decay * scores + weights of the R heads, or the largest of these; the lowest rank is
 *      evicted, its score goes to lost [B,G], or its key into the nearest one (merge.cuh);
 *   4. the last head of a row to finish advances lengths [B], which all of them read at first. */
#ifndef H2O_CUDA_STEP_CUH
#define H2O_CUDA_STEP_CUH

#include "step_part.cuh"

/* ---- Combining the parts ------------------------------------------------- */

/* Step 2: the rescale factor of each part, in the place of its row max. */
DEVICE void step_factors(const step_item *item) {
    NO_UNROLL
    for (int64_t r = threadIdx.x; r < item->R; r += blockDim.x) {
        const float sink = sink_of(item->sink_logits, item->first_head + r);
        float row_max = sink;
        for (int64_t c = 0; c < item->parts; c++)
            row_max = fmaxf(row_max, item->row_max[c * item->R + r]);
        float row_sum = exponential(sink, row_max);
        for (int64_t c = 0; c < item->parts; c++) {
            const float factor = exponential(item->row_max[c * item->R + r], row_max);
            item->row_max[c * item->R + r] = factor;
            row_sum = fmaf(factor, item->row_sum[c * item->R + r], row_sum);
        }
        for (int64_t c = 0; c < item->parts; c++) item->row_max[c * item->R + r] /= row_sum;
    }
}

/* x as element d of head r of the group. */
DEVICE void write_output(const step_item *item, int64_t r, int64_t d, float x) {
    element_ref row = item->out;
    row.data += r * item->out_stride;
    set_element(row, d, x);
}

/* out [R, D] = sum of the parts' products with the values, rescaled. */
DEVICE void step_outputs(const step_item *item) {
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < item->R * item->D; i += blockDim.x) {
        float sum = 0.0f;
        for (int64_t c = 0; c < item->parts; c++) {
            const float factor = item->row_max[c * item->R + i / item->D];
            const float output = item->outputs[c * item->R * item->D + i];
            if (c * part_slots(item) < item->slots) sum = fmaf(output, factor, sum);
        }
        write_output(item, i / item->D, i % item->D, sum);
    }
}

/* The worst candidate of all threads of a block. warps: shared, one for each warp. */
DEVICE h2o_candidate block_candidate(h2o_candidate worst, h2o_candidate *warps) {
    UNROLL
    for (int offset = 16; offset > 0; offset /= 2) {
        const h2o_candidate other = {shfl_xor(worst.key, offset), shfl_xor(worst.position, offset),
                                     shfl_xor(worst.index, offset)};
        /* both lanes compare the two in the same order, so that ties end alike */
        worst = threadIdx.x % (2 * offset) < (unsigned)offset ? h2o_policy_worse(worst, other)
                                                              : h2o_policy_worse(other, worst);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = worst;
    sync_block();
    worst = warps[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++) worst = h2o_policy_worse(worst, warps[i]);
    sync_block();
    return worst;
}

/* scores = decay * scores + weights of the R heads, or the largest of these; returns the candidate
 * with the lowest rank. */
DEVICE h2o_candidate step_scores(const step_item *item, const h2o_ranking *ranking,
                                 h2o_candidate *warps) {
    const slot_store *const store = &item->store;
    const int64_t slots_of_part = part_slots(item);
    h2o_candidate worst = {UINT32_MAX, 0, -1};
    NO_UNROLL
    for (int64_t s = threadIdx.x; s < item->slots; s += blockDim.x) {
        const float *const factors = item->row_max + s / slots_of_part * item->R;
        const float *const weights = item->weights + s * item->R;
        float sum = 0.0f, score;
        if (h2o_scores_largest(item->policy)) {
            for (int64_t r = 0; r < item->R; r++) sum = h2o_larger(sum, weights[r] * factors[r]);
            score = h2o_larger(store->scores[s] * item->policy->decay, sum);
        } else {
            for (int64_t r = 0; r < item->R; r++) sum = fmaf(weights[r], factors[r], sum);
            score = fmaf(store->scores[s], item->policy->decay, sum);
        }
        const int32_t position = store->positions[s];
        store->scores[s] = score;
        const h2o_candidate candidate = {
            h2o_policy_slot_key(ranking, ranking->kind, ranking->value_weighted, score, position,
                                ranking->value_weighted ? store->norms[s] : 1.0f),
            (uint32_t)position, s};
        worst = worst.index < 0 ? candidate : h2o_policy_worse(worst, candidate);
    }
    return block_candidate(worst, warps);
}

/* Merges a slot's key into the nearest other one, if any is near enough; returns whether. rows:
 * shared, four of floats. */
DEVICE bool step_merge(const step_item *item, const h2o_ranking *ranking, int64_t slot, float *rows,
                       nearest_key *warps) {
    const slot_store *const store = &item->store;
    const int64_t depth = cuda_depth(item->D);
    const evicted_key e = {
        rows, rows + depth, {store->scores[slot], store->bias[slot], store->positions[slot]}};
    load_floats(store->keys + slot * store->key_stride, store->key_type, item->D, rows);
    load_floats(store->values + slot * store->value_stride, store->value_type, item->D,
                rows + depth);
    sync_block();
    const nearest_key nearest = find_nearest(store, &e, item->D, item->policy->sinks, item->slots,
                                             slot, item->policy->merge, warps);
    return merge_into(store, nearest, &e, ranking, item->D, rows + 2 * depth);
}

/* Empties the slot if the head exceeds its budget, and makes it the free one. Returns the evicted
 * key, position -1 where none is. */
DEVICE h2o_eviction step_evict(const step_item *item, const h2o_ranking *ranking, int64_t slot,
                               float *rows, nearest_key *warps) {
    const slot_store *const store = &item->store;
    const bool evicts = item->slots > ranking->budget;
    h2o_eviction eviction = {-1, 0.0f};
    if (evicts) eviction = h2o_eviction{store->positions[slot], store->scores[slot]};
    bool merged = false;
    if (evicts && h2o_merges(item->policy)) merged = step_merge(item, ranking, slot, rows, warps);
    const int32_t rank = evicts && item->ranks ? item->ranks[slot] : 0;
    sync_block(); /* all threads have read what changes below */
    NO_UNROLL
    for (int64_t s = threadIdx.x; evicts && item->ranks && s < item->slots; s += blockDim.x) {
        if (s != slot && item->ranks[s] > rank) item->ranks[s]--;
    }
    if (threadIdx.x == 0) {
        if (evicts) {
            if (!merged) *item->lost += (double)eviction.score;
            store->scores[slot] = 0.0f;
            store->positions[slot] = -1;
            if (store->bias) store->bias[slot] = 0.0f;
            if (item->ranks) item->ranks[slot] = -1;
        }
        *item->free_slot = (int32_t)(evicts ? slot : item->slots);
    }
    return eviction;
}

/* Steps 2 and 3, when all parts are there. */
DEVICE h2o_eviction step_finish(const step_item *item, float *shared) {
    char *const reduction = (char *)(shared + STEP_THREADS * STEP_HEADS * RUN);
    const h2o_ranking ranking =
        h2o_policy_ranking(item->policy, item->head.heavy, item->head.recent, item->length + 1);
    step_factors(item);
    sync_block();
    step_outputs(item);
    const h2o_candidate worst = step_scores(item, &ranking, (h2o_candidate *)reduction);
    return step_evict(item, &ranking, worst.index, shared, (nearest_key *)(reduction + 256));
}

/* ---- The kernel ---------------------------------------------------------- */

/* Grid: parts, G, B. */
DEVICE void step_block(const h2o_step_params *p, char *workspace, float *shared) {
    const int64_t part = blockIdx.x, g = blockIdx.y, b = blockIdx.z;
    const step_layout at = cuda_step_layout(p);
    if (!is_token(&p->mask, b, 0)) { /* the same for all blocks of a row */
        const int64_t R = p->dims.R, D = p->dims.D;
        NO_UNROLL
        for (int64_t i = threadIdx.x; part == 0 && i < R * D; i += blockDim.x) {
            set_element(row_of(&p->out, b, 0, g * R + i / D), i % D, 0.0f);
        }
        return;
    }
    const step_item item = open_step(p, workspace, b, g);
    step_part(&item, part, shared);
    uint32_t *const parts_done = (uint32_t *)(workspace + at.parts_done) + b * p->dims.G + g;
    uint32_t *const heads_done = (uint32_t *)(workspace + at.heads_done) + b;
    if (!arrive_last(parts_done, (uint32_t)at.parts)) return;
    step_finish(&item, shared);
    if (!arrive_last(heads_done, (uint32_t)p->dims.G)) return;
    if (threadIdx.x == 0) *(int64_t *)h2o_at(&p->slots.lengths, b, 0, 0) = item.length + 1;
}

BOUNDED_KERNEL(h2o_cuda_step, h2o_step_params, STEP_THREADS, 3) {
    DYN_SHARED(shared);
    step_block(&params, workspace, (float *)shared);
}
EXPORT_KERNEL(h2o_cuda_step, h2o_step_params)

#endif
