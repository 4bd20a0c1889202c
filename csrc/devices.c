/* devices.c - the list of devices: see devices.h. */
#include "devices.h"

#include "cuda/launch.h"

static const h2o_device *const devices[] = {&h2o_device_cuda, NULL};

const h2o_device *const *h2o_devices(void) { return devices; }

const h2o_ops *h2o_device_table(int32_t device_type) {
    for (const h2o_device *const *device = devices; *device != NULL; device++) {
        if ((*device)->device_type == device_type) return (*device)->ops;
    }
    return NULL;
}
