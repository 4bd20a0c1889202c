/* fake_cuda.cpp - a libcuda.so.1 for machines without a GPU. Kernels run in the emulation (shim.h),
 * and misuse of the driver's interface fails as it would with NVIDIA's driver.
 *
 * Device memory is accessible only while a kernel or a copy runs. An inaccessible page follows each
 * allocation, and new memory is full of 0xff. Queued work runs at the next synchronization. The
 * fake rejects calls before cuInit or without a context, handles of another context, unknown
 * kernels, sizes beyond the limits, and everything that invalidates the capture of a graph.
 *
 * FAKE_CUDA_DEVICES (2), FAKE_CUDA_VERSION (13000) and FAKE_CUDA_CAPABILITY (90) describe the
 * emulated devices. Functions for tests, such as injected faults, are at the end. */
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "operations.h"
#include "shim.h"

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY = 209,
    NOT_FOUND = 500,
    INVALID_HANDLE = 400,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for the device"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted in a capture"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture failed before"},
};

typedef std::vector<std::function<int()>> work;

struct context {
    int device;
    unsigned long long id;
};
struct module {
    context *home;
};
struct function {
    context *home;
    std::string name;
    unsigned shared; /* most bytes of shared memory */
};
struct stream {
    context *home; /* NULL: the default stream, which is valid in every context */
    bool capturing, broken;
    work *into; /* captured work */
};
struct allocation {
    size_t bytes, mapped;
    char *base;
    int device;
};

static std::recursive_mutex lock;
static std::map<std::string, int> calls;
static std::map<std::string, unsigned> widest; /* by kernel: most blocks along x of a launch */
static struct {
    std::string entry;
    int nth, code;
} fault;
static bool initialized;
static int sticky; /* error of a kernel, returned by all later calls */
static std::string flipped;
static std::map<char *, allocation> memory;
static std::vector<context *> primary;
static std::vector<stream *> streams;
static stream default_stream;
static work waiting; /* work of all streams, in the order it was queued */
static unsigned long long next_id = 1;
static thread_local std::vector<context *> current;
static thread_local int capture_mode; /* 0: global, 2: relaxed */

static int setting(const char *name, int otherwise) {
    const char *const text = getenv(name);
    return text ? atoi(text) : otherwise;
}
static int devices(void) { return setting("FAKE_CUDA_DEVICES", 2); }

/* Counts a call, and returns an error code if this call is to fail. */
static int begin(const char *entry, bool needs_init = true) {
    const int nth = ++calls[entry];
    if (fault.entry == entry && nth == fault.nth) return fault.code;
    if (needs_init && !initialized) return NOT_INITIALIZED;
    return OK;
}

#define BEGIN(...)                                                                                 \
    const std::lock_guard<std::recursive_mutex> guard(lock);                                       \
    if (const int code = begin(__VA_ARGS__)) return code
#define NEEDS_CONTEXT                                                                              \
    if (current.empty() || !current.back()) return INVALID_CONTEXT;                                \
    if (sticky) return sticky

static bool any_capture(void) {
    for (stream *s : streams) {
        if (s->capturing) return true;
    }
    return default_stream.capturing;
}

/* A call that is not permitted during a capture invalidates it. */
static int forbidden_in_capture(void) {
    if (capture_mode == 2 || !any_capture()) return OK;
    for (stream *s : streams) s->broken |= s->capturing;
    default_stream.broken |= default_stream.capturing;
    return CAPTURE_UNSUPPORTED;
}

static void allow(int protection) {
    for (const auto &[address, a] : memory) mprotect(a.base, a.mapped, protection);
}

static int run(const std::function<int()> &job) {
    allow(PROT_READ | PROT_WRITE);
    const int code = job();
    allow(PROT_NONE);
    return code;
}

static int run_all(void) {
    for (size_t i = 0; i < waiting.size() && !sticky; i++) sticky = run(waiting[i]);
    waiting.clear();
    return sticky;
}

static int queue_job(stream *s, const std::function<int()> &job) {
    if (s->broken) return CAPTURE_INVALIDATED;
    if (s->capturing) {
        s->into->push_back(job);
    } else if (getenv("FAKE_CUDA_EAGER")) {
        sticky = run(job);
    } else {
        waiting.push_back(job);
    }
    return OK;
}

