/* no_level.c - replaces level_<name>.c if the processor lacks its instructions: an entry for the
 * list of levels that can be linked but not run. Built with -DLEVEL=<name>. */
#include "run.h"

#define JOIN(a, b) a##b
#define TABLE(level) JOIN(h2o_ops_, level)
#define TEXT(level) #level
#define NAME(level) TEXT(level)

const h2o_ops TABLE(LEVEL) = {.name = NAME(LEVEL)};
