/* window_rows.cuh - a window (window.cuh) token by token, by one block per head. The state of the
 * cells is in shared memory meanwhile, if that has room, and each row of logits is read once. */
#ifndef H2O_CUDA_WINDOW_ROWS_CUH
#define H2O_CUDA_WINDOW_ROWS_CUH

#include "step_finish.cuh"
#include "window.cuh"

/* The maximum to which exponentials of some logits are relative, and their sum, or 1 / the sum. */
typedef struct {
    float max, sum;
} softmax_part;

enum { WINDOW_WARPS = WINDOW_THREADS / 32 };

/* Shared memory, followed by a softmax_part for each of R heads, then for each head and warp. */
typedef struct {
    h2o_candidate candidates[WINDOW_WARPS];
    step_eviction evictions[WINDOW_MOST];
    int32_t cells[WINDOW_MOST];
    select_buffer select;
} window_buffer;

static_assert(sizeof(window_buffer) <= WINDOW_KEPT);

/* Copies the state of the cells to shared memory if that has room. Returns where a row of logits
 * fits after it, or NULL. */
DEVICE float *cache_cells(text_window *w, window_buffer *buffer) {
    slot_store *const store = &w->head.store;
    const int64_t cells = w->head.head.slots, R = w->head.p->dims.R;
    const int64_t arrays = store->norms ? 3 : 2;
    const int64_t room = (cuda_window_shared(R) - cuda_window_kept(R)) / sizeof(float);
    float *const cache = (float *)((char *)buffer + cuda_window_kept(R));
    if (arrays * cells > room) return NULL;
    NO_UNROLL
    for (int64_t s = threadIdx.x; s < cells; s += WINDOW_THREADS) {
        cache[s] = store->scores[s];
        ((int32_t *)cache)[cells + s] = store->positions[s];
        if (store->norms) cache[2 * cells + s] = store->norms[s];
    }
    store->scores = cache;
    store->positions = (int32_t *)cache + cells;
    if (store->norms) store->norms = cache + 2 * cells;
    return (arrays + R) * cells > room ? NULL : cache + arrays * cells;
}

/* Copies the state back; norms have not changed. */
DEVICE void uncache_cells(const slot_store *store, const simulate_head *h) {
    NO_UNROLL
    for (int64_t s = threadIdx.x; store->scores != h->store.scores && s < h->head.slots;
         s += WINDOW_THREADS) {
        h->store.scores[s] = store->scores[s];
        h->store.positions[s] = store->positions[s];
    }
    sync_block();
}

/* Rescales a sum, which is relative to one maximum, to a higher one. */
DEVICE float rescaled(softmax_part part, float max) {
    return part.max == max ? part.sum : part.sum * exponential(part.max, max);
}

DEVICE softmax_part warp_softmax(softmax_part part) {
    const float max = max_of_lanes(part.max);
    return softmax_part{max, sum_of_lanes(rescaled(part, max))};
}

/* A thread's part of the softmax of STEP_HEADS heads from r of the group on; x: rows of logits. */
DEVICE void thread_softmax(const text_window *w, const float *x, int64_t r,
                           softmax_part part[STEP_HEADS]) {
    const int cells = (int)w->head.head.slots;
    const int64_t R = w->head.p->dims.R;
    const float *row[STEP_HEADS];
    UNROLL
    for (int i = 0; i < STEP_HEADS; i++) {
        part[i] = softmax_part{-INFINITY, 0.0f};
        row[i] = x + lower(r + i, R - 1) * w->ld;
    }
    NO_UNROLL
    for (int first = (int)threadIdx.x; first < cells; first += (int)STEP_LOADS * WINDOW_THREADS) {
        int32_t position[STEP_LOADS];
        float logit[STEP_HEADS][STEP_LOADS];
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            const int s = first + k * WINDOW_THREADS, cell = s < cells ? s : first;
            position[k] = s < cells ? w->head.store.positions[cell] : -1;
            UNROLL
            for (int i = 0; i < STEP_HEADS; i++) logit[i][k] = row[i][cell];
        }
        UNROLL
        for (int i = 0; w->cache && i < STEP_HEADS * STEP_LOADS; i++) {
            const int s = first + i % (int)STEP_LOADS * WINDOW_THREADS;
            const int head = (int)r + i / STEP_LOADS;
            if (s < cells && head < R)
                w->cache[head * cells + s] = logit[i / STEP_LOADS][i % STEP_LOADS];
        }
        UNROLL
        for (int i = 0; i < STEP_HEADS; i++) {
            float max = part[i].max;
            UNROLL
            for (int k = 0; k < STEP_LOADS; k++)
                max = position[k] < 0 ? max : fmaxf(max, logit[i][k]);
            float sum = rescaled(part[i], max);
            UNROLL
            for (int k = 0; k < STEP_LOADS; k++)
                sum += position[k] < 0 ? 0.0f : exponential(logit[i][k], max);
            part[i] = softmax_part{max, sum};
        }
    }
}