static stream *find_stream(void *handle) {
    if (handle == nullptr || handle == (void *)1 || handle == (void *)2) return &default_stream;
    for (stream *s : streams) {
        if (s == handle) return s->home == current.back() ? s : nullptr;
    }
    return nullptr;
}

/* The allocation on the current context's device that contains all these bytes. */
static const allocation *find_memory(const void *address, size_t bytes) {
    for (const auto &[start, a] : memory) {
        if (address >= start && (char *)address + bytes <= start + a.bytes) {
            return a.device == current.back()->device ? &a : nullptr;
        }
    }
    return nullptr;
}

extern "C" {

/* ---- Functions that h2o calls -------------------------------------------- */

int cuInit(unsigned) {
    BEGIN("cuInit", false);
    if (devices() == 0) return NO_DEVICE;
    initialized = true;
    while ((int)primary.size() < devices()) {
        primary.push_back(new context{(int)primary.size(), next_id++});
    }
    return OK;
}

int cuDriverGetVersion(int *version) {
    BEGIN("cuDriverGetVersion", false);
    *version = setting("FAKE_CUDA_VERSION", 13000);
    return OK;
}

static int find_error(int code, const char **text, const char *(*part)(size_t)) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == code) return *text = part(i), OK;
    }
    *text = nullptr;
    return INVALID_VALUE;
}
int cuGetErrorName(int code, const char **text) {
    return find_error(code, text, [](size_t i) { return errors[i].name; });
}
int cuGetErrorString(int code, const char **text) {
    return find_error(code, text, [](size_t i) { return errors[i].text; });
}

int cuDeviceGetCount(int *count) {
    BEGIN("cuDeviceGetCount");
    *count = devices();
    return OK;
}

