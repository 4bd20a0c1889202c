/* devices.h - the devices other than the CPU for which the core has kernels. Each is a folder that
 * defines a record of this type, and an entry of the list in devices.c. Kernels of such a device
 * are queued on one of its streams and use a workspace that the caller provides. */
#ifndef H2O_DEVICES_H
#define H2O_DEVICES_H

#include "run.h"

/* A device that a driver has found. */
typedef struct {
    char name[100];
    int major, minor; /* of its architecture */
} h2o_device_facts;

/* open, describe and load return a status. They may be called from any thread, without the GIL. */
typedef struct {
    const char *name;    /* "cuda" */
    int32_t device_type; /* DLPack's number for the device of the tensors */
    const h2o_ops *ops;
    int (*open)(int *version, int *count, h2o_error *error); /* driver version, device count */
    int (*describe)(int index, h2o_device_facts *facts, h2o_error *error);
    /* Loads a file of kernels from memory for one device. All devices use the first file. */
    int (*load)(const void *image, size_t size, int32_t index, h2o_error *error);
} h2o_device;

const h2o_device *const *h2o_devices(void); /* NULL-terminated */

/* The kernels for tensors on such a device, or NULL. */
const h2o_ops *h2o_device_table(int32_t device_type);

#endif
