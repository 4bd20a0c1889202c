/* count.c - one operation at one CPU level, for counting its instructions.
 *
 *   count LEVEL OPERATION [step]
 *
 * runs the operation once to warm up and once between two breakpoints, on
 * fixed data and one thread. With "step" it runs itself under ptrace and counts what is
 * executed between the breakpoints, one single step at a time: slow, but exact
 * at every level that the processor has. Without, the function `counted` is
 * there for `valgrind --toggle-collect=counted`. Built by callgrind.py. */
#define _GNU_SOURCE
#include "h2o.h"

#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

/* A small layer: 4 query heads to one key head, a prompt of N tokens, a store
 * of SLOTS keys. Single steps allow no more. */
enum { B = 1, H = 4, G = 1, D = 128, N = 96, SLOTS = 65, HEAVY = 32, RECENT = 32 };

static const h2o_ops *const levels[] = {
    &h2o_ops_generic,
#if defined(__x86_64__)
    &h2o_ops_avx2, &h2o_ops_avx512, &h2o_ops_avx512bf16,
#elif defined(__aarch64__)
    &h2o_ops_neon,
#endif
};

static void on_one_thread(int lanes, h2o_lane_fn function, void *context) {
    for (int lane = 0; lane < lanes; lane++) {
        function(lane, lanes, context);
    }
}

/* ---- Tensors ----------------------------------------------------------- */

/* Contiguous and zero. */
static h2o_view tensor(h2o_dtype dtype, int ndim, const int64_t *shape) {
    h2o_view view = {.dtype = dtype, .ndim = ndim, .device_type = 1, .name = "tensor"};
    int64_t size = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        view.shape[i] = shape[i];
        view.stride[i] = size;
        size *= shape[i];
    }
    view.data = aligned_alloc(64, ((size_t)size * 8 + 63) / 64 * 64);
    if (!view.data) {
        abort();
    }
    memset(view.data, 0, (size_t)size * 8);
    return view;
}

#define TENSOR(dtype, ...) \
    tensor(dtype, (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8), (int64_t[]){__VA_ARGS__})

static int64_t elements(const h2o_view *view) {
    int64_t size = 1;
    for (int i = 0; i < view->ndim; i++) {
        size *= view->shape[i];
    }
    return size;
}

/* The same numbers in [-1, 1) at each run. */
static void fill(const h2o_view *view, uint32_t seed) {
    for (int64_t i = 0; i < elements(view); i++) {
        seed = seed * 1664525u + 1013904223u;
        const float x = (float)(int32_t)seed / 2147483648.0f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (view->dtype == H2O_F32) {
            ((float *)view->data)[i] = x;
        } else {
            ((uint16_t *)view->data)[i] = (uint16_t)(bits >> 16); /* bf16 */
        }
    }
}

static h2o_view filled(h2o_dtype dtype, uint32_t seed, int64_t heads, int64_t rows) {
    const h2o_view view = TENSOR(dtype, B, heads, rows, D);
    fill(&view, seed);
    return view;
}

/* A store that has seen SLOTS - 1 tokens: full, with the last slot free. */
static h2o_slots store(h2o_dtype dtype) {
    h2o_slots slots = {
        .keys = filled(dtype, 4, G, SLOTS),
        .values = filled(dtype, 5, G, SLOTS),
        .scores = TENSOR(H2O_F32, B, G, SLOTS),
        .positions = TENSOR(H2O_I32, B, G, SLOTS),
        .free = TENSOR(H2O_I32, B, G),
        .lengths = TENSOR(H2O_I64, B),
        .budget = TENSOR(H2O_I32, B, 2),
        .lost = TENSOR(H2O_F64, B, G),
    };
    ((int32_t *)slots.budget.data)[0] = HEAVY;
    ((int32_t *)slots.budget.data)[1] = RECENT;
    ((int64_t *)slots.lengths.data)[0] = SLOTS - 1;
    for (int g = 0; g < G; g++) {
        ((int32_t *)slots.free.data)[g] = SLOTS - 1;
        for (int s = 0; s < SLOTS; s++) {
            ((int32_t *)slots.positions.data)[g * SLOTS + s] = s < SLOTS - 1 ? s : -1;
            ((float *)slots.scores.data)[g * SLOTS + s] = s < SLOTS - 1 ? (float)(SLOTS - s) : 0;
        }
    }
    return slots;
}

/* Makes the store an empty one. */
static void clear(const h2o_slots *slots) {
    memset(slots->positions.data, 0xff, sizeof(int32_t) * B * G * SLOTS); /* -1 */
    memset(slots->free.data, 0, sizeof(int32_t) * B * G);
    memset(slots->lengths.data, 0, sizeof(int64_t) * B);
}

/* ---- The counted call -------------------------------------------------- */