int cuDeviceGet(int *device, int ordinal) {
    BEGIN("cuDeviceGet");
    if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

int cuDeviceGetName(char *name, int length, int device) {
    BEGIN("cuDeviceGetName");
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return OK;
}

static int most_shared(void) { return setting("FAKE_CUDA_CAPABILITY", 90) < 80 ? 64 << 10 : 99 << 10; }

int cuDeviceGetAttribute(int *value, int attribute, int) {
    BEGIN("cuDeviceGetAttribute");
    const int capability = setting("FAKE_CUDA_CAPABILITY", 90);
    *value = attribute == 75   ? capability / 10
             : attribute == 76 ? capability % 10
             : attribute == 97 ? most_shared()
                               : 0;
    return OK;
}

int cuDevicePrimaryCtxRetain(context **c, int device) {
    BEGIN("cuDevicePrimaryCtxRetain");
    *c = primary[(size_t)device];
    return OK;
}

int cuCtxGetCurrent(context **c) {
    BEGIN("cuCtxGetCurrent");
    *c = current.empty() ? nullptr : current.back();
    return OK;
}

int cuCtxGetDevice(int *device) {
    BEGIN("cuCtxGetDevice");
    NEEDS_CONTEXT;
    *device = current.back()->device;
    return OK;
}

int cuCtxGetId(context *c, unsigned long long *id) {
    BEGIN("cuCtxGetId");
    NEEDS_CONTEXT;
    *id = (c ? c : current.back())->id;
    return OK;
}

int cuCtxPushCurrent_v2(context *c) {
    BEGIN("cuCtxPushCurrent_v2");
    current.push_back(c);
    return OK;
}

int cuCtxPopCurrent_v2(context **c) {
    BEGIN("cuCtxPopCurrent_v2");
    if (current.empty()) return INVALID_CONTEXT;
    *c = current.back();
    current.pop_back();
    return OK;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    BEGIN("cuThreadExchangeStreamCaptureMode");
    std::swap(*mode, capture_mode);
    return OK;
}

int cuModuleLoadData(module **m, const void *image) {
    BEGIN("cuModuleLoadData");
    NEEDS_CONTEXT;
    if (const int code = forbidden_in_capture()) return code;
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    if (magic != 0xba55ed50) return INVALID_IMAGE;
    if (setting("FAKE_CUDA_CAPABILITY", 90) < 75) return NO_BINARY;
    *m = new module{current.back()};
    return OK;
}

int cuModuleUnload(module *m) {
    BEGIN("cuModuleUnload");
    delete m;
    return OK;
}

/* Tensor cores have bfloat16 from 8.0 on. */
int cuModuleGetFunction(function **f, module *m, const char *name) {
    BEGIN("cuModuleGetFunction");
    const bool later = setting("FAKE_CUDA_CAPABILITY", 90) < 80 && strstr(name, "_bf16_");
    if (shim_params_size(name) < 0 || later) return NOT_FOUND;
    *f = new function{m->home, name, 48 << 10};
    return OK;
}

int cuFuncSetAttribute(function *f, int attribute, int value) {
    BEGIN("cuFuncSetAttribute");
    NEEDS_CONTEXT;
    if (attribute != 8 || value > most_shared()) return INVALID_VALUE;
    f->shared = (unsigned)value;
    return OK;
}

int cuFuncLoad(function *) {
    BEGIN("cuFuncLoad");
    NEEDS_CONTEXT;
    return forbidden_in_capture();
}

/* A tensor that the kernel of this name writes. */
static const h2o_view *result_of(const std::string &name, const char *params) {
    if (name.find("forward") != name.npos) return &((h2o_attend_params *)params)->out;
    if (name.find("sums") != name.npos) return &((h2o_attend_params *)params)->scores;
    if (name == "h2o_cuda_evict") return &((h2o_evict_params *)params)->slots.scores;
    if (name == "h2o_cuda_move") return &((h2o_evict_params *)params)->slots.keys;
    if (name == "h2o_cuda_step") return &((h2o_step_params *)params)->out;
    if (name == "h2o_cuda_simulate_open") return &((h2o_simulate_params *)params)->out;
    return nullptr;
}

int cuLaunchKernel(function *f, unsigned x, unsigned y, unsigned z, unsigned block,
                   unsigned block_y, unsigned block_z, unsigned shared, void *handle, void **params,
                   void **) {
    BEGIN("cuLaunchKernel");
    NEEDS_CONTEXT;
    stream *const s = find_stream(handle);
    if (!s || f->home != current.back()) return INVALID_HANDLE;
    const uint64_t limit = 65535;
    if (!x || !y || !z || y > limit || z > limit || !block || block > 1024 || block_y != 1 ||
        block_z != 1 || shared > f->shared) {
        return INVALID_VALUE;
    }
    const std::string bytes((const char *)params[0], (size_t)shim_params_size(f->name.c_str()));
    char *const workspace = *(char **)params[1];
    return queue_job(s, [=]() -> int {
        if (const int failed = begin("kernel")) return failed;
        const unsigned grid[] = {x, y, z};
        if (x > widest[f->name]) widest[f->name] = x;
        const int code = shim_launch(f->name.c_str(), bytes.data(), bytes.size(), workspace, grid,
                                     block, shared);
        if (code) fprintf(stderr, "%s: %s\n", f->name.c_str(), shim_error());
        const h2o_view *const result = result_of(f->name, bytes.data());
        if (f->name == flipped && result) {
            ((char *)result->data)[h2o_dtype_size(result->dtype) - 1] ^= 0x40;
        }
        return code ? LAUNCH_FAILED : OK;
    });
}

int cuMemsetD8Async(char *to, unsigned char value, size_t bytes, void *handle) {
    BEGIN("cuMemsetD8Async");
    NEEDS_CONTEXT;
    stream *const s = find_stream(handle);
    if (!s) return INVALID_HANDLE;
    if (!find_memory(to, bytes)) return INVALID_VALUE;
    return queue_job(s, [=] { return memset(to, value, bytes), OK; });
}

/* ---- Functions that tests and their tensors call ------------------------- */

int cuCtxCreate_v2(context **c, unsigned, int device) {
    BEGIN("cuCtxCreate_v2");
    current.push_back(*c = new context{device, next_id++});
    return OK;
}

int cuCtxSetCurrent(context *c) {
    BEGIN("cuCtxSetCurrent");
    if (!current.empty()) current.pop_back();
    if (c) current.push_back(c);
    return OK;
}

int cuMemAlloc_v2(char **address, size_t bytes) {
    BEGIN("cuMemAlloc_v2");
    NEEDS_CONTEXT;
    if (const int code = forbidden_in_capture()) return code;
    const size_t page = (size_t)getpagesize(), mapped = (bytes + page - 1) / page * page;
    char *const base = (char *)mmap(nullptr, mapped + page, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    memset(base, 0xff, mapped);
    mprotect(base, mapped + page, PROT_NONE);
    *address = base + (mapped - bytes) / 256 *
                          256; /* as close to the inaccessible page as alignment allows */
    memory[*address] = {bytes, mapped, base, current.back()->device};
    return OK;
}

int cuMemFree_v2(char *address) {
    BEGIN("cuMemFree_v2");
    const auto block = memory.find(address);
    if (block == memory.end()) return INVALID_VALUE;
    run_all();
    munmap(block->second.base, block->second.mapped + (size_t)getpagesize());
    memory.erase(block);
    return OK;
}

int cuCtxSynchronize(void) {
    BEGIN("cuCtxSynchronize");
    NEEDS_CONTEXT;
    if (const int code = forbidden_in_capture()) return code;
    return run_all();
}

static int copy(void *to, const void *from, size_t bytes) {
    if (const int code = forbidden_in_capture()) return code;
    if (const int code = run_all()) return code;
    return run([=] { return memcpy(to, from, bytes), OK; });
}
int cuMemcpyHtoD_v2(char *to, const void *from, size_t bytes) {
    BEGIN("cuMemcpyHtoD_v2");
    NEEDS_CONTEXT;
    return find_memory(to, bytes) ? copy(to, from, bytes) : INVALID_VALUE;
}
int cuMemcpyDtoH_v2(void *to, const char *from, size_t bytes) {
    BEGIN("cuMemcpyDtoH_v2");
    NEEDS_CONTEXT;
    return find_memory(from, bytes) ? copy(to, from, bytes) : INVALID_VALUE;
}

int cuStreamCreate(stream **s, unsigned) {
    BEGIN("cuStreamCreate");
    NEEDS_CONTEXT;
    streams.push_back(*s = new stream{current.back(), false, false, nullptr});
    return OK;
}

int cuStreamBeginCapture_v2(stream *s, int) {
    BEGIN("cuStreamBeginCapture_v2");
    s->capturing = true;
    s->broken = false;
    s->into = new work;
    return OK;
}

int cuStreamEndCapture(stream *s, work **graph) {
    BEGIN("cuStreamEndCapture");
    s->capturing = false;
    *graph = s->into;
    return s->broken ? (s->broken = false, CAPTURE_INVALIDATED) : OK;
}

int cuGraphLaunch(work *graph, void *) { /* the graph itself is the executable one */
    BEGIN("cuGraphLaunch");
    NEEDS_CONTEXT;
    waiting.insert(waiting.end(), graph->begin(), graph->end());
    return OK;
}

/* ---- Functions that no real driver has ----------------------------------- */

/* Number of calls of an entry. */
int fake_calls(const char *entry) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    return calls[entry];
}

/* Most blocks along x with which a kernel has run since the last fake_forgive; -1: no such kernel.
 * fake_kernel(i) is the name of kernel number i, NULL after the last. */
int fake_widest(const char *kernel) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    return shim_params_size(kernel) < 0 ? -1 : (int)widest[kernel];
}
const char *fake_kernel(unsigned i) { return shim_kernel(i); }

