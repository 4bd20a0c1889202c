/* devices.h - the devices beside the CPU that the core has kernels for: each is a folder, which
 * defines a record of this kind, and an entry of the list in devices.c. What such a device is given
 * is queued on a stream of its own, with a workspace that the caller lends. */
#ifndef H2O_DEVICES_H
#define H2O_DEVICES_H

#include "run.h"

/* One that a driver has found. */
typedef struct {
    char name[100];
    int major, minor; /* of its architecture */
} h2o_device_facts;

/* open, describe and load return a status. Any thread may call them, without the GIL. */
typedef struct {
    const char *name;    /* "cuda" */
    int32_t device_type; /* DLPack's number of tensors that it serves */
    const h2o_ops *ops;
    int (*open)(int *version, int *count, h2o_error *error); /* the driver: what it has */
    int (*describe)(int index, h2o_device_facts *facts, h2o_error *error);
    /* Loads the kernels, a file of them in memory, for a device; the first file stands for all. */
    int (*load)(const void *image, size_t size, int32_t index, h2o_error *error);
} h2o_device;

const h2o_device *const *h2o_devices(void); /* NULL-ended */

/* The kernels for such tensors, or NULL. */
const h2o_ops *h2o_device_table(int32_t device_type);

#endif
