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

/* Step 2: the rescale factors [parts, R], each in the place of a copy of its part's row max: in
 * shared memory, which one thread after the other can read at no cost, or where there are too many
 * heads, in the workspace. All threads have them after the next barrier. */
DEVICE const float *step_factors(const step_item *item, float *shared) {
    const int64_t count = item->parts * item->R;
    const bool fits = 2 * count <= STEP_FLOATS;
    float *const factors = fits ? shared : item->row_max;
    const float *const row_sums = fits ? shared + count : item->row_sum;
    NO_UNROLL
    for (int64_t i = threadIdx.x; fits && i < count; i += STEP_THREADS) {
        shared[i] = item->row_max[i];
        shared[count + i] = item->row_sum[i];
    }
    sync_block();
    NO_UNROLL
    for (int64_t r = threadIdx.x; r < item->R; r += STEP_THREADS) {
        const float sink = sink_of(item->sink_logits, item->first_head + r);
        float row_max = sink;
        for (int64_t c = 0; c < item->parts; c++)
            row_max = fmaxf(row_max, factors[c * item->R + r]);
        float row_sum = exponential(sink, row_max);
        for (int64_t c = 0; c < item->parts; c++) {
            const float factor = exponential(factors[c * item->R + r], row_max);
            factors[c * item->R + r] = factor;
            row_sum = fmaf(factor, row_sums[c * item->R + r], row_sum);
        }
        for (int64_t c = 0; c < item->parts; c++) factors[c * item->R + r] /= row_sum;
    }
    return factors;
}

/* x as element d of head r of the group. */
DEVICE void write_output(const step_item *item, int64_t r, int64_t d, float x) {
    element_ref row = item->out;
    row.data += r * item->out_stride;
    set_element(row, d, x);
}

/* out [R, D] = sum of the parts' products with the values, rescaled. Several parts are read at a
 * time; those that hold no slots are left out. */
DEVICE void step_outputs(const step_item *item, const float *factors) {
    const int D = (int)item->D;
    const int64_t size = item->R * D, parts = cuda_ceil(item->slots, part_slots(item));
    int r = (int)threadIdx.x / D, d = (int)threadIdx.x % D;
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < size; i += STEP_THREADS) {
        float sum = 0.0f;
        NO_UNROLL
        for (int64_t part = 0; part < parts; part += STEP_PARTS_READ) {
            float output[STEP_PARTS_READ];
            TAKEN(step_of_many_parts, part > 0);
            UNROLL
            for (int k = 0; k < STEP_PARTS_READ; k++)
                output[k] = item->outputs[lower(part + k, parts - 1) * size + i];
            UNROLL
            for (int k = 0; k < STEP_PARTS_READ; k++) {
                const int64_t c = lower(part + k, parts - 1);
                const float with = fmaf(output[k], factors[c * item->R + r], sum);
                sum = part + k < parts ? with : sum;
            }
        }
        write_output(item, r, d, sum);
        d += STEP_THREADS % D; /* no division for each */
        r += STEP_THREADS / D + (d >= D);
        d -= d >= D ? D : 0;
    }
}

/* The worst candidate of LANES neighbouring lanes. */
template <int LANES> DEVICE h2o_candidate worst_of_lanes(h2o_candidate worst) {
    UNROLL
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        const h2o_candidate other = {shfl_xor(worst.key, offset), shfl_xor(worst.position, offset),
                                     shfl_xor(worst.index, offset)};
        /* both lanes compare the two in the same order, so that ties end alike */
        worst = threadIdx.x % (2 * offset) < (unsigned)offset ? h2o_policy_worse(worst, other)
                                                              : h2o_policy_worse(other, worst);
    }
    return worst;
}

