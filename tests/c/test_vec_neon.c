/* test_vec_neon.c - the vector layer of level_neon.c, on aarch64. */
#if defined(__aarch64__)
#include "h2o.h"

#include "test.h"

#include <math.h>

#define H2O_VEC_NEON
#include "vec.inc"

int main(void) {
    test_layer();
    return 0;
}
#else
int main(void) { return 0; }
#endif
