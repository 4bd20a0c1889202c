/* attend.c - the operation attend: its operands in order, and the checks of a call. */
#include "operands.h"

static const h2o_operand operands[] = {
    H2O_TENSOR(attend, query, "BHQD", H2O_NONE, 0),
    H2O_TENSOR(attend, keys, "BGQD", H2O_NONE, 0),
    H2O_TENSOR(attend, values, "BGQD", H2O_NONE, H2O_OPTIONAL),
    H2O_TENSOR(attend, mask, "BQ", H2O_U8, H2O_OPTIONAL),
    {.name = "slots",
     .kind = H2O_OPERAND_SLOTS,
     .offset = offsetof(h2o_attend_params, slots),
     .flags = H2O_ATTENDED | H2O_OPTIONAL,
     .present = offsetof(h2o_attend_params, has_slots)},
    H2O_TENSOR(attend, out, "BQHD", H2O_NONE, H2O_WRITTEN),
    H2O_TENSOR(attend, scores, "BGQ", H2O_F32, H2O_WRITTEN),
    H2O_OPERAND(attend, scale, FLOAT),
    H2O_OPERAND(attend, softcap, FLOAT),
    H2O_OPERAND(attend, policy, POLICY),
    H2O_TENSOR(attend, sink_logits, "H", H2O_F32, H2O_OPTIONAL),
    H2O_TENSOR(attend, log_sums, "BHQ", H2O_F32, H2O_OPTIONAL | H2O_WRITTEN),
    H2O_TENSOR(attend, known_log_sums, "BHQ", H2O_F32, H2O_OPTIONAL),
};

static int check_attend(void *parameters, h2o_error *error) {
    h2o_attend_params *const params = parameters;
    int status;
    if ((status = h2o_check_logits(params->scale, params->softcap, error)) ||
        (status = h2o_check_operands(&h2o_operation_attend, params, error)) ||
        (status = h2o_share_values(&params->values, &params->keys,
                                   params->has_slots ? &params->slots : NULL, error)) ||
        !params->has_slots) {
        return status;
    }
    return h2o_check_rows(&params->slots.keys, &params->slots.values, &params->slots.offsets,
                          &params->slots.smoothing, params->dims.D, error);
}

static int count_attend(void *parameters, void *memory, h2o_error *error) {
    h2o_attend_params *const params = parameters;
    const h2o_counts_memory counted = h2o_count_tokens(memory, &params->dims, &params->mask);
    params->counts = (h2o_counts){.rows = counted.rows, .heads = counted.heads};
    if (!params->has_slots) return H2O_OK;
    return h2o_count_slots(&params->slots, &params->dims, &counted, error);
}

H2O_DEFINE_OPERATION(attend);
