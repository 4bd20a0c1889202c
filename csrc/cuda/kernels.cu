/* kernels.cu - every kernel, as one file for the compiler. */
#include "attend.cuh"
#include "evict.cuh"
#include "simulate.cuh"
#include "step.cuh"
