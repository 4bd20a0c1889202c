/* level_neon.c - Advanced SIMD, which every aarch64 processor has. */
#if defined(__aarch64__)
#include "../run.h"

#define LEVEL neon
#define H2O_VEC_NEON
#include "table.inc"
#endif
