/* matrix_stored.cuh - loads quantized rows of slots into the tiles of matrix_tiles.cuh. */
#ifndef H2O_CUDA_MATRIX_STORED_CUH
#define H2O_CUDA_MATRIX_STORED_CUH

#include "matrix_tiles.cuh"

/* Clips values that float16 cannot hold to its largest number. A run is all NaN or has none. */
template <h2o_dtype TYPE> DEVICE void clip_run(float x[RUN]) {
    const float largest = 65504.0f;
    float most = 0.0f;
    if (TYPE != H2O_F16) return;
    UNROLL
    for (int i = 0; i < RUN; i++) most = fmaxf(most, fabsf(x[i]));
    if (most <= largest) return;
    TAKEN(matrix_values_clipped, true);
    UNROLL
    for (int i = 0; i < RUN; i++) x[i] = fminf(fmaxf(x[i], -largest), largest);
}

/* Loads a tile of quantized rows from slot `first` on, zeros where is_key is 0.
 * load(row, d, D, x) reads elements d..d+RUN-1 of N adjacent rows at once, so that all lanes have
 * the same alignment; not every Q8 row is aligned to words. */
template <int DEPTH, h2o_dtype TYPE, int ROWS, int N, typename LOAD>
DEVICE void load_quantized(uint16_t (*tile)[DEPTH], const attend_item *item,
                           const row_source *source, int64_t first, const uint32_t *is_key,
                           LOAD load) {
    const int runs = DEPTH / RUN, step = ATTEND_THREADS / runs;
    const int d = threadIdx.x % runs * RUN;
    const int64_t D = item->p->dims.D;
    NO_UNROLL
    for (int top = threadIdx.x / runs * N; top < ROWS; top += step * N) {
        const char *row[N];
        float x[N][RUN] = {};
        UNROLL
        for (int i = 0; i < N; i++) {
            const int k = top + i;
            row[i] = source->data + (is_key[k] ? first + k : first) * source->pitch;
        }
        if (d < D) load(row, d, D, x);
        UNROLL
        for (int i = 0; i < N; i++) {
            const int k = top + i;
            vec16 run = {};
            if (is_key[k]) {
                clip_run<TYPE>(x[i]);
                UNROLL
                for (int j = 0; j < 4; j++) run.w[j] = pack<TYPE>(x[i][2 * j], x[i][2 * j + 1]);
            }
            store16(tile_at(tile, k, d), run);
        }
    }
}

/* Loads the integers of quantized keys, and their scales. */
template <int DEPTH, h2o_dtype TYPE, int ROWS>
DEVICE void load_numbers(uint16_t (*tile)[DEPTH], const attend_item *item, const row_source *source,
                         int64_t first, const uint32_t *is_key, float *scales) {
    const int k = threadIdx.x;
    by_key_dtype(source->type, [&](auto rows) {
        load_quantized<DEPTH, TYPE, ROWS, NUMBERS_LOADED>(
            tile, item, source, first, is_key,
            [&](const char *const row[], int64_t d, int64_t D, float x[][RUN]) {
                rows.template numbers<NUMBERS_LOADED>(row, d, D, x);
            });
        if (k < ROWS) {
            const char *const row = source->data + (first + k) * source->pitch;
            scales[k] = is_key[k] ? rows.scale(row, item->p->dims.D) : 0.0f;
        }
    });
}

/* Loads Q8 or Q4 values, rounded. */
template <int DEPTH, h2o_dtype TYPE, int ROWS>
DEVICE void load_rounded(uint16_t (*tile)[DEPTH], const attend_item *item, const row_source *source,
                         int64_t first, const uint32_t *is_key) {
    by_value_dtype(source->type, [&](auto rows) {
        load_quantized<DEPTH, TYPE, ROWS, VALUES_LOADED>(
            tile, item, source, first, is_key,
            [&](const char *const row[], int64_t d, int64_t D, float x[][RUN]) {
                rows.template load<VALUES_LOADED>(row, d, D, x);
            });
    });
}

#endif
