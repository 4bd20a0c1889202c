/* parallel.c - threads, borrowed wherever a pool is already running.
 *
 * A second pool next to torch's would make both slower: threads of one spin or
 * wake while those of the other compute. So the workers of a call run, in this
 * order of preference,
 *
 *   torch  on torch's own pool: torch_parallel_for of its stable C interface
 *          (torch/csrc/stable/c/shim.h), found in the libtorch_cpu that the
 *          process has already loaded; torch.set_num_threads is honored;
 *   gomp   on the pool of a libgomp that is already loaded, through
 *          GOMP_parallel, which is what `#pragma omp parallel` compiles to. It is
 *          given no number of threads: libgomp ends and starts threads whenever that
 *          changes, and the program that it belongs to has one of its own;
 *   own    on a few threads of our own that sleep on a condition variable.
 *          H2O_THREADS says how many, by default one per processor.
 *
 * Where other processes delay the threads of a borrowed pool, the own pool takes
 * its place for a while (see "Crowded processors").
 *
 * No more workers than a container's quota of processors are offered.
 *
 * Nothing is linked: the libraries are looked up by name, again after each
 * load of a library until torch has been found, since torch may be imported
 * after h2o.
 *
 * However many threads a pool really brings, each takes the next worker's
 * number, so every worker runs exactly once. Inside a worker everything is
 * serial. The threads of any pool are lost in a forked child, and some OpenMP
 * runtimes then wait for theirs forever, so a child always uses own threads.
 */
#include "run.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* ---- A call ------------------------------------------------------------ */

typedef struct {
    h2o_worker_fn function;
    void *context;
    int workers;
    atomic_int next; /* the first worker that no thread has been yet */
    /* Times of h2o_now, for jobs of a borrowed pool: */
    _Atomic int64_t started; /* when the first thread arrived, 0 before that */
    _Atomic int64_t drained; /* when the first thread found no work left, 0 before that */
    _Atomic int64_t done;    /* when the last thread that had work finished it */
} job;

enum { MAX_THREADS = 256 };

static _Thread_local bool inside; /* this thread runs as a worker */

/* Runs workers of a job until each has been run. Every thread of a pool calls this. */
static void take_part(void *argument) {
    job *const work = argument;
    const bool nested = inside;
    inside = true;
    int worker;
    while ((worker = atomic_fetch_add(&work->next, 1)) < work->workers) {
        work->function(worker, work->workers, work->context);
    }
    inside = nested;
}

/* ---- Crowded processors ------------------------------------------------ */

/* A borrowed pool begins when each of its threads has left the last job, and returns when each has
 * arrived, even if the work is done by then. Where other processes keep the processors busy, a
 * thread may be several milliseconds late, which is many times the length of a decode step. The own
 * pool waits only for the threads that take part.
 *
 * So each call of a borrowed pool measures its stall: its time before and after the work. If the
 * stall is longer than the work, the calls that follow use the own pool, for as long as the stall
 * took, and then while the system reports that other threads want all processors. Then the borrowed
 * pool gets another try. If it stalls again within RARE times the stall's length, the time on the own
 * pool doubles, up to MOST_DOUBLINGS times. */

enum { LEAST_STALL = 200000, LONGEST_STALL = 10000000, REPORTED_FOR = 1000000 }; /* nanoseconds */
enum { MOST_DOUBLINGS = 6, RARE = 10 };

static struct {
    atomic_bool lasts;     /* since the last stall */
    _Atomic int64_t until; /* calls use the own pool until then, at least */
    atomic_int doublings;
} crowd;

static bool is_crowded(void) {
    if (!crowd.lasts) return false;
    const int64_t now = h2o_now();
    if (now < crowd.until) return true;
    if (h2o_machine_is_full("")) {
        crowd.until = now + REPORTED_FOR;
        return true;
    }
    crowd.lasts = false;
    return false;
}

/* take_part for the threads of a borrowed pool. */
static void take_part_timed(void *argument) {
    job *const work = argument;
    const int64_t began = h2o_now();
    int64_t none = 0, drained = 0;
    atomic_compare_exchange_strong(&work->started, &none, began);
    take_part(work);
    const int64_t ended = h2o_now();
    if (atomic_compare_exchange_strong(&work->drained, &drained, ended) || began < drained) {
        int64_t done = work->done;
        while (done < ended && !atomic_compare_exchange_weak(&work->done, &done, ended)) {
        }
    }
}

