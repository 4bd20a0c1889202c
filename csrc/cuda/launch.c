/* launch.c - the operations on CUDA devices: each is a plan (plan.h) that the driver is handed.
 *
 * Nothing waits for the device, nothing is allocated, and no tensor is read; so a graph can
 * capture all of it. */
#include "launch.h"

#include "driver.h"
#include "plan.h"

int h2o_cuda_load(int32_t device, h2o_error *error) {
    cuda_stay stay;
    const int status = cuda_enter(device, &stay, error);
    if (status == H2O_OK) cuda_leave(&stay);
    return status;
}

enum { MOST_BLOCKS = 65535 }; /* along y and z */

/* Kernels know these sizes only; lost is narrower where a device has no float64, and a tensor that
 * is only imagined has no memory. */
static bool is_served(const h2o_view *leader, const h2o_dims *dims, const h2o_view *lost) {
    const bool narrow = lost != NULL && lost->dtype != H2O_F64;
    return dims->D <= CUDA_DEPTH && dims->H <= MOST_BLOCKS && dims->G <= MOST_BLOCKS &&
           dims->B <= MOST_BLOCKS && leader->data != NULL && !narrow;
}

static int launch(const cuda_plan *plan, const h2o_view *leader, const h2o_exec *exec,
                  h2o_error *error) {
    cuda_stay stay;
    int status = cuda_enter(leader->device_id, &stay, error);
    if (status != H2O_OK) return status;
    status = cuda_clear(exec->workspace, plan->cleared, exec->stream, error);
    for (int i = 0; i < plan->count && status == H2O_OK; i++) {
        status = cuda_start(&stay, &plan->launch[i], exec->workspace, exec->stream, error);
    }
    cuda_leave(&stay);
    return status;
}

/* counts: the host cannot know them. */
#define DEFINE(op, leader, lost)                                                                   \
    static size_t op##_workspace(const h2o_##op##_params *params, const h2o_exec *exec) {          \
        cuda_plan plan;                                                                            \
        (void)exec;                                                                                \
        if (!is_served(&params->leader, &params->dims, lost)) return H2O_UNSERVED;                 \
        cuda_plan_##op(params, &plan);                                                             \
        return plan.workspace;                                                                     \
    }                                                                                              \
    static int op(const h2o_##op##_params *params, const h2o_exec *exec, h2o_error *error) {       \
        h2o_##op##_params own = *params;                                                           \
        cuda_plan plan;                                                                            \
        own.counts = (h2o_counts){0};                                                              \
        cuda_plan_##op(&own, &plan);                                                               \
        return launch(&plan, &params->leader, exec, error);                                        \
    }

DEFINE(attend, query, NULL)
DEFINE(evict, keys, &params->slots.lost)
DEFINE(step, query, &params->slots.lost)
DEFINE(simulate, query, NULL)

const h2o_ops h2o_ops_cuda = {
    .name = "cuda",
    .device_type = CUDA_DEVICE,
    .attend_workspace = attend_workspace,
    .attend = attend,
    .evict_workspace = evict_workspace,
    .evict = evict,
    .step_workspace = step_workspace,
    .step = step,
    .simulate_workspace = simulate_workspace,
    .simulate = simulate,
};
