/* dispatch.c - detects the processor's features and chooses the highest instruction set level of
 * the CPU kernels that it can run, or the one that H2O_CPU names.
 *
 * This happens once, at import. A feature counts as present if the processor has the
 * instructions and the operating system saves the registers that they use (XGETBV; Intel 64 and
 * IA-32 Architectures Software Developer's Manual, volume 1, sections 13.3 and 15.2). On
 * aarch64 the operating system reports the features.
 */
#include "run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Features: bits of the mask `present` -------------------------------- */

#if defined(__x86_64__)

#include <cpuid.h>

enum { LEAF_1_C, LEAF_7_B, LEAF_7_C, LEAF_7_D, LEAF_7_1_A, WORDS };
enum { NO_STATE = 0, YMM = 0x6, ZMM = 0xe6, TILES = 0x60000 }; /* bits of XCR0 */

static const struct {
    const char *name;
    int word, bit;
    uint32_t state; /* that the operating system must save */
} features[] = {
    {"sse4.2", LEAF_1_C, 20, NO_STATE}, {"avx2", LEAF_7_B, 5, YMM},
    {"fma", LEAF_1_C, 12, YMM},         {"f16c", LEAF_1_C, 29, YMM},
    {"avx512f", LEAF_7_B, 16, ZMM},     {"avx512bw", LEAF_7_B, 30, ZMM},
    {"avx512vl", LEAF_7_B, 31, ZMM},    {"avx512dq", LEAF_7_B, 17, ZMM},
    {"avx512_vnni", LEAF_7_C, 11, ZMM}, {"avx512_bf16", LEAF_7_1_A, 5, ZMM},
    {"amx_tile", LEAF_7_D, 24, TILES},  {"amx_int8", LEAF_7_D, 25, TILES},
    {"amx_bf16", LEAF_7_D, 22, TILES},
};

static uint32_t saved_state(uint32_t leaf_1_c) {
    if (!(leaf_1_c >> 27 & 1)) { /* no OSXSAVE: xgetbv may not be used */
        return NO_STATE;
    }
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Permission to use tiles is requested only if some level uses them. */
static bool may_use_tiles(void) {
#if defined(H2O_LEVEL_AMX)
    return h2o_may_use_tiles();
#else
    return false;
#endif
}

static uint32_t ask_processor(void) {
    uint32_t words[WORDS] = {0}, state = NO_STATE, present = 0, a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        words[LEAF_1_C] = c;
        state = saved_state(c);
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        words[LEAF_7_B] = b;
        words[LEAF_7_C] = c;
        words[LEAF_7_D] = d;
        if (a >= 1) { /* a: the highest subleaf */
            __cpuid_count(7, 1, a, b, c, d);
            words[LEAF_7_1_A] = a;
        }
    }
    if ((state & TILES) == TILES && !may_use_tiles()) state &= ~(uint32_t)TILES;
#if defined(H2O_SOFTWARE_TILES) /* tests/c/amx.h */
    state |= TILES;
    words[LEAF_7_D] |= 1u << 22 | 1u << 24 | 1u << 25;
#endif
    for (size_t i = 0; i < sizeof features / sizeof features[0]; i++) {
        const uint32_t has = words[features[i].word] >> features[i].bit & 1;
        present |= (has && (state & features[i].state) == features[i].state) << i;
    }
    return present;
}

#elif defined(__aarch64__)

static const struct {
    const char *name;
} features[] = {{"neon"}, {"dotprod"}, {"bf16"}, {"i8mm"}};

static uint32_t ask_processor(void) {
    uint32_t present = 1; /* every aarch64 processor has neon */
    for (size_t i = 1; i < sizeof features / sizeof features[0]; i++) {
        present |= (uint32_t)h2o_arm_has(features[i].name) << i;
    }
    return present;
}

#else

static const struct {
    const char *name;
} features[] = {{"portable"}};

static uint32_t ask_processor(void) { return 1; }

#endif

enum { FEATURES = sizeof features / sizeof features[0] };

