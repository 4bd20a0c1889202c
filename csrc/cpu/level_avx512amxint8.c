/* level_avx512amxint8.c - the decode step (table.inc) compiled for AVX-512 with AMX, a matrix unit
 * for bytes and bf16: Sapphire Rapids and later. Everything else comes from level_avx512bf16.c. */
#include "level_target.h"

#if defined(H2O_LEVEL_AMX)
H2O_TARGET_BEGIN(
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-int8,"
    "amx-bf16")

#define LEVEL avx512amxint8
#define H2O_VEC_AVX512
#define H2O_DOT_BF16
#define H2O_DOT_BYTES
#define H2O_TILE_BYTES
#define ROWS_OF avx512
#define REST_OF h2o_ops_avx512bf16
#include "table.inc"

H2O_TARGET_END
#endif