/* The worst candidate of all threads of a block. warps: shared, one for each warp. */
template <int THREADS>
DEVICE h2o_candidate block_candidate(h2o_candidate worst, h2o_candidate *warps) {
    worst = worst_of_lanes<32>(worst);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = worst;
    sync_block();
    worst = worst_of_lanes<THREADS / 32>(warps[threadIdx.x % (THREADS / 32)]);
    sync_block();
    return worst;
}

/* What a key receives from some heads and one more, whose weight is e * factor. */
DEVICE float received_with(const h2o_policy *policy, float received, float e, float factor) {
    return h2o_scores_largest(policy) ? h2o_larger(received, e * factor)
                                      : fmaf(e, factor, received);
}

/* Softmax weights of some slots, from r of the group on, added to sum or the largest with it. */
DEVICE void add_weights(const step_item *item, const float *factors, const int64_t slot[STEP_LOADS],
                        int64_t r, float sum[STEP_LOADS]) {
    const uint32_t slots_of_part = (uint32_t)part_slots(item);
    float weight[STEP_LOADS][STEP_HEADS];
    UNROLL
    for (int i = 0; i < STEP_LOADS * STEP_HEADS; i++) {
        const int k = i / STEP_HEADS, head = i % STEP_HEADS;
        weight[k][head] = item->weights[slot[k] * item->R + lower(r + head, item->R - 1)];
    }
    UNROLL
    for (int k = 0; k < STEP_LOADS; k++) {
        const float *const factor = factors + (uint32_t)slot[k] / slots_of_part * item->R + r;
        UNROLL
        for (int i = 0; i < STEP_HEADS; i++) {
            if (r + i >= item->R) continue;
            sum[k] = received_with(item->policy, sum[k], weight[k][i], factor[i]);
        }
    }
}

/* scores = decay * scores + weights of the R heads, or the largest of these; returns the candidate
 * with the lowest rank. A thread reads all there is to know of STEP_LOADS slots before it writes:
 * its first slot again in the place of those past the end. Empty slots are the last to be chosen.
 * add(slot, position, r, sum) adds the weights of STEP_HEADS heads from r of the group on. */
template <int THREADS, typename ADD>
DEVICE h2o_candidate step_scores(const step_item *item, const h2o_ranking *ranking,
                                 h2o_candidate *warps, ADD add) {
    const slot_store *const store = &item->store;
    const float decay = item->policy->decay;
    h2o_candidate worst = {UINT32_MAX, 0, -1};
    NO_UNROLL
    for (int64_t first = threadIdx.x; first < item->slots; first += STEP_LOADS * THREADS) {
        int64_t slot[STEP_LOADS];
        int32_t position[STEP_LOADS];
        float sum[STEP_LOADS] = {}, score[STEP_LOADS], norm[STEP_LOADS];
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            const int64_t s = first + k * THREADS;
            slot[k] = s < item->slots ? s : first;
            score[k] = store->scores[slot[k]];
            position[k] = store->positions[slot[k]];
            norm[k] = ranking->value_weighted ? store->norms[slot[k]] : 1.0f;
        }
        NO_UNROLL
        for (int64_t r = 0; r < item->R; r += STEP_HEADS) add(slot, position, r, sum);
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            TAKEN(step_past_the_slots, first + k * THREADS >= item->slots);
            TAKEN(step_scores_largest, h2o_scores_largest(item->policy));
            if (first + k * THREADS >= item->slots) continue;
            score[k] = h2o_scores_largest(item->policy) ? h2o_larger(score[k] * decay, sum[k])
                                                        : fmaf(score[k], decay, sum[k]);
            store->scores[slot[k]] = score[k];
            const h2o_candidate candidate = {h2o_policy_slot_key(ranking, ranking->kind,
                                                                 ranking->value_weighted, score[k],
                                                                 position[k], norm[k]),
                                             position[k] < 0 ? 0 : (uint32_t)position[k], slot[k]};
            worst = worst.index < 0 ? candidate : h2o_policy_worse(worst, candidate);
        }
    }
    return block_candidate<THREADS>(worst, warps);
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
 * key, position -1 where none is. merge(): merges it, and returns whether. */
