/* step_logits.cuh - logits of a decode step: q.k of R query heads with the slots of one part.
 *
 * STEP_HEADS queries at a time are in shared memory as floats [STEP_HEADS, D]. Each team of
 * threads reads a slot's key once for all of them (STEP_LOADS slots at a time, to hide latency)
 * and writes the logits [R, slots] to the workspace.
 *
 * With cache-relative positions, keys are stored without their rotary embedding. Queries and keys
 * are rotated as they are read, by their rank among the held keys. */
#ifndef H2O_CUDA_STEP_LOGITS_CUH
#define H2O_CUDA_STEP_LOGITS_CUH

#include "logits.cuh"
#include "step_item.cuh"

/* ---- Teams --------------------------------------------------------------- */

/* A team is TEAM adjacent threads of a warp that compute dot products of one row together: each
 * reads every TEAM-th run of the row, and shuffles add up the partial sums. */
DEVICE int team_of_thread(void) { return threadIdx.x / TEAM; }
DEVICE int index_in_team(void) { return threadIdx.x % TEAM; }

/* The dot products of N rows with COUNT vectors, `pitch` floats apart, the same in all threads of a
 * team. load(d, x) must read elements d..d+RUN-1 of each row. All threads of a warp must take part. */
template <int N, int COUNT, typename LOAD>
DEVICE void row_dots(int64_t D, const float *vectors, int64_t pitch, LOAD load,
                     float (*sum)[COUNT]) {
    UNROLL
    for (int i = 0; i < N * COUNT; i++) sum[i / COUNT][i % COUNT] = 0.0f;
    for (int64_t d = index_in_team() * RUN; d < D; d += TEAM * RUN) {
        float x[N][RUN];
        load(d, x);
        UNROLL
        for (int i = 0; i < N * COUNT; i++) {
            const float *const v = vectors + i % COUNT * pitch + d;
            float *const to = &sum[i / COUNT][i % COUNT];
            UNROLL
            for (int j = 0; j < RUN; j++) *to = fmaf(x[i / COUNT][j], v[j], *to);
        }
    }
    UNROLL
    for (int i = 0; i < N * COUNT; i++) {
        float *const partial = &sum[i / COUNT][i % COUNT];
        *partial = sum_of_lanes<TEAM>(*partial);
    }
}

/* ---- Rotary embedding ---------------------------------------------------- */

/* Loads elements d..d+RUN-1 of a row with the rotary embedding of a rank. row(i) is element i
 * without it. Elements i < F and F + i are a pair that is rotated by angle i. */
template <typename ROW>
DEVICE void load_rotated(const ROW &row, const h2o_rotary *rotary, int64_t rank, int64_t d,
                         int64_t D, float x[RUN]) {
    const int64_t F = rotary->table.shape[2];
    const float *const cosines = (const float *)h2o_at(&rotary->table, rank, 0, 0);
    const float *const sines = (const float *)h2o_at(&rotary->table, rank, 1, 0);
    UNROLL
    for (int j = 0; j < RUN; j++) {
        const int64_t i = d + j, pair = i < F ? i : i - F;
        const float value = i < D ? row(i) : 0.0f;
        x[j] = value;
        if (i < F) x[j] = value * cosines[pair] - row(i + F) * sines[pair];
        if (i >= F && i < 2 * F) x[j] = value * cosines[pair] + row(i - F) * sines[pair];
    }
}

/* ---- Queries and logits -------------------------------------------------- */

/* Loads STEP_HEADS query heads from r of the group on as floats; 0 past the last head. */
DEVICE void load_queries(const step_item *item, int64_t r, float *query) {
    const int64_t depth = cuda_depth(item->D), runs = depth / RUN;
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < STEP_HEADS * runs; i += STEP_THREADS) {
        const int64_t head = r + i / runs, d = i % runs * RUN;
        row_ref row = item->query;
        row.data += (head < item->R ? head : r) * item->query_stride;
        float x[RUN];
        if (item->rotary) {
            const auto element = [=](int64_t e) { return element_of(row, e); };
            load_rotated(element, item->rotary, item->head.held, d, item->D, x);
        } else {
            load_strided(row, d, item->D, x);
        }
        UNROLL
        for (int j = 0; j < RUN; j++)
            query[i / runs * depth + d + j] = head < item->R ? x[j] : 0.0f;
    }
}

/* Writes the logits of a slot for heads r.. of the group: thread i of a team writes that of head
 * r + i. A variable index into sum would put it into local memory. */
DEVICE void write_logit(const step_item *item, int64_t r, int64_t slot,
                        const float sum[STEP_HEADS]) {
    const int head = index_in_team();
    float dot = sum[0];
    UNROLL
    for (int i = 1; i < STEP_HEADS; i++) dot = head == i ? sum[i] : dot;
    if (head < STEP_HEADS && r + head < item->R) {
        item->logits[(r + head) * item->head.slots + slot] =
            logit_of(dot, item->scale, item->softcap);
    }
}

/* Computes logits of slots begin..end-1 for heads r.. of the group; a team computes N slots at a
 * time by dots(slots, sums). All threads of a warp must take part, so the last slot replaces those
 * past the end. */
template <int N, typename DOTS>
DEVICE void logits_by(const step_item *item, int64_t r, int64_t begin, int64_t end, DOTS dots) {
    for (int64_t base = begin + team_of_thread(); base - team_of_thread() < end;
         base += N * STEP_TEAMS) {
        int64_t slot[N];
        float sum[N][STEP_HEADS];
        UNROLL
        for (int i = 0; i < N; i++) slot[i] = lower(base + i * STEP_TEAMS, end - 1);
        dots(slot, sum);
        UNROLL
        for (int i = 0; i < N; i++) {
            if (base + i * STEP_TEAMS < end) write_logit(item, r, slot[i], sum[i]);
        }
    }
}

/* Computes logits of slots begin..end-1 for heads r.. of the group. query: their queries. */
DEVICE void part_logits(const step_item *item, int64_t r, int64_t begin, int64_t end,
                        const float *query) {
    const slot_rows *const keys = &item->store.keys;
    const int64_t depth = cuda_depth(item->D);
    if (!item->rotary) {
        logits_by<STEP_LOADS>(
            item, r, begin, end, [&](const int64_t *slot, float (*sum)[STEP_HEADS]) {
                const char *row[STEP_LOADS];
                UNROLL
                for (int i = 0; i < STEP_LOADS; i++) row[i] = slot_row(keys, slot[i]);
                const auto load = [&](int64_t d, float (*x)[RUN]) {
                    load_rows<STEP_LOADS>(row, keys->type, d, item->D, x);
                };
                row_dots<STEP_LOADS, STEP_HEADS>(item->D, query, depth, load, sum);
            });
        return;
    }
    const int64_t P = item->rotary->table.shape[0];
    logits_by<1>(item, r, begin, end, [&](const int64_t *slot, float (*sum)[STEP_HEADS]) {
        const char *const row = slot_row(keys, *slot);
        const auto key = [=](int64_t e) { return stored_element(row, keys->type, e, item->D); };
        const int64_t stored = item->ranks[*slot], rank = stored >= 0 && stored < P ? stored : 0;
        const auto load = [&](int64_t d, float (*x)[RUN]) {
            load_rotated(key, item->rotary, rank, d, item->D, *x);
        };
        row_dots<1, STEP_HEADS>(item->D, query, depth, load, sum);
    });
}

#endif
