/* no_level.c - in the place of level_<name>.c where the processor lacks its instructions: what the
 * list of levels is linked with, and nothing to run. Built with -DLEVEL=<name>. */
#include "run.h"

#define JOIN(a, b) a##b
#define TABLE(level) JOIN(h2o_ops_, level)
#define TEXT(level) #level
#define NAME(level) TEXT(level)

const h2o_ops TABLE(LEVEL) = {.name = NAME(LEVEL)};
