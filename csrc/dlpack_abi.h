/* dlpack_abi.h - declarations of the part of DLPack that h2o uses.
 *
 * DLPack is a stable C ABI (https://dmlc.github.io/dlpack/latest/c_api.html).
 * These structs have the layout of version 1.3, which the assertions at the end
 * check.
 */
#ifndef H2O_DLPACK_ABI_H
#define H2O_DLPACK_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { DL_MAJOR = 1, DL_MINOR = 3 };

enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

#define DL_FLAG_READ_ONLY (UINT64_C(1) << 0)
#define DL_FLAG_IS_COPIED (UINT64_C(1) << 1)

typedef struct {
    uint32_t major, minor;
} dl_version;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} dl_dtype;

/* The first element is byte_offset bytes after data. Strides count elements;
 * before version 1.2 they may be NULL, which means C order. */
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} dl_tensor;

/* The contents of a capsule named "dltensor". The deleter may be NULL. */
typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

/* The contents of a capsule named "dltensor_versioned". If the major version is a different one,
 * the fields after the deleter may have another meaning. */
typedef struct dl_managed_versioned {
    dl_version version;
    void *context;
    void (*deleter)(struct dl_managed_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_versioned;

/* The contents of the capsule type(x).__dlpack_c_exchange_api__: functions that need no capsule and
 * no Python call. The table lives as long as the process. If the major version is a different one,
 * only the header may be read; previous leads to tables of older versions. */
typedef struct dl_exchange_header {
    dl_version version;
    struct dl_exchange_header *previous;
} dl_exchange_header;

typedef struct {
    dl_exchange_header header;
    void (*new_tensor)(void); /* functions that h2o does not call have no signature here */
    void (*export_managed)(void);
    void (*import_managed)(void);
    /* Fills *tensor with memory that still belongs to the object. Returns 0, or -1 and a Python
     * exception. May be NULL. */
    int (*borrow)(void *object, dl_tensor *tensor);
    /* Gets the stream on which a device's work is queued; 0, or -1 and a Python exception. */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} dl_exchange_api;

_Static_assert(sizeof(dl_dtype) == 4, "DLDataType");
_Static_assert(offsetof(dl_managed_versioned, context) == 8,
               "DLManagedTensorVersioned.manager_ctx");
#if UINTPTR_MAX == UINT64_MAX
_Static_assert(sizeof(dl_tensor) == 48, "DLTensor");
_Static_assert(offsetof(dl_tensor, device_type) == 8, "DLTensor.device");
_Static_assert(offsetof(dl_tensor, ndim) == 16, "DLTensor.ndim");
_Static_assert(offsetof(dl_tensor, dtype) == 20, "DLTensor.dtype");
_Static_assert(offsetof(dl_tensor, shape) == 24, "DLTensor.shape");
_Static_assert(offsetof(dl_tensor, strides) == 32, "DLTensor.strides");
_Static_assert(offsetof(dl_tensor, byte_offset) == 40, "DLTensor.byte_offset");
_Static_assert(sizeof(dl_managed) == 64, "DLManagedTensor");
_Static_assert(offsetof(dl_managed, deleter) == 56, "DLManagedTensor.deleter");
_Static_assert(sizeof(dl_managed_versioned) == 80, "DLManagedTensorVersioned");
_Static_assert(offsetof(dl_managed_versioned, deleter) == 16, "DLManagedTensorVersioned.deleter");
_Static_assert(offsetof(dl_managed_versioned, flags) == 24, "DLManagedTensorVersioned.flags");
_Static_assert(offsetof(dl_managed_versioned, tensor) == 32, "DLManagedTensorVersioned.dl_tensor");
_Static_assert(offsetof(dl_exchange_api, new_tensor) == 16, "DLPackExchangeAPI.header");
_Static_assert(offsetof(dl_exchange_api, borrow) == 40, "DLPackExchangeAPI.dltensor_from_...");
_Static_assert(sizeof(dl_exchange_api) == 56, "DLPackExchangeAPI");
#endif

#endif
