/* test_vec_avx2.c - the vector layer of level_avx2.c and its products of bytes, if the processor has
 * them. */
#define _GNU_SOURCE
#include "h2o.h"

#include "test.h"

#if defined(__x86_64__)
#include "cpu/level_target.h"

H2O_TARGET_BEGIN("avx2,fma,f16c")

#define H2O_VEC_AVX2
#define H2O_DOT_BYTES
#define H2O_DOT_WORDS
#include "vec.inc"
#include "vec_bytes.inc"

H2O_TARGET_END

int main(void) {
    h2o_error error;
    CHECK(unsetenv("H2O_CPU") == 0 && h2o_init(&error) == H2O_OK);
    if (has_level("avx2")) {
        test_layer();
        test_products_of_bytes();
    } else {
        puts("no avx2 here: its vector layer is not tested");
    }
    return 0;
}
#else
int main(void) { return 0; }
#endif
