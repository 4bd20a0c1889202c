/* kernels.h - shared by host and device code: threads of a block, sizes of tiles, bytes of shared
 * memory, and the layout of each operation's workspace.
 *
 * A *_layout holds byte offsets into the workspace. plan.c, which reports its size, and the kernels
 * compute it in the same way, from shapes alone, since no tensor is read before a launch. Block
 * sizes and splits do not depend on B, so neither does the result of a row.
 *
 * Shape letters as in h2o.h: B rows, G key/value heads, R query heads of each, Q new tokens,
 * S slots of a head, D head dimension. */
#ifndef H2O_CUDA_KERNELS_H
#define H2O_CUDA_KERNELS_H

#include "../operations.h"

enum {
    CUDA_DEPTH = 256,   /* the largest head dimension (but see CUDA_WIDE), and ... */
    CUDA_GROUP = 1024,  /* ... number of query heads of a key/value head */
    STEP_THREADS = 128, /* of a block */
    STEP_SLOTS = 128,   /* slots of a part of a head, ... */
    STEP_PARTS = 64,    /* ... and number of parts of a head, at most */
#ifdef H2O_SMALL_BLOCKS /* for ThreadSanitizer, whose number of threads is limited, and tests */
    EVICT_THREADS = 128,
    STEP_BLOCKS = 4,
    STEP_QUANTIZED_BLOCKS = 4,
#else
    EVICT_THREADS = 256,
    STEP_BLOCKS = 1536,          /* blocks of a step, before they get several parts each, ... */
    STEP_QUANTIZED_BLOCKS = 384, /* ... and of a step over quantized rows */
#endif
    MOVE_THREADS = 128,
    MOVE_ROWS = 32, /* keys, or values, per block that moves them */
    ATTEND_THREADS = 128,
    ATTEND_TILE = 32,    /* queries, and keys, of a tile of logits */
    MATRIX_ROWS = 64,    /* with tensor cores: rows of such a tile, see CUDA_MATRIX_COLUMNS */
    SUMS_BLOCKS = 1024,  /* desired blocks of sums for a row, of 128 keys each, ... */
    SUMS_PARTS = 8,      /* ... parts of the queries of a tile of keys, at most, ... */
    SUMS_TILES = 32,     /* ... and tiles of queries of a part: see cuda_sums_parts */
    STEP_HEADS = 4,      /* query heads for which a key is loaded once */
    STEP_COLUMNS = 8,    /* with tensor cores: such heads, columns of a matrix, ... */
    STEP_ROWS = 16,      /* ... and slots that a warp multiplies at a time */
    STEP_LOADS = 4,      /* slots whose rows a thread loads before it uses the first */
    SCORES_LOADED = 8,   /* at the end: slots whose logits and scores it loads likewise, ... */
    STEP_PARTS_READ = 8, /* ... and parts */
    TEAM = 8,            /* threads that compute a dot product together */
    STEP_TEAMS = STEP_THREADS / TEAM,
    STEP_WARPS = STEP_THREADS / 32,
    RUN = 8,                        /* elements of a row that a thread reads at a time */
    CUDA_SLOTS = 1 << 25,           /* limit of the slots of a head */
    CUDA_WIDE = STEP_THREADS * RUN, /* largest row, in elements, for a step and for pruning */
    STEP_FLOATS = STEP_THREADS * STEP_HEADS * RUN, /* shared: queries, partial sums, factors */
    STEP_KEPT = 1024, /* bytes for reductions, and for what a block keeps to the end of a step */
    SELECT_SHARED = 4096, /* bytes for a select_buffer */
};

H2O_INLINE int64_t cuda_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- Workspace ----------------------------------------------------------- */

/* Reserves `count` elements of `size` bytes in a workspace; returns their offset. */
H2O_INLINE size_t cuda_take(size_t *used, int64_t count, size_t size) {
    const size_t at = *used;
    *used = at + ((size_t)count * size + 255) / 256 * 256;
    return at;
}

/* Bytes of counters [B][n] u32 at the beginning of a workspace. They are 0 before the first kernel
 * of a call; blocks that share a row or a head increment them as they finish. */
H2O_INLINE size_t cuda_counters(const h2o_dims *d, int64_t n) {
    return (size_t)(d->B * n) * sizeof(uint32_t);
}

/* D rounded up to whole runs. */
H2O_INLINE int64_t cuda_depth(int64_t D) { return cuda_ceil(D, RUN) * RUN; }

