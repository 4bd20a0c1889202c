/* test_expect.c - preconditions are checked in builds with a sanitizer, and only there. */
#define _GNU_SOURCE
#include "expect.h"

#include "children.h"

enum { CHECKED = THREAD_SANITIZER || ADDRESS_SANITIZER || MEMORY_SANITIZER };

static int times;

static int counted(int value) {
    times++;
    return value;
}

int main(void) {
    EXPECT(counted(1));
    CHECK(times == (CHECKED ? 1 : 0));
#if !defined(_WIN32)
    const pid_t child = fork();
    if (child == 0) {
        EXPECT(counted(0));
        _exit(0);
    }
    CHECK(wait_for(child) == (CHECKED ? -1 : 0)); /* -1: ended by a signal */
#endif
    return 0;
}
