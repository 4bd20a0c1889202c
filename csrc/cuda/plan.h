/* plan.h - what to launch for an operation: kernels, sizes of grids and of memory. A plan follows
 * from the shapes of a checked call alone; no tensor is read. Counters in the workspace must be
 * cleared before the launch.
 *
 *     attend        prepare, forward (or known, if the log sums are known), sums
 *     evict         evict, move (if many rows can move)
 *     step          one kernel
 *     simulate      prepare, forward, sums, open, then for each window: logits, rows, values */
#ifndef H2O_CUDA_PLAN_H
#define H2O_CUDA_PLAN_H

#include "kernels_simulate.h"

enum { CUDA_MOST_LAUNCHES = 7, CUDA_KERNELS = 44 };

/* The names of all kernels. Those that use tensor cores with bfloat16 exist only for compute
 * capability 8.0 and higher. */
extern const char *const cuda_kernel_names[CUDA_KERNELS];

/* A kernel has two parameters: `size` bytes of parameters by value, and the workspace. */
typedef struct {
    int kernel; /* its index in cuda_kernel_names */
    const void *params;
    size_t size;
    unsigned grid[3], block, shared; /* threads of a block, bytes of its dynamic shared memory */
} cuda_launch;

/* Launches, in order, on one stream. They point to the call's parameters and into the plan. */
typedef struct {
    size_t workspace, counted; /* bytes, and bytes at its beginning that must be 0 */
    int64_t depth;             /* the largest head dimension that these kernels support */
    int capability;            /* the lowest that has these kernels, 10 * major + minor */
    int count;                 /* of launch[], of which the last `repeated` ... */
    int repeated;              /* ... are repeated as a group, ... */
    int64_t repeats;           /* ... this many times after the first */
    cuda_launch launch[CUDA_MOST_LAUNCHES];
    h2o_attend_params dense; /* simulate: its dense part, as a call of attend */
} cuda_plan;

/* The number of launches including repeated ones, and launch i of these. */
H2O_INLINE int64_t cuda_plan_launches(const cuda_plan *plan) {
    return plan->count + plan->repeated * plan->repeats;
}

H2O_INLINE const cuda_launch *cuda_plan_launch(const cuda_plan *plan, int64_t i) {
    if (i < plan->count) return &plan->launch[i];
    return &plan->launch[plan->count - plan->repeated + (i - plan->count) % plan->repeated];
}

/* params: those of the operation. */
void cuda_plan_call(h2o_operation operation, const void *params, cuda_plan *plan);

#endif
