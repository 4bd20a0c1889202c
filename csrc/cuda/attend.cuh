/* attend.cuh - queries see the stored keys and the new ones up to their own: first what each
 * query's attention counts, then outputs, then what each key got. */
#ifndef H2O_CUDA_ATTEND_CUH
#define H2O_CUDA_ATTEND_CUH

#include "forward.cuh"
#include "sums.cuh"

/* Grid: B. */
KERNEL(h2o_cuda_prepare, h2o_attend_params) {
    DYN_SHARED(room);
    prepare_row(&params.mask, &params.dims, params.decay, blockIdx.x, params.dims.Q, workspace,
                (select_room *)room);
}
EXPORT_KERNEL(h2o_cuda_prepare, h2o_attend_params)

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

#endif
