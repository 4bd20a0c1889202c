/* step_words.cuh - the words of quantized rows of Q8 and S4: loaded by a lane, four elements at a
 * time.
 *
 * These rows begin at multiples of 2 bytes only. If a row does not begin at a word, its words are
 * read from two bytes later on, and each is put together from two. */
#ifndef H2O_CUDA_STEP_WORDS_CUH
#define H2O_CUDA_STEP_WORDS_CUH

#include "step_rows.cuh"

/* Selectors that turn the words of a row into those that its integers begin with; see q8_bytes. */
struct lateness {
    uint32_t head, tail;
};

DEVICE lateness lateness_of(bool is_late) {
    return lateness{is_late ? 0x5410u : 0x7654u, is_late ? 0x5432u : 0x7654u};
}

/* BYTES adjacent bytes of each 64 bytes of a row, and its scale. */
template <int DEPTH, int BYTES> struct q8_bytes {
    uint32_t word[DEPTH / 64][BYTES / 4 + 1];
    uint16_t scale;

    /* Loads from d on, but nothing past bounds.depth() and nothing of rows outside the bounds. */
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

    /* The j-th four bytes of the i-th 64. */
    DEVICE_METHOD uint32_t four(int i, int j, lateness late) const {
        return permute(word[i][j], word[i][j + 1], j == 0 ? late.head : late.tail);
    }
};

/* The same for 16 elements of each 64 of a row of S4, which are the low or the high halves of 16
 * bytes. Two lanes read the same bytes. */
template <int DEPTH> struct s4_bytes {
    uint32_t word[DEPTH / 64][5];
    uint16_t scale;
    int shift; /* makes the lane's halves high ones */

    template <typename BOUNDS>
    DEVICE_METHOD void load(const tile_rows *rows, BOUNDS bounds, int row, int d, bool is_late) {
        const int left = bounds.left(row, d), byte = (int)q4_elements(d);
        const char *const words = rows->at(row, byte + (is_late ? 2 : 0));
        const char *const end = words + (bounds.depth() / 2 - byte);
        shift = d % H2O_GROUP < H2O_GROUP / 2 ? 4 : 0;
        UNROLL
        for (int i = 0; i < DEPTH / 64; i++) {
            const bool given = 64 * i < left; /* rows are whole groups */
            word[i][0] = is_late && given ? *(const uint16_t *)(words + 32 * i - 2) : 0;
            UNROLL
            for (int j = 0; j < 4; j++)
                word[i][j + 1] = given ? *(const uint32_t *)(words + 32 * i + 4 * j) : 0;
        }
        scale = 0;
        if (bounds.left(row, 0) > 0) scale = *(const uint16_t *)(end - (is_late ? 2 : 0));
    }

    /* The half n stands for the byte 16 * n - 120, which is 16 * n + 8 with the other sign bit. */
    DEVICE_METHOD uint32_t four(int i, int j, lateness late) const {
        const uint32_t bytes = permute(word[i][j], word[i][j + 1], j == 0 ? late.head : late.tail)
                               << shift;
        return ((bytes & 0xf0f0f0f0) | 0x08080808) ^ 0x80808080;
    }
};

#endif
