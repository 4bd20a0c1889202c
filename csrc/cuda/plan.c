/* plan.c - chooses the kernels that an operation launches: see plan.h. */
#include "plan.h"

#include "../policy.h"

enum { KINDS = 3, SIZES = 3 }; /* any floats, float16, bfloat16; sizes of head dimensions */
enum {
    PREPARE,
    EVICT,
    MOVE,
    STEP,
    SIMULATE_PREPARE,
    SIMULATE_OPEN,
    SIMULATE_ROWS,
    SIMULATE_LOGITS,
    SIMULATE_VALUES = SIMULATE_LOGITS + KINDS,
    KNOWN = SIMULATE_VALUES + KINDS,
    FORWARD
};
enum {
    SUMS = FORWARD + KINDS * SIZES,
    STEP_MATRICES = SUMS + KINDS * SIZES,
    STEP_BYTES = STEP_MATRICES + (KINDS - 1) * SIZES
};

/* The instances of a kernel: for each kind of numbers; for each size of head dimensions; and for
 * each kind (HALF_SIZES: without floats) each size. */
#define EACH_KIND(name) name, name "_f16", name "_bf16"
#define EACH_SIZE(name) name "_64", name "_128", name "_256"
#define HALF_SIZES(name) EACH_SIZE(name "_f16"), EACH_SIZE(name "_bf16")
#define ALL_SIZES(name) EACH_SIZE(name), HALF_SIZES(name)

const char *const cuda_kernel_names[CUDA_KERNELS] = {
    [PREPARE] = "h2o_cuda_prepare",
    [EVICT] = "h2o_cuda_evict",
    [MOVE] = "h2o_cuda_move",
    [STEP] = "h2o_cuda_step",
    [SIMULATE_PREPARE] = "h2o_cuda_simulate_prepare",
    [SIMULATE_OPEN] = "h2o_cuda_simulate_open",
    [SIMULATE_ROWS] = "h2o_cuda_simulate_rows",
    [SIMULATE_LOGITS] = EACH_KIND("h2o_cuda_simulate_logits"),
    [SIMULATE_VALUES] = EACH_KIND("h2o_cuda_simulate_values"),
    [KNOWN] = "h2o_cuda_known",
    [FORWARD] = ALL_SIZES("h2o_cuda_forward"),
    [SUMS] = ALL_SIZES("h2o_cuda_sums"),
    [STEP_MATRICES] = HALF_SIZES("h2o_cuda_step"),
    [STEP_BYTES] = HALF_SIZES("h2o_cuda_step_bytes"),
};

static void add_launch(cuda_plan *plan, int kernel, const void *params, size_t size, int64_t x,
                       int64_t y, int64_t z, unsigned block, unsigned shared) {
    if (x * y * z == 0) return;
    plan->launch[plan->count++] =
        (cuda_launch){kernel, params, size, {(unsigned)x, (unsigned)y, (unsigned)z}, block, shared};
}

/* The index of the smallest kernel depth that has room for a head dimension, and that depth. */
static int size_of(int64_t D) { return D <= 64 ? 0 : D <= 128 ? 1 : 2; }
static int depth_of(int64_t D) { return 64 << size_of(D); }

/* The index of KINDS for numbers of a dtype. */
static int kind_of(h2o_dtype type, bool matrices) {
    return !matrices ? 0 : type == H2O_F16 ? 1 : 2;
}

/* Adds forward (or known, if the log sums are known) and sums; a prepare kernel must come
 * before. */