template <typename MERGE>
DEVICE h2o_eviction step_evict(const step_item *item, const h2o_ranking *ranking, int64_t slot,
                               MERGE merge) {
    const slot_store *const store = &item->store;
    const bool evicts = item->head.held >= ranking->budget;
    h2o_eviction eviction = {-1, 0.0f};
    if (evicts) eviction = h2o_eviction{store->positions[slot], store->scores[slot]};
    TAKEN(step_evicts_none, !evicts);
    bool merged = false;
    if (evicts && h2o_merges(item->policy)) merged = merge();
    const int32_t rank = evicts && item->ranks ? item->ranks[slot] : 0;
    sync_block(); /* all threads have read what changes below */
    NO_UNROLL
    for (int64_t s = threadIdx.x; evicts && item->ranks && s < item->slots; s += STEP_THREADS) {
        TAKEN(step_lowers_ranks, s != slot && item->ranks[s] > rank);
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
    char *const reduction = (char *)(shared + STEP_FLOATS);
    const h2o_ranking ranking =
        h2o_policy_ranking(item->policy, item->head.heavy, item->head.recent, item->length + 1);
    const float *const factors = step_factors(item, shared);
    sync_block();
    step_outputs(item, factors);
    const h2o_candidate worst =
        step_scores<STEP_THREADS>(item, &ranking, (h2o_candidate *)reduction,
                                  [&](const int64_t *slot, const int32_t *, int64_t r, float *sum) {
                                      add_weights(item, factors, slot, r, sum);
                                  });
    return step_evict(item, &ranking, worst.index, [&] {
        return step_merge(item, &ranking, worst.index, shared, (nearest_key *)(reduction + 256));
    });
}

/* ---- The kernel ---------------------------------------------------------- */

static_assert(sizeof(step_item) <= STEP_SHARED - STEP_KEPT, "a step's item fits");

/* Grid: parts, G, B. */
DEVICE void step_block(const h2o_step_params *p, char *workspace, float *shared) {
    const int64_t part = blockIdx.x, g = blockIdx.y, b = blockIdx.z;
    const step_layout at = cuda_step_layout(p);
    if (!is_token(&p->mask, b, 0)) { /* the same for all blocks of a row */
        const int64_t R = p->dims.R, D = p->dims.D;
        NO_UNROLL
        for (int64_t i = threadIdx.x; part == 0 && i < R * D; i += STEP_THREADS) {
            set_element(row_of(&p->out, b, 0, g * R + i / D), i % D, 0.0f);
        }
        return;
    }
    const step_item item = open_step(p, workspace, b, g);
    step_item *const kept = (step_item *)((char *)shared + STEP_KEPT);
    if (threadIdx.x == 0) *kept = item;
    step_part(&item, part, shared);
    uint32_t *const parts_done = (uint32_t *)(workspace + at.parts_done) + b * p->dims.G + g;
    uint32_t *const heads_done = (uint32_t *)(workspace + at.heads_done) + b;
    TAKEN(step_of_several_parts, at.parts > 1);
    if (!arrive_last(parts_done, (uint32_t)at.parts)) return;
    step_item end = *kept; /* what only the end wants takes no registers before */
    end.policy = &p->policy;
    end.sink_logits = &p->sink_logits;
    step_finish(&end, shared);
    if (!arrive_last(heads_done, (uint32_t)p->dims.G)) return;
    if (threadIdx.x == 0) {
        *(int64_t *)h2o_at(&p->slots.lengths, kept->head.row, 0, 0) = kept->length + 1;
    }
}

BOUNDED_KERNEL(h2o_cuda_step, h2o_step_params, STEP_THREADS, 3) {
    DYN_SHARED(shared);
    step_block(&params, workspace, (float *)shared);
}
EXPORT_KERNEL(h2o_cuda_step, h2o_step_params)

#endif