/* Slots of a head, or of all heads of a row if heads have different numbers (starts). */
H2O_INLINE int64_t cuda_slots(const h2o_slots *slots) {
    return slots->keys.shape[slots->keys.ndim - 2];
}

/* ---- step ---------------------------------------------------------------- */

typedef struct {
    int64_t slots;  /* of all heads of a row */
    int64_t parts;  /* of a head's slots (split along the keys): see cuda_step_blocks */
    size_t counted; /* bytes of counters [B][G + 1]: finished parts of each head, finished heads */
    size_t logits;  /* [B][G][R][slots of the head] f32 */
    size_t row_max; /* [B][G][parts][R] f32: highest logit */
    size_t row_sum; /* [B][G][parts][R] f32: sum of the exponentials relative to that */
    size_t outputs; /* [B][G][parts][R][D] f32: exponentials times values */
    size_t bytes;
} step_layout;

/* The number of parts of a head's slots. Shared memory must have room, for each of the R heads, for
 * a factor per part and two more numbers at the end. */
H2O_INLINE int64_t cuda_step_parts(int64_t slots, int64_t R) {
    const int64_t wanted = cuda_ceil(slots, STEP_SLOTS), fitting = STEP_FLOATS / (uint32_t)R - 2;
    const int64_t most = fitting < STEP_PARTS ? fitting : STEP_PARTS;
    return wanted < most ? wanted : most;
}

H2O_INLINE step_layout cuda_step_layout(const h2o_step_params *p) {
    const h2o_dims *const d = &p->dims;
    const bool ragged = h2o_given(&p->slots.starts);
    const int64_t axis = cuda_slots(&p->slots), heads = d->B * d->G;
    step_layout at = {};
    at.slots = ragged ? axis : d->G * axis;
    at.parts = cuda_step_parts(ragged ? cuda_ceil(axis, d->G) : axis, d->R);
    at.counted = cuda_counters(d, d->G + 1);
    cuda_take(&at.bytes, 1, at.counted);
    at.logits = cuda_take(&at.bytes, d->B * at.slots * d->R, sizeof(float));
    at.row_max = cuda_take(&at.bytes, heads * at.parts * d->R, sizeof(float));
    at.row_sum = cuda_take(&at.bytes, heads * at.parts * d->R, sizeof(float));
    at.outputs = cuda_take(&at.bytes, heads * at.parts * d->R * d->D, sizeof(float));
    return at;
}

/* Bytes of a warp's warp_outputs<depth> and float_ring<depth>; number of halves of the latter. */
#define CUDA_STEP_OUTPUTS(depth) (STEP_COLUMNS / 2 * 4 * (2 * (depth) + 4) + 8 * STEP_COLUMNS)
#define CUDA_STEP_HALVES(depth) ((depth) > 128 ? 2 : 3)
#define CUDA_STEP_RING(depth) (CUDA_STEP_HALVES(depth) * STEP_ROWS * 2 * (depth))

/* Bytes of a block's shared memory; depth: 0 without tensor cores. */
H2O_INLINE unsigned cuda_step_shared(int depth, bool bytes) {
    const unsigned of_warp = CUDA_STEP_OUTPUTS(depth) + (bytes ? 0 : CUDA_STEP_RING(depth));
    const unsigned of_warps = depth > 0 ? STEP_WARPS * of_warp : 0;
    const unsigned floats = STEP_FLOATS * sizeof(float);
    return (of_warps > floats ? of_warps : floats) + STEP_KEPT;
}

/* Number of blocks for the parts of each of `heads` heads: one per part as long as they are few,
 * else one for several parts in sequence, with one beginning and one end. Results are the same. */
H2O_INLINE int64_t cuda_step_blocks(int64_t parts, int64_t heads, bool bytes) {
    const int64_t blocks = bytes ? STEP_QUANTIZED_BLOCKS : STEP_BLOCKS;
    const int64_t most = heads < blocks ? blocks / heads : 1;
    return cuda_ceil(parts, cuda_ceil(parts, most));
}

/* ---- attend -------------------------------------------------------------- */

/* Keys of a block of sums with tensor cores: as many as fit into registers, 32 per warp. Keys of
 * longer rows do not fit. */
#define CUDA_SUMS_ROWS(depth) ((depth) > 128 ? 64 : 128)

