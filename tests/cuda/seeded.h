/* seeded.h - small kernels in the style of csrc/cuda, with reference results from the host. Each
 * kernel has bugs that are typical of its kind and can be switched on.
 *
 * A kernel gets the bug as a parameter (sample_params.with). The table `bugs` at the end lists what
 * has to detect each bug: a wrong result, the emulated GPU, or a sanitizer. test_shim.cpp runs
 * them. */
#ifndef H2O_SEEDED_H
#define H2O_SEEDED_H

#include "cuda/common.cuh"

enum {
    THREADS = 64,
    ROWS = 3,
    WIDTH = 50, /* row length and number of queries; no multiple of a warp */
    SLOTS = 5,
    DEPTH = 4,
    BINS = 8,
};

enum bug {
    NO_BUG,
    NO_BARRIER,
    NO_BARRIER_BEFORE_REUSE,
    NO_BARRIER_LATER,
    NO_WARP_BARRIER,
    SHARED_PAST_END,
    NOT_ATOMIC,
    NOT_ZEROED,
    RELAXED_COUNTER,
    COUNTED_TOO_EARLY,
    COUNTER_NOT_CLEARED,
    SAME_ADDRESS,
    CAUSAL_MASK,
    SLOT_PAST_END,
    ROW_PAST_END,
    UNWRITTEN_LSE,
    BARRIER_IN_BRANCH,
    RETURNED_BEFORE_BALLOT,
    STACK_OVERFLOW,
    NO_WAIT,
    WAIT_FOR_ALL_BUT_ONE,
    BATCH_LEFT_OPEN,
    NO_BARRIER_AFTER_WAIT,
    COPY_BEFORE_BARRIER,
};

typedef struct {
    bug with;
    const float *in, *slots;
    float *out, *sums;
    uint32_t *counter;
} sample_params;

/* ---- Softmax of one row per block ---------------------------------------- */

DEVICE float warp_total(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shfl_xor(x, lanes);
    return x;
}

/* Shared memory: one float per element of a row, no more. */
KERNEL(sample_softmax, sample_params) {
    unsigned char *const shared = dynamic_shared;
    const int i = threadIdx.x;
    float *const row = (float *)shared;
    const int past = params.with == SHARED_PAST_END ? 1 : 0;
    if (i < WIDTH + past) row[i] = i < WIDTH ? params.in[blockIdx.x * WIDTH + i] : 0.0f;
    if (params.with != NO_BARRIER) sync_block();
    float row_max = row[0], row_sum = 0.0f;
    for (int j = 1; j < WIDTH; j++) row_max = fmaxf(row_max, row[j]);
    if (params.with != NO_BARRIER_BEFORE_REUSE) sync_block();
    if (i < WIDTH) row[i] = expf(params.in[blockIdx.x * WIDTH + i] - row_max);
    sync_block();
    for (int j = 0; j < WIDTH; j++) row_sum += row[j];
    if (params.with != NO_BARRIER_LATER) sync_block();
    if (i < WIDTH) row[i] /= row_sum; /* each thread reads another's below */
    sync_block();
    if (i < WIDTH) params.out[blockIdx.x * WIDTH + i] = row[WIDTH - 1 - i];
}

static void expect_softmax(const sample_params *p, float *out, float *) {
    for (int r = 0; r < ROWS; r++) {
        const float *const row = p->in + r * WIDTH;
        double row_max = row[0], row_sum = 0;
        for (int i = 0; i < WIDTH; i++) row_max = fmax(row_max, row[i]);
        for (int i = 0; i < WIDTH; i++) row_sum += exp(row[i] - row_max);
        for (int i = 0; i < WIDTH; i++) {
            out[r * WIDTH + WIDTH - 1 - i] = (float)(exp(row[i] - row_max) / row_sum);
        }
    }
}

/* ---- Reverse order of a warp's elements ---------------------------------- */

KERNEL(sample_reverse, sample_params) {
    unsigned char *const shared = dynamic_shared;
    const int i = threadIdx.x, first = i / 32 * 32;
    float *const elements = (float *)shared;
    elements[i] = params.in[i];
    if (params.with == NO_WARP_BARRIER) {
        shfl_xor(0, 1); /* waits for all lanes, but does not order memory */
    } else {
        sync_warp();
    }
    params.out[i] = elements[first + 31 - i % 32];
}

