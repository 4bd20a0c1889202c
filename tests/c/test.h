/* test.h - shared by the C tests: checks that stop at the first failure, random numbers that are
 * the same on every machine, and the list of levels. */
#ifndef H2O_TEST_H
#define H2O_TEST_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32) /* has them under other names */
#define setenv(name, value, overwrite) _putenv_s(name, value)
#define unsetenv(name) _putenv_s(name, "") /* an empty value removes it */
#endif

#include "guard.h"
#include "run.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1 /* as gcc defines it */
#endif
#if __has_feature(memory_sanitizer)
#define __SANITIZE_MEMORY__ 1
#endif
#endif

#ifdef __SANITIZE_THREAD__
enum { THREAD_SANITIZER = 1 };
#else
enum { THREAD_SANITIZER = 0 };
#endif

#ifdef __SANITIZE_ADDRESS__
enum { ADDRESS_SANITIZER = 1 };
#else
enum { ADDRESS_SANITIZER = 0 };
#endif

#ifdef __SANITIZE_MEMORY__
enum { MEMORY_SANITIZER = 1 };
#else
enum { MEMORY_SANITIZER = 0 };
#endif

/* Whether answers are compared with plain loops. Under these two sanitizers, which check memory and
 * threads, the loops take minutes, and the same test checks the answers without a sanitizer. */
enum { JUDGED = !THREAD_SANITIZER && !ADDRESS_SANITIZER };

/* True in an emulator of another processor. Threads are tested without it. */
static inline bool is_emulated(void) { return getenv("H2O_TEST_EMULATED") != NULL; }

/* Whether a key/value head of a shape is compared with plain loops. In an emulator, where they take
 * most of the time, only every third head is. */
static inline bool is_judged(int64_t head) { return JUDGED && (!is_emulated() || head % 3 == 0); }

/* True under a sanitizer or in an emulator, where a case takes five to a hundred times as long. */
static inline bool is_slow(void) {
    return THREAD_SANITIZER || ADDRESS_SANITIZER || MEMORY_SANITIZER || is_emulated();
}

/* Whether a slow machine leaves out a dtype because the level computes with it as another level
 * does: a level of bf16 products differs only in these. */
static inline bool is_as_elsewhere(const char *level, bool is_bf16) {
    return is_slow() && strstr(level, "bf16") != NULL && !is_bf16;
}

/* On slow machines a case is tested with one of the three dtypes (the last is bf16): successive
 * cases with different ones, and no case with the same one under all sanitizers. */
static inline bool is_left_out(const char *level, size_t number, size_t dtype) {
    return is_as_elsewhere(level, dtype == 2) ||
           (is_slow() && dtype != (number + ADDRESS_SANITIZER) % 3);
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

typedef struct {
    uint64_t state;
} test_random;

/* splitmix64 (Steele, Lea and Flood, OOPSLA 2014). */
static inline uint64_t random_bits(test_random *random) {
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* An integer from low to high, both included. */
static inline int64_t random_int(test_random *random, int64_t low, int64_t high) {
    return low + (int64_t)(random_bits(random) % (uint64_t)(high - low + 1));
}

/* A float in [0, 1). */
static inline float random_float(test_random *random) {
    return (float)(random_bits(random) >> 40) * 0x1p-24f;
}

static inline void *test_alloc(size_t bytes) {
    void *const memory = calloc(1, bytes ? bytes : 1);
    CHECK(memory != NULL);
    return memory;
}

/* All levels that this processor family can have. */
static const h2o_ops *const levels[] = {
    &h2o_ops_generic,
#if defined(H2O_LEVELS_X86)
    &h2o_ops_avx2,          &h2o_ops_avx512,    &h2o_ops_avx512bf16,
#if defined(H2O_LEVEL_AMX)
    &h2o_ops_avx512amxint8, &h2o_ops_avx512amx,
#endif
#elif defined(H2O_LEVELS_ARM)
    &h2o_ops_neon,
#if defined(H2O_LEVELS_ARM_DOT)
    &h2o_ops_neondot,
    &h2o_ops_neonbf16,
#endif
#endif
};

enum { LEVELS = sizeof levels / sizeof *levels };

/* Whether this machine can run a level; call after h2o_init. If H2O_TEST_LEVEL is set, no other
 * level counts. Under ThreadSanitizer only the lowest and the highest do; together they contain
 * everything that threads share. */
static inline bool has_level(const char *level) {
    const char *const only = getenv("H2O_TEST_LEVEL");
    if (only && strcmp(only, level) != 0) return false;
    for (const char *const *name = h2o_cpu_levels(); *name; name++) {
        if (strcmp(*name, level) != 0) continue;
        return !THREAD_SANITIZER || name == h2o_cpu_levels() || name[1] == NULL;
    }
    return false;
}

#endif
