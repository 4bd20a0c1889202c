/* attend.cuh - attention of Q new queries over the stored keys and the new keys up to their own,
 * and the attention that each key receives.
 *
 * Three kernels in this order; the last two are instantiated for head dimensions up to 64, 128 and
 * 256:
 *
 *   prepare   columns of each row's tokens, and the decay weights of the queries
 *   forward   outputs [B,Q,H,D], and the row max and factor of each query: forward.cuh or
 *             matrix_forward.cuh. If another attention has computed the outputs and log sums, the
 *             kernel `known` runs instead.
 *   sums      scores of keys from column sums: sums.cuh or matrix_sums.cuh
 *
 * The matrix_ variants use tensor cores. They need queries, keys and values in the same 16-bit
 * format, or quantized in slots. plan.c chooses. */
#ifndef H2O_CUDA_ATTEND_CUH
#define H2O_CUDA_ATTEND_CUH

#include "forward.cuh"
#include "matrix_forward.cuh"
#include "matrix_sums.cuh"
#include "sums.cuh"

/* Grid: B. */
KERNEL(h2o_cuda_prepare, h2o_attend_params) {
    prepare_row(&params.mask, &params.dims, params.policy.decay, blockIdx.x, params.dims.Q,
                cuda_attend_slots(&params), workspace, (select_buffer *)dynamic_shared);
}

/* Grid: tiles of tokens, H, B. flash attention gives +infinity for a query whose softmax is NaN. */
KERNEL(h2o_cuda_known, h2o_attend_params) {
    const int64_t token = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t h = blockIdx.y, b = blockIdx.z;
    const attend_item item = open_attend(&params, workspace, b, h / params.dims.R);
    if (token >= item.tokens) return;
    const float given = *(const float *)h2o_at(&params.known_log_sums, b, h, item.columns[token]);
    const float log_sum = given == INFINITY ? given - given : given;
    const bool matrices = cuda_fits_matrices(&params);
    const float unit = matrices ? logit_unit(params.scale, params.softcap) : 1.0f;
    write_softmax(&item, h, token, log_sum / unit, 1.0f);
}

/* For any floats, and any rows of slots. */
#define DEFINE_ATTEND(depth)                                                                       \
    KERNEL(h2o_cuda_forward_##depth, h2o_attend_params) {                                          \
        forward_block<depth>(&params, workspace, dynamic_shared);                                  \
    }                                                                                              \
    KERNEL(h2o_cuda_sums_##depth, h2o_attend_params) {                                             \
        sums_block<depth>(&params, workspace, dynamic_shared);                                     \
    }

DEFINE_ATTEND(64)
DEFINE_ATTEND(128)
DEFINE_ATTEND(256)

/* With tensor cores. Registers are limited so that this many blocks of forward and of sums fit on a
 * multiprocessor: as many as its shared memory has room for, unless loops then need local
 * memory. */
#define FORWARD_64 (CAPABILITY < 100 ? 3 : 2)
#define SUMS_64 (CAPABILITY == 75 ? 3 : 4)
#define SUMS_128 (CAPABILITY == 80 || CAPABILITY == 90 ? 3 : 2)
#define DEFINE_MATRIX(type, TYPE, depth, forward_blocks, sums_blocks)                              \
    BOUNDED_KERNEL(h2o_cuda_forward_##type##_##depth, h2o_attend_params, ATTEND_THREADS,           \
                   forward_blocks) {                                                               \
        matrix_forward<depth, TYPE>(&params, workspace, dynamic_shared);                           \
    }                                                                                              \
    BOUNDED_KERNEL(h2o_cuda_sums_##type##_##depth, h2o_attend_params, ATTEND_THREADS,              \
                   sums_blocks) {                                                                  \
        matrix_sums_block<depth, TYPE>(&params, workspace, dynamic_shared);                        \
    }

DEFINE_MATRIX(f16, H2O_F16, 64, FORWARD_64, SUMS_64)
DEFINE_MATRIX(f16, H2O_F16, 128, 2, SUMS_128)
DEFINE_MATRIX(f16, H2O_F16, 256, 1, 2)
#if CAPABILITY >= 80
DEFINE_MATRIX(bf16, H2O_BF16, 64, FORWARD_64, SUMS_64)
DEFINE_MATRIX(bf16, H2O_BF16, 128, 2, SUMS_128)
DEFINE_MATRIX(bf16, H2O_BF16, 256, 1, 2)
#endif

#endif
