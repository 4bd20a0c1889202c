/* launch.h - the operations on CUDA devices. */
#ifndef H2O_CUDA_LAUNCH_H
#define H2O_CUDA_LAUNCH_H

#include "../run.h"

extern const h2o_ops h2o_ops_cuda;

/* Opens the driver and loads all kernels for a device, after cuda_take_image; else its first call
 * does so. */
int h2o_cuda_load(int32_t device, h2o_error *error);

#endif