/* Learns from a job that a borrowed pool began at that time and has just finished. */
static void measure_stall(const job *work, int64_t began) {
    const int64_t now = h2o_now(), useful = work->done - work->started;
    const int64_t measured = now - began - useful;
    if (measured < LEAST_STALL || measured < useful) return;
    const int64_t stall = measured < LONGEST_STALL ? measured : LONGEST_STALL;
    int doublings = 0;
    if (now - crowd.until < RARE * stall) {
        doublings = crowd.doublings < MOST_DOUBLINGS ? crowd.doublings + 1 : MOST_DOUBLINGS;
    }
    crowd.doublings = doublings;
    crowd.until = now + (stall << doublings);
    crowd.lasts = true;
}

/* ---- Borrowed pools ---------------------------------------------------- */

typedef enum { TORCH, GOMP, OWN } pool;

static const char *const pool_names[] = {"torch", "gomp", "own"};

/* Each entry is written once, under search_lock and before chosen names its
 * pool. */
static struct {
    int32_t (*torch_parallel_for)(int64_t begin, int64_t end, int64_t grain,
                                  void (*function)(int64_t, int64_t, void *), void *context);
    int32_t (*torch_get_num_threads)(uint32_t *threads);
    void (*gomp_parallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);
    int (*omp_get_max_threads)(void);
} borrowed;

static pthread_mutex_t search_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t loads_searched; /* h2o_library_loads when last searched */
static _Atomic pool chosen = OWN;
static atomic_bool forked;

static void search(void) {
    const uint64_t loads = h2o_library_loads();
    if (loads != 0 && loads == loads_searched) {
        return;
    }
    loads_searched = loads;
    void *const torch = h2o_loaded_library("libtorch_cpu");
    if (h2o_find_symbol(torch, "torch_parallel_for", &borrowed.torch_parallel_for) &&
        h2o_find_symbol(torch, "torch_get_num_threads", &borrowed.torch_get_num_threads)) {
        chosen = TORCH;
    } else if (chosen == OWN) {
        void *const gomp = h2o_loaded_library("libgomp");
        if (h2o_find_symbol(gomp, "GOMP_parallel", &borrowed.gomp_parallel) &&
            h2o_find_symbol(gomp, "omp_get_max_threads", &borrowed.omp_get_max_threads)) {
            chosen = GOMP;
        }
    }
}

static pool choose(void) {
    if (forked) {
        return OWN;
    }
    if (chosen != TORCH) {
        pthread_mutex_lock(&search_lock);
        if (chosen != TORCH) {
            search();
        }
        pthread_mutex_unlock(&search_lock);
    }
    return chosen;
}

static void take_part_in_range(int64_t begin, int64_t end, void *context) {
    (void)begin, (void)end;
    take_part_timed(context);
}

static void run_on_borrowed(pool from, job *work) {
    const int64_t began = h2o_now();
    if (from == TORCH) {
        borrowed.torch_parallel_for(0, work->workers, 1, take_part_in_range, work);
    } else {
        borrowed.gomp_parallel(take_part_timed, work, 0, 0);
    }
    measure_stall(work, began);
}

/* ---- The own pool ------------------------------------------------------ */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, idle;
    job *work;         /* what the threads are to take part in, or NULL */
    unsigned long run; /* counts the jobs, so that no thread takes part twice */
    int running;       /* threads that are taking part */
    int threads;
    bool busy; /* a caller has the pool */
} own_pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
              .wake = PTHREAD_COND_INITIALIZER,
              .idle = PTHREAD_COND_INITIALIZER};

static void *pool_thread(void *unused) {
    unsigned long seen = 0;
    pthread_mutex_lock(&own_pool.lock);
    for (;;) {
        while (!own_pool.work || own_pool.run == seen) {
            pthread_cond_wait(&own_pool.wake, &own_pool.lock);
        }
        job *const work = own_pool.work;
        seen = own_pool.run;
        own_pool.running++;
        pthread_mutex_unlock(&own_pool.lock);
        take_part(work);
        pthread_mutex_lock(&own_pool.lock);
        if (--own_pool.running == 0) {
            pthread_cond_signal(&own_pool.idle);
        }
    }
    return unused;
}

