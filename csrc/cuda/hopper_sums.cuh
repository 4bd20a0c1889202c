/* hopper_sums.cuh - matrix_sums.cuh with warpgroup products, for devices of compute capability 9.0:
 * all four warps of a block multiply their keys by a whole tile of queries, which stays in shared
 * memory. Each warp multiplies 16 of its 32 keys at a time.
 *
 * Other devices, and rows of more than 128 elements, whose keys do not fit into registers, use the
 * loop of matrix_sums.cuh. */
#ifndef H2O_CUDA_HOPPER_SUMS_CUH
#define H2O_CUDA_HOPPER_SUMS_CUH

#include "matrix_keys.cuh"

#if WARPGROUPS
enum { GROUP_KEYS = 2, GROUP_COLUMNS = 64 };

template <h2o_dtype TYPE>
DEVICE void multiply_group(float c[8][4], const uint32_t a[4], uint32_t b, bool add) {
    if (TYPE == H2O_BF16) return multiply_group_bf16(c, a, b, add);
    multiply_group_f16(c, a, b, add);
}

/* Starts the products of each warp's i-th 16 keys with a tile of queries; b is its first panel. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void start_products(const key_matrices<DEPTH> *keys, int i, uint32_t b, float c[8][4]) {
    open_products();
    UNROLL
    for (int d = 0; d < DEPTH; d += 16) {
        const int elements = d / PANEL * GROUP_COLUMNS * PANEL + d % PANEL;
        multiply_group<TYPE>(c, keys->a[d / 16][i], b + elements / 8, d > 0);
    }
    close_products();
}

/* Adds up tiles of queries, beginning with `tile`, which is already being fetched. */
template <int DEPTH, h2o_dtype TYPE>
DEVICE void sum_by_groups(const sums_of_keys *of, const query_source *source, query_tile tile,
                          const key_matrices<DEPTH> *keys, sums_buffer<DEPTH> *buffer,
                          float sum[LANE_KEYS]) {
    const uint32_t tiles = group_matrix(buffer->columns), size = GROUP_COLUMNS * DEPTH / 8;
    NO_UNROLL
    for (int stage = 0; is_tile(&tile); stage = 1 - stage) {
        const uint32_t b = tiles + shfl(stage, 0) * size; /* for ptxas: uniform */
        auto turn = open_turn<DEPTH, GROUP_KEYS, GROUP_COLUMNS>(of, &tile, stage);
        advance(&tile, of->share->parts);
        wait_copies<0>();
        share_with_products();
        turn.far = await_queries<DEPTH>(of->item, stage, buffer); /* all are done with the last */
        if (is_tile(&tile)) fetch_queries<DEPTH>(of, source, &tile, 1 - stage, buffer);
        UNROLL
        for (int i = 0; i < 2; i++) {
            float c[8][4];
            start_products<DEPTH, TYPE>(keys, i, b, c);
            wait_products(c);
            turn.key = 16 * i;
            if (!is_unseen(&turn, keys))
                add_turn(&turn, of->item, keys, buffer, c, sum + i * GROUP_KEYS);
        }
    }
}
#endif

#endif
