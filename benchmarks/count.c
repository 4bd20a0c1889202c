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
#include "tensors.h"

#include <sched.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

/* A small layer: 4 query heads to one key head, a prompt of N tokens, a store
 * of SLOTS keys. Single steps allow no more. */
enum { B = 1, H = 4, G = 1, D = 128, N = 96, SLOTS = 65, HEAVY = 32, RECENT = 32 };

static void on_one_thread(int lanes, h2o_lane_fn function, void *context) {
    for (int lane = 0; lane < lanes; lane++) {
        function(lane, lanes, context);
    }
}

/* ---- The counted call -------------------------------------------------- */

static h2o_attend_params attend;
static h2o_evict_params evict;
static h2o_step_params step;
static enum { ATTEND, EVICT, STEP } operation;
static h2o_call call;
static bool stepping;

static h2o_view filled(h2o_dtype dtype, int64_t heads, int64_t rows, test_random *random) {
    h2o_view view = make_tensor(dtype, 4, B, heads, rows, D);
    fill_tensor(&view, 0.01f, random);
    return view;
}

static void clear(const h2o_slots *slots) {
    memset(slots->positions.data, 0xff, tensor_bytes(&slots->positions)); /* -1 */
    memset(slots->free.data, 0, tensor_bytes(&slots->free));
    memset(slots->lengths.data, 0, tensor_bytes(&slots->lengths));
}

static int prepare(h2o_dtype dtype, h2o_error *error) {
    const float scale = 1.0f / sqrtf(D);
    test_random random = {.state = 1};
    h2o_dims dims = make_dims(B, G, H / G, N, SLOTS, D);
    const h2o_view keys = filled(dtype, G, N, &random), values = filled(dtype, G, N, &random);
    h2o_slots slots = make_slots(DENSE, &dims, dtype, HEAVY, RECENT, false);
    switch (operation) {
    case ATTEND:
        attend = (h2o_attend_params){
            .query = filled(dtype, H, N, &random), .keys = keys, .values = values,
            .out = make_tensor(dtype, 4, B, N, H, D), .scores = make_tensor(H2O_F32, 3, B, G, N, 1),
            .scale = scale, .decay = 1.0f};
        return h2o_open_attend(&attend, &call, error);
    case EVICT:
        evict = (h2o_evict_params){.keys = keys, .values = values, .slots = slots,
                                   .scores = make_tensor(H2O_F32, 3, B, G, N, 1),
                                   .policy = {.decay = 1.0f}};
        for (int i = 0; i < G * N; i++) ((float *)evict.scores.data)[i] = random_float(&random);
        return h2o_open_evict(&evict, &call, error);
    default:
        fill_slots(&slots, SLOTS - 1, &random);
        step = (h2o_step_params){
            .query = filled(dtype, H, 1, &random), .key = filled(dtype, G, 1, &random),
            .value = filled(dtype, G, 1, &random), .slots = slots,
            .out = make_tensor(dtype, 4, B, 1, H, D), .policy = {.decay = 1.0f}, .scale = scale};
        return h2o_open_step(&step, &call, error);
    }
}

static void breakpoint(void) {
    if (stepping) {
        raise(SIGTRAP);
    }
}

static void run(void) {
    h2o_error error;
    switch (operation) {
    case ATTEND:
        h2o_run_attend(&attend, &call, &error);
        break;
    case EVICT:
        h2o_run_evict(&evict, &call, &error);
        break;
    case STEP:
        h2o_run_step(&step, &call, &error);
        break;
    }
}

__attribute__((noinline)) void counted(void) { run(); }

static void work(void) {
    run();
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
    h2o_error error;
    call.exec.lanes = 1;
    call.exec.run = on_one_thread;
    for (size_t i = 0; argc > 2 && i < LEVELS; i++) {
        if (strcmp(levels[i]->name, argv[1]) == 0) {
            call.table = levels[i];
        }
    }
    if (!call.table || select_operation(argv[2], &dtype)) {
        fprintf(stderr, "usage: count LEVEL attend|evict|step[-bf16] [step]\n");
        return 2;
    }
    if (h2o_init(&error) || prepare(dtype, &error)) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
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
