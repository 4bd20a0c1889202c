/* test_vec_neondot.c - the products of bytes of level_neondot.c, if the processor has them. */
#define _GNU_SOURCE
#include "h2o.h"

#include "test.h"

#if defined(H2O_LEVELS_ARM_DOT)
#include "cpu/level_target.h"

H2O_TARGET_BEGIN("arch=armv8.2-a+dotprod")

#define H2O_VEC_NEON
#define H2O_DOT_BYTES
#include "vec_bytes.inc"

H2O_TARGET_END

int main(void) {
    h2o_error error;
    CHECK(unsetenv("H2O_CPU") == 0 && h2o_init(&error) == H2O_OK);
    if (has_level("neondot")) {
        test_products_of_bytes();
    } else {
        puts("no neondot here: its products of bytes are not tested");
    }
    return 0;
}
#else
int main(void) { return 0; }
#endif
