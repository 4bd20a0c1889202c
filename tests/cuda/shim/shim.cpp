/* shim.cpp - the emulated GPU. It runs a kernel's blocks one after the other, and their threads as
 * fibers of one thread of the operating system.
 *
 *   1. shim_launch copies the parameters and runs each block, in an order that the seed determines.
 *   2. run_block opens a fiber for each thread, with uninitialized shared memory, and switches to
 *      ready fibers until all have returned.
 *   3. A fiber that reaches a barrier or a warp operation registers at a rendezvous and switches to
 *      a ready fiber, or to run_block if there is none. The last one to arrive computes the answers
 *      of all.
 *   4. If fibers wait that can never continue, or an access is misaligned, and so on, the launch
 *      ends with a text (shim_error). */
#include "shim.h"

#include <cstdarg>
#include <cstdio>
#include <vector>

#include "fiber.h"

#ifdef SHIM_MSAN
extern "C" void __msan_poison(const volatile void *address, size_t size);
#endif

enum { WARP = 32, NO_LINE = -1, MOST_COPIES = 64 /* pending copies of a thread */ };
#ifdef SHIM_TSAN
/* ThreadSanitizer has 255 slots for all threads, and misses races when more threads alternate. */
static const unsigned MOST_THREADS = 128;
#else
static const unsigned MOST_THREADS = 1024;
#endif

static const shim_registration *kernels;
static shim_branch *branches;

/* No C++ containers here: the standard library is not built for MemorySanitizer. */
shim_registration::shim_registration(const char *name, size_t size, shim_entry entry)
    : name(name), size(size), entry(entry), next(kernels) {
    kernels = this;
}

shim_branch::shim_branch(const char *name) : name(name), taken(0), next(branches) {
    branches = this;
}

shim_branch *shim_branches(void) { return branches; }

static const shim_registration *find_kernel(const char *name) {
    const shim_registration *k = kernels;
    while (k && strcmp(k->name, name) != 0) k = k->next;
    return k;
}

/* Threads of a block or a warp that wait for each other. ThreadSanitizer learns their order through
 * two addresses in turn. With one address, a thread that resumes late would also be ordered after
 * accesses that others have made since, before the next rendezvous. */
struct rendezvous {
    unsigned arrived, turn;
    uint64_t *sync; /* [2] */
    int line;
    shim_operation operation;
    bool any;
    uint64_t words[WARP];
    int lanes[WARP];
};

struct thread {
    fiber context;
    bool finished;
    const char *waits_for;
    int line;
    bool any;        /* answer of its block's rendezvous ... */
    uint64_t answer; /* ... and of its warp's */
    unsigned issued, completed, batch; /* counts of its copies */
};

/* The current launch. */
static struct {
    shim_dim3 grid, block, at;
    shim_entry entry;
    const void *params;
    char *workspace;
    unsigned char *shared;
    thread threads[MOST_THREADS];
    shim_copy copies[MOST_THREADS][MOST_COPIES]; /* a ring for each thread */
    unsigned finished;
    rendezvous all, warps[MOST_THREADS / WARP];
    unsigned ready[MOST_THREADS]; /* a queue, as a ring */
    unsigned first, waiting;
    unsigned running;
    fiber scheduler;
    uint64_t random;
    char error[512];
    bool failed;
} now;

static uint64_t seed;

void shim_seed(uint64_t n) { seed = n; }
const char *shim_error(void) { return now.error; }

static void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    const int used =
        snprintf(now.error, sizeof now.error, "block %u,%u,%u: ", now.at.x, now.at.y, now.at.z);
    vsnprintf(now.error + used, sizeof now.error - (size_t)used, format, list);
    va_end(list);
    now.failed = true;
}

/* Does not return: the scheduler never switches to a fiber that has failed or finished. */
static void end_fiber(void) {
    order_release(&now.finished);
    fiber_switch(&now.threads[now.running].context, &now.scheduler);
}

/* ---- Scheduling ---------------------------------------------------------- */

static void make_ready(unsigned thread) {
    now.ready[(now.first + now.waiting++) % MOST_THREADS] = thread;
}

static unsigned random_below(unsigned n) {
    now.random = now.random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((now.random >> 33) % n);
}

static unsigned next_ready(void) {
    if (seed != 0) {
        unsigned *const some = &now.ready[(now.first + random_below(now.waiting)) % MOST_THREADS];
        unsigned *const head = &now.ready[now.first];
        const unsigned swapped = *some;
        *some = *head;
        *head = swapped;
    }
    const unsigned thread = now.ready[now.first];
    now.first = (now.first + 1) % MOST_THREADS;
    now.waiting--;
    return thread;
}

static void wait_for_others(const char *group, int line) {
    thread *const self = &now.threads[now.running];
    self->waits_for = group;
    self->line = line;
    if (now.waiting > 0) now.running = next_ready();
    const thread *const next = &now.threads[now.running];
    fiber_switch(&self->context, next == self ? &now.scheduler : &next->context);
}

