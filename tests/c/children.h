/* children.h - child processes of a test. Windows has no fork: tests that need it are left out. */
#ifndef H2O_TEST_CHILDREN_H
#define H2O_TEST_CHILDREN_H

#include "test.h"

#if defined(_WIN32)

#include <process.h>
#include <sys/types.h>

static inline pid_t fork(void) { return -1; }
static inline int wait_for(pid_t child) { return (int)child; }
static inline void alarm(int seconds) { (void)seconds; }

#else

#include <sys/wait.h>
#include <unistd.h>

/* A child's exit status, or -1 if a signal ended it. */
static inline int wait_for(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#endif

/* Whether a process with threads can be forked here. ThreadSanitizer does not support it. Under
 * AddressSanitizer (GCC 12's allocator holds a lock over the fork in one run of ten) and in an
 * emulator, a child sometimes waits forever for one of their locks, not ours. */
static inline bool can_fork_threads(void) {
#if defined(_WIN32)
    const bool can = false;
#else
    const bool can = !THREAD_SANITIZER && !ADDRESS_SANITIZER && getenv("H2O_TEST_EMULATED") == NULL;
#endif
    if (!can) puts("forks of a process with threads are not tested here");
    return can;
}

#endif
