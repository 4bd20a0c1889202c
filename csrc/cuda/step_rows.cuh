/* step_rows.cuh - where the rows of a decode step's tiles are. step_matrix.cuh gets the rows from
 * step_ring.cuh (floats) or step_numbers.cuh (quantized).
 *
 * Both define structs with the same functions, for keys and for values:
 *
 *   keys     pairs(n, i, b): elements query_run(i / 2) + i % 2 * 4 and the next three of slot
 *            8 n + lane_row(). scale(k): factor for a dot product with the lane's k-th slot.
 *   values   pairs(i, a): elements output_of(i), in a[0] and a[2], and output_of(i) + APART, of the
 *            lane's four slots, two in a pair. weigh(x) is called first: it multiplies the weights
 *            of these slots by factors that `pairs` leaves out.
 *   both     open: before the first tile. load_keys and load_values: for each tile, before its
 *            pairs. leave: after them.
 *
 * The choice of elements is free, so that those of a lane can be adjacent. */
#ifndef H2O_CUDA_STEP_ROWS_CUH
#define H2O_CUDA_STEP_ROWS_CUH

#include "matrix_tiles.cuh"
#include "step_item.cuh"

/* The k-th of the four slots of a tile for which a lane has the logits. */
DEVICE int lane_slot(int k) { return k / 2 * 8 + lane_column() + k % 2; }

/* Goes through a warp's tiles in order: those of each of the block's parts, once for every
 * STEP_COLUMNS query heads. */
struct tile_walk {
    int part, last; /* of the block's parts; the end of these */
    int heads;      /* the first of STEP_COLUMNS */
    int first, end; /* slots of the tile, and of the part */

    /* Goes to the first tile of the part, or of the next part that has one. */
    DEVICE_METHOD void open(const step_item *item) {
        for (; part < last; part++) {
            first = part_begin(item, part) + (int)threadIdx.x / 32 * STEP_ROWS;
            end = part_begin(item, part + 1);
            if (first < end) return;
        }
    }

    DEVICE_METHOD void advance(const step_item *item) {
        first += STEP_WARPS * STEP_ROWS;
        if (first < end) return;
        heads += STEP_COLUMNS;
        if (heads >= (int)item->R) {
            heads = 0;
            part++;
        }
        open(item);
    }
};

/* The rows of a tile's slots: the address of byte d of a row. */
struct tile_rows {
    const char *first;
    int pitch, count, D;

    DEVICE_METHOD const char *at(int row, int d) const {
        return one_address(first + (row * pitch + d));
    }
    DEVICE_METHOD const char *value(int k, int d) const { return at(lane_slot(k), d); }

    /* For rows at multiples of 2 bytes: whether a row begins in the middle of a word. */
    DEVICE_METHOD bool is_late(int row) const {
        return (((uint32_t)(uintptr_t)first + (uint32_t)(row * pitch)) & 2) != 0;
    }
};

/* Which rows and elements may be read. WHOLE: all. */
template <int DEPTH, bool WHOLE> struct tile_bounds {
    int count, D;

    DEVICE_METHOD int depth() const { return WHOLE ? DEPTH : D; }

    /* Number of elements of a row from d on. */
    DEVICE_METHOD int left(int row, int d) const { return WHOLE ? DEPTH : row < count ? D - d : 0; }
    DEVICE_METHOD int left_of_value(int k, int d) const { return left(lane_slot(k), d); }
};

/* Calls read(bounds) with the bounds of a tile of rows. */
template <int DEPTH, typename READ> DEVICE void read_tile(const tile_rows *rows, READ read) {
    if (rows->count == STEP_ROWS && rows->D == DEPTH) {
        read(tile_bounds<DEPTH, true>{});
    } else {
        read(tile_bounds<DEPTH, false>{rows->count, rows->D});
    }
}

/* The rows of a tile of slots from `first` on, which ends before slot `end`. */
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

#endif
