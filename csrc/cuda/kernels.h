/* kernels.h - what the kernels and those who launch them agree on: sizes of blocks, and
 * where things lie in the workspace. From shapes alone, since nobody reads a tensor
 * before a launch; nothing depends on B, so that a row's answer does not either. */
#ifndef H2O_CUDA_KERNELS_H
#define H2O_CUDA_KERNELS_H

#include "../h2o.h"

enum {
    CUDA_DEPTH = 256,   /* the largest head dimension */
    STEP_THREADS = 128, /* of a block */
    STEP_SLOTS = 128,   /* of a head that a block likes to have, ... */
    STEP_PARTS = 16,    /* ... in no more blocks than this */
#ifdef H2O_SMALL_BLOCKS /* for ThreadSanitizer, which tells only so many apart */
    EVICT_THREADS = 128,
#else
    EVICT_THREADS = 256,
#endif
    ATTEND_THREADS = 128,
    ATTEND_TILE = 32, /* queries, and keys, that a block looks at together; */
    MATRIX_ROWS = 64, /* by the tensor cores: those that stay with it */
    STEP_HEADS = 4,   /* query heads that go through the keys together */
    STEP_AHEAD = 4,   /* slots whose rows a thread loads before it uses the first */
    TEAM = 8,         /* threads that share a key */
    RUN = 8           /* elements of a row that a thread reads at a time */
};

H2O_INLINE int64_t cuda_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- Workspace ----------------------------------------------------------- */

/* Takes `count` things of `size` bytes from a workspace; returns where they are. */
H2O_INLINE size_t cuda_take(size_t *used, int64_t count, size_t size) {
    const size_t at = *used;
    *used = at + ((size_t)count * size + 255) / 256 * 256;
    return at;
}

/* Floats of a row of D elements in runs. */
H2O_INLINE int64_t cuda_depth(int64_t D) { return cuda_ceil(D, RUN) * RUN; }

/* Slots of a head, or of all heads of a row where each has its own number. */
H2O_INLINE int64_t cuda_slots(const h2o_slots *slots) {
    return slots->keys.shape[slots->keys.ndim - 2];
}

/* ---- step ---------------------------------------------------------------- */

typedef struct {
    int64_t slots;  /* of all heads of a row */
    int64_t parts;  /* blocks that share a head */
    size_t heads;   /* [B][G] u32: parts that are done; both cleared before the launch */
    size_t rows;    /* [B] u32: heads that are done */
    size_t cleared; /* bytes of these two */
    size_t weights; /* [B][slots][R] f32 */
    size_t tops; /* [B][G][parts][R] f32: the highest logit, then the factor of its exponentials */
    size_t totals;  /* the same: the sum of the exponentials */
    size_t outputs; /* [B][G][parts][R][D] f32 */
    size_t bytes;
} step_layout;

H2O_INLINE step_layout cuda_step_layout(const h2o_step_params *p) {
    const h2o_dims *const d = &p->dims;
    const bool own = h2o_given(&p->slots.starts);
    const int64_t axis = cuda_slots(&p->slots), units = d->B * d->G;
    const int64_t each = own ? cuda_ceil(axis, d->G) : axis;
    const int64_t parts = cuda_ceil(each, STEP_SLOTS);
    step_layout at = {};
    at.slots = own ? axis : d->G * axis;
    at.parts = parts < STEP_PARTS ? parts : STEP_PARTS;
    at.heads = cuda_take(&at.bytes, units, sizeof(uint32_t));
    at.rows = cuda_take(&at.bytes, d->B, sizeof(uint32_t));
    at.cleared = at.bytes;
    at.weights = cuda_take(&at.bytes, d->B * at.slots * d->R, sizeof(float));
    at.tops = cuda_take(&at.bytes, units * at.parts * d->R, sizeof(float));
    at.totals = cuda_take(&at.bytes, units * at.parts * d->R, sizeof(float));
    at.outputs = cuda_take(&at.bytes, units * at.parts * d->R * d->D, sizeof(float));
    return at;
}

/* Shared memory of a block, in bytes: queries or partial sums, then what it agrees on. */
H2O_INLINE unsigned cuda_step_shared(void) {
    return (unsigned)(STEP_THREADS * STEP_HEADS * RUN * sizeof(float)) + 512;
}

