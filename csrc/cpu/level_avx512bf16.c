/* level_avx512bf16.c - the CPU kernels (table.inc) compiled for AVX-512 with dot products of bf16
 * pairs, and of bytes: Cooper Lake, Zen 4 and later. */
#if defined(__x86_64__)
#include "../run.h"

#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((                                                                                \
        target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni"))),        \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")
#endif

#define LEVEL avx512bf16
#define H2O_VEC_AVX512
#define H2O_DOT_BF16
#define H2O_DOT_BYTES
#define ROWS_OF avx512
#include "table.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
