/* tasks.h - scheduling of a kernel's work: tasks are numbered, and each worker takes the next one.
 *
 * Which worker runs a task is up to chance, so a task's result may depend on its number alone;
 * `worker` is only for scratch that a worker has to itself.
 *
 *   run_tasks   a list of independent tasks
 *   run_stages  work items (heads, say) that go through stages of some tasks each
 *
 * A task may wait at a gate for tasks with lower numbers only: these have already been taken by
 * running workers, so they will end. Waiting for anything else could deadlock, since fewer workers
 * than asked for may run at the same time.
 *
 * The kernels count what they do in multiply-adds (COUNT_WORK), which costs nothing: only a build
 * with H2O_BALANCE looks at the counts, to tell without many processors how well the work spreads
 * over them. */
#ifndef H2O_TASKS_H
#define H2O_TASKS_H

#include "../expect.h"
#include "../run.h"

#include <stdatomic.h>

#ifdef H2O_BALANCE
extern double h2o_balance_clock; /* multiply-adds that the running worker has counted */
#define COUNT_WORK(n) (h2o_balance_clock += (double)(n))
#else
#define COUNT_WORK(n) ((void)sizeof(n))
#endif

/* What several workers write begins a line of its own, or each write takes the neighbors away from
 * the workers that wait at them. */
enum { CACHE_LINE = 64 };

/* Where part i of n of a range begins. */
static inline int64_t share_of(int64_t count, int64_t i, int64_t n) { return count * i / n; }

/* ---- Lists ------------------------------------------------------------- */

typedef struct {
    void (*task)(void *context, int64_t index, int worker);
    void *context;
    int64_t count;
    _Alignas(CACHE_LINE) _Atomic int64_t next; /* the others are read only */
} task_list;

static void run_worker(int worker, int workers, void *context) {
    task_list *const list = context;
    (void)workers;
    int64_t index;
    while ((index = atomic_fetch_add_explicit(&list->next, 1, memory_order_relaxed)) <
           list->count) {
        list->task(list->context, index, worker);
    }
}

/* Runs task(context, i, worker) for 0 <= i < count on at most `workers` workers, and
 * returns when all are done. Low numbers start first: give them the long ones. */
static inline void run_tasks(const h2o_exec *exec, int workers, int64_t count,
                             void (*task)(void *, int64_t, int), void *context) {
    EXPECT(workers >= 1);
    task_list list = {.task = task, .context = context, .count = count};
    workers = workers < count ? workers : (int)count;
    if (workers > 1) {
        exec->run(workers, run_worker, &list);
    } else {
        run_worker(0, 1, &list);
    }
}

/* ---- Gates ------------------------------------------------------------- */

enum { GATE_TRIES = 1000 }; /* to find a gate open, some 20 us, before a worker sleeps */

/* A barrier: counts the tasks that have arrived, and releases those that wait. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic int64_t arrived;
    _Atomic uint32_t open;     /* the stage that may begin */
    _Atomic uint32_t sleepers; /* or about to be */
#ifdef H2O_BALANCE
    double arrival, opening; /* the latest of each */
#endif
} gate;

static inline void gate_init(gate *g) { *g = (gate){0}; }

/* Counts an arrival; true for the n-th, which is the last and resets the count. What the others
 * wrote before they arrived is visible to it. */
static inline bool gate_arrive(gate *g, int64_t n) {
    const int64_t arrived = atomic_fetch_add(&g->arrived, 1) + 1;
    const bool last = arrived == n;
    EXPECT(arrived <= n);
    if (last) {
        atomic_store_explicit(&g->arrived, 0, memory_order_relaxed);
    }
#ifdef H2O_BALANCE
    g->arrival = h2o_balance_clock > g->arrival ? h2o_balance_clock : g->arrival;
    h2o_balance_clock = last ? g->arrival : h2o_balance_clock;
#endif
    return last;
}

