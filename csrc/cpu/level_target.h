/* level_target.h - included first by levels that not every processor of their family supports: macros
 * around the part of a source file that is compiled for some features of the processor, and the
 * system headers, which must precede that part. */
#ifndef H2O_LEVEL_TARGET_H
#define H2O_LEVEL_TARGET_H

#include "../run.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* features: the compilers' names of the features, in one string, separated by commas. */
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
