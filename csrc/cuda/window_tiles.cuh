/* window_tiles.cuh - the matrix products of a window (window.cuh): logits of its queries, and
 * weights times values. Row token * R + head of the window is a query of one head. */
#ifndef H2O_CUDA_WINDOW_TILES_CUH
#define H2O_CUDA_WINDOW_TILES_CUH

#include "forward.cuh"
#include "window.cuh"

/* Shared memory. */
typedef union {
    struct {
        float rows[ATTEND_TILE][LOGITS_DEPTH + 4];    /* queries */
        float columns[ATTEND_TILE][LOGITS_DEPTH + 4]; /* keys */
    } logits;
    struct {
        float weights[VALUES_CELLS / (int)ATTEND_TILE][ATTEND_TILE][ATTEND_TILE + 4];
        float values[VALUES_CELLS][VALUES_DEPTH + 4];
    } sums;
} window_buffers;

static_assert(sizeof(window_buffers) == WINDOW_SHARED);

/* ---- Keys and values of cells -------------------------------------------- */

/* Where the keys, or values, of all tokens are. */
typedef struct {
    row_ref row;     /* of the first token, ... */
    int64_t pitch;   /* ... and bytes from one row to the next */
    bool by_column;  /* rows are indexed by column, not by token */
} token_rows;

/* The rows of a tensor or, if given, those of a quantized store. */
DEVICE token_rows open_tokens(const text_window *w, const h2o_view *tensor,
                              const h2o_view *stored) {
    const simulate_head *const h = &w->head;
    const h2o_view *const like = h2o_given(stored) ? stored : tensor;
    token_rows rows = {};
    rows.row = tensor_row(like, h->b, h->g, 0);
    rows.pitch = like->stride[2] * h2o_dtype_size(like->dtype);
    if (h2o_given(stored)) {
        rows.row.type = h2o_stored_type(stored, h->p->dims.D);
        rows.row.stride = 1;
    } else {
        rows.by_column = h2o_given(&h->p->mask);
    }
    return rows;
}

/* Finds the tokens of N cells from `first` on, `step` apart, and their rows. If a cell has no
 * token, this is -1, and the row is any other. */
template <int N>
DEVICE void find_cells(const text_window *w, const token_rows *rows, int64_t first, int step,
                       int64_t token[N], const char *row[N]) {
    const int64_t cells = w->head.head.slots;
    UNROLL
    for (int k = 0; k < N; k++) {
        const int64_t cell = first + k * step;
        token[k] = w->tokens[lower(cell, cells - 1)];
        token[k] = cell < cells ? token[k] : -1;
    }
    UNROLL
    for (int k = 0; k < N; k++) {
        const int64_t at = higher(token[k], 0);
        row[k] = rows->row.data + (rows->by_column ? w->head.columns[at] : at) * rows->pitch;
    }
}

/* Loads elements d.. of the rows of ROWS cells from `first` on; zeros for cells without a token,
 * and past the last element. */
template <int DEPTH, int ROWS>
DEVICE void load_cells(float (*tile)[DEPTH + 4], const text_window *w, const token_rows *rows,
                       int64_t first, int64_t d) {
    const int runs = DEPTH / RUN, step = ATTEND_THREADS / runs, N = ROWS / step;
    const int top = threadIdx.x / runs, run = threadIdx.x % runs * RUN;
    const int64_t D = w->head.p->dims.D;
    int64_t token[N];
    const char *row[N];
    float x[N][RUN] = {};
    find_cells<N>(w, rows, first + top, step, token, row);
    if (d + run < D && rows->row.stride == 1) {
        load_rows<N>(row, rows->row.type, d + run, D, x);
    } else if (d + run < D) {
        UNROLL
        for (int k = 0; k < N; k++)
            load_strided(row_ref{row[k], rows->row.type, rows->row.stride}, d + run, D, x[k]);
    }
    UNROLL
    for (int k = 0; k < N; k++) {
        UNROLL
        for (int j = 0; j < RUN; j++) tile[top + k * step][run + j] = token[k] < 0 ? 0.0f : x[k][j];
    }
}

/* ---- Logits -------------------------------------------------------------- */

/* The column and the query head of a row of the window. */
DEVICE int64_t column_of_row(const text_window *w, uint32_t row) {
    return w->head.columns[w->first + row / (uint32_t)w->head.p->dims.R];
}

