/* level_neondot.c - the decode step (table.inc) compiled for aarch64 with dot products of bytes
 * (FEAT_DotProd): Cortex-A75, Neoverse N1, Apple A11 and later. Everything else comes from
 * level_neon.c. */
#include "level_target.h"

#if defined(H2O_LEVELS_ARM_DOT)
H2O_TARGET_BEGIN("arch=armv8.2-a+dotprod")

#define LEVEL neondot
#define H2O_VEC_NEON
#define H2O_DOT_BYTES
#define ROWS_OF neon
#define REST_OF h2o_ops_neon
#include "table.inc"

H2O_TARGET_END
#endif
