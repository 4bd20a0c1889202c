/* fiber.h - fibers: functions with a stack each, between which one thread of the operating system
 * switches. A fiber runs until it switches to another. */
#ifndef H2O_FIBER_H
#define H2O_FIBER_H

#include <cstddef>

struct fiber {
    void *stack;      /* its lowest address; NULL: the thread's own stack */
    void *pointer;    /* saved stack pointer or context */
    void *tsan_fiber; /* ThreadSanitizer's handle */
};

/* Opens a fiber that starts in function(), which never returns. fiber_free releases the stack.
 * fiber_forget releases ThreadSanitizer's handle, and may follow much later. */
void fiber_open(fiber *f, void (*function)(void));
void fiber_free(fiber *f);
void fiber_forget(fiber *f);
void fiber_here(fiber *f); /* the running thread as a fiber */
void fiber_switch(fiber *from, const fiber *to);

/* For ThreadSanitizer: accesses before a release are ordered before a later acquire of the
 * address. */
void order_release(void *address);
void order_acquire(void *address);

#endif
