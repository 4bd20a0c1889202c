/* step_rows.cuh - keys and values of STEP_ROWS slots for the matrices of step_matrix.cuh, from
 * memory to the registers that want them.
 *
 * A struct for each kind of rows has the same functions. `load` starts to read what a lane needs of
 * slots first.. of those before `end`, and nothing of others. Then
 *
 *   of keys     pairs(n, i, b) are elements query_run(i / 2) + i % 2 * 4 and the next three of slot
 *               8 n + lane_row(); scale(k) is what a dot product with the lane's kth slot is to be
 *               multiplied by;
 *   of values   pairs(i, a) are elements output_of(i), in a[0] and a[2], and the next one of the
 *               lane's four slots, two in a pair.
 *
 * Which elements these are may be chosen at will, so that a lane's follow one another: runs of
 * floats, or so many bytes. Since rows of Q8 begin at multiples of 2 bytes only, their words begin
 * two elements late where they have to, and are put together from two. The numbers of keys become
 * 16-bit elements as they are; values are rounded, as in matrix_stored.cuh. */
#ifndef H2O_CUDA_STEP_ROWS_CUH
#define H2O_CUDA_STEP_ROWS_CUH

#include "matrix_tiles.cuh"
#include "step_item.cuh"

/* The kth of the four slots of a tile that a lane has the logits of. */
DEVICE int lane_slot(int k) { return k / 2 * 8 + lane_column() + k % 2; }

/* The rows of a tile's slots. */
struct tile_rows {
    const char *first;
    int stride, count;

    DEVICE_METHOD const char *row(int n) const { return first + n * stride; }
    DEVICE_METHOD bool has(int n) const { return n < count; }
};

/* Of rows that lie a stride apart, those of slots first.. of these before `end`. */
DEVICE tile_rows rows_of_tile(const char *rows, int64_t stride, int64_t first, int64_t end) {
    return tile_rows{rows + first * stride, (int)stride, (int)lower(end - first, STEP_ROWS)};
}

DEVICE tile_rows keys_of_tile(const slot_store *store, int64_t first, int64_t end) {
    return rows_of_tile(store->keys, store->key_stride, first, end);
}

DEVICE tile_rows values_of_tile(const slot_store *store, int64_t first, int64_t end) {
    return rows_of_tile(store->values, store->value_stride, first, end);
}

/* Where a lane's values are RUN in sequence of each 64: the first of the ith two. */
DEVICE int run_output(int i) { return i / 4 * 64 + lane_row() * RUN + i % 4 * 2; }

/* ---- Floats -------------------------------------------------------------- */

