/* simulate.cuh - a whole text of Q tokens through a cache that evicts after every token: outputs
 * [B,Q,H,D], final scores [B,G,Q], and when each key was evicted, evicted_at [B,G,Q].
 *
 *   1. Dense part: the prompt, and the tokens after it until the budget of some head is full, are
 *      processed by the kernels of attend (attend.cuh) for all heads together.
 *   2. One block for each head prunes the prompt to the budget, as evict does (evict.cuh).
 *   3. The rest is processed in windows (window.cuh). */
#ifndef H2O_CUDA_SIMULATE_CUH
#define H2O_CUDA_SIMULATE_CUH

#include "attend.cuh"
#include "simulate_head.cuh"
#include "window_matrix.cuh"
#include "window_rows.cuh"

/* Grid: B. */
KERNEL(h2o_cuda_simulate_prepare, h2o_simulate_params) {
    prepare_row(&params.mask, &params.dims, params.policy.decay, blockIdx.x,
                dense_tokens(&params, blockIdx.x), 0, workspace, (select_buffer *)dynamic_shared);
}

/* Grid: G, B. */
KERNEL(h2o_cuda_simulate_open, h2o_simulate_params) {
    open_windows(&params, workspace, (select_buffer *)dynamic_shared);
}

/* Grid: G, B. */
BOUNDED_KERNEL(h2o_cuda_simulate_rows, h2o_simulate_params, WINDOW_THREADS, 1) {
    window_rows(&params, workspace, (window_buffer *)dynamic_shared);
}

/* Grid of logits: blocks that share the tiles of a head, G, B. Grid of values: tiles times parts of
 * the cells, G, B. */
#define DEFINE_WINDOW(kind, buffer, logits, values)                                                \
    KERNEL(h2o_cuda_simulate_logits##kind, h2o_simulate_params) {                                  \
        logits(&params, workspace, (buffer *)dynamic_shared);                                      \
    }                                                                                              \
    KERNEL(h2o_cuda_simulate_values##kind, h2o_simulate_params) {                                  \
        values(&params, workspace, (buffer *)dynamic_shared);                                      \
    }

DEFINE_WINDOW(, window_buffers, window_logits, window_values)
DEFINE_WINDOW(_f16, window_matrices, window_logits_matrix<H2O_F16>, window_values_matrix<H2O_F16>)
#if CAPABILITY >= 80
DEFINE_WINDOW(_bf16, window_matrices, window_logits_matrix<H2O_BF16>,
              window_values_matrix<H2O_BF16>)
#endif

#endif
