/* level_avx512amx.c - the CPU kernels (table.inc) compiled for AVX-512 with AMX, a matrix unit for
 * bf16: Sapphire Rapids and later. The decode step is that of level_avx512bf16.c. */
#include "../run.h"

#if defined(H2O_LEVEL_AMX)
#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((                                                                                \
        target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")
#endif

#define LEVEL avx512amx
#define H2O_VEC_AVX512
#define H2O_DOT_BF16
#define ROWS_OF avx512
#define H2O_TILE_BF16
#define STEP_OF h2o_ops_avx512bf16
#include "table.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