typedef struct {
    size_t counted;    /* bytes of counters [B][G][tiles of keys]: finished parts, if several */
    size_t row_tokens; /* [B] i32: tokens of a row without padding, ... */
    size_t tokens;     /* [B] i32: ... and the number of them to which this call attends */
    size_t columns;    /* [B][Q] i32: the column of each token of a row on axis Q */
    size_t decays;     /* [B][Q] f32: decay weight of a query, decay^(number of later queries) */
    size_t row_max;    /* [B][H][Q] f32: of a query's logits */
    size_t factors;    /* [B][H][Q] f32: decay weight / sum of exp(logit - row max) */
    size_t sums;       /* [B][G][parts][slots + Q] f32: column sums of keys */
    size_t bytes;
} attend_layout;

/* Blocks of sums for a head: one for each tile of stored keys, and one for two tiles of new keys;
 * see each_key_tile. */
H2O_INLINE int64_t cuda_sums_blocks(int64_t stored_tiles, int64_t tiles) {
    return stored_tiles + cuda_ceil(tiles, 2);
}

/* The number of parts into which a group's queries are divided; a block adds up the column sums of
 * one part. There is one part if that makes SUMS_BLOCKS blocks. Otherwise there are as many as make
 * SUMS_BLOCKS, but no more than SUMS_PARTS, nor more than one per SUMS_TILES tiles of queries or
 * one per query head, whichever is more. A device works on some hundred blocks at a time; with
 * several times as many blocks, little of it idles while the last ones run. */
H2O_INLINE int cuda_sums_parts(const h2o_dims *d, int64_t S) {
    const int64_t rows = CUDA_SUMS_ROWS(d->D), R = d->R;
    const int64_t blocks = d->G * cuda_sums_blocks(cuda_ceil(S, rows), cuda_ceil(d->Q, rows));
    const uint32_t all =
        SUMS_BLOCKS * 128 / (uint32_t)rows; /* blocks of 64 keys have half the work */
    const uint32_t shared = blocks < all ? (uint32_t)blocks : all;
    const int64_t wanted = shared > 0 ? (all + shared - 1) / shared : 1;
    const int64_t tiles = R * cuda_ceil(d->Q, MATRIX_ROWS) / SUMS_TILES;
    const int64_t most = tiles > R ? tiles : R, parts = wanted < most ? wanted : most;
    return parts > SUMS_PARTS ? SUMS_PARTS : parts > 1 ? (int)parts : 1;
}

/* Number of tiles of ATTEND_TILE keys before that of slot or new key `first`; S as below. */
H2O_INLINE int64_t cuda_key_tile(int64_t S, bool stored, int64_t first) {
    return (stored ? 0 : cuda_ceil(S, ATTEND_TILE)) + first / ATTEND_TILE;
}
H2O_INLINE int64_t cuda_key_tiles(const h2o_dims *d, int64_t S) {
    return cuda_key_tile(S, false, d->Q + ATTEND_TILE - 1);
}

/* S: slots of a head at most; 0 if nothing is stored. */
H2O_INLINE attend_layout cuda_attend_layout(const h2o_dims *d, int64_t S) {
    attend_layout at = {};
    const int64_t parts = cuda_sums_parts(d, S);
    at.counted = cuda_counters(d, d->G * cuda_key_tiles(d, S));
    cuda_take(&at.bytes, 1, at.counted);
    at.row_tokens = cuda_take(&at.bytes, d->B, sizeof(int32_t));
    at.tokens = cuda_take(&at.bytes, d->B, sizeof(int32_t));
    at.columns = cuda_take(&at.bytes, d->B * d->Q, sizeof(int32_t));
    at.decays = cuda_take(&at.bytes, d->B * d->Q, sizeof(float));
    at.row_max = cuda_take(&at.bytes, d->B * d->H * d->Q, sizeof(float));
    at.factors = cuda_take(&at.bytes, d->B * d->H * d->Q, sizeof(float));
    at.sums = cuda_take(&at.bytes, d->B * d->G * parts * (S + d->Q), sizeof(float));
    return at;
}

/* Slots of a head at most, for a call of attend. */
H2O_INLINE int64_t cuda_attend_slots(const h2o_attend_params *p) {
    return p->has_slots ? cuda_slots(&p->slots) : 0;
}

H2O_INLINE bool cuda_is_half(h2o_dtype type) { return type == H2O_F16 || type == H2O_BF16; }

/* Whether tensor cores can be used: all numbers have the same 16-bit format, or are stored in a
 * format that matrix_tiles.cuh converts to it. */
