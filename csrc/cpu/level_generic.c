/* level_generic.c - what any processor runs: four floats at a time, with the
 * instructions that the compiler uses by default. */
#include "../run.h"

#define LEVEL generic
#include "table.inc"
