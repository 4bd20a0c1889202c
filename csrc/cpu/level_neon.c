/* level_neon.c - the CPU kernels (table.inc) for aarch64: Advanced SIMD, which all of them have. */
#if defined(__aarch64__)
#include "../run.h"

#define LEVEL neon
#define H2O_VEC_NEON
#include "table.inc"
#endif
