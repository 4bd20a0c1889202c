/* fiber.h - stacks that one thread of the operating system switches between. */
#ifndef H2O_FIBER_H
#define H2O_FIBER_H

#include <cstddef>

struct fiber {
    void *stack;   /* its lowest address; NULL: the thread that began */
    void *pointer; /* where it stopped */
    void *known;   /* as ThreadSanitizer knows it */
};

/* One that begins in function(), which never returns. Its stack may be given back long before
 * ThreadSanitizer is told that it is over. */
void fiber_open(fiber *f, void (*function)(void));
void fiber_free(fiber *f);
void fiber_forget(fiber *f);
void fiber_here(fiber *f); /* the running thread as one */
void fiber_switch(fiber *from, const fiber *to);

/* What happened before a release happened before an acquire of the same place. */
void order_release(void *place);
void order_acquire(void *place);

#endif