static inline void gate_open(gate *g, int64_t stage) {
#ifdef H2O_BALANCE
    g->opening = h2o_balance_clock;
#endif
    atomic_store(&g->open, (uint32_t)stage);
    if (atomic_load(&g->sleepers) > 0) h2o_wake_all(&g->open);
}

/* Returns when the gate has been opened for that stage or a later one. */
static inline void gate_wait(gate *g, int64_t stage) {
    uint32_t open;
    for (int tries = 0;
         (open = atomic_load_explicit(&g->open, memory_order_acquire)) < (uint32_t)stage; tries++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (tries > GATE_TRIES) { /* the worker that is to open it may have no processor */
            atomic_fetch_add(&g->sleepers, 1);
            h2o_wait(&g->open, open);
            atomic_fetch_sub(&g->sleepers, 1);
        }
    }
#ifdef H2O_BALANCE
    h2o_balance_clock = h2o_balance_clock > g->opening ? h2o_balance_clock : g->opening;
#endif
}

/* ---- Stages ------------------------------------------------------------ */

/* Work items (heads, say), each of which goes through stages of some tasks: a stage of an item
 * begins when its last one has ended. While one item waits there are the others. The last stages
 * of an item may have no tasks. */
typedef struct {
    int64_t item, stage;
    int64_t index, count; /* of the tasks of this stage of this item */
    int worker;
} stage_task;

/* A kernel's functions for its stages. */
typedef struct {
    int64_t (*count)(void *context, int64_t item, int64_t stage); /* of the stage's tasks */
    void (*task)(void *context, const stage_task *task);
    void (*end_stage)(void *context, const stage_task *last); /* after a stage's last task */
} stage_functions;

typedef struct {
    const stage_functions *functions;
    void *context;
    int64_t stages, items;
    bool alone;      /* one worker takes all tasks of an item; starts and gates are not used */
    int64_t *starts; /* [stages * items + 1] the first task of each */
    gate *gates;     /* [items] */
} stage_list;

/* Which stage of which item a task belongs to: the last that begins with it, as those without
 * tasks begin where the next one does. */
static inline int64_t find_stage(const stage_list *list, int64_t task) {
    int64_t low = 0, high = list->stages * list->items;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (list->starts[middle] <= task) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static inline void run_stage_task(void *context, int64_t index, int worker) {
    const stage_list *const list = context;
    const int64_t at = find_stage(list, index);
    const stage_task task = {at % list->items, at / list->items, index - list->starts[at],
                             list->starts[at + 1] - list->starts[at], worker};
    gate *const g = &list->gates[task.item];
    gate_wait(g, task.stage);
    list->functions->task(list->context, &task);
    if (gate_arrive(g, task.count)) {
        list->functions->end_stage(list->context, &task);
        gate_open(g, task.stage + 1);
    }
}

/* Task: all stages of an item. */
static inline void run_whole_item(void *context, int64_t item, int worker) {
    const stage_list *const list = context;
    for (int64_t stage = 0; stage < list->stages; stage++) {
        stage_task task = {.item = item, .stage = stage, .worker = worker};
        task.count = list->functions->count(list->context, item, stage);
        for (; task.index < task.count; task.index++) list->functions->task(list->context, &task);
        if (task.count > 0) list->functions->end_stage(list->context, &task);
    }
}

/* Runs the stages of so many items; the list has memory for these. */
static inline void run_stages(const h2o_exec *exec, int workers, stage_list *list, int64_t items,
                              const stage_functions *functions, void *context) {
    list->functions = functions;
    list->context = context;
    list->items = items;
    if (list->alone) {
        run_tasks(exec, workers, items, run_whole_item, list);
        return;
    }
    list->starts[0] = 0;
    for (int64_t i = 0; i < list->stages * items; i++) {
        list->starts[i + 1] = list->starts[i] + functions->count(context, i % items, i / items);
    }
    for (int64_t i = 0; i < items; i++) gate_init(&list->gates[i]);
    run_tasks(exec, workers, list->starts[list->stages * list->items], run_stage_task, list);
}

#endif
