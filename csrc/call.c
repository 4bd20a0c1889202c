/* call.c - one call of an operation, from its checks to its end. */
#include "run.h"

static int get_memory(const char *op, void **memory, size_t bytes, h2o_error *error) {
    if (bytes > 0 && (*memory = h2o_scratch_acquire(bytes)) == NULL) {
        return h2o_fail(error, H2O_EMEMORY, "%s: no memory for a workspace of %zu bytes", op,
                        bytes);
    }
    return H2O_OK;
}

static bool is_device(const h2o_ops *table) { return table != NULL && table->device_type != 0; }

static int check_table(const h2o_ops *table, const h2o_view *leader, h2o_error *error) {
    if (!is_device(table) || leader->device_type == table->device_type) return H2O_OK;
    return h2o_fail_kernels(leader, error);
}

static int check_offer(const char *op, const h2o_call *call, size_t bytes, h2o_error *error) {
    if (bytes == H2O_UNSERVED) {
        return h2o_fail(error, H2O_EBACKEND, "%s: no kernel of device \"%s\" serves such tensors",
                        op, call->table->name);
    }
    if (call->offered >= bytes) return H2O_OK;
    return h2o_fail(error, H2O_EVALUE, "workspace: has %zu bytes, %s wants %zu", call->offered, op,
                    bytes);
}

#define DEFINE_CALL(op, leader)                                                                    \
    int h2o_judge_##op(h2o_##op##_params *params, h2o_call *call, h2o_error *error) {              \
        int status = h2o_check_##op(params, error);                                                \
        if (call->table == NULL) call->table = h2o_table(params->leader.device_type);              \
        if (status != H2O_OK || call->table == NULL) return status;                                \
        if (is_device(call->table)) return check_table(call->table, &params->leader, error);       \
        const size_t bytes = h2o_counts_bytes(&params->dims, &params->mask);                       \
        status = get_memory(#op, &call->counts, bytes, error);                                     \
        return status != H2O_OK ? status : h2o_count_##op(params, call->counts, error);            \
    }                                                                                              \
    int h2o_measure_##op(h2o_##op##_params *params, h2o_call *call, size_t *bytes,                 \
                         h2o_error *error) {                                                       \
        const int status = h2o_judge_##op(params, call, error);                                    \
        if (status != H2O_OK) return status;                                                       \
        if (call->table == NULL) return h2o_fail_kernels(&params->leader, error);                  \
        if (call->exec.workers == 0) call->exec.workers = h2o_threads();                               \
        if (call->exec.run == NULL) call->exec.run = h2o_parallel;                                 \
        *bytes = call->table->op##_workspace(params, &call->exec);                                 \
        return H2O_OK;                                                                             \
    }                                                                                              \
    int h2o_open_##op(h2o_##op##_params *params, h2o_call *call, h2o_error *error) {               \
        size_t bytes = 0;                                                                          \
        const int status = h2o_measure_##op(params, call, &bytes, error);                          \
        if (status != H2O_OK) return status;                                                       \
        if (is_device(call->table)) return check_offer(#op, call, bytes, error);                   \
        return get_memory(#op, &call->exec.workspace, bytes, error);                               \
    }                                                                                              \
    int h2o_run_##op(const h2o_##op##_params *params, const h2o_call *call, h2o_error *error) {    \
        return call->table->op(params, &call->exec, error);                                        \
    }

DEFINE_CALL(attend, query)
DEFINE_CALL(evict, keys)
DEFINE_CALL(step, query)
DEFINE_CALL(simulate, query)

void h2o_close(h2o_call *call) {
    if (!is_device(call->table)) h2o_scratch_release(call->exec.workspace);
    h2o_scratch_release(call->counts);
}
