/* emulated.c - the GPU kernels, emulated (shim.h), in place of the CPU's kernels. This file defines
 * the level "generic" instead of csrc/cpu, so a core linked with it runs every operation on host
 * tensors through the emulation. Each call plans its launches as csrc/cuda does, and runs them at
 * once. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/plan.h"
#include "run.h"
#include "tables.h"

int shim_launch(const char *name, const void *params, size_t size, char *workspace,
                const unsigned grid[3], unsigned block, unsigned shared);
const char *shim_error(void);
void shim_unset(void *p, size_t bytes);

/* The workspace is a heap block of the requested size. As on a GPU, size and address are multiples
 * of 256. It is filled with 0xff. */
static int launch(const cuda_plan *plan, h2o_error *error) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    char *const workspace = aligned_alloc(256, plan->workspace);
    int status = 0;
    pthread_mutex_lock(&one_at_a_time);
    shim_unset(workspace, plan->workspace);
    memset(workspace, 0, plan->counted);
    for (int64_t i = 0; i < cuda_plan_launches(plan) && status == 0; i++) {
        const cuda_launch *const l = cuda_plan_launch(plan, i);
        const char *const name = cuda_kernel_names[l->kernel];
        status = shim_launch(name, l->params, l->size, workspace, l->grid, l->block, l->shared);
        if (status != 0) {
            fprintf(stderr, "%s: %s\n", name, shim_error());
            h2o_fail(error, H2O_EBACKEND, "%s: %s", name, shim_error());
        }
    }
    pthread_mutex_unlock(&one_at_a_time);
    free(workspace);
    return status == 0 ? H2O_OK : H2O_EBACKEND;
}

static size_t workspace(h2o_operation operation, const void *params, const h2o_exec *exec) {
    (void)operation, (void)params, (void)exec;
    return 0;
}

static int run(h2o_operation operation, const void *params, const h2o_exec *exec,
               h2o_error *error) {
    const h2o_operation_row *const row = h2o_operations[operation];
    h2o_params copy;
    cuda_plan plan;
    const h2o_dims *const dims = (const void *)((const char *)params + row->dims);
    (void)exec;
    memcpy(&copy, params, row->size);
    memset((char *)&copy + row->counts, 0, sizeof(h2o_counts)); /* the host cannot know these */
    cuda_plan_call(operation, &copy, &plan);
    if (dims->D > plan.depth) {
        return h2o_fail(error, H2O_EBACKEND, "no kernel for a head dimension of %lld",
                        (long long)dims->D);
    }
    return launch(&plan, error);
}

const h2o_ops h2o_ops_generic = {.name = "generic", .workspace = workspace, .run = run};
