/* level_target.h - what each level for a part of the processors of a family includes first, by way of
 * level_x86.h or level_arm.h: macros around the part of a source file that is compiled for some
 * features of the processor, and the system headers, which have to stand before that part. */
#ifndef H2O_LEVEL_TARGET_H
#define H2O_LEVEL_TARGET_H

#include "../run.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

/* features: a string of the compilers' names, separated by commas. */
#define H2O_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define H2O_TARGET_BEGIN(features)                                                                 \
    H2O_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define H2O_TARGET_END H2O_PRAGMA(clang attribute pop)
#else
#define H2O_TARGET_BEGIN(features) H2O_PRAGMA(GCC push_options) H2O_PRAGMA(GCC target(features))
#define H2O_TARGET_END H2O_PRAGMA(GCC pop_options)
#endif

#endif