/* ---- What kernels call --------------------------------------------------- */

unsigned shim_thread_index(void) { return now.running; }
shim_dim3 shim_block_index(void) { return now.at; }
shim_dim3 shim_block_size(void) { return now.block; }
shim_dim3 shim_grid_size(void) { return now.grid; }
unsigned char *shim_shared(void) { return now.shared; }

void shim_misaligned(const void *p, int bytes) {
    fail("thread %u: %d bytes at %p, which is no multiple of %d", now.running, bytes, p, bytes);
    end_fiber();
}

bool shim_postpone(void *to, const void *from, int bytes) {
    thread *const self = &now.threads[now.running];
    if (seed != 0 && random_below(2) != 0) return false;
    if (self->issued - self->completed == MOST_COPIES) {
        fail("thread %u: more than %d copies under way", now.running, MOST_COPIES);
        end_fiber();
    }
    now.copies[now.running][self->issued++ % MOST_COPIES] = {to, from, bytes, self->batch};
    return true;
}

void shim_close_batch(void) { now.threads[now.running].batch++; }

/* The next copy to complete, if its batch is closed and precedes the last `open` batches. */
shim_copy shim_due(unsigned open) {
    thread *const self = &now.threads[now.running];
    const shim_copy copy = now.copies[now.running][self->completed % MOST_COPIES];
    if (self->completed == self->issued || copy.batch + open >= self->batch) return {};
    self->completed++;
    return copy;
}

static void check_same(const rendezvous *m, const char *group, shim_operation operation, int line) {
    if (m->line == NO_LINE || (m->line == line && m->operation == operation)) return;
    fail("thread %u waits for its %s at line %d, others at line %d%s", now.running, group, line,
         m->line, m->operation == operation ? "" : " in another operation");
    end_fiber();
}

bool shim_block(bool predicate, int line) {
    rendezvous *const m = &now.all;
    const unsigned self = now.running;
    check_same(m, "block", SHIM_SYNC, line);
    uint64_t *const sync = &m->sync[m->turn];
    m->line = line;
    m->any |= predicate;
    order_release(sync);
    if (++m->arrived == now.block.x) {
        for (unsigned i = 0; i < now.block.x; i++) {
            now.threads[i].any = m->any;
            if (i != self) make_ready(i);
        }
        m->arrived = 0; /* not by memset, which sanitizers intercept */
        m->turn ^= 1;
        m->any = false;
        m->line = NO_LINE;
    } else {
        wait_for_others("block", line);
    }
    order_acquire(sync);
    return now.threads[self].any;
}

void shim_load_matrices(const uint64_t words[WARP], bool transposed);
void shim_multiply(const uint64_t words[WARP], int depth);

static void answer_warp(const rendezvous *m, unsigned first) {
    uint64_t votes = 0;
    if (m->operation == SHIM_MULTIPLY) return shim_multiply(m->words, 16);
    if (m->operation == SHIM_MULTIPLY_HALF) return shim_multiply(m->words, 8);
    if (m->operation >= SHIM_MATRICES) {
        return shim_load_matrices(m->words, m->operation == SHIM_TRANSPOSED);
    }
    for (unsigned lane = 0; lane < WARP; lane++) votes |= (m->words[lane] & 1) << lane;
    for (unsigned lane = 0; lane < WARP; lane++) {
        now.threads[first + lane].answer =
            m->operation == SHIM_SHUFFLE ? m->words[m->lanes[lane] & 31] : votes;
    }
}

uint64_t shim_warp(shim_operation operation, uint64_t word, int lane, int line) {
    const unsigned self = now.running, first = self / WARP * WARP;
    rendezvous *const m = &now.warps[self / WARP];
    check_same(m, "warp", operation, line);
    uint64_t *const sync = &m->sync[m->turn];
    m->line = line;
    m->operation = operation;
    m->words[self - first] = word;
    m->lanes[self - first] = lane;
    if (operation == SHIM_SYNC) order_release(sync);
    if (++m->arrived == WARP) {
        answer_warp(m, first);
        for (unsigned i = first; i < first + WARP; i++) {
            if (i != self) make_ready(i);
        }
        m->arrived = 0;
        m->turn ^= 1;
        m->line = NO_LINE;
    } else {
        wait_for_others("warp", line);
    }
    if (operation == SHIM_SYNC) order_acquire(sync);
    return now.threads[self].answer;
}

/* ---- Blocks -------------------------------------------------------------- */

static void finish_thread(void) {
    now.threads[now.running].finished = true;
    now.finished++;
}

/* The block is ordered after everything before the launch, but not after other blocks. */
static void thread_main(void) {
    order_acquire(&now.at);
    now.entry(now.params, now.workspace);
    finish_thread();
    end_fiber();
}

