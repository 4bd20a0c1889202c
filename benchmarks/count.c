/* count.c - runs one operation at one CPU level, to count its instructions.
 *
 *   count LEVEL OPERATION [step]
 *
 * The operation runs once to warm up and once between two breakpoints, on fixed data and one
 * thread. With "step" the program runs itself under ptrace and counts the instructions between the
 * breakpoints in single steps. That is slow, but exact at every level that the processor has.
 * Without "step", use `valgrind --toggle-collect=counted`, which counts the function `counted`.
 * Without arguments the program lists the operations. Built by callgrind.py. */
#define _GNU_SOURCE
#include "tensors.h"

#include <sched.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

/* A small layer, because single steps are slow: 4 query heads to one key head, a prompt of N
 * tokens. */
enum { B = 1, H = 4, G = 1, N = 96 };

static void on_one_thread(int workers, h2o_worker_fn function, void *context) {
    for (int worker = 0; worker < workers; worker++) {
        function(worker, workers, context);
    }
}

/* ---- The counted call -------------------------------------------------- */

typedef struct {
    const char *name;
    h2o_operation operation;
    h2o_dtype dtype;
    h2o_dtype keys, values; /* of the slots */
    int32_t held;           /* keys in the slots */
    int64_t D;
    bool offsets;
} variant;

static const variant variants[] = {
    {"attend", H2O_ATTEND, H2O_F32, H2O_F32, H2O_F32, 64, 128, false},
    {"attend-bf16", H2O_ATTEND, H2O_BF16, H2O_BF16, H2O_BF16, 64, 128, false},
    {"evict", H2O_EVICT, H2O_F32, H2O_F32, H2O_F32, 64, 128, false},
    {"step", H2O_STEP, H2O_F32, H2O_F32, H2O_F32, 64, 128, false},
    {"step-bf16", H2O_STEP, H2O_BF16, H2O_BF16, H2O_BF16, 64, 128, false},
    {"step-int8", H2O_STEP, H2O_BF16, H2O_Q8, H2O_Q8, 64, 128, false},
    {"step-int8-int4", H2O_STEP, H2O_BF16, H2O_Q8, H2O_Q4, 400, 128, false},
    {"step-int8-int4-offsets", H2O_STEP, H2O_BF16, H2O_Q8, H2O_Q4, 400, 128, true},
    {"step-int4-offsets", H2O_STEP, H2O_BF16, H2O_S4, H2O_Q4, 400, 128, true},
    {"step-64-int8-int4", H2O_STEP, H2O_BF16, H2O_Q8, H2O_Q4, 400, 64, false},
    {"step-64-int8-int4-offsets", H2O_STEP, H2O_BF16, H2O_Q8, H2O_Q4, 400, 64, true},
    {"step-64-int4-offsets", H2O_STEP, H2O_BF16, H2O_S4, H2O_Q4, 400, 64, true},
    {"simulate", H2O_SIMULATE, H2O_F32, H2O_F32, H2O_F32, 64, 128, false},
    {"simulate-bf16", H2O_SIMULATE, H2O_BF16, H2O_BF16, H2O_BF16, 64, 128, false},
};
enum { VARIANTS = sizeof variants / sizeof *variants };

static const variant *chosen;
static h2o_params params;
static h2o_call call;
static bool stepping;

static h2o_view filled(int64_t heads, int64_t rows, test_random *random) {
    h2o_view view = make_tensor(chosen->dtype, 4, B, heads, rows, chosen->D);
    fill_tensor(&view, 0.01f, random);
    return view;
}

static h2o_policy policy(void) {
    return (h2o_policy){.decay = 1.0f};
}

static void clear(const h2o_slots *slots) {
    FILL(int32_t, slots->positions, -1);
    FILL(int32_t, slots->next_slot, 0);
    FILL(int64_t, slots->seen_tokens, 0);
}

