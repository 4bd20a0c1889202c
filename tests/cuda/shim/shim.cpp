/* shim.cpp - runs a kernel's blocks one after the other, and their threads as fibers. */
#include "shim.h"

#include <cstdarg>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "fiber.h"

enum { WARP = 32, MOST_THREADS = 1024, NO_LINE = -1 };

struct kernel {
    size_t size;
    shim_entry entry;
};

static std::map<std::string, kernel> &kernels(void) {
    static std::map<std::string, kernel> all;
    return all;
}

shim_registration::shim_registration(const char *name, size_t size, shim_entry entry) {
    kernels()[name] = {size, entry};
}

/* Those who wait for each other. */
struct meeting {
    unsigned arrived;
    int line;
    shim_operation operation;
    bool any;
    uint64_t words[WARP];
    int lanes[WARP];
};

struct thread {
    fiber own;
    unsigned index;
    bool gone;
    bool any;        /* what it was told by the block, ... */
    uint64_t answer; /* ... and by its warp */
};

/* The launch that is going on. */
static struct {
    shim_dim3 grid, block, at;
    kernel what;
    const void *params;
    char *workspace;
    unsigned char *shared;
    thread threads[MOST_THREADS];
    unsigned gone;
    meeting all, warps[MOST_THREADS / WARP];
    unsigned ready[MOST_THREADS]; /* a queue, in a ring */
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

/* Never comes back: whoever fails is not switched to again. */
static void leave(void) {
    fiber_switch(&now.threads[now.running].own, &now.scheduler);
    abort();
}

/* ---- Who runs ------------------------------------------------------------ */

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

static void wait_for_others(void) { fiber_switch(&now.threads[now.running].own, &now.scheduler); }

/* ---- What kernels call --------------------------------------------------- */

shim_dim3 shim_thread_index(void) { return {now.threads[now.running].index, 0, 0}; }
shim_dim3 shim_block_index(void) { return now.at; }
shim_dim3 shim_block_size(void) { return now.block; }
shim_dim3 shim_grid_size(void) { return now.grid; }
unsigned char *shim_shared(void) { return now.shared; }

void shim_misaligned(const void *p) {
    fail("thread %u: 16 bytes at %p, which is no multiple of 16", now.running, p);
    leave();
}

static void check_line(const meeting *m, const char *who, int line) {
    if (m->line == NO_LINE || m->line == line) return;
    fail("thread %u waits for its %s at line %d, others at line %d", now.running, who, line,
         m->line);
    leave();
}

bool shim_block(bool mine, int line) {
    meeting *const m = &now.all;
    const unsigned self = now.running;
    check_line(m, "block", line);
    m->line = line;
    m->any |= mine;
    order_release(m);
    if (++m->arrived == now.block.x) {
        for (unsigned i = 0; i < now.block.x; i++) {
            now.threads[i].any = m->any;
            if (i != self) make_ready(i);
        }
        m->arrived = 0; /* no memset, which a sanitizer would see */
        m->any = false;
        m->line = NO_LINE;
    } else {
        wait_for_others();
    }
    order_acquire(m);
    return now.threads[self].any;
}

static void answer_warp(const meeting *m, unsigned first) {
    uint64_t votes = 0;
    for (unsigned lane = 0; lane < WARP; lane++) votes |= (m->words[lane] & 1) << lane;
    for (unsigned lane = 0; lane < WARP; lane++) {
        now.threads[first + lane].answer =
            m->operation == SHIM_SHUFFLE ? m->words[m->lanes[lane] & 31] : votes;
    }
}

uint64_t shim_warp(shim_operation operation, uint64_t word, int lane, int line) {
    const unsigned self = now.running, first = self / WARP * WARP;
    meeting *const m = &now.warps[self / WARP];
    check_line(m, "warp", line);
    m->line = line;
    m->operation = operation;
    m->words[self - first] = word;
    m->lanes[self - first] = lane;
    if (operation == SHIM_SYNC) order_release(m);
    if (++m->arrived == WARP) {
        answer_warp(m, first);
        for (unsigned i = first; i < first + WARP; i++) {
            if (i != self) make_ready(i);
        }
        m->arrived = 0;
        m->line = NO_LINE;
    } else {
        wait_for_others();
    }
    if (operation == SHIM_SYNC) order_acquire(m);
    return now.threads[self].answer;
}

/* ---- Blocks -------------------------------------------------------------- */

static void thread_is_gone(void) {
    now.threads[now.running].gone = true;
    now.gone++;
}

/* What was before the block, and before the launch, is ordered; what other blocks do is not. */
static void thread_main(void) {
    order_acquire(&now.at);
    now.what.entry(now.params, now.workspace);
    order_release(&now.gone);
    thread_is_gone();
    leave();
}

static void blame_waiting(void) {
    for (unsigned i = 0; i < now.block.x; i++) {
        const meeting *const warp = &now.warps[i / WARP];
        if (now.threads[i].gone) continue;
        fail("%u of %u threads are gone, but thread %u waits at line %d", now.gone, now.block.x, i,
             now.all.arrived > 0 ? now.all.line : warp->line);
        return;
    }
}

/* What is not to be used again before the launch is over, since it would look ordered. */
struct leavings {
    std::vector<fiber> fibers;
    std::vector<void *> shared;
};

static void run_block(unsigned shared, leavings *used) {
    now.shared = (unsigned char *)aligned_alloc(16, (shared + 15) / 16 * 16);
    memset(now.shared, 0xff, shared);
    used->shared.push_back(now.shared);
    now.all = {};
    now.all.line = NO_LINE;
    now.gone = now.first = now.waiting = 0;
    for (unsigned i = 0; i < now.block.x; i++) {
        now.warps[i / WARP] = {};
        now.warps[i / WARP].line = NO_LINE;
        now.threads[i] = {};
        now.threads[i].index = i;
        fiber_open(&now.threads[i].own, thread_main);
        make_ready(i);
    }
    order_release(&now.at);
    while (now.waiting > 0 && !now.failed) {
        now.running = next_ready();
        fiber_switch(&now.scheduler, &now.threads[now.running].own);
    }
    if (!now.failed && now.gone < now.block.x) blame_waiting();
    for (unsigned i = 0; i < now.block.x; i++) {
        fiber_free(&now.threads[i].own);
        used->fibers.push_back(now.threads[i].own);
    }
}

long shim_params_size(const char *name) {
    const auto found = kernels().find(name);
    return found == kernels().end() ? -1 : (long)found->second.size;
}

int shim_launch(const char *name, const void *params, size_t size, char *workspace,
                const unsigned grid[3], unsigned block, unsigned shared) {
    const auto found = kernels().find(name);
    const uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    now.failed = false;
    now.at = {};
    if (found == kernels().end()) {
        fail("%s: no such kernel", name);
        return 98;
    }
    if (size != found->second.size || block == 0 || block % WARP || block > MOST_THREADS ||
        blocks == 0 || grid[1] > 65535 || grid[2] > 65535 || shared > 99 << 10) {
        fail("%s: %zu bytes of parameters, wanted %zu; %u threads; %u bytes of shared memory", name,
             size, found->second.size, block, shared);
        return 1;
    }
    const std::string copy((const char *)params, size);
    leavings used;
    now.grid = {grid[0], grid[1], grid[2]};
    now.block = {block, 1, 1};
    now.what = found->second;
    now.params = copy.data();
    now.workspace = workspace;
    now.random = seed;
    fiber_here(&now.scheduler);
    for (uint64_t i = 0; i < blocks && !now.failed; i++) {
        const uint64_t at = (i + seed * 7919) % blocks;
        now.at = {(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]),
                  (unsigned)(at / grid[0] / grid[1])};
        run_block(shared, &used);
    }
    order_acquire(&now.gone);
    for (fiber &f : used.fibers) fiber_forget(&f);
    for (void *room : used.shared) free(room);
    return now.failed ? 719 : 0;
}
