/* test_parallel.c - workers run once each, whoever calls, in h2o's own pool and a borrowed one. */
#define _GNU_SOURCE
#include "run.h"
#include "system.h"

#include "children.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

enum { MOST_LANES = 300, CALLERS = 4, ROUNDS = 500 };

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

/* The parent forks while its workers are busy with calls from other threads. */
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
static void few_workers_wake_few_threads(void) {}
static void without_a_wish_each_processor_has_a_thread(void) { CHECK(h2o_processors() >= 1); }

#else

static long switches(void) {
    struct rusage used;
    CHECK(getrusage(RUSAGE_SELF, &used) == 0);
    return used.ru_nvcsw;
}

/* Counts threads that go back to sleep, for which each round leaves time. */
static void few_workers_wake_few_threads(void) {
    const struct timespec moment = {0, 1000000};
    run_lanes(64, false); /* the pool now has 63 threads */
    nanosleep(&moment, NULL);
    const long before = switches();
    for (int repeat = 0; repeat < 100; repeat++) {
        run_lanes(2, false);
        nanosleep(&moment, NULL);
    }
    CHECK(switches() - before < 100 * 16);
}

static atomic_int threads_met;

static void meet_thread(void *unused) {
    static _Thread_local bool met;
    (void)unused;
    if (!met) atomic_fetch_add(&threads_met, 1);
    met = true;
}

static atomic_int steps;

static void count_step(int worker, int workers, void *context) {
    (void)worker, (void)workers, (void)context;
    atomic_fetch_add(&steps, 1);
}

/* A program uses its own number of threads between calls with fewer. */
static void libgomp_keeps_its_threads(void *library) {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    CHECK(h2o_find_symbol(library, "GOMP_parallel", &parallel));
    for (int repeat = 0; repeat < ROUNDS; repeat++) {
        parallel(meet_thread, NULL, 8, 0);
        h2o_parallel(2, count_step, NULL);
    }
    CHECK(threads_met <= 8);
}

static pthread_t late_thread;
static atomic_int sleeps;
static atomic_bool sleeping;

/* A thread of libgomp in this handler is as late as one whose processor is busy. */
static void sleep_in_handler(int signal) {
    const struct timespec moment = {0, 20000000};
    (void)signal;
    sleeping = true;
    atomic_fetch_add(&sleeps, 1);
    nanosleep(&moment, NULL);
    sleeping = false;
}

static void note_other_thread(void *caller) {
    if (!pthread_equal(pthread_self(), *(pthread_t *)caller)) late_thread = pthread_self();
}

/* libgomp waits for its late thread at each call. h2o soon returns while the thread sleeps. */
static void a_late_thread_is_not_waited_for(void *library) {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    pthread_t caller = pthread_self();
    struct sigaction action = {.sa_handler = sleep_in_handler, .sa_flags = SA_RESTART};
    CHECK(h2o_find_symbol(library, "GOMP_parallel", &parallel));
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    parallel(note_other_thread, &caller, 2, 0);
    bool waited = true;
    for (int call = 1; waited && call <= ROUNDS; call++) {
        const int before = sleeps;
        CHECK(pthread_kill(late_thread, SIGUSR1) == 0);
        while (sleeps == before) sched_yield();
        steps = 0;
        h2o_parallel(2, count_step, NULL);
        waited = !sleeping;
        CHECK(steps == 2);
    }
    CHECK(!waited);
}

/* A library that is loaded later is found, and its number of threads is used. */
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
    set_threads(8);
    libgomp_keeps_its_threads(library);
    set_threads(2);
    a_late_thread_is_not_waited_for(library);
    set_threads(3);
    CHECK(h2o_threads() == (h2o_quota("") < 3 ? h2o_quota("") : 3));
    every_lane_runs_once();
    nested_calls_run_too();
    threads_may_call_at_once();
    if (can_fork_threads()) a_forked_child_has_threads_of_its_own();
}

/* Runs in a child, since the environment is read once. */
static void without_a_wish_each_processor_has_a_thread(void) {
    cpu_set_t processors;
    CHECK(sched_getaffinity(0, sizeof processors, &processors) == 0);
    const pid_t child = fork();
    if (child == 0) {
        unsetenv("H2O_THREADS");
        const int count = CPU_COUNT(&processors), quota = h2o_quota("");
        _exit(h2o_threads() == (count < quota ? count : quota) ? 0 : 1);
    }
    CHECK(wait_for(child) == 0);
}

#endif

/* H2O_THREADS is a number of threads or empty, as h2o_threads reads it later. */
static void a_wish_that_is_no_number_is_an_error(void) {
    const char *const wrong[] = {"many", "2x", "0", "-1", " "}, *const right[] = {"", "1", "64"};
    h2o_error error;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(setenv("H2O_THREADS", wrong[i], 1) == 0);
        CHECK(h2o_check_threads(&error) == H2O_EVALUE && strstr(error.text, wrong[i]) != NULL);
    }
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        CHECK(setenv("H2O_THREADS", right[i], 1) == 0 && h2o_check_threads(&error) == H2O_OK);
    }
}

int main(void) {
    a_wish_that_is_no_number_is_an_error();
    without_a_wish_each_processor_has_a_thread();
    CHECK(setenv("H2O_THREADS", "5", 1) == 0);
    CHECK(strcmp(h2o_thread_source(), "own") == 0);
    CHECK(h2o_threads() == 5);
    every_lane_runs_once();
    nested_calls_run_too();
    threads_may_call_at_once();
    few_workers_wake_few_threads();
    if (can_fork_threads()) a_forked_child_has_threads_of_its_own();
    if (!THREAD_SANITIZER) a_loaded_libgomp_is_borrowed(); /* it is not instrumented */
    return 0;
}