/* An empty store, half of whose keys are heavy. */
static h2o_slots store(const h2o_dims *dims) {
    const int32_t heavy = chosen->held / 2;
    h2o_slots slots = make_slots(DENSE, dims, chosen->values, heavy, chosen->held - heavy, false);
    if (chosen->keys != chosen->values) {
        slots.keys = make_tensor(H2O_U8, 4, B, G, dims->S, h2o_row_bytes(chosen->keys, dims->D));
    }
    if (chosen->offsets) slots.offsets = make_tensor(H2O_F16, 3, B, G, dims->D, 1);
    if (chosen->offsets && chosen->keys == H2O_S4) {
        slots.smoothing = make_tensor(H2O_F16, 3, B, G, dims->D, 1);
        FILL(uint16_t, slots.smoothing, 0x3c00); /* 1 */
    }
    return slots;
}

static int prepare(h2o_error *error) {
    const int64_t D = chosen->D;
    const float scale = 1.0f / sqrtf((float)D);
    const h2o_dims dims = make_dims(B, G, H / G, N, chosen->held + 1, D);
    test_random random = {.state = 1};
    const h2o_view keys = filled(G, N, &random), values = filled(G, N, &random);
    const h2o_view query = filled(H, N, &random);
    const h2o_view out = make_tensor(chosen->dtype, 4, B, N, H, D);
    const h2o_view scores = make_tensor(H2O_F32, 3, B, G, N, 1);
    h2o_slots slots = store(&dims);
    switch (chosen->operation) {
    case H2O_ATTEND:
        params.attend = (h2o_attend_params){.query = query, .keys = keys, .values = values, .out = out,
                                     .scores = scores, .scale = scale, .policy = policy()};
        break;
    case H2O_EVICT:
        params.evict = (h2o_evict_params){.keys = keys, .values = values, .slots = slots,
                                   .scores = scores, .policy = policy()};
        for (int i = 0; i < G * N; i++) ((float *)scores.data)[i] = random_float(&random);
        break;
    case H2O_STEP:
        fill_slots(&slots, chosen->held, &random);
        params.step = (h2o_step_params){
            .query = filled(H, 1, &random), .key = filled(G, 1, &random),
            .value = filled(G, 1, &random), .slots = slots,
            .out = make_tensor(chosen->dtype, 4, B, 1, H, D), .policy = policy(), .scale = scale};
        break;
    default:
        params.simulate = (h2o_simulate_params){
            .query = query, .keys = keys, .values = values, .budget = slots.budget,
            .prompt = make_tensor(H2O_I32, 1, B, 1, 1, 1), .out = out,
            .evicted_at = make_tensor(H2O_I32, 3, B, G, N, 1), .scores = scores,
            .policy = policy(), .scale = scale};
        FILL(int32_t, params.simulate.prompt, chosen->held);
    }
    call.operation = chosen->operation;
    return h2o_open(&params, &call, error);
}

static void breakpoint(void) {
    if (stepping) {
        raise(SIGTRAP);
    }
}

static void run(void) {
    h2o_error error;
    h2o_run(&params, &call, &error);
}

__attribute__((noinline)) void counted(void) { run(); }

static void work(void) {
    run();
    if (chosen->operation == H2O_EVICT) {
        clear(&params.evict.slots);
    }
    breakpoint();
    counted();
    breakpoint();
}

/* ---- Counting by single steps ------------------------------------------ */

/* At a breakpoint the child sends itself a SIGTRAP. The SIGTRAP of a single step comes from the
 * kernel. */
static bool at_breakpoint(pid_t child) {
    siginfo_t what;
    ptrace(PTRACE_GETSIGINFO, child, NULL, &what);
    return what.si_code <= 0;
}

/* Both processes run on one processor, so that no step has to wake another one. */
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

int main(int argc, char **argv) {
    h2o_error error;
    if (argc == 1) {
        for (int i = 0; i < VARIANTS; i++) puts(variants[i].name);
        return 0;
    }
    call.exec.workers = 1;
    call.exec.run = on_one_thread;
    for (size_t i = 0; argc > 2 && i < LEVELS; i++) {
        if (strcmp(levels[i]->name, argv[1]) == 0) call.table = levels[i];
    }
    for (int i = 0; argc > 2 && i < VARIANTS; i++) {
        if (strcmp(variants[i].name, argv[2]) == 0) chosen = &variants[i];
    }
    if (!call.table || !chosen) {
        fprintf(stderr, "usage: count LEVEL OPERATION [step]\n");
        return 2;
    }
    if (h2o_init(&error) || prepare(&error)) {
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