static void add_attention(cuda_plan *plan, const h2o_attend_params *params) {
    const h2o_dims *const d = &params->dims;
    const bool matrices = cuda_fits_matrices(params);
    const int kind = kind_of(params->query.dtype, matrices);
    const int size = size_of(d->D), depth = depth_of(d->D);
    const int tile = matrices ? MATRIX_ROWS : ATTEND_TILE;
    const int forward = matrices ? CUDA_MATRIX_SHARED(depth) : CUDA_ATTEND_SHARED(depth);
    const int sums = matrices ? CUDA_SUMS_SHARED(depth) : CUDA_ATTEND_SHARED(depth);
    const int rows = matrices ? CUDA_SUMS_ROWS(depth) : ATTEND_TILE;
    const int64_t S = cuda_attend_slots(params);
    if (kind == 2) plan->capability = 80;
    if (h2o_given(&params->known_log_sums)) {
        add_launch(plan, KNOWN, params, sizeof *params, cuda_ceil(d->Q, ATTEND_THREADS), d->H, d->B,
                   ATTEND_THREADS, 0);
    } else {
        add_launch(plan, FORWARD + kind * SIZES + size, params, sizeof *params,
                   cuda_ceil(d->Q, tile), d->H, d->B, ATTEND_THREADS, (unsigned)forward);
    }
    add_launch(plan, SUMS + kind * SIZES + size, params, sizeof *params,
               cuda_sums_blocks(cuda_ceil(S, rows), cuda_ceil(d->Q, rows)),
               d->G * cuda_sums_parts(d, S), d->B, ATTEND_THREADS, (unsigned)sums);
}

/* Bytes of counters that sums needs. */
static size_t counted_parts(const h2o_dims *d, int64_t S) {
    return cuda_sums_parts(d, S) > 1 ? cuda_attend_layout(d, S).counted : 0;
}

static void plan_attend(const h2o_attend_params *params, cuda_plan *plan) {
    const int64_t S = cuda_attend_slots(params);
    *plan = (cuda_plan){.workspace = cuda_attend_layout(&params->dims, S).bytes,
                        .counted = counted_parts(&params->dims, S),
                        .depth = CUDA_DEPTH};
    add_launch(plan, PREPARE, params, sizeof *params, params->dims.B, 1, 1, EVICT_THREADS,
               SELECT_SHARED);
    add_attention(plan, params);
}

static void plan_evict(const h2o_evict_params *params, cuda_plan *plan) {
    const h2o_dims *const d = &params->dims;
    const evict_layout at = cuda_evict_call(params);
    *plan = (cuda_plan){.workspace = at.bytes, .counted = at.counted, .depth = CUDA_WIDE};
    add_launch(plan, EVICT, params, sizeof *params, d->G, d->B, 1, EVICT_THREADS, SELECT_SHARED);
    add_launch(plan, MOVE, params, sizeof *params, 2 * cuda_move_blocks(params), d->G, d->B,
               MOVE_THREADS, 0);
}

/* Whether all rows [D] of a tensor are aligned to this many bytes, and are not too far apart. */
static bool has_aligned_rows(const h2o_view *rows, unsigned bytes) {
    uint64_t bits = (uintptr_t)rows->data;
    for (int i = 0; i < rows->ndim - 1; i++)
        bits |= (uint64_t)rows->stride[i] * (uint64_t)h2o_dtype_size(rows->dtype);
    return bits % bytes == 0 && rows->stride[rows->ndim - 1] == 1 &&
           rows->stride[rows->ndim - 2] < INT32_MAX / (STEP_ROWS * 4);
}

/* Whether a step can use tensor cores: its rows must be as step_rows.cuh reads them. */
static bool is_step_of_matrices(const h2o_step_params *p) {
    const h2o_dtype type = p->query.dtype;
    const h2o_view *const keys = &p->slots.keys, *const values = &p->slots.values;
    const h2o_dtype of_keys = h2o_stored_type(keys, p->dims.D);
    const h2o_dtype of_values = h2o_stored_type(values, p->dims.D);
    const unsigned words = h2o_row_has_scale(of_values) ? 2 : 4;
    if (!cuda_is_half(type) || p->dims.D % RUN != 0 || p->dims.D > CUDA_DEPTH) return false;
    if (!has_aligned_rows(&p->query, 2)) return false;
    if (h2o_given(&p->rotary.table)) return false;
    if (of_keys == type && of_values == type)
        return has_aligned_rows(keys, 16) && has_aligned_rows(values, 16);
    /* as step_matrix.cuh combines them */
    const bool known = h2o_row_is_grouped(of_values) || !h2o_row_is_grouped(of_keys);
    return known && h2o_row_is_quantized(of_keys) && h2o_row_is_quantized(of_values) &&
           has_aligned_rows(keys, 2) && has_aligned_rows(values, words);
}

