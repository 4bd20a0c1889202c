/* level_arm.h - what levels for newer aarch64 processors include first: see level_target.h. */
#ifndef H2O_LEVEL_ARM_H
#define H2O_LEVEL_ARM_H

#include "level_target.h"

#include <arm_neon.h>

#endif