DEVICE int64_t head_of_row(const text_window *w, uint32_t row) {
    return w->head.g * w->head.p->dims.R + row % (uint32_t)w->head.p->dims.R;
}

DEVICE int64_t window_rows_of(const text_window *w) { return w->count * w->head.p->dims.R; }

/* A query from element d on; data is NULL past the last row. */
DEVICE row_ref query_row(const text_window *w, int64_t row, int64_t d) {
    const h2o_view *const from = &w->head.p->query;
    const uint32_t at = (uint32_t)lower(row, window_rows_of(w) - 1);
    row_ref query = tensor_row(from, w->head.b, head_of_row(w, at), column_of_row(w, at));
    query.data += d * query.stride * h2o_dtype_size(query.type);
    if (row >= window_rows_of(w)) query.data = NULL;
    return query;
}

/* Computes the logits of a tile of rows over a tile of cells. */
DEVICE void logits_tile(const text_window *w, const token_rows *keys, int64_t first_row,
                        int64_t first, window_buffers *buffer) {
    const h2o_simulate_params *const p = w->head.p;
    const int row = threadIdx.x / ROW_THREADS * THREAD_ROWS, column = threadIdx.x % ROW_THREADS;
    const int64_t D = p->dims.D;
    float dots[THREAD_ROWS][THREAD_COLUMNS] = {};
    for (int64_t d = 0; d < D; d += LOGITS_DEPTH) {
        sync_block(); /* all threads are done with the previous tile */
        load_tile<LOGITS_DEPTH>(buffer->logits.rows, D - d,
                                [&](int i) { return query_row(w, first_row + i, d); });
        load_cells<LOGITS_DEPTH, ATTEND_TILE>(buffer->logits.columns, w, keys, first, d);
        sync_block();
        add_tile_dots<LOGITS_DEPTH>(buffer->logits.rows, buffer->logits.columns, row, column, dots);
    }
    UNROLL
    for (int i = 0; i < THREAD_ROWS * THREAD_COLUMNS; i++) {
        const int64_t at = first_row + row + i / THREAD_COLUMNS;
        const int64_t cell = first + column + i % THREAD_COLUMNS * ROW_THREADS;
        if (at >= window_rows_of(w) || cell >= w->ld) continue;
        w->logits[at * w->ld + cell] =
            logit_of(dots[i / THREAD_COLUMNS][i % THREAD_COLUMNS], p->scale, p->softcap);
    }
}

/* Calls use(window, keys, row, cell) for this block's tiles, of ROWS rows and as many cells. */
template <int ROWS, typename USE>
DEVICE void each_logits_tile(const h2o_simulate_params *p, char *workspace, USE use) {
    const text_window w = open_window(p, workspace, blockIdx.z, blockIdx.y, 0);
    const int64_t row_tiles = cuda_ceil(window_rows_of(&w), ROWS);
    const int64_t tiles = row_tiles * cuda_ceil(w.head.head.slots, ROWS);
    const token_rows keys = open_tokens(&w, &p->keys, &p->stored_keys);
    for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x)
        use(&w, &keys, i % row_tiles * ROWS, i / row_tiles * ROWS);
}

DEVICE void window_logits(const h2o_simulate_params *p, char *workspace, window_buffers *buffer) {
    each_logits_tile<ATTEND_TILE>(
        p, workspace,
        [&](const text_window *w, const token_rows *keys, int64_t first_row, int64_t first) {
            logits_tile(w, keys, first_row, first, buffer);
        });
}

/* ---- Values -------------------------------------------------------------- */

/* A block has one tile [ROWS, DEPTH] of the outputs, and one of VALUES_PARTS parts of the cells.
 * sum(window, row, d, begin, end, products) must write the weights times the values of cells
 * begin..end-1 to products [rows, pitch]. The last block of a tile adds these up in order and
 * divides by the row sum. */
