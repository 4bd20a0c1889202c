/* test_vec_avx512bf16.c - the vector layer of level_avx512bf16.c and its products of bytes, if the
 * processor has them. */
#define _GNU_SOURCE
#include "h2o.h"

#include "test.h"

#if defined(__x86_64__)
#include "cpu/level_target.h"

H2O_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")

#define H2O_VEC_AVX512
#define H2O_DOT_BF16
#define H2O_DOT_BYTES
#include "vec.inc"
#include "vec_bytes.inc"

H2O_TARGET_END

int main(void) {
    h2o_error error;
    CHECK(unsetenv("H2O_CPU") == 0 && h2o_init(&error) == H2O_OK);
    if (has_level("avx512bf16")) {
        test_layer();
        test_products_of_bytes();
    } else {
        puts("no avx512bf16 here: its vector layer is not tested");
    }
    return 0;
}
#else
int main(void) { return 0; }
#endif
