/* window_matrix.cuh - window_tiles.cuh with tensor cores, if all numbers have the same 16-bit
 * format.
 *
 * Tiles have MATRIX_ROWS rows and as many cells, and WINDOW_DEPTH elements of keys and values at a
 * time. Weights become 16-bit matrices, as in matrix_forward.cuh, whose slow way is used whenever
 * some value of a tile is not finite: almost every tile has keys that some row does not see. */
#ifndef H2O_CUDA_WINDOW_MATRIX_CUH
#define H2O_CUDA_WINDOW_MATRIX_CUH

#include "matrix_forward.cuh"
#include "window_tiles.cuh"

typedef matrix_buffer<WINDOW_DEPTH> window_matrices;

/* ---- Tiles --------------------------------------------------------------- */

/* Loads elements d.. of a tile's rows. at(k, step, row) must set WINDOW_FETCHED rows, from row k
 * on, `step` apart; rows whose data is NULL become zeros. Aligned runs are copied asynchronously,
 * and the caller waits for them. */
template <int DEPTH, typename AT>
DEVICE void fetch_rows(uint16_t (*tile)[DEPTH], int64_t d, int64_t D, AT at) {
    const int runs = DEPTH / RUN, step = ATTEND_THREADS / runs;
    const int top = threadIdx.x / runs, run = threadIdx.x % runs * RUN;
    row_ref row[WINDOW_FETCHED];
    at(top, step, row);
    UNROLL
    for (int k = 0; k < WINDOW_FETCHED; k++) {
        const int64_t skipped = 2 * (d + run) * row[k].stride;
        const char *const from = row[k].data ? row[k].data + skipped : NULL;
        const bool aligned = row[k].stride == 1 && d + run + RUN <= D && is_aligned(from);
        uint16_t *const to = tile_at(tile, top + k * step, run);
        if (from && aligned) {
            copy_async<16>(to, from);
        } else {
            store16(to, from ? load_halves(row[k], d + run, D) : vec16{});
        }
    }
    close_copies();
}

template <int DEPTH>
DEVICE void fetch_cells(uint16_t (*tile)[DEPTH], const text_window *w, const token_rows *rows,
                        int64_t first, int64_t d) {
    fetch_rows<DEPTH>(tile, d, w->head.p->dims.D, [&](int top, int step, row_ref *row) {
        int64_t token[WINDOW_FETCHED];
        const char *data[WINDOW_FETCHED];
        find_cells<WINDOW_FETCHED>(w, rows, first + top, step, token, data);
        UNROLL
        for (int k = 0; k < WINDOW_FETCHED; k++) {
            row[k] = rows->row;
            row[k].data = token[k] < 0 ? NULL : data[k];
        }
    });
}

/* ---- Logits -------------------------------------------------------------- */

template <h2o_dtype TYPE>
DEVICE void logits_matrix(const text_window *w, const token_rows *keys, int64_t first_row,
                          int64_t first, window_matrices *buffer) {
    const h2o_simulate_params *const p = w->head.p;
    const int64_t rows = window_rows_of(w), D = p->dims.D;
    float c[window_matrices::COLUMNS / 8][4] = {};
    for (int64_t d = 0; d < D; d += WINDOW_DEPTH) {
        sync_block(); /* all threads are done with the previous tile */
        fetch_rows<WINDOW_DEPTH>(buffer->rows, d, D, [&](int top, int step, row_ref *row) {
            UNROLL
            for (int k = 0; k < WINDOW_FETCHED; k++)
                row[k] = query_row(w, first_row + top + k * step, 0);
        });
        fetch_cells<WINDOW_DEPTH>(buffer->columns[0], w, keys, first, d);
        wait_copies<0>();
        sync_block();
        add_matrix_dots<WINDOW_DEPTH, TYPE>(buffer, buffer->columns[0], c);
    }
    dots_to_logits<window_matrices::COLUMNS / 8>(c, p->scale, p->softcap);
    UNROLL
    for (int i = 0; i < window_matrices::COLUMNS / 8 * 4; i++) {
        const int64_t row = first_row + warp_row() + lane_row() + i % 4 / 2 * 8;
        const int64_t cell = first + i / 4 * 8 + lane_column() + i % 2;
        if (row < rows && cell < w->ld) w->logits[row * w->ld + cell] = c[i / 4][i % 4];
    }
}

