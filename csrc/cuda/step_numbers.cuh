/* step_numbers.cuh - step_rows.cuh for quantized rows: a lane has so many bytes in sequence.
 *
 * Since rows of Q8 begin at multiples of 2 bytes only, their words begin two elements late where
 * they have to, and are put together from two. The numbers of keys become 16-bit elements as they
 * are. Values are rounded, as in matrix_stored.cuh, but those of Q8 in bfloat16, which is as wide:
 * these stay numbers, too. */
#ifndef H2O_CUDA_STEP_NUMBERS_CUH
#define H2O_CUDA_STEP_NUMBERS_CUH

#include "step_rows.cuh"

/* Bytes 2 i and 2 i + 1 of a word, from 0 to 255, as float16 holds them above 1024. */
DEVICE uint32_t bytes_above_1024(uint32_t word, int i) {
    return permute(word, 0x64646464, i == 0 ? 0x5140 : 0x5342);
}

/* The same from -128 to 127, exactly. In bfloat16, which has 8 bits, a byte's low seven stand above
 * 128, and its sign says whether 128 or 256 are to be taken away. */
template <h2o_dtype TYPE> DEVICE uint32_t pack_signed(uint32_t word, int i) {
#if CAPABILITY >= 80
    if (TYPE == H2O_BF16) {
        const uint32_t both = permute(word, 0x43434343, i == 0 ? 0x5140 : 0x5342);
        return subtract_bf16(both & 0xff7fff7f, both & 0xff80ff80);
    }
#endif
    return subtract_f16(bytes_above_1024(word ^ 0x80808080, i), 0x64806480);
}

/* Two scales for float16. They are rounded up: of one above `largest`, of which the largest numbers
 * are beyond float16 though no element was, the next lower one does; NaN stays NaN. */
DEVICE uint32_t fitting_pair(uint32_t first, uint32_t second, uint16_t largest) {
    const uint32_t both = permute(first, second, 0x5410);
    const uint32_t to_sign = 0x7fffu - largest; /* carries what is larger into the sign */
    return both - ((both + (to_sign | to_sign << 16)) >> 15 & 0x00010001);
}

/* ---- Q8 ------------------------------------------------------------------ */

/* How the words of a row become those that its numbers begin with, see q8_bytes. */
struct q8_lateness {
    uint32_t head, tail;
};

DEVICE q8_lateness lateness_of(bool is_late) {
    return q8_lateness{is_late ? 0x5410u : 0x7654u, is_late ? 0x5432u : 0x7654u};
}

/* Of each 64 bytes of a row so many in sequence, and its scale. */
template <int DEPTH, int BYTES> struct q8_bytes {
    uint32_t word[DEPTH / 64][BYTES / 4 + 1];
    uint16_t scale;

    /* From d on, without what is past `bounds.depth()`; nothing, if no such row is to be read. */
    template <typename BOUNDS>
    DEVICE_METHOD void load(const tile_rows *rows, BOUNDS bounds, int row, int d, bool is_late) {
        const int left = bounds.left(row, d);
        const char *const words = rows->at(row, d + (is_late ? 2 : 0));
        const char *const end = words + (bounds.depth() - d);
        UNROLL
        for (int i = 0; i < DEPTH / 64; i++) {
            word[i][0] = 0;
            UNROLL
            for (int j = 0; j < BYTES; j += RUN) { /* rows are whole runs */
                word[i][j / 4 + 1] = word[i][j / 4 + 2] = 0;
                if (64 * i + j >= left) continue;
                word[i][j / 4 + 1] = *(const uint32_t *)(words + 64 * i + j);
                word[i][j / 4 + 2] = *(const uint32_t *)(words + 64 * i + j + 4);
            }
        }
        scale = 0;
        if (bounds.left(row, 0) <= 0) return;
        if (!is_late) {
            scale = *(const uint16_t *)end;
            return;
        }
        scale = *(const uint16_t *)(end - 2);
        UNROLL
        for (int i = 0; i < DEPTH / 64; i++) {
            if (64 * i < left) word[i][0] = *(const uint16_t *)(words + 64 * i - 2);
        }
    }

    /* The jth four bytes of the ith 64. */
    DEVICE_METHOD uint32_t four(int i, int j, q8_lateness late) const {
        return permute(word[i][j], word[i][j + 1], j == 0 ? late.head : late.tail);
    }
};

