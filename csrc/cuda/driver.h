/* driver.h - NVIDIA's driver, as far as h2o calls it. It is no part of the build: its library is
 * opened when a call first needs it.
 *
 * What outlives a call: the library, the image of the kernels, for each device the primary context
 * if it was ever needed, and for each context the kernels loaded into it. All are made once
 * and never given back. */
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

/* Whether a device has the kernels of a plan and the shared memory that they take; true where it
 * cannot be asked, so that a launch says why. */
bool cuda_has(int device, const cuda_plan *plan);

/* Copies the file of kernels, unless there is one already. */
int cuda_take_image(const void *image, size_t size, h2o_error *error);

/* A device's context made current, with its kernels: the thread's current context if that is of
 * this device, else the primary one until cuda_leave. */
typedef struct {
    const struct cuda_loaded *kernels;
    bool pushed;
} cuda_scope;

int cuda_enter(int device, cuda_scope *scope, h2o_error *error);
void cuda_leave(const cuda_scope *scope);

/* Both are queued on the stream and wait for nothing. The first sets bytes to 0. */
int cuda_clear(void *memory, size_t bytes, void *stream, h2o_error *error);
int cuda_start(const cuda_scope *scope, const cuda_launch *launch, void *workspace, void *stream,
               h2o_error *error);

#endif