/* A thread that cannot be had is no error: the others take its workers. */
static void start_threads(int wanted) {
    while (own_pool.threads < wanted && h2o_start_thread(pool_thread)) {
        own_pool.threads++;
    }
}

/* A second caller does not wait for the first: it does its workers itself. */
static void run_on_own(job *work) {
    pthread_mutex_lock(&own_pool.lock);
    if (own_pool.busy) {
        pthread_mutex_unlock(&own_pool.lock);
        return;
    }
    own_pool.busy = true;
    start_threads(work->workers - 1);
    own_pool.work = work;
    own_pool.run++;
    for (int i = 1; i < work->workers && i <= own_pool.threads; i++) {
        pthread_cond_signal(&own_pool.wake); /* the caller is a worker too */
    }
    pthread_mutex_unlock(&own_pool.lock);
    take_part(work);
    pthread_mutex_lock(&own_pool.lock);
    own_pool.work = NULL;
    while (own_pool.running > 0) {
        pthread_cond_wait(&own_pool.idle, &own_pool.lock);
    }
    own_pool.busy = false;
    pthread_mutex_unlock(&own_pool.lock);
}

/* What H2O_THREADS says: 0 where it is not set, negative where it is no number of threads. */
static int wanted_threads(void) {
    const char *const text = getenv("H2O_THREADS");
    if (!text || !*text) {
        return 0;
    }
    char *end;
    const long threads = strtol(text, &end, 10);
    if (*end || threads < 1) {
        return -1;
    }
    return threads < MAX_THREADS ? (int)threads : MAX_THREADS;
}

static int own_threads(void) {
    static atomic_int known; /* the environment is read once */
    if (known == 0) {
        const int wanted = wanted_threads(), processors = h2o_processors();
        known = wanted > 0 ? wanted : processors < MAX_THREADS ? processors : MAX_THREADS;
    }
    return known;
}

/* A container's quota in threads, asked for once. */
static int quota_threads(void) {
    static atomic_int known;
    if (known == 0) {
        const int quota = h2o_quota("");
        known = quota < MAX_THREADS ? quota : MAX_THREADS;
    }
    return known;
}

/* ---- Fork -------------------------------------------------------------- */

static void before_fork(void) {
    pthread_mutex_lock(&search_lock);
    pthread_mutex_lock(&own_pool.lock);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&own_pool.lock);
    pthread_mutex_unlock(&search_lock);
}

/* The child has one thread, whatever the pool's numbers were. */
static void after_fork_in_child(void) {
    forked = true;
    own_pool.work = NULL;
    own_pool.running = own_pool.threads = 0;
    own_pool.busy = false;
    pthread_cond_init(&own_pool.wake, NULL);
    pthread_cond_init(&own_pool.idle, NULL);
    after_fork_in_parent();
}

/* When the library is loaded, since torch may have started threads before the
 * first call of ours. */
__attribute__((constructor)) static void survive_fork(void) {
    h2o_at_fork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- Interface --------------------------------------------------------- */

const char *h2o_thread_source(void) { return pool_names[choose()]; }

int h2o_check_threads(h2o_error *error) {
    if (wanted_threads() >= 0) {
        return H2O_OK;
    }
    return h2o_fail(error, H2O_EVALUE,
                    "H2O_THREADS=%.40s: not a number of threads; set it to a whole number from 1 "
                    "on, or unset it for one thread per processor",
                    getenv("H2O_THREADS"));
}

int h2o_threads(void) {
    const pool from = choose();
    int threads = from == GOMP ? borrowed.omp_get_max_threads() : 0;
    uint32_t torch_threads = 0;
    if (chosen == TORCH && borrowed.torch_get_num_threads(&torch_threads) == 0) {
        threads = (int)torch_threads; /* in a forked child too */
    }
    if (threads < 1) {
        return own_threads();
    }
    return threads < quota_threads() ? threads : quota_threads();
}

void h2o_parallel(int workers, h2o_worker_fn function, void *context) {
    job work = {.function = function, .context = context, .workers = workers};
    if (workers > 1 && !inside) {
        const pool from = is_crowded() ? OWN : choose();
        if (from == OWN) {
            run_on_own(&work);
        } else {
            run_on_borrowed(from, &work);
        }
    }
    take_part(&work); /* the workers that no pool has run */
}