static void expect_reverse(const sample_params *p, float *out, float *) {
    for (int i = 0; i < THREADS; i++) out[i] = p->in[i ^ 31];
}

/* ---- Histogram of sizes -------------------------------------------------- */

DEVICE int bin_of(float x) { return (int)fminf(fabsf(x) * 4.0f, (float)(BINS - 1)); }

KERNEL(sample_histogram, sample_params) {
    unsigned char *const shared = dynamic_shared;
    const int i = threadIdx.x;
    uint32_t *const bins = (uint32_t *)shared;
    if (i < BINS && params.with != NOT_ZEROED) bins[i] = 0;
    sync_block();
    const int bin = bin_of(params.in[i]);
    if (params.with == NOT_ATOMIC) {
        bins[bin]++;
    } else {
        count_shared(&bins[bin]);
    }
    sync_block();
    if (i < BINS) params.out[i] = (float)bins[i];
}

static void expect_histogram(const sample_params *p, float *out, float *) {
    for (int i = 0; i < THREADS; i++) out[bin_of(p->in[i])] += 1.0f;
}

/* ---- Sum over blocks, by the last one to finish -------------------------- */

/* Like arrive_last, but memory is ordered too late or not at all. */
DEVICE bool arrive_wrongly(uint32_t *counter, uint32_t blocks, bug with) {
    if (with == COUNTED_TOO_EARLY) {
        return block_any(threadIdx.x == 0 && count_release(counter) == blocks - 1);
    }
    sync_block();
    return block_any(threadIdx.x == 0 &&
                     __atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED) == blocks - 1);
}

KERNEL(sample_total, sample_params) {
    const int i = threadIdx.x;
    float *const parts = (float *)workspace + blockIdx.x * THREADS;
    parts[i] = i < WIDTH ? params.in[blockIdx.x * WIDTH + i] : 0.0f;
    const bool wrong = params.with == RELAXED_COUNTER || params.with == COUNTED_TOO_EARLY;
    const bool last = wrong ? arrive_wrongly(params.counter, gridDim.x, params.with)
                            : arrive_last(params.counter, gridDim.x);
    if (params.with == SAME_ADDRESS && i == 0) params.out[1] = 1.0f; /* every block writes it */
    if (!last) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; b++) {
        sum += ((const float *)workspace)[b * THREADS + (i + 1) % THREADS];
    }
    sum = warp_total(sum);
    float *const warps = (float *)workspace + ROWS * THREADS;
    if (i % 32 == 0) warps[i / 32] = sum;
    sync_block();
    if (i == 0) params.out[0] = warps[0] + warps[1];
    if (i == 1) params.out[1] = 1.0f;
}

static void expect_total(const sample_params *p, float *out, float *) {
    for (int i = 0; i < ROWS * WIDTH; i++) out[0] += p->in[i];
    out[1] = 1.0f;
}

/* ---- Causal attention, and the attention that each key gets -------------- */

DEVICE float dot(const float *a, const float *b) {
    float sum = 0.0f;
    for (int d = 0; d < DEPTH; d++) sum = fmaf(a[d], b[d], sum);
    return sum;
}

/* Adds a key, which is also its value, to a query's running softmax. */
DEVICE void add_key(const float *query, const float *key, float *row_max, float *row_sum,
                    float *sum) {
    const float logit = dot(query, key), highest = fmaxf(*row_max, logit);
    const float rescale = expf(*row_max - highest), weight = expf(logit - highest);
    *row_sum = *row_sum * rescale + weight;
    for (int d = 0; d < DEPTH; d++) sum[d] = sum[d] * rescale + weight * key[d];
    *row_max = highest;
}

/* Each thread attends with one query to SLOTS stored keys and to the new keys up to its own. The
 * logsumexp goes into the workspace, which has one element per thread of a block. */
