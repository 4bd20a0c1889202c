/* level_avx512amx.c - the CPU kernels (table.inc) compiled for AVX-512 with AMX, a matrix unit for
 * bf16: Sapphire Rapids and later. The decode step comes from level_avx512amxint8.c. */
#include "level_target.h"

#if defined(H2O_LEVEL_AMX)
H2O_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

#define LEVEL avx512amx
#define H2O_VEC_AVX512
#define H2O_DOT_BF16
#define ROWS_OF avx512
#define H2O_TILE_BF16
#define STEP_OF h2o_ops_avx512amxint8
#include "table.inc"

H2O_TARGET_END
#endif
