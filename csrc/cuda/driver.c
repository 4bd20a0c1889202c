/* driver.c - calls NVIDIA's driver API by the names of its entries: opens the library, retains
 * primary contexts, loads the kernels once per context, queues memsets and launches.
 *
 * Types and entries are declared as in cuda.h of CUDA 12. Names that end in _v2 are those under
 * which the library exports later versions of an entry. */
#include "driver.h"

#include "../system.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult, CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_FOUND = 500,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    MOST_DEVICES = 64,
};

/* X(entry, parameters) */
#define ENTRIES(X)                                                                                 \
    X(cuInit, (unsigned flags))                                                                    \
    X(cuDriverGetVersion, (int *version))                                                          \
    X(cuGetErrorName, (CUresult code, const char **text))                                          \
    X(cuGetErrorString, (CUresult code, const char **text))                                        \
    X(cuDeviceGetCount, (int *count))                                                              \
    X(cuDeviceGet, (CUdevice * device, int ordinal))                                               \
    X(cuDeviceGetName, (char *name, int length, CUdevice device))                                  \
    X(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                          \
    X(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                            \
    X(cuCtxGetCurrent, (CUcontext * context))                                                      \
    X(cuCtxGetDevice, (CUdevice * device))                                                         \
    X(cuCtxGetId, (CUcontext context, unsigned long long *id))                                     \
    X(cuCtxPushCurrent_v2, (CUcontext context))                                                    \
    X(cuCtxPopCurrent_v2, (CUcontext * context))                                                   \
    X(cuThreadExchangeStreamCaptureMode, (int *mode))                                              \
    X(cuModuleLoadData, (CUmodule * module, const void *image))                                    \
    X(cuModuleUnload, (CUmodule module))                                                           \
    X(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char *name))             \
    X(cuFuncSetAttribute, (CUfunction function, int attribute, int value))                         \
    X(cuLaunchKernel, (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,     \
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,      \
                       CUstream stream, void **params, void **extra))                              \
    X(cuMemsetD8Async, (void *memory, unsigned char value, size_t bytes, CUstream stream))         \
    X(cuFuncLoad, (CUfunction function)) /* since 12.4; before, cuModuleGetFunction loads */

#define DECLARE(name, parameters) static CUresult(*name) parameters;
ENTRIES(DECLARE)

static const struct {
    const char *name;
    void *entry; /* the pointer that gets its address */
} entries[] = {
#define LIST(name, parameters) {#name, &name},
    ENTRIES(LIST)};

/* The kernels of a context; the newest entry comes first. Contexts are identified by their id,
 * since an id, unlike a pointer, is never reused. */
typedef struct cuda_loaded {
    struct cuda_loaded *next;
    unsigned long long context;
    CUfunction functions[CUDA_KERNELS]; /* as cuda_kernel_names; NULL if not for this device */
} cuda_loaded;

/* Writers hold the lock; readers need none. A fork waits for a writer, which may be loading
 * kernels: the child would wait forever for a thread that it does not have. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool ready;
static void *image;
static _Atomic(cuda_loaded *) all_loaded;
static _Atomic(CUcontext) primary[MOST_DEVICES];
static atomic_int capabilities[MOST_DEVICES], shared_memory[MOST_DEVICES]; /* 0: not yet known */

static void hold_lock(void) { pthread_mutex_lock(&lock); }
static void drop_lock(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void survive_fork(void) {
    h2o_at_fork(hold_lock, drop_lock, drop_lock);
}

/* ---- Errors -------------------------------------------------------------- */

static int fail_entry(h2o_error *error, const char *entry, const char *about, CUresult code) {
    const char *name = NULL, *text = NULL;
    const h2o_status status = code == CUDA_ERROR_OUT_OF_MEMORY ? H2O_EMEMORY : H2O_EBACKEND;
    cuGetErrorName(code, &name);
    cuGetErrorString(code, &text);
    return h2o_fail(error, status, "%s%s%s: CUDA error %d (%s): %s", entry, *about ? " of " : "",
                    about, code, name ? name : "unknown", text ? text : "no description");
}

/* Calls an entry, and returns from the enclosing function if it fails. */
#define TRY(entry, about, ...)                                                                     \
    do {                                                                                           \
        const CUresult code = entry(__VA_ARGS__);                                                  \
        if (code != CUDA_SUCCESS) return fail_entry(error, #entry, about, code);                   \
    } while (0)

/* ---- The library --------------------------------------------------------- */

static int open_library(h2o_error *error) {
    const char *reason;
    void *const library = h2o_open_library("nvcuda.dll", "libcuda.so.1", &reason);
    if (library == NULL) return h2o_fail(error, H2O_EBACKEND, "no driver (%s)", reason);
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const bool has_entry = h2o_find_symbol(library, entries[i].name, entries[i].entry);
        if (!has_entry && entries[i].entry != (void *)&cuFuncLoad) {
            h2o_close_library(library);
            return h2o_fail(error, H2O_EBACKEND,
                            "the driver has no %s: it is older than 525, which h2o needs",
                            entries[i].name);
        }
    }
    TRY(cuInit, "", 0);
    return H2O_OK;
}

static int require_library(h2o_error *error) {
    int status = H2O_OK;
    if (ready) return status;
    pthread_mutex_lock(&lock);
    if (!ready) {
        status = open_library(error);
        ready = status == H2O_OK;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int cuda_open(int *version, int *devices, h2o_error *error) {
    const int status = require_library(error);
    if (status != H2O_OK) return status;
    TRY(cuDriverGetVersion, "", version);
    TRY(cuDeviceGetCount, "", devices);
    return H2O_OK;
}

int cuda_describe(int ordinal, h2o_device_facts *facts, h2o_error *error) {
    CUdevice device;
    const int status = require_library(error);
    if (status != H2O_OK) return status;
    *facts = (h2o_device_facts){0};
    TRY(cuDeviceGet, "", &device, ordinal);
    TRY(cuDeviceGetName, "", facts->name, sizeof facts->name - 1, device);
    TRY(cuDeviceGetAttribute, "", &facts->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        device);
    TRY(cuDeviceGetAttribute, "", &facts->minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        device);
    return H2O_OK;
}

/* Threads that get here at the same time both ask, and get the same numbers. */
static int ask_limits(int ordinal, h2o_error *error) {
    CUdevice device;
    h2o_device_facts facts;
    int shared;
    const int status = cuda_describe(ordinal, &facts, error);
    if (status != H2O_OK) return status;
    TRY(cuDeviceGet, "", &device, ordinal);
    TRY(cuDeviceGetAttribute, "", &shared, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        device);
    shared_memory[ordinal] = shared;
    capabilities[ordinal] = 10 * facts.major + facts.minor;
    return H2O_OK;
}

bool cuda_has(int ordinal, const cuda_plan *plan) {
    h2o_error error;
    if (ordinal < 0 || ordinal >= MOST_DEVICES) return true;
    if (capabilities[ordinal] == 0 && ask_limits(ordinal, &error) != H2O_OK) return true;
    const unsigned shared = (unsigned)shared_memory[ordinal];
    bool fits = capabilities[ordinal] >= plan->capability;
    for (int i = 0; i < plan->count; i++) fits = fits && plan->launch[i].shared <= shared;
    return fits;
}

int cuda_take_image(const void *bytes, size_t size, h2o_error *error) {
    int status = H2O_OK;
    pthread_mutex_lock(&lock);
    if (image == NULL && (image = malloc(size)) != NULL) memcpy(image, bytes, size);
    if (image == NULL) status = h2o_fail(error, H2O_EMEMORY, "no memory for the kernels");
    pthread_mutex_unlock(&lock);
    return status;
}

/* ---- Contexts ------------------------------------------------------------ */

static cuda_loaded *find_loaded(unsigned long long context) {
    cuda_loaded *loaded = all_loaded;
    while (loaded != NULL && loaded->context != context) loaded = loaded->next;
    return loaded;
}

/* Each kernel may use all the shared memory that a block of the device can have. It is loaded here,
 * since loading it at its first launch would break the capture of a graph. */
static int find_kernels(CUmodule module, cuda_loaded *to, h2o_error *error) {
    CUdevice device;
    int shared;
    TRY(cuCtxGetDevice, "", &device);
    TRY(cuDeviceGetAttribute, "", &shared, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        device);
    for (int i = 0; i < CUDA_KERNELS; i++) {
        const char *const name = cuda_kernel_names[i];
        const CUresult code = cuModuleGetFunction(&to->functions[i], module, name);
        if (code == CUDA_ERROR_NOT_FOUND) {
            to->functions[i] = NULL;
            continue;
        }
        if (code != CUDA_SUCCESS) return fail_entry(error, "cuModuleGetFunction", name, code);
        TRY(cuFuncSetAttribute, name, to->functions[i],
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared);
        if (cuFuncLoad != NULL) TRY(cuFuncLoad, name, to->functions[i]);
    }
    return H2O_OK;
}

static int load_image(cuda_loaded *to, h2o_error *error) {
    CUmodule module;
    if (image == NULL) return h2o_fail(error, H2O_EBACKEND, "this build of h2o has no kernels");
    const CUresult code = cuModuleLoadData(&module, image);
    if (code != CUDA_SUCCESS) {
        int version = 0;
        cuDriverGetVersion(&version);
        fail_entry(error, "cuModuleLoadData", "", code);
        const size_t used = strlen(error->text);
        snprintf(
            error->text + used, sizeof error->text - used,
            " (the driver is for CUDA %d.%d; h2o's kernels need the one for 12.0, that is 525, "
            "or a later one, and a device of compute capability 7.5 or more)",
            version / 1000, version % 1000 / 10);
        return error->status;
    }
    const int status = find_kernels(module, to, error);
    if (status != H2O_OK) cuModuleUnload(module);
    return status;
}

/* Loads the kernels into the current context. Meanwhile calls that the capture of a graph forbids,
 * such as loading, are allowed, since they do not affect what is captured. */
static int load_kernels(unsigned long long context, h2o_error *error) {
    cuda_loaded *const made = calloc(1, sizeof *made);
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (made == NULL) return h2o_fail(error, H2O_EMEMORY, "no memory for a list of kernels");
    cuThreadExchangeStreamCaptureMode(&mode);
    const int status = load_image(made, error);
    cuThreadExchangeStreamCaptureMode(&mode);
    if (status != H2O_OK) {
        free(made);
        return status;
    }
    made->context = context;
    made->next = all_loaded;
    all_loaded = made;
    return H2O_OK;
}

static int require_kernels(cuda_scope *scope, h2o_error *error) {
    unsigned long long id;
    int status = H2O_OK;
    TRY(cuCtxGetId, "", NULL, &id);
    scope->kernels = find_loaded(id);
    if (scope->kernels != NULL) return H2O_OK;
    pthread_mutex_lock(&lock);
    if (find_loaded(id) == NULL) status = load_kernels(id, error);
    pthread_mutex_unlock(&lock);
    scope->kernels = find_loaded(id);
    return status;
}

/* Makes the device's primary context, which torch and the CUDA runtime use, the current one. */
static int push_primary(int ordinal, CUdevice device, cuda_scope *scope, h2o_error *error) {
    if (ordinal >= MOST_DEVICES) {
        return h2o_fail(error, H2O_EBACKEND, "CUDA device %d: h2o supports the first %d", ordinal,
                        MOST_DEVICES);
    }
    CUcontext context = primary[ordinal];
    if (context == NULL) { /* two threads here at the same time retain it twice: harmless */
        TRY(cuDevicePrimaryCtxRetain, "", &context, device);
        primary[ordinal] = context;
    }
    TRY(cuCtxPushCurrent_v2, "", context);
    scope->pushed = true;
    return H2O_OK;
}

int cuda_enter(int ordinal, cuda_scope *scope, h2o_error *error) {
    CUcontext context = NULL;
    CUdevice device, current = -1;
    *scope = (cuda_scope){0};
    int status = require_library(error);
    if (status != H2O_OK) return status;
    TRY(cuDeviceGet, "", &device, ordinal);
    TRY(cuCtxGetCurrent, "", &context);
    if (context != NULL) TRY(cuCtxGetDevice, "", &current);
    if (context == NULL || current != device) status = push_primary(ordinal, device, scope, error);
    if (status == H2O_OK) status = require_kernels(scope, error);
    if (status != H2O_OK) cuda_leave(scope);
    return status;
}

void cuda_leave(const cuda_scope *scope) {
    CUcontext context;
    if (scope->pushed) cuCtxPopCurrent_v2(&context);
}

/* ---- Work ---------------------------------------------------------------- */

int cuda_clear(void *memory, size_t bytes, void *stream, h2o_error *error) {
    TRY(cuMemsetD8Async, "", memory, 0, bytes, stream);
    return H2O_OK;
}

int cuda_start(const cuda_scope *scope, const cuda_launch *launch, void *workspace, void *stream,
               h2o_error *error) {
    const CUfunction function = scope->kernels->functions[launch->kernel];
    const char *const name = cuda_kernel_names[launch->kernel];
    void *params[] = {(void *)(uintptr_t)launch->params, &workspace};
    if (function == NULL) return h2o_fail(error, H2O_EBACKEND, "%s: no such kernel", name);
    TRY(cuLaunchKernel, name, function, launch->grid[0], launch->grid[1], launch->grid[2],
        launch->block, 1, 1, launch->shared, stream, params, NULL);
    return H2O_OK;
}
