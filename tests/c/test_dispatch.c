/* test_dispatch.c - the choice of a level. h2o_init decides once per process, so each case runs in
 * a child process. */
#define _GNU_SOURCE
#include "run.h"

#include "children.h"

#include <string.h>

static void in_child(void (*test)(const char *), const char *argument) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        test(argument);
        _exit(0);
    }
    CHECK(wait_for(child) == 0);
}

static void without_wish_the_highest(const char *unused) {
    h2o_error error;
    (void)unused;
    CHECK(unsetenv("H2O_CPU") == 0);
    CHECK(h2o_table(1) == NULL); /* there is no table before h2o_init */
    CHECK(h2o_init(&error) == H2O_OK && h2o_init(&error) == H2O_OK);
    const char *const *levels = h2o_cpu_levels();
    CHECK(strcmp(levels[0], "generic") == 0);
    while (levels[1]) levels++;
    CHECK(strcmp(h2o_table(1)->name, *levels) == 0);
    CHECK(h2o_table(2) == NULL && h2o_table(0) == NULL);
    CHECK(strlen(h2o_cpu_features()) > 0);
}

/* A level is accepted if the machine has it, and rejected otherwise. */
static void with_wish_that_one(const char *level) {
    h2o_error error;
    CHECK(setenv("H2O_CPU", level, 1) == 0);
    if (h2o_init(&error) == H2O_OK) {
        CHECK(strcmp(h2o_table(1)->name, level) == 0 && has_level(level));
        return;
    }
    CHECK(error.status == H2O_EBACKEND && strstr(error.text, level));
    CHECK(unsetenv("H2O_CPU") == 0 && h2o_init(&error) == H2O_OK);
    CHECK(!has_level(level));
}

static void an_unknown_level_is_refused(const char *name) {
    h2o_error error;
    CHECK(setenv("H2O_CPU", name, 1) == 0);
    CHECK(h2o_init(&error) == H2O_EVALUE && error.status == H2O_EVALUE);
    CHECK(strstr(error.text, "H2O_CPU") && strstr(error.text, "generic"));
    CHECK(h2o_table(1) == NULL);
}

int main(void) {
    unsetenv("H2O_TEST_LEVEL"); /* this test is about all levels */
    static const char *const levels[] = {
        "generic",
#if defined(__x86_64__)
        "avx2",          "avx512",    "avx512bf16",
#if defined(H2O_LEVEL_AMX)
        "avx512amxint8", "avx512amx",
#endif
#elif defined(__aarch64__)
        "neon",
#if defined(H2O_LEVELS_ARM_DOT)
        "neondot",
        "neonbf16",
#endif
#endif
    };
    in_child(without_wish_the_highest, NULL);
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        in_child(with_wish_that_one, levels[i]);
    }
    in_child(an_unknown_level_is_refused, "avx9");
    in_child(an_unknown_level_is_refused, "AVX2, of whatever length the text may be, and longer");
    return 0;
}
