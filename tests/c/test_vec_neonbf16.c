/* test_vec_neonbf16.c - the vector layer of level_neonbf16.c and its products of bytes, if the
 * processor has them. */
#define _GNU_SOURCE
#include "h2o.h"

#include "test.h"

#if defined(H2O_LEVELS_ARM_DOT)
#include "cpu/level_target.h"

H2O_TARGET_BEGIN("arch=armv8.2-a+dotprod+bf16+i8mm")

#define H2O_VEC_NEON
#define H2O_DOT_BF16
#define H2O_DOT_BYTES
#define H2O_MATRIX_BYTES
#include "vec.inc"
#include "vec_bytes.inc"

H2O_TARGET_END

int main(void) {
    h2o_error error;
    CHECK(unsetenv("H2O_CPU") == 0 && h2o_init(&error) == H2O_OK);
    if (has_level("neonbf16")) {
        test_layer();
        test_products_of_bytes();
    } else {
        puts("no neonbf16 here: its vector layer is not tested");
    }
    return 0;
}
#else
int main(void) { return 0; }
#endif
