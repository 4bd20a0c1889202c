/* matrix_tiles.cuh - attend with tensor cores: tiles of 16-bit elements in shared memory, and their
 * matrix products.
 *
 * A tile of logits has MATRIX_ROWS rows, which stay in place, and COLUMNS columns, which are copied
 * in asynchronously, one tile after another. Each of the four warps computes 16 rows of it
 * (matrix_sums.cuh: 32 rows of half the columns) by mma.m16n8k16: of each 16 x 8 product lane i
 * has, in c[0..1], elements 2 (i % 4) and the next of row i / 4, and in c[2..3] the same of row
 * i / 4 + 8. So four lanes share a row.
 *
 * Quantized rows of slots are converted to 16 bits as they are loaded. Keys become the integers q of
 * quantize.h, which 16 bits hold exactly; their scale is applied after the product, so logits and scores
 * are as exact as with floats. Values are rounded to the format of the queries, with a relative
 * error u of at most 2^-9 in bfloat16 and 2^-12 in float16, as those of new tokens were. The error
 * of an output is u sum p |v|, as much as the rounding of p causes. */
#ifndef H2O_CUDA_MATRIX_TILES_CUH
#define H2O_CUDA_MATRIX_TILES_CUH

#include "attend_tiles.cuh"

enum {
    NUMBERS_LOADED = 4, /* quantized keys that a thread loads before it uses the first, ... */
    VALUES_LOADED = 2   /* ... and values; with more of either, registers run out */
};

/* Which keys of a tile queries see: all; new keys up to their own; stored keys that exist. Queries
 * past the last token may see what is no key, since their results are not used. */
typedef enum { SEES_ALL, SEES_PAST, SEES_STORED } tile_sight;

template <int DEPTH> struct matrix_buffer {
    enum { COLUMNS = CUDA_MATRIX_COLUMNS(DEPTH) };
    uint16_t rows[MATRIX_ROWS][DEPTH];   /* queries */
    uint16_t columns[2][COLUMNS][DEPTH]; /* keys, and their values */
    uint32_t is_key[MATRIX_ROWS];        /* see load_presence */
    float scales[MATRIX_ROWS];           /* of quantized keys */
};

/* Where element d of a tile's row is. The runs of RUN elements are swizzled: their indices are
 * XORed with the row's, so that the same run of eight adjacent rows is in different banks. */
template <typename ROW> DEVICE auto *tile_at(ROW *tile, int row, int d) {
    return &tile[row][d ^ row % 8 * RUN];
}

DEVICE int lane_row() { return threadIdx.x % 32 / 4; }
DEVICE int lane_column() { return threadIdx.x % 4 * 2; }
DEVICE int warp_row() { return threadIdx.x / 32 * 16; }

/* The maximum over the four lanes that share a row. */
DEVICE float quad_max(float x) {
    x = fmaxf(x, shfl_xor(x, 1));
    return fmaxf(x, shfl_xor(x, 2));
}

DEVICE float quad_sum(float x) {
    x += shfl_xor(x, 1);
    return x + shfl_xor(x, 2);
}

/* ---- Tiles --------------------------------------------------------------- */

/* Loads 16-bit elements d..d+RUN-1 at any stride and alignment; 0 from D on. */
DEVICE vec16 load_halves(row_ref row, int64_t d, int64_t D) {
    const char *const p = row.data + 2 * d * row.stride;
    vec16 x = {};
    UNROLL
    for (int i = 0; i < RUN; i++) {
        if (d + i >= D) continue;
        const uint32_t half = *(const uint16_t *)(p + 2 * i * row.stride);
        x.w[i / 2] |= half << 16 * (i % 2);
    }
    return x;
}

/* Where rows are, looked up once: row i is at data + i * pitch. */
typedef struct {
    const char *data;
    int64_t pitch;  /* bytes */
    int32_t stride; /* of elements; 0: 1, and runs are aligned to their size */
    h2o_dtype type; /* of rows in slots */
} row_source;

DEVICE row_source open_rows(const char *data, int64_t pitch, int64_t stride) {
    const bool aligned = stride == 1 && pitch % 16 == 0 && is_aligned(data);
    return row_source{data, pitch, aligned ? 0 : (int32_t)stride, H2O_NONE};
}

/* Rows of slots. */
DEVICE row_source stored_source(const slot_rows *rows) {
    row_source source = open_rows(rows->data, rows->stride, 1);
    source.type = rows->type;
    return source;
}

/* Rows of a tensor [B,.,Q,D]. */
DEVICE row_source token_source(const attend_item *item, const h2o_view *from, int64_t h) {
    const row_ref row = tensor_row(from, item->b, h, 0);
    return open_rows(row.data, 2 * from->stride[2], row.stride);
}

DEVICE row_source key_source(const attend_item *item, bool stored) {
    return stored ? stored_source(&item->store.keys) : token_source(item, &item->p->keys, item->g);
}

