/* level_generic.c - what any processor runs: four floats at a time, with the
 * instructions that the compiler uses by default. */
#include "../h2o.h"

#define LEVEL generic
#include "table.inc"
