/* level_neonbf16.c - the CPU kernels (table.inc) compiled for aarch64 with dot products of bf16
 * pairs (FEAT_BF16) and matrix products of bytes (FEAT_I8MM): Neoverse V1 and N2, Apple M2 and
 * later. */
#include "level_target.h"

#if defined(H2O_LEVELS_ARM_DOT)
H2O_TARGET_BEGIN("arch=armv8.2-a+dotprod+bf16+i8mm")

#define LEVEL neonbf16
#define H2O_VEC_NEON
#define H2O_DOT_BF16
#define H2O_DOT_BYTES
#define H2O_MATRIX_BYTES
#define ROWS_OF neon
#include "table.inc"

H2O_TARGET_END
#endif