DEVICE row_source value_source(const attend_item *item, bool stored) {
    return stored ? stored_source(&item->store.values)
                  : token_source(item, &item->p->values, item->g);
}

/* Loads a tile of slots or of tokens from `first` on, elements `begin` on of their rows. Rows that
 * do not exist, or whose is_key (if given) is 0, are zeros. Aligned runs are copied asynchronously,
 * and the caller waits for them; others are loaded at once. */
template <int DEPTH, int ROWS>
DEVICE void fetch_matrix(uint16_t (*tile)[DEPTH], const attend_item *item, const row_source *source,
                         bool stored, int64_t first, const uint32_t *is_key, int begin = 0) {
    const int runs = DEPTH / RUN, step = ATTEND_THREADS / runs, each = ROWS / step;
    const int top = threadIdx.x / runs, d = threadIdx.x % runs * RUN;
    /* Without asynchronous copies, registers hold the rows of a turn, and few are left. */
    const int turn = CAPABILITY < 80 && DEPTH > 128 ? 1 : each;
    const int64_t D = item->p->dims.D - begin, count = stored ? item->slots : item->tokens;
    /* without padding a token's index is its column, and `columns` need not be read */
    const bool listed = !stored && h2o_given(&item->p->mask);
    const int64_t stride = source->stride != 0 ? source->stride : 1;
    const char *const rows = source->data + 2 * begin * stride, *from = rows + 2 * d;
    if (source->stride != 0 || (d < D && d + RUN > D)) {
        TAKEN(matrix_fetch_elements, true);
        NO_UNROLL
        for (int k = top; k < ROWS; k += step) {
            const int64_t i = first + k;
            row_ref row = {NULL, H2O_F16, stride};
            if (i < count && (!is_key || is_key[k])) {
                row.data = rows + (listed ? item->columns[i] : i) * source->pitch;
            }
            store16(tile_at(tile, k, d), row.data ? load_halves(row, d, D) : vec16{});
        }
    } else if (first + ROWS <= count && !listed && !is_key && d < D) {
        TAKEN(matrix_fetch_all, true);
        from += (first + top) * source->pitch;
        NO_UNROLL
        for (int at = 0; at < each; at += turn) {
            UNROLL
            for (int k = at; k < at + turn; k++, from += step * source->pitch) {
                copy_async<16>(tile_at(tile, top + k * step, d), from);
            }
        }
    } else {
        NO_UNROLL
        for (int at = 0; at < each; at += turn) {
            UNROLL
            for (int k = at; k < at + turn; k++) {
                const int64_t i = first + top + k * step;
                const bool empty = is_key && !is_key[top + k * step];
                TAKEN(matrix_fetch_some, i >= count || empty);
                if (i < count && d < D && !empty) {
                    const int64_t row = listed ? item->columns[i] : i;
                    copy_async<16>(tile_at(tile, top + k * step, d), from + row * source->pitch);
                } else {
                    store16(tile_at(tile, top + k * step, d), vec16{});
                }
            }
        }
    }
}

template <h2o_dtype TYPE> DEVICE uint32_t pack(float low, float high) {
#if CAPABILITY >= 80
    if (TYPE == H2O_BF16) return pack_bf16(low, high);
#endif
    return pack_f16(low, high);
}

/* The factor by which weights of at most 2^most are multiplied before they are rounded, and by
 * which sums of their products with values are divided at the end. float16 has full precision only
 * from 2^-14 on and is 0 below 2^-24; keys next to a sink have smaller weights. */
template <h2o_dtype TYPE> DEVICE float weight_unit(int most) {
    return TYPE == H2O_F16 ? (float)(1 << (15 - most)) : 1.0f;
}

template <h2o_dtype TYPE> DEVICE uint32_t pack_weights(float low, float high, int most) {
    return pack<TYPE>(low * weight_unit<TYPE>(most), high * weight_unit<TYPE>(most));
}

/* ---- Elements of a tile -------------------------------------------------- */

/* Whether this thread's share of a tile's elements is finite. If an exponent is all ones, adding
 * one to its last place carries into the sign bit, which is cleared before. */
template <int DEPTH, h2o_dtype TYPE, int ROWS>
DEVICE bool finite_part(const uint16_t (*tile)[DEPTH]) {
    const uint32_t exponents = TYPE == H2O_BF16 ? 0x7f807f80 : 0x7c007c00;
    const uint32_t last = TYPE == H2O_BF16 ? 0x00800080 : 0x04000400;
    const int runs = DEPTH / RUN;
    uint32_t carries = 0;
    for (int i = threadIdx.x; i < ROWS * runs; i += ATTEND_THREADS) {
        const vec16 x = load16(tile_at(tile, i / runs, i % runs * RUN));
        UNROLL
        for (int j = 0; j < 4; j++) carries |= (x.w[j] & exponents) + last;
    }
    return (carries & 0x80008000) == 0;
}

