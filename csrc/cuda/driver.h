/* driver.h - the functions of NVIDIA's driver (libcuda) that launch.c needs: load kernels, clear
 * memory, launch. The build does not link the library: the first call that needs it opens it.
 *
 * What outlives a call: the library, the image of the kernels, for each device the primary context
 * if it was ever needed, and for each context the kernels that were found in it. All are created
 * once and never released. */
#ifndef H2O_CUDA_DRIVER_H
#define H2O_CUDA_DRIVER_H

#include "../devices.h"
#include "plan.h"

enum { CUDA_DEVICE = 2 /* DLPack's number */ };

/* All of these return H2O_OK, or fail as h2o_fail does: H2O_EMEMORY where a device has no memory
 * left, else H2O_EBACKEND. Any thread may call them. */

/* The driver's version, 1000 times the major one of CUDA, and how many devices it has. */
int cuda_open(int *version, int *devices, h2o_error *error);
int cuda_describe(int device, h2o_device_facts *facts, h2o_error *error); /* compute capability */

/* Copies the file of kernels, unless there is one already. */
int cuda_take_image(const void *image, size_t size, h2o_error *error);

/* The context that is current from cuda_enter to cuda_leave, with its kernels: the thread's current
 * context if that is one of this device, else the device's primary context. */
typedef struct {
    const struct cuda_loaded *kernels;
    bool pushed;
} cuda_stay;

int cuda_enter(int device, cuda_stay *stay, h2o_error *error);
void cuda_leave(const cuda_stay *stay);

/* Both are queued on the stream and wait for nothing. */
int cuda_clear(void *memory, size_t bytes, void *stream, h2o_error *error);
int cuda_start(const cuda_stay *stay, const cuda_launch *launch, void *workspace, void *stream,
               h2o_error *error);

#endif
