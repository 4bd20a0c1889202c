/* balance.c - measures how well the work of each operation spreads over workers, without having
 * that many processors.
 *
 * The kernels really run, on one thread, with an executor that simulates any number of workers: the
 * next task goes to the worker that has done least so far, and the cost of a task is what the
 * kernel counts (multiply-adds, and estimates for the rest). The time of a call is then the work of
 * its busiest worker, waits included, and
 *
 *     efficiency = work on one worker / (workers * time on that many workers).
 *
 * The figure does not include what real processors share (memory, caches). Counts are the same in
 * every run. `make balance` builds this file with -DH2O_BALANCE. It exits with 1 if an operation
 * misses its bound. The argument "bounds" leaves out everything that has no bound. */
#define _GNU_SOURCE
#include "cpu/tasks.h"

#include "tensors.h"

double h2o_balance_clock;

enum { MAX_WORKERS = 64 };

static void play(int workers, h2o_worker_fn function, void *context) {
    task_list *const list = context;
    double clock[MAX_WORKERS], last = h2o_balance_clock;
    (void)function;
    for (int worker = 0; worker < workers; worker++) clock[worker] = h2o_balance_clock;
    for (int64_t index = 0; index < list->count; index++) {
        int idle = 0;
        for (int worker = 1; worker < workers; worker++) {
            if (clock[worker] < clock[idle]) idle = worker;
        }
        h2o_balance_clock = clock[idle];
        list->task(list->context, index, idle);
        clock[idle] = h2o_balance_clock;
        last = clock[idle] > last ? clock[idle] : last;
    }
    h2o_balance_clock = last;
}

/* ---- The calls --------------------------------------------------------- */

typedef struct {
    double time;
    size_t workspace;
} outcome;

/* Opens a call for this many workers, plays it unless only_workspace is set, and returns the bytes
 * of its workspace. */
