/* tasks.h - work for lanes: many small tasks, each lane takes the next one.
 *
 * Which lane runs a task is up to chance, so a task's result may depend on its
 * number alone; lane is only for scratch that a lane has to itself. */
#ifndef H2O_TASKS_H
#define H2O_TASKS_H

#include <stdatomic.h>

#include "../h2o.h"

typedef struct {
    void (*task)(void *context, int64_t index, int lane);
    void *context;
    int64_t count;
    _Atomic int64_t next;
} task_list;

static void run_lane(int lane, int lanes, void *context) {
    task_list *const list = context;
    (void)lanes;
    int64_t index;
    while ((index = atomic_fetch_add_explicit(&list->next, 1, memory_order_relaxed)) < list->count) {
        list->task(list->context, index, lane);
    }
}

/* Runs task(context, i, lane) for 0 <= i < count on at most `lanes` lanes, and
 * returns when all are done. Low numbers start first: give them the long ones. */
static inline void run_tasks(const h2o_exec *exec, int lanes, int64_t count,
                             void (*task)(void *, int64_t, int), void *context) {
    task_list list = {.task = task, .context = context, .count = count};
    lanes = lanes < count ? lanes : (int)count;
    if (lanes > 1) {
        exec->run(lanes, run_lane, &list);
    } else {
        run_lane(0, 1, &list);
    }
}

#endif