/* A lane's keys are 16 bytes of each 64, so that four lanes read what lies together. */
template <int DEPTH, h2o_dtype TYPE> struct q8_keys {
    q8_bytes<DEPTH, 16> bytes[2]; /* rows 8 apart: both begin a word, or none */
    q8_lateness late;

    DEVICE_METHOD static int query_run(int i) {
        return i / 2 * 64 + lane_column() * 8 + i % 2 * RUN;
    }

    DEVICE_METHOD void load(const step_item *item, int first, int end) {
        const tile_rows rows = keys_of_tile(item, first, end);
        const bool is_late = rows.is_late(lane_row());
        late = lateness_of(is_late);
        read_tile<DEPTH>(&rows, [&](auto bounds) {
            UNROLL
            for (int n = 0; n < 2; n++)
                bytes[n].load(&rows, bounds, 8 * n + lane_row(), query_run(0), is_late);
        });
    }

    DEVICE_METHOD void pairs(int n, int i, uint32_t b[2]) const {
        const uint32_t four = bytes[n].four(i / 4, i % 4, late);
        b[0] = pack_signed<TYPE>(four, 0);
        b[1] = pack_signed<TYPE>(four, 1);
    }

    /* The lanes of slot 8 n + row are 4 row and the next three. */
    DEVICE_METHOD float scale(int k) const {
        return f16_to_float(
            (uint16_t)shfl((uint32_t)bytes[k / 2].scale, 4 * (lane_column() + k % 2)));
    }
};

/* A lane's values are 8 bytes of each 64. */
template <int DEPTH, h2o_dtype TYPE> struct q8_values {
    enum { APART = 1 };
    q8_bytes<DEPTH, RUN> bytes[4];
    q8_lateness late[2];
    uint32_t scales[2]; /* float16: of two slots each */

    DEVICE_METHOD static int output_of(int i) { return run_output(i); }

    DEVICE_METHOD void load(const step_item *item, int first, int end) {
        const tile_rows rows = values_of_tile(item, first, end);
        const bool is_late[2] = {rows.is_late(lane_slot(0)), rows.is_late(lane_slot(1))};
        late[0] = lateness_of(is_late[0]);
        late[1] = lateness_of(is_late[1]);
        read_tile<DEPTH>(&rows, [&](auto bounds) {
            UNROLL
            for (int k = 0; k < 4; k++)
                bytes[k].load(&rows, bounds, lane_slot(k), output_of(0), is_late[k % 2]);
        });
    }

    /* Numbers of bfloat16 are exact, so that weights have the scale. */
    DEVICE_METHOD void weigh(float x[4]) {
        const uint16_t largest = 0x6007; /* 127 of it are below the largest float16 */
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (TYPE != H2O_F16) x[k] *= f16_to_float(bytes[k].scale);
            if (TYPE == H2O_F16 && k % 2 == 0)
                scales[k / 2] = fitting_pair(bytes[k].scale, bytes[k + 1].scale, largest);
        }
    }

    DEVICE_METHOD void pairs(int i, uint32_t a[4]) const {
        UNROLL
        for (int k = 0; k < 4; k += 2) {
            const uint32_t two =
                permute(bytes[k].four(i / 4, i % 4 / 2, late[0]),
                        bytes[k + 1].four(i / 4, i % 4 / 2, late[1]), i % 2 == 0 ? 0x5140 : 0x7362);
            UNROLL
            for (int j = 0; j < 2; j++) {
                a[k + j] = pack_signed<TYPE>(two, j);
                if (TYPE == H2O_F16) a[k + j] = fma_f16(a[k + j], scales[k / 2], 0);
            }
        }
    }
};

/* ---- Q4 ------------------------------------------------------------------ */

/* Rows begin at multiples of 4 bytes. A word has four elements of a group, and the four that come
 * 16 later in it; all words of a lane are of one group. */
