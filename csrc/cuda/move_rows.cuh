/* move_rows.cuh - moves keys or values of a head into its slots, as listed by evict.
 *
 * Rows are copied by the widest words that every address of the call allows, which is found out
 * once. A row is copied by as many threads as it has words, and each thread loads words of
 * COPY_LOADS rows before it writes the first. Rows that must be quantized or gathered are stored by
 * one warp each.
 *
 * No slot is both read and written by a list of moves, so neither their order nor the number of
 * blocks that share them matters. */
#ifndef H2O_CUDA_MOVE_ROWS_CUH
#define H2O_CUDA_MOVE_ROWS_CUH

#include "stored_rows.cuh"

enum { COPY_LOADS = 4 };

/* Move m copies candidate sources[m] (a slot, or slots + the column of a new token) to slot
 * destinations[m]. */
typedef struct {
    slot_rows rows;
    row_ref first;     /* the first new row, ... */
    int64_t pitch;     /* ... and bytes from one new row to the next */
    int64_t slots, D, count;
    const int32_t *sources, *destinations;
} row_moves;

/* One of `count` blocks that share the moves. */
typedef struct {
    int64_t index, count;
} block_share;

DEVICE const char *source_of(const row_moves *moves, int64_t i) {
    return i < moves->slots ? slot_row(&moves->rows, i)
                            : moves->first.data + (i - moves->slots) * moves->pitch;
}

/* Whether new rows have the same bytes in their slots. */
DEVICE bool is_copied(const row_moves *moves) {
    return moves->rows.type == moves->first.type && moves->first.stride == 1;
}

/* Calls use(word) with the widest word that all addresses and strides, ORed into `bits`, allow. */
template <typename USE> DEVICE void by_words(uint64_t bits, USE use) {
    if (bits % 16 == 0) {
        use(vec16{});
    } else if (bits % 8 == 0) {
        use((uint64_t)0);
    } else if (bits % 4 == 0) {
        use((uint32_t)0);
    } else if (bits % 2 == 0) {
        use((uint16_t)0);
    } else {
        use((uint8_t)0);
    }
}

/* Copies a stored row. */
DEVICE void copy_row(char *to, const char *from, int64_t bytes) {
    by_words((uintptr_t)to | (uintptr_t)from, [&](auto word) {
        typedef decltype(word) WORD;
        const int64_t words = bytes / (int64_t)sizeof(WORD);
        NO_UNROLL
        for (int64_t i = threadIdx.x % 32; i < words; i += 32)
            ((WORD *)to)[i] = ((const WORD *)from)[i];
        NO_UNROLL
        for (int64_t i = words * (int64_t)sizeof(WORD) + threadIdx.x % 32; i < bytes; i += 32)
            to[i] = from[i];
    });
}

/* Number of threads that copy a row of `words` words: a power of two. */
DEVICE int copiers(int64_t words) {
    int threads = 32;
    while (threads / 2 >= words && threads > 1) threads /= 2;
    return threads;
}

template <typename WORD> DEVICE void copy_moves(const row_moves *moves, block_share share) {
    const int64_t bytes = h2o_row_bytes(moves->rows.type, moves->D);
    const int64_t words = bytes / (int64_t)sizeof(WORD), tail = bytes % (int64_t)sizeof(WORD);
    const int threads = copiers(words > tail ? words : tail);
    const int lane = threadIdx.x % threads, team = threadIdx.x / threads;
    const int64_t teams = blockDim.x / threads, batch = teams * COPY_LOADS;
    NO_UNROLL
    for (int64_t m = share.index * batch + team; m < moves->count; m += share.count * batch) {
        const char *from[COPY_LOADS];
        char *to[COPY_LOADS] = {};
        UNROLL
        for (int i = 0; i < COPY_LOADS; i++) {
            const int64_t at = m + i * teams;
            from[i] = nullptr;
            if (at >= moves->count) continue;
            from[i] = source_of(moves, moves->sources[at]);
            to[i] = slot_row(&moves->rows, moves->destinations[at]);
        }
        NO_UNROLL
        for (int64_t w = lane; w < words; w += threads) {
            WORD x[COPY_LOADS] = {};
            UNROLL
            for (int i = 0; i < COPY_LOADS; i++) {
                if (from[i]) x[i] = ((const WORD *)from[i])[w];
            }
            UNROLL
            for (int i = 0; i < COPY_LOADS; i++) {
                if (from[i]) ((WORD *)to[i])[w] = x[i];
            }
        }
        NO_UNROLL
        for (int64_t c = bytes - tail + lane; c < bytes; c += threads) {
            UNROLL
            for (int i = 0; i < COPY_LOADS; i++) {
                if (from[i]) to[i][c] = from[i][c];
            }
        }
    }
}

/* Moves each row by one warp. MANY: there are enough registers for a whole row. */
template <bool MANY> DEVICE void store_moves(const row_moves *moves, block_share share) {
    const int64_t warps = blockDim.x / 32;
    NO_UNROLL
    for (int64_t m = share.index * warps + threadIdx.x / 32; m < moves->count;
         m += share.count * warps) {
        const int64_t i = moves->sources[m];
        char *const to = slot_row(&moves->rows, moves->destinations[m]);
        if (i < moves->slots) {
            copy_row(to, source_of(moves, i), h2o_row_bytes(moves->rows.type, moves->D));
        } else {
            const row_ref row = {source_of(moves, i), moves->first.type, moves->first.stride};
            if (MANY && moves->D <= CUDA_DEPTH) {
                store_loaded<CUDA_DEPTH>(to, moves->rows.type, row, moves->D);
            } else {
                store_row(to, moves->rows.type, row, moves->D);
            }
        }
    }
}

/* Makes a block's share of the moves. */
template <bool MANY> DEVICE void move_rows(const row_moves *moves, block_share share) {
    TAKEN(moves_by_block, share.index > 0);
    TAKEN(moves_converted, !is_copied(moves));
    if (!is_copied(moves)) {
        store_moves<MANY>(moves, share);
        return;
    }
    const uint64_t addresses = (uintptr_t)moves->rows.data | (uint64_t)moves->rows.stride |
                               (uintptr_t)moves->first.data | (uint64_t)moves->pitch;
    by_words(addresses, [&](auto word) { copy_moves<decltype(word)>(moves, share); });
}

#endif