/* ---- attend -------------------------------------------------------------- */

typedef struct {
    size_t all;     /* [B] i32: tokens of a row, ... */
    size_t tokens;  /* [B] i32: ... of which so many come */
    size_t columns; /* [B][Q] i32, of all */
    size_t weights; /* [B][Q] f32: what attention of a token's queries counts when all are there */
    size_t logs;    /* [B][H][Q] f32, of the sum of a token's exponentials */
    size_t bytes;
} attend_layout;

H2O_INLINE attend_layout cuda_attend_layout(const h2o_dims *d) {
    attend_layout at = {};
    at.all = cuda_take(&at.bytes, d->B, sizeof(int32_t));
    at.tokens = cuda_take(&at.bytes, d->B, sizeof(int32_t));
    at.columns = cuda_take(&at.bytes, d->B * d->Q, sizeof(int32_t));
    at.weights = cuda_take(&at.bytes, d->B * d->Q, sizeof(float));
    at.logs = cuda_take(&at.bytes, d->B * d->H * d->Q, sizeof(float));
    return at;
}

H2O_INLINE unsigned cuda_prepare_shared(void) { return 4096; }

/* Rows of 16-bit numbers that pass by, in a tile of the tensor cores. */
#define CUDA_MATRIX_COLUMNS(depth) ((depth) > 128 ? 32 : 64)

/* Bytes of attend_room and of matrix_room, whose templates the launch layer's compiler lacks. */
#define CUDA_ATTEND_SHARED(depth) (4 * ATTEND_TILE * (2 * ((depth) + 4) + (ATTEND_TILE + 4) + 1))
#define CUDA_MATRIX_SHARED(depth)                                                                  \
    (2 * (MATRIX_ROWS + 2 * CUDA_MATRIX_COLUMNS(depth)) * ((depth) + 8) +                          \
     4 * (MATRIX_ROWS + 4 * CUDA_MATRIX_COLUMNS(depth)))

/* ---- evict --------------------------------------------------------------- */

/* Of a head's candidates, slots first, then columns of new tokens. */
typedef struct {
    int64_t slots;  /* of a head at most */
    size_t rows;    /* [B] u32: heads that are done; cleared before the launch */
    size_t cleared; /* bytes of these */
    size_t keys;    /* [B][G][slots + Q] u32, of the ranks */
    size_t marks;   /* [B][G][slots + Q] u8: see evict.cuh */
    size_t order;   /* [B][G][Q] i32: tokens before a column */
    size_t norms;   /* [B][G][Q] f32, of new values; if they count */
    size_t holes;   /* [B][G][slots] i32, and what comes into them: */
    size_t sources; /* [B][G][slots + Q] i32 candidates */
    size_t leavers; /* [B][G][slots + Q] i32 candidates that are to be merged, by position; */
    size_t members; /* [B][G][slots] of stored ones, */
    size_t saved;   /* [B][G][slots] and their rows; all three only if keys are merged */
    int64_t row;    /* bytes of such a row, key and value */
    size_t bytes;
} evict_layout;

/* Bytes of a row of keys and one of values. */
H2O_INLINE int64_t cuda_row_bytes(const h2o_view *keys, const h2o_view *values, int64_t D) {
    return h2o_row_bytes(h2o_stored_type(keys, D), D) +
           h2o_row_bytes(h2o_stored_type(values, D), D);
}

/* S: slots of a head at most; row: see cuda_row_bytes. */
H2O_INLINE evict_layout cuda_evict_layout(const h2o_dims *d, int64_t S, int64_t row,
                                          const h2o_policy *policy) {
    evict_layout at = {};
    const int64_t units = d->B * d->G, B = d->B, Q = d->Q, stored = S < Q ? S : Q;
    const bool merges = policy->merge > 0.0f;
    at.slots = S;
    at.rows = cuda_take(&at.bytes, B, sizeof(uint32_t));
    at.cleared = at.bytes;
    at.keys = cuda_take(&at.bytes, units * (S + Q), sizeof(uint32_t));
    at.marks = cuda_take(&at.bytes, units * (S + Q), 1);
    at.order = cuda_take(&at.bytes, units * Q, sizeof(int32_t));
    at.norms = cuda_take(&at.bytes, policy->value_weighted ? units * Q : 0, sizeof(float));
    at.holes = cuda_take(&at.bytes, units * S, sizeof(int32_t));
    at.sources = cuda_take(&at.bytes, units * (S + Q), sizeof(int32_t));
    at.leavers = cuda_take(&at.bytes, merges ? units * (S + Q) : 0, sizeof(int32_t));
    at.members = cuda_take(&at.bytes, merges ? units * stored : 0, 12);
    at.row = cuda_ceil(row, 16) * 16;
    at.saved = cuda_take(&at.bytes, merges ? units * stored : 0, (size_t)at.row);
    return at;
}

