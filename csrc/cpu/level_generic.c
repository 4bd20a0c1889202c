/* level_generic.c - the CPU kernels (table.inc) for any processor: vectors of four floats, with the
 * instructions that the compiler uses by default. */
#include "../run.h"

#define LEVEL generic
#include "table.inc"
