/* step_numbers.cuh - step_rows.cuh for quantised rows: a lane has so many bytes in sequence.
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

/* How the words of a row become those that its numbers begin with, see q8_bytes. */
struct q8_lateness {
    uint32_t head, tail;
};

/* Of a row from a multiple of RUN on, and of those 8 rows before and after it. */
DEVICE q8_lateness lateness_of(const char *from) {
    const bool is_late = ((uint32_t)(uintptr_t)from & 2) != 0;
    return q8_lateness{is_late ? 0x5410u : 0x7654u, is_late ? 0x5432u : 0x7654u};
}

/* Of each 64 bytes of a row so many in sequence; those from `left` on are not read. */
template <int DEPTH, int BYTES> struct q8_bytes {
    uint32_t word[DEPTH / 64][BYTES / 4 + 1];

    DEVICE_METHOD void load(const char *from, int left) {
        const char *const words = one_address(from + ((uint32_t)(uintptr_t)from & 2));
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

    /* The jth four bytes of the ith 64. */
    DEVICE_METHOD uint32_t four(int i, int j, q8_lateness late) const {
        return permute(word[i][j], word[i][j + 1], j == 0 ? late.head : late.tail);
    }
};

DEVICE uint16_t load_half(const char *from, bool given) {
    return given ? *(const uint16_t *)from : 0;
}

/* A lane's keys are 16 bytes of each 64, so that four lanes read what lies together. */
template <int DEPTH, h2o_dtype TYPE> struct q8_keys {
    q8_bytes<DEPTH, 16> bytes[2];
    q8_lateness late;
    uint16_t scales[4];

    DEVICE_METHOD static int query_run(int i) {
        return i / 2 * 64 + lane_column() * 8 + i % 2 * RUN;
    }

    DEVICE_METHOD void load(const step_item *item, int64_t first, int64_t end) {
        const tile_rows rows = keys_of_tile(item, first, end);
        const int d = query_run(0);
        late = lateness_of(rows.key(0, d));
        read_tile<DEPTH>(&rows, [&](auto bounds) {
            UNROLL
            for (int n = 0; n < 2; n++)
                bytes[n].load(rows.key(n, d), bounds.left_of_key(n, d));
            UNROLL
            for (int k = 0; k < 4; k++)
                scales[k] = load_half(rows.value(k, rows.D), bounds.left_of_value(k, 0) > 0);
        });
    }

    DEVICE_METHOD void pairs(int n, int i, uint32_t b[2]) const {
        const uint32_t four = bytes[n].four(i / 4, i % 4, late);
        b[0] = pack_signed<TYPE>(four, 0);
        b[1] = pack_signed<TYPE>(four, 1);
    }

    DEVICE_METHOD float scale(int k) const { return f16_to_float(scales[k]); }
};

/* A lane's values are 8 bytes of each 64. */
template <int DEPTH, h2o_dtype TYPE> struct q8_values {
    q8_bytes<DEPTH, RUN> bytes[4];
    q8_lateness late[2];
    uint16_t scales[4];

    DEVICE_METHOD static int output_of(int i) { return run_output(i); }

    DEVICE_METHOD void load(const step_item *item, int64_t first, int64_t end) {
        const tile_rows rows = values_of_tile(item, first, end);
        const int d = output_of(0);
        late[0] = lateness_of(rows.value(0, d));
        late[1] = lateness_of(rows.value(1, d));
        read_tile<DEPTH>(&rows, [&](auto bounds) {
            UNROLL
            for (int k = 0; k < 4; k++) {
                const char *const from = rows.value(k, d);
                bytes[k].load(from, bounds.left_of_value(k, d));
                scales[k] = load_half(from + (rows.D - d), bounds.left_of_value(k, 0) > 0);
            }
        });
    }

    /* Numbers of bfloat16 are exact, so that weights have the scale. */
    DEVICE_METHOD void weigh(float x[4]) const {
        if (TYPE == H2O_F16) return;
        UNROLL
        for (int k = 0; k < 4; k++) x[k] *= f16_to_float(scales[k]);
    }

    DEVICE_METHOD void pairs(int i, uint32_t a[4]) const {
        const uint16_t largest = 0x6007; /* 127 of it are below the largest float16 */
        UNROLL
        for (int k = 0; k < 4; k += 2) {
            const uint32_t two = permute(bytes[k].four(i / 4, i % 4 / 2, late[0]),
                                         bytes[k + 1].four(i / 4, i % 4 / 2, late[1]),
                                         i % 2 == 0 ? 0x5140 : 0x7362);
            const uint32_t both = fitting_pair<TYPE>(scales[k], scales[k + 1], largest);
            UNROLL
            for (int j = 0; j < 2; j++) {
                a[k + j] = pack_signed<TYPE>(two, j);
                if (TYPE == H2O_F16) a[k + j] = fma_f16(a[k + j], both, 0);
            }
        }
    }
};

/* ---- Q4 ------------------------------------------------------------------ */

/* Rows begin at multiples of 4 bytes. A word has four elements of a group, and the four that come
 * 16 later in it; all words of a lane are of one group. */
template <int DEPTH, h2o_dtype TYPE> struct q4_values {
    enum { EACH = DEPTH / 64 };
    uint32_t word[4][EACH], scale_minimum[4];
    float scale[4], minimum[4]; /* bfloat16: of numbers 1 + q / 16 */

    DEVICE_METHOD static int output_of(int i) {
        const int w = lane_row() * EACH + i / 4;
        return w / 4 * H2O_GROUP + w % 4 * 4 + i % 4 / 2 * 16 + i % 2 * 2;
    }

    DEVICE_METHOD void load(const step_item *item, int64_t first, int64_t end) {
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
        if (TYPE == H2O_F16) return;
        UNROLL
        for (int k = 0; k < 4; k++) {
            scale[k] = 16.0f * f16_to_float((uint16_t)scale_minimum[k]);
            minimum[k] = f16_to_float((uint16_t)(scale_minimum[k] >> 16)) - scale[k];
        }
    }

    /* Of slots k and k + 1 elements 2 j and the next one of the ith word's low halves, or high. */
    DEVICE_METHOD void pairs_of_f16(int k, int i, int j, bool high, uint32_t a[2]) const {
        const uint16_t largest = 0x6c00; /* 15 of it, and a minimum, may be too large */
        const int shift = high ? 4 : 0;
        const uint32_t two =
            permute(word[k][i] >> shift & 0x0f0f0f0f, word[k + 1][i] >> shift & 0x0f0f0f0f,
                    j == 0 ? 0x5140 : 0x7362);
        const uint32_t scales = fitting_pair<TYPE>((uint16_t)scale_minimum[k],
                                                   (uint16_t)scale_minimum[k + 1], largest);
        const uint32_t minima = permute(scale_minimum[k], scale_minimum[k + 1], 0x7632);
        UNROLL
        for (int e = 0; e < 2; e++) {
            const uint32_t numbers = subtract_f16(bytes_above_1024(two, e), 0x64006400);
            a[e] = fma_f16(numbers, scales, minima);
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

#endif
