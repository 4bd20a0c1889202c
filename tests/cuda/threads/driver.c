/* driver.c - a libcuda.so.1 for test_driver.c: devices and kernels that do nothing, and counters of
 * calls. It takes no lock, because a lock would order threads that h2o leaves unordered. */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { DEVICES = 4, DEEPEST = 4, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201 };

typedef struct {
    int device;
} context;

static context contexts[DEVICES] = {{0}, {1}, {2}, {3}};
static _Thread_local context *current[DEEPEST];
static _Thread_local int depth;

/* Counters that the tests read. */
atomic_int loads[DEVICES], unloads, launches[DEVICES], strangers;

static void count(atomic_int *counter) {
    atomic_fetch_add_explicit(counter, 1, memory_order_relaxed);
}

static context *now(void) { return depth ? current[depth - 1] : NULL; }

int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuGetErrorName(int code, const char **text) { return (void)code, *text = "name", 0; }
int cuGetErrorString(int code, const char **text) { return (void)code, *text = "why", 0; }
int cuDeviceGetCount(int *devices) { return *devices = DEVICES, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }

int cuDeviceGetName(char *name, int length, int device) {
    name[0] = (char)('0' + device);
    name[1] = '\0';
    return length < 2;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return (void)device, *value = attribute, 0;
}

int cuDevicePrimaryCtxRetain(context **to, int device) { return *to = &contexts[device], 0; }
int cuCtxGetCurrent(context **to) { return *to = now(), 0; }
int cuCtxGetDevice(int *to) { return now() ? (*to = now()->device, 0) : INVALID_CONTEXT; }

int cuCtxGetId(context *of, unsigned long long *id) {
    if (of == NULL) of = now();
    return of ? (*id = 100 + (unsigned long long)of->device, 0) : INVALID_CONTEXT;
}

int cuCtxPushCurrent_v2(context *pushed) {
    if (depth == DEEPEST) return INVALID_CONTEXT;
    current[depth++] = pushed;
    return 0;
}

int cuCtxPopCurrent_v2(context **to) {
    if (!depth) return INVALID_CONTEXT;
    *to = current[--depth];
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, 0; }

/* The first load on the last device fails for lack of memory. A module is its context. */
int cuModuleLoadData(context **module, const void *image) {
    const int device = now()->device;
    const int before = atomic_fetch_add_explicit(&loads[device], 1, memory_order_relaxed);
    nanosleep(&(struct timespec){0, 50000000}, NULL); /* a real one takes longer */
    *module = now();
    return image == NULL || (device == DEVICES - 1 && before == 0) ? OUT_OF_MEMORY : 0;
}

int cuModuleUnload(context *module) { return (void)module, count(&unloads), 0; }

/* A function is a number: its module's device plus 1. */
int cuModuleGetFunction(void **to, context *module, const char *name) {
    return (void)name, *to = (void *)((uintptr_t)module->device + 1), 0;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
    return (void)function, (void)attribute, (void)value, 0;
}
int cuFuncLoad(void *function) { return function == NULL; }

int cuMemsetD8Async(void *memory, unsigned char value, size_t bytes, void *stream) {
    return (void)memory, (void)value, (void)bytes, (void)stream, 0;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned b,
                   unsigned c, unsigned shared, void *stream, void **params, void **extra) {
    const int device = (int)((uintptr_t)function - 1);
    (void)x, (void)y, (void)z, (void)block, (void)b, (void)c, (void)shared, (void)stream;
    (void)params, (void)extra;
    if (now() == NULL || now()->device != device) count(&strangers);
    count(&launches[device]);
    return 0;
}
