/* level_avx2.c - the CPU kernels (table.inc) compiled for AVX2, FMA and F16C: Haswell, Zen and
 * later. */
#include "level_target.h"

#if defined(__x86_64__)
H2O_TARGET_BEGIN("avx2,fma,f16c")

#define LEVEL avx2
#define H2O_VEC_AVX2
#define H2O_DOT_BYTES
#define H2O_DOT_WORDS
#include "table.inc"

H2O_TARGET_END
#endif
