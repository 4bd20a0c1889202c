/* expect.h - preconditions that callers within a kernel must satisfy. Builds with a sanitizer or
 * with -DH2O_EXPECT check them; in other builds they cost nothing. */
#ifndef H2O_EXPECT_H
#define H2O_EXPECT_H

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define H2O_EXPECT
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define H2O_EXPECT
#endif

#ifdef H2O_EXPECT
#include <stdio.h>
#include <stdlib.h>

static inline void h2o_expect(int holds, const char *condition, const char *file, int line) {
    if (holds) return;
    fprintf(stderr, "%s:%d: not as expected: %s\n", file, line, condition);
    abort();
}

#define EXPECT(condition) h2o_expect((condition) ? 1 : 0, #condition, __FILE__, __LINE__)
#else
#define EXPECT(condition) ((void)sizeof(condition))
#endif

#endif