template <int DEPTH, h2o_dtype TYPE> struct q4_values {
    enum { EACH = DEPTH / 64, APART = 1 };
    uint32_t word[4][EACH], scale_minimum[4];
    uint32_t scales[2], minima[2]; /* float16: of two slots each */
    float scale[4], minimum[4];    /* bfloat16: of numbers 1 + q / 16 */

    DEVICE_METHOD static int output_of(int i) {
        const int w = lane_row() * EACH + i / 4;
        return w / 4 * H2O_GROUP + w % 4 * 4 + i % 4 / 2 * 16 + i % 2 * 2;
    }

    DEVICE_METHOD void load(const step_item *item, int first, int end) {
        const tile_rows rows = values_of_tile(item, first, end);
        const int w = lane_row() * EACH;
        read_tile<DEPTH>(&rows, [&](auto bounds) {
            UNROLL
            for (int k = 0; k < 4; k++) {
                const char *const numbers = rows.value(k, 4 * w);
                const char *const group = numbers + (rows.D / 2 + w / 4 * 4 - 4 * w);
                const bool given = bounds.left_of_value(k, 8 * w) > 0;
                UNROLL
                for (int i = 0; i < EACH; i++)
                    word[k][i] = given ? *(const uint32_t *)(numbers + 4 * i) : 0;
                scale_minimum[k] = given ? *(const uint32_t *)group : 0;
            }
        });
    }

    DEVICE_METHOD void weigh(float *) {
        const uint16_t largest = 0x6c00; /* 15 of it, and a minimum, may be too large */
        UNROLL
        for (int k = 0; k < 4; k += 2) {
            const uint32_t first = scale_minimum[k], second = scale_minimum[k + 1];
            scales[k / 2] = fitting_pair(first, second, largest);
            minima[k / 2] = permute(first, second, 0x7632);
        }
        UNROLL
        for (int k = 0; k < 4; k++) {
            scale[k] = 16.0f * f16_to_float((uint16_t)scale_minimum[k]);
            minimum[k] = f16_to_float((uint16_t)(scale_minimum[k] >> 16)) - scale[k];
        }
    }

    /* Of slots k and k + 1 elements 2 j and the next one of the ith word's low halves, or high. */
    DEVICE_METHOD void pairs_of_f16(int k, int i, int j, bool high, uint32_t a[2]) const {
        const int shift = high ? 4 : 0;
        const uint32_t two =
            permute(word[k][i] >> shift & 0x0f0f0f0f, word[k + 1][i] >> shift & 0x0f0f0f0f,
                    j == 0 ? 0x5140 : 0x7362);
        UNROLL
        for (int e = 0; e < 2; e++) {
            const uint32_t numbers = subtract_f16(bytes_above_1024(two, e), 0x64006400);
            a[e] = fma_f16(numbers, scales[k / 2], minima[k / 2]);
        }
    }

    /* The same: float 1 + q / 16 is a byte of 128 + 8 q below that of the exponent. */
    DEVICE_METHOD void pairs_of_bf16(int k, int i, int j, bool high, uint32_t a[2]) const {
        float x[2][2];
        UNROLL
        for (int n = 0; n < 2; n++) {
            const uint32_t shifted = high ? word[k + n][i] >> 1 : word[k + n][i] << 3;
            const uint32_t bytes = (shifted & 0x78787878) | 0x80808080;
            UNROLL
            for (int e = 0; e < 2; e++) {
                const uint32_t selector = 0x7044 | (uint32_t)(2 * j + e) << 8;
                x[e][n] = fmaf(bits_float(permute(bytes, 0x3f000000, selector)), scale[k + n],
                               minimum[k + n]);
            }
        }
        UNROLL
        for (int e = 0; e < 2; e++) a[e] = pack<TYPE>(x[e][0], x[e][1]);
    }

    DEVICE_METHOD void pairs(int i, uint32_t a[4]) const {
        const bool high = i % 4 / 2 != 0;
        UNROLL
        for (int k = 0; k < 4; k += 2) {
            if (TYPE == H2O_F16) pairs_of_f16(k, i / 4, i % 2, high, &a[k]);
            if (TYPE != H2O_F16) pairs_of_bf16(k, i / 4, i % 2, high, &a[k]);
        }
    }
};

/* ---- Both ---------------------------------------------------------------- */

/* A warp's rows straight to registers, which have room for keys and values at once of at most 128
 * elements. */
template <int DEPTH, typename KEYS, typename VALUES> struct direct_rows {
    struct shared {};
    KEYS keys;
    VALUES values;

    DEVICE_METHOD void open(const step_item *, int, int, shared *) {}

    DEVICE_METHOD void load_keys(const step_item *item, int first, int end) {
        keys.load(item, first, end);
        if (DEPTH <= 128) values.load(item, first, end);
    }

    DEVICE_METHOD void load_values(const step_item *item, int first, int end) {
        if (DEPTH <= 128) return;
        sync_warp(); /* keeps the compiler from loading both at once */
        values.load(item, first, end);
    }

    DEVICE_METHOD void leave(const step_item *) {}
};

#endif
