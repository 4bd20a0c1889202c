/* step_finish.cuh - the end of a decode step, by the last block of a head: computes outputs and
 * scores from what each part of the slots has left in the workspace, and evicts a key. */
#ifndef H2O_CUDA_STEP_FINISH_CUH
#define H2O_CUDA_STEP_FINISH_CUH

#include "logits.cuh"
#include "step_item.cuh"

/* ---- Combining the parts ------------------------------------------------- */

/* Turns a head's logits into softmax weights: exp(logit - max) * inverse. */
typedef struct {
    float max, inverse;
} softmax_row;

/* Pointers into shared memory. */
typedef struct {
    softmax_row *rows; /* [R] */
    float *factors;    /* [parts][R]: for a part's products with the values */
} step_softmax;

/* One warp per head, two parts per lane. All threads can read the result after the next barrier. */
DEVICE step_softmax combine_parts(const step_item *item, float *shared) {
    enum { EACH = STEP_PARTS / 32 };
    const step_softmax softmax = {(softmax_row *)shared, shared + 2 * item->R};
    const int lane = threadIdx.x % 32;
    NO_UNROLL
    for (int64_t r = threadIdx.x / 32; r < item->R; r += STEP_WARPS) {
        const float sink = sink_of(item->sink_logits, item->first_head + r);
        float part_max[EACH], part_sum[EACH], row_max = sink, row_sum = 0.0f;
        UNROLL
        for (int k = 0; k < EACH; k++) {
            const int64_t c = lower(lane + 32 * k, item->parts - 1);
            part_max[k] = item->row_max[c * item->R + r];
            part_sum[k] = item->row_sum[c * item->R + r];
        }
        UNROLL
        for (int k = 0; k < EACH; k++) row_max = fmaxf(row_max, part_max[k]);
        row_max = max_of_lanes(row_max);
        UNROLL
        for (int k = 0; k < EACH; k++) {
            part_max[k] = exponential(part_max[k], row_max);
            if (lane + 32 * k < item->parts) row_sum = fmaf(part_max[k], part_sum[k], row_sum);
        }
        row_sum = sum_of_lanes(row_sum) + exponential(sink, row_max);
        const float inverse = 1.0f / row_sum;
        UNROLL
        for (int k = 0; k < EACH; k++) {
            const int c = lane + 32 * k;
            if (c < item->parts) softmax.factors[c * item->R + r] = part_max[k] * inverse;
        }
        if (lane == 0) softmax.rows[r] = softmax_row{row_max, inverse};
    }
    return softmax;
}

/* out [R, D] = sum of the parts' products with the values, rescaled. A thread reads OUTPUTS
 * elements of STEP_PARTS_READ parts at a time. Parts without slots are left out. */
template <int OUTPUTS> DEVICE void step_outputs(const step_item *item, const float *factors) {
    const uint32_t R = (uint32_t)item->R, D = (uint32_t)item->D, size = R * D;
    const uint32_t parts = (uint32_t)cuda_ceil(item->slots, item->part_slots);
    NO_UNROLL
    for (uint32_t first = threadIdx.x; first < size; first += OUTPUTS * STEP_THREADS) {
        uint32_t at[OUTPUTS], r[OUTPUTS];
        float sum[OUTPUTS] = {};
        UNROLL
        for (int i = 0; i < OUTPUTS; i++) {
            at[i] = first + i * STEP_THREADS < size ? first + i * STEP_THREADS : first;
            r[i] = at[i] / D;
        }
        NO_UNROLL
        for (uint32_t part = 0; part < parts; part += STEP_PARTS_READ) {
            float output[OUTPUTS][STEP_PARTS_READ];
            TAKEN(step_of_many_parts, part > 0);
            UNROLL
            for (int k = 0; k < STEP_PARTS_READ; k++) {
                const float *const row =
                    item->outputs + (int64_t)(part + k < parts ? part + k : part) * size;
                UNROLL
                for (int i = 0; i < OUTPUTS; i++) output[i][k] = row[at[i]];
            }
            UNROLL
            for (int i = 0; i < OUTPUTS; i++) {
                const float *const factor = factors + part * R + r[i];
                UNROLL
                for (int k = 0; k < STEP_PARTS_READ; k++) {
                    if (part + k < parts) sum[i] = fmaf(output[i][k], factor[k * R], sum[i]);
                }
            }
        }
        UNROLL
        for (int i = 0; i < OUTPUTS; i++) {
            if (first + i * STEP_THREADS >= size) continue;
            row_ref out = item->out;
            out.data += r[i] * item->out_stride;
            set_element(out, at[i] - r[i] * D, sum[i]);
        }
    }
}