/* Number of times a branch of the kernels was taken since the last fake_forgive, or INT32_MAX. */
int fake_taken(const char *branch) {
    const shim_branch *b = shim_branches();
    while (b && strcmp(b->name, branch) != 0) b = b->next;
    return b ? (int)(b->taken < INT32_MAX ? b->taken : INT32_MAX) : -1;
}
const char *fake_branch(unsigned i) {
    const shim_branch *b = shim_branches();
    while (b && i-- > 0) b = b->next;
    return b ? b->name : nullptr;
}

/* Makes the nth call of an entry from now fail with a code; for "kernel" the nth that runs. */
void fake_fault(const char *entry, int nth, int code) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    fault = {entry, calls[entry] + nth, code};
}

/* The next kernel with more blocks than this stops after so many, with an error. */
void fake_stop_after(unsigned blocks) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    shim_stop_after(blocks);
}

/* Flips a bit in the first result of each run of this kernel; "": of no kernel. */
void fake_flip(const char *kernel) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    flipped = kernel;
}

/* The number of queued jobs. */
int fake_waiting(void) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    return (int)waiting.size();
}

/* Resets everything but memory and contexts. */
void fake_forgive(void) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    sticky = 0;
    fault = {};
    flipped = "";
    waiting.clear();
    widest.clear();
    for (shim_branch *b = shim_branches(); b; b = b->next) b->taken = 0;
}
}
