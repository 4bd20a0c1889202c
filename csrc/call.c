/* call.c - the stages of a call (run.h): h2o_validate checks it, h2o_measure gets the size of the
 * workspace that the kernel needs, h2o_open acquires the workspace, h2o_run runs the kernel and
 * h2o_close releases the memory. */
#include "devices.h"
#include "run.h"
#include "tables.h"

static int get_memory(const char *op, void **memory, size_t bytes, h2o_error *error) {
    if (bytes > 0 && (*memory = h2o_scratch_acquire(bytes)) == NULL) {
        return h2o_fail(error, H2O_EMEMORY, "%s: no memory for a workspace of %zu bytes", op,
                        bytes);
    }
    return H2O_OK;
}

static int check_offer(const char *op, const h2o_call *call, size_t bytes, h2o_error *error) {
    if (bytes == H2O_UNSERVED) {
        return h2o_fail(error, H2O_EBACKEND, "%s: no kernel of device \"%s\" supports such tensors",
                        op, call->table->name);
    }
    if (call->offered >= bytes) return H2O_OK;
    return h2o_fail(error, H2O_EVALUE, "workspace: has %zu bytes, %s needs %zu", call->offered, op,
                    bytes);
}

int h2o_validate(void *params, h2o_call *call, h2o_error *error) {
    const h2o_operation_row *const row = h2o_operations[call->operation];
    const h2o_view *const leader = h2o_leader(row, params);
    int status = row->check(params, error);
    if (status != H2O_OK) return status;
    if (call->queued) {
        call->table = h2o_device_table(leader->device_type);
        return call->table != NULL ? H2O_OK : h2o_fail_kernels(leader, error);
    }
    if (call->table == NULL) call->table = h2o_table(leader->device_type);
    if (call->table == NULL) return H2O_OK;
    const h2o_dims *const dims = (const h2o_dims *)(const void *)((char *)params + row->dims);
    const h2o_view *const mask = (const h2o_view *)(const void *)((char *)params + row->mask);
    status = get_memory(row->name, &call->counts, h2o_counts_bytes(dims, mask), error);
    return status != H2O_OK ? status : row->count(params, call->counts, error);
}

int h2o_measure(void *params, h2o_call *call, size_t *bytes, h2o_error *error) {
    const int status = h2o_validate(params, call, error);
    if (status != H2O_OK) return status;
    if (call->table == NULL) {
        return h2o_fail_kernels(h2o_leader(h2o_operations[call->operation], params), error);
    }
    if (call->exec.workers == 0) call->exec.workers = h2o_threads();
    if (call->exec.run == NULL) call->exec.run = h2o_parallel;
    *bytes = call->table->workspace(call->operation, params, &call->exec);
    return H2O_OK;
}

int h2o_open(void *params, h2o_call *call, h2o_error *error) {
    const char *const op = h2o_operations[call->operation]->name;
    size_t bytes = 0;
    const int status = h2o_measure(params, call, &bytes, error);
    if (status != H2O_OK) return status;
    if (call->queued) return check_offer(op, call, bytes, error);
    return get_memory(op, &call->exec.workspace, bytes, error);
}

int h2o_run(const void *params, const h2o_call *call, h2o_error *error) {
    return call->table->run(call->operation, params, &call->exec, error);
}

void h2o_close(h2o_call *call) {
    if (!call->queued) h2o_scratch_release(call->exec.workspace);
    h2o_scratch_release(call->counts);
}