/* The worst candidate of LANES adjacent lanes. */
template <int LANES> DEVICE h2o_candidate worst_of_lanes(h2o_candidate worst) {
    UNROLL
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        const h2o_candidate other = {shfl_xor(worst.key, offset), shfl_xor(worst.position, offset),
                                     shfl_xor(worst.index, offset)};
        /* both lanes compare the two in the same order, so that they agree about ties */
        worst = threadIdx.x % (2 * offset) < (unsigned)offset ? h2o_policy_worse(worst, other)
                                                              : h2o_policy_worse(other, worst);
    }
    return worst;
}

/* The worst candidate of all threads of a block. warps: shared memory, one entry per warp. */
template <int THREADS>
DEVICE h2o_candidate block_candidate(h2o_candidate worst, h2o_candidate *warps) {
    worst = worst_of_lanes<32>(worst);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = worst;
    sync_block();
    worst = worst_of_lanes<THREADS / 32>(warps[threadIdx.x % (THREADS / 32)]);
    sync_block();
    return worst;
}

/* Adds to what a key has received from some heads one more head, whose weight is e * factor. */
DEVICE float received_with(const h2o_policy *policy, float received, float e, float factor) {
    return h2o_scores_largest(policy) ? h2o_larger(received, e * factor)
                                      : fmaf(e, factor, received);
}

/* Adds to sum the softmax weights of slots, for heads from r of the group on; or takes maxima. */
template <int LOADS>
DEVICE void add_weights(const step_item *item, const softmax_row *rows, const int32_t slot[LOADS],
                        int64_t r, float sum[LOADS]) {
    float logit[STEP_HEADS][LOADS];
    UNROLL
    for (int i = 0; i < STEP_HEADS; i++) {
        const float *const logits = item->logits + lower(r + i, item->R - 1) * item->head.slots;
        UNROLL
        for (int k = 0; k < LOADS; k++) logit[i][k] = logits[slot[k]];
    }
    UNROLL
    for (int i = 0; i < STEP_HEADS; i++) {
        if (r + i >= item->R) continue;
        const softmax_row row = rows[r + i];
        UNROLL
        for (int k = 0; k < LOADS; k++) {
            const float e = exponential(logit[i][k], row.max);
            sum[k] = received_with(item->policy, sum[k], e, row.inverse);
        }
    }
}

/* scores = decay * scores + weights of the R heads, or the largest of these. Returns the candidate
 * with the lowest rank; empty slots are chosen last. A thread reads everything about LOADS slots
 * before it writes; past the end it reads its first slot again. add(slot, position, r, sum) must
 * add the weights of STEP_HEADS heads from r of the group on. */
