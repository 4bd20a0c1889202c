/* launch.c - the operations on CUDA devices: each is a plan (plan.h) that is passed to the driver.
 *
 * Nothing waits for the device, nothing is allocated, and no tensor is read, so a graph can capture
 * every call. */
#include "launch.h"

#include <string.h>

#include "../tables.h"
#include "driver.h"

/* Opens the driver and loads all kernels for a device; otherwise the first call would do so. */
static int load(const void *image, size_t size, int32_t device, h2o_error *error) {
    cuda_scope scope;
    int status = cuda_take_image(image, size, error);
    if (status == H2O_OK) status = cuda_enter(device, &scope, error);
    if (status == H2O_OK) cuda_leave(&scope);
    return status;
}

enum { MOST_BLOCKS = 65535 }; /* along y and z of a grid */

/* Whether evicted_score is not float64, which is allowed for devices that have no float64. */
static bool has_narrow_sums(const h2o_operation_row *row, const void *params) {
    for (int i = 0; i < row->operand_count; i++) {
        const h2o_operand *const operand = &row->operands[i];
        if (operand->kind == H2O_OPERAND_SLOTS && !(operand->flags & H2O_ATTENDED)) {
            const h2o_slots *const slots = (const void *)((const char *)params + operand->offset);
            return slots->evicted_score.dtype != H2O_F64;
        }
    }
    return false;
}

/* Whether offsets are given, as an operand or with the slots. */
static bool has_offsets(const h2o_operation_row *row, const void *params) {
    for (int i = 0; i < row->operand_count; i++) {
        const h2o_operand *const operand = &row->operands[i];
        const void *const at = (const char *)params + operand->offset;
        if (operand->kind == H2O_OPERAND_SLOTS && h2o_given(&((const h2o_slots *)at)->offsets)) {
            return true;
        }
        if (operand->kind == H2O_OPERAND_TENSOR && strcmp(operand->name, "offsets") == 0 &&
            h2o_given((const h2o_view *)at)) {
            return true;
        }
    }
    return false;
}

/* Whether kernels support these sizes. They compute no log_sums and know no offsets, which
 * h2o.backends.cuda subtracts; a fake tensor has no memory. */
static bool is_served(const h2o_operation_row *row, const void *params) {
    const h2o_attend_params *const attend = params;
    if (row == h2o_operations[H2O_ATTEND] && h2o_given(&attend->log_sums)) return false;
    if (has_offsets(row, params)) return false;
    const h2o_dims *const dims = (const void *)((const char *)params + row->dims);
    return dims->D <= CUDA_WIDE && dims->R <= CUDA_GROUP && dims->S < CUDA_SLOTS &&
           dims->H <= MOST_BLOCKS && dims->G <= MOST_BLOCKS && dims->B <= MOST_BLOCKS &&
           h2o_leader(row, params)->data != NULL && !has_narrow_sums(row, params);
}

static size_t workspace(h2o_operation operation, const void *params, const h2o_exec *exec) {
    const h2o_operation_row *const row = h2o_operations[operation];
    const h2o_dims *const dims = (const void *)((const char *)params + row->dims);
    cuda_plan plan;
    (void)exec;
    if (!is_served(row, params)) return H2O_UNSERVED;
    cuda_plan_call(operation, params, &plan);
    if (dims->D > plan.depth) return H2O_UNSERVED;
    return cuda_has(h2o_leader(row, params)->device_id, &plan) ? plan.workspace : H2O_UNSERVED;
}

static int launch(const cuda_plan *plan, int32_t device, const h2o_exec *exec, h2o_error *error) {
    cuda_scope scope;
    int status = cuda_enter(device, &scope, error);
    if (status != H2O_OK) return status;
    if (plan->counted > 0) status = cuda_clear(exec->workspace, plan->counted, exec->stream, error);
    for (int64_t i = 0; i < cuda_plan_launches(plan) && status == H2O_OK; i++) {
        const cuda_launch *const next = cuda_plan_launch(plan, i);
        status = cuda_start(&scope, next, exec->workspace, exec->stream, error);
    }
    cuda_leave(&scope);
    return status;
}

static int run(h2o_operation operation, const void *params, const h2o_exec *exec,
               h2o_error *error) {
    const h2o_operation_row *const row = h2o_operations[operation];
    h2o_params copy;
    cuda_plan plan;
    memcpy(&copy, params, row->size);
    memset((char *)&copy + row->counts, 0, sizeof(h2o_counts)); /* the host does not know them */
    cuda_plan_call(operation, &copy, &plan);
    return launch(&plan, h2o_leader(row, params)->device_id, exec, error);
}

static const h2o_ops kernels = {.name = "cuda", .workspace = workspace, .run = run};

const h2o_device h2o_device_cuda = {
    .name = "cuda",
    .device_type = CUDA_DEVICE,
    .ops = &kernels,
    .open = cuda_open,
    .describe = cuda_describe,
    .load = load,
};
