/* step_numbers.cuh - step_rows.cuh for quantized rows: each lane has adjacent bytes.
 *
 * The integers of keys become 16-bit elements unchanged. Values are rounded, as in
 * matrix_stored.cuh, except those of Q8 in bfloat16, which has as many bits: these remain integers
 * too. */
#ifndef H2O_CUDA_STEP_NUMBERS_CUH
#define H2O_CUDA_STEP_NUMBERS_CUH

#include "step_words.cuh"

/* Bytes 2 i and 2 i + 1 of a word, from 0 to 255, plus 1024, as float16. */
DEVICE uint32_t bytes_above_1024(uint32_t word, int i) {
    return permute(word, 0x64646464, i == 0 ? 0x5140 : 0x5342);
}

/* The same from -128 to 127, exactly. bfloat16 has 8 bits, so the low seven bits of a byte are
 * added to 128, and its sign bit decides whether 128 or 256 is subtracted. */
template <h2o_dtype TYPE> DEVICE uint32_t pack_signed(uint32_t word, int i) {
#if CAPABILITY >= 80
    if (TYPE == H2O_BF16) {
        const uint32_t both = permute(word, 0x43434343, i == 0 ? 0x5140 : 0x5342);
        return subtract_bf16(both & 0xff7fff7f, both & 0xff80ff80);
    }
#endif
    return subtract_f16(bytes_above_1024(word ^ 0x80808080, i), 0x64806480);
}

/* Packs two scales for float16. Scales were rounded up, so with a scale above `largest` the largest
 * integers may exceed float16 though no element did. The next lower scale is used instead. NaN
 * stays NaN. */
DEVICE uint32_t fitting_pair(uint32_t first, uint32_t second, uint16_t largest) {
    const uint32_t both = permute(first, second, 0x5410);
    const uint32_t to_sign = 0x7fffu - largest; /* makes larger ones carry into the sign bit */
    return both - ((both + (to_sign | to_sign << 16)) >> 15 & 0x00010001);
}

/* ---- Q8 and S4 ------------------------------------------------------------- */

/* A lane's keys are 16 elements of each 64, so that lanes read adjacent bytes. */
template <int DEPTH, h2o_dtype TYPE, typename BYTES> struct number_keys {
    BYTES bytes[2]; /* rows 8 apart: both begin at a word, or neither */
    lateness late;

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

    /* The lanes of slot 8 n + row are 4 * row and the next three. */
    DEVICE_METHOD float scale(int k) const {
        return float_from_f16(
            (uint16_t)shfl((uint32_t)bytes[k / 2].scale, 4 * (lane_column() + k % 2)));
    }
};

/* A lane's values are RUN adjacent ones of each 64. */
template <int DEPTH, h2o_dtype TYPE> struct q8_values {
    enum { APART = 1 };
    q8_bytes<DEPTH, RUN> bytes[4];
    lateness late[2];
    uint32_t scales[2]; /* float16: scales of two slots each */

    DEVICE_METHOD static int output_of(int i) { return i / 4 * 64 + lane_row() * RUN + i % 4 * 2; }

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

    /* The integers are exact in bfloat16, so the weights are multiplied by the scale. */
    DEVICE_METHOD void weigh(float x[4]) {
        const uint16_t largest = 0x6007; /* 127 times it is below the largest float16 */
        UNROLL
        for (int k = 0; k < 4; k++) {
            if (TYPE != H2O_F16) x[k] *= float_from_f16(bytes[k].scale);
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

/* Rows begin at multiples of 4 bytes. A word has four elements of a group and the four that are 16
 * later in it. All words of a lane belong to one group. */
template <int DEPTH, h2o_dtype TYPE> struct q4_values {
    enum { EACH = DEPTH / 64, APART = 1 };
    uint32_t word[4][EACH], scale_minimum[4];
    uint32_t scales[2], minima[2]; /* float16: of two slots each */
    float scale[4], minimum[4];    /* bfloat16: for numbers 1 + q / 16 */

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
        const uint16_t largest = 0x6c00; /* 15 times it, plus a minimum, may be too large */
        UNROLL
        for (int k = 0; k < 4; k += 2) {
            const uint32_t first = scale_minimum[k], second = scale_minimum[k + 1];
            scales[k / 2] = fitting_pair(first, second, largest);
            minima[k / 2] = permute(first, second, 0x7632);
        }
        UNROLL
        for (int k = 0; k < 4; k++) {
            scale[k] = 16.0f * float_from_f16((uint16_t)scale_minimum[k]);
            minimum[k] = float_from_f16((uint16_t)(scale_minimum[k] >> 16)) - scale[k];
        }
    }

    /* Elements 2 j and 2 j + 1 of the i-th word's low or high halves, for slots k and k + 1. */
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

    /* The same. The float 1 + q / 16 has the byte 128 + 8 q below the byte of the exponent. */
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

/* Loads a warp's rows directly to registers, which hold keys and values at once only if these have
 * at most 128 elements. */
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