template <int DEPTH> struct float_keys {
    vec16 key[2][DEPTH / 32];

    DEVICE_METHOD static int query_run(int i) { return 32 * i + lane_column() * 4; }

    DEVICE_METHOD void load(const step_item *item, int64_t first, int64_t end) {
        const tile_rows rows = keys_of_tile(&item->store, first, end);
        const int D = (int)item->D;
        UNROLL
        for (int n = 0; n < 2; n++) {
            const int row = 8 * n + lane_row();
            const char *const from = rows.row(row);
            UNROLL
            for (int i = 0; i < DEPTH / 32; i++) {
                const int d = query_run(i);
                key[n][i] = rows.has(row) && d < D ? load16(from + 2 * d) : vec16{};
            }
        }
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

    DEVICE_METHOD void load(const step_item *item, int64_t first, int64_t end) {
        const tile_rows rows = values_of_tile(&item->store, first, end);
        const int D = (int)item->D;
        UNROLL
        for (int k = 0; k < 4; k++) {
            const char *const from = rows.row(lane_slot(k));
            UNROLL
            for (int i = 0; i < DEPTH / 64; i++) {
                const int d = output_of(4 * i);
                value[k][i] = rows.has(lane_slot(k)) && d < D ? load16(from + 2 * d) : vec16{};
            }
        }
    }

    DEVICE_METHOD void pairs(int i, uint32_t a[4]) const {
        UNROLL
        for (int k = 0; k < 4; k++) {
            const uint32_t first = value[k / 2 * 2][i / 4].w[i % 4];
            const uint32_t second = value[k / 2 * 2 + 1][i / 4].w[i % 4];
            a[k] = permute(first, second, k % 2 == 0 ? 0x5410 : 0x7632);
        }
    }
};

/* ---- Numbers ------------------------------------------------------------- */

/* Bytes 2 i and 2 i + 1 of a word, which float16 holds above 1024. */
DEVICE uint32_t bytes_above_1024(uint32_t word, int i) {
    return permute(word, 0x64646464, i == 0 ? 0x5140 : 0x5342);
}

/* The same less a number, exactly; in bfloat16 the numbers have 8 bits at most. */
template <h2o_dtype TYPE> DEVICE uint32_t pack_bytes(uint32_t word, int i, int less) {
    if (TYPE == H2O_F16) {
        const uint32_t subtracted = 0x6400 | (uint32_t)less;
        return subtract_f16(bytes_above_1024(word, i), subtracted | subtracted << 16);
    }
    const float magic = 8388608.0f + (float)less;
    return pack<TYPE>(float_of_byte(word, 2 * i) - magic, float_of_byte(word, 2 * i + 1) - magic);
}

/* The same times a pair of scales, and with a pair of minima, all of float16. */
template <h2o_dtype TYPE>
DEVICE uint32_t pack_scaled(uint32_t word, int i, int less, uint32_t scales, uint32_t minima) {
    if (TYPE == H2O_F16) return fma_f16(pack_bytes<TYPE>(word, i, less), scales, minima);
    float x[2];
    UNROLL
    for (int j = 0; j < 2; j++) {
        x[j] = fmaf(float_of_byte(word, 2 * i + j) - (8388608.0f + (float)less),
                    f16_to_float((uint16_t)(scales >> 16 * j)),
                    f16_to_float((uint16_t)(minima >> 16 * j)));
    }
    return pack<TYPE>(x[0], x[1]);
}

/* Scales are rounded up: of one above `largest`, of which the largest numbers are beyond float16
 * though no element was, the next lower one does. */
template <h2o_dtype TYPE> DEVICE uint16_t fitting(uint16_t scale, uint16_t largest) {
    return (uint16_t)(scale - (TYPE == H2O_F16 && scale > largest && scale < 0x7c00));
}

template <h2o_dtype TYPE>
DEVICE uint32_t fitting_pair(uint16_t first, uint16_t second, uint16_t largest) {
    return fitting<TYPE>(first, largest) | (uint32_t)fitting<TYPE>(second, largest) << 16;
}

/* ---- Q8 ------------------------------------------------------------------ */

/* Of each 64 bytes of a row so many in sequence; those from D on are not read. */
template <int DEPTH, int BYTES> struct q8_bytes {
    uint32_t word[DEPTH / 64][BYTES / 4 + 1];
    bool is_late;

    /* from: where the lane's first one is, number d of the row. */
    DEVICE_METHOD void load(const char *from, int d, int D, bool given) {
        is_late = ((uintptr_t)from & 2) != 0;
        const char *const words = from + (is_late ? 2 : 0);
        const int left = given ? D - d : 0;
        UNROLL
        for (int i = 0; i < DEPTH / 64; i++) {
            word[i][0] = 0;
            UNROLL
            for (int j = 0; j < BYTES; j += RUN) { /* rows are whole runs */
                word[i][j / 4 + 1] = word[i][j / 4 + 2] = 0;
                if (64 * i + j >= left) continue;
                if (j == 0) word[i][0] = *(const uint16_t *)(from + 64 * i);
                word[i][j / 4 + 1] = *(const uint32_t *)(words + 64 * i + j);
                word[i][j / 4 + 2] = *(const uint32_t *)(words + 64 * i + j + 4);
            }
        }
    }

    /* The jth four bytes of the ith 64, from 0 to 255. */
    DEVICE_METHOD uint32_t four(int i, int j) const {
        const uint32_t late = j == 0 ? 0x5410 : 0x5432;
        return permute(word[i][j], word[i][j + 1], is_late ? late : 0x7654) ^ 0x80808080;
    }
};

DEVICE uint16_t load_scale(const char *row, int64_t D, bool given) {
    return given ? *(const uint16_t *)(row + D) : 0;
}

/* A lane's keys are 16 bytes of each 64, so that four lanes read what lies together. */
template <int DEPTH, h2o_dtype TYPE> struct q8_keys {
    q8_bytes<DEPTH, 16> bytes[2];
    uint16_t scales[4];

    DEVICE_METHOD static int query_run(int i) {
        return i / 2 * 64 + lane_column() * 8 + i % 2 * RUN;
    }

    DEVICE_METHOD void load(const step_item *item, int64_t first, int64_t end) {
        const tile_rows rows = keys_of_tile(&item->store, first, end);
        const int D = (int)item->D;
        UNROLL
        for (int n = 0; n < 2; n++) {
            const int row = 8 * n + lane_row(), d = query_run(0);
            bytes[n].load(rows.row(row) + d, d, D, rows.has(row));
        }
        UNROLL
        for (int k = 0; k < 4; k++)
            scales[k] = load_scale(rows.row(lane_slot(k)), D, rows.has(lane_slot(k)));
    }

    DEVICE_METHOD void pairs(int n, int i, uint32_t b[2]) const {
        const uint32_t four = bytes[n].four(i / 4, i % 4);
        b[0] = pack_bytes<TYPE>(four, 0, 128);
        b[1] = pack_bytes<TYPE>(four, 1, 128);
    }

    DEVICE_METHOD float scale(int k) const { return f16_to_float(scales[k]); }
};

/* A lane's values are 8 bytes of each 64. */
template <int DEPTH, h2o_dtype TYPE> struct q8_values {
    q8_bytes<DEPTH, RUN> bytes[4];
    uint16_t scales[4];

    DEVICE_METHOD static int output_of(int i) { return run_output(i); }

    DEVICE_METHOD void load(const step_item *item, int64_t first, int64_t end) {
        const tile_rows rows = values_of_tile(&item->store, first, end);
        const int D = (int)item->D;
        UNROLL
        for (int k = 0; k < 4; k++) {
            const char *const row = rows.row(lane_slot(k));
            bytes[k].load(row + output_of(0), output_of(0), D, rows.has(lane_slot(k)));
            scales[k] = load_scale(row, D, rows.has(lane_slot(k)));
        }
    }

    DEVICE_METHOD void pairs(int i, uint32_t a[4]) const {
        const uint16_t largest = 0x6007; /* 127 of it are below the largest float16 */
        UNROLL
        for (int k = 0; k < 4; k += 2) {
            const uint32_t two =
                permute(bytes[k].four(i / 4, i % 4 / 2), bytes[k + 1].four(i / 4, i % 4 / 2),
                        i % 2 == 0 ? 0x5140 : 0x7362);
            const uint32_t both = fitting_pair<TYPE>(scales[k], scales[k + 1], largest);
            a[k] = pack_scaled<TYPE>(two, 0, 128, both, 0);
            a[k + 1] = pack_scaled<TYPE>(two, 1, 128, both, 0);
        }
    }
};

/* ---- Q4 ------------------------------------------------------------------ */

/* Rows begin at multiples of 4 bytes. A word has four elements of a group, and the four that come
 * 16 later in it; all words of a lane are of one group. */
template <int DEPTH, h2o_dtype TYPE> struct q4_values {
    enum { EACH = DEPTH / 64 };
    uint32_t word[4][EACH], scale_minimum[4];

    DEVICE_METHOD static int output_of(int i) {
        const int w = lane_row() * EACH + i / 4;
        return w / 4 * H2O_GROUP + w % 4 * 4 + i % 4 / 2 * 16 + i % 2 * 2;
    }

    DEVICE_METHOD void load(const step_item *item, int64_t first, int64_t end) {
        const tile_rows rows = values_of_tile(&item->store, first, end);
        const int D = (int)item->D;
        const int w = lane_row() * EACH;
        UNROLL
        for (int k = 0; k < 4; k++) {
            const char *const row = rows.row(lane_slot(k));
            const bool given = rows.has(lane_slot(k)) && 8 * w < D;
            UNROLL
            for (int i = 0; i < EACH; i++)
                word[k][i] = given ? *(const uint32_t *)(row + 4 * (w + i)) : 0;
            scale_minimum[k] = given ? *(const uint32_t *)(row + D / 2 + w / 4 * 4) : 0;
        }
    }

    DEVICE_METHOD void pairs(int i, uint32_t a[4]) const {
        const uint16_t largest = 0x6c00; /* 15 of it, and a minimum, may be too large */
        const int shift = i % 4 / 2 * 4;
        UNROLL
        for (int k = 0; k < 4; k += 2) {
            const uint32_t two =
                permute(word[k][i / 4] >> shift & 0x0f0f0f0f,
                        word[k + 1][i / 4] >> shift & 0x0f0f0f0f, i % 2 == 0 ? 0x5140 : 0x7362);
            const uint32_t scales = fitting_pair<TYPE>((uint16_t)scale_minimum[k],
                                                       (uint16_t)scale_minimum[k + 1], largest);
            const uint32_t minima = permute(scale_minimum[k], scale_minimum[k + 1], 0x7632);
            a[k] = pack_scaled<TYPE>(two, 0, 0, scales, minima);
            a[k + 1] = pack_scaled<TYPE>(two, 1, 0, scales, minima);
        }
    }
};

#endif
