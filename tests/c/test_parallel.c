/* test_parallel.c - workers run once each, whoever calls, on the own pool and on
 * a borrowed one. */
#define _GNU_SOURCE
#include "run.h"
#include "system.h"

#include "children.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#include <sched.h>
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { MOST_LANES = 300, CALLERS = 4 };

typedef struct {
    atomic_int runs[MOST_LANES];
    int workers;
    bool nested;
} record;

static void count_lane(int worker, int workers, void *context) {
    record *const r = context;
    CHECK(workers == r->workers && worker >= 0 && worker < workers);
    atomic_fetch_add(&r->runs[worker], 1);
    if (r->nested) {
        record inner = {.workers = 3};
        h2o_parallel(3, count_lane, &inner);
        for (int i = 0; i < 3; i++) CHECK(inner.runs[i] == 1);
    }
}

static void run_lanes(int workers, bool nested) {
    record *const r = test_alloc(sizeof *r);
    r->workers = workers;
    r->nested = nested;
    h2o_parallel(workers, count_lane, r);
    for (int i = 0; i < MOST_LANES; i++) CHECK(r->runs[i] == (i < workers));
    free(r);
}

static void every_lane_runs_once(void) {
    const int workers[] = {1, 2, 3, 4, 7, 64, MOST_LANES};
    for (size_t i = 0; i < sizeof workers / sizeof *workers; i++) {
        for (int repeat = 0; repeat < 20; repeat++) run_lanes(workers[i], false);
    }
}

static void nested_calls_run_too(void) {
    for (int repeat = 0; repeat < 20; repeat++) run_lanes(4, true);
}

static void *call_often(void *unused) {
    for (int repeat = 0; repeat < 200; repeat++) run_lanes(4, repeat % 10 == 0);
    return unused;
}

static void threads_may_call_at_once(void) {
    pthread_t threads[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        CHECK(pthread_create(&threads[i], NULL, call_often, NULL) == 0);
    }
    for (int i = 0; i < CALLERS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* The parent's workers are busy with other threads' calls while it forks. */
static void a_forked_child_has_threads_of_its_own(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, call_often, NULL) == 0);
    for (int repeat = 0; repeat < 10; repeat++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(60); /* a child that hangs fails */
            every_lane_runs_once();
            _exit(strcmp(h2o_thread_source(), "own") == 0 && h2o_threads() >= 1 ? 0 : 2);
        }
        CHECK(wait_for(child) == 0);
    }
    CHECK(pthread_join(thread, NULL) == 0);
}

#if defined(_WIN32)

static void a_loaded_libgomp_is_borrowed(void) {}
static void without_a_wish_each_processor_has_a_thread(void) { CHECK(h2o_processors() >= 1); }

#else

/* A library that is loaded later is found, and its number of threads counts. */
static void a_loaded_libgomp_is_borrowed(void) {
    void *const library = dlopen("libgomp.so.1", RTLD_NOW);
    if (!library) {
        puts("no libgomp here: borrowing is not tested");
        return;
    }
    CHECK(strcmp(h2o_thread_source(), "gomp") == 0);
    void *const symbol = dlsym(library, "omp_set_num_threads");
    void (*set_threads)(int);
    CHECK(symbol != NULL);
    memcpy(&set_threads, &symbol, sizeof symbol);
    set_threads(3);
    CHECK(h2o_threads() == 3);
    every_lane_runs_once();
    nested_calls_run_too();
    threads_may_call_at_once();
    if (can_fork_threads()) a_forked_child_has_threads_of_its_own();
}

/* In a child, since the environment is read once. */
static void without_a_wish_each_processor_has_a_thread(void) {
    cpu_set_t processors;
    CHECK(sched_getaffinity(0, sizeof processors, &processors) == 0);
    const pid_t child = fork();
    if (child == 0) {
        unsetenv("H2O_THREADS");
        _exit(h2o_threads() == CPU_COUNT(&processors) ? 0 : 1);
    }
    CHECK(wait_for(child) == 0);
}

#endif

int main(void) {
    without_a_wish_each_processor_has_a_thread();
    CHECK(setenv("H2O_THREADS", "5", 1) == 0);
    CHECK(strcmp(h2o_thread_source(), "own") == 0);
    CHECK(h2o_threads() == 5);
    every_lane_runs_once();
    nested_calls_run_too();
    threads_may_call_at_once();
    if (can_fork_threads()) a_forked_child_has_threads_of_its_own();
    if (!THREAD_SANITIZER) a_loaded_libgomp_is_borrowed(); /* it is not instrumented */
    return 0;
}