template <int THREADS, int LOADS, typename ADD>
DEVICE h2o_candidate step_scores(const step_item *item, const h2o_ranking *ranking,
                                 h2o_candidate *warps, ADD add) {
    const slot_store *const store = &item->store;
    const float decay = item->policy->decay;
    const int slots = (int)item->slots;
    h2o_candidate worst = {UINT32_MAX, 0, -1};
    NO_UNROLL
    for (int first = (int)threadIdx.x; first < slots; first += LOADS * THREADS) {
        int32_t slot[LOADS], position[LOADS];
        float sum[LOADS] = {}, score[LOADS], norm[LOADS];
        UNROLL
        for (int k = 0; k < LOADS; k++) {
            slot[k] = first + k * THREADS < slots ? first + k * THREADS : first;
            score[k] = store->scores[slot[k]];
            position[k] = store->positions[slot[k]];
            norm[k] = ranking->value_weighted ? store->norms[slot[k]] : 1.0f;
        }
        NO_UNROLL
        for (int64_t r = 0; r < item->R; r += STEP_HEADS) add(slot, position, r, sum);
        UNROLL
        for (int k = 0; k < LOADS; k++) {
            TAKEN(step_past_the_slots, first + k * THREADS >= slots);
            TAKEN(step_scores_largest, h2o_scores_largest(item->policy));
            if (first + k * THREADS >= slots) continue;
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

/* An evicted key; position -1 means that none was evicted. */
typedef struct {
    int32_t position;
    float score;
} step_eviction;

/* Whether the head exceeds its budget. */
DEVICE bool evicts_key(const step_item *item, const h2o_ranking *ranking) {
    return item->head.held >= ranking->budget;
}

/* Empties the slot if the head exceeds its budget. Returns the evicted key. */
DEVICE step_eviction step_evict(const step_item *item, const h2o_ranking *ranking, int64_t slot) {
    const slot_store *const store = &item->store;
    const bool evicts = evicts_key(item, ranking);
    step_eviction eviction = {-1, 0.0f};
    if (evicts) eviction = step_eviction{store->positions[slot], store->scores[slot]};
    TAKEN(step_evicts_none, !evicts);
    const int32_t rank = evicts && item->ranks ? item->ranks[slot] : 0;
    sync_block(); /* all threads have read what is changed below */
    NO_UNROLL
    for (int64_t s = threadIdx.x; evicts && item->ranks && s < item->slots; s += STEP_THREADS) {
        TAKEN(step_lowers_ranks, s != slot && item->ranks[s] > rank);
        if (s != slot && item->ranks[s] > rank) item->ranks[s]--;
    }
    if (threadIdx.x == 0 && evicts) {
        store->scores[slot] = 0.0f;
        store->positions[slot] = -1;
        if (item->ranks) item->ranks[slot] = -1;
    }
    return eviction;
}

DEVICE h2o_ranking ranking_of(const step_item *item) {
    return h2o_policy_ranking(item->policy, item->head.heavy, item->head.recent, item->length + 1);
}

/* Steps 2 and 3 of step.cuh, when all parts are done. open() reads the item from shared memory; it
 * is called again for the end, so that fields that only the end uses occupy no registers before.
 * reduction: shared memory too. */
template <typename OPEN> DEVICE void step_finish(OPEN open, float *shared, char *reduction) {
    h2o_candidate worst;
    {
        const step_item item = open();
        const step_softmax softmax = combine_parts(&item, shared);
        sync_block();
        step_outputs<SCORES_LOADED / 2>(&item, softmax.factors);
        const h2o_ranking ranking = ranking_of(&item);
        worst = step_scores<STEP_THREADS, SCORES_LOADED>(
            &item, &ranking, (h2o_candidate *)reduction,
            [&](const int32_t *slot, const int32_t *, int64_t r, float *sum) {
                add_weights<SCORES_LOADED>(&item, softmax.rows, slot, r, sum);
            });
    }
    const step_item item = open();
    const h2o_ranking ranking = ranking_of(&item);
    const step_eviction evicted = step_evict(&item, &ranking, worst.index);
    const bool evicts = evicts_key(&item, &ranking);
    if (threadIdx.x != 0) return;
    if (evicts) *item.evicted_score += (double)evicted.score;
    *item.free_slot = (int32_t)(evicts ? worst.index : item.slots);
}

#endif
