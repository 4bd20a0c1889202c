/* level_avx512bf16.c - the CPU kernels (table.inc) compiled for AVX-512 with dot products of bf16
 * pairs and of bytes: Cooper Lake, Zen 4 and later. */
#include "level_target.h"

#if defined(__x86_64__)
H2O_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")

#define LEVEL avx512bf16
#define H2O_VEC_AVX512
#define H2O_DOT_BF16
#define H2O_DOT_BYTES
#define ROWS_OF avx512
#include "table.inc"

H2O_TARGET_END
#endif
