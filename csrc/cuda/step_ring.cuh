/* step_ring.cuh - floats for step_matrix.cuh: keys and values of a warp's tiles, copied to shared
 * memory ahead of their use.
 *
 * Half a tile is the keys of its slots, or their values. A warp's halves follow one another through
 * a ring of CUDA_STEP_HALVES: when one has been used, the next is fetched into its place, which may
 * belong to the block's next part. Lanes read what other lanes of their warp have copied, and only
 * the warp waits for it. */
#ifndef H2O_CUDA_STEP_RING_CUH
#define H2O_CUDA_STEP_RING_CUH

#include "step_rows.cuh"

template <int DEPTH> struct alignas(128) float_ring {
    uint16_t halves[CUDA_STEP_HALVES(DEPTH)][STEP_ROWS][DEPTH];
};

/* Half a tile of keys. The runs that eight lanes read at once are four each of two adjacent rows.
 * In every other row they are swapped by four, so that all are in different banks. */
template <int DEPTH> struct float_keys {
    uint16_t (*half)[DEPTH];

    DEVICE_METHOD static int query_run(int i) { return 32 * i + lane_column() * 4; }

    DEVICE_METHOD static uint16_t *at(uint16_t (*half)[DEPTH], int row, int d) {
        return &half[row][d ^ row % 2 * 4 * RUN];
    }

    DEVICE_METHOD void pairs(int n, int i, uint32_t b[2]) const {
        const vec16 run = load16(at(half, 8 * n + lane_row(), query_run(i / 2)));
        b[0] = run.w[i % 2 * 2];
        b[1] = run.w[i % 2 * 2 + 1];
    }

    DEVICE_METHOD float scale(int) const { return 1.0f; }
};

/* Half a tile of values, which a transposed load turns into a matrix [D, slots]. */
template <int DEPTH> struct float_values {
    enum { APART = 8 };
    uint16_t (*half)[DEPTH];

    DEVICE_METHOD static int output_of(int i) { return 16 * i + lane_row(); }

    DEVICE_METHOD static uint16_t *at(uint16_t (*half)[DEPTH], int row, int d) {
        return tile_at(half, row, d);
    }

    DEVICE_METHOD void weigh(float *) const {}

    DEVICE_METHOD void pairs(int i, uint32_t a[4]) const {
        uint32_t b[4]; /* two matrices b [slots, D] are one matrix a [D, slots] */
        load_values(b, half, 0, 16 * i);
        UNROLL
        for (int k = 0; k < 4; k++) a[k] = b[k % 2 * 2 + k / 2];
    }
};

/* Starts to copy rows to where ROWS expects them; zeros past the last row and past D. */
template <int DEPTH, typename ROWS>
DEVICE void fetch_half(const tile_rows *rows, uint16_t (*half)[DEPTH]) {
    const int runs = DEPTH / RUN, step = 32 / runs, lane = threadIdx.x % 32;
    const int top = lane / runs, d = lane % runs * RUN;
    read_tile<DEPTH>(rows, [&](auto bounds) {
        const char *const from = rows->at(top, 2 * d);
        UNROLL
        for (int k = 0; k < STEP_ROWS; k += step) {
            uint16_t *const to = ROWS::at(half, top + k, d);
            if (bounds.left(top + k, d) > 0) {
                copy_async<16>(to, from + k * rows->pitch);
            } else {
                store16(to, vec16{});
            }
        }
    });
}

/* A warp's rows, which come through its ring. */
template <int DEPTH> struct ring_rows {
    enum { HALVES = CUDA_STEP_HALVES(DEPTH) };
    typedef float_ring<DEPTH> shared;
    float_keys<DEPTH> keys;
    float_values<DEPTH> values;
    shared *ring;
    tile_walk walk;    /* the tile whose half is fetched next, ... */
    bool wants_values; /* ... which half that is, ... */
    int place;         /* ... and where it goes: to the place of the oldest half */

    /* Starts to copy the next half over the oldest one, with which all lanes must be done. */
    DEVICE_METHOD void fetch(const step_item *item) {
        uint16_t (*const half)[DEPTH] = ring->halves[place];
        place = place + 1 < HALVES ? place + 1 : 0;
        if (walk.part < walk.last && !wants_values) {
            const tile_rows rows = keys_of_tile(item, walk.first, walk.end);
            fetch_half<DEPTH, float_keys<DEPTH>>(&rows, half);
        } else if (walk.part < walk.last) {
            const tile_rows rows = values_of_tile(item, walk.first, walk.end);
            fetch_half<DEPTH, float_values<DEPTH>>(&rows, half);
            walk.advance(item);
        }
        wants_values = !wants_values;
        close_copies();
    }

    /* The oldest half, once all lanes have copied their share of it. */
    DEVICE_METHOD uint16_t (*oldest()) [DEPTH] {
        wait_copies<HALVES - 1>();
        sync_warp();
        return ring->halves[place];
    }

    DEVICE_METHOD void open(const step_item *item, int part, int last, shared *memory) {
        ring = memory;
        walk = tile_walk{part, last, 0, 0, 0};
        walk.open(item);
        wants_values = false;
        place = 0;
        UNROLL
        for (int i = 0; i < HALVES; i++) fetch(item);
    }

    DEVICE_METHOD void load_keys(const step_item *, int, int) { keys.half = oldest(); }

    DEVICE_METHOD void load_values(const step_item *item, int, int) {
        sync_warp(); /* all lanes are done with the keys */
        fetch(item);
        values.half = oldest();
    }

    DEVICE_METHOD void leave(const step_item *item) {
        sync_warp();
        fetch(item);
    }
};

#endif