static void plan_step(const h2o_step_params *params, cuda_plan *plan) {
    const step_layout at = cuda_step_layout(params);
    const h2o_dims *const d = &params->dims;
    const bool matrices = is_step_of_matrices(params);
    const h2o_dtype type = params->query.dtype;
    const bool floats = h2o_stored_type(&params->slots.keys, d->D) == type;
    const int kind = kind_of(type, true) - 1; /* among the kinds of matrices */
    const int first = (floats ? STEP_MATRICES : STEP_BYTES) + kind * SIZES;
    *plan = (cuda_plan){.workspace = at.bytes, .counted = at.counted, .depth = CUDA_WIDE};
    const int64_t blocks = matrices ? cuda_step_blocks(at.parts, d->B * d->G, !floats) : at.parts;
    add_launch(plan, matrices ? first + size_of(d->D) : STEP, params, sizeof *params, blocks, d->G,
               d->B, STEP_THREADS, cuda_step_shared(matrices ? depth_of(d->D) : 0, !floats));
}

/* Adds the windows over the tokens after the dense part, which has at least one token. */
static void add_windows(cuda_plan *plan, const h2o_simulate_params *params) {
    const h2o_dims *const d = &params->dims;
    const bool matrices = cuda_fits_matrices(&plan->dense) && !h2o_given(&params->stored_keys);
    const int kind = kind_of(params->query.dtype, matrices), before = plan->count;
    const int tile = matrices ? MATRIX_ROWS : ATTEND_TILE;
    const int depth = matrices ? WINDOW_DEPTH : VALUES_DEPTH;
    const unsigned shared = matrices ? CUDA_MATRIX_SHARED(WINDOW_DEPTH) : WINDOW_SHARED;
    const int64_t W = cuda_window(d->R), windows = cuda_ceil(d->Q - 1, W);
    const int64_t rows = cuda_ceil(W * d->R, tile), tiles = rows * cuda_ceil(d->Q, tile);
    if (windows == 0) return;
    add_launch(plan, SIMULATE_LOGITS + kind, params, sizeof *params,
               tiles < WINDOW_BLOCKS ? tiles : WINDOW_BLOCKS, d->G, d->B, ATTEND_THREADS, shared);
    add_launch(plan, SIMULATE_ROWS, params, sizeof *params, d->G, d->B, 1, WINDOW_THREADS,
               cuda_window_shared(d->R));
    add_launch(plan, SIMULATE_VALUES + kind, params, sizeof *params,
               rows * cuda_ceil(d->D, depth) * VALUES_PARTS, d->G, d->B, ATTEND_THREADS, shared);
    plan->repeated = plan->count - before;
    plan->repeats = windows - 1;
}

static void plan_simulate(const h2o_simulate_params *params, cuda_plan *plan) {
    const h2o_dims *const d = &params->dims;
    *plan = (cuda_plan){.workspace = cuda_simulate_layout(params).bytes,
                        .counted = counted_parts(d, 0),
                        .depth = CUDA_DEPTH};
    plan->dense = h2o_dense_part(params);
    add_launch(plan, SIMULATE_PREPARE, params, sizeof *params, d->B, 1, 1, EVICT_THREADS,
               SELECT_SHARED);
    add_attention(plan, &plan->dense);
    add_launch(plan, SIMULATE_OPEN, params, sizeof *params, d->G, d->B, 1, EVICT_THREADS,
               SELECT_SHARED);
    add_windows(plan, params);
}

void cuda_plan_call(h2o_operation operation, const void *params, cuda_plan *plan) {
    switch (operation) {
#define CASE(name, NAME)                                                                           \
    case H2O_##NAME:                                                                               \
        plan_##name(params, plan);                                                                 \
        return;
        H2O_EACH_OPERATION(CASE)
#undef CASE
    default:
        *plan = (cuda_plan){0};
    }
}