KERNEL(sample_attention, sample_params) {
    const int q = threadIdx.x;
    const int slots = SLOTS + (params.with == SLOT_PAST_END ? 1 : 0);
    const int rows = WIDTH + (params.with == ROW_PAST_END ? 1 : 0);
    const int row = q < WIDTH ? q : WIDTH - 1;
    const int visible = row + (params.with == CAUSAL_MASK && row + 1 < WIDTH ? 2 : 1);
    float row_max = -INFINITY, row_sum = 0.0f, sum[DEPTH] = {};
    const float *const query = params.in + row * DEPTH;
    for (int s = 0; s < slots; s++)
        add_key(query, params.slots + s * DEPTH, &row_max, &row_sum, sum);
    for (int k = 0; k < visible; k++)
        add_key(query, params.in + k * DEPTH, &row_max, &row_sum, sum);
    for (int d = 0; q < rows && d < DEPTH; d++) params.out[q * DEPTH + d] = sum[d] / row_sum;
    if (q < WIDTH) ((float *)workspace)[q] = row_max + logf(row_sum);
}

/* Each thread computes the column sum of one new key, over the queries that see it. */
KERNEL(sample_columns, sample_params) {
    const int k = threadIdx.x;
    const int queries = params.with == UNWRITTEN_LSE ? THREADS : WIDTH;
    const float *const lse = (const float *)workspace;
    float sum = 0.0f;
    for (int q = k; q < queries; q++) {
        const float *const query = params.in + (q < WIDTH ? q : 0) * DEPTH;
        sum += expf(dot(query, params.in + (k < WIDTH ? k : 0) * DEPTH) - lse[q]);
    }
    if (k < WIDTH) params.sums[k] = sum;
}

static void expect_attention(const sample_params *p, float *out, float *sums) {
    for (int q = 0; q < WIDTH; q++) {
        double total = 0, sum[DEPTH] = {};
        for (int pass = 0; pass < 2; pass++) {
            for (int i = 0; i < SLOTS + q + 1; i++) {
                const bool stored = i < SLOTS;
                const float *const key =
                    stored ? p->slots + i * DEPTH : p->in + (i - SLOTS) * DEPTH;
                double logit = 0;
                for (int d = 0; d < DEPTH; d++) logit += (double)p->in[q * DEPTH + d] * key[d];
                if (pass == 0) total += exp(logit);
                for (int d = 0; pass == 0 && d < DEPTH; d++) sum[d] += exp(logit) * key[d];
                if (pass == 1 && !stored) sums[i - SLOTS] += (float)(exp(logit) / total);
            }
        }
        for (int d = 0; d < DEPTH; d++) out[q * DEPTH + d] = (float)(sum[d] / total);
    }
}

/* ---- Tiles that are copied while the previous one is in use -------------- */

enum { TILES = THREADS * DEPTH / THREADS };

DEVICE void fetch_tile(const sample_params *p, int tile, float (*stages)[THREADS]) {
    const int i = threadIdx.x;
    if (tile < TILES && i < THREADS / 4) {
        copy_async<16>(&stages[tile % 2][4 * i], p->in + tile * THREADS + 4 * i);
    }
    if (p->with != BATCH_LEFT_OPEN) close_copies();
}

/* Each thread sums elements that other threads have copied. */
KERNEL(sample_stream, sample_params) {
    unsigned char *const shared = dynamic_shared;
    const int i = threadIdx.x;
    float (*const stages)[THREADS] = (float (*)[THREADS])shared;
    float sum = 0.0f;
    fetch_tile(&params, 0, stages);
    for (int tile = 0; tile < TILES; tile++) {
        if (params.with == COPY_BEFORE_BARRIER) fetch_tile(&params, tile + 1, stages);
        if (params.with == WAIT_FOR_ALL_BUT_ONE || params.with == COPY_BEFORE_BARRIER) {
            wait_copies<1>();
        } else if (params.with != NO_WAIT) {
            wait_copies<0>();
        }
        if (params.with != NO_BARRIER_AFTER_WAIT) sync_block();
        if (params.with != COPY_BEFORE_BARRIER) fetch_tile(&params, tile + 1, stages);
        sum = fmaf((float)(tile + 1), stages[tile % 2][THREADS - 1 - i], sum);
    }
    params.out[i] = sum;
}

static void expect_stream(const sample_params *p, float *out, float *) {
    for (int i = 0; i < THREADS; i++) {
        for (int tile = 0; tile < TILES; tile++) {
            out[i] += (float)(tile + 1) * p->in[tile * THREADS + THREADS - 1 - i];
        }
    }
}

/* ---- Invalid operations -------------------------------------------------- */

/* Uses more stack than a fiber has. */
__attribute__((noinline)) static int deep(int levels) {
    volatile char frame[1024];
    frame[levels % 1024] = (char)levels;
    return levels == 0 ? 0 : deep(levels - 1) + frame[levels % 1024];
}

