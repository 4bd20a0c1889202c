/* emulated.c - the kernels for GPUs on the memory of the host, in the place of the CPU's level
 * "generic": whatever is linked with this instead goes through them. Launches as a driver would,
 * but at once. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/plan.h"
#include "run.h"

int shim_launch(const char *name, const void *params, size_t size, char *workspace,
                const unsigned grid[3], unsigned block, unsigned shared);
const char *shim_error(void);
void shim_unset(void *p, size_t bytes);

/* The workspace is a block of its own, of the size that was asked for and full of what is no
 * number, but for what is to be cleared. */
static int launch(const cuda_plan *plan, h2o_error *error) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    char *const workspace = malloc(plan->workspace);
    int status = 0;
    pthread_mutex_lock(&one_at_a_time);
    shim_unset(workspace, plan->workspace);
    memset(workspace, 0, plan->cleared);
    for (int i = 0; i < plan->count && status == 0; i++) {
        const cuda_launch *const l = &plan->launch[i];
        status =
            shim_launch(l->kernel, l->params, l->size, workspace, l->grid, l->block, l->shared);
        if (status != 0) {
            fprintf(stderr, "%s: %s\n", l->kernel, shim_error());
            h2o_fail(error, H2O_EBACKEND, "%s: %s", l->kernel, shim_error());
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
    const h2o_operation_row *const row = &h2o_operations[operation];
    h2o_params copy;
    cuda_plan plan;
    (void)exec;
    memcpy(&copy, params, row->size);
    memset((char *)&copy + row->counts, 0, sizeof(h2o_counts)); /* which the host cannot know */
    cuda_plan_call(operation, &copy, &plan);
    return launch(&plan, error);
}

const h2o_ops h2o_ops_generic = {.name = "generic", .workspace = workspace, .run = run};
