/* fiber.h - fibers: functions with a stack each, between which one thread of the operating system
 * switches. They run until they switch to another by themselves. */
#ifndef H2O_FIBER_H
#define H2O_FIBER_H

#include <cstddef>

struct fiber {
    void *stack;      /* its lowest address; NULL: that of the thread itself */
    void *pointer;    /* saved stack pointer or context */
    void *tsan_fiber; /* ThreadSanitizer's handle */
};

/* Opens a fiber that starts in function(), which never returns. fiber_free releases the stack;
 * fiber_forget, which may follow much later, ThreadSanitizer's handle. */
void fiber_open(fiber *f, void (*function)(void));
void fiber_free(fiber *f);
void fiber_forget(fiber *f);
void fiber_here(fiber *f); /* the running thread as one */
void fiber_switch(fiber *from, const fiber *to);

/* For ThreadSanitizer: what precedes a release is ordered before a later acquire of the address. */
void order_release(void *address);
void order_acquire(void *address);

#endif