H2O_INLINE bool cuda_fits_matrices(const h2o_attend_params *p) {
    const h2o_dtype type = p->query.dtype;
    if (!cuda_is_half(type)) return false;
    if (!p->has_slots) return true;
    const h2o_dtype keys = h2o_stored_type(&p->slots.keys, p->dims.D);
    const h2o_dtype values = h2o_stored_type(&p->slots.values, p->dims.D);
    return (keys == type || h2o_row_is_quantized(keys)) &&
           (values == type || h2o_row_is_quantized(values));
}

/* Columns of a tile of logits that tensor cores compute, with MATRIX_ROWS rows. */
#define CUDA_MATRIX_COLUMNS(depth) ((depth) > 128 ? 32 : 64)

/* Sizes of tile_buffer<depth>, matrix_buffer<depth> and sums_buffer<depth>, for the host's
 * compiler, which has no templates. */
#define CUDA_ATTEND_SHARED(depth) (4 * ATTEND_TILE * (2 * ((depth) + 4) + (ATTEND_TILE + 4) + 1))
#define CUDA_MATRIX_SHARED(depth)                                                                  \
    (2 * (MATRIX_ROWS + 2 * CUDA_MATRIX_COLUMNS(depth)) * (depth) + 4 * 2 * MATRIX_ROWS)
#define CUDA_SUMS_STAGES(depth) ((depth) > 128 ? 4 : 2)
#define CUDA_SUMS_SHARED(depth)                                                                    \
    (2 * CUDA_SUMS_STAGES(depth) * CUDA_MATRIX_COLUMNS(depth) * (depth) +                          \
     4 * (6 * CUDA_MATRIX_COLUMNS(depth) + 2 * CUDA_SUMS_ROWS(depth) + ATTEND_THREADS))

/* ---- evict --------------------------------------------------------------- */

/* A head has slots + Q candidates: its slots, then the columns of new tokens. */
typedef struct {
    int64_t slots;       /* of a head at most */
    size_t counted;      /* bytes of counters [B]: finished heads */
    size_t moves;        /* [B][G] i32: moves listed, see destinations */
    size_t rank_keys;    /* [B][G][slots + Q] u32: ranks as ordered integers, see policy.h */
    size_t marks;        /* [B][G][slots + Q] u8: see evict_list.cuh */
    size_t token_index;  /* [B][G][Q] i32: number of tokens before a column; -1: padding */
    size_t norms;        /* [B][G][Q] f32: of new values; if the policy is value-weighted */
    size_t destinations; /* [B][G][slots] i32: slots that are written, ... */
    size_t sources;      /* [B][G][slots + Q] i32: ... and the candidate moved into each */
    size_t bytes;
} evict_layout;

/* S: slots of a head at most. */
H2O_INLINE evict_layout cuda_evict_layout(const h2o_dims *d, int64_t S, const h2o_policy *policy) {
    evict_layout at = {};
    const int64_t heads = d->B * d->G, Q = d->Q;
    at.slots = S;
    at.counted = cuda_counters(d, 1);
    cuda_take(&at.bytes, 1, at.counted);
    at.moves = cuda_take(&at.bytes, heads, sizeof(int32_t));
    at.rank_keys = cuda_take(&at.bytes, heads * (S + Q), sizeof(uint32_t));
    at.marks = cuda_take(&at.bytes, heads * (S + Q), 1);
    at.token_index = cuda_take(&at.bytes, heads * Q, sizeof(int32_t));
    at.norms = cuda_take(&at.bytes, policy->value_weighted ? heads * Q : 0, sizeof(float));
    at.destinations = cuda_take(&at.bytes, heads * S, sizeof(int32_t));
    at.sources = cuda_take(&at.bytes, heads * (S + Q), sizeof(int32_t));
    return at;
}

/* The layout of a call of evict. */
H2O_INLINE evict_layout cuda_evict_call(const h2o_evict_params *p) {
    return cuda_evict_layout(&p->dims, cuda_slots(&p->slots), &p->policy);
}

/* Number of blocks that share the keys moving into a head's slots, and of blocks for the values. 0
 * if few can move: then the head's own block moves both. */
H2O_INLINE int64_t cuda_move_blocks(const h2o_evict_params *p) {
    const int64_t axis = cuda_slots(&p->slots), Q = p->dims.Q;
    const int64_t slots = h2o_given(&p->slots.starts) ? cuda_ceil(axis, p->dims.G) : axis;
    const int64_t blocks = cuda_ceil(slots < Q ? slots : Q, MOVE_ROWS);
    return blocks < 2 ? 0 : blocks;
}

#endif
