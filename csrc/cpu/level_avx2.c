/* level_avx2.c - the CPU kernels (table.inc) compiled for AVX2, FMA and F16C: Haswell, Zen and
 * later. */
#if defined(__x86_64__)
#include "../run.h"

#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define LEVEL avx2
#define H2O_VEC_AVX2
#include "table.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