static size_t play_operation(h2o_operation operation, void *params, int workers,
                             bool only_workspace) {
    h2o_error error;
    h2o_call call = {.operation = operation, .exec = {.workers = workers, .run = play}};
    if (h2o_open(params, &call, &error) != H2O_OK) {
        fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
    const size_t bytes = call.table->workspace(operation, params, &call.exec);
    if (!only_workspace) CHECK(h2o_run(params, &call, &error) == H2O_OK);
    h2o_close(&call);
    return bytes;
}

typedef struct {
    enum { PREFILL, CHUNK, STEP, EVICT, SIMULATE } what;
    const char *name;
    int64_t H, G, D;
    int64_t tokens; /* new tokens */
    int64_t held;   /* keys that are stored, or that are kept */
    double bound;   /* required with 64 workers: a promise, or what must not be lost */
} balance_case;

static const balance_case cases[] = {
    {PREFILL, "prefill", 32, 8, 128, 2048, 0, 0.85},
    {PREFILL, "prefill", 32, 8, 128, 4096, 0, 0.85},
    {PREFILL, "prefill", 9, 3, 64, 2048, 0, 0.85},
    {CHUNK, "chunk", 32, 8, 128, 2, 8192, 0.70},
    {CHUNK, "chunk", 32, 8, 128, 8, 8192, 0.70},
    {CHUNK, "chunk", 32, 8, 128, 12, 8192, 0.70},
    {CHUNK, "chunk", 32, 8, 128, 16, 8192, 0.70},
    {CHUNK, "chunk", 32, 8, 128, 64, 8192, 0.70},
    {STEP, "decode step", 32, 8, 128, 1, 410, 0.45},
    {STEP, "decode step", 32, 8, 128, 1, 820, 0.75},
    {STEP, "decode step", 32, 8, 128, 1, 1024, 0.70},
    {STEP, "decode step", 32, 8, 128, 1, 4096, 0.70},
    {STEP, "decode step", 9, 3, 64, 1, 410, 0.50},
    {STEP, "decode step", 9, 3, 64, 1, 1024, 0.65},
    {STEP, "decode step", 16, 1, 576, 1, 2048, 0.55},
    {STEP, "decode step", 128, 1, 576, 1, 2048, 0.70},
    {EVICT, "evict", 32, 8, 128, 4096, 818, 0.60},
    {SIMULATE, "simulate", 32, 8, 128, 2048, 410, 0.50},
};

static h2o_view filled(int64_t heads, int64_t rows, int64_t D, bool empty) {
    h2o_view view = {.shape = {1, heads, rows, D},
                     .stride = {heads * rows * D, rows * D, D, 1},
                     .dtype = H2O_F32,
                     .ndim = 4,
                     .device_type = 1,
                     .name = "tensor"};
    view.data = malloc(tensor_bytes(&view)); /* not touched if only sizes matter */
    CHECK(view.data != NULL);
    test_random random = {.state = 1};
    if (!empty) fill_tensor(&view, 0.01f, &random);
    return view;
}

/* Makes the call of a case, with new slots each time, since step and evict change them. */
static outcome run_case(const balance_case *c, int workers, bool only_workspace) {
    outcome result = {0};
    test_random random = {.state = 1};
    const float scale = 1.0f / sqrtf((float)c->D);
    const h2o_dims dims = make_dims(1, c->G, c->H / c->G, c->tokens, c->held + 1, c->D);
    const int32_t heavy = (int32_t)(c->held / 2), recent = (int32_t)(c->held - heavy);
    const h2o_policy policy = {.decay = 1.0f};
    const bool empty = only_workspace;
    const h2o_view query = filled(c->H, c->tokens, c->D, empty);
    const h2o_view keys = filled(c->G, c->tokens, c->D, empty);
    const h2o_view values = filled(c->G, c->tokens, c->D, empty);
    h2o_view out = filled(c->H, c->tokens, c->D, true), slots_data[2] = {{0}};
    out = (h2o_view){.data = out.data,
                     .shape = {1, c->tokens, c->H, c->D},
                     .stride = {c->tokens * c->H * c->D, c->H * c->D, c->D, 1},
                     .dtype = H2O_F32,
                     .ndim = 4,
                     .device_type = 1,
                     .name = "out"};
    h2o_view scores = make_tensor(H2O_F32, 3, 1, c->G, c->tokens, 1);
    FILL(float, scores, random_float(&random));
    h2o_slots slots = {0};
    if (c->what == CHUNK || c->what == STEP || c->what == EVICT) {
        slots = make_slots(DENSE, &dims, H2O_F32, heavy, recent, false);
        if (c->what != EVICT) fill_slots(&slots, c->held, &random);
        slots_data[0] = slots.keys, slots_data[1] = slots.values;
    }
    h2o_view prompt = make_tensor(H2O_I32, 1, 1, 1, 1, 1);
    h2o_view budget = make_tensor(H2O_I32, 2, 1, 2, 1, 1);
    FILL(int32_t, prompt, 1);
    AT(int32_t, budget, 0, 0, 0) = heavy;
    AT(int32_t, budget, 0, 1, 0) = recent;
    h2o_view evicted_at = make_tensor(H2O_I32, 3, 1, c->G, c->tokens, 1);

    h2o_balance_clock = 0;
    if (c->what == PREFILL || c->what == CHUNK) {
        h2o_attend_params p = {.query = query,
                               .keys = keys,
                               .values = values,
                               .out = out,
                               .scores = scores,
                               .has_slots = c->what == CHUNK,
                               .slots = slots,
                               .scale = scale,
                               .policy = policy};
        result.workspace = play_operation(H2O_ATTEND, &p, workers, only_workspace);
    } else if (c->what == EVICT) {
        h2o_evict_params p = {
            .keys = keys, .values = values, .scores = scores, .slots = slots, .policy = policy};
        result.workspace = play_operation(H2O_EVICT, &p, workers, only_workspace);
    } else if (c->what == STEP) {
        h2o_step_params p = {.query = query,
                             .key = keys,
                             .value = values,
                             .slots = slots,
                             .out = out,
                             .policy = policy,
                             .scale = scale};
        result.workspace = play_operation(H2O_STEP, &p, workers, only_workspace);
    } else {
        h2o_simulate_params p = {.query = query,
                                 .keys = keys,
                                 .values = values,
                                 .out = out,
                                 .prompt = prompt,
                                 .budget = budget,
                                 .evicted_at = evicted_at,
                                 .scores = scores,
                                 .policy = policy,
                                 .scale = scale};
        result.workspace = play_operation(H2O_SIMULATE, &p, workers, only_workspace);
    }
    result.time = h2o_balance_clock;
    const h2o_view all[] = {query, keys, values, out, slots_data[0], slots_data[1]};
    for (int i = 0; i < 6; i++) free(all[i].data);
    return result;
}

/* ---- The tables -------------------------------------------------------- */

static int show_efficiency(bool all) {
    static const int workers[] = {2, 4, 8, 16, 32, 64};
    int short_of_bound = 0;
    printf("| work | H, G, D | tokens | keys |%s 64 workers | wanted |\n",
           all ? " 2 | 4 | 8 | 16 | 32 |" : "");
    printf("| --- | --- | --- | --- |%s --- | --- |\n",
           all ? " --- | --- | --- | --- | --- |" : "");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const balance_case *const c = &cases[i];
        const double alone = run_case(c, 1, false).time;
        double share = 0;
        printf("| %s | %d, %d, %d | %d | %d |", c->name, (int)c->H, (int)c->G, (int)c->D,
               (int)c->tokens, (int)c->held);
        for (size_t j = all ? 0 : 5; j < sizeof workers / sizeof *workers; j++) {
            share = alone / (workers[j] * run_case(c, workers[j], false).time);
            printf(" %.0f%% |", 100 * share);
        }
        printf(" %.0f%% |\n", 100 * c->bound);
        fflush(stdout);
        short_of_bound += share < c->bound;
    }
    return short_of_bound;
}

static void show_workspace(void) {
    static const int64_t tokens[] = {2048, 8192, 32768, 131072};
    printf("\n| workspace of a prefill, H=32, G=8, D=128 | 1 worker | 2 | 64 workers |\n");
    printf("| --- | --- | --- | --- |\n");
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        const balance_case c = {PREFILL, "prefill", 32, 8, 128, tokens[i], 0, 0};
        printf("| %d tokens |", (int)tokens[i]);
        for (int workers = 1; workers <= 64; workers = workers == 1 ? 2 : workers * 32) {
            printf(" %.1f MiB |", (double)run_case(&c, workers, true).workspace / (1 << 20));
        }
        printf("\n");
    }
}

int main(int count, char **arguments) {
    h2o_error error;
    CHECK(h2o_init(&error) == H2O_OK);
    const bool all = count == 1 || strcmp(arguments[1], "bounds") != 0;
    const int short_of_bound = show_efficiency(all);
    if (all) show_workspace();
    if (short_of_bound) fprintf(stderr, "%d of the bounds are missed\n", short_of_bound);
    return short_of_bound > 0;
}
