/* level_arm.h - included first by levels for newer aarch64 processors: see level_target.h. */
#ifndef H2O_LEVEL_ARM_H
#define H2O_LEVEL_ARM_H

#include "level_target.h"

#include <arm_neon.h>

#endif
