/* attend.cuh - queries see the stored keys and the new ones up to their own: first what each
 * query's attention counts, then outputs, then what each key got. */
#ifndef H2O_CUDA_ATTEND_CUH
#define H2O_CUDA_ATTEND_CUH

#include "forward.cuh"
#include "matrix_forward.cuh"
#include "matrix_sums.cuh"
#include "sums.cuh"

/* Grid: B. */
KERNEL(h2o_cuda_prepare, h2o_attend_params) {
    DYN_SHARED(room);
    prepare_row(&params.mask, &params.dims, params.policy.decay, blockIdx.x, params.dims.Q, workspace,
                (select_room *)room);
}
EXPORT_KERNEL(h2o_cuda_prepare, h2o_attend_params)

/* Floats, and whatever is stored in bytes. */
#define DEFINE_ATTEND(depth)                                                                       \
    KERNEL(h2o_cuda_forward_##depth, h2o_attend_params) {                                          \
        DYN_SHARED(shared);                                                                        \
        forward_block<depth>(&params, workspace, shared);                                          \
    }                                                                                              \
    EXPORT_KERNEL(h2o_cuda_forward_##depth, h2o_attend_params)                                     \
    KERNEL(h2o_cuda_sums_##depth, h2o_attend_params) {                                             \
        DYN_SHARED(shared);                                                                        \
        sums_block<depth>(&params, workspace, shared);                                             \
    }                                                                                              \
    EXPORT_KERNEL(h2o_cuda_sums_##depth, h2o_attend_params)

DEFINE_ATTEND(64)
DEFINE_ATTEND(128)
DEFINE_ATTEND(256)

/* All in the same 16 bits. */
#define DEFINE_MATRIX(type, TYPE, depth)                                                           \
    KERNEL(h2o_cuda_forward_##type##_##depth, h2o_attend_params) {                                 \
        DYN_SHARED(shared);                                                                        \
        matrix_forward<depth, TYPE>(&params, workspace, shared);                                   \
    }                                                                                              \
    EXPORT_KERNEL(h2o_cuda_forward_##type##_##depth, h2o_attend_params)                            \
    KERNEL(h2o_cuda_sums_##type##_##depth, h2o_attend_params) {                                    \
        DYN_SHARED(shared);                                                                        \
        matrix_sums_block<depth, TYPE>(&params, workspace, shared);                                \
    }                                                                                              \
    EXPORT_KERNEL(h2o_cuda_sums_##type##_##depth, h2o_attend_params)

DEFINE_MATRIX(f16, H2O_F16, 64)
DEFINE_MATRIX(f16, H2O_F16, 128)
DEFINE_MATRIX(f16, H2O_F16, 256)
DEFINE_MATRIX(bf16, H2O_BF16, 64)
DEFINE_MATRIX(bf16, H2O_BF16, 128)
DEFINE_MATRIX(bf16, H2O_BF16, 256)

#endif