template <h2o_dtype TYPE>
DEVICE void window_logits_matrix(const h2o_simulate_params *p, char *workspace,
                                 window_matrices *buffer) {
    each_logits_tile<MATRIX_ROWS>(
        p, workspace,
        [&](const text_window *w, const token_rows *keys, int64_t first_row, int64_t first) {
            logits_matrix<TYPE>(w, keys, first_row, first, buffer);
        });
}

/* ---- Values -------------------------------------------------------------- */

/* Loads a lane's weights of two rows for a tile of cells; -1 if there is no such row or cell. */
DEVICE void read_weights(const text_window *w, int64_t first_row, int64_t first,
                         float c[window_matrices::COLUMNS / 8][4]) {
    const int64_t rows = window_rows_of(w), cells = w->head.head.slots;
    uint64_t pair[window_matrices::COLUMNS / 8][2];
    UNROLL
    for (int i = 0; i < window_matrices::COLUMNS / 8 * 2; i++) {
        const int64_t row = first_row + warp_row() + lane_row() + i % 2 * 8;
        const int64_t cell = first + i / 2 * 8 + lane_column();
        pair[i / 2][i % 2] = *(const uint64_t *)(w->logits + lower(row, rows - 1) * w->ld +
                                                 (cell < cells ? cell : 0));
    }
    UNROLL
    for (int i = 0; i < window_matrices::COLUMNS / 8 * 4; i++) {
        const int64_t row = first_row + warp_row() + lane_row() + i % 4 / 2 * 8;
        const int64_t cell = first + i / 4 * 8 + lane_column() + i % 2;
        const uint32_t bits = (uint32_t)(pair[i / 4][i % 4 / 2] >> i % 2 * 32);
        c[i / 4][i % 4] = row < rows && cell < cells ? bits_float(bits) : -1.0f;
    }
}

template <h2o_dtype TYPE>
DEVICE void values_matrix(const text_window *w, int64_t first_row, int64_t d, int64_t begin,
                          int64_t end, float *products, window_matrices *buffer) {
    const h2o_simulate_params *const p = w->head.p;
    const token_rows values = open_tokens(w, &p->values, &p->stored_values);
    matrix_softmax<WINDOW_DEPTH> sums = {};
    for (int64_t first = begin; first < end; first += window_matrices::COLUMNS) {
        float c[window_matrices::COLUMNS / 8][4];
        sync_block(); /* all threads are done with the previous tile */
        fetch_cells<WINDOW_DEPTH>(buffer->columns[1], w, &values, first, d);
        read_weights(w, first_row, first, c);
        wait_copies<0>();
        sync_block();
        if (block_any(!finite_part<WINDOW_DEPTH, TYPE, MATRIX_ROWS>(buffer->columns[1]))) {
            accumulate_nonfinite<WINDOW_DEPTH, TYPE>(buffer, c, &sums);
        } else {
            masked_to_zero<window_matrices::COLUMNS / 8>(c);
            accumulate_matrix_values<WINDOW_DEPTH, TYPE>(buffer, c, &sums);
        }
    }
    UNROLL
    for (int i = 0; i < WINDOW_DEPTH / 8 * 4; i++) {
        const int64_t row = first_row + warp_row() + lane_row() + i % 4 / 2 * 8;
        float *const to = products + row * w->pitch + d + i / 4 * 8 + lane_column() + i % 2;
        const float x = sums.output[i / 4][i % 4] * (1.0f / weight_unit<TYPE>(GROWTH));
        if (row < window_rows_of(w)) *to = x;
    }
}

template <h2o_dtype TYPE>
DEVICE void window_values_matrix(const h2o_simulate_params *p, char *workspace,
                                 window_matrices *buffer) {
    values_block<MATRIX_ROWS, WINDOW_DEPTH>(p, workspace,
                                            [&](const text_window *w, int64_t first_row, int64_t d,
                                                int64_t begin, int64_t end, float *products) {
                                                values_matrix<TYPE>(w, first_row, d, begin, end,
                                                                    products, buffer);
                                            });
}

#endif
