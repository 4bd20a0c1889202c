/* driver.h - the part of NVIDIA's driver that h2o calls. The build does not link it: its library is
 * opened when a call first needs it.
 *
 * What outlives a call: the library, the image of the kernels, the primary context of each device
 * that has needed it, and the kernels loaded into each context. All are created once and never
 * released. */
#ifndef H2O_CUDA_DRIVER_H
#define H2O_CUDA_DRIVER_H

#include "../devices.h"
#include "plan.h"

enum { CUDA_DEVICE = 2 /* DLPack's number */ };

/* All functions that return int return H2O_OK or fail like h2o_fail: with H2O_EMEMORY if a device
 * is out of memory, else with H2O_EBACKEND. They may be called from any thread. */

/* The CUDA version of the driver, 1000 * major + 10 * minor, and its number of devices. */
int cuda_open(int *version, int *devices, h2o_error *error);
int cuda_describe(int device, h2o_device_facts *facts, h2o_error *error); /* compute capability */

/* Whether a device has the kernels of a plan and the shared memory that they need. True if this
 * cannot be found out, so that the launch reports why. */
bool cuda_has(int device, const cuda_plan *plan);

/* Copies the file of kernels, unless there already is one. */
int cuda_take_image(const void *image, size_t size, h2o_error *error);

/* A current context with its kernels: the thread's current context if it belongs to the device,
 * else the device's primary context, until cuda_leave. */
typedef struct {
    const struct cuda_loaded *kernels;
    bool pushed;
} cuda_scope;

int cuda_enter(int device, cuda_scope *scope, h2o_error *error);
void cuda_leave(const cuda_scope *scope);

/* Both queue work on the stream and return at once. The first one sets bytes to 0. */
int cuda_clear(void *memory, size_t bytes, void *stream, h2o_error *error);
int cuda_start(const cuda_scope *scope, const cuda_launch *launch, void *workspace, void *stream,
               h2o_error *error);

#endif
