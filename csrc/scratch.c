/* scratch.c - workspace that is kept between calls.
 *
 * A model calls the same few operations once per layer, so the same few sizes are requested again
 * and again. A new mapping for each would cost a page fault per 4 KiB. Instead, released blocks
 * stay in a list, the most recent first, and a request takes the smallest one that is large
 * enough. The list never holds more than KEEP_BYTES in KEEP_BLOCKS blocks: the blocks that have
 * been unused longest go back to the system, so that one very long prompt leaves nothing behind.
 * Blocks of MAP_FROM bytes or more are separate mappings, since malloc would keep freed memory.
 */
#include "guard.h"
#include "run.h"

#include <pthread.h>

enum {
    ALIGNMENT = 64,
    KEEP_BLOCKS = 16,
    MAP_FROM = 1 << 20,
    HUGE_PAGE = 2 << 20,
    HUGE_FROM = 2 * HUGE_PAGE
};

static const size_t KEEP_BYTES = (size_t)64 << 20;

/* The header of a block, ALIGNMENT bytes before the memory that the caller gets. */
typedef struct block {
    struct block *next; /* in the list of released blocks */
    size_t bytes;       /* usable by the caller */
} block;

_Static_assert(sizeof(block) <= ALIGNMENT, "the header fits in front of the block");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *released;

static void lock_list(void) { pthread_mutex_lock(&lock); }
static void unlock_list(void) { pthread_mutex_unlock(&lock); }

/* If the process forked while another thread holds the lock, the child would wait for that thread
 * forever. */
__attribute__((constructor)) static void survive_fork(void) {
    h2o_at_fork(lock_list, unlock_list, unlock_list);
}

/* Removes and returns the smallest block of at least `bytes`, or NULL. Blocks of more than eight
 * times that size are left for larger requests. */
static block *take(size_t bytes) {
    block **best = NULL;
    for (block **at = &released; *at; at = &(*at)->next) {
        const size_t size = (*at)->bytes;
        if (size >= bytes && size / 8 <= bytes && (!best || size < (*best)->bytes)) {
            best = at;
        }
    }
    if (!best) {
        return NULL;
    }
    block *const fitting = *best;
    *best = fitting->next;
    return fitting;
}

/* Cuts the list after the blocks that may be kept, and returns the rest. */
static block *trim(void) {
    size_t bytes = 0;
    int blocks = 0;
    block **at = &released;
    while (*at && blocks < KEEP_BLOCKS && (*at)->bytes <= KEEP_BYTES - bytes) {
        bytes += (*at)->bytes;
        blocks++;
        at = &(*at)->next;
    }
    block *const rest = *at;
    *at = NULL;
    return rest;
}

/* AddressSanitizer finds leaks and uses after free only in memory from malloc. */
static bool is_mapped(size_t total) { return GUARD_BYTES == 0 && total >= MAP_FROM; }

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Large blocks use huge pages if the system allows it: a prompt's workspace has more small pages
 * than the TLB has entries. */
static block *allocate(size_t bytes) {
    const size_t alignment = bytes < HUGE_FROM ? ALIGNMENT : HUGE_PAGE;
    const size_t total = round_up(ALIGNMENT + bytes, alignment);
    block *const allocated =
        is_mapped(total) ? h2o_map(alignment, total) : h2o_allocate(alignment, total);
    if (!allocated) {
        return NULL;
    }
    if (alignment == HUGE_PAGE) {
        h2o_prefer_huge_pages(allocated, total);
    }
    allocated->bytes = total - ALIGNMENT;
    return allocated;
}

static void give_back(block *unused) {
    const size_t total = ALIGNMENT + unused->bytes;
    if (is_mapped(total)) {
        h2o_unmap(unused, total);
    } else {
        h2o_free(unused);
    }
}

void *h2o_scratch_acquire(size_t bytes) {
    if (bytes > SIZE_MAX / 2) {
        return NULL;
    }
    lock_list();
    block *acquired = take(bytes);
    unlock_list();
    if (!acquired) {
        acquired = allocate(bytes);
    }
    if (!acquired) {
        return NULL;
    }
    guard_open((char *)acquired + ALIGNMENT, acquired->bytes);
    return (char *)acquired + ALIGNMENT;
}

void h2o_scratch_release(void *memory) {
    if (!memory) {
        return;
    }
    block *const workspace = (block *)(void *)((char *)memory - ALIGNMENT);
    if (workspace->bytes > KEEP_BYTES) {
        give_back(workspace);
        return;
    }
    lock_list();
    workspace->next = released;
    released = workspace;
    block *rest = trim();
    unlock_list();
    while (rest) {
        block *const next = rest->next;
        give_back(rest);
        rest = next;
    }
}