/* ---- Products ------------------------------------------------------------ */

template <h2o_dtype TYPE>
DEVICE void multiply(float c[4], const uint32_t a[4], const uint32_t b[2]) {
#if CAPABILITY >= 80
    if (TYPE == H2O_BF16) return multiply_bf16(c, a, b);
#endif
    multiply_f16(c, a, b);
}

/* How load_matrices finds tile_at(tile, first + row, d + shift), if first is a multiple of 8 and d
 * one of 16, both constants. Rows begin at multiples of 128 bytes, so only the bits of a run change
 * in the lane's address; the rest is a constant in the instruction. */
DEVICE uint32_t flip_of(int row, int shift, int d) {
    return 2 * (uint32_t)(row % 8 * RUN ^ shift ^ d % 64);
}
template <int DEPTH> DEVICE uint32_t past_of(int first, int d) {
    return 2 * (uint32_t)(first * DEPTH + d / 64 * 64);
}

/* Loads elements d..d+15 of 16 columns, as two matrices b of mma. */
template <int DEPTH>
DEVICE void load_columns(uint32_t b[4], const uint16_t (*tile)[DEPTH], int first, int d) {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, shift = lane / 8 % 2 * 8;
    load_matrices(b, tile[row], flip_of(row, shift, d), past_of<DEPTH>(first, d));
}

/* The same for 16 rows, as a matrix a. */
template <int DEPTH>
DEVICE void load_rows(uint32_t a[4], const uint16_t (*tile)[DEPTH], int first, int d) {
    const int lane = threadIdx.x % 32, row = lane % 16, shift = lane / 16 * 8;
    load_matrices(a, tile[row], flip_of(row, shift, d), past_of<DEPTH>(first, d));
}

/* The same elements of 16 rows, as two matrices b. */
template <int DEPTH>
DEVICE void load_values(uint32_t b[4], const uint16_t (*tile)[DEPTH], int first, int d) {
    const int lane = threadIdx.x % 32, row = lane % 16, shift = lane / 16 * 8;
    load_transposed(b, tile[row], flip_of(row, shift, d), past_of<DEPTH>(first, d));
}

/* Adds the dot products of a warp's 16 rows with all columns of a tile. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void add_matrix_dots(const matrix_buffer<DEPTH> *buffer, const uint16_t (*tile)[DEPTH],
                            float c[matrix_buffer<DEPTH>::COLUMNS / 8][4]) {
    const int columns = matrix_buffer<DEPTH>::COLUMNS;
    UNROLL
    for (int d = 0; d < DEPTH; d += 16) {
        uint32_t a[4], b[4];
        load_rows(a, buffer->rows, warp_row(), d);
        UNROLL
        for (int n = 0; n < columns; n += 16) {
            load_columns(b, tile, n, d);
            multiply<TYPE>(c[n / 8], a, b);
            multiply<TYPE>(c[n / 8 + 1], a, b + 2);
        }
    }
}

/* Turns products with the integers of quantized keys into those with the keys. scale(i) is the
 * scale of the key of element i of c. */
template <int TILES, typename SCALE> DEVICE void scale_dots(float c[TILES][4], SCALE scale) {
    UNROLL
    for (int i = 0; i < TILES * 4; i++) c[i / 4][i % 4] *= scale(i);
}

/* Turns products with keys into logits. */
template <int TILES> DEVICE void dots_to_logits(float c[TILES][4], float scale, float softcap) {
    UNROLL
    for (int i = 0; i < TILES * 4; i++) c[i / 4][i % 4] *= scale;
    TAKEN(matrix_softcap, softcap > 0.0f);
    if (softcap <= 0.0f) return;
    const float inverse = inverse_cap(softcap);
    UNROLL
    for (int i = 0; i < TILES * 4; i++) c[i / 4][i % 4] = capped_small(c[i / 4][i % 4], inverse);
    sync_warp(); /* keeps the compiler from merging the two steps */
    UNROLL
    for (int i = 0; i < TILES * 4; i++)
        c[i / 4][i % 4] = capped_large(c[i / 4][i % 4], softcap, inverse);
}

/* Without a cap, logits are kept as products. The value of 1 as a logit, ... */
DEVICE float logit_unit(float scale, float softcap) {
    return softcap > 0.0f || !(scale > 0.0f) ? 1.0f : scale;
}

/* ... and as an exponent of 2. */
DEVICE float exponent_unit(float scale, float softcap) { return logit_unit(scale, softcap) * LOG2_E; }

template <int TILES> DEVICE void dots_to_exponents(float c[TILES][4], float scale, float softcap) {
    if (softcap > 0.0f || !(scale > 0.0f)) dots_to_logits<TILES>(c, scale, softcap);
}

#endif
