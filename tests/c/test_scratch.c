/* test_scratch.c - workspace is aligned, whole, reused, and never shared. */
#define _GNU_SOURCE
#include "run.h"

#include "children.h"

#include <pthread.h>
#include <string.h>

static void blocks_are_aligned_and_whole(void) {
    const size_t sizes[] = {0, 1, 63, 64, 65, 4096, 1000003, (size_t)80 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *const memory = h2o_scratch_acquire(sizes[i]);
        CHECK(memory != NULL && (uintptr_t)memory % 64 == 0);
        CHECK(sizes[i] < 4 << 20 || (uintptr_t)memory % (2 << 20) == 64); /* huge pages */
        memset(memory, 1, sizes[i]);
        h2o_scratch_release(memory);
    }
    CHECK(h2o_scratch_acquire(SIZE_MAX) == NULL);
    CHECK(h2o_scratch_acquire(SIZE_MAX - 100) == NULL);
    h2o_scratch_release(NULL);
}

static void a_released_block_is_used_again(void) {
    void *const first = h2o_scratch_acquire(100000);
    void *const second = h2o_scratch_acquire(100000);
    CHECK(first != second);
    h2o_scratch_release(first);
    CHECK(h2o_scratch_acquire(99000) == first);
    h2o_scratch_release(first);
    h2o_scratch_release(second);
    void *const small = h2o_scratch_acquire(100); /* no waste of a large block */
    CHECK(small != first && small != second);
    h2o_scratch_release(small);
}

/* Uses more and larger blocks than are kept. All of them must be released in the end, or
 * AddressSanitizer's check for leaks fails. */
static void many_blocks_come_and_go(void) {
    void *blocks[40];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 40; i++) {
            blocks[i] = h2o_scratch_acquire((size_t)(i + round + 1) << 17);
            CHECK(blocks[i] != NULL);
        }
        for (int i = 0; i < 40; i++) h2o_scratch_release(blocks[i]);
    }
}

#if defined(__linux__)

static size_t resident_bytes(void) {
    size_t pages = 0;
    FILE *const file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%*s %zu", &pages) == 1);
    fclose(file);
    return pages << 12;
}

enum { HOLDERS = 8 };

static pthread_barrier_t all_hold;

static void *hold_blocks(void *unused) {
    for (size_t mega = 4; mega < 32; mega++) {
        void *const block = h2o_scratch_acquire(mega << 20);
        memset(block, 1, mega << 20);
        pthread_barrier_wait(&all_hold);
        h2o_scratch_release(block);
        pthread_barrier_wait(&all_hold);
    }
    return unused;
}

/* Of blocks that threads have held at the same time, no more than the kept ones may remain. malloc,
 * which has a heap for each thread, would keep most of them. */
static void released_blocks_go_back_to_the_system(void) {
    pthread_t threads[HOLDERS];
    const size_t before = resident_bytes();
    CHECK(pthread_barrier_init(&all_hold, NULL, HOLDERS) == 0);
    for (int i = 0; i < HOLDERS; i++) {
        CHECK(pthread_create(&threads[i], NULL, hold_blocks, NULL) == 0);
    }
    for (int i = 0; i < HOLDERS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(resident_bytes() < before + ((size_t)72 << 20));
}

#else
static void released_blocks_go_back_to_the_system(void) {}
#endif

static void *use_blocks(void *seed) {
    test_random random = {.state = (uintptr_t)seed};
    for (int repeat = 0; repeat < 500; repeat++) {
        const size_t bytes = (size_t)random_int(&random, 1, 50000);
        const int mark = (int)random_int(&random, 0, 255);
        uint8_t *const memory = h2o_scratch_acquire(bytes);
        CHECK(memory != NULL);
        memset(memory, mark, bytes);
        for (size_t i = 0; i < bytes; i += 97) CHECK(memory[i] == mark);
        CHECK(memory[bytes - 1] == mark);
        h2o_scratch_release(memory);
    }
    return NULL;
}

static void threads_and_children_may_use_it_at_once(void) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) {
        CHECK(pthread_create(&threads[i], NULL, use_blocks, (void *)(i + 1)) == 0);
    }
    const int forks = can_fork_threads() ? 10 : 0;
    for (int repeat = 0; repeat < forks; repeat++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(60); /* a child that hangs fails */
            use_blocks((void *)(uintptr_t)9);
            _exit(0);
        }
        CHECK(wait_for(child) == 0);
    }
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(void) {
    blocks_are_aligned_and_whole();
    a_released_block_is_used_again();
    many_blocks_come_and_go();
    if (!is_slow()) released_blocks_go_back_to_the_system(); /* sanitizers keep pages themselves */
    threads_and_children_may_use_it_at_once();
    return 0;
}
