/* call.c - one call of an operation, from its checks to its end. */
#include "run.h"

static int get_memory(const char *op, void **memory, size_t bytes, h2o_error *error) {
    if (bytes > 0 && (*memory = h2o_scratch_acquire(bytes)) == NULL) {
        return h2o_fail(error, H2O_EMEMORY, "%s: no memory for a workspace of %zu bytes", op,
                        bytes);
    }
    return H2O_OK;
}

#define DEFINE_CALL(op, leader)                                                                    \
    int h2o_judge_##op(h2o_##op##_params *params, h2o_call *call, h2o_error *error) {              \
        int status = h2o_check_##op(params, error);                                                \
        if (call->table == NULL) call->table = h2o_table(params->leader.device_type);              \
        if (status != H2O_OK || call->table == NULL) return status;                                \
        const size_t bytes = h2o_counts_bytes(&params->dims, &params->mask);                       \
        status = get_memory(#op, &call->counts, bytes, error);                                     \
        return status != H2O_OK ? status : h2o_count_##op(params, call->counts, error);            \
    }                                                                                              \
    int h2o_open_##op(h2o_##op##_params *params, h2o_call *call, h2o_error *error) {               \
        const int status = h2o_judge_##op(params, call, error);                                    \
        if (status != H2O_OK) return status;                                                       \
        if (call->table == NULL) return h2o_fail_kernels(&params->leader, error);                  \
        if (call->exec.lanes == 0) call->exec.lanes = h2o_threads();                               \
        if (call->exec.run == NULL) call->exec.run = h2o_parallel;                                 \
        return get_memory(#op, &call->exec.workspace,                                              \
                          call->table->op##_workspace(params, &call->exec), error);                \
    }                                                                                              \
    int h2o_run_##op(const h2o_##op##_params *params, const h2o_call *call, h2o_error *error) {    \
        return call->table->op(params, &call->exec, error);                                        \
    }

DEFINE_CALL(attend, query)
DEFINE_CALL(evict, keys)
DEFINE_CALL(step, query)
DEFINE_CALL(simulate, query)

void h2o_close(h2o_call *call) {
    h2o_scratch_release(call->exec.workspace);
    h2o_scratch_release(call->counts);
}
