/* test_vec_generic.c - the vector layer of level_generic.c. */
#include "h2o.h"

#include "test.h"

#include <math.h>

#include "vec.inc"

int main(void) {
    test_layer();
    return 0;
}
