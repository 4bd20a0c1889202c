/* window.cuh - one key/value head of a text after its dense part, in windows of W tokens.
 *
 * After the dense part a query sees the kept keys and its own, and the key that is evicted after it
 * determines what the next query sees. But the queries of a window can see only the keys that are
 * kept at its start and its own W keys. So each window takes three kernels:
 *
 *   logits   of all its queries over these keys, by many blocks per head (window_tiles.cuh);
 *   rows     one block per head goes token by token: softmax over the keys that are still held,
 *            scores, and the key to evict, using the logits (window_rows.cuh);
 *   values   the weights times the values, again by many blocks.
 *
 * Each key is in a cell, which is a slot of a store without rows, since a cell's key and value are
 * read from the tensors by the index of its token. The window's new keys get empty cells; a cell
 * that is emptied stays empty until the next window. `tokens` has the token that was in a cell
 * during a window, `positions` the token that is held now; -1: none. Logits, and later weights, are
 * rows [W, R] of cells; the weight of a key that is not held is -1, as in attend_tiles.cuh.
 *
 * The number of windows that are done is counted in the workspace, since every launch of a kernel
 * has the same parameters. */
#ifndef H2O_CUDA_WINDOW_CUH
#define H2O_CUDA_WINDOW_CUH

#include "simulate_head.cuh"

typedef struct {
    simulate_head head;
    int64_t number, first, count; /* of the window; its first token, and its number of tokens */
    int64_t ld; /* floats from row to row of logits; at most 3 of them belong to no cell */
    int32_t *windows, *tokens, *next_tokens, *new_cells; /* see simulate_layout */
    float *logits, *inverse, *products;
    int64_t pitch; /* floats from row to row of products */
    uint32_t *parts_done;
    float *cache; /* of a row of logits, in shared memory; NULL if there is no room */
} text_window;

/* Opens the next window, or the one before it if `over` is 1. */
DEVICE text_window open_window(const h2o_simulate_params *p, char *workspace, int64_t b, int64_t g,
                               int64_t over) {
    const simulate_layout at = cuda_simulate_layout(p);
    const int64_t R = p->dims.R, heads = p->dims.B * p->dims.G;
    text_window w = {};
    w.head = open_head(p, &at, workspace, b, g);
    const int64_t i = w.head.index;
    w.windows = (int32_t *)(workspace + at.windows) + i;
    w.number = *w.windows - over;
    w.first = w.head.dense + w.number * at.window;
    w.count = clamp(w.head.tokens - w.first, 0, at.window);
    int32_t *const tokens = (int32_t *)(workspace + at.tokens);
    w.tokens = tokens + (w.number % 2 * heads + i) * at.slots;
    w.next_tokens = tokens + ((w.number + 1) % 2 * heads + i) * at.slots;
    w.new_cells = (int32_t *)(workspace + at.new_cells) + i * at.window;
    w.ld = cuda_ceil(w.head.head.slots, 4) * 4;
    w.logits = (float *)(workspace + at.logits) + i * at.window * R * at.pitch;
    w.inverse = (float *)(workspace + at.inverse) + i * at.window * R;
    w.products = (float *)(workspace + at.products) + i * VALUES_PARTS * at.window * R * at.depth;
    w.pitch = at.depth;
    w.parts_done = (uint32_t *)(workspace + at.parts_done) + i * at.tiles;
    return w;
}

/* Chooses the cells of the next window's tokens, which begin at `first`. If there are none, the
 * text is over. */
DEVICE void choose_cells(const simulate_head *h, int64_t first, int64_t W, int32_t *tokens,
                         int32_t *new_cells, select_buffer *buffer) {
    const h2o_simulate_params *const p = h->p;
    const slot_store *const store = &h->store;
    const int64_t count = lower(h->tokens - first, W);
    if (count <= 0) {
        record_kept(h);
        return;
    }
    compact(
        h->head.slots, 0, buffer, [&](int64_t s) { return store->positions[s]; },
        [](int32_t position) { return position < 0; },
        [&](int64_t s, int64_t index) {
            if (index < count) new_cells[index] = (int32_t)s;
        });
    NO_UNROLL
    for (int64_t s = threadIdx.x; s < h->head.slots; s += blockDim.x)
        tokens[s] = store->positions[s];
    sync_block();
    NO_UNROLL
    for (int64_t i = threadIdx.x / 32; i < count; i += blockDim.x / 32) {
        const int32_t cell = new_cells[i];
        float norm = 0.0f;
        if (store->norms)
            norm = norm_of(tensor_row(&p->values, h->b, h->g, h->columns[first + i]), p->dims.D);
        if (threadIdx.x % 32 != 0) continue;
        if (store->norms) store->norms[cell] = norm;
        tokens[cell] = (int32_t)(first + i);
    }
}

/* Prunes the prompt before the first window. */
DEVICE void open_windows(const h2o_simulate_params *p, char *workspace, select_buffer *buffer) {
    const simulate_layout at = cuda_simulate_layout(p);
    const simulate_head h = open_head(p, &at, workspace, blockIdx.y, blockIdx.x);
    clear_head(&h);
    if (threadIdx.x == 0) ((int32_t *)(workspace + at.windows))[h.index] = 0;
    NO_UNROLL
    for (int64_t i = threadIdx.x; i < at.tiles; i += blockDim.x)
        ((uint32_t *)(workspace + at.parts_done))[h.index * at.tiles + i] = 0;
    if (h.tokens == 0) return;
    prune_prompt(&h, &at, workspace, buffer);
    choose_cells(&h, h.dense, at.window, (int32_t *)(workspace + at.tokens) + h.index * at.slots,
                 (int32_t *)(workspace + at.new_cells) + h.index * at.window, buffer);
}

#endif
