/* level_avx512.c - the CPU kernels (table.inc) compiled for AVX-512 F, BW, VL, DQ: Skylake-SP and
 * later. */
#include "level_target.h"

#if defined(__x86_64__)
H2O_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")

#define LEVEL avx512
#define H2O_VEC_AVX512
#include "table.inc"

H2O_TARGET_END
#endif