/* Those of a call of evict. */
H2O_INLINE evict_layout cuda_evict_call(const h2o_evict_params *p) {
    const int64_t row = cuda_row_bytes(&p->slots.keys, &p->slots.values, p->dims.D);
    return cuda_evict_layout(&p->dims, cuda_slots(&p->slots), row, &p->policy);
}

/* Shared memory of a block, in bytes: rows of one that leaves, as bytes and as floats. */
H2O_INLINE unsigned cuda_evict_shared(void) {
    return (unsigned)((2 + 4) * CUDA_DEPTH * sizeof(float)) + 4096;
}

/* ---- simulate ------------------------------------------------------------ */

/* Each head has a store of its own, with room for all tokens of a text and one more. */
typedef struct {
    int64_t slots;
    size_t evict;                          /* where its workspace begins; that of attend at 0 */
    size_t keys, values;                   /* [B][G][slots] rows, ... */
    int64_t key_bytes, value_bytes;        /* ... so many bytes apart */
    size_t scores, positions, norms, bias; /* [B][G][slots] */
    size_t lost, free;                     /* [B][G] f64, i32 */
    size_t weights;                        /* [B][G][slots][R] f32; see step_layout from here on */
    size_t tops, totals;                   /* [B][G][R] f32 */
    size_t outputs;                        /* [B][G][R][D] f32 */
    size_t bytes;
} simulate_layout;

H2O_INLINE const h2o_view *cuda_stored_like(const h2o_view *given, const h2o_view *stored) {
    return h2o_given(stored) ? stored : given;
}

H2O_INLINE simulate_layout cuda_simulate_layout(const h2o_simulate_params *p) {
    const h2o_dims *const d = &p->dims;
    const h2o_view *const keys = cuda_stored_like(&p->keys, &p->stored_keys);
    const h2o_view *const values = cuda_stored_like(&p->values, &p->stored_values);
    const int64_t units = d->B * d->G;
    simulate_layout at = {};
    const int64_t S = at.slots = d->Q + 1;
    at.bytes = cuda_attend_layout(d).bytes;
    at.evict = cuda_take(
        &at.bytes,
        (int64_t)cuda_evict_layout(d, S, cuda_row_bytes(keys, values, d->D), &p->policy).bytes, 1);
    at.key_bytes = cuda_ceil(h2o_row_bytes(h2o_stored_type(keys, d->D), d->D), 16) * 16;
    at.value_bytes = cuda_ceil(h2o_row_bytes(h2o_stored_type(values, d->D), d->D), 16) * 16;
    at.keys = cuda_take(&at.bytes, units * S, (size_t)at.key_bytes);
    at.values = cuda_take(&at.bytes, units * S, (size_t)at.value_bytes);
    at.scores = cuda_take(&at.bytes, units * S, sizeof(float));
    at.positions = cuda_take(&at.bytes, units * S, sizeof(int32_t));
    at.norms = cuda_take(&at.bytes, units * S, sizeof(float));
    at.bias = cuda_take(&at.bytes, units * S, sizeof(float));
    at.lost = cuda_take(&at.bytes, units, sizeof(double));
    at.free = cuda_take(&at.bytes, units, sizeof(int32_t));
    at.weights = cuda_take(&at.bytes, units * S * d->R, sizeof(float));
    at.tops = cuda_take(&at.bytes, units * d->R, sizeof(float));
    at.totals = cuda_take(&at.bytes, units * d->R, sizeof(float));
    at.outputs = cuda_take(&at.bytes, units * d->R * d->D, sizeof(float));
    return at;
}

H2O_INLINE unsigned cuda_simulate_shared(void) {
    const unsigned step = cuda_step_shared(), evict = cuda_evict_shared();
    return step > evict ? step : evict;
}

#endif