/* ---- Levels ------------------------------------------------------------ */

/* From lowest to highest. Each level needs its own features and those of all lower levels. */
static const struct {
    const h2o_ops *ops;
    const char *needs[4];
} levels[] = {
    {&h2o_ops_generic, {NULL}},
#if defined(H2O_LEVELS_X86)
    {&h2o_ops_avx2, {"avx2", "fma", "f16c"}},
    {&h2o_ops_avx512, {"avx512f", "avx512bw", "avx512vl", "avx512dq"}},
    {&h2o_ops_avx512bf16, {"avx512_bf16", "avx512_vnni"}},
#if defined(H2O_LEVEL_AMX)
    {&h2o_ops_avx512amxint8, {"amx_tile", "amx_int8", "amx_bf16"}},
    {&h2o_ops_avx512amx, {"amx_bf16"}},
#endif
#elif defined(H2O_LEVELS_ARM)
    {&h2o_ops_neon, {"neon"}},
#if defined(H2O_LEVELS_ARM_DOT)
    {&h2o_ops_neondot, {"dotprod"}},
    {&h2o_ops_neonbf16, {"bf16", "i8mm"}},
#endif
#endif
};

enum { LEVELS = sizeof levels / sizeof levels[0] };

/* Written once, by h2o_init. */
static const h2o_ops *cpu_ops;
static const char *level_names[LEVELS + 1];
static char feature_names[128];

static bool is_present(uint32_t present, const char *name) {
    for (int i = 0; i < FEATURES; i++) {
        if (strcmp(features[i].name, name) == 0) {
            return present >> i & 1;
        }
    }
    return false;
}

static int count_levels(uint32_t present) {
    for (int level = 0; level < LEVELS; level++) {
        for (int i = 0; i < 4 && levels[level].needs[i]; i++) {
            if (!is_present(present, levels[level].needs[i])) {
                return level;
            }
        }
    }
    return LEVELS;
}

/* Appends a name to text [size], after a space unless it is the first. */
static void append_name(char *text, size_t size, const char *name) {
    const size_t length = strlen(text);
    snprintf(text + length, size - length, "%s%s", length ? " " : "", name);
}

/* The level that H2O_CPU names, or the highest. */
static int choose_level(int count, int *level, h2o_error *error) {
    const char *const wanted = getenv("H2O_CPU");
    char known[128] = "";
    *level = count - 1;
    if (!wanted || !*wanted) {
        return H2O_OK;
    }
    for (int i = 0; i < LEVELS; i++) {
        append_name(known, sizeof known, levels[i].ops->name);
        if (strcmp(wanted, levels[i].ops->name) == 0) {
            if (i >= count) {
                return h2o_fail(error, H2O_EBACKEND,
                                "H2O_CPU=%s: this machine has no %s; the highest level that it "
                                "can run is %s",
                                wanted, wanted, levels[count - 1].ops->name);
            }
            *level = i;
            return H2O_OK;
        }
    }
    return h2o_fail(error, H2O_EVALUE, "H2O_CPU=%.40s: no such level; the levels are %s", wanted,
                    known);
}

int h2o_init(h2o_error *error) {
    if (cpu_ops) {
        return H2O_OK;
    }
    const uint32_t present = ask_processor();
    const int count = count_levels(present);
    int level;
    const int status = choose_level(count, &level, error);
    if (status != H2O_OK) {
        return status;
    }
    feature_names[0] = '\0';
    for (int i = 0; i < FEATURES; i++) {
        if (present >> i & 1) {
            append_name(feature_names, sizeof feature_names, features[i].name);
        }
    }
    for (int i = 0; i < count; i++) {
        level_names[i] = levels[i].ops->name;
    }
    cpu_ops = levels[level].ops;
    return H2O_OK;
}

const h2o_ops *h2o_table(int32_t device_type) {
    return device_type == H2O_DEVICE_CPU ? cpu_ops : NULL;
}

const char *h2o_cpu_features(void) { return feature_names; }

const char *const *h2o_cpu_levels(void) { return level_names; }