static const h2o_ops *ops;
static h2o_exec execution = {.lanes = 1, .run = on_one_thread};
static h2o_attend_params attend;
static h2o_evict_params evict;
static h2o_step_params step;
static enum { ATTEND, EVICT, STEP } operation;
static bool stepping;

static void prepare(h2o_dtype dtype) {
    const float scale = 1.0f / sqrtf(D);
    const h2o_dims many = {.B = B, .H = H, .G = G, .R = H / G, .Q = N, .D = D};
    const h2o_view keys = filled(dtype, 2, G, N), values = filled(dtype, 3, G, N);
    size_t bytes = 0;
    switch (operation) {
    case ATTEND:
        attend = (h2o_attend_params){
            .query = filled(dtype, 1, H, N), .keys = keys, .values = values,
            .out = TENSOR(dtype, B, N, H, D), .scores = TENSOR(H2O_F32, B, G, N),
            .scale = scale, .decay = 1.0f, .dims = many};
        bytes = ops->attend_workspace(&attend, 1);
        break;
    case EVICT:
        evict = (h2o_evict_params){
            .keys = keys, .values = values, .scores = TENSOR(H2O_F32, B, G, N),
            .slots = store(dtype), .policy = {.decay = 1.0f}, .dims = many};
        fill(&evict.scores, 6);
        clear(&evict.slots);
        evict.dims.S = SLOTS;
        bytes = ops->evict_workspace(&evict, 1);
        break;
    case STEP:
        step = (h2o_step_params){
            .query = filled(dtype, 1, H, 1), .key = filled(dtype, 2, G, 1),
            .value = filled(dtype, 3, G, 1), .slots = store(dtype),
            .out = TENSOR(dtype, B, 1, H, D), .policy = {.decay = 1.0f},
            .scale = scale, .dims = many};
        step.dims.Q = 1;
        step.dims.S = SLOTS;
        bytes = ops->step_workspace(&step, 1);
        break;
    }
    execution.workspace = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!execution.workspace) {
        abort();
    }
}

static void breakpoint(void) {
    if (stepping) {
        raise(SIGTRAP);
    }
}

static void call(void) {
    h2o_error error;
    switch (operation) {
    case ATTEND:
        ops->attend(&attend, &execution, &error);
        break;
    case EVICT:
        ops->evict(&evict, &execution, &error);
        break;
    case STEP:
        ops->step(&step, &execution, &error);
        break;
    }
}

__attribute__((noinline)) void counted(void) { call(); }

static void work(void) {
    call();
    if (operation == EVICT) {
        clear(&evict.slots);
    }
    breakpoint();
    counted();
    breakpoint();
}

/* ---- Counting by single steps ------------------------------------------ */

/* A breakpoint is a SIGTRAP that the child sent itself; a single step's comes
 * from the kernel. */
static bool at_breakpoint(pid_t child) {
    siginfo_t what;
    ptrace(PTRACE_GETSIGINFO, child, NULL, &what);
    return what.si_code <= 0;
}

/* Then neither process has to wake another processor at each step. */
static void on_one_processor(void) {
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    sched_setaffinity(0, sizeof here, &here);
}

static long count_steps(pid_t child) {
    int status;
    waitpid(child, &status, 0);
    long steps = 0;
    do {
        ptrace(PTRACE_SINGLESTEP, child, NULL, NULL);
        waitpid(child, &status, 0);
        steps++;
    } while (WIFSTOPPED(status) && !at_breakpoint(child));
    ptrace(PTRACE_CONT, child, NULL, NULL);
    waitpid(child, &status, 0);
    return steps;
}

static int select_operation(const char *name, h2o_dtype *dtype) {
    static const char *const names[] = {"attend", "evict", "step"};
    for (int i = 0; i < 3; i++) {
        const size_t length = strlen(names[i]);
        if (strncmp(name, names[i], length) == 0) {
            operation = i;
            *dtype = strcmp(name + length, "-bf16") == 0 ? H2O_BF16 : H2O_F32;
            return 0;
        }
    }
    return -1;
}

int main(int argc, char **argv) {
    h2o_dtype dtype;
    for (size_t i = 0; argc > 2 && i < sizeof levels / sizeof *levels; i++) {
        if (strcmp(levels[i]->name, argv[1]) == 0) {
            ops = levels[i];
        }
    }
    if (!ops || select_operation(argv[2], &dtype)) {
        fprintf(stderr, "usage: count LEVEL attend|evict|step[-bf16] [step]\n");
        return 2;
    }
    prepare(dtype);
    stepping = argc > 3;
    if (!stepping) {
        work();
        return 0;
    }
    on_one_processor();
    const pid_t child = fork();
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        work();
        _exit(0);
    }
    printf("%ld\n", count_steps(child));
    return 0;
}
