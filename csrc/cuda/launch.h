/* launch.h - the record of CUDA devices for the list of devices (devices.c). */
#ifndef H2O_CUDA_LAUNCH_H
#define H2O_CUDA_LAUNCH_H

#include "../devices.h"

extern const h2o_device h2o_device_cuda;

#endif