static void report_waiting(void) {
    unsigned first = 0, other;
    while (now.threads[first].finished) first++;
    const thread *const a = &now.threads[first];
    for (other = first; other < now.block.x; other++) {
        const thread *const b = &now.threads[other];
        if (!b->finished && (b->line != a->line || b->waits_for != a->waits_for)) break;
    }
    char more[80] = "";
    if (other < now.block.x) {
        const thread *const b = &now.threads[other];
        snprintf(more, sizeof more, ", thread %u waits for its %s at line %d", other, b->waits_for,
                 b->line);
    }
    fail("%u of %u threads have returned, but thread %u waits for its %s at line %d%s",
         now.finished, now.block.x, first, a->waits_for, a->line, more);
}

/* Fibers and memory that may be reused only after the launch. An earlier reuse would make
 * ThreadSanitizer see an order that does not exist. */
struct retired {
    std::vector<fiber> fibers;
    std::vector<void *> memory;
};

static void *get_memory(size_t bytes, retired *used) {
    void *memory;
    if (posix_memalign(&memory, 128, bytes) != 0) abort();
    used->memory.push_back(memory);
    return memory;
}

static void open_rendezvous(rendezvous *m, retired *used) {
    *m = {};
    m->line = NO_LINE;
    m->sync = (uint64_t *)get_memory(2 * sizeof *m->sync, used);
}

void shim_unset(void *p, size_t bytes) {
    memset(p, 0xff, bytes);
#ifdef SHIM_MSAN
    __msan_poison(p, bytes);
#endif
}

static void run_block(unsigned shared, retired *used) {
    now.shared = (unsigned char *)get_memory(shared, used);
    shim_unset(now.shared, shared);
    open_rendezvous(&now.all, used);
    now.finished = now.first = now.waiting = 0;
    for (unsigned i = 0; i < now.block.x; i++) {
        if (i % WARP == 0) open_rendezvous(&now.warps[i / WARP], used);
        now.threads[i] = {};
        fiber_open(&now.threads[i].context, thread_main);
        make_ready(i);
    }
    order_release(&now.at);
    while (now.waiting > 0 && !now.failed) {
        now.running = next_ready();
        fiber_switch(&now.scheduler, &now.threads[now.running].context);
    }
    if (!now.failed && now.finished < now.block.x) report_waiting();
    for (unsigned i = 0; i < now.block.x; i++) {
        fiber_free(&now.threads[i].context);
        used->fibers.push_back(now.threads[i].context);
    }
}

long shim_params_size(const char *name) {
    const shim_registration *const k = find_kernel(name);
    return k ? (long)k->size : -1;
}

const char *shim_kernel(size_t i) {
    const shim_registration *k = kernels;
    while (k && i-- > 0) k = k->next;
    return k ? k->name : nullptr;
}

static uint64_t blocks_until_stop = UINT64_MAX;

void shim_stop_after(unsigned blocks) { blocks_until_stop = blocks; }

int shim_launch(const char *name, const void *params, size_t size, char *workspace,
                const unsigned grid[3], unsigned block, unsigned shared) {
    const shim_registration *const k = find_kernel(name);
    const uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    now.failed = false;
    now.at = {};
    if (!k) {
        fail("%s: no such kernel", name);
        return 98;
    }
    if (size != k->size || block == 0 || block % WARP || block > MOST_THREADS || blocks == 0 ||
        grid[0] > INT32_MAX || grid[1] > 65535 || grid[2] > 65535 || shared > 99 << 10) {
        fail("%s: %zu bytes of parameters, wanted %zu; %u,%u,%u blocks; %u threads, at most %u; "
             "%u bytes of shared memory",
             name, size, k->size, grid[0], grid[1], grid[2], block, MOST_THREADS, shared);
        return 1;
    }
    retired used;
    void *const copy = get_memory(size, &used);
    memcpy(copy, params, size);
    now.grid = {grid[0], grid[1], grid[2]};
    now.block = {block, 1, 1};
    now.entry = k->entry;
    now.params = copy;
    now.workspace = workspace;
    now.random = seed;
    fiber_here(&now.scheduler);
    for (uint64_t i = 0; i < blocks && !now.failed; i++) {
        const uint64_t at = (i + seed * 7919) % blocks;
        if (i == blocks_until_stop) {
            fail("%s: stopped after %llu blocks", name, (unsigned long long)i);
            blocks_until_stop = UINT64_MAX;
            break;
        }
        now.at = {(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]),
                  (unsigned)(at / grid[0] / grid[1])};
        run_block(shared, &used);
    }
    order_acquire(&now.finished);
    for (fiber &f : used.fibers) fiber_forget(&f);
    fiber_free(&now.scheduler);
    for (void *room : used.memory) free(room);
    return now.failed ? 719 : 0;
}
