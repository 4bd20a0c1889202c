/* kernels_simulate.h - what kernels.h has for the other operations, for simulate. */
#ifndef H2O_CUDA_KERNELS_SIMULATE_H
#define H2O_CUDA_KERNELS_SIMULATE_H

#include "kernels.h"

enum {
#ifdef H2O_SMALL_BLOCKS /* for ThreadSanitizer, and for tests of cells that do not fit */
    WINDOW_THREADS = 128,
    WINDOW_CACHED = 10 << 10,
#else
    WINDOW_THREADS = 256,     /* of a block that goes through a window of a text, and ... */
    WINDOW_CACHED = 56 << 10, /* ... bytes of its shared memory, including ... */
#endif
    WINDOW_KEPT = 8192,   /* ... those of window_buffer */
    WINDOW_QUERIES = 128, /* queries of a window of all R heads, at most; tokens: at most ... */
    WINDOW_MOST = 64,
    WINDOW_LEAST = 8,   /* ... and at least */
    WINDOW_BLOCKS = 64, /* blocks of a head that compute the logits of a window, at most */
    VALUES_PARTS = 8,   /* blocks that share the cells of a window's values */
    LOGITS_DEPTH = 64,  /* elements of keys, and ... */
    VALUES_DEPTH = 32,  /* ... of values that a block has in shared memory at a time, and ... */
    VALUES_CELLS = 128, /* ... number of such values; bytes of both in turn: */
    WINDOW_SHARED = 4 * VALUES_CELLS * (ATTEND_TILE + VALUES_DEPTH + 8),
    WINDOW_DEPTH = 64, /* elements of both with tensor cores; rows of them per thread: */
    WINDOW_FETCHED = MATRIX_ROWS * WINDOW_DEPTH / RUN / ATTEND_THREADS
};

/* Number of tokens of a window. */
H2O_INLINE int64_t cuda_window(int64_t R) {
    const int64_t tokens = R > 0 ? WINDOW_QUERIES / R : 0;
    return tokens > WINDOW_MOST ? WINDOW_MOST : tokens < WINDOW_LEAST ? WINDOW_LEAST : tokens;
}

/* The workspaces of attend and of evict, then the state of each head: its held keys, for all tokens
 * of a text and one more, and its window of W tokens (window.cuh). */
typedef struct {
    int64_t slots, window;           /* W */
    int64_t pitch;                   /* slots, rounded up to multiples of 16 bytes */
    size_t evict;                    /* begin of evict's workspace; attend's is at 0 */
    size_t scores, positions, norms; /* [B][G][slots] */
    size_t windows;                  /* [B][G] i32: windows that are done */
    size_t tokens;                   /* [2][B][G][slots] i32: for odd and for even windows */
    size_t new_cells;                /* [B][G][W] i32 */
    size_t logits;                   /* [B][G][W][R][pitch] f32, then exponentials */
    size_t inverse;                  /* [B][G][W][R] f32: 1 / sum of the exponentials */
    int64_t depth;                   /* D, rounded up to whole parts of a block */
    size_t products;                 /* [B][G][VALUES_PARTS][W][R][depth] f32: weights by values */
    size_t parts_done;               /* [B][G][tiles] u32: finished blocks of a tile of products */
    int64_t tiles;                   /* of products, at most */
    size_t bytes;
} simulate_layout;

H2O_INLINE simulate_layout cuda_simulate_layout(const h2o_simulate_params *p) {
    const h2o_dims *const d = &p->dims;
    const int64_t heads = d->B * d->G;
    simulate_layout at = {};
    const int64_t S = at.slots = d->Q + 1, W = at.window = cuda_window(d->R);
    at.pitch = cuda_ceil(S, 4) * 4;
    at.bytes = cuda_attend_layout(d, 0).bytes;
    at.evict = cuda_take(&at.bytes, (int64_t)cuda_evict_layout(d, S, &p->policy).bytes, 1);
    at.scores = cuda_take(&at.bytes, heads * S, sizeof(float));
    at.positions = cuda_take(&at.bytes, heads * S, sizeof(int32_t));
    at.norms = cuda_take(&at.bytes, heads * S, sizeof(float));
    at.windows = cuda_take(&at.bytes, heads, sizeof(int32_t));
    at.tokens = cuda_take(&at.bytes, 2 * heads * S, sizeof(int32_t));
    at.new_cells = cuda_take(&at.bytes, heads * W, sizeof(int32_t));
    at.logits = cuda_take(&at.bytes, heads * W * d->R * at.pitch, sizeof(float));
    at.inverse = cuda_take(&at.bytes, heads * W * d->R, sizeof(float));
    at.depth = cuda_ceil(d->D, WINDOW_DEPTH) * WINDOW_DEPTH;
    at.products = cuda_take(&at.bytes, heads * VALUES_PARTS * W * d->R * at.depth, sizeof(float));
    at.tiles = cuda_ceil(W * d->R, ATTEND_TILE) * cuda_ceil(d->D, VALUES_DEPTH);
    at.parts_done = cuda_take(&at.bytes, heads * at.tiles, sizeof(uint32_t));
    return at;
}

/* Shared memory of window_rows: window_buffer and, for each query head, its own softmax and those
 * of the warps. The rest caches the state of the cells and a row of logits if they fit. */
H2O_INLINE unsigned cuda_window_kept(int64_t R) {
    return WINDOW_KEPT + (unsigned)(R * (WINDOW_THREADS / 32 + 1) * 8);
}

H2O_INLINE unsigned cuda_window_shared(int64_t R) {
    const unsigned kept = cuda_window_kept(R);
    return kept > WINDOW_CACHED ? kept : WINDOW_CACHED;
}

#endif