/* The softmax of row i of the window over the held keys, for each head; `sum` is 1 / the sum. */
DEVICE void row_softmax(const text_window *w, int64_t i, const float *x, softmax_part *softmax) {
    const h2o_simulate_params *const p = w->head.p;
    const int64_t R = p->dims.R;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    softmax_part *const parts = softmax + R;
    NO_UNROLL
    for (int64_t r = 0; r < R; r += STEP_HEADS) {
        softmax_part part[STEP_HEADS];
        thread_softmax(w, x, r, part);
        UNROLL
        for (int j = 0; j < STEP_HEADS; j++) {
            if (r + j >= R) continue;
            const softmax_part of_warp = warp_softmax(part[j]);
            if (lane == 0) parts[(r + j) * WINDOW_WARPS + warp] = of_warp;
        }
    }
    sync_block();
    NO_UNROLL
    for (int64_t r = warp; r < R; r += WINDOW_WARPS) {
        const float sink = sink_of(&p->sink_logits, w->head.g * R + r);
        softmax_part part = {-INFINITY, 0.0f};
        if (lane < WINDOW_WARPS) part = parts[r * WINDOW_WARPS + lane];
        part = warp_softmax(part);
        add_sink(sink, &part.max, &part.sum);
        if (lane != 0) continue;
        softmax[r] = softmax_part{part.max, 1.0f / part.sum};
        w->inverse[i * R + r] = softmax[r].sum;
    }
    sync_block();
}

/* Turns logits of some cells into exponentials in place, -1 if no key is held, for STEP_HEADS heads
 * from r of the group on. Adds to sum the softmax weights of the keys, or takes the maximum. */
DEVICE void weigh_cells(const text_window *w, float *x, const softmax_part *softmax,
                        const int32_t cell[STEP_LOADS], const int32_t position[STEP_LOADS],
                        int64_t r, float sum[STEP_LOADS]) {
    const int64_t R = w->head.p->dims.R;
    const h2o_policy *const policy = &w->head.p->policy;
    const int64_t cells = w->head.head.slots;
    float logit[STEP_HEADS][STEP_LOADS];
    UNROLL
    for (int j = 0; j < STEP_HEADS; j++) {
        const int64_t head = lower(r + j, R - 1);
        const float *const row = w->cache ? w->cache + head * cells : x + head * w->ld;
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) logit[j][k] = row[cell[k]];
    }
    UNROLL
    for (int j = 0; j < STEP_HEADS; j++) {
        if (r + j >= R) continue;
        const softmax_part of_head = softmax[r + j];
        float *const row = x + (r + j) * w->ld;
        UNROLL
        for (int k = 0; k < STEP_LOADS; k++) {
            const bool held = position[k] >= 0;
            const float e = exponential(logit[j][k], of_head.max);
            row[cell[k]] = held ? e : -1.0f;
            const float with = received_with(policy, sum[k], e, of_head.sum);
            sum[k] = held ? with : sum[k];
        }
    }
}

/* Fills in what step_scores and step_evict need of a head. */
DEVICE step_item open_rows(const text_window *w) {
    step_item item = open_group(w->head.p, w->head.g);
    item.head = w->head.head;
    item.store = w->head.store;
    item.slots = w->head.head.slots;
    return item;
}

/* Puts the key of token i into its cell; called by one thread. */
DEVICE void hold_key(const text_window *w, const window_buffer *buffer, int64_t i) {
    if (i >= w->count) return;
    w->head.store.positions[buffer->cells[i]] = (int32_t)(w->first + i);
    w->head.store.scores[buffer->cells[i]] = 0.0f;
}

/* Processes one token, whose key is in its cell: softmax, scores, and the eviction of one key. */
DEVICE void window_row(const text_window *w, step_item *item, h2o_ranking *ranking, int64_t i,
                       window_buffer *buffer) {
    const int64_t position = w->first + i;
    float *const x = w->logits + i * item->R * w->ld;
    softmax_part *const softmax = (softmax_part *)((char *)buffer + WINDOW_KEPT);
    row_softmax(w, i, x, softmax);
    h2o_policy_advance(ranking, item->head.recent, position + 1);
    item->head.held = h2o_policy_held(item->head.budget, position);
    const h2o_candidate worst = step_scores<WINDOW_THREADS, STEP_LOADS>(
        item, ranking, buffer->candidates,
        [&](const int32_t *cell, const int32_t *held, int64_t r, float *sum) {
            weigh_cells(w, x, softmax, cell, held, r, sum);
        });
    const step_eviction evicted = step_evict(item, ranking, worst.index);
    if (threadIdx.x == 0) {
        buffer->evictions[i] = evicted;
        hold_key(w, buffer, i + 1);
    }
    sync_block();
}

DEVICE void window_rows(const h2o_simulate_params *p, char *workspace, window_buffer *buffer) {
    text_window w = open_window(p, workspace, blockIdx.y, blockIdx.x, 0);
    const simulate_head h = w.head;
    const int64_t last = w.first + w.count;
    if (threadIdx.x < w.count) buffer->cells[threadIdx.x] = w.new_cells[threadIdx.x];
    if (w.count > 0) w.cache = cache_cells(&w, buffer);
    TAKEN(window_second, w.number > 0 && w.count > 0);
    TAKEN(window_without_cache, w.count > 0 && !w.cache);
    sync_block();
    if (threadIdx.x == 0) {
        *w.windows = (int32_t)w.number + 1;
        hold_key(&w, buffer, 0);
    }
    if (w.count == 0) return;
    sync_block();
    step_item item = open_rows(&w);
    h2o_ranking ranking =
        h2o_policy_ranking(item.policy, item.head.heavy, item.head.recent, w.first);
    for (int64_t i = 0; i < w.count; i++) window_row(&w, &item, &ranking, i, buffer);
    if (threadIdx.x < w.count) {
        const step_eviction evicted = buffer->evictions[threadIdx.x];
        if (evicted.position >= 0)
            record_eviction(&h, evicted.position, evicted.score, w.first + threadIdx.x);
    }
    uncache_cells(&w.head.store, &h);
    choose_cells(&h, last, cuda_window(p->dims.R), w.next_tokens, w.new_cells, &buffer->select);
}

#endif