KERNEL(sample_lost, sample_params) {
    const int i = threadIdx.x;
    if (params.with == RETURNED_BEFORE_BALLOT && i % 32 > 20) return;
    if (params.with == BARRIER_IN_BRANCH && i < 40) sync_block();
    if (params.with == STACK_OVERFLOW) params.out[i] = (float)deep(2000);
    params.out[i] = (float)popcount(warp_ballot(i % 2 == 0));
    sync_block();
}

static void expect_lost(const sample_params *, float *out, float *) {
    for (int i = 0; i < THREADS; i++) out[i] = 16.0f;
}

/* ---- Tables -------------------------------------------------------------- */

struct sample {
    const char *kernel, *then; /* `then` runs second; NULL: none */
    unsigned blocks, shared, outputs;
    void (*expect)(const sample_params *params, float *out, float *sums);
};

static const sample samples[] = {
    {"sample_softmax", nullptr, ROWS, WIDTH * 4, ROWS * WIDTH, expect_softmax},
    {"sample_reverse", nullptr, 1, THREADS * 4, THREADS, expect_reverse},
    {"sample_histogram", nullptr, 1, BINS * 4, BINS, expect_histogram},
    {"sample_total", nullptr, ROWS, 0, 2, expect_total},
    {"sample_attention", "sample_columns", 1, 0, WIDTH * DEPTH, expect_attention},
    {"sample_stream", nullptr, 1, 2 * THREADS * 4, THREADS, expect_stream},
    {"sample_lost", nullptr, 1, 0, THREADS, expect_lost},
};

/* How each bug must show without a sanitizer, and with AddressSanitizer, ThreadSanitizer and
 * MemorySanitizer. F: a wrong result; E: an error of the shim; D: death of the process; S: a report
 * of the sanitizer; -: nothing reliable. */
struct seeded {
    const char *name;
    bug with;
    const char *kernel, *detected;
};

static const seeded bugs[] = {
    {"no_barrier", NO_BARRIER, "sample_softmax", "FFSS"},
    {"no_barrier_before_reuse", NO_BARRIER_BEFORE_REUSE, "sample_softmax", "--S-"},
    {"no_barrier_later", NO_BARRIER_LATER, "sample_softmax", "--S-"},
    {"shared_past_end", SHARED_PAST_END, "sample_softmax", "-S--"},
    {"no_warp_barrier", NO_WARP_BARRIER, "sample_reverse", "--S-"},
    {"not_atomic", NOT_ATOMIC, "sample_histogram", "--S-"},
    {"not_zeroed", NOT_ZEROED, "sample_histogram", "FFFS"},
    {"relaxed_counter", RELAXED_COUNTER, "sample_total", "--S-"},
    {"counted_too_early", COUNTED_TOO_EARLY, "sample_total", "--S-"},
    {"counter_not_cleared", COUNTER_NOT_CLEARED, "sample_total", "FFFS"},
    {"same_address", SAME_ADDRESS, "sample_total", "--S-"},
    {"causal_mask", CAUSAL_MASK, "sample_attention", "FFFF"},
    {"slot_past_end", SLOT_PAST_END, "sample_attention", "-S--"},
    {"row_past_end", ROW_PAST_END, "sample_attention", "-S--"},
    {"unwritten_lse", UNWRITTEN_LSE, "sample_attention", "FFFS"},
    {"no_wait", NO_WAIT, "sample_stream", "FFFS"},
    {"wait_for_all_but_one", WAIT_FOR_ALL_BUT_ONE, "sample_stream", "FFFS"},
    {"batch_left_open", BATCH_LEFT_OPEN, "sample_stream", "FFFS"},
    {"no_barrier_after_wait", NO_BARRIER_AFTER_WAIT, "sample_stream", "FFSS"},
    {"copy_before_barrier", COPY_BEFORE_BARRIER, "sample_stream", "--S-"},
    {"barrier_in_branch", BARRIER_IN_BRANCH, "sample_lost", "EEEE"},
    {"returned_before_ballot", RETURNED_BEFORE_BALLOT, "sample_lost", "EEEE"},
    {"stack_overflow", STACK_OVERFLOW, "sample_lost", "DSSS"},
};

#endif
