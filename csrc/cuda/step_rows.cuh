/* step_rows.cuh - keys and values of STEP_ROWS slots for the matrices of step_matrix.cuh, from
 * memory to the registers that want them: floats; step_numbers.cuh has quantized ones.
 *
 * A struct for each kind of rows has the same functions. `load` starts to read what a lane needs of
 * slots first.. of those before `end`, and nothing of others. Then
 *
 *   of keys     pairs(n, i, b) are elements query_run(i / 2) + i % 2 * 4 and the next three of slot
 *               8 n + lane_row(); scale(k) is what a dot product with the lane's kth slot is to be
 *               multiplied by;
 *   of values   pairs(i, a) are elements output_of(i), in a[0] and a[2], and the next one of the
 *               lane's four slots, two in a pair; weigh(x) comes first: it multiplies the weights
 *               of these slots by what `pairs` leaves out.
 *
 * Which elements these are may be chosen at will, so that a lane's follow one another. */
#ifndef H2O_CUDA_STEP_ROWS_CUH
#define H2O_CUDA_STEP_ROWS_CUH

#include "matrix_tiles.cuh"
#include "step_item.cuh"

/* The kth of the four slots of a tile that a lane has the logits of. */
DEVICE int lane_slot(int k) { return k / 2 * 8 + lane_column() + k % 2; }

/* The rows of a tile's slots: byte d of each of those that a lane has. */
struct tile_rows {
    const char *first;
    int pitch, count, D;

    DEVICE_METHOD const char *at(int row, int d) const {
        return one_address(first + (row * pitch + d));
    }
    DEVICE_METHOD const char *key(int n, int d) const { return at(8 * n + lane_row(), d); }
    DEVICE_METHOD const char *value(int k, int d) const { return at(lane_slot(k), d); }

    /* Of rows at multiples of 2 bytes: whether it begins between two words. */
    DEVICE_METHOD bool is_late(int row) const {
        return (((uint32_t)(uintptr_t)first + (uint32_t)(row * pitch)) & 2) != 0;
    }
};

/* Which of them may be read. WHOLE: all. */
template <int DEPTH, bool WHOLE> struct tile_bounds {
    int count, D;

    DEVICE_METHOD int depth() const { return WHOLE ? DEPTH : D; }

    /* Elements of a row from d on. */
    DEVICE_METHOD int left(int row, int d) const { return WHOLE ? DEPTH : row < count ? D - d : 0; }
    DEVICE_METHOD int left_of_key(int n, int d) const { return left(8 * n + lane_row(), d); }
    DEVICE_METHOD int left_of_value(int k, int d) const { return left(lane_slot(k), d); }
};

/* Calls read(bounds) for a tile of rows. */
template <int DEPTH, typename READ> DEVICE void read_tile(const tile_rows *rows, READ read) {
    if (rows->count == STEP_ROWS && rows->D == DEPTH) {
        read(tile_bounds<DEPTH, true>{});
    } else {
        read(tile_bounds<DEPTH, false>{rows->count, rows->D});
    }
}

/* The rows of slots first.. of those before `end`. */
DEVICE tile_rows rows_of_tile(const step_item *item, const slot_rows *rows, int first, int end) {
    const int count = end - first < STEP_ROWS ? end - first : STEP_ROWS;
    const int pitch = (int)rows->stride;
    return tile_rows{one_address(rows->data + (int64_t)first * pitch), pitch, count, (int)item->D};
}

DEVICE tile_rows keys_of_tile(const step_item *item, int first, int end) {
    return rows_of_tile(item, &item->store.keys, first, end);
}

DEVICE tile_rows values_of_tile(const step_item *item, int first, int end) {
    return rows_of_tile(item, &item->store.values, first, end);
}

/* Where a lane's values are RUN in sequence of each 64: the first of the ith two. */
DEVICE int run_output(int i) { return i / 4 * 64 + lane_row() * RUN + i % 4 * 2; }

/* ---- Floats -------------------------------------------------------------- */

template <int DEPTH> struct float_keys {
    vec16 key[2][DEPTH / 32];

    DEVICE_METHOD static int query_run(int i) { return 32 * i + lane_column() * 4; }

    DEVICE_METHOD void load(const step_item *item, int first, int end) {
        const tile_rows rows = keys_of_tile(item, first, end);
        read_tile<DEPTH>(&rows, [&](auto bounds) {
            UNROLL
            for (int n = 0; n < 2; n++) {
                const char *const from = rows.key(n, 2 * query_run(0));
                const int left = bounds.left_of_key(n, query_run(0));
                UNROLL
                for (int i = 0; i < DEPTH / 32; i++)
                    key[n][i] = 32 * i < left ? load16(from + 64 * i) : vec16{};
            }
        });
    }

    DEVICE_METHOD void pairs(int n, int i, uint32_t b[2]) const {
        b[0] = key[n][i / 2].w[i % 2 * 2];
        b[1] = key[n][i / 2].w[i % 2 * 2 + 1];
    }

    DEVICE_METHOD float scale(int) const { return 1.0f; }
};

template <int DEPTH> struct float_values {
    vec16 value[4][DEPTH / 64];

    DEVICE_METHOD static int output_of(int i) { return run_output(i); }

    DEVICE_METHOD void load(const step_item *item, int first, int end) {
        const tile_rows rows = values_of_tile(item, first, end);
        read_tile<DEPTH>(&rows, [&](auto bounds) {
            UNROLL
            for (int k = 0; k < 4; k++) {
                const char *const from = rows.value(k, 2 * output_of(0));
                const int left = bounds.left_of_value(k, output_of(0));
                UNROLL
                for (int i = 0; i < DEPTH / 64; i++)
                    value[k][i] = 64 * i < left ? load16(from + 128 * i) : vec16{};
            }
        });
    }

    DEVICE_METHOD void weigh(float *) const {}

    DEVICE_METHOD void pairs(int i, uint32_t a[4]) const {
        UNROLL
        for (int k = 0; k < 4; k++) {
            const uint32_t first = value[k / 2 * 2][i / 4].w[i % 4];
            const uint32_t second = value[k / 2 * 2 + 1][i / 4].w[i % 4];
            a[k] = permute(first, second, k % 2 == 0 ? 0x5410 : 0x7632);
        }
    }
};

#endif