template <int ROWS, int DEPTH, typename SUM>
DEVICE void values_block(const h2o_simulate_params *p, char *workspace, SUM sum) {
    const text_window w = open_window(p, workspace, blockIdx.z, blockIdx.y, 1);
    const int64_t D = p->dims.D, depths = cuda_ceil(D, DEPTH), rows = window_rows_of(&w);
    const int64_t tile = blockIdx.x / VALUES_PARTS, part = blockIdx.x % VALUES_PARTS;
    const int64_t first_row = tile / depths * ROWS, first_d = tile % depths * DEPTH;
    const int64_t cells = w.head.head.slots, all_rows = cuda_window(p->dims.R) * p->dims.R;
    const int64_t each = cuda_ceil(cuda_ceil(cells, VALUES_PARTS), VALUES_CELLS) * VALUES_CELLS;
    const int64_t begin = lower(part * each, cells), end = lower(begin + each, cells);
    if (first_row >= rows) return;
    sum(&w, first_row, first_d, begin, end, w.products + part * all_rows * w.pitch);
    TAKEN(window_values_of_several_parts, part > 0 && begin < end);
    if (!arrive_last(w.parts_done + tile, VALUES_PARTS)) return;
    if (threadIdx.x == 0) w.parts_done[tile] = 0;
    NO_UNROLL
    for (int i = threadIdx.x * 4; i < ROWS * DEPTH; i += ATTEND_THREADS * 4) {
        const int64_t row = first_row + i / DEPTH, d = first_d + i % DEPTH;
        const uint32_t at = (uint32_t)lower(row, rows - 1);
        const row_ref out =
            tensor_row(&p->out, w.head.b, column_of_row(&w, at), head_of_row(&w, at));
        const float inverse = w.inverse[at];
        vec16 products[VALUES_PARTS];
        float x[4] = {};
        UNROLL
        for (int k = 0; k < VALUES_PARTS; k++)
            products[k] = load16(w.products + (k * all_rows + at) * w.pitch + d);
        UNROLL
        for (int k = 0; k < VALUES_PARTS * 4; k++) x[k % 4] += bits_float(products[k / 4].w[k % 4]);
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (row < rows && d + k < D) set_element(out, d + k, x[k] * inverse);
        }
    }
}

/* Loads the weights of ATTEND_TILE rows for VALUES_CELLS cells; -1 past the last row or cell. */
DEVICE void load_weights(const text_window *w, int64_t first_row, int64_t first,
                         window_buffers *buffer) {
    const int runs = VALUES_CELLS / 4, N = ATTEND_TILE * runs / ATTEND_THREADS;
    const int64_t rows = window_rows_of(w), cells = w->head.head.slots;
    const int c = threadIdx.x % runs * 4, step = ATTEND_THREADS / runs;
    vec16 x[N];
    UNROLL
    for (int k = 0; k < N; k++) {
        const int64_t row = lower(first_row + threadIdx.x / runs + k * step, rows - 1);
        x[k] = load16(w->logits + row * w->ld + (first + c < w->ld ? first + c : 0));
    }
    UNROLL
    for (int k = 0; k < N; k++) {
        const int row = threadIdx.x / runs + k * step;
        float *const to = &buffer->sums.weights[c / ATTEND_TILE][row][c % ATTEND_TILE];
        UNROLL
        for (int j = 0; j < 4; j++) {
            const bool given = first_row + row < rows && first + c + j < cells;
            to[j] = given ? bits_float(x[k].w[j]) : -1.0f;
        }
    }
}

DEVICE void window_values(const h2o_simulate_params *p, char *workspace, window_buffers *buffer) {
    const int row = threadIdx.x / ROW_THREADS * THREAD_ROWS, column = threadIdx.x % ROW_THREADS;
    values_block<ATTEND_TILE, VALUES_DEPTH>(
        p, workspace,
        [&](const text_window *w, int64_t first_row, int64_t d, int64_t begin, int64_t end,
            float *products) {
            const token_rows values = open_tokens(w, &p->values, &p->stored_values);
            running_softmax<VALUES_DEPTH> sums = {};
            for (int64_t first = begin; first < end; first += VALUES_CELLS) {
                sync_block(); /* all threads are done with the previous tile */
                load_weights(w, first_row, first, buffer);
                load_cells<VALUES_DEPTH, VALUES_CELLS>(buffer->sums.values, w, &values, first, d);
                sync_block();
                for (int i = 0; i < VALUES_CELLS / (int)ATTEND_TILE; i++) {
                    accumulate_values<VALUES_DEPTH>(row, column, buffer->sums.weights[i],
                                                    buffer->sums.values + i * ATTEND_TILE, &sums);
                }
            }
            UNROLL
            for (int i = 0; i < THREAD_ROWS * 4; i++) {
                const int64_t at = first_row + row + i / 4;
                if (at >= window_rows_of(w)) continue;
                products[at * w->pitch + d + column * 4 + i % 4] = sums.output[i / 4][i % 4];
            }
        });
}

#endif
