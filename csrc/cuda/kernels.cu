/* kernels.cu - all kernels for NVIDIA GPUs as one translation unit: prepare, forward and sums of
 * attend; evict; step; and those of simulate.
 *
 * Each kernel is extern "C", with the name under which plan.c launches it. It gets the operation's
 * parameters by value and a workspace, laid out as in kernels.h and kernels_simulate.h. */
#include "attend.cuh"
#include "evict.cuh"
#include "simulate.cuh"
#include "step.cuh"
