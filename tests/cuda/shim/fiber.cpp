/* fiber.cpp - see fiber.h. On x86-64 a switch saves and restores the callee-saved registers (System
 * V ABI), a dozen instructions. Elsewhere, and with SHIM_UCONTEXT, a switch is swapcontext.
 *
 * ThreadSanitizer must not instrument this file and shim.cpp, because the scheduler's accesses are
 * not the kernels'. With SHIM_TSAN these files announce fibers and orderings to it. */
#include "fiber.h"
#include "guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#if !defined(__x86_64__) || defined(SHIM_UCONTEXT)
#define UCONTEXT
#include <ucontext.h>
#endif

#ifdef SHIM_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
}
enum { SWITCH_WITHOUT_ORDER = 1 };
void order_release(void *address) { __tsan_release(address); }
void order_acquire(void *address) { __tsan_acquire(address); }
static void *tsan_create(void) { return __tsan_create_fiber(0); }
static void *tsan_current(void) { return __tsan_get_current_fiber(); }
static void tsan_destroy(void *tsan_fiber) { __tsan_destroy_fiber(tsan_fiber); }
static void tsan_switch(const fiber *to) {
    __tsan_switch_to_fiber(to->tsan_fiber, SWITCH_WITHOUT_ORDER);
}
#else
void order_release(void *) {}
void order_acquire(void *) {}
static void *tsan_create(void) { return nullptr; }
static void *tsan_current(void) { return nullptr; }
static void tsan_destroy(void *) {}
static void tsan_switch(const fiber *) {}
#endif

#ifdef SHIM_TSAN
static const size_t STACK = 96 << 10; /* its shadow takes time to clear */
#else
static const size_t STACK = 260 << 10; /* an odd number of pages, for the TLB */
#endif

/* AddressSanitizer keeps the marks of frames that never returned. */
static void clear_stack(void *stack) { guard_open(stack, STACK); }

static std::vector<void *> spare;

/* The lowest page of a stack is inaccessible, so that an overflow faults. */
static void *get_stack(void) {
    if (!spare.empty()) {
        void *const stack = spare.back();
        spare.pop_back();
        return stack;
    }
    void *const stack =
        mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, (size_t)getpagesize(), PROT_NONE) != 0) {
        perror("a fiber's stack");
        abort();
    }
    return stack;
}

void fiber_here(fiber *f) {
    *f = {nullptr, nullptr, tsan_current()};
#ifdef UCONTEXT
    f->pointer = new ucontext_t;
#endif
}

#ifndef UCONTEXT

/* Stacks begin at different lines of a page. Otherwise the stacks of a warp would share a few sets
 * of the cache. */
static size_t offset_of(const void *stack) { return 64 + (uintptr_t)stack / STACK % 32 * (9 * 64); }

extern "C" void shim_switch(void **from, void *to);
__asm__(".text\n"
        ".type shim_switch, @function\n"
        "shim_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\n"
        "mov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\n"
        "ret\n"
        ".size shim_switch, .-shim_switch\n");

void fiber_open(fiber *f, void (*function)(void)) {
    char *const stack = (char *)get_stack();
    void **top = (void **)(stack + STACK - offset_of(stack));
    *--top = nullptr; /* as if called, with a return address on an aligned stack */
    *--top = (void *)function;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    *f = {stack, top, tsan_create()};
}

__attribute__((noinline)) void fiber_switch(fiber *from, const fiber *to) {
    tsan_switch(to);
    shim_switch(&from->pointer, to->pointer);
}

#else

void fiber_open(fiber *f, void (*function)(void)) {
    ucontext_t *const context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = get_stack();
    context->uc_stack.ss_size = STACK;
    context->uc_link = nullptr;
    makecontext(context, function, 0);
    *f = {context->uc_stack.ss_sp, context, tsan_create()};
}

void fiber_switch(fiber *from, const fiber *to) {
    tsan_switch(to);
    swapcontext((ucontext_t *)from->pointer, (const ucontext_t *)to->pointer);
}

#endif

void fiber_forget(fiber *f) { tsan_destroy(f->tsan_fiber); }

void fiber_free(fiber *f) {
#ifdef UCONTEXT
    delete (ucontext_t *)f->pointer;
#endif
    if (!f->stack) return;
    clear_stack(f->stack);
#ifdef SHIM_TSAN
    munmap(f->stack, STACK); /* reuse by another fiber would look like a race */
#else
    spare.push_back(f->stack);
#endif
}
