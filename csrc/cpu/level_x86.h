/* level_x86.h - included first by levels for x86-64: see level_target.h. */
#ifndef H2O_LEVEL_X86_H
#define H2O_LEVEL_X86_H

#include "level_target.h"

#include <immintrin.h>

#endif
